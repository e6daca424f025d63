"""Every file of a run, damaged in every way: one line that names it."""

import json
import math
import os
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from conftest import listing, read_rows, write_rows
from fabricated import fabricate
from safetensors.torch import save

import eval as front
from evaluation import plots, qa
from evaluation.runs import read_result
from runtime.command import run as run_command
from utils import UserError


def test_read_result(tmp_path):
    with pytest.raises(UserError, match=r"no result\.json"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text('{"a": ')
    with pytest.raises(UserError, match="not valid JSON"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"a": 1.5}))
    assert read_result(tmp_path) == {"a": 1.5}


# --- damaged files --------------------------------------------------------------------------------

WRONG = ("text", True, None, [1], math.nan, 10**400, 1e308, -3)
FILES = {  # a file of a run: the commands that read it
    "config.json": ("compare", "report", "ranking", "losses", "qa", "answers", "generate",
                    "tensorboard"),
    "result.json": ("compare", "report"), "base.json": ("compare", "report"),
    "losses.json": ("compare", "report"), "metrics.jsonl": ("report", "tensorboard"),
    "weights.jsonl": ("report", "keep", "ranking"), "curated.jsonl": ("report", "export"),
    "shown.jsonl": ("report",)}


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """call(command, folder) -> the error line, None for a success; a traceback fails the test."""
    monkeypatch.setattr(plots, "draw", lambda *args, **_: str(
        [(name, plots.thin(xs, ys)) for name, xs, ys in args[2]]) and "")
    monkeypatch.setattr(qa, "harness", lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        SimpleNamespace(SummaryWriter=MagicMock()))
    write_rows(tmp_path / "p.jsonl", [{"prompt": "red"}])
    more = {"report": ["--out", str(tmp_path / "out.html")], "keep": ["--keep-fraction", "0.5"],
            "answers": ["--prompt", "red"], "export": ["--format", "alpaca"]}

    def run(command, folder):
        words = [command, str(folder), *more.get(command, [])]
        if command == "generate":
            words = ["winrate", *words, "--prompts", str(tmp_path / "p.jsonl"), "--out",
                     str(tmp_path / "o.json")]
        capfd.readouterr()
        try:
            run_command(lambda: front.main(words))
        except SystemExit as stop:
            assert stop.code == 2
            lines = capfd.readouterr().err.strip().splitlines()
            assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 1000
            return lines[0]
        return None
    return run


@pytest.fixture
def run_folder(tmp_path):
    folder = fabricate(tmp_path / "run", rows=12, method="online", text="x")
    entries = read_rows(folder / "weights.jsonl")
    write_rows(folder / "weights.jsonl", [e | {"masked": e["row_id"] < 3} for e in entries])
    write_rows(folder / "shown.jsonl", [{"row_id": e["row_id"], "hash": e["hash"], "prompt": "x",
                                         "response": "y"} for e in entries])
    (folder / "base.json").write_text('{"base/upper_heldout": 0.7}')
    (folder / "losses.json").write_text('{"base/upper_heldout": 0.7, "lower_refined": 0.5}')
    return folder


def test_whole_files_are_read(call, run_folder):
    for command in ("compare", "report", "keep", "ranking", "tensorboard", "export"):
        assert call(command, run_folder) is None


DAMAGES = {
    "truncated": lambda whole: whole[:whole.rindex(b'"', 0, len(whole) // 2)],
    "not UTF-8": lambda whole: b"\xff\xfe" + whole, "binary": lambda _: b"\x00",
    "empty": lambda _: b"", "deep list": lambda _: b"[" * 100_000,
    "deep object": lambda _: b'{"a":' * 100_000, "a list": lambda _: b"[1, 2]\n",
    "null": lambda _: b"null\n", "NaN": lambda _: b"NaN\n", "no keys": lambda _: b"{}\n"}
# What means "nothing measured", "no texts" or "a run is writing this line" is no damage.
SOUND = {("base.json", "no keys"), ("losses.json", "no keys"), ("curated.jsonl", "empty"),
         ("shown.jsonl", "empty"), ("metrics.jsonl", "truncated")}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_one_line(call, run_folder, name, damage):
    path = run_folder / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for command in FILES[name]:
        line = call(command, run_folder)
        sound = (name, damage) in SOUND and command != "export"  # which would write an empty file
        assert line is None if sound else str(run_folder) in line


def wrong_values(number, every):
    """What a key gets, the number-th of a file: all wrong values, or two and none."""
    return (*(WRONG if every else (WRONG[number % 8], WRONG[(number + 3) % 8])), "gone")


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)],
                                ids=["two values", "every value"])


@EVERY
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_every_key_of_a_json_file_with_wrong_values(call, run_folder, name, every):
    """A success or one line, never a traceback."""
    path = run_folder / name
    whole = json.loads(path.read_text())
    parts = [(whole, ())] + [(whole[key], (key,)) for key in whole if isinstance(whole[key], dict)]
    refusals = 0
    for part, place in parts:
        for nth, key in enumerate(part):
            for value in wrong_values(nth, every):
                other = {k: v for k, v in part.items() if k != key or value != "gone"}
                if value != "gone":
                    other[key] = value
                path.write_text(json.dumps(whole | {place[0]: other} if place else other))
                refusals += sum(bool(call(command, run_folder)) for command in FILES[name])
    assert refusals > (5 if every else 1)


