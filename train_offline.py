"""Offline bilevel data selection (BDS), direct mixing and plain SFT, on your own rows.

    python train_offline.py --lower noisy.jsonl --upper trusted.jsonl --model NAME --out runs/first
    python train_offline.py                                          # the embedded toy
    torchrun --nproc-per-node 8 train_offline.py --lower ...         # eight GPUs, the same run

The penalty form of the bilevel problem (Eqs. BDS and offline_PBGD; PBGD-1 and PBGD-2):

    theta <- theta - beta  ( grad L_val(theta) + gamma_k mean_i W_i(omega) grad L_i(theta) )
    omega <- omega - alpha gamma_k grad_omega mean_i W_i(omega) L_i(theta^{k+1})

Deviations from the text of the paper, each with its reason:
 1. L is the mean over a row's response tokens, then over rows. Eq. SFT_def sums over tokens, the
    paper's tables report means; with sums, long responses would own every step.
 2. W = N softmax(omega), mean one; see selector.py.
 3. theta descends (1 - rho) L_val + rho mean W L with rho = gamma / (1 + gamma): the paper's
    objective times (1 - rho), so clipping means the same at every rho, and BDS with frozen uniform
    weights *is* direct mixing, bit for bit. omega keeps gamma (`--no-omega-gamma` drops it).
 4. omega sees the loss at theta^{k+1}, as in the main text; `--omega-loss current` takes theta^k
    (the paper's appendix, the authors' code) and saves one forward of the lower rows.
 5. An epoch is one seeded permutation of the lower rows; its last batch may be smaller. The upper
    rows cycle through permutations of their own; neither set is cut to the other's length.
 6. Adam is torch's, betas (0.9, 0.999), no weight decay; theta's gradient is clipped at norm 1
    (unpublished; the authors' library does it).
 7. `--correction A` takes C_i = L_i(theta) - A L_i(theta_hat), theta_hat a second adapter that
    descends the weighted lower loss alone. A = 1 is the penalty without Assumption 1 (separable
    data): gamma (sum sigma_i L_i(theta) - min_theta' sum sigma_i L_i(theta')), whose omega gradient
    holds theta' fixed (Danskin). A = 0 is the paper's penalty; between them lies their convex
    combination. theta's own gradient is the same for every A. The presets take 0; the default is
    0.7, which ranks real text better than the base model's own loss, where 0 does not (README).
"""

import argparse
import math
import time

import torch
from tqdm import tqdm

import common
import data
import loading
import utils
from eval import row_losses
from logprobs import sequence_logprobs
from selector import Selector
from utils import UserError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Offline bilevel data selection. Published values in brackets.")
    add = parser.add_argument_group("method").add_argument
    add("--method", choices=("bds", "mix", "sft"), default="bds",
        help="bilevel selection, direct mixing at --rho, or SFT on the lower rows alone")
    add("--rho", type=float, default=0.5, help="weight of the lower level under --method mix")
    add("--keep", help="a ranking file: train on the lower rows that it keeps")
    add("--token-budget", type=int, help="mix and sft: in place of --epochs, the step at which so "
        "many lower-level tokens are read is the last")
    common.add_arguments(parser)
    args = common.parse(parser, argv)
    if args.method == "mix" and not 0 < args.rho <= 1:
        raise UserError(f"--rho {args.rho}: direct mixing needs a rho in (0, 1]")
    if args.token_budget is not None and (args.token_budget < 1 or args.method == "bds"):
        raise UserError(f"--token-budget {args.token_budget}: 1 or more, and under --method mix or "
                        "sft; rho's schedule counts epochs")
    return args


def descend(args, model, parameters, optimizer, upper_batch, lower_batch, weights, rho,
            reference=None):
    """One step of `parameters` on (1 - rho) L_val + rho mean W L            (PBGD-1, deviation 3)

    upper_batch, lower_batch: lists of rows; weights (B_low,) W; reference (B_up,) of DPO pairs.
    Returns the losses before the step, upper (B_up,) and lower (B_low,), and the gradient norm
    before clipping. Each process runs its share of the rows; all return the same.
    """
    upper_losses, lower_losses = (weights.new_zeros(len(b)) for b in (upper_batch, lower_batch))
    upper_rows, lower_rows = ([data.sequences([row]) for row in b]
                              for b in (upper_batch, lower_batch))
    for up, low, rows in common.micro_batches(args, model, upper_rows, lower_rows):
        logps, lengths = sequence_logprobs(model, data.pack(rows, model.device))
        count = sum(len(upper_rows[i]) for i in up)
        upper = common.upper_losses(args, logps[:count], lengths[:count],
                                    None if reference is None else reference[up])
        lower = (-logps[count:] / lengths[count:])[:len(low)]          # Eq. SFT_def, deviation 1
        # Divided by the whole step's counts: the gradient ignores how the batch was cut.
        loss = rho * (weights[low] * lower).sum() / len(lower_batch)
        if upper_batch:
            loss = loss + (1 - rho) * upper.sum() / len(upper_batch)
        loss.backward()
        upper_losses[up], lower_losses[low] = upper.detach(), lower.detach()
    utils.sum_gradients(parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip)
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return utils.all_sum(upper_losses), utils.all_sum(lower_losses), norm


