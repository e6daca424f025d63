"""Many runs of the scripts side by side: commands, seeds, what is done already, statistics.

A run is the file that ends it (FOLDER/result.json, or a ranking) and a command. Each gets one
thread; as many run at once as there are workers. A run whose file exists is not run again, and is
refused if another command made it; an interrupted training run is resumed.
"""

import concurrent.futures
import datetime
import json
import math
import multiprocessing
import os
import platform
import re
import runpy
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

import utils
from utils import UserError

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["train_offline", "train_online", "baselines", "peft", "transformers.generation.utils",
           "transformers.models.llama.modeling_llama"]


def slug(name):
    """A method's folder name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def run_all(runs, workers):
    """Run {file: command}, `workers` at a time. Output goes to a .log file beside the run.

    The log's first line is the command, and a finished run must have been made by the same one.
    Each command is a process of its own, forked from one that has torch and transformers imported:
    that saves a third of a short run. Raises `UserError` with the last line of the first log that
    failed.
    """
    for file, command in runs.items():
        check_command(file, command)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)

    def one(file, command):
        log = log_of(file)
        log.parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(command)
        if words[0].startswith("train"):
            words += ["--resume"]
        process = context.Process(target=script, args=(command, words, log))
        process.start()
        process.join()
        if process.exitcode:
            text = log.read_text().removeprefix(f"$ {command}\n").strip()
            last = (text.splitlines() or ["no output"])[-1]
            raise UserError(f"{command}: exit code {process.exitcode}: {last} (whole output in "
                            f"{log})")

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(one, file, command) for file, command in runs.items()
                   if not file.exists()]
        try:
            for future in tqdm(concurrent.futures.as_completed(futures), total=len(futures),
                               desc="runs", unit="run", disable=not futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_command(file, command):
    """`UserError` when the file exists and its log names another command; old logs name none."""
    log = log_of(file)
    text = log.read_text() if file.exists() and log.exists() else ""
    if text.startswith("$ ") and not text.startswith(f"$ {command}\n"):
        made = file.parent if file.name == "result.json" else file
        raise UserError(f"{made}: made by another command ({text[2:].splitlines()[0]}) than the "
                        f"one wanted now ({command}); choose another --name, or remove {made}")


def script(command, words, log):
    """In a process of its own: a script of this folder as from the command line."""
    with open(log, "w") as file:
        print(f"$ {command}", file=file, flush=True)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(ROOT / words[0]), *words[1:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


def log_of(file):
    return (file.parent.with_name(file.parent.name + ".log") if file.name == "result.json"
            else file.with_suffix(".log"))


def seconds_of(file):
    """Seconds of a run's training steps, or of a baseline's scoring as its RESULT line says."""
    if file.name == "result.json":
        return sum(row.get("time/step", 0.0)
                   for row in utils.read_jsonl(file.with_name("metrics.jsonl")))
    line = [line for line in log_of(file).read_text().splitlines() if line.startswith("RESULT ")]
    return json.loads(line[-1].removeprefix("RESULT "))["time/seconds"]


# --- statistics -----------------------------------------------------------------------------------

def mean_std(values):
    """(mean, standard deviation over runs, n) of the values that are numbers."""
    values = [v for v in values if isinstance(v, (int, float))]
    if not values:
        return None, None, 0
    return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0,
            len(values))


def cell(values):
    """"mean ± std" of a table, three decimals below 100, none above; "-" without a number."""
    mean, std, n = mean_std(values)
    if not n:
        return "-"
    digits = 3 if abs(mean) < 100 else 0
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if n > 1 else "")


def paired(first, second):
    """Mean difference of two methods over common seeds, and the two-sided sign-flip p-value.

    Exact: over all 2^n signs, the share whose mean difference is at least as large. With 4 seeds
    the smallest possible value is 0.125, so 4 of 4 is all that 4 seeds can say.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    observed, extreme = abs(sum(differences)), 0
    for signs in range(2 ** len(differences)):
        total = sum(d if signs >> i & 1 else -d for i, d in enumerate(differences))
        extreme += abs(total) >= observed - 1e-15
    return sum(differences) / len(differences), extreme / 2 ** len(differences)


def verdict(first, second):
    """Is `first` below `second`? "holds", "does not hold" or "not resolved", with the figures.

    holds: on every seed, of at least 4; does not hold: on every seed the other way round.
    """
    difference, p = paired(first, second)
    below = sum(a < b for a, b in zip(first, second, strict=True))
    above = sum(a > b for a, b in zip(first, second, strict=True))
    word = ("holds" if below == len(first) >= 4 else
            "does not hold" if above == len(first) >= 4 else "not resolved")
    return word, f"{difference:+.4f}, lower on {below} of {len(first)} seeds, p = {p:.3g}"


# --- results as json ------------------------------------------------------------------------------

def prefer_unmasked(run):
    """A result with the ranking metrics of unmasked rows in place of all rows'.

    Masked rows are judged by generated answers, so labels fit the unmasked rows alone. A kind of
    fault that no unmasked row has is left out.
    """
    found = {key.replace("_unmasked/", "/"): value for key, value in run.items()
             if "_unmasked/" in key}
    if not found:
        return run
    return {key: value for key, value in run.items()
            if not re.match(r"\w+/(auroc|precision|recall)\b", key)} | found


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
    utils.write_atomic(path, json.dumps({
        "command": command, "date": datetime.date.today().isoformat(), "commit": commit or None,
        "hardware": hardware or f"{os.cpu_count()} cores, {cpu_name()}",
        "python": platform.python_version(), "torch": torch.__version__, **more,
        "results": results}, indent=1) + "\n")


def cpu_name():
    """The processor's name as Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
                platform.machine())


# --- figures --------------------------------------------------------------------------------------

def new_figure(width, height, panels=1):
    """(figure, axes), at most three panels a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    columns = min(panels, 3)
    axes = figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def _points(axis, values):
    """Every seed as a dot, the mean as a line: {label: [value of each seed]}."""
    for x, runs in enumerate(values.values()):
        axis.plot([x] * len(runs), runs, "o", color="#8aa4c8", markersize=4)
        axis.plot([x - 0.25, x + 0.25], [mean_std(runs)[0]] * 2, color="#1f3b63", linewidth=2)
    axis.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)


def panels_figure(path, ylabel, panels, chance=None):
    """{question: {label: values over seeds}}, one panel a question; a dashed line at chance."""
    figure, axes = new_figure(12, 3.4 * math.ceil(len(panels) / 3), len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=False):
        _points(axis, values)
        if chance is not None:
            axis.axhline(chance, color="#999999", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(ylabel, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def line_figure(path, xlabel, ylabel, curves):
    """{name: [(x, values over seeds), ...]}: means, with every seed as a dot."""
    figure, (axis,) = new_figure(5, 3.2)
    for number, (name, points) in enumerate(curves.items()):
        axis.plot([x for x, _ in points], [mean_std(values)[0] for _, values in points],
                  color=f"C{number}", label=name)
        for x, values in points:
            axis.plot([x] * len(values), values, "o", color=f"C{number}", markersize=3, alpha=0.5)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
