"""metrics.jsonl: one dictionary a step."""

import contextlib
import json
import math
import os
from pathlib import Path

from runtime.processes import on_first, rank
from utils import UserError, write_atomic


def open_metrics(out, step):
    """Open `metrics.jsonl` for appending, cut back to the lines before `step` (after a resume).

    Raises `UserError` when one of these lines is missing. Only the first process writes.
    """
    path = Path(out) / "metrics.jsonl"
    on_first(lambda: _cut_back(path, step))
    if rank() > 0:
        return open(os.devnull, "w")
    return open(path, "a", buffering=1)


def _cut_back(path, step):
    path.touch()
    kept = []
    for line in path.read_text(errors="replace").splitlines()[:step]:
        with contextlib.suppress(ValueError, TypeError, KeyError):  # damaged
            if json.loads(line)["step"] == len(kept):
                kept.append(line + "\n")
    if len(kept) < step:
        raise UserError(
            f"{path}: the line of step {len(kept)} is missing or damaged, and the checkpoint was "
            f"saved after {step} steps; restore the file, or delete the checkpoints after step "
            f"{len(kept)} to go on from there"
        )
    write_atomic(path, "".join(kept))


def log_metrics(file, metrics):
    """Write one dictionary as one line. Keys under `time/` hold wall-clock times, all other values
    are deterministic. Raises `UserError` for a number that is not finite."""
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"step {metrics['step']}: {key} is {value}; lower --lr and start again in another "
                "--out"
            )
    file.write(json.dumps(metrics) + "\n")
