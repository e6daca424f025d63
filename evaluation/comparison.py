"""Finished runs side by side: `python eval.py compare RUN [RUN ...]`.

The paper does not define the lower loss of its tables for online runs, and a model scored on its
own text flatters itself, so there are three columns: `lower_original` (the original responses of
all lower rows, the same for every method), `lower_heldout` (clean rows never trained on) and
`lower_kept` (the method's own selected rows; `eval.py losses` adds `lower_refined`, those and the
rows with a recommended answer, which replaces the original).
"""

import itertools
import json
import math
import os
import re
import statistics

from evaluation.runs import read_result
from evaluation.texts import show_table
from utils import UserError

SEQUENCE = ("upper_heldout", "lower_original", "lower_heldout", "lower_kept", "lower_refined")
COLUMNS = (*SEQUENCE, "upper_exact", "upper_accuracy", "weight/auroc", "final/auroc", "base/auroc",
           "length/auroc")
PER_TOKEN = tuple(f"{name}_per_token" for name in SEQUENCE)
# Arguments that make no other experiment: runs that differ in nothing else are seeds of one.
SAME_EXPERIMENT = ("seed", "out", "resume", "save_every", "dry_run", "cache_dir", "merge",
                   "skip_scores", "device", "fsdp")
OF_A_MASK_FILE = ("masked_rows", "keep_fraction")  # made from it and the seed's rows
# Arguments that say which rows a held-out set or the lower level holds.
DATA_ARGUMENTS = {
    "upper_heldout": ("upper_loss", "upper_columns", "template", "turns", "max_length", "model",
                      "toy"),
    "lower": ("lower_columns", "lower_limit", "template", "turns", "max_length", "model", "toy"),
    "lower_heldout": ("lower_columns", "template", "turns", "max_length", "model", "toy")}


# --- the same rows --------------------------------------------------------------------------------

def set_arguments(run, name):
    """What a set of rows is made of, comparable between runs: (source, DATA_ARGUMENTS[name]...)."""
    args = dict(vars(run.args))
    source = args.get(name)
    if name == "upper_heldout" and not source and args.get("upper"):
        source = f"a tenth of {args['upper']}, limit {args.get('upper_limit')}"
    if isinstance(source, str) and os.path.exists(source):
        source = os.path.abspath(source)
    return source, *(args.get(key) for key in DATA_ARGUMENTS[name])


def drawn(run, name):
    """Whether the seed decides which rows a set holds: the toy's, a tenth held out, a limit's."""
    args = run.args
    return bool(getattr(args, "toy", False)
                or (name == "upper_heldout" and not getattr(args, "upper_heldout", None))
                or (name == "lower" and getattr(args, "lower_limit", None)))


def check_same_data(runs):
    """`UserError` unless all runs were evaluated on the same rows by the same tokenizer.

    Another seed draws other rows where it draws them (see `drawn`), and --keep leaves a part of the
    lower ones. A set that a run does not have is not compared.
    """
    for name, keys in DATA_ARGUMENTS.items():
        holders = [run for run in runs if run.config["data"].get(name) is not None]
        for one, two in itertools.combinations(holders, 2):
            if one.config["data"][name] == two.config["data"][name]:
                continue
            differences = [f"{key}: {a or 'the default'} and {b or 'the default'}" for key, a, b in
                           zip((name, *keys), set_arguments(one, name), set_arguments(two, name),
                               strict=True) if a != b]
            own = ("seed",) * drawn(one, name) + ("keep",) * (name == "lower")
            if not differences and any(getattr(one.args, key, None) != getattr(two.args, key, None)
                                       for key in own):
                continue
            why = differences[0] if differences else f"the rows of {name} changed between them"
            raise UserError(f"{one.folder} and {two.folder} are runs of different data ({why}): "
                            "their losses do not compare")


# --- seeds in one row -----------------------------------------------------------------------------

def student_t(freedom):
    """The 97.5 % quantile of Student's t, to 1e-3: exact for 1-6, else Cornish and Fisher."""
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469}
    z, n = 1.959964, freedom
    return exact.get(n) or (z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
                            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3))


