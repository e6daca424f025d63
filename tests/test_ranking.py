"""Losses against plain forwards and real generation, rankings against counting pairs."""

import datasets
import pytest
import torch
from conftest import make_llama, make_rows, read_rows, write_rows

import batches
import logprobs
import models
import ranking
from batches import mean_losses, row_losses
from data.tokens import load_rows
from ranking import (
    auroc,
    kept_by,
    label_metrics,
    print_label_table,
    ranking_metrics,
)
from selector import Selector
from utils import UserError, table

# --- rankings against labels ----------------------------------------------------------------------


def count_pairs(scores, bad):
    """P(good above bad) over all pairs of a good and a bad row, ties one half."""
    wins, pairs = 0.0, 0
    for good_score, good_is_bad in zip(scores, bad, strict=True):
        for bad_score, is_bad in zip(scores, bad, strict=True):
            if is_bad and not good_is_bad:
                pairs += 1
                wins += (good_score > bad_score) + 0.5 * (good_score == bad_score)
    return wins / pairs


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_eq_auroc_is_the_share_of_ordered_pairs(levels):
    """Mann-Whitney by mean ranks against counting, few and many ties."""
    for seed in range(15):
        draw = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, levels, (23,), generator=draw)
        bad = torch.rand(23, generator=draw) < 0.4
        expected = count_pairs(scores.tolist(), bad.tolist())
        assert auroc(scores, bad) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "scores, bad, expected",
    [
        ([3.0, 2.0, 1.0], [False, False, True], 1.0),
        ([1.0, 2.0], [True, True], None),
        ([1.0, 2.0], [False, False], None),
        ([], [], None),
    ],
)
def test_auroc_corners(scores, bad, expected):
    assert auroc(scores, bad) == expected


def test_eq_ranking_metrics_by_hand():
    #          good  cut  other  good  cut   good
    scores = [0.9, 0.1, 0.5, 0.3, 0.2, 0.8]
    bad = [False, True, True, False, True, False]
    # Of a good row it says nothing.
    kinds = [
        "cut",
        "cut",
        "other",
        "clean",
        "cut",
        "clean",
    ]
    assert ranking_metrics(scores, bad, kinds) == {
        "auroc": pytest.approx(8 / 9),  # all pairs but (0.3 good, 0.5 other)
        "precision": pytest.approx(2 / 3),  # the lowest three are cut, cut, good
        "auroc/cut": 1.0,
        "recall/cut": 1.0,
        "auroc/other": pytest.approx(2 / 3),
        "recall/other": 0.0,
    }


def test_ranking_metrics_without_bad_rows_or_without_good_ones():
    metrics = ranking_metrics([1.0, 2.0], [False, False], ["", ""])
    assert metrics == {"auroc": None, "precision": None}
    metrics = ranking_metrics([1.0, 2.0], [True, True], ["x", "x"])
    assert metrics == {
        "auroc": None,
        "precision": 1.0,
        "auroc/x": None,
        "recall/x": 1.0,
    }


def test_precision_and_recall_do_not_depend_on_the_files_order():
    """Ties at the border: the mean over all orders of the file, which rounding alone moves."""
    scores = [0.0, 1, 1, 1, 1, 2, 2]
    bad = [True, True, False, True, False, False, True]
    kinds = ["a", "a", "", "b", "", "", "b"]
    expected = ranking_metrics(scores, bad, kinds)
    # Four are flagged: the one below, and three of the four that tie, two of which are bad.
    assert expected["precision"] == pytest.approx((1 + 2 * 3 / 4) / 4)
    assert expected["recall/a"] == pytest.approx((1 + 3 / 4) / 2)
    assert expected["recall/b"] == pytest.approx((3 / 4 + 0) / 2)
    for shift in range(1, 7):
        turned = [values[shift:] + values[:shift] for values in (scores, bad, kinds)]
        assert ranking_metrics(*turned) == pytest.approx(expected)


def test_a_bad_row_without_a_kind_is_called_bad():
    """As where no row has one; tokenised rows have "" there."""
    rows = datasets.Dataset.from_dict({"bad": [False, True, True], "kind": ["", "", "cut"]})
    metrics = label_metrics(rows, {"weight": torch.tensor([0.3, 0.2, 0.1])})
    assert {key for key in metrics if key.count("/") > 1} == {
        "weight/auroc/bad",
        "weight/auroc/cut",
        "weight/recall/bad",
        "weight/recall/cut",
    }


def test_a_kind_cannot_steer_the_terminal_or_fill_it(capsys):
    metrics = {"weight/auroc/\x1b[2J" + "x" * 50_000: 0.5}
    print_label_table(metrics, {"weight": None})
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert len(text) < 1000


# --- ranking files --------------------------------------------------------------------------------


def numbered(count, source="a.jsonl"):
    rows = [{"source": source, "row_id": n, "hash": f"{n}"} for n in range(count)]
    return datasets.Dataset.from_list(rows)


