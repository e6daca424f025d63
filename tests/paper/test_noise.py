"""Faults made on purpose, and the table of what each ranking makes of them."""

import json
import random

import pytest
from conftest import make_rows, write_rows

from paper import faults, noise
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


def test_the_table_on_a_tiny_model(tmp_path, monkeypatch, folders, capfd, refused):
    monkeypatch.chdir(tmp_path)
    kinds = ("swapped", "cut middle", "echo")
    monkeypatch.setattr(faults, "KINDS", {kind: faults.KINDS[kind] for kind in kinds})
    monkeypatch.setattr(noise, "MIXED", {"all kinds": kinds})
    monkeypatch.setattr(noise, "SHARES", (0.3,))
    monkeypatch.setattr(noise, "RESAMPLES", 3)
    rows = [row | {"response": row["response"] + " one two three four five six seven"}
            for row in make_rows(90, 1)]
    data = (f"--model {folders['llama']} --lower {write_rows('good.jsonl', rows)} "
            f"--upper {write_rows('trusted.jsonl', make_rows(30, 2))}")
    main(["noise", "--name", "tiny", "--rows", "40", "--data", data])
    stored = json.loads((tmp_path / "results/noise_tiny.json").read_text())
    assert stored["command"].startswith("python -m paper noise") and stored["rows"] == 40
    assert stored["results"].keys() == {"develop", "report"}
    report = stored["results"]["report"]
    assert list(report) == ["clean, 0%", "all kinds, 30%", *(f"{kind}, 30%" for kind in kinds)]
    figures = report["all kinds, 30%"]
    assert list(figures) == ["tests", "tests, trusted", "loss", "length", "IFD", "random"]
    low, high = figures["tests"]["interval"]
    assert 0 <= low <= high <= 1
    counts = figures["tests"]["reasons"]
    assert sum(sum(own.values()) for own in counts.values()) == 20
    assert sum(counts["clean"].values()) == 14
    assert "auroc" not in report["clean, 0%"]["tests"]
    assert "reasons in the file of all kinds" in capfd.readouterr().out
    assert "90" in refused(lambda: main(["noise", "--rows", "46", "--data", data]))
    assert "name the rows" in refused(lambda: main(["noise"]))
