"""Rows made once and kept: a folder with rows.arrow and report.json, checked at every opening.

A half-made folder starts with ".partial-" and takes its name when it is whole and on the disk.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path

from utils import UserError, sync, write_atomic


def file_hash(path):
    """sha256 of a file's content, read in pieces (2 GB a second)."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def open_or_make(folder, build):
    """(rows, report) of a cache folder; one that is missing or damaged is made first.

    build(path): write the rows to this Arrow file, return a report that names "columns" to show.
    """
    if cached := open_rows(folder):
        return cached
    folder.parent.mkdir(parents=True, exist_ok=True)
    with half_made(folder.parent) as partial:
        try:
            report = build(partial / "rows.arrow")
            write_atomic(partial / "report.json", json.dumps(
                report | {"checksum": checksum(partial / "rows.arrow", report)}))
            sync(partial / "rows.arrow")
            try:
                os.rename(partial, folder)
            except OSError:  # another process was faster, with the same rows, or it is damaged
                if open_rows(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(partial, folder)
            sync(folder.parent)
        except OSError:
            if open_rows(folder) is None:
                raise
    if cached := open_rows(folder):
        return cached
    raise UserError(f"{folder}: rows just written there cannot be read back; check the disk or "
                    "choose another --cache-dir")


def open_rows(folder):
    """(rows, report) of a finished cache folder, or None when it is missing or damaged."""
    import datasets

    try:
        report = json.loads((folder / "report.json").read_text())
        if report.pop("checksum") == checksum(folder / "rows.arrow", report):
            rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
            return rows.select_columns(report["columns"]), report
    except Exception:  # damaged or half there in any way: made again
        pass
    return None


def checksum(path, report):
    """CRC-32 of the report and the file, read in pieces (7 GB a second)."""
    value = zlib.crc32(json.dumps(report).encode())
    with open(path, "rb") as file:
        while part := file.read(2**20):
            value = zlib.crc32(part, value)
    return value


@contextlib.contextmanager
def half_made(cache_dir):
    """A new folder in `cache_dir` that is gone afterwards, under a lock that all makers share.

    Who finds no maker at work clears what killed ones have left: locks die with their process.
    """
    with contextlib.ExitStack() as stack:
        lock = os.open(cache_dir, os.O_RDONLY)
        stack.callback(os.close, lock)
        with contextlib.suppress(OSError):  # others are at work, or this file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for partial in cache_dir.glob(".partial-*"):
                shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache_dir))
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        yield partial
