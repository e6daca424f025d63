"""Losses against plain forwards and real generation, rankings against counting pairs."""

import math

import datasets
import pytest
import torch
from conftest import make_llama, make_rows, write_rows

import batches
import logprobs
import ranking
from batches import mean_losses, row_losses
from data import tokens
from ranking import auroc, kept_by, label_metrics, print_label_table, ranking_metrics
from selector import Selector
from utils import UserError, table

# --- rankings -------------------------------------------------------------------------------------

def count_pairs(scores, bad):
    """P(good above bad) over all pairs of a good and a bad row, ties one half."""
    pairs = [(g, b) for g, is_bad in zip(scores, bad, strict=True) if not is_bad
             for b, also in zip(scores, bad, strict=True) if also]
    return sum(1.0 if g > b else 0.5 if g == b else 0.0 for g, b in pairs) / len(pairs)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_eq_auroc_is_the_share_of_ordered_pairs(levels):
    """Mann-Whitney by mean ranks against counting, few and many ties."""
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, levels, (23,), generator=generator)
        bad = torch.rand(23, generator=generator) < 0.4
        expected = count_pairs(scores.tolist(), bad.tolist())
        assert auroc(scores, bad) == pytest.approx(expected, abs=1e-12)
        assert auroc(scores.tolist(), bad.tolist()) == auroc(scores, bad)  # lists do as well


def test_auroc_corners():
    assert auroc([3.0, 2.0, 1.0], [False, False, True]) == 1.0
    assert auroc([1.0, 2.0, 3.0], [False, False, True]) == 0.0
    assert auroc([1.0, 1.0, 1.0], [False, True, True]) == 0.5
    assert auroc([1.0, 2.0], [True, True]) is None and auroc([1.0, 2.0], [False, False]) is None
    assert auroc([], []) is None
    assert auroc([-1e30, 1e-30, 0.0, 1e30], [True, False, True, False]) == 1.0


def test_ranking_metrics_by_hand():
    #          good  cut  other  good  cut   good
    scores = [0.9, 0.1, 0.5, 0.3, 0.2, 0.8]
    bad = [False, True, True, False, True, False]
    kinds = ["cut", "cut", "other", "clean", "cut", "clean"]  # of a good row it says nothing
    metrics = ranking_metrics(scores, bad, kinds)
    assert metrics == {
        "auroc": pytest.approx(8 / 9),           # all pairs but (0.3 good, 0.5 other)
        "precision": pytest.approx(2 / 3),       # the lowest three are cut, cut, good
        "auroc/cut": 1.0, "recall/cut": 1.0,
        "auroc/other": pytest.approx(2 / 3), "recall/other": 0.0}
    assert "auroc/clean" not in metrics


def test_a_bad_row_without_a_kind_is_called_bad():
    """As where no row has one; tokenised rows have "" there."""
    lower = datasets.Dataset.from_dict({"bad": [False, True, True], "kind": ["", "", "cut"]})
    found = label_metrics(lower, {"weight": torch.tensor([0.3, 0.2, 0.1])})
    assert {key for key in found if key.count("/") > 1} == {
        f"weight/{name}/{kind}" for name in ("auroc", "recall") for kind in ("bad", "cut")}


def test_ranking_metrics_without_bad_rows_or_without_good_ones():
    assert ranking_metrics([1.0, 2.0], [False, False], ["", ""]) == {
        "auroc": None, "precision": None}
    assert ranking_metrics([1.0, 2.0], [True, True], ["x", "x"]) == {
        "auroc": None, "precision": 1.0, "auroc/x": None, "recall/x": 1.0}


def test_mean_losses_of_sequences_and_of_tokens():
    """(1 + 3) / 2 over sequences; (1 * 1 + 3 * 9) / 10 over tokens."""
    assert mean_losses(torch.tensor([1.0, 3.0]), torch.tensor([1, 9]), "x") == {
        "x": 2.0, "x_per_token": pytest.approx(2.8)}


# --- losses ---------------------------------------------------------------------------------------

