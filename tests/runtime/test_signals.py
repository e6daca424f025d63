"""Ctrl-C and SIGTERM at any instant of a run: one line, an exit code, nothing half-written."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT, flags, listing, make_rows, python, write_rows
from forking import Forks


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    made = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield made
    made.end()


def command_of(folder, folders, out, **more):
    rows = {"lower": (24, 1), "upper": (10, 2), "upper_heldout": (4, 3)}
    return [str(word) for word in flags(**{
        "model": folders["llama"], "cache_dir": folder / "cache", "out": folder / out, "batch": 4,
        "epochs": 7, "save_every": 1, "lr": 1e-2, "correction": 0} | {
        name: write_rows(folder / f"{name}.jsonl", make_rows(*made))
        for name, made in rows.items()} | more)]


def steps(run):
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_until(ready, seconds=120):
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_one_line_with_the_command_that_goes_on(forks, folders, tmp_path, number, code):
    """A checkpoint is saved after every step, so many instants fall into one."""
    assert forks.run("train_offline", command_of(tmp_path, folders, "whole")) == 0
    run, rng, words = tmp_path / "run", random.Random(code), command_of(tmp_path, folders, "run")
    for _ in range(3):
        until = min(steps(run) + rng.randint(2, 8), 41)
        forks.start("train_offline", words)
        wait_until(lambda least=until: steps(run) >= least)
        assert forks.killed_after(0, number) == code, forks.log.read_text()
        (line,) = forks.errors()
        assert "Traceback" not in forks.log.read_text()
        head = "error: interrupted; continue with: python train_offline.py "
        assert line.startswith(head)
        assert not [name for name in listing(run) if "partial" in name]
        for folder in (run / "checkpoints").iterdir():
            assert sorted(listing(folder)) == ["adapter.safetensors", "state.pt"]
        words = shlex.split(line.removeprefix(head))
        assert words[-1] == "--resume" and words.count("--resume") == 1
    assert forks.run("train_offline", words) == 0
    assert "damaged checkpoint" not in forks.log.read_text()
    for name in ("weights.jsonl", "adapter/adapter_model.safetensors", "result.json"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("seed", range(2))
def test_a_signal_at_any_instant_is_one_line(forks, folders, tmp_path, seed):
    """Set-up, the making of the cache and the end included."""
    rng = random.Random(seed)
    instants = [rng.uniform(0.05, 2) for _ in range(4)]
    for attempt, instant in enumerate(instants):
        number, code = ((signal.SIGINT, 130), (signal.SIGTERM, 143))[attempt % 2]
        forks.start("train_offline", [*command_of(tmp_path, folders, "run"), "--resume"])
        assert forks.killed_after(instant, number) in (0, code), (instants, forks.log.read_text())
        log = forks.log.read_text()
        assert len(forks.errors()) == ("RESULT" not in log) and "Traceback" not in log, log
        assert not [name for name in listing(tmp_path) if "partial" in name], instants


@pytest.mark.parametrize("number", [signal.SIGINT,
                                    pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_torchrun_is_one_line(folders, tmp_path, number):
    """Ctrl-C reaches both processes and torchrun, SIGTERM torchrun, which passes it on."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "train_offline.py", *command_of(tmp_path, folders, "run", epochs=300, method="mix")]
    run = tmp_path / "run"
    with subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, start_new_session=True,
                          env=python()[1]) as process:
        wait_until(lambda: steps(run) >= 5 or process.poll() is not None)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        err = process.communicate(timeout=120)[1].replace("\r", "\n")
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert process.returncode != 0 and len(lines) == 1, err
    assert not [name for name in listing(run) if "partial" in name]
    if number == signal.SIGINT:
        assert "continue with: torchrun --nproc-per-node 2 train_offline.py" in lines[0]
    assert lines[0].endswith("--resume"), lines


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_while_a_class_is_made_is_one_line(number, code):
    """Python 3.11 wraps what __set_name__ raises into a RuntimeError."""
    program = f"""
import os, signal
from runtime import command

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

class Field:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.{number})

def main():
    class Image:
        id = Field()

command.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "error: interrupted\n")
