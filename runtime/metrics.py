"""metrics.jsonl: one dictionary a step."""

import contextlib
import json
import math
import os
from pathlib import Path

from runtime.processes import on_first, rank
from utils import UserError, write_atomic


def open_metrics(out, step):
    """`metrics.jsonl` opened for appending, cut back to the rows before `step` (after a resume).

    `UserError` when one of these is not there. Only the first process's lines are written.
    """
    path = Path(out) / "metrics.jsonl"
    on_first(lambda: _cut_back(path, step))
    return open(os.devnull, "w") if rank() else open(path, "a", buffering=1)


def _cut_back(path, step):
    kept = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # half a line after a kill
            if json.loads(line)["step"] == len(kept) < step:
                kept.append(line + "\n")
    if len(kept) < step:
        raise UserError(f"{path}: the line of step {len(kept)} is missing or damaged, and the "
                        f"checkpoint is of step {step}; restore the file, or delete the "
                        f"checkpoints after step {len(kept)} to go on from there")
    write_atomic(path, "".join(kept))


def log_metrics(file, metrics):
    """One dictionary, one line. Wall-clock keys live under `time/`; all else is deterministic."""
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"step {metrics['step']}: {key} is {value}; lower --lr and start again "
                            "in another --out")
    file.write(json.dumps(metrics) + "\n")
