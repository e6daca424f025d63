"""Offline bilevel data selection (BDS), direct mixing and plain SFT, on your own rows.

    python train_offline.py --lower noisy.jsonl --upper trusted.jsonl --model NAME --out runs/first
    python train_offline.py                                          # the embedded toy
    torchrun --nproc-per-node 8 train_offline.py --lower ...         # eight GPUs, the same run

The penalty form of the bilevel problem (Eq. BDR and algorithm offline_PBGD; PBGD-1 and PBGD-2):

    theta <- theta - beta  ( grad L_val(theta) + gamma_k mean_i W_i(omega) grad L_i(theta) )
    omega <- omega - alpha gamma_k grad_omega mean_i W_i(omega) L_i(theta^{k+1})

Deviations from the text of the paper, each with its reason:
 1. L is the mean over a row's response tokens, then over rows. Eq. SFT_def sums over tokens, the
    paper's tables report means; with sums, long responses would own every step. Of pairs, L_val,
    the paper's "rule-based RL loss", is DPO's (upper.py).
 2. W = N softmax(omega), mean one; see selector.py. With `--omega-start tests`, beyond the paper
    and the default without a preset, rows that look bad start lower than the others.
 3. theta descends (1 - rho) L_val + rho mean W L with rho = gamma / (1 + gamma): the paper's
    objective times (1 - rho), so clipping means the same at every rho, and BDS with frozen uniform
    weights *is* direct mixing, bit for bit. omega keeps gamma.
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
    combination. theta's own gradient is the same for every A. The presets take 0. The default, 0.7,
    ranks planted Alpaca better than the base model's loss, which 0 does not with 5.9M parameters.
"""

import argparse
import time

import batches
import models
import options
import session
from logprobs import sequence_logprobs
from runtime import monitor
from runtime.command import run as run_command
from runtime.processes import all_sum
from upper import upper_losses
from utils import UserError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Offline bilevel data selection. Published values in brackets.")
    add = parser.add_argument_group("method").add_argument
    add("--method", choices=("bds", "mix", "sft"), default="bds",
        help="bilevel selection, direct mixing at --rho, or SFT on the lower rows alone")
    add("--rho", type=float, help="weight of the lower level under --method mix (0.5)")
    add("--keep", help="a ranking file: train on the lower rows that it keeps")
    add("--omega-start", choices=("zero", "tests"), default="tests",
        help="tests: rows that look bad by the row tests start with hardly any weight (zero)")
    add("--token-budget", type=int, help="mix and sft: in place of --epochs, the step at which so "
        "many lower-level tokens are read is the last")
    options.add_arguments(parser)
    args = options.parse(parser, argv)
    if args.method != "mix" and args.rho is not None:
        raise UserError(f"--rho {args.rho}: of --method mix; the rho of bds is --rho-start and "
                        "--rho-step")
    args.rho = 0.5 if args.rho is None else args.rho
    if not 0 < args.rho <= 1:
        raise UserError(f"--rho {args.rho}: direct mixing needs a rho in (0, 1]")
    if args.token_budget is not None and (args.token_budget < 1 or args.method == "bds"):
        raise UserError(f"--token-budget {args.token_budget}: 1 or more, and under --method mix or "
                        "sft; rho's schedule counts epochs")
    return args


def descend(model, parameters, optimizer, upper_batch, lower_batch, weights, rho, *, clip,
            micro_batch, reference=None, beta=0.1):
    """One step of `parameters` on (1 - rho) L_val + rho mean W L            (PBGD-1, deviation 3)

    upper_batch, lower_batch: lists of rows; weights (B_low,) W; clip: largest gradient norm;
    micro_batch: rows of each level a forward; reference (B_up,) and beta: of DPO pairs.
    Returns the losses before the step, upper (B_up,) and lower (B_low,), and the gradient norm
    before clipping. Each process runs its share of the rows; all return the same.
    """
    upper_all, lower_all = (weights.new_zeros(len(b)) for b in (upper_batch, lower_batch))
    upper_rows, lower_rows = ([batches.sequences([row]) for row in b]
                              for b in (upper_batch, lower_batch))
    for up, low, rows in batches.micro_batches(upper_rows, lower_rows, micro_batch,
                                               models.is_sharded(model)):
        logps, lengths = sequence_logprobs(model, batches.pack(rows, model.device))
        count = sum(len(upper_rows[i]) for i in up)
        upper = upper_losses(logps[:count], lengths[:count],
                             None if reference is None else reference[up], beta)
        lower = (-logps[count:] / lengths[count:])[:len(low)]          # Eq. SFT_def, deviation 1
        # Divided by the whole step's counts: the gradient ignores how the batch was cut.
        loss = rho * (weights[low] * lower).sum() / len(lower_batch)
        if upper_batch:
            loss = loss + (1 - rho) * upper.sum() / len(upper_batch)
        loss.backward()
        upper_all[up], lower_all[low] = upper.detach(), lower.detach()
    norm = models.update(parameters, optimizer, clip)
    return all_sum(upper_all), all_sum(lower_all), norm


