"""Many commands side by side; what is done already is not done again.

A run is the file that ends it (FOLDER/result.json, a ranking, answers) and a command: the words
behind `python`, "train_offline.py ..." or "-m baselines dsir ...". Each gets one thread; as many
run at once as there are workers. A run whose file exists is not run again, and is refused if
another command made it; an interrupted training run is resumed.
"""

import concurrent.futures
import json
import multiprocessing
import os
import re
import runpy
import shlex
import sys
import threading
from pathlib import Path

from tqdm import tqdm

import utils
from utils import UserError

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["train_offline", "train_online", "baselines.less", "peft",
           "transformers.generation.utils", "transformers.models.llama.modeling_llama"]


def slug(name):
    """A method's folder name."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def run_all(runs, workers):
    """Run {file: command}, `workers` at a time. Output goes to a .log file beside the run.

    The log's first line is the command. Each command is a process of its own, forked from one that
    has torch and transformers imported: that saves a third of a short run. Raises `UserError` with
    the last line of the first log that failed, once the other runs of that moment have ended; an
    interrupt ends them.
    """
    for file, command in runs.items():
        check_command(file, command)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started, interrupted = [], threading.Event()

    def one(file, command):
        log = log_of(file)
        log.parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(command)
        if words[0].startswith("train"):
            words += ["--resume"]
        process = context.Process(target=as_main, args=(command, words, log))
        process.start()
        started.append(process)
        if interrupted.is_set():  # while it started, so the list came too late
            process.terminate()
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
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):  # a SIGTERM reaches this process alone
                interrupted.set()
                for process in started:
                    process.terminate()
            raise


def check_command(file, command):
    """`UserError` when the file exists and its log names another command; old logs name none."""
    log = log_of(file)
    text = log.read_text() if file.exists() and log.exists() else ""
    if text.startswith("$ ") and not text.startswith(f"$ {command}\n"):
        made = file.parent if file.name == "result.json" else file
        raise UserError(f"{made}: made by another command ({text[2:].splitlines()[0]}) than the "
                        f"one wanted now ({command}); choose another --name, or remove {made}")


def as_main(command, words, log):
    """In a process of its own: a script of this project, or `-m MODULE`, as the command line does.
    """
    with open(log, "w") as file:
        print(f"$ {command}", file=file, flush=True)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
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
