"""Faults made on purpose, and the table of what each ranking makes of them."""

import json
import random

import pytest
import torch
from conftest import make_rows, write_rows
from safetensors.torch import load_file

import models
import ranking
import utils
from baselines.__main__ import main as baselines_main
from batches import row_losses
from data.tokens import load_rows
from paper import faults, noise, pairs
from paper.__main__ import main

ROW = {"prompt": "Why is the sky blue?",
       "response": "Because air scatters blue light more. It was shown in 1871 by Rayleigh. It "
                   "is stronger for short waves."}
DONOR = {"prompt": "Who was it?", "response": "It was found by Newton in London in 1704."}


@pytest.mark.parametrize("kind", faults.KINDS)
def test_every_fault_changes_the_answer_and_repeats_with_its_seed(kind):
    made = [faults.KINDS[kind](ROW, DONOR, random.Random(3)) for _ in range(2)]
    assert made[0] == made[1] and made[0] != ROW["response"]


def test_faults_are_what_they_say():
    words = ROW["response"].split()
    for seed in range(30):
        made = {kind: function(ROW, DONOR, random.Random(seed))
                for kind, function in faults.KINDS.items()}
        assert sorted(made["shuffled"].split()) == sorted(words)
        assert ROW["response"].startswith(made["cut middle"])
        assert made["cut middle"][-1].isalnum() and 2 <= len(made["cut middle"].split()) < 20
        assert made["cut sentence"] in (" ".join(faults.sentences(ROW["response"])[:1]),
                                        " ".join(faults.sentences(ROW["response"])[:2]))
        assert made["repeated"].startswith(ROW["response"]) and made["repeated"].count(
            "It is stronger") >= 3
        assert made["echo"] == ROW["prompt"] and made["swapped"] == DONOR["response"]
        assert made["changed"] != ROW["response"]
        assert abs(len(made["changed"].split()) - len(words)) <= 1
    for kind in ("shuffled", "cut middle", "cut sentence", "repeated", "changed"):
        assert faults.KINDS[kind]({"prompt": "a", "response": "Yes"}, DONOR,
                                  random.Random(0)) is None


def test_the_nearest_donor_shares_the_rare_words():
    donors = [{"prompt": "name the the the river", "response": "a"},
              {"prompt": "describe the table", "response": "b"}]
    near = faults.nearest([{"prompt": "the table"}, {"prompt": "a river"}, {"prompt": "?"}], donors)
    assert [row["response"] for row in near] == ["b", "a", "a"]


@pytest.fixture
def tiny(tmp_path, monkeypatch, folders):
    """Words of --data for good rows, donors and trusted rows; three kinds of faults, one share."""
    monkeypatch.chdir(tmp_path)
    kinds = ("swapped", "cut middle", "echo")
    monkeypatch.setattr(faults, "KINDS", {kind: faults.KINDS[kind] for kind in kinds})
    monkeypatch.setattr(noise, "MIXED", {"all kinds": kinds})
    monkeypatch.setattr(noise, "SHARES", (0.3,))
    monkeypatch.setattr(noise, "RESAMPLES", 3)
    rows = [row | {"response": row["response"] + " one two three four five six seven"}
            for row in make_rows(90, 1)]
    return (f"--model {folders['llama']} --lower {write_rows('good.jsonl', rows)} "
            f"--upper {write_rows('trusted.jsonl', make_rows(30, 2))}")


def test_the_table_on_a_tiny_model(tiny, tmp_path, folders, capfd, refused):
    main(["noise", "--name", "tiny", "--rows", "40", "--data", tiny])
    stored = json.loads((tmp_path / "results/noise_tiny.json").read_text())
    assert (tmp_path / "results/noise_tiny.png").stat().st_size > 10_000
    assert stored["command"].startswith("python -m paper noise") and stored["rows"] == 40
    assert stored["results"].keys() == {"develop", "report"}
    report = stored["results"]["report"]
    assert list(report) == ["clean, 0%", "all kinds, 30%",
                            *(f"{kind}, 30%" for kind in faults.KINDS)]
    figures = report["all kinds, 30%"]
    assert list(figures) == ["tests", "tests, trusted", "joined", "loss", "length", "IFD", "random",
                             "DSIR", "RDS+"]
    low, high = figures["tests"]["interval"]
    assert 0 <= low <= high <= 1
    counts = figures["tests"]["reasons"]
    assert sum(sum(own.values()) for own in counts.values()) == 20
    assert sum(counts["clean"].values()) == 14
    assert "auroc" not in report["clean, 0%"]["tests"]
    printed = capfd.readouterr().out
    assert "reasons in the file of all kinds" in printed
    forwards = int(printed.split("at most ")[1].split()[0])
    counts = {file.stem: len(utils.read_jsonl(file))
              for file in (tmp_path / "runs/noise_tiny").glob("*.jsonl")}
    made = counts.pop("made")
    assert [counts.pop(f"{half}-all-kinds-30") for half in noise.HALVES] == [20, 20]
    rows = load_rows(str(tmp_path / "runs/noise_tiny/report-all-kinds-30.jsonl"),
                     models.load_tokenizer(folders["llama"]))[0]
    assert {kind: rows["kind"][:].count(kind) for kind in set(rows["kind"][:])} == {
        kind: sum(own.values()) for kind, own in figures["tests"]["reasons"].items()}
    assert rows["bad"][:] == [kind != "clean" for kind in rows["kind"][:]]
    assert 0 < made <= forwards - 2 * (counts["trusted"] + 40)
    for name, flags in (("dsir", ["--dsir-no-noise"]), ("rds", [])):  # as the command ranks
        baselines_main([name, *tiny.split(), "--lower", "runs/noise_tiny/report-all-kinds-30.jsonl",
                        *flags, "--allow-overlap", "--out", f"{name}.jsonl"])
        ranked = sorted(utils.read_jsonl(tmp_path / f"{name}.jsonl"), key=lambda r: r["row_id"])
        assert figures[{"dsir": "DSIR", "rds": "RDS+"}[name]]["auroc"] == ranking.auroc(
            torch.tensor([row["score"] for row in ranked], dtype=torch.float64),
            torch.tensor([row["bad"] for row in ranked]))
    assert "90" in refused(lambda: main(["noise", "--rows", "46", "--data", tiny]))
    assert "--rows -5: 20 or more" in refused(lambda: main(["noise", "--rows", "-5"]))
    assert "name the rows" in refused(lambda: main(["noise"]))
    words = tiny.replace("good.jsonl", str(write_rows("short.jsonl", [
        row | {"response": "a b c"} for row in make_rows(90, 1)])))
    assert "0 of 40 rows can be cut middle: give others" in refused(lambda: main(
        ["noise", "--name", "none", "--rows", "40", "--data", words]))