def final_metrics(run):
    """The result of a run with what `eval.py losses` measured; the columns of the comparison."""
    if run.result is None:
        read_result(run.folder)  # says what is missing
    columns = {*run.result, *COLUMNS, *PER_TOKEN}
    values = run.result | {key: value for key, value in run.extra.items() if key in columns}
    if "weight_unmasked/auroc" in values:
        # Masked rows were judged by their generated answers: labels fit the unmasked rows alone.
        values |= {k.replace("_unmasked/", "/"): v for k, v in values.items() if "_unmasked/" in k}
    if getattr(run.args, "keep", None):  # of the kept rows alone, so no other run's compares
        values = {key: value for key, value in values.items() if not key.endswith("auroc")}
    return values


def shared_name(names):
    """bds/seed-0, bds/seed-1: bds. The name of a single run is its own."""
    if len(names) == 1:
        return names[0]
    prefix = re.sub(r"seed-\d*$", "", os.path.commonprefix(names))  # noqa: RUF071
    return prefix.rstrip("/-_. ") or names[0]


def comparison_rows(runs):
    """[{name, n, key: {mean, std, low, high, n}}], seeds of one experiment in one row.

    std over the n runs that have a value; low and high are the 95 % interval of the mean (Student's
    t), None for one run.
    """
    check_same_data(runs)
    groups, folders = {}, set()
    for run in runs:
        if (folder := os.path.realpath(run.folder)) in folders:
            raise UserError(f"{run.folder}: named twice, and a seed counts once; leave one out")
        folders.add(folder)
        args = vars(run.args)
        free = SAME_EXPERIMENT + OF_A_MASK_FILE * ("masked_rows" in args)
        key = json.dumps({k: v for k, v in args.items() if k not in free}, sort_keys=True)
        while any(run.args.seed == other.args.seed for other in groups.get(key, ())):
            key += " again"  # a seed counts once
        groups.setdefault(key, []).append(run)
    rows = []
    for members in groups.values():
        row = {"name": shared_name([run.name for run in members]), "n": len(members)}
        finals = [final_metrics(run) for run in members]
        for key in (*COLUMNS, *PER_TOKEN):
            values = [final[key] for final in finals if final.get(key) is not None]
            if not values:
                continue
            mean, n = statistics.fmean(values), len(values)
            std = statistics.stdev(values) if n > 1 else None
            half = student_t(n - 1) * std / math.sqrt(n) if n > 1 else None
            row[key] = {"mean": mean, "std": std, "low": mean - half if n > 1 else None,
                        "high": mean + half if n > 1 else None, "n": n}
        rows.append(row)
    for called in (shared_name, lambda folders: folders[0]):  # until all names differ
        names = [row["name"] for row in rows]
        for row, members in zip(rows, groups.values(), strict=True):
            if names.count(row["name"]) > 1:
                row["name"] = called([str(run.folder) for run in members])
    return rows


def comparison_cells(rows, per_token=False, interval=False):
    """(header, cells) of `comparison_rows`, empty columns left out.

    A value that not all runs of a row have says how many do.
    """
    suffix = "_per_token" if per_token else ""
    keys = [c for c in (SEQUENCE if per_token or interval else COLUMNS)
            if any(c + suffix in row for row in rows)]
    cells = []
    for row in rows:
        values = [row.get(key + suffix) for key in keys]
        texts = ["-" if v is None else (
                 f"[{v['low']:.4f}, {v['high']:.4f}]" if interval and v["std"] is not None else
                 f"{v['mean']:.4f}" + (f" ± {v['std']:.4f}" if v["std"] is not None else ""))
                 + (f" (of {v['n']})" if v["n"] < row["n"] else "") for v in values]
        cells.append([row["name"], row["n"], *texts])
    return ["run", "n", *keys], cells


def print_comparison(rows):
    print("nats a token, sequence mean; ± is the standard deviation over seeds; AUROCs of an\n"
          "online run are over its unmasked rows, of a run on kept rows left out")
    show_table(*comparison_cells(rows))
    if any(row["n"] > 1 for row in rows):
        print("\n95 % interval of the mean (Student's t over seeds)")
        show_table(*comparison_cells([r for r in rows if r["n"] > 1], interval=True))
    print("\nnats a token, token mean")
    show_table(*comparison_cells(rows, per_token=True))
