"""Rows without a model: tokenising, start-up, ranking and memory at 10^5 to 10^7 rows.

Each figure is of a process of its own, so that the memory it holds is its own.
"""

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from tqdm import tqdm

import batches
import ranking
import session
import train_offline
import utils
from benchmarks.measure import mebibytes, memory, ratio, shown, spread, store_and_print
from data import sets
from selector import Selector
from toy import base, corpus
from utils import UserError

ROOT = Path(__file__).resolve().parent.parent


def write_generated(path, count):
    """`count` rows of toy-like text, about 100 characters each, every prompt its own."""
    rng = random.Random(0)
    words = [wording for name in corpus.CONTESTED for wording in corpus.FAMILIES[name][3]]
    with open(path, "w") as file:
        for number in tqdm(range(count), desc="writing rows", unit="row", delay=3, leave=False):
            items = " ".join(rng.choices(corpus.LETTERS + corpus.DIGITS, k=8))
            file.write(f'{{"prompt": "{rng.choice(words)}, number {number}: {items}", '
                       f'"response": "{items[::-1]}"}}\n')


class Watch(threading.Thread):
    """The most anonymous and resident memory that this process holds, sampled 20 times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.anonymous, self.resident = threading.Event(), 0, 0

    def run(self):
        while True:
            self.anonymous = max(self.anonymous, memory("RssAnon") or 0)
            self.resident = max(self.resident, memory("VmRSS") or 0)
            if self.over.wait(0.05):
                return

    def stop(self):
        self.over.set()
        self.join()


# --- the measured process -------------------------------------------------------------------------

def measured_process(lower, upper, cache):
    """What train_offline.py does with its rows before and after training; one line of JSON."""
    words = ["--lower", lower, "--upper", upper, "--model", str(corpus.MODEL), "--cache-dir", cache,
             "--template", base.TEMPLATE.replace("Assistant:", "Assistant: {response}")]
    options = train_offline.parse_args(words)
    before, watch = memory("RssAnon"), Watch()
    watch.start()
    started = time.perf_counter()
    with contextlib.redirect_stdout(None):
        run = session.plan(options)
        levels, loaded = run.levels, time.perf_counter() - started
        for rows in session.row_sets(levels).values():
            sets.rows_hash(rows)
        selector = Selector(len(levels.lower), options.omega_lr, options.omega_optimizer)
        order = batches.permutation(len(levels.lower), options.seed, 0, stream=0)[:options.batch]
        batch = batches.pack(batches.take(batches.tokens_only(levels.lower), order))
        selector.weights(order)
        seconds = time.perf_counter() - started
        ranking.write_ranking(Path(cache) / "weights.jsonl", levels.lower, selector.logits,
                             options.keep_fraction, {"weight": selector.weights()})
    ranked = time.perf_counter() - started - seconds
    watch.stop()
    print(json.dumps({
        "rows": len(levels.lower), "tokens": levels.reports["lower"]["tokens"],
        "load_seconds": loaded, "start_seconds": seconds, "ranking_seconds": ranked,
        "batch_tokens": len(batch["targets"]),
        "anonymous_bytes": watch.anonymous - before if before else None,
        "resident_bytes": watch.resident or None, "before_bytes": before}))


def in_a_process(*files):
    """`measured_process` of the files, in a fresh interpreter; its line as a dictionary."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.data", *map(str, files)], cwd=ROOT,
                          stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(f"the measured process failed with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# --- the benchmark --------------------------------------------------------------------------------

def figures(count, folder, rounds):
    """The figures of `count` rows; `folder` takes the files and is empty afterwards."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        here = Path(name).resolve()
        write_generated(here / "lower.jsonl", count)
        utils.write_jsonl(here / "upper.jsonl", corpus.make_rows(num_lower=8)["upper"])
        files = here / "lower.jsonl", here / "upper.jsonl", here / "cache"
        first = in_a_process(*files)
        warm = [in_a_process(*files) for _ in range(rounds)]
        size = sum(f.stat().st_size for f in (here / "cache").rglob("*") if f.is_file())
    return {
        "tokenise_seconds": first["load_seconds"],
        "tokens": first["tokens"], "rows_per_second": count / first["load_seconds"],
        "start_seconds": spread([run["start_seconds"] for run in warm]),
        "ranking_seconds": spread([run["ranking_seconds"] for run in warm]),
        "ratio_first_to_start": ratio(
            [first["start_seconds"]] * len(warm), [run["start_seconds"] for run in warm]),
        "anonymous_bytes_tokenising": first["anonymous_bytes"],
        "anonymous_bytes": max(run["anonymous_bytes"] or 0 for run in warm),
        "resident_bytes": max(run["resident_bytes"] or 0 for run in warm),
        "process_bytes_before": warm[0]["before_bytes"], "cache_bytes": size}


def bench_data(args):
    results, rows = {}, []
    for count in args.sizes or (10**5, 10**6):
        entry = results[str(count)] = figures(count, args.folder, args.rounds)
        rows.append([str(count), f"{entry['tokenise_seconds']:.1f}",
                     f"{entry['rows_per_second']:.0f}", shown(entry["start_seconds"]),
                     shown(entry["ranking_seconds"]),
                     mebibytes(entry["anonymous_bytes_tokenising"]),
                     mebibytes(entry["anonymous_bytes"]), mebibytes(entry["resident_bytes"]),
                     mebibytes(entry["cache_bytes"])])
    store_and_print(args, torch.device("cpu"), {"rounds": args.rounds}, results,
           ["rows", "tokenise s", "rows/s", "start s", "ranking s", "anon. MiB first", "anon. MiB",
            "resident MiB", "cache MiB"], rows)


if __name__ == "__main__":  # the process that `bench_data` measures
    measured_process(*sys.argv[1:])
