"""paper/refine.py: its rows, its mask, its commands, and what it measures of a run."""

import json
import shlex
from types import SimpleNamespace

import pytest
import torch
from conftest import make_rows, read_rows, write_rows

import models
import ranking
from data.tokens import load_rows
from paper import refine
from paper.__main__ import main
from utils import UserError


@pytest.fixture
def good(tmp_path):
    """Files of good rows with several sentences: lower, upper, upper_heldout."""
    paths = {}
    for seed, name in enumerate(("lower", "upper", "heldout")):
        rows = make_rows(60, seed=20 + seed, longest=6)
        for n, row in enumerate(rows):
            row["response"] = f"one two three four number {n} of {name} five six seven"
        paths[name] = write_rows(tmp_path / f"{name}.jsonl", rows)
    return paths


def arguments(good, folders, **changes):
    return SimpleNamespace(**{
        "scale": "small", "name": "tried", "list": False, "train": None, "online": None,
        "select": None,
        "rows": 40, "data": f"--model {folders['llama']} --lower {good['lower']} --upper "
        f"{good['upper']} --upper-heldout {good['heldout']} --max-length 128"} | changes)


def test_spoilt_rows_keep_their_right_answer():
    rows = [{"prompt": str(n), "response": f"a b c d e f g h {n}"} for n in range(40)]
    spoilt = refine.spoil(rows, 3, 0.5)
    assert spoilt == refine.spoil(rows, 3, 0.5) != refine.spoil(rows, 4, 0.5)
    assert {row["prompt"]: row["answer"] for row in spoilt} == {
        row["prompt"]: row["response"] for row in rows}
    kinds = [row["kind"] for row in spoilt]
    assert (kinds.count("clean"), kinds.count("cut"), kinds.count("swapped")) == (20, 5, 15)
    swapped = [row for row in spoilt if row["kind"] == "swapped"]
    # Donors are present: every answer is there, and none at its own question.
    assert {row["response"] for row in swapped} == {row["answer"] for row in swapped}
    for row in spoilt:
        assert row["bad"] == (row["response"] != row["answer"]) == (row["kind"] != "clean")
        if row["kind"] == "cut":
            assert row["answer"].startswith(row["response"])


def test_text_rows_and_their_mask(tmp_path, monkeypatch, good, folders):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refine, "HELD_OUT", 12)
    monkeypatch.setattr(refine, "CLEAN_OUT", 12)
    args = arguments(good, folders)
    with pytest.raises(UserError, match="60 usable rows; --rows 49 takes 61, of which 12 are"):
        refine.arms_of(arguments(good, folders, rows=49, name="few"), "50% bad", 2)
    arms = refine.arms_of(args, "50% bad", 2)
    rows = tmp_path / "runs/tried/refine/50-bad/rows/seed-2"
    found = {name: read_rows(rows / f"{name}.jsonl") for name in (
        "lower", "right", "upper", "lower_heldout", "upper_heldout", "mask")}
    assert [len(found[name]) for name in ("lower", "right", "lower_heldout", "upper_heldout")] == [
        40, 40, 12, 12]
    assert not {row["prompt"] for row in found["lower"]} & {
        row["prompt"] for row in found["lower_heldout"]}
    assert [row["response"] for row in found["right"]] == [
        row["answer"] for row in found["lower"]]
    tokenizer = models.load_tokenizer(str(folders["llama"]))
    lower, _ = load_rows(str(rows / "lower.jsonl"), tokenizer, max_length=128)
    assert ranking.rows_not_kept(lower, rows / "mask.jsonl").tolist() == lower["bad"][:]
    words = {arm: shlex.split(command) for arm, (_, command) in arms.items()}
    assert list(words) == list(refine.ARMS)
    last = {arm: {flag: own[len(own) - 1 - own[::-1].index(flag) + 1] for flag in (
        "--refine", "--mask", "--lower", "--upper")} for arm, own in words.items()}
    assert last["right answers"]["--lower"].endswith("right.jsonl")
    assert last["right answers"]["--mask"] == "static"
    assert {arm: own["--refine"] for arm, own in last.items()} == {
        "drop": "drop", "generate": "generate", "accept": "accept", "random": "random",
        "right answers": "original"}
    for arm in ("drop", "generate", "accept", "random"):
        assert {flag: last[arm][flag][-11:] for flag in ("--mask", "--lower", "--upper")} == {
            "--mask": "/mask.jsonl", "--lower": "lower.jsonl", "--upper": "upper.jsonl"}