def ranked_rows(path, kept):
    """A ranking of rows (row_id, kept)."""
    lines = []
    for rank, (row_id, verdict) in enumerate(kept, 1):
        lines.append(
            {
                "row_id": row_id,
                "hash": f"{row_id}",
                "rank": rank,
                "kept": verdict,
            }
        )
    return write_rows(path / "ranking.jsonl", lines)


def test_a_ranking_is_written_best_row_first(tmp_path, monkeypatch):
    """In blocks; equal scores in the order of the file, nothing where a value is missing."""
    monkeypatch.setattr(ranking, "ROWS_AT_ONCE", 2)
    rows = numbered(5).add_column("bad", [True] + [False] * 4)
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 0.0])
    columns = {
        "weight": scores / 2,
        "reason": ["end", None, None, None, "echo"],
    }
    file = tmp_path / "ranking.jsonl"
    ranks, kept = ranking.write_ranking(file, rows, scores, 0.6, columns)
    lines = read_rows(file)
    assert [line["row_id"] for line in lines] == [1, 3, 2, 0, 4]
    assert [line["kept"] for line in lines] == [True] * 3 + [False] * 2
    assert lines[3] == {
        "source": "a.jsonl",
        "row_id": 0,
        "hash": "0",
        "bad": True,
        "rank": 4,
        "kept": False,
        "weight": 0.5,
        "reason": "end",
    }
    assert ranks.tolist() == [4, 1, 3, 2, 5]
    assert kept_by(rows, file) == kept.tolist()


@pytest.mark.parametrize("first, second", [(True, False), (False, True), (True, True)])
def test_a_row_that_is_kept_and_not_kept_is_refused(tmp_path, first, second):
    """In either order; keeping it twice says nothing new."""
    file = ranked_rows(tmp_path, [(1, first), (1, second)])
    if first == second:
        assert kept_by(numbered(3), file) == [None, True, None]
        return
    with pytest.raises(UserError, match="row 2: row_id 1 has another line that says other"):
        kept_by(numbered(3), file)


@pytest.mark.parametrize(
    "line",
    [
        {"row_id": 1, "hash": "other", "kept": True},  # of other data
        {"row_id": 1, "hash": "1", "kept": "no"},
        {"row_id": 1, "hash": "1"},
        {"hash": "1", "kept": True},
    ],
)
def test_a_ranking_of_other_data_or_without_verdicts_is_refused(tmp_path, line):
    file = write_rows(tmp_path / "ranking.jsonl", [line])
    with pytest.raises(UserError, match=r"row_id|kept"):
        kept_by(numbered(3), file)


def test_rows_of_two_sources_are_told_apart(tmp_path, capsys):
    """By source and row_id; where rows and ranking have one source each, its name may differ."""
    both = datasets.concatenate_datasets([numbered(2, "a.jsonl"), numbered(2, "b.jsonl")])
    columns = {"weight": torch.tensor([1.0, 0.0, 3.0, 4.0])}
    file = tmp_path / "ranking.jsonl"
    ranking.write_ranking(file, both, torch.tensor([1.0, 0, 2, 3]), 0.75, columns)
    assert kept_by(both, file) == [True, False, True, True]
    assert ranking.weights_of(both, file).tolist() == [1, 0, 3, 4]
    assert kept_by(numbered(2, "b.jsonl"), file) == [True, True]
    assert "2 rows that" in capsys.readouterr().out
    with pytest.raises(UserError, match="keeps none"):
        kept_by(numbered(2, "c.jsonl"), file)
    assert "must be named as they were" in capsys.readouterr().out
    ranking.write_ranking(file, numbered(2), torch.tensor([1.0, 0]), 0.5, {})
    assert kept_by(numbered(2, "moved.jsonl"), file) == [True, False]


@pytest.mark.parametrize("weight", [-1, "much", None, 0])
def test_weights_that_no_row_can_have_are_refused(tmp_path, weight):
    line = {"row_id": 0, "hash": "0", "weight": weight}
    file = write_rows(tmp_path / "ranking.jsonl", [line])
    with pytest.raises(UserError, match="weight"):
        ranking.weights_of(numbered(1), file)


def test_a_mask_leaves_rows_alone_that_its_file_does_not_list(tmp_path, capsys):
    file = ranked_rows(tmp_path, [(1, True), (2, False)])
    assert ranking.rows_not_kept(numbered(4), file).tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert "2 of the 4 rows are not listed in" in capsys.readouterr().out
    for verdict in (True, False):
        file = ranked_rows(tmp_path, [(0, verdict)])
        with pytest.raises(UserError, match="keep"):
            ranking.rows_not_kept(numbered(1), file)


# --- scores ---------------------------------------------------------------------------------------


def test_an_original_that_omega_has_not_judged_counts_by_the_implicit_weight():
    """Each group by its own ranks; rows that weights or a file masked come last."""
    omega = torch.tensor([0.1, 9.0, 0.3, 8.0, 0.2])
    masked = torch.tensor([False, True, False, True, False])
    implicit = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])
    scores = ranking.original_scores(omega, masked, implicit, False)
    assert scores.tolist() == pytest.approx([1 / 4, 1 / 3, 3 / 4, 2 / 3, 1 / 2])
    scores = ranking.original_scores(omega, masked, implicit, True)
    assert ranking.rank_rows(scores).tolist() == [3, 5, 1, 4, 2]


