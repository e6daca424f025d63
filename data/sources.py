"""Where rows come from: files, folders, hub names -> (place, row), the place for messages.

A split is written behind the source: `owner/name:config@test`, `folder@validation`.
"""

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import Counter
from pathlib import Path

from runtime.hub import hub_answers
from utils import UserError, first_line

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".csv")
KNOWN = (*SUFFIXES, ".gz", ".zst", ".bz2", ".xz", ".zip", ".ndjson", ".tsv", ".arrow", ".xlsx")
BATCH = 1000  # rows of a parquet file or a saved data set read at a time


def find_parts(source):
    """The parts of a source in order: paths of data files, or one `datasets.Dataset`."""
    split = None
    if not path_exists(source) and "@" in str(source).rpartition("/")[2]:
        source, _, split = str(source).rpartition("@")
    path = Path(source)
    if path.is_file():
        if split:
            raise UserError(f"{source}@{split}: a file has no splits; name the file alone")
        if not _is_data(path):
            raise UserError(f"{source}: unknown file type; known: {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        return _folder_parts(path, split)
    if path_exists(path):
        raise UserError(f"{source}: a pipe or a device; its rows are read more than once, so write "
                        "them into a file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", str(source)) and not _is_data(path) \
            and not str(source).startswith("."):
        return [_load_hub(str(source), split or "train")]
    raise UserError(f"{source}: no such file or folder (a hub data set reads owner/name, "
                    "owner/name:config or owner/name:config@split; `python -m paper.recipes` "
                    "makes the paper's)")


def _is_data(path):
    return path.name.lower().endswith(SUFFIXES)


def path_exists(path):
    """Whether there is such a file or folder; `UserError` for a name that no file can have."""
    try:
        return Path(path).exists()
    except OSError as error:
        raise UserError(f"{str(path)[:80]}: {error.strerror}") from None


def _folder_parts(folder, split):
    import datasets

    if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:
            raise UserError(f"{folder}: cannot be read ({first_line(error)})") from None
        if isinstance(saved, dict):
            if (split or "train") not in saved:
                raise UserError(f"{folder}: no split \"{split or 'train'}\"; it has "
                                + ", ".join(saved))
            saved = saved[split or "train"]
        return [saved]
    every = sorted(  # a folder behind a link is named and not read: it may lead back here
        path for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (path.is_symlink() if path.is_dir() else path.name.lower().endswith(KNOWN)))
    files = [path for path in every if _is_data(path) and path.is_file()]
    word = re.compile(rf"(^|[^a-z]){re.escape((split or 'train').lower())}(ing)?($|[^a-z])")
    named = [path for path in files if word.search(str(path.relative_to(folder)).lower())]
    # Without a split, files named "train" win: test files beside them must not slip into training.
    chosen = named or ([] if split else files)
    if not chosen:
        what = f' of a split "{split}"' if split else ""
        raise UserError(f"{folder}: no {'/'.join(SUFFIXES)} file{what} in this folder")
    if left := [str(path.relative_to(folder)) for path in every if path not in chosen]:
        print(f"{folder}: reads {len(chosen)} of {len(every)} files, not " + ", ".join(
            left[:3]) + ", ..." * (len(left) > 3))
    return chosen


def _load_hub(source, split):
    import datasets

    name, _, config = source.partition(":")
    reachable = hub_answers("dataset_info", name, "data set")
    if not reachable:
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except Exception as error:
        if reachable:
            raise UserError(f"{source}: cannot be loaded ({first_line(error)})") from None
        raise UserError(f"{source}: no such file or folder, the hub cannot be reached, and it is "
                        "not in the local cache; check the network or pass a file") from None


def read_part(part, source):
    """Yield (place, row) for each row of a part; the place is for messages."""
    name, number = part if isinstance(part, Path) else source, 0
    try:
        suffix = part.suffix.lower() if isinstance(part, Path) else ".parquet"
        if suffix != ".parquet":
            yield from (_read_csv if suffix == ".csv" else _read_json)(part)
            return
        if isinstance(part, Path):
            rows = _parquet_rows(part)
        elif "Json(" in str(part.features):  # in Arrow its values are text
            rows = part
        else:  # sounds and images stay bytes
            rows = (row for batch in part.with_format("arrow").iter(BATCH)
                    for row in batch.to_pylist())
        for row in rows:
            yield f"{name} row {number}", row
            number += 1
    except (OSError, EOFError, zlib.error, ImportError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{name}: {reason}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: among the {BATCH} rows from row {number}: not valid UTF-8 "
                        f"({error})") from None
    except (OverflowError, ValueError) as error:  # such as a date after the year 9999
        raise UserError(f"{name}: among the {BATCH} rows from row {number}: a value that cannot be "
                        f"read ({first_line(error)}); leave its column out") from None


def _one_value_a_key(pairs):
    """A JSON object; Python's own keeps the last of two values without a word."""
    if len(row := dict(pairs)) < len(pairs):
        (key, _), = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'two values for the key "{key}"')
    return row


_decode = json.JSONDecoder(object_pairs_hook=_one_value_a_key).decode


def parse_json(content, place):
    """The value of JSON bytes. Half a surrogate pair passes: `layouts.text_of` replaces it."""
    try:
        return _decode(content.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON ({error})") from None


def _check_text(file, path):
    """Move behind a mark of UTF-8; `UserError` for what is not UTF-8 from its first bytes on."""
    head = file.read(4)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise UserError(f"{path}: written in UTF-16, or no text at all; save it as UTF-8")
    file.seek(3 if head.startswith(codecs.BOM_UTF8) else 0)


def _read_json(path):
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        _check_text(file, path)
        start = file.tell()
        # Unless called .jsonl, a file is a list of objects, or one object a line.
        if path.suffix.lower() != ".jsonl" and file.read(4096).lstrip()[:1] == b"[":
            file.seek(start)
            for number, row in enumerate(parse_json(file.read(), path)):
                yield f"{path} element {number}", row
            return
        file.seek(start)
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path} line {number}"
                if line.strip() == b"[":
                    raise UserError(f"{place}: a list begins, not an object; call the file .json")
                yield place, parse_json(line, place)


def _check_header(path, names):
    """`UserError` for a name that two columns have; nameless ones, as spreadsheets write, pass."""
    if doubled := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UserError(f'{path}: {names.count(doubled[0])} columns are called "{doubled[0]}"; '
                        "rename or remove all but one")


def _read_csv(path):
    # Python's reader keeps every cell a string: an answer "007" must not become the number 7.
    csv.field_size_limit(2**31 - 1)
    with open(path, encoding="utf-8", newline="") as file:
        _check_text(file.buffer, path)
        reader = csv.DictReader(file, strict=True)
        try:
            _check_header(path, reader.fieldnames or ())
            for row in reader:
                place = f"{path} line {reader.line_num}"
                if None in row or None in row.values():
                    raise UserError(f"{place}: not as many cells as the header has columns")
                yield place, row
        except UnicodeDecodeError as error:  # read ahead of the lines
            raise UserError(f"{path}: not UTF-8 ({error}); save it as UTF-8") from None
        except csv.Error as error:
            raise UserError(f"{path} line {reader.line_num + 1}: not valid CSV ({error})") from None


def _parquet_rows(path):
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_header(path, file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=BATCH):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a valid parquet file ({first_line(error)})") from None
