"""Resume of online runs: killed anywhere, during generation too, they go on bit for bit.

One test kills a real process with SIGKILL, and test_kills.py does often; the others stop a run
inside this process, which is quicker and reaches places that a signal hits only by luck.
"""

import signal
import subprocess
import time

import pytest
import torch
from conftest import ROOT, copy_tree, flags, listing, python, read_rows, write_rows
from test_resume import Killed, assert_equal, fingerprint, last_step

import accept
import curate
import models
import train_online
from runtime import metrics
from utils import content_hash


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step, where): the next run dies there; stop_at(None) lets runs live again.

    where: after the log of a step, inside the generation of the refresh at a step (half of its
    answers drawn), after the refresh, in the final pass, or before the adapter is saved.
    """

    log, answer, write = metrics.log_metrics, train_online.answer, train_online.generate
    save, refine = models.save_adapter, curate.generate

    def arm(step, where="after the log"):
        def log_or_die(file, values):
            log(file, values)
            if values["step"] == step and where == "after the log":
                raise Killed

        def answer_or_die(*args, **more):
            def half(model, prompts, seeds, **options):
                count = len(prompts) // 2
                write(model, prompts[:count], seeds[:count], **options)
                raise Killed
            if args[-1] == step and where == "during generation":
                monkeypatch.setattr(train_online, "generate", half)
            made = answer(*args, **more)
            if args[-1] == step and where == "after the refresh":
                raise Killed
            return made

        def refine_or_die(*args, **options):
            if where == "in the final pass":
                raise Killed
            return refine(*args, **options)

        def save_or_die(*args):
            if where == "after the curated set":
                raise Killed
            save(*args)

        monkeypatch.setattr(metrics, "log_metrics", log_or_die)
        monkeypatch.setattr(train_online, "answer", answer_or_die)
        monkeypatch.setattr(train_online, "generate", write)
        monkeypatch.setattr(curate, "generate", refine_or_die)
        monkeypatch.setattr(models, "save_adapter", save_or_die)
    return arm


@pytest.mark.parametrize("options", [
    {"num_answers": 2, "mask": "dynamic", "omega_lr": 20, "ratio": "sequence"},
    {"mask": "dynamic", "omega_optimizer": "adam", "omega_lr": 0.05, "center": True,
     "ratio": "lambda", "schedule": "cosine"},
    {"num_answers": 2, "correction": 0.5, "first_refresh": 2, "omega_loss": "current",
     "gradient_checkpointing": True},
    {"refine": "drop", "mask": "dynamic", "omega_lr": 20}],
    ids=["dynamic", "adam, centred, lambda", "corrected, late refresh", "drop"])
def test_stopped_anywhere_goes_on_bit_for_bit(online, files, stop_at, options):
    """Stopped in the middle of refreshes, between them, and after training; refreshes fall on
    other steps than checkpoints, so the buffer, its old log-probs and the mask must be saved."""
    paths = files(lower=17, upper=7)
    options = {"batch": 4, "epochs": 2, "save_every": 2, "k_gen": 3, "lr": 1e-2,
               "ratio_masked": 0.4} | options
    whole = online(paths, out="whole", **options)
    refreshes = [step["step"] for step in whole.metrics if step.get("answers")]
    stops = [(1, "after the log"), (4, "after the log"), (7, "after the log"),
             (None, "in the final pass"), (None, "after the curated set")]
    if len(refreshes) > 1:
        stops[2:2] = [(refreshes[1], "after the refresh"), (refreshes[-1], "during generation")]
        stops.sort(key=lambda stop: 99 if stop[0] is None else stop[0])
    for number, (step, where) in enumerate(stops):
        stop_at(step, where)
        with pytest.raises(Killed):
            online(paths, **options, resume=number > 0)
    stop_at(None)
    resumed = online(paths, **options, resume=True)
    assert_equal(resumed.out, whole.out)
    assert listing(resumed.out) == listing(whole.out)


def test_a_checkpoint_holds_the_buffer_and_the_mask(online, files, stop_at, tmp_path,
                                                    monkeypatch):
    """Answers, their old log-probs and the step they were written at; a resumed run draws none of
    them again before the next refresh."""
    paths = files(lower=12, upper=6)
    options = {"batch": 4, "epochs": 3, "save_every": 2, "k_gen": 6, "num_answers": 2, "lr": 1e-2,
               "ratio_masked": 0.5}
    stop_at(4)
    with pytest.raises(Killed):
        online(paths, **options)
    state = torch.load(tmp_path / "run" / "checkpoints" / "step_00000004" / "state.pt",
                       weights_only=True)
    assert int(state["mask"].sum()) == 6 and state["num_answers"] == 12
    assert sorted(state["buffer"]) == state["mask"].nonzero().flatten().tolist()
    for rows, old_logps, step, weight in state["buffer"].values():
        assert len(rows) == 2 and old_logps.dtype == torch.float64 and (step, weight) == (0, 1)
    stop_at(None)
    calls, write = [], train_online.generate

    def spy(*args, **options):
        calls.append(options["label"])
        return write(*args, **options)

    monkeypatch.setattr(train_online, "generate", spy)
    run = online(paths, **options, resume=True)
    assert calls == ["refresh 1"] and run.result["answers_generated"] == 24


def test_a_finished_run_may_be_ranked_again(online, files):
    """--keep-fraction at a resume: another share, the same model, omega and refined answers."""
    paths = files(lower=10, upper=6)
    options = {"batch": 5, "epochs": 2, "omega_lr": 30}
    first = online(paths, **options)
    before = fingerprint(first.out)
    again = online(paths, **options, resume=True, keep_fraction=0.3)
    assert sum(e["kept"] for e in again.curated) == sum(e["kept"] for e in again.weights) == 3
    assert [{**e, "kept": None} for e in again.curated] == [
        {**e, "kept": None} for e in first.curated]
    after = fingerprint(again.out)
    assert {name for name in after if after[name] != before[name]} <= {
        "weights.jsonl", "curated.jsonl", "result.json"}


@pytest.mark.parametrize("changes", [
    {"k_gen": 2}, {"num_answers": 2}, {"ratio_masked": 0.5}, {"refine": "drop"},
    {"ratio": "lambda"}, {"temperature": 0.9}, {"mask": "dynamic"}, {"first_refresh": 1}],
    ids=lambda changes: next(iter(changes)))
def test_another_argument_is_refused_by_name(online, files, refused, changes):
    paths = files(lower=6, upper=6)
    options = {"batch": 3, "epochs": 1}
    online(paths, **options)
    line = refused(lambda: online(paths, **options | changes, resume=True))
    (name,) = changes
    assert f"cannot resume: args {name} was" in line


# --- under --refine accept ------------------------------------------------------------------------

@pytest.fixture
def accepting(monkeypatch, files, tmp_path):
    """(paths, options) of a run that accepts answers: gates are open, whatever they measured."""
    measure = accept.open_gates

    def open_gates(run, sampling, wanted=()):
        return {way: own | ({"threshold": 3.0 if way == "search" else -99.0, "weight": 0.9}
                            if way in ("search", *wanted) else {})
                for way, own in measure(run, sampling, wanted).items()}

    monkeypatch.setattr(accept, "open_gates", open_gates)
    paths = files(lower=24, upper=80, heldout=80, longest=2)
    rows = read_rows(paths["lower"])
    mask = [{"row_id": n, "hash": content_hash(row["prompt"], row["response"]), "rank": n + 1,
             "kept": n % 2 > 0} for n, row in enumerate(rows)]
    return paths, {"mask": write_rows(tmp_path / "mask.jsonl", mask), "refine": "accept",
                   "batch": 6, "epochs": 4, "lr": 3e-2, "k_gen": 5, "save_every": 3,
                   "max_new_tokens": 24, "rho_start": 0.3}


@pytest.fixture
def die_in(monkeypatch):
    """die_in(module, name, number): its call of that number dies; returns the numbers of calls."""
    undo = []

    def arm(module=None, name=None, number=0, after=False):
        while undo:
            monkeypatch.setattr(*undo.pop())
        calls = []
        if module is None:
            return calls
        whole = getattr(module, name)
        undo.append((module, name, whole))

        def dying(*args, **options):
            calls.append(name)
            if len(calls) == number and not after:
                raise Killed
            made = whole(*args, **options)
            if len(calls) == number:
                raise Killed
            return made

        monkeypatch.setattr(module, name, dying)
        return calls
    return arm


def test_accepting_goes_on_bit_for_bit(online, accepting, die_in):
    """Stopped before and after search.json is written, in the gate before training, after and
    between refreshes, and in each generation of the final pass."""
    paths, options = accepting
    calls = die_in(curate, "generate", 0)
    whole = online(paths, out="whole", **options)
    assert [step["step"] for step in whole.metrics if "answers" in step] == [0, 5, 10, 15]
    assert sum(step.get("accepted/search", 0) for step in whole.metrics) > 2
    assert not any(step.get("accepted/generate") for step in whole.metrics)
    assert whole.result["accepted/generate"] > 0 and whole.result["refined/refined"] > 3
    stops = [(accept, "trial_search", 1), (accept.folder, "write_once", 1),
             (curate, "generate", 1), (curate, "generate", 4), (metrics, "log_metrics", 2),
             (accept, "accepted_answers", 1), (metrics, "log_metrics", 5),
             (metrics, "log_metrics", 4), (curate, "generate", 2), (curate, "generate", 3),
             (accept, "rewrite", 1), (models, "save_adapter", 1)]
    died = 0
    for number, (module, name, count) in enumerate(stops):
        die_in(module, name, count, after=name in ("accepted_answers", "log_metrics"))
        try:
            online(paths, **options, resume=number > 0)
        except Killed:
            died += 1
    die_in()
    resumed = online(paths, **options, resume=True)
    assert died == len(stops) and len(calls) > 8
    assert_equal(resumed.out, whole.out)
    assert listing(resumed.out) == listing(whole.out)
    assert (resumed.out / "search.json").read_bytes() == (whole.out / "search.json").read_bytes()


def test_a_damaged_search_is_refused_a_missing_one_made_again(online, accepting, die_in, refused,
                                                              tmp_path):
    paths, options = accepting
    die_in(metrics, "log_metrics", 7)
    with pytest.raises(Killed):
        online(paths, **options)
    die_in()
    file = tmp_path / "run" / "search.json"
    before = file.read_bytes()
    for damage in ("{", '{"found": {}, "present": null}',
                   '{"found": {"x": 1}, "trials": [null, null], "present": null}'):
        file.write_text(damage)
        line = refused(lambda: online(paths, **options, resume=True))
        assert f"{file}: damaged (" in line and line.endswith("or delete it to have it made again")
    file.unlink()
    online(paths, **options, resume=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize("change", ["mask", "upper"])
def test_other_rows_are_not_resumed(online, accepting, die_in, refused, change):
    """The mask's file with other rows in it; another trusted row. In a line that fits a screen (the
    path of the run folder aside)."""
    paths, options = accepting
    die_in(metrics, "log_metrics", 3)
    with pytest.raises(Killed):
        online(paths, **options)
    die_in()
    rows = read_rows((paths | options)[change])
    if change == "mask":
        said = "cannot resume: args masked_rows was"
        rows[4]["kept"] = True
    else:
        said = "cannot resume: data upper was"
        gate = accept.trusted_parts([content_hash(row["prompt"]) for row in rows], accept.FOUND)[1]
        rows[gate[0]]["response"] = "another answer"
    write_rows((paths | options)[change], rows)
    line = refused(lambda: online(paths, **options, resume=True))
    assert len(line) - line.index(said) < 140


# --- killed for real ------------------------------------------------------------------------------

# Runs train_online.py; in the generation call of that number it leaves a marker and waits there.
WAITING = """
import pathlib, runpy, sys, time, transformers
marker, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
sys.argv = ["train_online.py", *sys.argv[3:]]
calls, generate = [0], transformers.GenerationMixin.generate

