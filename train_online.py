"""Online self-refining generation: bilevel selection of questions, BMO weights for answers.

    python train_online.py --lower noisy.jsonl --upper trusted.jsonl --model NAME --out runs/online
    python train_online.py                                           # the embedded toy
    torchrun --nproc-per-node 8 train_online.py --lower ...          # eight GPUs, the same run

Algorithm 1 of the paper. Offline selection throws a question away with its bad answer; here a
masked question keeps its place, the current model answers it again every K_gen steps, and the G
answers count by their importance ratio r:

    theta <- theta - beta  ( grad L_val + gamma_k mean_i W_i(omega) (1/G) sum_g r^g grad L_{i,g} )
    omega <- omega - alpha gamma_k grad_omega mean_i W_i(omega) (1/G) sum_g L_{i,g}(theta^{k+1})

Rows that are not masked train as in train_offline.py, whose deviations 1-7 hold here too. More:
 8. Rows are drawn uniformly as in Algorithm 1; Eq. penalty_problem_BSG normalises masked and
    unmasked rows apart.
 9. The first refresh is before the first step: read literally, Algorithm 1 has no answers until
    k = K_gen. `--first-refresh K` trains on the originals up to step K.
10. The ratio is one of sequence probabilities, sums over tokens, at temperature 1, scored by the
    training forward; the sampler's log-probs are never used. It is clamped, see bmo_weights.py.
11. Only the masked rows that the next K_gen steps read are answered; the mask is fixed and the
    permutations are seeded in between, so the others would be overwritten unread.
12. The dynamic mask is the bottom R of the weights at each refresh. At the first step all weights
    are equal and it is a random one; `--sticky-mask` keeps rows once masked.
13. theta_hat of `--correction` descends the lower loss with r = 1: r is a weight of theta.
14. `--masked drop` and `original` are the controls. Sampled at temperature 1 with a summed loss,
    the expected ratio-weighted gradient is exactly zero: part of what generation gains may simply
    be that the bad answers are gone, and `drop` shows how much.
15. omega judges a masked row's new answers. In the ranking at the end its original counts by the
    implicit weight (Eq. explicit_data_logit) at the final model, among the masked rows.
"""

import argparse
import math
import time

import torch
from tqdm import tqdm

import common
import curate
import data
import loading
import utils
from bmo_weights import (
    MAX_LOG_RATIO,
    clamped,
    effective_sample_size,
    importance_ratio,
    response_weights,
)
from eval import row_losses
from generate import generate
from logprobs import sequence_logprobs
from selector import Selector, dynamic_mask, static_mask
from utils import UserError

