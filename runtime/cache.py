"""Losses that depend on a model and rows alone, kept under --cache-dir for every later run."""

import json
from pathlib import Path

from runtime.processes import on_first, rank
from utils import content_hash, write_atomic

# ruff: isort: split
from safetensors.torch import load_file, save


def cached_losses(cache_dir, decides, num_rows, compute):
    """compute() -> (num_rows,) losses, or what it gave before for the same `decides`.

    decides: plain JSON values that fix every bit of the result: fingerprints of model and rows,
    versions, machine. All processes call it and compute together; the first reads and writes. A
    damaged file is made again; a folder that cannot be written to costs the cache, not the run.
    """
    key = content_hash(json.dumps(decides, sort_keys=True))
    file = Path(cache_dir) / "losses" / f"{key}.safetensors"
    losses = on_first(lambda: _read(file, num_rows))
    if losses is None:
        losses = compute()
        if rank() == 0:
            _write(file, losses)
    return losses


def _read(file, num_rows):
    try:
        return load_file(file)["losses"].view(num_rows)
    except Exception:  # missing, cut, of other rows: safetensors raises a dozen classes
        return None


def _write(file, losses):
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save({"losses": losses.contiguous()}))
    except OSError as error:
        print(f"warning: {file}: {error.strerror}; the next run computes its base losses again")
