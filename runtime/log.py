"""metrics.jsonl, one dictionary a step, and the progress bar."""

import contextlib
import json
import math
import os
import time
from pathlib import Path

from runtime.processes import on_first, rank
from utils import UserError, write_atomic

# ruff: isort: split
from tqdm import tqdm


class Log:
    """The lines of `out`/metrics.jsonl from step `first` on, and a progress bar.

    After a resume the file is cut back to the steps before `first`; `UserError` when one of them
    is not there. Only the first process's lines are written.
    """

    def __init__(self, out, first, total, label):
        path = Path(out) / "metrics.jsonl"
        on_first(lambda: _cut_back(path, first))
        self.file = open(os.devnull if rank() else path, "a", buffering=1)  # noqa: SIM115, for good
        self.bar = tqdm(total=total, initial=first, desc=label, unit="step")

    def write(self, metrics, started):
        """One dictionary, one line; wall-clock keys live under `time/`, all else is deterministic.

        metrics: {name: number}; started: `time.perf_counter()` at the step's start.
        """
        for key, value in metrics.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(
                    f"step {metrics['step']}: {key} is {value}; lower --lr and start again in "
                    "another --out"
                )
        seconds = time.perf_counter() - started
        self.file.write(json.dumps(metrics | {"time/step": seconds}) + "\n")
        self.bar.set_postfix(
            upper=metrics["upper_loss"], lower=metrics["lower_loss"], refresh=False
        )
        self.bar.update()

    def close(self):
        self.file.close()
        self.bar.close()


def _cut_back(path, step):
    kept = []
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(
            ValueError, TypeError, KeyError
        ):  # half a line after a kill
            if json.loads(line)["step"] == len(kept) < step:
                kept.append(line + "\n")
    if len(kept) < step:
        raise UserError(
            f"{path}: the line of step {len(kept)} is missing or damaged, and the checkpoint has "
            f"step {step}; restore the file, or delete the checkpoints after step {len(kept)}"
        )
    write_atomic(path, "".join(kept))
