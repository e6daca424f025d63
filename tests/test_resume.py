"""Resume: a killed run goes on bit for bit, or is refused with a line that says why not.

These tests stop a run inside this process, which is quick and reaches places that a signal hits
only by luck; test_kills.py kills real processes.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import listing, read_rows, write_rows

import train_offline
import utils
from runtime import folder, metrics

TIMES = "time/"


def fingerprint(run):
    """Everything a run leaves that must be equal byte for byte, by name."""
    files = {name: (run / name).read_bytes() for name in listing(run)
             if name.startswith(("weights", "adapter/", "curated", "shown", "base.json"))
             or name == "result.json"}
    assert {"adapter/adapter_model.safetensors", "weights.jsonl", "result.json"} <= set(files)
    method = json.loads(files["result.json"])["method"]
    assert ("weights/epoch_1.safetensors" in files) == (method in ("bds", "online"))
    assert ("curated.jsonl" in files) == (method == "online")
    steps = [{key: value for key, value in row.items() if not key.startswith(TIMES)}
             for row in read_rows(run / "metrics.jsonl")]
    return files | {"metrics.jsonl": json.dumps(steps)}


def last_step(run):
    """The last whole step in metrics.jsonl, -1 without one."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return -1
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except ValueError:
            continue
    return -1


def test_a_resumed_run_removes_what_was_half_written(tmp_path):
    out, config = tmp_path / "run", {"args": {}, "environment": {}, "data": {}}
    folder.open_run(out, config, resume=False)
    (out / ".weights.jsonl.12345.partial").write_text("half")
    folder.open_run(out, config, resume=True)
    assert listing(out) == ["config.json", folder.LOCK]


@pytest.mark.parametrize("saved", ["[1, 2]", "3", "null", '{"args": [1]}', '{"environment": 1}'])
def test_a_config_that_is_none_is_refused(tmp_path, saved):
    out, config = tmp_path / "run", {"args": {"lr": 1}, "environment": {}, "data": {}}
    folder.open_run(out, config, resume=False)
    (out / "config.json").write_text(saved)
    with pytest.raises(utils.UserError, match=r"config\.json: not the configuration of a run"):
        folder.open_run(out, config, resume=True)


def assert_equal(run, whole):
    run, whole = fingerprint(run), fingerprint(whole)
    assert run.keys() == whole.keys()
    assert [name for name in run if run[name] != whole[name]] == []


class Killed(BaseException):
    """Stops a run where it stands; nothing in the project may catch it."""


@pytest.fixture
def stop_at(monkeypatch):
    """stop_at(step, where): the next run dies at that step, before or after a line is logged or
    inside the writing of a checkpoint. Call it with None to let runs live again."""
    log, save = metrics.log_metrics, folder.save_checkpoint

    def arm(step, where="after the log"):
        def log_or_die(file, values):
            if values["step"] == step and where == "half a line":
                file.write(json.dumps(values)[:20])
                file.flush()
                raise Killed
            log(file, values)
            if values["step"] == step and where == "after the log":
                raise Killed

        def save_or_die(out, now, *args, **kwargs):
            if now > (step or 0) and where == "in the checkpoint" and step is not None:
                partial = out / "checkpoints" / f".step_{now:08d}.partial"
                partial.mkdir(parents=True)
                (partial / "adapter.safetensors").write_bytes(b"half")
                raise Killed
            save(out, now, *args, **kwargs)

        monkeypatch.setattr(metrics, "log_metrics", log_or_die)
        monkeypatch.setattr(folder, "save_checkpoint", save_or_die)
    return arm


