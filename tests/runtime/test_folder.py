"""The run folder: one process at a time, half-written files, damage, what is made again."""

import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
from conftest import ROOT, copy_tree, flags, listing, make_rows, python, read_rows, write_rows
from safetensors.torch import load_file, save_file

import utils
from runtime import folder, metrics
from utils import UserError

CONFIG = {"args": {"lr": 1}, "environment": {}, "data": {}}


# --- one process at a time ------------------------------------------------------------------------

OWNER = """
import sys, time
from runtime import folder
folder.open_run(sys.argv[1], {"args": {"lr": 1}, "environment": {}, "data": {}}, "r" in sys.argv[2])
print("open", flush=True)
time.sleep(float(sys.argv[3]))
"""


def owner(out, how="", seconds=60):
    command, environment = python("-c", OWNER, out, how, seconds)
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_use_is_refused_and_free_when_its_process_dies(tmp_path, resume):
    out = tmp_path / "run"
    process = owner(out)
    try:
        assert process.stdout.readline() == "open\n"
        (out / ".weights.jsonl.1.partial").write_text("the other one's")
        with pytest.raises(UserError, match=rf"run: process {process.pid} on .* is running in this "
                                            "folder; wait for it"):
            folder.open_run(out, CONFIG, resume=resume)
        assert (out / ".weights.jsonl.1.partial").exists()
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    folder.open_run(out, CONFIG, resume=True)
    assert sorted(listing(out)) == ["config.json", folder.LOCK]
    folder.open_run(out, CONFIG, resume=True)  # again in the same process


