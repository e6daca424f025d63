"""Every step: is it finite, what is logged, evaluated and saved.

`run` is the namespace that session.py makes.
"""

import time

from batches import mean_losses, row_losses
from runtime import folder, metrics
from upper import dpo_margins, pair_logps, upper_losses
from utils import UserError

# ruff: isort: split
import torch
from safetensors.torch import save
from tqdm import tqdm


def check_finite(run, grad_norm, losses, positions):
    """`UserError` naming the rows when a step's loss or gradient is not a number."""
    if not torch.isfinite(grad_norm):
        bad = [run.levels.lower[int(p)]["row_id"] for p, ok in
               zip(positions, torch.isfinite(losses).tolist(), strict=True) if not ok]
        raise UserError(f"step {run.step}: the loss or its gradient is not finite "
                        + (f"(lower row_ids {bad})" if bad else "(no lower row's own loss)")
                        + "; lower --lr or remove the rows, and start again in another --out")


def end_step(run, values, started, state=None):
    """Log the metrics of a step; at an epoch's end evaluate; save when it is time.

    values: {name: number}; started: perf_counter() at its start; state: of the script, to resume.
    """
    args = run.args
    run.step += 1
    epoch, rest = divmod(run.step, run.steps_per_epoch)
    if rest == 0 or run.step == run.total_steps:
        values |= held_out_metrics(run)
        if run.selects:
            values |= selector_report(run.selector, run.out, epoch + (rest > 0))
    values["time/step"] = time.perf_counter() - started
    metrics.log_metrics(run.metrics_file, values)
    if run.step % args.save_every == 0 or run.step == run.total_steps:
        folder.save_checkpoint(run.out, run.step, run.model, {
            "selector": run.selector.state_dict(), **(state or {}),
            **{name: optimizer.state_dict() for name, optimizer in run.optimizers.items()}})
    run.progress.set_postfix(upper=values["upper_loss"], lower=values["lower_loss"], refresh=False)
    run.progress.update()


def held_out_metrics(run):
    """Mean losses of the held-out rows, and the share of trusted answers given exactly.

    Of preference pairs: the DPO loss, the share of pairs ranked right, the mean margin.
    """
    values, reference, beta = {}, run.reference["upper_heldout"], run.args.dpo_beta
    if reference is not None:
        logps = pair_logps(run.model, run.levels.upper_heldout, "upper_heldout")
        margins = dpo_margins(logps, reference, beta)
        values = {"upper_heldout": upper_losses(logps, None, reference, beta).mean().item(),
                  "upper_accuracy": (margins > 0).double().mean().item(),
                  "upper_margin": margins.mean().item()}
    for name in ("upper_heldout", "lower_heldout"):
        rows = getattr(run.levels, name)
        if rows is not None and name not in values:
            losses, lengths, *exact = row_losses(run.model, rows, label=name,
                                                 greedy=name == "upper_heldout")
            values |= mean_losses(losses, lengths, name)
            if exact:
                values["upper_exact"] = exact[0].double().mean().item()
    return values


def selector_report(selector, out, epoch):
    """Save omega after an epoch; its diagnostics as metrics, and a warning when it says little."""
    folder.write_once(out / "weights" / f"epoch_{epoch}.safetensors",
                      save({"omega": selector.logits.cpu().contiguous()}))
    report = selector.diagnostics()
    if report["uniform"] and len(selector.logits) > 1:
        tqdm.write(f"epoch {epoch}: the weights are still nearly uniform (1 % to 99 % quantile "
                   f"{report['weight_q01']:.3f} to {report['weight_q99']:.3f}); only their order "
                   "informs; a larger --omega-lr spreads them")
    if report["collapsed"]:
        tqdm.write(f"epoch {epoch}: the selector has collapsed onto {report['ess']:.1f} of "
                   f"{len(selector.logits)} rows; lower --omega-lr")
    return {f"omega/{key}": value for key, value in report.items()}
