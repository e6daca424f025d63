"""What depends on a model and rows alone, kept under --cache-dir for every later run."""

import json
from pathlib import Path

from runtime.processes import on_first, rank
from utils import content_hash, write_atomic

# ruff: isort: split
from safetensors.torch import load_file, save


def cached_columns(cache_dir, decides, names, num_rows, compute):
    """compute() -> {name: (num_rows,)}, or what it gave before for the same `decides`.

    decides: plain JSON values that fix every bit of the result: fingerprints of model and rows,
    versions, machine. All processes call it and compute together; the first reads and writes. A
    damaged file is made again; a folder that cannot be written to costs the cache, not the run.
    """
    key = content_hash(json.dumps(decides, sort_keys=True))
    file = Path(cache_dir) / "evidence" / f"{key}.safetensors"
    columns = on_first(lambda: _read(file, names, num_rows))
    if columns is None:
        columns = compute()
        try:
            if rank() == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(file, save({name: own.contiguous() for name, own in columns.items()}))
        except OSError as error:
            print(f"warning: {file}: {error.strerror}; the next run computes it again")
    return columns


def _read(file, names, num_rows):
    try:
        columns = load_file(file)
        return {name: columns[name].view(num_rows) for name in names}
    except Exception:  # missing, cut, of other rows: safetensors raises a dozen classes
        return None