def test_of_many_at_once_one_gets_the_folder(tmp_path):
    """Started together, with and without a run in the folder: exactly one goes on."""
    for attempt in range(12):
        (wait, go), (hold, end), children = os.pipe(), os.pipe(), set()
        while len(children) < 6:
            child = os.fork()
            if child == 0:
                os.close(go), os.close(end)
                os.read(wait, 1)  # until the parent closes its end: all start at once
                try:
                    folder.open_run(tmp_path / str(attempt // 2), CONFIG, resume=attempt % 2 == 1)
                    os.read(hold, 1)
                    os._exit(0)
                except UserError as error:
                    os._exit(2 if "is running in this folder" in str(error) else 3)
                except BaseException:
                    os._exit(4)
            children.add(child)
        os.close(wait), os.close(go)
        codes = []
        for number in range(6):  # the one that has the folder keeps it until the others have ended
            if number == 5:
                os.close(hold), os.close(end)
            child, status = os.wait()
            assert child in children
            codes.append(os.waitstatus_to_exitcode(status))
        assert codes == [2, 2, 2, 2, 2, 0], attempt


def test_without_locks_a_run_opens_all_the_same(tmp_path, monkeypatch):
    """Some network file systems have no flock."""
    def never(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder.fcntl, "flock", never)
    folder.open_run(tmp_path / "network", CONFIG, resume=False)
    assert str(os.getpid()) in (tmp_path / "network" / folder.LOCK).read_text()


# --- half-written files ---------------------------------------------------------------------------

@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_of_half_written_files_is_empty(tmp_path, resume, monkeypatch):
    """As a kill between writing config.json and renaming it leaves it."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os._exit(7))
        child = os.fork()
        if child == 0:
            folder.open_run(out, CONFIG, resume=False)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert sorted(listing(out)) == [f".config.json.{child}.partial", folder.LOCK]
    folder.open_run(out, CONFIG, resume=resume)
    assert sorted(listing(out)) == ["config.json", folder.LOCK]


def test_a_resume_removes_half_written_folders_too(tmp_path):
    out = tmp_path / "run"
    folder.open_run(out, CONFIG, resume=False)
    for name in ("checkpoints/.step_00000004.partial", ".adapter.partial"):
        (out / name).mkdir(parents=True)
        (out / name / "adapter.safetensors").write_text("half")
        (out / name / ".adapter.safetensors.12.partial").write_text("half")
    folder.open_run(out, CONFIG, resume=True)
    assert sorted(listing(out)) == ["config.json", folder.LOCK]
    assert not list((out / "checkpoints").iterdir())


def test_other_files_are_still_refused(tmp_path):
    for name in ("thesis.tex", ".profile", "notes.partial"):
        out = tmp_path / name
        out.mkdir()
        (out / name).write_text("mine")
        with pytest.raises(UserError, match="holds other files and no run"):
            folder.open_run(out, CONFIG, resume=True)
        assert listing(out) == [name]


def test_a_resume_of_nothing_says_so(tmp_path, capfd):
    """`torchrun --max-restarts` resumes what may not have begun; a typed name may be wrong."""
    for number in range(2):
        folder.open_run(tmp_path / "run", CONFIG, resume=True)
        said = f"--resume: there is no run in {tmp_path / 'run'} yet; a new one begins\n"
        assert capfd.readouterr().out == (said if number == 0 else "")


class Interrupted(BaseException):
    pass


def test_a_checkpoint_is_whole_or_absent_wherever_it_is_interrupted(tmp_path, monkeypatch):
    """An exception, as a signal raises one, at every call that touches the disk in turn."""
    model = torch.nn.Module()
    model.lora_A = torch.nn.Parameter(torch.ones(3, 2))
    shapes = {"lora_A": torch.Size([3, 2])}
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.save_checkpoint(tmp_path, 1, model, {})
    calls, stop = [0], [0]

    def counted(real):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == stop[0]:
                raise Interrupted
            return real(*args, **options)
        return call

    for module, name in ((os, "replace"), (os, "fsync"), (os, "mkdir"), (os, "rmdir"),
                         (os, "unlink"), (shutil, "rmtree"), (os, "open")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for stop[0] in range(1, 100):
        before = set(listing(tmp_path))
        calls[0] = 0
        try:
            folder.save_checkpoint(tmp_path, 2, model, {}, keep=9)
        except Interrupted:
            assert not [name for name in listing(tmp_path) if "partial" in name], stop
            whole = {"checkpoints/step_00000002/adapter.safetensors",
                     "checkpoints/step_00000002/state.pt"}
            assert set(listing(tmp_path)) - before in (set(), whole), stop
            assert folder._newest_checkpoint(tmp_path, shapes)[1]["step"] in (1, 2)
        else:
            break
        calls[0] = -10**6
        shutil.rmtree(tmp_path / "checkpoints" / "step_00000002", ignore_errors=True)
    assert 10 < stop[0] < 99


def test_metrics_reach_the_disk_before_the_checkpoint_and_folders_after_renames(tmp_path,
                                                                                monkeypatch):
    events, replace, fsync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: events.append(f"rename {os.fspath(b)}")
                        or replace(a, b))
    monkeypatch.setattr(os, "fsync", lambda number: events.append(
        "sync " + os.readlink(f"/proc/self/fd/{number}")) or fsync(number))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.save_checkpoint(tmp_path, 1, torch.nn.Module(), {})
    made = f"rename {tmp_path}/checkpoints/step_00000001"
    at = events.index(made)
    assert f"sync {tmp_path}/metrics.jsonl" in events[:at]
    assert f"sync {tmp_path}/checkpoints" in events[at:]
    events.clear()
    utils.write_atomic(tmp_path / "config.json", "{}")
    assert events[-2:] == [f"rename {tmp_path}/config.json", f"sync {tmp_path}"]


# --- damage ---------------------------------------------------------------------------------------

OPTIONS = {"batch": 4, "epochs": 2, "save_every": 2, "lr": 1e-2, "omega_lr": 5}


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """A finished run of six steps with checkpoints of the steps 4 and 6, and its flags."""
    import train_offline

    root = tmp_path_factory.mktemp("whole")
    rows = {"lower": (11, 1), "upper": (7, 2), "upper_heldout": (4, 3), "lower_heldout": (4, 4)}
    options = OPTIONS | {"model": folders["llama"], "cache_dir": root / "cache"} | {
        name: write_rows(root / f"{name}.jsonl", make_rows(*made)) for name, made in rows.items()}
    train_offline.main(flags(**options, out=root / "run"))
    return root / "run", options


@pytest.fixture
def damaged(whole, tmp_path, refused, capfd):
    """A copy of the run: resume() its output, line() the line that it is refused with."""
    import train_offline

    class Damaged:
        run = copy_tree(whole[0], tmp_path / "run")

        def resume(self):
            capfd.readouterr()
            train_offline.main(flags(**whole[1], out=self.run, resume=True))
            assert equal(self.run) == equal(whole[0])
            return capfd.readouterr().out

        def line(self):
            return refused(lambda: train_offline.main(flags(**whole[1], out=self.run, resume=True)))
    return Damaged()


def equal(run):
    files = {name: (run / name).read_bytes() for name in listing(run) if name.startswith(
        ("weights", "adapter/", "base.json", "result.json"))}
    return files | {"metrics": [{key: value for key, value in row.items() if key[:5] != "time/"}
                                for row in read_rows(run / "metrics.jsonl")]}


def cut(file, share=0.5):
    file.write_bytes(file.read_bytes()[:int(share * file.stat().st_size)])


def change_state(change):
    def edit(checkpoint):
        state = torch.load(checkpoint / "state.pt", weights_only=True)
        change(state)
        torch.save(state, checkpoint / "state.pt")
    return edit


def change_adapter(change):
    def edit(checkpoint):
        tensors = load_file(checkpoint / "adapter.safetensors")
        save_file(change(tensors), checkpoint / "adapter.safetensors")
    return edit


def flip(name):
    def edit(checkpoint):
        data = bytearray((checkpoint / name).read_bytes())
        data[-900] ^= 1
        (checkpoint / name).write_bytes(data)
    return edit


DAMAGE = {
    "state cut": lambda c: cut(c / "state.pt"),
    "adapter cut": lambda c: cut(c / "adapter.safetensors"),
    "state empty": lambda c: cut(c / "state.pt", 0),
    "state gone": lambda c: (c / "state.pt").unlink(),
    "adapter gone": lambda c: (c / "adapter.safetensors").unlink(),
    "a bit of the state": flip("state.pt"), "a bit of the adapter": flip("adapter.safetensors"),
    "no selector": change_state(lambda s: s.pop("selector")),
    "no theta": change_state(lambda s: s.pop("theta")),
    "no rng": change_state(lambda s: s.pop("rng")),
    "no step": change_state(lambda s: s.pop("step")),
    "other omega": change_state(lambda s: s["selector"].update(logits=torch.zeros(5))),
    "other moments": change_state(
        lambda s: s["theta"]["state"][0].update(exp_avg=torch.zeros(1, 2))),
    "a list": lambda c: torch.save([1, 2], c / "state.pt"),
    "other names": change_adapter(lambda t: {f"other.{n}": v for n, v in t.items()}),
    "other shapes": change_adapter(lambda t: {n: v.repeat(2, 1) for n, v in t.items()}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_goes_on_from_the_one_before(damaged, damage):
    newest = damaged.run / "checkpoints" / "step_00000006"
    DAMAGE[damage](newest)
    said = [line for line in damaged.resume().splitlines() if "damaged checkpoint" in line]
    assert len(said) == 1 and said[0].startswith(f"{newest}: damaged checkpoint (")
    assert said[0].endswith("; going on from step_00000004")
    assert "damaged checkpoint" not in damaged.resume()  # written anew on the way


def test_no_whole_checkpoint(damaged):
    for checkpoint in (damaged.run / "checkpoints").iterdir():
        cut(checkpoint / "state.pt")
    line = damaged.line()
    assert "step_00000006: damaged checkpoint (" in line and "no other is whole" in line
    assert f"delete {damaged.run / 'checkpoints'} to train from the first step" in line
    shutil.rmtree(damaged.run / "checkpoints")
    damaged.resume()


def test_checkpoints_of_an_older_version_have_no_fingerprint(damaged):
    newest = damaged.run / "checkpoints" / "step_00000006"
    change_adapter(lambda tensors: tensors)(newest)
    assert "damaged checkpoint" not in damaged.resume()


METRICS = {
    "gone": lambda f: f.unlink(), "empty": lambda f: cut(f, 0), "cut": cut,
    "zeros": lambda f: f.write_bytes(bytes(f.stat().st_size)),
    "a broken line": lambda f: f.write_text(f.read_text().replace('{"step": 3,', '{"step": 3', 1)),
    "not UTF-8": lambda f: f.write_bytes(f.read_bytes().replace(b'{"step": 3,', b'\xff\xfe', 1)),
    "a number": lambda f: f.write_text("3\n" + f.read_text().split("\n", 1)[1]),
    "a list": lambda f: f.write_text("[3]\n" + f.read_text().split("\n", 1)[1]),
}


@pytest.mark.parametrize("damage", METRICS)
def test_damaged_metrics_are_one_line(damaged, damage):
    METRICS[damage](damaged.run / "metrics.jsonl")
    line = damaged.line()
    assert "metrics.jsonl: the line of step " in line and "the checkpoint is of step 6" in line
    first = int(line.split("line of step ")[1].split()[0])
    assert f"delete the checkpoints after step {first}" in line
    for checkpoint in (damaged.run / "checkpoints").iterdir():  # the advice, taken
        if int(checkpoint.name[5:]) > first:
            shutil.rmtree(checkpoint)
    damaged.resume()


def test_lines_after_the_checkpoint_may_be_damaged(tmp_path):
    """What a kill leaves: more lines than the checkpoint knows, the last one cut."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    metrics.open_metrics(tmp_path, 2).close()
    assert file.read_text() == '{"step": 0}\n{"step": 1}\n'
    metrics.open_metrics(tmp_path, 0).close()
    assert file.read_text() == ""


@pytest.mark.parametrize("content", ["", "{", "[1]", "[]", "3", "null", '"text"', "\0\0\0"])
@pytest.mark.parametrize("name", ["base.json", "config.json"])
def test_damaged_json_is_one_line(damaged, name, content):
    (damaged.run / name).write_text(content)
    line = damaged.line()
    assert f"{name}: " in line
    if name == "base.json":
        assert "damaged (" in line and "delete it to have it made again" in line
        (damaged.run / name).unlink()
        damaged.resume()


@pytest.mark.parametrize("content", [b"", b"half", {"losses": torch.zeros(5)},
                                     {"loss": torch.ones(11)}])
def test_damaged_base_losses_are_one_line(damaged, content):
    file = damaged.run / "weights" / "base_losses.safetensors"
    file.write_bytes(content) if isinstance(content, bytes) else save_file(content, file)
    assert "base_losses.safetensors: damaged (" in damaged.line()


# --- what is made again ---------------------------------------------------------------------------

MADE_ONCE = ("base.json", "weights/base_losses.safetensors",
             "weights/reference_margins.safetensors")


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True},
                                     {"upper_loss": "dpo"}], ids=["plain", "bf16", "pairs"])
