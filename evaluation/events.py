"""A run as TensorBoard event files: `python eval.py tensorboard RUN`."""

import math
from pathlib import Path

from utils import UserError


def write_events(run, out=None):
    """The metrics, and the weights of every epoch, as TensorBoard event files; their folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("TensorBoard is not installed: pip install tensorboard") from None
    out = Path(out or run.folder / "tensorboard")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds files already; remove them or choose another --out")
    metrics, omegas = run.metrics, run.omegas  # read before anything is written
    clock = (run.folder / "config.json").stat().st_mtime  # the run's start
    with SummaryWriter(str(out)) as writer:
        for row in metrics:
            clock += row.get("time/step", 0.0)
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "step" and math.isfinite(value):
                    writer.add_scalar(key, value, row["step"], walltime=clock)
        for epoch, omega in omegas.items():
            step = max((r["step"] for r in metrics if r["epoch"] < epoch), default=0)
            writer.add_histogram("weights", len(omega) * omega.softmax(0), step, walltime=clock)
    return out
