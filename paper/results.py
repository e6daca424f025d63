"""Stored results: results/NAME.json holds every seed's metrics and what they were made by."""

import datetime
import json
import os
import platform
import shlex
import subprocess
from pathlib import Path

import utils
from utils import UserError

ROOT = Path(__file__).resolve().parents[1]

# {metric of result.json: heading}
UPPER, LOWER = "upper_heldout", "lower_heldout"
LOSSES = {"upper_heldout": "held-out upper", "upper_exact": "exact answers",
          "upper_accuracy": "pairs right", "lower_original": "lower, originals",
          "lower_heldout": "lower, clean", "lower_kept": "lower, kept"}
RANKS = {f"{name}/{key}": f"{name}, {key.removeprefix('auroc/')}"
         for name in ("weight", "final", "base", "length")
         for key in ("auroc/contrary", "auroc/plain")}


def cpu_name():
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                platform.machine())


def save_results(path, command, results, hardware=None, **more):
    """Results as json with what they were made by: command, date, commit, hardware, versions.

    hardware: what ran (this machine's cores), more: other entries of the file.
    """
    import torch

    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT,
                                capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        commit = None
    path.parent.mkdir(parents=True, exist_ok=True)
    cores = f"{os.cpu_count()} cores, {cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"
    utils.write_atomic(path, json.dumps({
        "command": command, "date": datetime.date.today().isoformat(), "commit": commit or None,
        "hardware": hardware or cores,
        "python": platform.python_version(), "torch": torch.__version__, **more,
        "results": results}, indent=1) + "\n")


def stored_name(args):
    return f"{args.name}_{args.target.replace('-', '_')}"


def store(args, results, columns, **more):
    """Save results/NAME_TARGET.json; columns {key: heading} are those of the table printed.

    `UserError` where the runs of one table computed in two dtypes: --dtype auto follows the
    processor, and a piece or a resumed table may come from another one.
    """
    made = {run["dtype"]: method for method, runs in results.items() for run in runs
            if "dtype" in run}
    if len(made) > 1:
        (one, first), (other, second) = list(made.items())[:2]
        raise UserError(f"{stored_name(args)}: {first!r} was trained in {one}, {second!r} in "
                        f"{other}; make the table on one kind of processor, or name a --dtype in "
                        "--train and another --name")
    file = Path("results") / f"{stored_name(args)}.json"
    before = json.loads(file.read_text())["command"] if file.exists() else args.command
    save_results(file, args.command, results, columns=columns, **more)
    print(f"stored: {file}" + (f", in place of what was made by: {before}"
                               if before != args.command else ""))


def without_flags(words, *flags):
    """The words less these flags and their values, given as `--flag value` or `--flag=value`."""
    kept, skip = [], False
    for word in words:
        if not skip and word.split("=")[0] not in flags:
            kept.append(word)
        skip = not skip and word in flags
    return kept


def stored_before(args):
    """results/NAME_TARGET.json, to which --add adds, or None where there is none yet.

    `UserError` for a file made by other words than args.command, --only and its value aside.
    """
    path = Path("results") / f"{stored_name(args)}.json"
    if not args.add or not path.exists():
        return None
    before = read_stored(stored_name(args), "--add")
    here, there = (without_flags(shlex.split(command), "--only")
                   for command in (args.command, before["command"]))
    if here != there:
        raise UserError(f"{path} was made by {before['command']}: nothing but --only may differ; "
                        "give another --name, or leave out --add")
    return before


def added(args, before, results, order):
    """The results and the methods that `stored_before` has besides, sorted as `order`.

    args.command then names all of them. Also returns what made the others, one entry a command:
    [{methods, date, commit, hardware}].
    """
    pieces = before.get("pieces", [])
    known = {name for piece in pieces for name in piece["methods"]}
    pieces = [*pieces, {"methods": [name for name in before["results"] if name not in known],
                        **{key: before[key] for key in ("date", "commit", "hardware")}}]
    pieces = [piece | {"methods": [name for name in piece["methods"] if name not in results]}
              for piece in pieces]
    results = before["results"] | results
    names = sorted(results, key=lambda name: order.index(name) if name in order else -1)
    args.command = shlex.join([*without_flags(shlex.split(args.command), "--only"), "--only",
                               "; ".join(name for name in names if name in order)])
    return {name: results[name] for name in names}, [p for p in pieces if p["methods"]]


def read_stored(name, reader):
    """The entries of results/NAME.json; reader: the file that has a place for them."""
    file = Path("results") / f"{name}.json"
    if not file.exists():
        raise UserError(f"{file}: missing; {reader} has a place for it")
    return json.loads(file.read_text())