def test_what_is_known_of_the_base_is_made_again_bit_for_bit(train, files, options):
    """Under the base model, not under the adapter that has been trained since."""
    paths = files(lower=11, upper=6, lower_heldout=5)
    if options.get("upper_loss") == "dpo":
        for name in ("upper", "heldout"):
            write_rows(paths[name], [
                {"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {number}"}
                for number, row in enumerate(read_rows(paths[name]))])
    run = train(paths, **OPTIONS | {"lr": 0.05} | options)
    names = [name for name in MADE_ONCE if (run.out / name).exists()]
    assert len(names) == (3 if options.get("upper_loss") == "dpo" else 2)
    before = {name: (run.out / name).read_bytes() for name in names}
    result = run.result
    assert abs(result["upper_heldout"] - result["base/upper_heldout"]) > 1e-3  # it has learned
    for name in names:
        (run.out / name).unlink()
    again = train(paths, **OPTIONS | {"lr": 0.05} | options, resume=True)
    assert before == {name: (run.out / name).read_bytes() for name in names}
    assert again.result == result


def test_before_the_first_step_the_adapter_adds_nothing(train, files, monkeypatch):
    """The figures of the base are those of the model with its fresh adapter on, bit for bit."""
    import contextlib

    import session

    paths = files(lower=11, upper=6, lower_heldout=5)
    without = train(paths, **OPTIONS)
    monkeypatch.setattr(session, "before_training", lambda *_: contextlib.nullcontext())
    with_it = train(paths, **OPTIONS, out="on")
    for name in MADE_ONCE[:2]:
        assert (without.out / name).read_bytes() == (with_it.out / name).read_bytes()


