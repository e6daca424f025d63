"""Rankings against known labels: AUROC against counting pairs, precision and recall by hand."""

import pytest
import torch
from conftest import make_rows, write_rows

from evaluation.comparison import final_metrics
from evaluation.labels import (
    auroc,
    label_metrics,
    ranking_metrics,
)
from evaluation.runs import Run


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
    labels = {"bad": [False, True, True], "kind": ["", "", "cut"]}
    metrics = label_metrics(labels, {"weight": torch.tensor([0.3, 0.2, 0.1])})
    assert {key for key in metrics if key.count("/") > 1} == {
        "weight/auroc/bad",
        "weight/auroc/cut",
        "weight/recall/bad",
        "weight/recall/cut",
    }


def test_eq_figures_of_a_run_are_those_of_its_file(train, tmp_path, files):
    """Of all its rankings, and of each kind of bad rows, by counting pairs."""
    paths, source = files(upper=6), make_rows(14, seed=13)
    for number, row in enumerate(source):
        row |= {"bad": number % 3 == 0, "kind": ("cut", "other")[number % 2]}
    paths["lower"] = write_rows(tmp_path / "lower.jsonl", source)
    run = train(paths, batch=14, epochs=1, omega_lr=5, correction=0.5)
    assert not [key for key in run.result if "auroc" in key]
    for row in run.weights:
        row["corrected"] = 0.5 * row["attainable_loss"] - row["final_loss"]
    columns = {
        "weight": ("weight", 1),
        "base": ("base_loss", -1),
        "final": ("final_loss", -1),
        "length": ("length", 1),
        "corrected": ("corrected", 1),
    }
    figures = final_metrics(Run(run.out))
    for name, (column, sign) in columns.items():
        for key in ("cut", "other"):
            rows = [row for row in run.weights if not row["bad"] or row["kind"] == key]
            scores = [sign * row[column] for row in rows]
            share = count_pairs(scores, [row["bad"] for row in rows])
            assert figures[f"{name}/auroc/{key}"] == pytest.approx(share)