def test_a_masked_row_that_nothing_stood_in_for_has_no_weight():
    """Masked and never read: zero. Masked rows that were read and unread others have theirs."""
    selector = Selector(4, lr=1.0, optimizer="sgd")
    selector.step(torch.tensor([0, 1]), torch.tensor([2.0, 1.0]), 1.0)
    weights = selector.weights()
    assert torch.equal(ranking.counted_weights(selector), weights)
    masked = torch.tensor([True, False, True, False])
    counted = ranking.counted_weights(selector, masked)
    assert torch.equal(counted, weights * torch.tensor([1.0, 1.0, 0.0, 1.0]))


def test_a_blank_prompt_gives_way_to_an_answer_that_fills_the_context():
    """A model of learned positions has none behind its context, one of a window refuses it."""
    llama = make_llama()
    room = llama.config.max_position_embeddings
    for length, kept in ((5, 20), (room - 5, 5), (room, 1)):
        row = ranking.behind_blank(llama, list(range(20)), [3] * length)
        assert row["input_ids"] == list(range(20 - kept, 20)) + [3] * length
        assert row["trained"] == [0] * kept + [1] * length


# --- losses ---------------------------------------------------------------------------------------


def test_eq_mean_losses_of_sequences_and_of_tokens():
    """(1 + 3) / 2 over sequences; (1 * 1 + 3 * 9) / 10 over tokens."""
    means = mean_losses(torch.tensor([1.0, 3.0]), torch.tensor([1, 9]), "x")
    assert means == {"x": 2.0, "x_per_token": pytest.approx(2.8)}


@pytest.fixture
def tokenizer(folders):
    return models.load_tokenizer(folders["llama"])


@pytest.fixture
def llamas():
    """(packed, plain): the same random Llama in float64."""
    packed, plain = (make_llama().double().eval() for _ in range(2))
    packed.set_attn_implementation(logprobs.ATTENTION)
    plain.set_attn_implementation("sdpa")
    return packed, plain


@torch.no_grad()
def plain_loss(plain, row):
    """The mean of minus the log-probs of a row's trained tokens, by the logits of the row alone."""
    ids, trained = row["input_ids"], row["trained"]
    logps = torch.log_softmax(plain(torch.tensor([ids])).logits[0], dim=-1)
    picked = [logps[t - 1, ids[t]] for t in range(1, len(ids)) if trained[t]]
    return -sum(picked) / len(picked), len(picked)


@pytest.mark.parametrize("tokens", [1, 60, 4096])
def test_eq_row_losses_are_those_of_plain_forwards(
    monkeypatch, tmp_path, tokenizer, llamas, tokens
):
    """Eq. SFT_def over the response length, each row alone; however many go into one forward."""
    monkeypatch.setattr(batches, "TOKENS_AT_ONCE", tokens)
    path = write_rows(tmp_path / "rows.jsonl", make_rows(25, seed=21))
    rows, _ = load_rows(path, tokenizer, cache_dir=tmp_path / "cache")
    packed, plain = llamas
    losses, lengths = row_losses(packed, rows)
    for row, loss, length in zip(rows, losses, lengths, strict=True):
        expected, count = plain_loss(plain, row)
        torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-11)
        assert length == count
    assert not losses.requires_grad


def test_eq_greedy_rows_are_those_that_generation_writes(tokenizer, llamas):
    """The teacher-forced answer against `generate`: answers that the model writes greedily, and the
    same with one token changed, at the start, in the middle or at the end."""
    packed, plain = llamas
    rows = []
    for number in range(18):
        text = f"User: {number} {make_rows(1, seed=number)[0]['prompt']}\nAssistant:"
        prompt = tokenizer(text, return_tensors="pt")
        written = plain.generate(**prompt, do_sample=False, max_new_tokens=2 + number % 7)[
            0
        ]
        start = prompt["input_ids"].shape[1]
        if number % 3 == 0:
            place = (start, (start + len(written)) // 2, len(written) - 1)[number % 9 // 3]
            written[place] = (written[place] + 7) % 290
        trained = [0] * start + [1] * (len(written) - start)
        rows.append({"input_ids": written.tolist(), "trained": trained})
    rows = datasets.Dataset.from_list(rows)
    losses, lengths, exact = row_losses(packed, rows, greedy=True)
    assert exact.tolist() == [int(number % 3 > 0) for number in range(18)]
    without = row_losses(packed, rows)
    assert torch.equal(losses, without[0])
    assert torch.equal(lengths, without[1])


def test_table_aligns_and_rounds():
    text = table(["name", "x"], [["a", 1.23456], ["long name", None], ["b", 3]])
    assert text.splitlines() == [
        "name            x",
        "-----------------",
        "a          1.2346",
        "long name       -",
        "b               3",
    ]