def main(argv=None):
    args = parse_args(argv)
    # bds: rho grows every epoch; mix: fixed, weights stay one; sft: the lower level alone.
    gammas = common.gammas(args) if args.method == "bds" else None

    # --- data and model ---------------------------------------------------------------------------
    device = utils.join_processes(args.device)
    model_name = str(common.toy.MODEL) if args.toy else args.model
    tokenizer, config = loading.load_tokenizer(model_name), loading.load_config(model_name)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31
    levels = common.load_levels(args, tokenizer, context)
    everything = levels.lower
    if args.keep:
        levels.lower = common.keep_rows(levels.lower, args.keep)
    lower, upper = data.tokens_only(levels.lower), levels.upper and data.tokens_only(levels.upper)
    print("trained tokens in brackets: " + data.show_example(lower[0], tokenizer))

    # --- computed at run time ---------------------------------------------------------------------
    num_rows = len(lower)
    steps_per_epoch = math.ceil(num_rows / args.batch)
    total_steps = steps_per_epoch * args.epochs
    if args.token_budget is not None:
        total_steps = common.budget_steps(args, levels.lower)
    common.print_plan(args, levels, config, steps_per_epoch, total_steps)
    if args.dry_run:
        return
    utils.seed_everything(args.seed)
    base = loading.load_model(model_name, device, args.dtype, args.four_bit, on_host=args.fsdp)
    model = loading.add_lora(base, args.lora_rank, args.lora_alpha, args.adapter,
                             args.gradient_checkpointing)
    theta = [p for p in model.parameters() if p.requires_grad]
    theta_optimizer = loading.make_optimizer(args.optimizer, theta, args.lr)
    optimizers = {"theta": theta_optimizer}
    if args.method == "bds" and args.correction:
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
    step = 0
    if state is not None:
        step = state["step"]
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
        started = time.perf_counter()

        # --- sample -------------------------------------------------------------------------------
        lower_rows = data.permutation(num_rows, args.seed, epoch, stream=0)
        lower_rows = lower_rows[k * args.batch:][:args.batch]
        lower_batch, upper_batch = data.take(lower, lower_rows), []
        if args.method != "sft":
            upper_rows = common.cycle(len(upper), step * args.batch, args.batch, args.seed)
            upper_batch = data.take(upper, upper_rows)
        if args.method == "bds":
            gamma = gammas[epoch]
            rho = round(gamma / (1 + gamma), 12)  # 0.6, not 0.5999999999999999
        else:
            rho = args.rho if args.method == "mix" else 1.0
        weights = selector.weights(lower_rows)

        # --- theta: one step on (1 - rho) L_val + rho mean W L  (PBGD-1) --------------------------
        for group in (g for optimizer in optimizers.values() for g in optimizer.param_groups):
            group["lr"] = common.learning_rate(args, step, total_steps)
        upper_losses, lower_losses, grad_norm = descend(
            args, model, theta, theta_optimizer, upper_batch, lower_batch, weights, rho,
            reference["upper"][upper_rows] if args.upper_loss == "dpo" and upper_batch else None)
        common.check_finite(grad_norm, lower_losses, lower_rows, levels.lower, step, out)

        # --- omega: one step with C at theta^{k+1}  (PBGD-2) --------------------------------------
        if args.method == "bds":
            coefficients = lower_losses
            if args.omega_loss == "next":
                coefficients, _ = row_losses(model, lower, lower_rows)
            if args.correction:                                                      # deviation 7
                with loading.adapter(model, "theta_hat"):
                    _, attainable, _ = descend(args, model, theta_hat, hat_optimizer, [],
                                               lower_batch, weights, 1.0)
                    if args.omega_loss == "next":
                        attainable, _ = row_losses(model, lower, lower_rows)
                coefficients = coefficients - args.correction * attainable.to(coefficients)
            common.check_finite(coefficients.sum(), coefficients, lower_rows, levels.lower, step,
                                out)
            selector.step(lower_rows, coefficients, 1.0 if args.no_omega_gamma else gamma)

        # --- log, evaluate, save ------------------------------------------------------------------
        lower_loss = (weights * lower_losses).mean().item()
        upper_loss = upper_losses.mean().item() if upper_batch else None
        metrics = {"step": step, "epoch": epoch, "rho": rho, "upper_loss": upper_loss,
                   "lower_loss": lower_loss,
                   "loss": rho * lower_loss + (1 - rho) * (upper_loss or 0.0),
                   "grad_norm": grad_norm.item(), "lr": theta_optimizer.param_groups[0]["lr"],
                   "tokens": sum(len(row["input_ids"])
                                 for row in lower_batch + data.sequences(upper_batch))}
        step += 1
        if k == steps_per_epoch - 1 or step == total_steps:
            metrics |= common.held_out_metrics(args, model, levels, reference)
            if args.method == "bds":
                metrics |= common.selector_report(selector, out, epoch + 1)
        metrics["time/step"] = time.perf_counter() - started
        utils.log_metrics(metrics_file, metrics)
        if step % args.save_every == 0 or step == total_steps:
            utils.save_checkpoint(out, step, model, {
                "selector": selector.state_dict(),
                **{name: optimizer.state_dict() for name, optimizer in optimizers.items()}})
        progress.set_postfix(upper=upper_loss, lower=lower_loss, refresh=False)
        progress.update()
    progress.close()

    # --- the ranking, the table, the result -------------------------------------------------------
    common.finish_run(args, out, model, levels, selector, base_losses, reference,
                      everything=everything if args.keep else None)


if __name__ == "__main__":
    utils.run(main)