def test_tempered_loss(online, files, folders):
    """Against a plain forward of every row: one temperature of each half, used on the other."""
    run = online(files(lower=10, upper=8, heldout=7), batch=5, epochs=1, lr=1e-2)
    model = models.load_model(str(folders["llama"]), torch.device("cpu"), "float32")
    model = models.add_lora(model, adapter=run.out / "adapter").eval()
    args = json.loads((run.out / "config.json").read_text())["args"]
    rows, _ = load_rows(args["upper_heldout"], models.load_tokenizer(str(folders["llama"])),
                        max_length=2048)
    losses = torch.zeros(len(rows), len(refine.TEMPERATURES), dtype=torch.float64)
    for n, row in enumerate(rows):
        ids, start = torch.tensor(row["input_ids"]), row["trained"].index(1)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, start - 1:-1].double()
        for t, temperature in enumerate(refine.TEMPERATURES):
            logps = torch.log_softmax(logits / temperature, dim=-1)
            losses[n, t] = -logps[torch.arange(len(ids) - start), ids[start:]].mean()
    even, odd = losses[::2], losses[1::2]
    expected = (even[:, odd.mean(0).argmin()].sum() + odd[:, even.mean(0).argmin()].sum()) / 7
    assert refine.tempered_loss(run.out) == pytest.approx(expected.item(), abs=1e-4)
    at_one = losses[:, (refine.TEMPERATURES == 1).nonzero().item()].mean()
    assert run.result["upper_heldout"] == pytest.approx(at_one.item(), abs=1e-4)


def test_rewritten_rows_against_the_truth(tmp_path):
    lower = [{"prompt": str(n), "response": "x", "answer": f"A {n}.", "bad": n < 4}
             for n in range(6)]
    (tmp_path / "config.json").write_text(json.dumps({"args": {"lower": write_rows(
        tmp_path / "lower.jsonl", lower)}}))
    made = [("0", "a 0", "refined"), ("1", "A 2.", "refined"), ("2", None, "original"),
            ("3", "A 3.", "undecided"), ("4", None, "original")]
    write_rows(tmp_path / "curated.jsonl", [
        {"prompt": prompt, "refined": text, "recommended": choice, "masked": True,
         "bad": prompt != "4"} for prompt, text, choice in made])
    assert refine.rewritten(tmp_path) == {"precision": 0.5, "coverage": 0.25}


@pytest.mark.parametrize(("words", "line"), [
    (["--scale", "paper"], "refine: --scale toy or small"),
    (["--only", "90% bad"], "--only: nothing here has the name '90% bad'"),
    (["--scale", "small", "--data", "--model m --lower l"], "--data must name --model"),
])
def test_bad_input(tmp_path, monkeypatch, refused, words, line):
    monkeypatch.chdir(tmp_path)
    assert line in refused(lambda: main(["refine", *words]))


def test_seeds_go_on_from_the_first_one(tmp_path, monkeypatch, good, folders, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["refine", "--scale", "small", "--only", "80% bad; drop", "--list", "--data",
             arguments(good, folders).data]
    for more, seeds in (([], ["3", "4"]), (["--first-seed", "9"], ["9", "10"])):
        main([*words, "--seeds", "2", *more])
        lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
        assert [line[line.index("--seed") + 1] for line in lines] == seeds