@pytest.mark.parametrize("options", [
    {"omega_optimizer": "adam", "omega_lr": 0.05, "center": True, "schedule": "cosine"},
    {"omega_lr": 5, "omega_loss": "current", "gradient_checkpointing": True,
     "omega_start": "tests"},
    {"omega_lr": 5, "correction": 0.5},
    {"method": "mix", "rho": 0.4},
    {"method": "sft", "skip_scores": True},
], ids=["adam, centred, cosine", "plain, current loss, checkpointing", "corrected", "mix", "sft"])
def test_stopped_anywhere_goes_on_bit_for_bit(train, files, stop_at, options):
    """Every optimiser and method; stopped before the first checkpoint, between two, inside one,
    in the middle of a logged line, and after the last step."""
    paths = files(lower=11, upper=7)
    options = {"batch": 4, "epochs": 3, "save_every": 2, "lr": 1e-2} | options
    if options.get("method") == "sft":
        del paths["upper"], paths["heldout"]
    whole = train(paths, out="whole", **options)
    for step, where in ((0, "after the log"), (3, "half a line"), (4, "after the log"),
                        (5, "in the checkpoint"), (8, "after the log")):
        stop_at(step, where)
        with pytest.raises(Killed):
            train(paths, **options, resume=step > 0)
    stop_at(None)
    resumed = train(paths, **options, resume=True)
    if options.get("skip_scores"):
        assert (resumed.out / "adapter/adapter_model.safetensors").read_bytes() == (
            whole.out / "adapter/adapter_model.safetensors").read_bytes()
        assert resumed.result == whole.result
    else:
        assert_equal(resumed.out, whole.out)
    assert not [name for name in listing(resumed.out) if ".partial" in name]
    assert listing(resumed.out) == listing(whole.out)


def test_a_finished_run_may_be_ranked_again_but_not_trained(train, files, monkeypatch):
    """--keep-fraction may change at a resume: another share is kept, the model is the same."""
    paths = files(lower=10, upper=6)
    options = {"batch": 5, "epochs": 2, "omega_lr": 30}
    first = train(paths, **options)
    before = fingerprint(first.out)

    def never(*args, **kwargs):
        raise AssertionError("a finished run was trained on")

    monkeypatch.setattr(train_offline, "descend", never)
    again = train(paths, **options, resume=True, keep_fraction=0.3)
    assert json.loads((again.out / "config.json").read_text())["args"]["keep_fraction"] == 0.3
    assert [row["row_id"] for row in again.weights] == [row["row_id"] for row in first.weights]
    assert sum(row["kept"] for row in again.weights) == 3
    after = fingerprint(again.out)
    assert {name for name in after if after[name] != before[name]} <= {
        "weights.jsonl", "result.json"}


def test_checkpoints_keep_the_last_two_and_resume_takes_the_newest(train, files):
    """A damaged newest checkpoint is named; deleting it resumes from the one before."""
    paths = files(lower=11, upper=7)
    options = {"batch": 4, "epochs": 3, "save_every": 2}
    run = train(paths, **options)
    assert sorted(path.name for path in (run.out / "checkpoints").iterdir()) == [
        "step_00000008", "step_00000009"]


# --- what may not change --------------------------------------------------------------------------

@pytest.fixture
def stopped(train, files, stop_at, refused, tmp_path):
    """A run stopped half way, and `resume(**changes)` -> the line it is refused with."""
    paths = files(lower=11, upper=7)
    options = {"batch": 4, "epochs": 2, "save_every": 2}
    stop_at(4)
    with pytest.raises(Killed):
        train(paths, **options)
    stop_at(None)
    run = tmp_path / "run"

    def resume(**changes):
        before = {name: (run / name).read_bytes() for name in listing(run)}
        line = refused(lambda: train(paths, **options | {"resume": True} | changes))
        assert before == {name: (run / name).read_bytes() for name in listing(run)}
        return line
    resume.out, resume.paths = run, paths
    resume.works = lambda **changes: train(paths, **options | {"resume": True} | changes)
    return resume


