"""A run folder read from its files: one reader a file kind, which checks every type once.

A file may be damaged, half-written or made by somebody else. Whatever is wrong becomes one line
that names the file and the place; the code behind the readers need not ask again.
"""

import functools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

from safetensors.torch import load_file

import utils
from evaluation.texts import one_line
from utils import UserError

# Files and folders that training and `eval.py losses` write and that this package reads.
RUN_FILES = ("config.json", "metrics.jsonl", "result.json", "base.json", "losses.json",
             "weights.jsonl", "curated.jsonl", "shown.jsonl", "tests.json", "search.json",
             "weights", "adapter", "checkpoints", "merged", "run.lock")


# --- values ---------------------------------------------------------------------------------------

def is_number(value):
    """Whether a JSON value is a number (true and false are none) that can be squared and summed."""
    return type(value) in (int, float) and abs(value) < 1e150


def is_talk(value):
    """Whether a JSON value is a list of messages {"role": text, "content": text}."""
    return type(value) is list and all(
        type(message) is dict and {"role", "content"} <= message.keys()
        and all(type(own) is str or key == "weight" for key, own in message.items())
        for message in value)


KINDS = {
    "text": lambda value: type(value) is str,
    "true or false": lambda value: type(value) is bool,
    "a number": is_number,
    "a whole number": lambda value: type(value) is int and abs(value) < 2**63,
    "a list of messages": is_talk,
}
TEXT, FLAG, NUMBER, WHOLE, TALK = KINDS

RANKING = {"row_id": WHOLE, "hash": TEXT, "rank": NUMBER}
# More columns of a ranking: all rows have one, or none has it.
COLUMNS_OF_RANKING = {"kept": FLAG, "weight": NUMBER, "masked": FLAG, "base_loss": NUMBER,
                      "final_loss": NUMBER, "attainable_loss": NUMBER, "length": NUMBER,
                      "bad": FLAG}
# What row tests say; null where a test has nothing to judge.
TESTED = {"reason": TEXT, **dict.fromkeys(("surprise", "end", "relevance", "fluency", "slip",
                                           "peak", "repetition", "echo", "guidance"), NUMBER)}
SHOWN = {"row_id": WHOLE, "hash": TEXT, "prompt": TEXT, "response": TEXT}
CURATED = RANKING | SHOWN | {"kept": FLAG}
MORE_OF_CURATED = COLUMNS_OF_RANKING | TESTED | {
    "refined": TEXT, "recommended": TEXT, "margin": NUMBER, "kind": TEXT, "way": TEXT, "why": TEXT,
    "messages": TALK}
ARGUMENTS = {"method": TEXT, "seed": WHOLE, "epochs": WHOLE, "batch": WHOLE}
MORE_ARGUMENTS = {
    **dict.fromkeys(("toy", "four_bit"), FLAG), "num_answers": WHOLE, "correction": NUMBER,
    **dict.fromkeys(("lower", "upper", "upper_heldout", "lower_heldout", "lower_columns",
                     "upper_columns", "model", "adapter", "dtype", "template", "turns",
                     "upper_loss", "cache_dir", "keep"), TEXT)}
RECOMMENDATIONS = ("refined", "undecided", "original")


def called(value):
    """A JSON value in a message."""
    try:
        return one_line(json.dumps(value), 40)
    except RecursionError:
        return "a deeply nested value"


def check_entry(place, entry, needed, optional=()):
    """`UserError` unless `entry` is an object with the `needed` keys, each of its kind.

    needed, optional: {key: one of KINDS}. An optional value may be missing or null.
    """
    if type(entry) is not dict:
        raise UserError(f"{place}: must be an object, not {called(entry)}")
    for key, kind in needed.items():
        if key not in entry:
            raise UserError(f"{place}: no {key!r}; needed: {', '.join(needed)}")
        if not KINDS[kind](entry[key]):
            raise UserError(f"{place}: the {key} {called(entry[key])} is not {kind}")
    for key, kind in dict(optional).items():
        if entry.get(key) is not None and not KINDS[kind](entry[key]):
            raise UserError(f"{place}: the {key} {called(entry[key])} is not {kind}")


def check_figures(place, values, texts=()):
    """`UserError` unless every value is a finite number, true, false or null.

    texts: keys that may also be text.
    """
    check_entry(place, values, {})
    for key, value in values.items():
        if not (value is None or type(value) is bool or is_number(value)
                or (key in texts and type(value) is str)):
            raise UserError(f"{place}: the value {called(value)} of {one_line(key)!r} is not a "
                            "number")


# --- JSON -----------------------------------------------------------------------------------------

def _no_constant(name):
    raise ValueError(f"{name} is not a number")


def json_value(place, text, nan=False):
    """The value of a JSON text. nan: whether NaN and Infinity are numbers there."""
    try:
        return json.loads(text, parse_constant=float if nan else _no_constant)
    except ValueError as error:
        raise UserError(f"{place}: not valid JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{place}: not valid JSON (nested too deeply)") from None