def waiting(self, *args, **options):
    calls[0] += 1
    if calls[0] == number:
        marker.write_text("generating")
        time.sleep(60)
    return generate(self, *args, **options)

transformers.GenerationMixin.generate = waiting
runpy.run_path("train_online.py", run_name="__main__")
"""


@pytest.fixture
def processes(files, folders, tmp_path):
    """start(out, *more, wait_in=None): a process of train_online.py; kill(process, ready)."""
    paths = files(lower=40, upper=12)
    options = flags(
        lower=paths["lower"], upper=paths["upper"], upper_heldout=paths["heldout"],
        model=folders["llama"], cache_dir=tmp_path / "cache", batch=4, micro_batch=2, epochs=3,
        save_every=4, k_gen=7, num_answers=2, mask="dynamic", ratio_masked=0.4, lr=5e-3,
        omega_lr=10, max_new_tokens=12, generation_batch=64)

    class Processes:
        log = tmp_path / "log"

        def start(self, out, *more, wait_in=None):
            head = ["train_online.py"] if wait_in is None else [
                "-c", WAITING, tmp_path / "marker", wait_in]
            command, environment = python(*head, *options, "--out", tmp_path / out, *more)
            with open(self.log, "a") as log:
                return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

        def kill(self, process, ready):
            deadline = time.monotonic() + 180
            while not ready() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL, self.log.read_text()
    return Processes()


@pytest.mark.slow
def test_killed_during_generation_equals_the_uninterrupted_run(processes, tmp_path):
    """SIGKILL inside transformers' generate at the second refresh, between two checkpoints: all
    that the run leaves equals, byte for byte, what a run left alone does."""
    whole, run, marker = processes.start("whole"), tmp_path / "run", tmp_path / "marker"
    processes.kill(processes.start("run", wait_in=2), marker.exists)
    assert last_step(run) == 6 and len(list(run.glob("checkpoints/step_*"))) == 1
    killed = copy_tree(run, tmp_path / "killed")
    assert processes.start("run", "--resume").wait() == 0, processes.log.read_text()
    assert whole.wait() == 0
    assert_equal(run, tmp_path / "whole")
    assert read_rows(killed / "metrics.jsonl")[:4] == read_rows(run / "metrics.jsonl")[:4]
