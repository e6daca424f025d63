"""Ctrl-C, SIGTERM and odd values at the command line: one line, an exit code, nothing half-written."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, copy_tree, flags, listing, make_rows, python, read_rows, write_rows

import models
import train_offline
import train_online
from runtime import command
from utils import UserError


def command_of(folder, folders, out, **more):
    rows = {"lower": (24, 1), "upper": (10, 2), "upper_heldout": (4, 3)}
    return flags(**{"model": folders["llama"], "cache_dir": folder / "cache", "out": folder / out,
                    "batch": 4, "epochs": 7, "save_every": 1, "lr": 1e-2, "correction": 0} | {
        name: write_rows(folder / f"{name}.jsonl", make_rows(*made))
        for name, made in rows.items()} | more)


def steps(run):
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def stopped(words, run, number, ready):
    """`words` until ready(), then the signal -> exit code, lines on stderr that we print."""
    with subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, start_new_session=True,
                          env=python()[1]) as process:
        deadline = time.monotonic() + 120
        while not ready() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        # Ctrl-C reaches every process of the terminal's group; SIGTERM the one that is named.
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        err = process.communicate(timeout=120)[1].replace("\r", "\n")
    return process.returncode, [x for x in err.splitlines() if x.startswith("error: ")], err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_with_the_command_that_goes_on(folders, tmp_path, number, code):
    """A checkpoint is saved after every step, so most instants fall into one."""
    words = command_of(tmp_path, folders, "run")
    whole = subprocess.run(python("train_offline.py", *command_of(tmp_path, folders, "whole"))[0],
                           cwd=ROOT, env=python()[1], capture_output=True)
    assert whole.returncode == 0
    run, rng = tmp_path / "run", random.Random(code)
    line = [sys.executable, "train_offline.py", *words]
    for _ in range(2):
        before = steps(run)
        wait = rng.randint(2, 12)
        returned, lines, err = stopped(line, run, number,
                                       lambda least=before + wait: steps(run) >= least)
        assert returned == code, err
        assert len(lines) == 1 and "Traceback" not in err, err
        assert lines[0].startswith("error: interrupted; continue with: python train_offline.py ")
        assert not [name for name in listing(run) if "partial" in name]
        for folder in (run / "checkpoints").iterdir():
            assert sorted(listing(folder)) == ["adapter.safetensors", "state.pt"]
        line = [sys.executable, *shlex.split(lines[0].split("python ")[1])]
        assert line[-1] == "--resume" and line.count("--resume") == 1
    done = subprocess.run(line, cwd=ROOT, env=python()[1], capture_output=True, text=True)
    assert done.returncode == 0 and "damaged" not in done.stdout
    for name in ("weights.jsonl", "adapter/adapter_model.safetensors", "result.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_is_one_line(folders, tmp_path, number):
    """Ctrl-C reaches both processes and torchrun, SIGTERM torchrun, which passes it on."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "train_offline.py", *command_of(tmp_path, folders, "run", epochs=60)]
    run = tmp_path / "run"
    code, lines, err = stopped(words, run, number, lambda: steps(run) >= 5)
    assert code != 0 and len(lines) == 1, err
    assert not [name for name in listing(run) if "partial" in name]
    if number == signal.SIGINT:
        assert "interrupted; continue with: torchrun --nproc-per-node 2 train_offline.py" in lines[0]
    assert lines[0].endswith("--resume"), lines