def whole_texts(row):
    """`row` without lone surrogates in its texts: JSON may hold them, no file in UTF-8 can."""
    return {key: value.encode("utf-8", "replace").decode() if type(value) is str else value
            for key, value in row.items()}


def read_text(path):
    """A UTF-8 file, with or without a byte order mark."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({utils.first_line(error)})") from None


def each_line(path):
    """(place, value) of every line of a jsonl file, a line at a time: the file may be large."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path} line {number}", json_value(f"{path} line {number}", line)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} after line {number}: cannot be read "
                        f"({utils.first_line(error)})") from None


# --- one reader a file kind -----------------------------------------------------------------------

def read_config(folder):
    """`config.json`: {"args", "environment", "data"}, objects; data holds a hash of each set."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder}: no config.json; not a run folder of train_offline.py or "
                        "train_online.py")
    try:
        config = json_value("the file", read_text(path), nan=True)  # --clip inf
        check_entry("the file", config, {})
        for part in ("args", "environment", "data"):
            check_entry(f"{part!r}", config.setdefault(part, {}), {})
        check_entry("'args'", config["args"], ARGUMENTS, MORE_ARGUMENTS)
        check_entry("'data'", config["data"], dict.fromkeys(config["data"], TEXT))
    except UserError as error:
        raise UserError(f"{path}: not a run's configuration ({error})") from None
    return config


def read_metrics(path):
    """`metrics.jsonl`: one dictionary of figures a step, without those that are null."""
    lines, rows = read_text(path).split("\n") if Path(path).exists() else [], []
    for number, line in enumerate(lines, 1):
        place = f"{path} line {number}"
        try:
            row = json_value(place, line) if line.strip() else None
        except UserError:
            if number < len(lines):
                raise
            break  # no line end yet: a run may be writing this line just now
        if row is not None:
            check_figures(place, row)
            check_entry(place, row, {"step": WHOLE, "epoch": WHOLE})
            rows.append({key: value for key, value in row.items() if value is not None})
    if not rows:
        raise UserError(f"{Path(path).parent}: no metrics.jsonl with a step in it; the run has not "
                        "taken a step yet")
    return rows


def read_result(folder):
    """`result.json`: the final metrics of a run folder."""
    path = Path(folder) / "result.json"
    if not path.is_file():
        raise UserError(f"{folder}: no result.json; not a run folder, or the run has not finished "
                        "(continue it with --resume)")
    result = json_value(path, read_text(path))
    check_entry(path, result, {})
    # A loss, a rate or an AUROC is never text.
    check_figures(path, result, [key for key in result
                                 if "/" not in key and not key.startswith(("upper_", "lower_"))])
    return result


def read_figures(path):
    """`base.json` or `losses.json`: {name: figure}; {} where the file does not exist."""
    figures = json_value(path, read_text(path)) if Path(path).exists() else {}
    check_figures(path, figures)
    return figures


def read_ranking(path):
    """The rows of `weights.jsonl`, `kept.jsonl` or another ranking, in the order of the file."""
    rows, columns, seen = [], None, set()
    for place, row in each_line(path):
        check_entry(place, row, RANKING, TESTED | {"kind": TEXT})
        if row["row_id"] in seen:
            raise UserError(f"{place}: row_id {row['row_id']} stands in the file twice; rank again")
        seen.add(row["row_id"])
        own = {key: kind for key, kind in COLUMNS_OF_RANKING.items() if key in row}
        columns = own if columns is None else columns
        if own.keys() != columns.keys():
            raise UserError(f"{place}: {', '.join(sorted(own.keys() ^ columns.keys()))} must stand "
                            "in every row or in none")
        check_entry(place, row, own)
        rows.append(row)
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return rows


def each_curated(path):
    """The rows of `curated.jsonl`, one at a time: it holds every text."""
    for place, row in each_line(path):
        check_entry(place, row, CURATED, MORE_OF_CURATED)
        if row.get("refined") is not None and row.get("recommended") not in RECOMMENDATIONS:
            raise UserError(f"{place}: a refined answer has recommended: "
                            f"{', '.join(RECOMMENDATIONS)}")
        if row.get("recommended") == "refined" and row.get("refined") is None:
            raise UserError(f"{place}: the refined answer is recommended and missing")
        yield whole_texts(row) | (
            {"messages": list(map(whole_texts, row["messages"]))} if row.get("messages") else {})


def read_shown(path):
    """{(row_id, hash): (prompt, response)} of `shown.jsonl`; {} where the file does not exist."""
    texts = {}
    for place, row in each_line(path) if Path(path).exists() else ():
        check_entry(place, row, SHOWN)
        row = whole_texts(row)
        texts[row["row_id"], row["hash"]] = row["prompt"], row["response"]
    return texts


def read_vector(path, name):
    """A one-dimensional tensor of finite numbers from a safetensors file, float64."""
    try:
        vector = load_file(path)[name]
    except Exception as error:  # safetensors, a missing file, a missing name, and torch
        raise UserError(f"{path}: cannot be read ({utils.first_line(error)})") from None
    if vector.dim() != 1 or not len(vector) or not vector.double().isfinite().all():
        raise UserError(f"{path}: {name} is not one finite number a row")
    return vector.double()


# --- a run ----------------------------------------------------------------------------------------

class Run:
    """A run folder as its files; everything is read when asked for, missing parts are None."""

    def __init__(self, folder):
        self.folder = Path(folder)
        # runs/bds/seed-0 is called bds/seed-0: the last part alone says too little.
        parts = self.folder.absolute().parts
        seeds = parts[-1].lower().startswith("seed") and len(parts) > 2
        self.name = "/".join(parts[-2:]) if seeds else parts[-1]
        self.config = read_config(folder)
        self.args = SimpleNamespace(**self.config["args"])

    @functools.cached_property
    def metrics(self):
        """One dictionary a step, without the figures that a step has not."""
        return read_metrics(self.folder / "metrics.jsonl")

    @functools.cached_property
    def result(self):
        """The final metrics, None while the run is not finished."""
        if not (self.folder / "result.json").exists():
            return None
        result = read_result(self.folder)
        check_entry(self.folder / "result.json", result,
                    {"method": TEXT, "seed": WHOLE, "rows": WHOLE})
        return result

    @functools.cached_property
    def extra(self):
        """Held-out metrics before training, and what `eval.py losses` measured afterwards."""
        return read_figures(self.folder / "base.json") | read_figures(self.folder / "losses.json")

    @functools.cached_property
    def rows(self):
        """Rows of weights.jsonl in the order of omega, which is that of row_id; or None."""
        path = self.folder / "weights.jsonl"
        return sorted(read_ranking(path), key=lambda r: r["row_id"]) if path.exists() else None

    @functools.cached_property
    def omegas(self):
        """{epoch: omega (N,) float64} of every epoch, {} for methods without a selector."""
        files = {int(match[1]): path for path in (self.folder / "weights").glob("*.safetensors")
                 if (match := re.fullmatch(r"epoch_(\d{1,9})", path.stem))}
        omegas = {epoch: read_vector(path, "omega") for epoch, path in sorted(files.items())}
        if len({len(omega) for omega in omegas.values()}) > 1:
            raise UserError(f"{self.folder / 'weights'}: the epochs hold omegas of different "
                            "numbers of rows; they are not of one run")
        return omegas

    @property
    def labelled(self):
        """Whether every position of omega has its row of weights.jsonl."""
        return bool(self.rows and self.omegas
                    and len(self.rows) == len(next(iter(self.omegas.values()))))


# --- where to write -------------------------------------------------------------------------------

def ranking_of(source):
    """The path of a ranking: a file, or of a run folder its weights.jsonl or curated.jsonl."""
    source = Path(source)
    if not source.is_dir():
        return source
    return next((source / f"{n}.jsonl" for n in ("weights", "curated")
                 if (source / f"{n}.jsonl").exists()), source / "weights.jsonl")


def make_parent(out):
    """Make the folder of a file that will be written; `UserError` before the work, not after."""
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: its folder cannot be made ({error.strerror}); choose another "
                        "path") from None
    if not os.access(Path(out).parent, os.W_OK):
        raise UserError(f"{out}: its folder may not be written to; choose another path")
    if Path(out).is_dir():
        raise UserError(f"{out}: is a folder; name a file")
    if Path(out).is_symlink() or (Path(out).exists() and not Path(out).is_file()):
        raise UserError(f"{out}: is not a regular file, but a link or a device; name a new file")


def data_files(folder):
    """The files of rows that a run's config.json names; none where it cannot be read."""
    try:
        args = json.loads((folder / "config.json").read_text())["args"]
        return [Path(args[name]) for name in ("lower", "upper", "upper_heldout", "lower_heldout")
                if args.get(name) and Path(args[name]).is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def check_output(path, *inputs):
    """Make the folder of `path`; `UserError` unless a file can be written there that is no input.

    inputs: files, and run folders, whose own files and data count. A file that others read as a
    run's must not be made either, so names decide, whether they exist or not.
    """
    make_parent(path)
    path = Path(path)
    target = path.resolve()
    for source in map(Path, inputs):
        for own in [*(source / name for name in RUN_FILES), *data_files(source)] if (
                source.is_dir()) else [source]:
            same = path.exists() and own.exists() and path.samefile(own)
            if same or own.resolve() in (target, *target.parents):
                raise UserError(f"{path}: would overwrite {own}; choose another file")