def test_of_a_run_that_began_with_an_adapter_they_are_refused(train, files, refused, adapters):
    paths = files(lower=11, upper=6)
    options = OPTIONS | {"adapter": adapters["llama"]}
    run = train(paths, **options)
    assert run.result["base/upper_heldout"] != train(
        paths, **OPTIONS, out="plain").result["base/upper_heldout"]
    for name in MADE_ONCE[:2]:
        whole = (run.out / name).read_bytes()
        (run.out / name).unlink()
        line = refused(lambda: train(paths, **options, resume=True))
        assert f"{name}: missing, and the adapter that the run began with has been trained" in line
        (run.out / name).write_bytes(whole)
    assert train(paths, **options, resume=True).result == run.result
    shutil.rmtree(run.out / "checkpoints")  # before the first step nothing has been trained
    for name in MADE_ONCE[:2]:
        (run.out / name).unlink()
    assert train(paths, **options, resume=True).result == run.result


def test_locks_do_not_pile_up(tmp_path):
    """A process that opens many runs, one after another, keeps one descriptor."""
    for number in range(20):
        folder.open_run(tmp_path / str(number), CONFIG, resume=False)
        if number == 0:
            count = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= count
    assert json.loads((tmp_path / "0" / "config.json").read_text()) == CONFIG
