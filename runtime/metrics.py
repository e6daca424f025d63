"""metrics.jsonl: one dictionary a step.

Wall-clock keys live under `time/`; all else is deterministic.
"""

import contextlib
import json
import math
import os
from pathlib import Path

from runtime.processes import rank
from utils import UserError, write_atomic


def open_metrics(out, step):
    """`metrics.jsonl` opened for appending, cut back to the rows before `step` (after a resume).

    The first process writes; the lines of the others go nowhere.
    """
    if rank() > 0:
        return open(os.devnull, "w")
    path = Path(out) / "metrics.jsonl"
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the line that was being written at the kill
                if json.loads(line)["step"] < step:
                    kept.append(line + "\n")
    write_atomic(path, "".join(kept))
    return open(path, "a", buffering=1)


def log_metrics(file, metrics):
    """One dictionary, one line. Wall-clock keys live under `time/`; all else is deterministic."""
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"step {metrics['step']}: {key} is {value}; lower --lr and start again "
                            "in another --out")
    file.write(json.dumps(metrics) + "\n")