def test_a_killed_table_goes_on_and_a_finished_one_stays(tiny, tmp_path, monkeypatch, refused):
    words = ["noise", "--name", "tiny", "--rows", "40", "--data", tiny]
    folder, stored = tmp_path / "runs/noise_tiny", tmp_path / "results/noise_tiny.json"
    calls, judged = [], noise.judged

    def killed(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return judged(*given)

    monkeypatch.setattr(noise, "judged", killed)
    with pytest.raises(KeyboardInterrupt):
        main(words)
    (folder / "echo.safetensors").unlink()
    before = {file: file.read_bytes() for file in folder.iterdir()}
    scored, losses = [], []
    monkeypatch.setattr(noise, "judged", judged)
    monkeypatch.setattr(ranking, "row_evidence", lambda *a, label, evidence=ranking.row_evidence: (
        scored.append(label), evidence(*a))[1])
    monkeypatch.setattr(noise, "row_losses", lambda model, rows, real=noise.row_losses: (
        losses.append(len(rows)), real(model, rows))[1])
    main(words)
    assert scored == ["echo"] and sum(losses) < 150
    assert all(file.read_bytes() == old for file, old in before.items()
               if file.name != "made.jsonl")
    first = stored.read_text()
    monkeypatch.setattr(noise, "measure", None)
    main(words)
    assert stored.read_text() == first
    assert "made by another command" in refused(lambda: main([*words, "--rows", "41"]))


def test_one_half_alone_reads_only_its_rows(tiny, tmp_path, refused, capfd):
    words = ["noise", "--rows", "40", "--data", tiny, "--only", "report"]
    main([*words, "--name", "half"])
    main(["noise", "--rows", "40", "--data", tiny, "--name", "both"])
    half, both = (json.loads((tmp_path / f"results/noise_{name}.json").read_text())["results"]
                  for name in ("half", "both"))
    assert half == {"report": both["report"]}
    for kind, wanted in (("clean", 20), ("echo", 6), ("trusted", 27)):  # three were held out
        found = load_file(tmp_path / f"runs/noise_half/{kind}.safetensors")
        assert len(found["end"]) == len(found["vector"]) == wanted
    assert "nothing here has the name 'swapped'" in refused(lambda: main(
        [*words[:-1], "swapped"]))


def test_remembered_losses_are_those_of_the_model(tmp_path, folders):
    model = models.load_model(folders["llama"], torch.device("cpu"))
    rows = [{"input_ids": [5, 6, 7, n], "trained": [0, 1, 1, 1]} for n in (8, 9, 8, 10)]
    for times in range(2):
        losses = noise.Losses(model if not times else None, tmp_path / "made.jsonl")
        found = losses(rows)
        real = row_losses(model, rows)
        assert torch.allclose(found[0], real[0].double()) and torch.equal(found[1], real[1])
        assert len(losses.known) == 3


def test_pairs_of_answers(tiny, tmp_path, folders, refused):
    rows = [{"prompt": row["prompt"], "chosen": row["response"], "set": "ab"[n % 2],
             "rejected": row["response"] + " seven" * 30} for n, row in enumerate(make_rows(24, 3))]
    words = ["pairs", "--name", "tiny", "--data", f"--model {folders['llama']} --lower "
             f"{write_rows('pairs.jsonl', rows)} --upper {tmp_path / 'trusted.jsonl'}"]
    for _ in range(2):  # the second one reads what the first has kept
        main(words)
        stored = json.loads((tmp_path / "results/pairs_tiny.json").read_text())
        assert list(stored["results"]) == ["all", "a", "b"] and stored["pairs"] == 24
        assert stored["results"]["a"]["loss"]["pairs"] == 12
        assert stored["results"]["all"]["tests"]["share"] == 1  # they repeat themselves
        assert stored["results"]["all"]["length"] == {"share": 0, "interval": [0, 0], "pairs": 24}
    write_rows("pairs.jsonl", [row | {"chosen": "another one"} for row in rows])
    assert "made of other rows" in refused(lambda: main(words))
    assert [pairs.shares_of(*two) for two in ((2, 1), (1, 1), (1, 2))] == [1, 0.5, 0]
    assert "name the rows" in refused(lambda: main(["pairs"]))
    other = write_rows("other.jsonl", [{"question": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(utils.UserError, match="no 'prompt'"):
        pairs.read_pairs(str(other), {0})