def omega_losses(model, lower_batch, weights, losses, *, at_next=True, correction=0.0,
                 theta_hat=None, optimizer=None, step=descend,
                 measure=lambda model, rows: batches.row_losses(model, rows)[0], **limits):
    """C (B,) of omega's step: losses (B,) at theta^k, or anew at theta^{k+1} (deviation 4).

    With a correction A (deviation 7), theta_hat first takes its own step on the weighted lower
    loss, and C is L(theta) - A L(theta_hat). measure, step: how losses are read and theta_hat
    descends; train_online.py has its own. limits: of `step`.
    """
    if at_next:
        losses = measure(model, lower_batch)
    if correction:
        with models.adapter(model, "theta_hat"):
            _, attained, *_, norm = step(model, theta_hat, optimizer, [], lower_batch, weights, 1.0,
                                         **limits)
            if at_next:
                attained = measure(model, lower_batch)
        losses = losses - correction * attained.to(losses) + 0 * norm.to(losses)  # inf: main stops
    return losses


def main(argv=None):
    args = parse_args(argv)
    bilevel = args.method == "bds"
    penalties = options.penalties(args) if bilevel else None
    run = session.plan(args)
    if args.dry_run:
        return
    session.start(run)

    while run.step < run.total_steps:
        epoch, k = divmod(run.step, run.steps_per_epoch)
        started = time.perf_counter()

        # --- sample -------------------------------------------------------------------------------
        lower_rows = batches.epoch_batch(run.num_rows, args.batch, args.seed, epoch, k)
        lower_batch, upper_batch, reference = batches.take(run.lower, lower_rows), [], None
        if args.method != "sft":
            upper_rows = batches.cycle(len(run.upper), run.step * args.batch, args.batch, args.seed)
            upper_batch, reference = batches.take(run.upper, upper_rows), run.reference["upper"]
        rho = args.rho if args.method == "mix" else 1.0
        if bilevel:
            rho, gamma = penalties[epoch]
        weights = run.selector.weights(lower_rows)

        # --- theta: one step on (1 - rho) L_val + rho mean W L  (PBGD-1) --------------------------
        lr = models.set_learning_rate(run.optimizers, args.lr, args.schedule, run.step,
                                      run.total_steps)
        upper_now, lower_now, grad_norm = descend(
            run.model, run.theta, run.optimizers["theta"], upper_batch, lower_batch, weights, rho,
            reference=None if reference is None else reference[upper_rows], beta=args.dpo_beta,
            **run.limits)
        monitor.check_finite(run, grad_norm, lower_now, lower_rows)

        # --- omega: one step with C at theta^{k+1}  (PBGD-2) --------------------------------------
        if bilevel:
            losses = omega_losses(run.model, lower_batch, weights, lower_now, **run.omega_options,
                                  **run.limits)
            monitor.check_finite(run, losses.sum(), losses, lower_rows)
            run.selector.step(lower_rows, losses, gamma)

        # --- log, evaluate, save ------------------------------------------------------------------
        lower_loss = (weights * lower_now).mean().item()
        upper_loss = upper_now.mean().item() if upper_batch else None
        monitor.end_step(run, {
            "step": run.step, "epoch": epoch, "rho": rho, "upper_loss": upper_loss,
            "lower_loss": lower_loss, "loss": rho * lower_loss + (1 - rho) * (upper_loss or 0.0),
            "grad_norm": grad_norm.item(), "lr": lr,
            "tokens": batches.count_tokens(lower_batch + batches.sequences(upper_batch))}, started)
    session.finish(run)


if __name__ == "__main__":
    run_command(main, resumes=True)