@pytest.fixture
def rows(tmp_path, folders):
    """(tokenised rows, tokenizer) of 25 ragged rows."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    path = write_rows(tmp_path / "rows.jsonl", make_rows(25, seed=21))
    return tokens.load_rows(path, tokenizer, cache_dir=tmp_path / "cache")[0], tokenizer


@pytest.fixture
def models():
    """(packed, plain): the same random Llama in float64."""
    packed, plain = (make_llama().double().eval() for _ in range(2))
    packed.set_attn_implementation(logprobs.ATTENTION)
    plain.set_attn_implementation("sdpa")
    return packed, plain


def plain_loss(plain, row):
    ids, trained = torch.tensor(row["input_ids"]), row["trained"]
    with torch.no_grad():
        logps = torch.log_softmax(plain(ids[None]).logits[0], dim=-1)
    picked = [logps[t - 1, ids[t]] for t in range(1, len(ids)) if trained[t]]
    return -sum(picked) / len(picked), len(picked)


@pytest.mark.parametrize("tokens", [1, 60, 4096])
def test_eq_row_losses_are_those_of_plain_forwards(monkeypatch, rows, models, tokens):
    """Eq. SFT_def over the response length, each row alone; however many go into one forward."""
    monkeypatch.setattr(batches, "TOKENS_AT_ONCE", tokens)
    packed, plain = models
    losses, lengths = row_losses(packed, rows[0])
    expected = [plain_loss(plain, row) for row in rows[0]]
    torch.testing.assert_close(losses, torch.stack([loss for loss, _ in expected]),
                               rtol=1e-11, atol=1e-11)
    assert lengths.tolist() == [length for _, length in expected]
    assert not losses.requires_grad


def test_eq_greedy_rows_are_those_that_generation_writes(rows, models):
    """The teacher-forced answer against `generate`: answers that the model writes greedily, and the
    same with one token changed, at the start, in the middle or at the end."""
    import datasets

    packed, plain = models
    _, tokenizer = rows
    made = []
    for number in range(18):
        prompt = tokenizer(f"User: {number} {make_rows(1, seed=number)[0]['prompt']}\nAssistant:",
                           return_tensors="pt")["input_ids"]
        answer = plain.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                max_new_tokens=2 + number % 7)[0, prompt.shape[1]:].tolist()
        if number % 3 == 0:
            place = [0, len(answer) // 2, len(answer) - 1][number % 9 // 3]
            answer[place] = (answer[place] + 7) % 290
        made.append({"input_ids": prompt[0].tolist() + answer,
                     "trained": [0] * prompt.shape[1] + [1] * len(answer)})
    losses, lengths, exact = row_losses(packed, datasets.Dataset.from_list(made), greedy=True)
    assert exact.tolist() == [int(number % 3 > 0) for number in range(18)]
    without = row_losses(packed, datasets.Dataset.from_list(made))
    assert torch.equal(losses, without[0]) and torch.equal(lengths, without[1])


# --- tables and results ---------------------------------------------------------------------------

def test_table_aligns_and_rounds():
    text = table(["name", "x"], [["a", 1.23456], ["long name", None], ["b", 3]])
    assert text.splitlines() == ["name            x", "-----------------", "a          1.2346",
                                 "long name       -", "b               3"]


def test_precision_and_recall_do_not_depend_on_the_files_order():
    """Ties at the border: the mean over all orders of the file, which rounding alone moves."""
    scores, bad = [0.0, 1, 1, 1, 1, 2, 2], [True, True, False, True, False, False, True]
    kinds = ["a", "a", "", "b", "", "", "b"]
    expected = ranking_metrics(scores, bad, kinds)
    # Four are flagged: the one below, and three of the four that tie, two of which are bad.
    assert expected["precision"] == pytest.approx((1 + 2 * 3 / 4) / 4)
    assert expected["recall/a"] == pytest.approx((1 + 3 / 4) / 2)
    assert expected["recall/b"] == pytest.approx((3 / 4 + 0) / 2)
    for seed in range(5):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed)).tolist()
        assert ranking_metrics(*([values[i] for i in order] for values in (
            scores, bad, kinds))) == pytest.approx(expected)


def test_no_other_row_looks_worse_than_a_flagged_one():
    surprise, least = ranking.flagged_last(torch.tensor([5.0, 2, 9, 1]),
                                           torch.tensor([True, True, False, False]))
    assert (surprise.tolist(), float(least)) == ([5, 2, 2, 1], 2)
    surprise, least = ranking.flagged_last(torch.tensor([5.0, 2]), torch.tensor([False, False]))
    assert (surprise.tolist(), float(least)) == ([5, 2], 5)


def test_omega_begins_lower_the_worse_a_flagged_row_looks():
    start = ranking.first_logits({"reason": torch.tensor([0, 2, -1, 1]),
                                  "surprise": torch.tensor([5.0, 3, 1, 4])})
    assert start.tolist() == pytest.approx([math.log(0.1) - 2, math.log(0.1), 0,
                                            math.log(0.1) - 1])


def test_what_the_text_proves_is_the_reason_whatever_the_model_says(monkeypatch):
    """It comes before a detector's guess, and its row among the flagged; a near-duplicate not."""
    monkeypatch.setattr(ranking.detect, "surprises", lambda *args: {})
    monkeypatch.setattr(ranking.detect, "judge", lambda *args: (
        torch.tensor([3.0, 2.0, 4.0, 1.0, 0.0, 1.5]), torch.tensor([True] * 3 + [False] * 3),
        ["end", "end", "unclear", None, None, None]))
    found = {"end": torch.zeros(6).double(), "length": torch.ones(6)}
    surprise, reason, _ = ranking.verdicts(found, None, {}, [
        "turn", "duplicate", "duplicate", "conflict", "placeholder", None])
    assert reason == ["turn", "end", "duplicate", "conflict", "placeholder", None]
    assert surprise.tolist() == [3.0, 2.0, 4.0, 2.0, 2.0, 1.5]


