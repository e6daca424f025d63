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
    k = K_gen. `--first-refresh K` trains on originals up to step K; a mask FILE drops them from
    step 0 on, except under generate and original.
10. The ratio is one of sequence probabilities, sums over tokens, at temperature 1, scored by the
    training forward; the sampler's log-probs are never used. It is clamped, see bmo_weights.py.
11. Only the masked rows that the next K_gen steps read are answered; the mask is fixed and the
    permutations are seeded in between, so the others would be overwritten unread.
12. The dynamic mask is the bottom R of the weights at each refresh; at the first step a random one.
13. theta_hat of `--correction` descends the lower loss with r = 1; answers' weights are theta's.
14. `--refine drop` and `original` are the controls. Sampled at temperature 1 with a summed loss,
    the expected ratio-weighted gradient is exactly zero: part of what generation gains may simply
    be that the bad answers are gone, and `drop` shows how much.
15. omega judges a masked row's new answers. In the ranking at the end its original counts by the
    implicit weight (Eq. explicit_data_logit) at the final model, among the masked rows.
16. Beyond the paper: `--refine accept` trains on answers that it finds in the file and trusted rows
    vouch for, and on cut ones without an end (accept.py). `--mask FILE` masks what a ranking drops.
"""

import argparse
import math
import time
from pathlib import Path

import accept
import batches
import bmo_weights
import curate
import models
import options
import ranking
import session
from generate import generate
from logprobs import sequence_logprobs
from runtime import monitor
from runtime.command import run as run_command
from runtime.processes import all_sum, share_list
from selector import dynamic_mask, static_mask
from toy import corpus
from train_offline import omega_losses
from upper import upper_losses
from utils import UserError, content_hash

# ruff: isort: split
import torch

# Beside the defaults below, which are the published ones of the quality task.
PRESETS = options.PRESETS | {
    "llama3-8b-safety": options.PRESETS["llama3-8b-safety"] | {"generation_batch": 16}}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Online self-refining generation. Published values in brackets.")
    add = parser.add_argument_group("method").add_argument
    add("--mask", default="static", help="static, dynamic, or a ranking file: masked are the rows "
        "that it does not keep (static; safety: dynamic)")
    add("--ratio-masked", type=float, default=0.1, help="R, share of masked rows (0.05, 0.1, 0.2)")
    add("--num-answers", type=int, default=1, help="G, answers to a masked question (1, 5)")
    add("--k-gen", type=int, default=500, help="K_gen, steps between refreshes (500)")
    add("--first-refresh", type=int, default=0, help="step of the first refresh")
    add("--refine", choices=("generate", "drop", "original", *accept.RULES), default="generate",
        help="the paper's; none; the original; found ones that trusted rows vouch for; random ones")
    add("--ratio", choices=("sequence", "lambda"), default="sequence",
        help="weight of an answer: r, or G lambda")
    add("--max-log-ratio", type=float, default=bmo_weights.MAX_LOG_RATIO, help="clamp of |log r|")
    add("--temperature", type=float, default=0.8, help="(0.8)")
    add("--max-new-tokens", type=int, default=512, help="(512)")
    add("--generation-batch", type=int, default=64, help="answers at a time; in bf16 another "
        "number writes others (64, safety 16)")
    options.add_arguments(parser)
    parser.set_defaults(method="online", omega_start="zero")  # omega judges new answers
    args = options.parse(parser, argv, PRESETS)
    if args.mask not in ("static", "dynamic") and not Path(args.mask).is_file():
        raise UserError(f"--mask {args.mask}: neither static, dynamic nor a file")
    if not 0 < args.ratio_masked <= 1:
        raise UserError(f"--ratio-masked {args.ratio_masked}: R must lie in (0, 1]")
    options.at_least_one(args, "num_answers", "k_gen", "max_new_tokens", "generation_batch")
    if args.first_refresh < 0:
        raise UserError(f"--first-refresh {args.first_refresh}: a step, 0 or more")
    if not 0 < args.temperature < math.inf or not args.max_log_ratio > 0:
        raise UserError("--temperature and --max-log-ratio must be positive")
    if args.turns != "last":
        raise UserError("--turns all: an online run rewrites one answer a row; use --turns last")
    if args.skip_scores:
        raise UserError("--skip-scores: only they rank the originals of masked rows; leave it out")
    return args


def check_refreshes(args, run):
    """Prints the arithmetic of masks and refreshes; returns whether the last mask is ranked."""
    num_masked, run.given_mask = round(args.ratio_masked * run.num_rows), None
    if args.mask not in ("static", "dynamic"):
        run.given_mask = ranking.rows_not_kept(run.levels.lower, args.mask)
        num_masked = int(run.given_mask.sum())
        args.masked_rows = content_hash(str(run.given_mask.tolist()))  # of the file, for --resume
        args.keep_fraction = min(args.keep_fraction, 1 - num_masked / run.num_rows)
        print(f"mask: the {num_masked} of {run.num_rows} rows that {args.mask} does not keep, nor "
              f"this run (--keep-fraction {args.keep_fraction:g}), whatever --ratio-masked")
    if args.refine in accept.RULES:
        accept.split_trusted(run)
    else:  # the curated set is written
        curate.check_room(run.lower, args.max_new_tokens, run.context)
    if num_masked == 0:
        raise UserError(f"--ratio-masked {args.ratio_masked}: masks none of {run.num_rows} rows")
    if args.first_refresh >= run.total_steps:
        raise UserError(f"--first-refresh {args.first_refresh}: the run has {run.total_steps} "
                        "steps, so no row would ever be masked")
    steps_left = run.total_steps - 1 - args.first_refresh
    last_refresh = args.first_refresh + steps_left // args.k_gen * args.k_gen
    if last_refresh == 0 and (args.refine == "generate" or args.mask == "dynamic"):
        print("warning: the only refresh is before the first step: " + (
            "no row was read, so it is a random mask" if args.mask == "dynamic" else
            "the untrained model writes all answers") + (
                f"; make --k-gen smaller than {run.total_steps}" if run.total_steps > 1 else ""))
    if args.refine == "generate":
        read = min(run.num_rows, args.k_gen * args.batch) / run.num_rows
        print(f"generation: {num_masked} rows masked; a refresh every {args.k_gen} steps answers "
              f"about {round(num_masked * read)} of them {args.num_answers} times")
    return run.given_mask is not None or (args.mask == "dynamic" and last_refresh > 0)


def sampling_options(args, run):
    """What `generate` needs beside model, prompts and seeds."""
    return {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature,
            "end_ids": curate.end_tokens(run.levels.lower, run.tokenizer),
            "batch_size": args.generation_batch}


class Answers:
    """What a lower row trains on: its original row, G generated ones, or nothing (dropped).

    rows: tokenised rows; old_logps (G,): log-probs when written, None for originals and accepted
    answers; step: of the refresh that wrote them; weight: of an accepted answer, its precision.
    """

    def __init__(self, rows, old_logps=None, step=None, weight=1.0):
        self.rows, self.old_logps, self.step, self.weight = rows, old_logps, step, weight


def begin(run, sampling):
    """mask (N,), buffer {position: `Answers`} and count of answers: saved ones, or none yet."""
    if run.args.refine in accept.RULES:
        accept.prepare(run, sampling)
    if run.saved is None:
        return (torch.zeros(run.num_rows, dtype=torch.bool) if run.given_mask is None
                else run.given_mask), {}, 0
    buffer = {p: Answers(*answers) for p, answers in run.saved["buffer"].items()}
    return run.saved["mask"], buffer, run.saved["num_answers"]


# --- lines 3 and 5-8: mask and generate -----------------------------------------------------------

def new_mask(kind, ratio_masked, logits, before, seed, refresh):
    """Line 3: I_M (N,) bool. Static: drawn once; dynamic: the bottom R of the weights now."""
    generator = batches.seeded(seed, "mask", refresh)
    if kind == "dynamic":
        return dynamic_mask(logits, ratio_masked, generator)
    return before if before.any() else static_mask(len(logits), ratio_masked, generator)


def answer(model, prompts, names, step, *, num_answers, sampling, label):
    """Lines 6-7: G answers to each prompt, and their log-probs under this model.

    names: one string a prompt, the seed of its draws together with g. sampling: options of
    `generate`. Returns ([`Answers`, one a prompt], [(tokens, complete), G a prompt]).
    """
    jobs = [(i, g) for i in range(len(prompts)) for g in range(num_answers)]
    written = share_list(
        lambda prompts, seeds: generate(model, prompts, seeds, label=label, **sampling),
        [prompts[i] for i, _ in jobs], [f"{names[i]} {g}" for i, g in jobs])
    rows = [batches.answer_row(prompts[i], tokens)
            for (i, _), (tokens, _) in zip(jobs, written, strict=True)]
    losses, lengths = batches.row_losses(model, rows, label="scoring answers")
    old_logps = (-losses.double() * lengths).view(-1, num_answers)
    return [Answers(rows[i * num_answers:(i + 1) * num_answers], old_logps[i], step)
            for i in range(len(prompts))], written


def refresh(run, before, number, sampling):
    """Lines 3 and 5-8: the mask (N,), {position: `Answers`} of its rows that are read, metrics.

    before: the mask until now; number: of the refresh. Rows that the next K_gen steps do not read
    get no answers (deviation 11), nor does any under `--refine drop` and `original`.
    """
    args, started = run.args, time.perf_counter()
    mask = run.given_mask if run.given_mask is not None else new_mask(
        args.mask, args.ratio_masked, run.selector.logits, before, args.seed, number)
    metrics = {"mask_churn": float((mask & ~before).sum() / mask.sum())}
    if args.refine in ("drop", "original"):
        return mask, {}, metrics
    coming = [p for p in batches.coming_rows(run.num_rows, args.batch, args.seed, run.step,
                                             min(run.step + args.k_gen, run.total_steps))
              if mask[p]]
    if not coming:  # a short window may read no masked row
        return mask, {}, metrics | {"answers": 0}
    if args.refine in accept.RULES:
        accepted, values = accept.accepted_answers(run, coming, sampling, number)
        return mask, {p: Answers([row], None, run.step, weight)
                      for p, (row, weight) in accepted.items()}, metrics | values
    rows = run.levels.lower.select(coming)
    answers, written = answer(
        run.model, [batches.prompt_of(row) for row in batches.take(run.lower, coming)],
        [f"{args.seed} {number} {row_id}" for row_id in rows["row_id"]], run.step,
        num_answers=args.num_answers, sampling=sampling, label=f"refresh {number}")
    count, labels = len(written), {}
    if "kind" in rows.column_names:  # known faults; of the toy the right answers are known too
        labels = corpus.answer_labels(rows, [
            run.tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in written])
    return mask, dict(zip(coming, answers, strict=True)), metrics | labels | {
        "answers": count, "answers_complete": sum(done for _, done in written) / count,
        "answers_empty": sum(len(t) == 1 and d for t, d in written) / count,
        "answer_length": sum(len(t) for t, _ in written) / count,
        "time/generate": time.perf_counter() - started}


def step_answers(lower, lower_rows, mask, buffer, refine):
    """`Answers` of each row of lower_rows (B,); without a new one a masked row may have none."""
    rows, kept = batches.take(lower, lower_rows), refine in ("generate", "original")
    return [Answers([row]) if not mask[p] else
            buffer[p] if p in buffer else Answers([row] if kept else [])
            for p, row in zip(lower_rows.tolist(), rows, strict=True)]


# --- lines 9-13: the lower loss of originals and answers ------------------------------------------

def answer_weights(kind, logps, old_logps, max_log_ratio):
    """r^g of answers (n, G), given log-probs now and at generation (Corollary importance_ratio).

    All (n, G), sums over tokens in nats. Also counts the clamped ones. `lambda` is G lambda (Lemma
    implicit_BMO), so that both have mean about one.
    """
    if kind == "lambda":
        return bmo_weights.response_weights(logps.detach()) * logps.shape[1], 0
    return (bmo_weights.importance_ratio(logps, old_logps, max_log_ratio),
            int(bmo_weights.clamped(logps, old_logps, max_log_ratio).sum()))


def lower_terms(questions, logps, lengths, weighing):
    """(1/G) sum_g r^g L_{i,g} and (1/G) sum_g L_{i,g}, each (n,), of n questions; and the ratios.

    questions: `Answers`; logps, lengths (sum of G,): of their rows, in order. weighing: kind and
    clamp of `answer_weights`, None for r = 1. Ratios are (m, G) of the m generated questions, with
    the number of clamped ones; (None, 0) without any.
    """
    losses = -logps / lengths                                          # Eq. SFT_def, deviation 1
    owner = torch.tensor([q for q, answers in enumerate(questions) for _ in answers.rows],
                         dtype=torch.long, device=losses.device)
    counts = torch.bincount(owner, minlength=len(questions)).clamp_min(1)
    weights = [answers.weight if weighing else 1.0 for answers in questions for _ in answers.rows]
    ratio, used, num_clamped = losses.new_tensor(weights), None, 0
    written = [answers for answers in questions if answers.old_logps is not None]
    if written and weighing is not None:  # generated answers count by r, others by their weight
        new = torch.tensor([answers.old_logps is not None for answers in questions
                            for _ in answers.rows], device=losses.device)
        old = torch.stack([answers.old_logps for answers in written]).to(logps)
        used, num_clamped = answer_weights(weighing[0], logps[new].view(old.shape), old,
                                           weighing[1])
        ratio[new] = used.flatten()

    def mean(values):  # (1/G) sum_g, a question
        return values.new_zeros(len(counts)).index_add(0, owner, values) / counts

    return mean(ratio * losses), mean(losses.detach()), used, num_clamped


def descend(model, parameters, optimizer, upper_batch, lower_batch, weights, rho, *, clip,
            micro_batch, num_answers, weighing=None, reference=None, beta=0.1):
    """One step of `parameters` on (1 - rho) L_val + rho mean_i W_i (1/G) sum_g r^g L_{i,g}.

    As in train_offline.py, but lower_batch holds one `Answers` a row, without rows for a dropped
    one; num_answers: G; weighing: see `lower_terms`. Returns the losses before the step, upper
    (B_up,) and lower (B_low,) with plain means over answers; the weighted lower losses; the ratios
    used (m, G), their clamp count; the gradient norm before clipping.
    """
    upper_all, lower_all = (weights.new_zeros(len(b)) for b in (upper_batch, lower_batch))
    plain_all, num_clamped = torch.zeros_like(lower_all), torch.tensor(0)
    ratios = weights.new_zeros(len(lower_batch), num_answers)
    upper_rows = [batches.sequences([row]) for row in upper_batch]
    lower_rows = [answers.rows for answers in lower_batch]
    for up, low, rows in batches.micro_batches(upper_rows, lower_rows, micro_batch,
                                               models.is_sharded(model)):
        logps, lengths = sequence_logprobs(model, batches.pack(rows, model.device))
        count = sum(len(upper_rows[i]) for i in up)
        end = count + sum(len(lower_rows[i]) for i in low)
        upper = upper_losses(logps[:count], lengths[:count],
                             None if reference is None else reference[up], beta)
        lower, plain, used, over = lower_terms([lower_batch[i] for i in low], logps[count:end],
                                               lengths[count:end], weighing)
        # Divided by the whole step's counts: the gradient ignores how the batch was cut.
        loss = rho * (weights[low] * lower).sum() / len(lower_batch)
        if upper_batch:
            loss = loss + (1 - rho) * upper.sum() / len(upper_batch)
        loss.backward()
        upper_all[up], lower_all[low], plain_all[low] = upper.detach(), lower.detach(), plain
        if used is not None:
            ratios[[i for i in low if lower_batch[i].old_logps is not None]] = used.to(ratios)
            num_clamped += over
    norm = models.update(parameters, optimizer, clip)
    for values in (upper_all, plain_all, lower_all, ratios, num_clamped):
        all_sum(values)
    written = [weighing is not None and answers.old_logps is not None for answers in lower_batch]
    return upper_all, plain_all, lower_all, ratios[written], num_clamped.item(), norm


# --- line 14: C of omega's step, of `train_offline.omega_losses` ----------------------------------

def mean_answer_losses(model, lower_batch):
    """(1/G) sum_g L_{i,g}, no gradient, no ratio (C_omega), (B_low,); 0 for a dropped row."""
    rows = [row for answers in lower_batch for row in answers.rows]
    losses, _ = batches.row_losses(model, rows)
    parts = losses.split([len(answers.rows) for answers in lower_batch])
    return torch.stack([part.mean() if len(part) else losses.new_zeros(()) for part in parts])


def step_metrics(rho, weights, upper_now, plain, weighted, masked, present, used, num_clamped):
    """What the log says of a step: losses (B,) by group of rows, and the ratios used (m, G)."""
    def mean(values, where):
        return values[where].mean().item() if where.any() else None

    lower_loss, upper_loss = (weights * weighted).cpu().mean().item(), upper_now.mean().item()
    plain, some = plain.cpu(), len(used) > 0
    return {"upper_loss": upper_loss, "lower_loss": lower_loss,
            "loss": rho * lower_loss + (1 - rho) * upper_loss,
            "lower_loss_masked": mean(plain, masked & present),
            "lower_loss_unmasked": mean(plain, ~masked),
            "masked_share": masked.double().mean().item(),
            "ratio_mean": used.mean().item() if some else None,
            "ratio_max": used.max().item() if some else None,
            "ratio_ess": bmo_weights.effective_sample_size(used.flatten()).item() if some else None,
            "ratio_clamped": num_clamped}


def main(argv=None):
    args = parse_args(argv)
    penalties = options.penalties(args)
    run = session.plan(args)
    mask_is_ranked = check_refreshes(args, run)
    if args.dry_run:
        return
    session.start(run)
    limits = run.limits | {"num_answers": args.num_answers}
    sampling = sampling_options(args, run)
    mask, buffer, num_answers = begin(run, sampling)

    while run.step < run.total_steps:
        epoch, k = divmod(run.step, run.steps_per_epoch)
        rho, gamma = penalties[epoch]
        started, metrics = time.perf_counter(), {"step": run.step, "epoch": epoch, "rho": rho}

        # --- mask and generate: lines 3 and 5-8 ---------------------------------------------------
        number, since = divmod(run.step - args.first_refresh, args.k_gen)
        if since == 0 and number >= 0:
            mask, buffer, refreshed = refresh(run, mask, number, sampling)
            num_answers += refreshed.get("answers", 0) - refreshed.get("accepted/prefix", 0)
            metrics |= refreshed

        # --- sample: line 4 -----------------------------------------------------------------------
        lower_rows = batches.epoch_batch(run.num_rows, args.batch, args.seed, epoch, k)
        upper_rows = batches.cycle(len(run.upper), run.step * args.batch, args.batch, args.seed)
        upper_batch, reference = batches.take(run.upper, upper_rows), run.reference["upper"]
        lower_batch = step_answers(run.lower, lower_rows, mask, buffer, args.refine)
        present = torch.tensor([bool(answers.rows) for answers in lower_batch])
        weights = run.selector.weights(lower_rows)

        # --- theta: one step on (1 - rho) L_val + rho mean W (1/G) sum r L  (PBGD-1) --------------
        lr = models.set_learning_rate(run.optimizers, args.lr, args.schedule, run.step,
                                      run.total_steps)
        upper_now, plain, weighted, used, num_clamped, grad_norm = descend(
            run.model, run.theta, run.optimizers["theta"], upper_batch, lower_batch, weights, rho,
            weighing=(args.ratio, args.max_log_ratio), beta=args.dpo_beta,
            reference=None if reference is None else reference[upper_rows], **limits)
        monitor.check_finite(run, grad_norm, weighted, lower_rows)

        # --- omega: one step with C at theta^{k+1}, the plain mean over answers  (PBGD-2) ---------
        if present.any():  # a dropped row has no loss; the others keep their share 1 / B
            losses = omega_losses(run.model, lower_batch, weights, plain, step=descend,
                                  measure=mean_answer_losses, **run.omega_options, **limits)
            monitor.check_finite(run, losses.sum(), losses, lower_rows)
            run.selector.step(lower_rows[present], losses.cpu()[present],
                              gamma * (present.sum().item() / len(present)))

        # --- log, evaluate, save ------------------------------------------------------------------
        metrics |= step_metrics(rho, weights, upper_now, plain, weighted, mask[lower_rows], present,
                                used, num_clamped)
        metrics |= {"grad_norm": grad_norm.item(), "lr": lr, "tokens": batches.count_tokens(
            batches.sequences(upper_batch) + [row for q in lower_batch for row in q.rows])}
        monitor.end_step(run, metrics, started, {
            "mask": mask, "num_answers": num_answers,
            "buffer": {p: [a.rows, a.old_logps, a.step, a.weight] for p, a in buffer.items()}})
    rewrite = accept.rewrite if args.refine in accept.RULES else curate.refine
    session.finish(run, mask, lambda *ranks_kept: {"answers_generated": num_answers} | (
        curate.curated_set(run, mask, buffer, sampling, *ranks_kept, rewrite)), mask_is_ranked)


if __name__ == "__main__":
    run_command(main, resumes=True)
