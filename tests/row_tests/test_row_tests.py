"""`python -m baselines tests`: the ranking that it writes, and what it prints."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import make_rows, make_tokenizer, read_rows, write_rows
from datasets import Dataset

import detect
import models
import ranking
from baselines.tests import print_look, score_by_tests
from batches import row_losses
from data import tokens
from utils import UserError

COLUMNS = {"reason", "surprise", "end", "relevance", "fluency", "repetition", "echo", "loss",
           "length"}


@pytest.fixture
def faulty(tmp_path):
    """Rows of random words; rows 3 and 9 repeat row 2 and themselves, row 5 contradicts row 4."""
    rows = make_rows(24, 5)
    rows[2]["response"] = "seven cold apples on a round stone by the river"
    rows[3] = dict(rows[2])
    rows[4] |= {"prompt": "how many?", "response": "seven"}
    rows[5] |= {"prompt": "How many", "response": "eleven"}
    return write_rows(tmp_path / "faulty.jsonl", rows)


def test_every_row_has_its_numbers_and_flagged_rows_come_last(rank, folders, faulty, tmp_path):
    made = rank("tests", None, model=folders["llama"], lower=faulty)
    assert len(made.rows) == 24 and set(made.rows[0]) >= COLUMNS
    reasons = [row["reason"] for row in made.ranked]
    bad = sum(reason is not None for reason in reasons)
    assert all(reasons[-bad:]) and not any(reasons[:-bad])
    assert [row["kept"] for row in made.ranked] == [reason is None for reason in reasons]
    assert [made.rows[n]["reason"] for n in (3, 4, 5)] == ["duplicate", "conflict", "conflict"]
    assert f"{bad} of 24 rows look bad: " in made.text and "row_id" in made.text
    assert [row["surprise"] for row in made.ranked] == sorted(
        row["surprise"] for row in made.ranked)
    lower = tokens.load_rows(faulty, models.load_tokenizer(folders["llama"]),
                             cache_dir=str(tmp_path / "cache"))[0]
    model = models.load_model(folders["llama"], torch.device("cpu"))
    facts = tokens.fact_reader(models.load_tokenizer(folders["llama"]))
    found = ranking.row_evidence(model, lower, {0, 2, 3}, facts, ranking.blank_prompt(lower))
    for name in ("relevance", "fluency", "loss", "end"):
        assert [row[name] for row in made.rows] == pytest.approx(found[name].tolist())
    for name in ("slip", "peak"):
        for row, value in zip(made.rows, found[name].tolist(), strict=True):
            assert row[name] == (pytest.approx(value) if value == value else None)


def test_trusted_rows_and_another_share_of_kept_rows(rank, folders, faulty, files):
    upper = files(lower=1, upper=30)["upper"]
    made = rank("tests", {"lower": faulty, "upper": upper}, keep_fraction=0.5)
    assert sum(row["kept"] for row in made.rows) == 12 and "27 upper rows" in made.text


def test_preference_pairs_are_no_null_and_the_ranking_says_so(rank, folders, faulty, tmp_path):
    alone = rank("tests", None, model=folders["llama"], lower=faulty)
    pairs = write_rows(tmp_path / "pairs.jsonl", [
        {"prompt": f"{row['prompt']} {n}", "chosen": row["response"], "rejected": "no"}
        for n, row in enumerate(make_rows(30, 6))])
    made = rank("tests", {"lower": faulty, "upper": pairs}, upper_loss="dpo", out="p.jsonl")
    assert made.rows == alone.rows
    assert "note: preference pairs do not say what good rows look like" in made.text


def test_the_same_again_and_the_ranking_is_taken_by_training(rank, folders, faulty, train, files):
    first = rank("tests", None, model=folders["llama"], lower=faulty)
    again = rank("tests", None, model=folders["llama"], lower=faulty, out="again.jsonl")
    assert first.ranked == again.ranked
    run = train({"lower": faulty}, method="sft", keep=first.file, epochs=1, batch=4)
    assert run.result["rows"] == sum(row["kept"] for row in first.rows)


def test_a_model_that_does_not_know_ends_does_not_judge_them():
    count = 300
    draw = torch.Generator().manual_seed(0)
    found = {name: torch.rand(count, generator=draw, dtype=torch.float64) + 1 for name in (
        *ranking.EVIDENCE, "length")}
    found["end"][:30] += 50
    found["repetition"] = found["copied"] = torch.zeros(count, dtype=torch.float64)
    made = {"end": found["end"][30:130] - 0.1, "relevance": found["relevance"][:50] + 3}
    surprise, reasons, notes = ranking.verdicts(found, None, made)
    assert "end" not in reasons and "does not know where answers end" in notes[0]
    assert surprise[:30].mean() < 5
    _, reasons, notes = ranking.verdicts(found, None, made | {"end": found["end"][30:130] + 50})
    assert reasons.count("end") >= 25 and not notes
    _, reasons, notes = ranking.verdicts(found, None, {"relevance": made["relevance"]})
    assert "end" not in reasons and "no answer is long enough to cut" in notes[0]


def test_made_faults_are_what_they_say(folders, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [
        {"prompt": row["prompt"], "response": row["response"] + " one two three four"}
        for row in make_rows(12, 8)])
    tokenizer = models.load_tokenizer(folders["llama"])
    lower = tokens.load_rows(path, tokenizer, cache_dir=str(tmp_path / "cache"))[0]
    model, ends = models.load_model(folders["llama"], torch.device("cpu")), {0}
    blank = ranking.blank_prompt(lower)
    found = ranking.row_evidence(model, lower, ends, int, blank)
    made = ranking.made_faults(partial(row_losses, model), lower, ends, found)
    assert {name: len(values) for name, values in made.items()} == {"end": 12, "relevance": 12}
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [lower[n] for n in order]
    for n, row in enumerate(rows):
        other = rows[n - 1]
        start, taken = row["trained"].index(1), other["trained"].index(1)
        ids = row["input_ids"][:start] + other["input_ids"][taken:]
        one = ranking.row_evidence(model, [{"input_ids": ids, "trained": [0] * start + [1] * (
            len(ids) - start)}], ends, int, blank)
        assert float(made["relevance"][n]) == pytest.approx(
            float(detect.scaled("relevance", one)[0]), abs=1e-4)

    generator = torch.Generator().manual_seed(0)
    assert order == torch.randperm(12, generator=generator).tolist()
    for n, share in enumerate((0.25 + 0.5 * torch.rand(12, generator=generator)).tolist()):
        ids, start = rows[n]["input_ids"], rows[n]["trained"].index(1)  # the end is one token
        ids = ids[:start + int(share * (len(ids) - 1 - start))] + ids[-1:]
        one = ranking.row_evidence(model, [{"input_ids": ids, "trained": [0] * start + [1] * (
            len(ids) - start)}], ends, int, blank)
        assert float(made["end"][n]) == pytest.approx(float(one["end"][0]), abs=1e-4)
    endless = lower.map(lambda row: {  # cut by a length limit: what their end would be is unknown
        "input_ids": row["input_ids"][:-1], "trained": row["trained"][:-1]})
    assert "end" not in ranking.made_faults(partial(row_losses, model), endless, ends, found)

    # Where the model reads no longer rows, only those that fit are exchanged.
    sizes = [row["trained"].index(1) + sum(rows[n - 1]["trained"]) - 1
             for n, row in enumerate(rows)]  # their end is left out
    room = sorted(sizes)[5]
    fitting = ranking.made_faults(partial(row_losses, model), lower, ends, found, room=room)
    assert len(fitting["end"]) == 12 and torch.allclose(fitting["relevance"], torch.stack(
        [value for value, size in zip(made["relevance"], sizes, strict=True) if size <= room]))
    none = ranking.made_faults(partial(row_losses, model), lower, ends, found, room=3)
    assert len(none["relevance"]) == 0 and len(none["end"]) == 12


def test_who_is_flagged():
    assert ranking.groups_of("q", "a b", 2) == ("short", "mostly ASCII", "no code")
    assert ranking.groups_of("вопрос", "ответ", 300)[:2] == ("long", "less than 90 % ASCII")
    assert ranking.groups_of("q", "def f(x):\n    return x", 30)[2] == "code"
    assert ranking.groups_of("q", "We import tea; it is good.", 30)[2] == "no code"
    assert ranking.bad_rows_line(["end", None, "echo", "end"]) == (
        "3 of 4 rows look bad: 2 cut short, 1 copying the question.")
    assert ranking.bad_rows_line([None] * 3) == "None of 3 rows looks bad."


def test_the_worst_rows_of_each_reason_are_shown(capsys):
    """Three at most; on the terminal the worst, the end of an answer that is cut short."""
    end, echo = map([*ranking.REASONS].index, ("end", "echo"))
    rows = Dataset.from_list([{"row_id": n, "prompt": "why?", "response": "so " * 99 + f"stop {n}"}
                              for n in range(10)])
    look = ranking.first_look({
        "reason": torch.tensor([end] * 5 + [-1] * 4 + [echo]), "length": torch.full((10,), 30),
        "surprise": torch.arange(10).double()}, ["a note"], rows)
    assert [row["row_id"] for row in look["worst"]] == [9, 4, 3, 2]
    assert look["groups"] == [["medium", 10, 6], ["mostly ASCII", 10, 6], ["no code", 10, 6]]
    print_look(look)
    text = capsys.readouterr().out
    assert "stop 4" in text and "stop 3" not in text and "stop 9" not in text
    assert text.count("0.6000") == 3 and text.startswith("note: a note\n6 of 10 rows look bad")


def test_a_flagged_row_comes_after_one_as_surprising(monkeypatch):
    """No other row is more surprising than the least of the flagged ones, but as much."""
    tests = {"reason": torch.tensor([3, -1, -1]), "loss": torch.zeros(3), "length": torch.ones(3),
             "surprise": torch.tensor([2.0, 2.0, 1.0]).double()}
    monkeypatch.setattr(ranking, "row_tests", lambda *rest: (tests, []))
    monkeypatch.setattr(ranking, "first_look", lambda *rest: None)
    monkeypatch.setattr("baselines.tests.print_look", lambda look: None)
    scores, *_ = score_by_tests(None, make_tokenizer(), SimpleNamespace(lower=[], upper=None), 0)
    assert ranking.rank_rows(scores).tolist() == [3, 2, 1]


def test_bad_input(rank, folders, faulty, refused):
    from baselines.__main__ import main

    assert "--model is missing" in refused(lambda: main(["tests", "--lower", str(faulty)]))
    with pytest.raises(UserError, match="keep-fraction 0"):
        rank("tests", None, model=folders["llama"], lower=faulty, keep_fraction=0)


def test_too_few_trusted_rows_are_named(rank, folders, faulty, files):
    for count in (5, 40):
        made = rank("tests", None, model=folders["llama"], lower=faulty,
                    upper=files(lower=1, upper=count)["upper"], out=str(count))
        assert ("trusted rows are too few to say what good rows look like; 20 or more do"
                in made.text) == (count < 20)


def test_training_keeps_the_tests_beside_the_base_losses(train, faulty, files, monkeypatch):
    upper, given, guide = files(lower=1, upper=30)["upper"], [], ranking.with_guidance
    monkeypatch.setattr(ranking, "with_guidance", lambda *rest: given.append(rest) or guide(*rest))
    run = train({"lower": faulty, "upper": upper}, epochs=1, batch=8)
    ((_, _, (gaps, _)),) = given
    assert gaps.mean().item() == pytest.approx(
        run.result["upper_heldout"] - run.result["base/upper_heldout"], abs=1e-5)
    assert {"reason", "surprise", "end"} <= set(run.weights[0])
    look = json.loads((run.out / "tests.json").read_text())
    reasons = [row["reason"] for row in run.weights]
    assert look["line"] == ranking.bad_rows_line(reasons)
    assert look["notes"][-1].startswith("3 held-out trusted rows are too few to say what training")
    assert sum(flagged for group, _, flagged in look["groups"] if "ASCII" in group) == sum(
        reason is not None for reason in reasons)
    for row in run.weights:
        assert row["guidance"] == pytest.approx(row["final_loss"] - row["base_loss"], abs=1e-6)
    worst = max(row["surprise"] for row in run.weights if row["reason"] is None)
    assert all(row["surprise"] >= worst for row in run.weights if row["reason"])
    without = train({"lower": faulty, "upper": upper}, epochs=1, batch=8, skip_scores=True, out="b")
    assert "reason" not in without.weights[0] and not (without.out / "tests.json").exists()
    assert read_rows(run.out / "weights.jsonl") == run.weights


def test_no_row_that_became_likelier_is_against_the_trusted_ones():
    """All of the first hundred stand out from trusted rows, half of them at a negative gap."""
    gaps = torch.cat([torch.full((50,), -0.2), torch.full((50,), 0.4), torch.full((900,), -1.0)])
    gaps += 0.01 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    tests = {"surprise": torch.zeros(1000).double(), "reason": torch.full((1000,), -1)}
    trusted = -1 + 0.01 * torch.randn(300, generator=torch.Generator().manual_seed(1))
    lengths = torch.full((1000,), 9)
    found = ranking.with_guidance(tests, (gaps, lengths), (trusted, lengths[:300]))["reason"]
    assert (found[:50] < 0).all() and (found[50:100] >= 0).all()


def guided(seed, faults, held_out=300):
    """`with_guidance` of 1000 rows, the first `faults` of them against the trusted ones."""
    draw = torch.Generator().manual_seed(seed)
    gaps, trusted = (0.05 * torch.randn(n, generator=draw) - 0.1 for n in (1000, held_out))
    gaps[:faults] += 0.4
    before = {"surprise": torch.rand(1000, generator=draw).double() - 3,
              "reason": torch.full((1000,), -1), "end": gaps + 1}
    before["surprise"][95:105] += 20
    before["reason"][95:105] = 2
    kept = {name: values.clone() for name, values in before.items()}
    after = ranking.with_guidance(before, (gaps, torch.full((1000,), 9)),
                                  (trusted, torch.full((held_out,), 9)))
    assert all(torch.equal(before[name], values) for name, values in kept.items())
    assert torch.equal(after["guidance"], gaps.double()) and after["end"] is before["end"]
    return after


def test_guidance_flags_rows_that_training_made_less_likely_than_trusted_ones():
    """All of them, and about a tenth others, none of a clean file; an earlier reason stays."""
    place, wrong = list(ranking.REASONS).index("guidance"), 0
    for seed in range(6):
        after = guided(seed, faults=100)
        assert after["reason"][:95].tolist() == [place] * 95
        assert after["reason"][95:105].tolist() == [2] * 10
        assert after["surprise"][:95].min() > 0  # it was below -2
        wrong += int((after["reason"][105:] == place).sum())
        flagged = after["reason"] >= 0
        assert after["surprise"][flagged].min() >= after["surprise"][~flagged].max()
        assert (after["guidance"][after["reason"] == place] > 0).all()
        for held_out in (300, 60, 15, 1):  # one trusted row says nothing
            assert (guided(seed, 0, held_out)["reason"] == place).sum() <= 10
    assert 0 < wrong / 6 <= 0.12 * 100
    assert set(ranking.columns_of_tests(after, range(3))) >= {"reason", "guidance"}


def test_no_guidance_where_no_trusted_answers_train_or_behind_an_adapter(train, files, adapters,
                                                                      tmp_path):
    paths = files()
    pairs = write_rows(tmp_path / "pairs.jsonl", [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": "no"}
        for row in make_rows(8, 7)])
    held_out = write_rows(tmp_path / "held_out_pairs.jsonl", [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": "no"}
        for row in make_rows(4, 8)])
    for number, (rows, options) in enumerate((
            (paths | {"upper": pairs, "heldout": held_out}, {"upper_loss": "dpo"}),
            (paths, {"adapter": adapters["llama"]}),
            ({"lower": paths["lower"]}, {"method": "sft"}), (paths, {"method": "sft"}),
            (paths, {"method": "mix", "rho": 1}))):
        run = train(rows, epochs=1, batch=8, out=str(number), **options)
        assert "reason" in run.weights[0] and "guidance" not in run.weights[0]
