"""runtime/command.py: how a command ends: bad disks, closed pipes, Ctrl-C and SIGTERM."""

import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, flags, listing, python, read_rows
from test_resume import assert_equal, last_step

from runtime import command


def fails_with(number, *where):
    def main():
        raise OSError(number, os.strerror(number), *where)
    return main


# --- the disk -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("number", "advice"), [
    (errno.ENOSPC, "free space"), (errno.EDQUOT, "free space"), (errno.EFBIG, "free space"),
    (errno.EACCES, "choose a folder you may write to"),
    (errno.EPERM, "choose a folder you may write to"),
    (errno.EROFS, "choose a folder you may write to"),
    (errno.ENOTDIR, "choose another path"), (errno.ENAMETOOLONG, "choose another path")])
def test_a_disk_that_fails_is_one_line_with_advice(refused, number, advice):
    """What happened, to which file where that is known, what to do."""
    expected = f"{os.strerror(number)}; {advice}, then run the same command again"
    assert refused(fails_with(number, "runs/a/weights.jsonl")) == (
        f"error: runs/a/weights.jsonl: {expected}")
    name = "a file of --out, --cache-dir or the temporary folder"
    assert refused(fails_with(number)) == f"error: {name}: {expected}"


def test_a_run_that_met_a_full_disk_is_resumed(capsys):
    with pytest.raises(SystemExit):
        command.run(fails_with(errno.ENOSPC), resumes=True)
    assert capsys.readouterr().err.endswith("the same command again with --resume\n")


@pytest.mark.parametrize("made", [
    lambda: torch.empty(2**58), lambda: bytearray(2**62),
    lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory.\nmore"))],
    ids=["torch", "python", "CUDA"])
def test_no_memory_is_one_line_with_advice(refused, made):
    line = refused(made)
    assert line.startswith("error: out of memory (") and "a smaller --micro-batch" in line
    with pytest.raises(RuntimeError, match="size mismatch"):
        command.run(lambda: (_ for _ in ()).throw(RuntimeError("size mismatch")))


@pytest.mark.parametrize("words, name", [
    (["--keep", "", "--batch", "2"], "--keep"), (["--keep="], "--keep="),
    (["report", " "], "report")])
def test_an_empty_value_is_refused(refused, monkeypatch, words, name):
    """As a shell variable that is not set leaves it: it would mean the default."""
    monkeypatch.setattr(sys, "argv", ["train_offline.py", *words])
    assert refused(lambda: pytest.fail("ran")).startswith(f"error: {name}: its value is empty, as")


def test_the_home_folder_behind_a_sign_or_between_quotes(monkeypatch, tmp_path):
    """A shell leaves both alone; a folder named ~ is what nobody wants to remove."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--out=~/x", "~/y.html", "~", "a~/b", "--prompt", "~5 words"]
    monkeypatch.setattr(sys, "argv", ["eval.py", *words])
    command.run(lambda: None)
    assert sys.argv[1:] == [f"--out={tmp_path}/x", f"{tmp_path}/y.html", str(tmp_path), *words[3:]]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EMFILE, errno.EIO])
def test_a_file_of_ours_that_is_missing_is_a_traceback(capfd, number):
    """Nobody who runs a script can mend it: no line of advice hides where it happened."""
    with pytest.raises(OSError) as caught:
        command.run(fails_with(number, "toy/model/config.json"))
    assert caught.value.errno == number and "error: " not in capfd.readouterr().err
    with pytest.raises(FileNotFoundError):
        command.run(lambda: os.stat(ROOT / "at-all.txt"))


def test_a_folder_that_has_disappeared_is_one_line(refused):
    assert refused(lambda: os.stat("nowhere/at-all.txt")).startswith(
        "error: nowhere/at-all.txt: No such file or directory; its folder has disappeared")


# --- a reader that has gone -----------------------------------------------------------------------

@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "in the middle"])
def test_a_closed_pipe_ends_quietly(lines):
    """As under `| head`: exit code 0, nothing on stderr."""
    given, environment = python("-c", (
        "from runtime import command\nimport sys\n"
        "def main():\n    sys.stdin.readline()\n"
        f"    for n in range({lines}):\n        print('line', n)\ncommand.run(main)"))
    with subprocess.Popen(given, env=environment, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == "" and process.wait(60) == 0


# --- interrupted ----------------------------------------------------------------------------------

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def test_a_closed_standard_output_is_no_error():
    given, environment = python("-c", "from runtime import command\n"
                                "command.run(lambda: print(1))")
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *given], env=environment, cwd=ROOT,
                          stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def start(given, environment, **more):
    """A process that Ctrl-C reaches, also where the tests run in the background."""
    return subprocess.Popen(given, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE,
                            stdout=subprocess.DEVNULL,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **more)


@pytest.mark.parametrize("number", CODES)
def test_an_interrupted_write_leaves_nothing(tmp_path, number):
    """Half a file is cleared away, the old one stands; one line, without a command to go on with
    where there is nothing to resume."""
    (tmp_path / "rows.jsonl").write_text("old\n")
    process = start(*python("-c", (
        "import os, signal, time, utils\nfrom runtime import command\n"
        "def rows():\n    yield {'row': 1}\n"
        f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(30)\n"
        f"command.run(lambda: utils.write_jsonl({str(tmp_path / 'rows.jsonl')!r}, rows()))")))
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (CODES[number], "error: interrupted\n")
    assert listing(tmp_path) == ["rows.jsonl"]
    assert (tmp_path / "rows.jsonl").read_text() == "old\n"


def test_the_handler_of_sigterm_is_put_back():
    before, seen = signal.getsignal(signal.SIGTERM), []
    command.run(lambda: seen.append(signal.getsignal(signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) is before and seen != [before]


@pytest.mark.slow
def test_interrupted_runs_say_how_to_go_on(files, folders, tmp_path):
    """Ctrl-C, and SIGTERM after the resume: the line's own command, run as it stands, ends in what
    a run left alone gives. A folder's name with a space is quoted."""
    paths, run = files(lower=60, upper=20), tmp_path / "a run"
    given, environment = python("train_offline.py", *flags(
        lower=paths["lower"], upper=paths["upper"], upper_heldout=paths["heldout"],
        model=folders["llama"], cache_dir=tmp_path / "cache", batch=4, micro_batch=2, epochs=4,
        save_every=6, lr=5e-3, omega_lr=5))
    whole = start([*given, "--out", str(tmp_path / "whole")], environment)
    given += ["--out", str(run)]
    for number, instant in ((signal.SIGINT, 8), (signal.SIGTERM, 20)):
        process, deadline = start(given, environment), time.monotonic() + 120
        while last_step(run) < instant and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == CODES[number] and "Traceback" not in stderr, stderr
        (line,) = re.findall("^error: .*$", stderr.replace("\r", "\n"), re.M)
        assert stderr.endswith(line + "\n")
        advice = line.removeprefix("error: interrupted; continue with: ")
        assert shlex.split(advice) == ["python", *given[1:],
                                       *(["--resume"] if "--resume" not in given else [])]
        assert not [name for name in listing(run) if ".partial" in name]
        given = [sys.executable, *shlex.split(advice)[1:]]
    assert last_step(run) < 59 and not (run / "result.json").exists()
    process = start(given, environment)
    assert process.communicate(timeout=120) and process.returncode == 0
    assert whole.communicate(timeout=120) and whole.returncode == 0
    assert len(read_rows(run / "metrics.jsonl")) == 60
    assert_equal(run, tmp_path / "whole")