def test_a_row_that_is_kept_and_not_kept_is_refused(tmp_path):
    """In either order; keeping it twice says nothing new."""
    rows = datasets.Dataset.from_list([{"row_id": i, "hash": f"{i}"} for i in range(3)])
    for flags, fine in (((True, False), False), ((False, True), False), ((True, True), True)):
        file = write_rows(tmp_path / "ranking.jsonl", [
            {"row_id": 1, "hash": "1", "rank": 1, "kept": kept} for kept in flags])
        if fine:
            assert kept_by(rows, file) == [None, True, None]
            continue
        with pytest.raises(UserError, match="row 2: row_id 1 is kept in one line and not in"):
            kept_by(rows, file)


def test_a_mask_leaves_rows_alone_that_its_file_does_not_list(tmp_path, capsys):
    rows = datasets.Dataset.from_list([{"row_id": i, "hash": f"{i}"} for i in range(4)])
    file = write_rows(tmp_path / "ranking.jsonl", [
        {"row_id": i, "hash": f"{i}", "rank": i, "kept": i == 1} for i in (1, 2)])
    assert ranking.rows_not_kept(rows, file).tolist() == [False, False, True, False]
    assert "2 of the 4 lower rows are not in" in capsys.readouterr().out


def test_a_kind_cannot_steer_the_terminal_or_fill_it(capsys):
    scores, bad = torch.tensor([1.0, 2.0, 3.0]), [True, False, False]
    kinds = ["\x1b[2J" + "x" * 50_000, "", ""]
    metrics = {f"weight/{key}": value for key, value in ranking_metrics(scores, bad, kinds).items()}
    print_label_table(metrics, {"weight": scores})
    text = capsys.readouterr().out
    assert "\x1b" not in text and len(text) < 1000


def test_a_masked_row_that_nothing_stood_in_for_has_no_weight():
    """Masked and never read: zero. Other unread rows, and masked ones that were read, have theirs.
    """
    selector = Selector(4, lr=1.0, optimizer="sgd")
    selector.step(torch.tensor([0, 1]), torch.tensor([2.0, 1.0]), 1.0)
    weights = selector.weights()
    assert torch.equal(ranking.counted_weights(selector), weights)
    found = ranking.counted_weights(selector, torch.tensor([True, False, True, False]))
    assert torch.equal(found, weights * torch.tensor([1.0, 1.0, 0.0, 1.0]))