# Beside the defaults below, which are the published ones of the quality task.
PRESETS = {name: values | {"generation_batch": 16 if name.endswith("safety") else 64}
           for name, values in common.PRESETS.items()}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Online self-refining generation. Published values in brackets.")
    add = parser.add_argument_group("method").add_argument
    add("--mask", choices=("static", "dynamic"), default="static", help="(static; safety: dynamic)")
    add("--ratio-masked", type=float, default=0.1, help="R, share of masked rows (0.05, 0.1, 0.2)")
    add("--num-answers", type=int, default=1, help="G, answers to a masked question (1, 5)")
    add("--k-gen", type=int, default=500, help="K_gen, steps between refreshes (500)")
    add("--first-refresh", type=int, default=0, help="step of the first refresh")
    add("--sticky-mask", action="store_true", help="a row once masked stays masked")
    add("--masked", choices=("generate", "drop", "original"), default="generate",
        help="the paper's method, or a control: no lower loss, or the original answer")
    add("--ratio", choices=("sequence", "token-mean", "lambda", "none"), default="sequence",
        help="weight of an answer: r, r of the mean token, G lambda, or one")
    add("--max-log-ratio", type=float, default=MAX_LOG_RATIO, help="clamp of |log r|")
    add("--generate", choices=("window", "all"), default="window",
        help="answer the masked rows of the next K_gen steps, or all of them")
    add("--temperature", type=float, default=0.8, help="(0.8)")
    add("--max-new-tokens", type=int, default=512, help="(512)")
    add("--generation-batch", type=int, help="answers at a time, which changes none of them (64, "
        "safety 16; default: by free memory on CUDA, 64 on the CPU)")
    add("--export-format", choices=curate.FORMATS, help="also write the curated rows for a trainer")
    common.add_arguments(parser)
    parser.set_defaults(method="online")
    args = common.parse(parser, argv, PRESETS)
    if not 0 < args.ratio_masked <= 1:
        raise UserError(f"--ratio-masked {args.ratio_masked}: R must lie in (0, 1]")
    for name in ("num_answers", "k_gen", "max_new_tokens", "generation_batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    if args.first_refresh < 0:
        raise UserError(f"--first-refresh {args.first_refresh}: a step, 0 or more")
    if not 0 < args.temperature < math.inf or not args.max_log_ratio > 0:
        raise UserError("--temperature and --max-log-ratio must be positive")
    if args.turns != "last":
        raise UserError("--turns all: an online run rewrites one answer a row; use --turns last")
    return args


def ratios(args, logps, lengths, old_logps):
    """r^g of answers (n, G), given log-probs now and at generation (Corollary importance_ratio).

    All (n, G), sums over tokens in nats. Also counts the clamped ones. `lambda` is G lambda (Lemma
    implicit_BMO), so that every choice has mean about one.
    """
    if args.ratio == "none":
        return torch.ones_like(logps), 0
    if args.ratio == "lambda":
        return response_weights(logps.detach()) * logps.shape[1], 0
    scale = lengths if args.ratio == "token-mean" else 1
    now, old = logps / scale, old_logps / scale
    return (importance_ratio(now, old, args.max_log_ratio),
            int(clamped(now, old, args.max_log_ratio).sum()))


def descend(args, model, parameters, optimizer, upper_batch, lower_batch, weights, rho,
            reference=None, use_ratio=True):
    """One step of `parameters` on (1 - rho) L_val + rho mean_i W_i (1/G) sum_g r^g L_{i,g}.

    lower_batch: one `Answers` a row, [] for a dropped one. weights (B_low,) W. Returns the losses
    before the step, upper (B_up,) and lower (B_low,) with plain means over answers; the weighted
    lower losses; the ratios used, their clamp count; the gradient norm before clipping. Each
    process runs its share of the rows; all return the same.
    """
    upper_losses, lower_losses = (weights.new_zeros(len(b)) for b in (upper_batch, lower_batch))
    plain_losses, num_clamped = torch.zeros_like(lower_losses), torch.tensor(0)
    used = weights.new_zeros(len(lower_batch), args.num_answers)
    upper_rows = [data.sequences([row]) for row in upper_batch]
    lower_rows = [answers.rows for answers in lower_batch]
    for up, low, rows in common.micro_batches(args, model, upper_rows, lower_rows):
        questions = [lower_batch[i] for i in low]
        logps, lengths = sequence_logprobs(model, data.pack(rows, model.device))
        count = sum(len(upper_rows[i]) for i in up)
        upper = common.upper_losses(args, logps[:count], lengths[:count],
                                    None if reference is None else reference[up])
        end = count + sum(len(answers.rows) for answers in questions)
        logps, lengths = logps[count:end], lengths[count:end]
        losses = -logps / lengths                                      # Eq. SFT_def, deviation 1
        owner = torch.tensor([q for q, answers in enumerate(questions) for _ in answers.rows],
                             dtype=torch.long, device=losses.device)
        counts = torch.bincount(owner, minlength=len(questions)).clamp_min(1)

        # --- lines 9-13: generated answers count by r, originals by one ---------------------------
        ratio = torch.ones_like(losses)
        written = [i for i in low if lower_batch[i].old_logps is not None]
        if written and use_ratio:
            new = torch.tensor([answers.old_logps is not None for answers in questions
                                for _ in answers.rows], device=losses.device)
            shape = (len(written), args.num_answers)
            old = torch.stack([lower_batch[i].old_logps for i in written]).to(logps)
            r, over = ratios(args, logps[new].view(shape), lengths[new].view(shape), old)
            ratio[new] = r.flatten()
            used[written] = r.to(used)
            num_clamped += over

        def mean(values, owner=owner, counts=counts):  # (1/G) sum_g, a question
            return torch.zeros(len(counts), dtype=values.dtype,
                               device=values.device).index_add(0, owner, values) / counts

        lower = mean(ratio * losses)
        # Divided by the whole step's counts: the gradient ignores how the batch was cut.
        loss = rho * (weights[low] * lower).sum() / len(lower_batch)
        if upper_batch:
            loss = loss + (1 - rho) * upper.sum() / len(upper_batch)
        loss.backward()
        upper_losses[up], lower_losses[low] = upper.detach(), lower.detach()
        plain_losses[low] = mean(losses.detach())
    utils.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    for values in (upper_losses, plain_losses, lower_losses, used, num_clamped):
        utils.all_sum(values)
    written = [use_ratio and answers.old_logps is not None for answers in lower_batch]
    return upper_losses, plain_losses, lower_losses, used[written], num_clamped.item(), norm


class Answers:
    """What a lower row trains on: its original row, G generated ones, or nothing (dropped)."""

    def __init__(self, rows, old_logps=None, step=None):
        self.rows, self.old_logps, self.step = rows, old_logps, step


def answer(args, model, lower, positions, row_ids, refresh, end_ids, step):
    """Lines 6-7: G answers for each row at `positions`, and their log-probs under this model."""
    prompts = [curate.prompt_of(row) for row in data.take(lower, positions)]
    jobs = [(i, g) for i in range(len(positions)) for g in range(args.num_answers)]
    written = utils.split(
        lambda prompts, seeds: generate(
            model, prompts, seeds, max_new_tokens=args.max_new_tokens,
            temperature=args.temperature, end_ids=end_ids, batch_size=args.generation_batch,
            label=f"refresh {refresh}"),
        [prompts[i] for i, _ in jobs],
        [f"{args.seed} {refresh} {row_ids[positions[i]]} {g}" for i, g in jobs])
    rows = [curate.answer_row(prompts[i], tokens)
            for (i, _), (tokens, _) in zip(jobs, written, strict=True)]
    losses, lengths = row_losses(model, rows, label="scoring answers")
    old_logps = (-losses.double() * lengths).view(-1, args.num_answers)
    group = args.num_answers
    return {position: Answers(rows[i * group:(i + 1) * group], old_logps[i], step)
            for i, position in enumerate(positions)}, written


def new_mask(args, selector, before, refresh):
    """Line 3: I_M. Static: drawn once; dynamic: the bottom R of the weights now."""
    generator = torch.Generator().manual_seed(
        int(utils.content_hash(str(args.seed), "mask", str(refresh)), 16) >> 1)
    if args.mask == "static":
        return before if before.any() else static_mask(
            len(selector.logits), args.ratio_masked, generator)
    mask = dynamic_mask(selector.logits, args.ratio_masked, generator)
    return mask | before if args.sticky_mask else mask


def main(argv=None):
    args = parse_args(argv)
    gammas = common.gammas(args)

    # --- data and model ---------------------------------------------------------------------------
    device = utils.join_processes(args.device)
    model_name = str(common.toy.MODEL) if args.toy else args.model
    tokenizer, config = loading.load_tokenizer(model_name), loading.load_config(model_name)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31
    levels = common.load_levels(args, tokenizer, context)
    lower, upper = data.tokens_only(levels.lower), data.tokens_only(levels.upper)
    row_ids = levels.lower["row_id"][:]
    end_ids = curate.end_tokens(levels.lower, tokenizer)
    print("trained tokens in brackets: " + data.show_example(lower[0], tokenizer))

    # --- computed at run time ---------------------------------------------------------------------
    num_rows = len(lower)
    steps_per_epoch = math.ceil(num_rows / args.batch)
    total_steps = steps_per_epoch * args.epochs
    num_masked = round(args.ratio_masked * num_rows)
    if args.first_refresh >= total_steps:
        raise UserError(f"--first-refresh {args.first_refresh}: the run has {total_steps} steps, "
                        "so no row would ever be masked")
    # Drawn before the first step, when all weights are equal, a dynamic mask is a random one.
    last_refresh = (total_steps - 1 - args.first_refresh) // args.k_gen * args.k_gen
    mask_is_ranked = args.mask == "dynamic" and args.first_refresh + last_refresh > 0
    if args.mask == "dynamic" and not mask_is_ranked:
        print("warning: --mask dynamic: the only refresh is before the first step, when all "
              "weights are equal, so the mask is a random one; make --k-gen smaller than "
              f"{total_steps}")
    if num_masked == 0:
        raise UserError(f"--ratio-masked {args.ratio_masked}: of {num_rows} rows none is masked")
    common.print_plan(args, levels, config, steps_per_epoch, total_steps)
    if args.masked == "generate":
        window = min(num_rows, args.k_gen * args.batch)
        print(f"generation: R {args.ratio_masked} x {num_rows} rows = {num_masked} masked; a "
              f"refresh every {args.k_gen} steps answers about "
              f"{round(num_masked * (window / num_rows if args.generate == 'window' else 1))} of "
              f"them {args.num_answers} times")
    curate.check_room(lower, args.max_new_tokens, context)  # the curated set is always written
    if args.dry_run:
        return
    utils.seed_everything(args.seed)
    base = loading.load_model(model_name, device, args.dtype, args.four_bit, on_host=args.fsdp)
    model = loading.add_lora(base, args.lora_rank, args.lora_alpha, args.adapter,
                             args.gradient_checkpointing)
    theta = [p for p in model.parameters() if p.requires_grad]
    theta_optimizer = loading.make_optimizer(args.optimizer, theta, args.lr)
    optimizers = {"theta": theta_optimizer}
    if args.correction:
        theta_hat = loading.add_twin(model, "theta_hat")
        hat_optimizer = loading.make_optimizer(args.optimizer, theta_hat, args.lr)
        optimizers["theta_hat"] = hat_optimizer
    if args.fsdp:
        loading.shard(model, device)
    selector = Selector(num_rows, args.omega_lr, args.omega_optimizer, args.center,
                        dtype=torch.float64 if args.dtype == "float64" else torch.float32,
                        device=device)

    # --- start or resume --------------------------------------------------------------------------
    out = utils.open_run(args.out, common.run_config(args, levels, device, model.dtype),
                         args.resume, common.FREE_TO_CHANGE)
    state = utils.load_checkpoint(out, model)
    step, buffer, num_answers = 0, {}, 0
    mask = torch.zeros(num_rows, dtype=torch.bool)
    if state is not None:
        step, mask, num_answers = state["step"], state["mask"], state["num_answers"]
        buffer = {position: Answers(*answers) for position, answers in state["buffer"].items()}
        selector.load_state_dict(state["selector"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state[name])
    base_losses = None if args.skip_scores else common.base_losses(model, levels.lower, out)
    reference = common.reference_margins(args, model, levels, out)
    common.base_metrics(args, model, levels, reference, out)
    metrics_file = utils.open_metrics(out, step)
    progress = tqdm(total=total_steps, initial=step, desc=args.method, unit="step")

    while step < total_steps:
        epoch, k = divmod(step, steps_per_epoch)
        gamma = gammas[epoch]
        rho = round(gamma / (1 + gamma), 12)  # 0.6, not 0.5999999999999999
        started, metrics = time.perf_counter(), {"step": step, "epoch": epoch, "rho": rho}

        # --- mask and generate: lines 3 and 5-8 ---------------------------------------------------
        refresh, since = divmod(step - args.first_refresh, args.k_gen)
        if since == 0 and refresh >= 0:
            before, mask = mask, new_mask(args, selector, mask, refresh)
            metrics["mask_churn"] = float((mask & ~before).sum() / mask.sum())
        if since == 0 and refresh >= 0 and args.masked == "generate":
            coming = mask.nonzero().flatten().tolist()
            if args.generate == "window":
                coming = common.coming_rows(num_rows, args, step, args.k_gen, total_steps)
                coming = [p for p in coming if mask[p]]
            buffer, written, count = {}, [], len(coming) * args.num_answers
            if count:  # a short window may read no masked row
                buffer, written = answer(args, model, lower, coming, row_ids, refresh, end_ids,
                                         step)
                metrics |= {"answers_complete": sum(done for _, done in written) / count,
                            "answers_empty": sum(len(t) == 1 and d for t, d in written) / count,
                            "answer_length": sum(len(t) for t, _ in written) / count}
                metrics |= common.answer_labels(levels.lower, coming, written, tokenizer,
                                                args.num_answers)
            metrics["answers"] = count
            num_answers += count
            metrics["time/generate"] = time.perf_counter() - started

        # --- sample: line 4 -----------------------------------------------------------------------
        lower_rows = data.permutation(num_rows, args.seed, epoch, stream=0)
        lower_rows = lower_rows[k * args.batch:][:args.batch]
        upper_rows = common.cycle(len(upper), step * args.batch, args.batch, args.seed)
        upper_batch = data.take(upper, upper_rows)
        masked = mask[lower_rows]
        lower_batch = [
            Answers([]) if is_masked and args.masked == "drop" else
            buffer[p] if is_masked and p in buffer else Answers([row])
            for p, row, is_masked in zip(lower_rows.tolist(), data.take(lower, lower_rows),
                                         masked.tolist(), strict=True)]
        present = torch.tensor([bool(answers.rows) for answers in lower_batch])
        weights = selector.weights(lower_rows)

        # --- theta: one step on (1 - rho) L_val + rho mean W (1/G) sum r L  (PBGD-1) --------------
        for group in (g for optimizer in optimizers.values() for g in optimizer.param_groups):
            group["lr"] = common.learning_rate(args, step, total_steps)
        upper_losses, plain_losses, lower_losses, used, num_clamped, grad_norm = descend(
            args, model, theta, theta_optimizer, upper_batch, lower_batch, weights, rho,
            reference["upper"][upper_rows] if args.upper_loss == "dpo" else None)
        common.check_finite(grad_norm, lower_losses, lower_rows, levels.lower, step, out)

        # --- omega: one step with C at theta^{k+1}, the plain mean over answers  (PBGD-2) ---------
        coefficients = plain_losses
        if args.omega_loss == "next":
            coefficients = mean_answer_losses(model, lower_batch)
        if args.correction and present.any():                            # deviations 7 and 13
            with loading.adapter(model, "theta_hat"):
                _, attainable, *_ = descend(args, model, theta_hat, hat_optimizer, [], lower_batch,
                                            weights, 1.0, use_ratio=False)
                if args.omega_loss == "next":
                    attainable = mean_answer_losses(model, lower_batch)
            coefficients = coefficients - args.correction * attainable.to(coefficients)
        common.check_finite(coefficients.sum(), coefficients, lower_rows, levels.lower, step, out)
        if present.any():  # a dropped row has no loss; the others keep their share 1 / B
            share = present.sum().item() / len(present)
            selector.step(lower_rows[present], coefficients.cpu()[present],
                          (1.0 if args.no_omega_gamma else gamma) * share)

        # --- log, evaluate, save ------------------------------------------------------------------
        weighted = (weights * lower_losses).cpu()
        lower_loss, upper_loss = weighted.mean().item(), upper_losses.mean().item()
        plain = plain_losses.cpu()
        metrics |= {"upper_loss": upper_loss, "lower_loss": lower_loss,
                    "loss": rho * lower_loss + (1 - rho) * upper_loss,
                    "lower_loss_masked": plain[masked & present].mean().item()
                    if (masked & present).any() else None,
                    "lower_loss_unmasked": plain[~masked].mean().item()
                    if (~masked).any() else None,
                    "masked_share": masked.double().mean().item(),
                    "ratio_mean": used.mean().item() if len(used) else None,
                    "ratio_max": used.max().item() if len(used) else None,
                    "ratio_ess": effective_sample_size(used.flatten()).item()
                    if len(used) else None,
                    "ratio_clamped": num_clamped, "grad_norm": grad_norm.item(),
                    "lr": theta_optimizer.param_groups[0]["lr"],
                    "tokens": sum(len(row["input_ids"]) for row in data.sequences(upper_batch))
                    + sum(len(row["input_ids"]) for q in lower_batch for row in q.rows)}
        step += 1
        if k == steps_per_epoch - 1:
            metrics |= common.held_out_metrics(args, model, levels, reference)
            metrics |= common.selector_report(selector, out, epoch + 1)
        metrics["time/step"] = time.perf_counter() - started
        utils.log_metrics(metrics_file, metrics)
        if step % args.save_every == 0 or step == total_steps:
            utils.save_checkpoint(out, step, model, {
                "selector": selector.state_dict(), "mask": mask, "num_answers": num_answers,
                "buffer": {p: [a.rows, a.old_logps, a.step] for p, a in buffer.items()},
                **{name: optimizer.state_dict() for name, optimizer in optimizers.items()}})
        progress.set_postfix(upper=upper_loss, lower=lower_loss, refresh=False)
        progress.update()
    progress.close()

    # --- the curated set, the ranking, the table, the result --------------------------------------
    def curated(ranks, kept):
        return {"answers_generated": num_answers} | curate.curated_set(
            args, out, model, levels, tokenizer, selector, mask, buffer, end_ids, ranks, kept)

    common.finish_run(args, out, model, levels, selector, base_losses, reference, mask, curated,
                      mask_is_ranked=mask_is_ranked)


def mean_answer_losses(model, lower_batch):
    """(1/G) sum_g L_{i,g}, no gradient, no ratio (C_omega), (B_low,); 0 for a dropped row."""
    rows = [row for answers in lower_batch for row in answers.rows]
    if not rows:
        return torch.zeros(len(lower_batch))
    losses, _ = row_losses(model, rows)
    parts = losses.split([len(answers.rows) for answers in lower_batch])
    return torch.stack([part.mean() if len(part) else losses.new_zeros(()) for part in parts])


if __name__ == "__main__":
    utils.run(main)