@EVERY
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".jsonl")])
def test_every_key_of_a_jsonl_file_with_wrong_values(call, run_folder, name, every):
    path = run_folder / name
    whole = read_rows(path)
    refusals = 0
    for number in (0, 1):
        for nth, key in enumerate(whole[number], number):
            for value in wrong_values(nth, every):
                row = {k: v for k, v in whole[number].items() if k != key or value != "gone"}
                if value != "gone":
                    row[key] = value
                write_rows(path, [*whole[:number], row, *whole[number + 1:]])
                refusals += sum(bool(call(command, run_folder)) for command in FILES[name])
    assert refusals > (20 if every else 6)


@pytest.mark.parametrize("content", [
    b"", b"\xff" * 100, {"omega": torch.zeros(0)}, {"omega": torch.zeros(2, 6)},
    {"omega": torch.full((12,), math.nan)}, {"omega": torch.zeros(7)}, {"other": torch.zeros(12)}],
    ids=["empty", "garbage", "no rows", "two dimensions", "NaN", "other length", "other name"])
def test_damaged_omega_is_one_line(call, run_folder, content):
    path = run_folder / "weights" / "epoch_1.safetensors"
    path.write_bytes(content if isinstance(content, bytes) else save(content))
    for command in ("report", "ranking", "tensorboard"):
        assert "weights" in call(command, run_folder)
    path.rename(path.with_name("epoch_x.safetensors"))  # not an epoch
    assert call("ranking", run_folder) is None


@pytest.mark.parametrize("name", [
    "curated.jsonl", "weights/base_losses.safetensors", "adapter/adapter_model.safetensors",
    "adapter/adapter_config.json"])
def test_damaged_files_of_a_trained_run(files, online, refused, name):
    """Those that only `losses` reads, with a model in memory."""
    path = online(files(lower=20, upper=20), epochs=1).out / name
    whole = path.read_bytes()
    for damage in (whole[:len(whole) // 2], b"[" * 100_000, b"{}\n"):
        path.write_bytes(damage)
        assert name.split("/")[0].split(".")[0] in refused(
            lambda: front.main(["losses", str(path.parents[name.count("/")])]))


def test_arguments_of_a_run_are_those_of_the_flags(files, train, refused):
    run = train(files(), epochs=1)
    config = json.loads((run.out / "config.json").read_text())
    for name, value in (("max_length", "long"), ("turns", "none"), ("lora_rank", [1]),
                        ("lr", {}), ("dtype", "float99"), ("model", None)):
        (run.out / "config.json").write_text(json.dumps(
            config | {"args": config["args"] | {name: value}}))
        line = refused(lambda: front.main(["losses", str(run.out)]))
        assert "config.json" in line and (str(name).replace("_", "-") in line or name in line)


def test_an_empty_result_is_no_seed(tmp_path, refused):
    good, empty = fabricate(tmp_path / "seed-0"), fabricate(tmp_path / "seed-1", seed=1)
    (empty / "result.json").write_text("{}")
    line = refused(lambda: front.main(["compare", str(good), str(empty)]))
    assert "seed-1/result.json: no 'method'" in line


# --- where to write -------------------------------------------------------------------------------

def test_nothing_is_written_over_an_input_or_a_device(tmp_path, refused):
    run = fabricate(tmp_path / "run", text="x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.html").symlink_to(tmp_path / "pipe")
    os.link(run / "metrics.jsonl", tmp_path / "hard.html")
    before = {name: (run / name).read_bytes() for name in listing(run)}
    for words in (["report", str(run), "--out"], ["compare", str(run), "--json"],
                  ["losses", str(run), "--out"], ["answers", str(run), "--prompt", "x", "--out"],
                  ["keep", str(run), "--keep-fraction", "0.5", "--out"],
                  ["export", str(run), "--format", "alpaca", "--out"]):
        for path, why in ((run / "metrics.jsonl", "would overwrite"),
                          (tmp_path / "run" / ".." / "run" / "config.json", "would overwrite"),
                          (run / "base.json", "would overwrite"),  # not there yet
                          (run / "weights" / "epoch_1.safetensors", "would overwrite"),
                          (tmp_path / "hard.html", "would overwrite"),
                          (tmp_path / "pipe", "not a regular file"),
                          (tmp_path / "link.html", "not a regular file")):
            assert why in refused(lambda w=words, p=path: front.main([*w, str(p)]))
    assert "the tables are written to a .md file" in refused(
        lambda: front.main(["report", str(run), "--out", str(tmp_path / "x.md")]))
    assert before == {name: (run / name).read_bytes() for name in listing(run)}
    assert (tmp_path / "pipe").is_fifo() and not (tmp_path / "x.md").exists()
    for _ in range(2):  # what a command wrote itself, it may write again, in the run's folder too
        front.main(["report", str(run), "--out", str(run / "report.html")])
        front.main(["keep", str(run), "--keep-fraction", "0.5"])
        front.main(["export", str(run), "--format", "alpaca"])
