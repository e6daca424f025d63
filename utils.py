"""The small shared module: one class of errors, atomic files, json lines, hashes, a text table.

Nothing here knows the method, models or processes (those are in runtime/).
"""

import errno
import hashlib
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost 80x on busy cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: a quarter of the page faults
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # a network look-up on local loads


class UserError(Exception):
    """Bad input: one line (file or flag, row, what is wrong, what to do), exit code 2."""


def write_atomic(path, content):
    """Write str or bytes to `path` so that readers see the old file or the whole new one."""
    write_parts(path, [content.encode() if isinstance(content, str) else content])


def write_parts(path, parts):
    """`write_atomic` of bytes that come in parts, none of which is kept. The half-written file
    has the process's number in its name: two may write one path at once."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(path):
    """Have the system write a file, or the names in a folder, to the disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems sync no folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_jsonl(path, rows):
    """Write dictionaries to `path`, one JSON object a line, atomically (NaN is refused)."""
    write_parts(path, ((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
                       for row in rows))


def read_jsonl(path):
    """The rows of a jsonl file as a list of dictionaries; `UserError` names file and line."""
    return list(each_jsonl(path))


def each_jsonl(path):
    """`read_jsonl` a row at a time."""
    number = 0
    try:
        with open(path, "rb") as file:  # decoded line by line, so that the message names the line
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    yield row
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such file" + ", but a folder" * os.path.isdir(path)) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} line {number or 1}: not valid JSON ({error})") from None


def content_hash(*texts):
    """16 hex digits of sha256 over the texts, separated so that ("ab", "c") != ("a", "bc")."""
    return hashlib.sha256("\x1f".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def first_line(error):
    """The first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def table(header, rows):
    """A plain-text table, columns aligned, numbers with four digits."""
    cells = [[f"{c:.4f}" if isinstance(c, float) else "-" if c is None else str(c) for c in row]
             for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in
                       enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
