"""`python -m baselines`: what a ranking holds, the rows it reads, and bad input."""

import math
import os
import shutil

import pytest
from conftest import flags, listing, read_rows, write_rows

import models
import train_offline
from baselines import __main__ as command
from data import sets


@pytest.fixture
def preferences(files, tmp_path):
    """Row files whose 30 upper pairs hold one of two equal answers and one without an answer."""
    files = files(lower=12, upper=30)
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {n}"}
             for n, row in enumerate(read_rows(files["upper"]))]
    pairs[4]["rejected"], pairs[9]["rejected"] = pairs[4]["chosen"], ""
    return {"lower": files["lower"], "upper": write_rows(tmp_path / "pairs.jsonl", pairs)}, pairs


def test_the_upper_rows_of_pairs_are_those_of_training(preferences, folders, tmp_path):
    files, _ = preferences
    words = flags(**files, model=folders["llama"], upper_loss="dpo",
                  cache_dir=tmp_path / "cache", out=tmp_path / "kept.jsonl")
    tokenizer = models.load_tokenizer(folders["llama"])
    for seed in range(3):
        theirs = sets.load_levels(
            train_offline.parse_args([*words, "--seed", str(seed)]), tokenizer, 128)
        for method in ("dsir", "less", "rds"):
            ours = command.open_levels(
                command.parse_args([method, *words, "--seed", str(seed)]))
            for name, count in (("upper", 26), ("upper_heldout", 2)):
                ids = list(getattr(ours, name)["row_id"])
                assert ids == list(getattr(theirs, name)["row_id"])
                assert len(ids) == count and not {4, 9} & {*ids}


def test_dsir_less_and_rds_see_the_chosen_responses(rank, preferences, tmp_path):
    """As if the upper rows were the chosen ones and nothing else."""
    files, pairs = preferences
    less = {"epochs": 1, "warmup_fraction": 0.5, "lr": 1e-2, "batch": 4, "lora_rank": 2}
    chosen = [{"prompt": pair["prompt"], "response": pair["chosen"]}
              for number, pair in enumerate(pairs) if number not in (4, 9)]
    alone = files | {"upper": write_rows(tmp_path / "chosen.jsonl", chosen)}
    for method, options in (("dsir", {}), ("less", less), ("rds", {})):
        made = rank(method, files, out=f"{method} pairs", upper_loss="dpo", **options)
        same = rank(method, alone, out=f"{method} chosen", **options)
        assert "26 upper rows" in made.text
        assert made.ranked == same.ranked


def test_training_keeps_exactly_the_kept_rows(rank, files, train, tmp_path):
    files = files(lower=20)
    lower = read_rows(files["lower"])
    lower[4]["response"] = ""  # dropped: row numbers and positions differ from here on
    write_rows(files["lower"], lower)
    made = rank("random", files, keep_fraction=0.5)
    kept = {row["row_id"] for row in made.rows if row["kept"]}
    assert len(kept) == 10 and 4 not in {row["row_id"] for row in made.rows}
    assert "random: 19 lower rows, dropped {'empty_response': 1}" in made.text
    trained = train(files, method="sft", keep=made.file, epochs=1)
    assert {row["row_id"] for row in trained.weights} == kept


@pytest.mark.parametrize("method", command.METHODS)
def test_a_single_row(rank, files, method):
    assert rank(method, files(lower=1, upper=30), keep_fraction=1, lora_rank=2, epochs=1,
                warmup_fraction=1).order == [0]


def test_joined_keeps_as_many_as_are_not_flagged(rank, faulty_labels):
    joined = rank("joined", faulty_labels)
    flagged = [row["reason"] is not None for row in joined.ranked]
    assert any(flagged) and [row["kept"] for row in joined.ranked] == sorted(
        (not bad for bad in flagged), reverse=True)
    losses = [row["loss"] for row in joined.rows]
    expected = [-row["surprise"] + math.log(sum(loss >= row["loss"] for loss in losses) / 40)
                for row in joined.rows]
    assert joined.scores.tolist() == pytest.approx(expected)


@pytest.fixture
def faulty_labels(files, tmp_path):
    """40 rows, of which four repeat themselves and are labelled bad; half have long answers."""
    files = files(lower=40)
    rows = [row | {"bad": n < 4, "kind": "repeat" if n < 4 else "clean",
                   "response": row["response"] + " seven" * (9 if n < 4 else 0)}
            for n, row in enumerate(read_rows(files["lower"]))]
    for n in range(20, 40):
        rows[n]["response"] += " " + " ".join(str(n * m) for m in range(9))
    return {"lower": write_rows(files["lower"], rows)}


def test_without_a_model_no_row_is_dropped_for_its_length(rank, files):
    files = files(lower=6)
    rows = read_rows(files["lower"])
    rows[2]["prompt"] = "stone " * 4000
    write_rows(files["lower"], rows)
    assert len(rank("length", files, model=None).rows) == 6
    assert len(rank("length", files, max_length=64).rows) == 5


def test_known_labels_are_reported_by_kind(rank):
    made = rank("random", None, seed=3)
    assert made.result["rows"] == 2400 and made.result["kept"] == 1920
    assert 0.45 < made.result["random/auroc"] < 0.55
    assert {"random/auroc/contrary", "random/recall/plain", "time/seconds"} <= made.result.keys()
    assert {"row_id", "hash", "rank", "kept", "score", "bad", "kind"} == made.rows[0].keys()
    assert "ranking by" in made.text


def test_the_toy_has_its_default_settings_here(capfd):
    """Other noise or other trusted rows: files that the toy's own command writes."""
    for flag in ("--toy-noise", "--toy-contrary", "--toy-upper"):
        with pytest.raises(SystemExit) as stop:
            command.parse_args(["random", flag, "0.1"])
        assert stop.value.code == 2
        assert f"unrecognized arguments: {flag}" in capfd.readouterr().err