@pytest.mark.parametrize(("section", "key", "value"), [
    ("environment", "threads", 7), ("environment", "dtype", "bfloat16"),
    ("environment", "torch", "2.0.1"), ("environment", "transformers", "4.30.0"),
    ("environment", "peft", "0.1"), ("environment", "numpy", "1.0"),
    ("environment", "device", "NVIDIA A100"), ("environment", "machine", "aarch64"),
    ("environment", "instructions", "NEON")])
def test_another_environment_is_refused_by_name(stopped, section, key, value):
    """As if the run had been started elsewhere: its config.json says so."""
    file = stopped.out / "config.json"
    config = json.loads(file.read_text())
    assert key in config[section]
    now = config[section][key]
    config[section][key] = value
    file.write_text(json.dumps(config))
    line = stopped()
    assert f"cannot resume: {section} {key} was {value!r} and is now {now!r}" in line


def test_another_thread_count_is_refused(stopped):
    """The real thing, not an edited file."""
    torch.set_num_threads(2)
    try:
        assert "cannot resume: environment threads was 1 and is now 2" in stopped()
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(("changes", "words"), [
    ({"lr": 1e-5}, "args lr was 0.0002 and is now 1e-05"),
    ({"batch": 5}, "args batch was 4 and is now 5"),
    ({"micro_batch": 2}, "args micro_batch was 8 and is now 2"),
    ({"seed": 1}, "args seed was 0 and is now 1"),
    ({"epochs": 3}, "args epochs was 2 and is now 3"),
    ({"method": "mix"}, "args method was 'bds' and is now 'mix'"),
    ({"dtype": "float64"}, "args dtype was 'auto' and is now 'float64'"),
    ({"center": True}, "args center was False and is now True")])
def test_another_argument_is_refused_by_name(stopped, changes, words):
    assert f"cannot resume: {words}" in stopped(**changes)


@pytest.mark.parametrize("name", ["lower", "upper", "heldout"])
def test_other_rows_are_refused(stopped, name):
    """A letter changed in any of the files; the same file written again is the same data."""
    path = Path(stopped.paths[name])
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"e", b"a", 1))
    key = name.replace("heldout", "upper_heldout")
    assert re.search(f"cannot resume: data {key} was '[0-9a-f]+' and is now '", stopped())
    path.write_bytes(whole.rsplit(b"\n", 2)[0] + b"\n")  # a row less
    assert f"cannot resume: data {key} was" in stopped()
    path.write_bytes(whole)
    assert len(stopped.works().metrics) == 6


def test_preference_pairs_resume_and_are_told_apart(train, files, stop_at, refused):
    """DPO above: the same model after a stop; another rejected answer is other data."""
    paths = files(lower=7, upper=6)
    for name in ("upper", "heldout"):
        rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {number}"}
                for number, row in enumerate(read_rows(paths[name]))]
        write_rows(paths[name], rows)
    options = {"batch": 4, "epochs": 3, "save_every": 2, "upper_loss": "dpo", "lr": 1e-2}
    whole = train(paths, out="whole", **options)
    stop_at(4)
    with pytest.raises(Killed):
        train(paths, **options)
    stop_at(None)
    upper = Path(paths["upper"])
    before = upper.read_text()
    upper.write_text(before.replace("no 3", "no 9"))
    assert "cannot resume: data upper was" in refused(lambda: train(paths, **options, resume=True))
    upper.write_text(before)
    assert_equal(train(paths, **options, resume=True).out, whole.out)


def test_where_checkpoints_fall_may_change(stopped):
    """--save-every, --merge and --keep-fraction decide nothing of the training."""
    result = stopped.works(save_every=3, keep_fraction=0.5, merge=True)
    assert len(result.metrics) == 6 and (result.out / "merged").exists()


def test_resume_without_a_run_starts_one(train, files, tmp_path):
    """The command of a job that is started again and again need not change."""
    paths = files(lower=5, upper=6)
    first = train(paths, out="a", batch=5, epochs=1, resume=True)
    second = train(paths, out="b", batch=5, epochs=1)
    assert_equal(first.out, second.out)