@pytest.mark.slow
def test_every_method_runs_on_the_toy(rank):
    aurocs = {method: rank(method, None).result for method in ("dsir", "loss", "length", "ifd")}
    less = rank("less", None, epochs=2).result
    assert less["less/auroc/contrary"] > 0.7 > aurocs["loss"]["loss/auroc/contrary"]
    assert aurocs["loss"]["loss/auroc/plain"] > 0.9 < aurocs["ifd"]["ifd/auroc/plain"]


@pytest.mark.parametrize("method, options, said", [
    ("dsir", {"upper": None}, "--upper is missing; dsir needs it"),
    ("less", {"model": None}, "--model is missing; less needs it"),
    ("loss", {"lower": None}, "--lower is missing"),
    ("random", {"keep_fraction": 0}, "--keep-fraction 0.0: must lie in (0, 1]"),
    ("random", {"keep_fraction": 0.01}, "of 12 rows keeps none"),
    ("random", {"out": "."}, "is a folder"),
    ("less", {"warmup_fraction": 2}, "--warmup-fraction 2.0"),
    ("less", {"lr": -1}, "--lr -1.0: must be a finite number above 0"),
    ("less", {"epochs": 0}, "--epochs 0: must be 1 or more"),
    ("dsir", {"seed": -1}, "--seed -1: must lie between 0 and 2**63 - 1"),
    ("less", {"seed": 99999999999999999999}, "--seed 99999999999999999999: must lie between"),
    ("random", {"lower": ""}, "lower: the name of the source is empty"),
    ("loss", {"device": "mps"}, "--device mps: no such device"),
    ("dsir", {"upper_loss": "dpo"}, "preference pairs need chosen and rejected columns"),
    ("less", {"lr": 1e30, "warmup_fraction": 1, "batch": 2}, "not finite"),
    ("dsir", {"upper": "empty.jsonl"}, "upper: the source holds no rows"),
    ("loss", {"model": "nowhere/at/all"}, "no such folder"),
])
def test_bad_input_is_one_line_and_leaves_nothing(rank, files, refused, tmp_path, monkeypatch,
                                                  method, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    rows = files()
    line = refused(lambda: rank(method, rows, **options))
    assert said in line
    assert not list(tmp_path.glob("*kept.jsonl")) and not list(tmp_path.glob(".*"))


def test_no_pipe_and_no_file_of_a_run_is_replaced(rank, files, refused, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    rows = files()
    for name, said in (("pipe", "is not a regular file"), ("run/weights.jsonl", "would overwrite")):
        assert said in refused(lambda name=name: rank("random", rows, out=tmp_path / name))
    assert (tmp_path / "pipe").is_fifo() and len([*(tmp_path / "run").iterdir()]) == 1


def test_flags_that_a_method_does_not_read_are_named(capsys, tmp_path):
    command.parse_args(["random", "--dsir-buckets", "7", "--out", str(tmp_path / "kept.jsonl")])
    command.parse_args(["dsir", "--dsir-buckets", "7", "--out", str(tmp_path / "kept.jsonl")])
    assert capsys.readouterr().out == "not read by random: --dsir-buckets\n"
    for method, named in (("dsir", "not read by dsir: --micro-batch\n"), ("less", "")):
        command.parse_args([method, "--micro-batch", "7", "--out", str(tmp_path / "kept.jsonl")])
        assert capsys.readouterr().out == named


def test_out_may_not_be_one_of_the_sources(rank, files, refused, tmp_path):
    rows = files(lower=12, upper=8, heldout=4)
    before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
    (tmp_path / "folder").mkdir()
    inside = shutil.copy(rows["lower"], tmp_path / "folder" / "train.jsonl")
    (tmp_path / "link.jsonl").symlink_to(rows["lower"])
    (tmp_path / "a@b").mkdir()
    at = shutil.copy(rows["lower"], tmp_path / "a@b" / "c@d.jsonl")
    for flag, out, options in (
            ("lower", rows["lower"], {}), ("upper", rows["upper"], {}),
            ("lower", inside, {"lower": tmp_path / "folder"}), ("lower", at, {"lower": at}),
            ("upper-heldout", rows["heldout"], {"upper_heldout": rows["heldout"]})):
        line = refused(lambda out=out, options=options: rank("dsir", rows, out=out, **options))
        assert f"holds the rows of --{flag}, which the ranking would replace" in line
    assert "link.jsonl: is not a regular file" in refused(
        lambda: rank("dsir", rows, out=tmp_path / "link.jsonl"))
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    made = rank("random", rows, lower=tmp_path / "folder", out="folder/kept.jsonl")
    assert len(made.rows) == 12  # beside a file that is read


def test_a_ranking_made_without_a_model_fits_all(rank, files, train, folders, tmp_path):
    """Answers that end in the model's end marker: `random` does not know that it is one."""
    files = files(lower=10)
    lower = read_rows(files["lower"])
    for row, marker in zip(lower, ("<|im_end|>", "<eos>", "<|endoftext|>"), strict=False):
        row["response"] += marker
    write_rows(files["lower"], lower)
    model = shutil.copytree(folders["llama"], tmp_path / "model")
    tokenizer = models.load_tokenizer(model)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(model)
    made = rank("random", files, model=None, keep_fraction=1)
    run = train(files, model=model, method="sft", keep=made.file, epochs=1)
    assert [row["hash"] for row in sorted(run.weights, key=lambda row: row["row_id"])] == [
        row["hash"] for row in made.rows]
