"""Statistics over seeds, by hand."""

import statistics

import pytest

from paper.statistics import (
    cell_of,
    cell_text,
    interval,
    prefer_unmasked,
    with_base,
)


def test_a_cell_is_mean_and_sample_deviation_of_what_was_measured():
    cell = cell_of([1.0, 2.0, None, 4.0])
    assert cell["mean"] == pytest.approx(7 / 3)
    assert cell["std"] == pytest.approx(statistics.stdev([1, 2, 4]))
    assert cell["seeds"] == [1, 2, 4]
    assert cell_of([None]) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 2.0, 4.0], "2.333 ± 1.528"),
        ([2.0], "2.000"),
        ([99.0, 101.0], "100 ± 1"),
        ([None], "-"),
    ],
)
def test_what_a_cell_looks_like(values, text):
    assert cell_text(cell_of(values)) == text


def test_an_interval_is_students_t():
    """Against scipy's t: mean 2, n = 4, sd 1.29099, half width 3.1824 x sd / 2."""
    mean, half = interval([0.5, 1.5, 2.5, 3.5])
    assert mean == 2
    assert half == pytest.approx(2.0542, abs=1e-4)
    assert interval([-0.1]) == (-0.1, None)
    assert interval([-0.1, -0.2])[1] == pytest.approx(0.6353, abs=1e-4)


def test_masked_rows_and_faults_that_they_alone_have_are_left_out():
    run = {
        "base/upper_heldout": 1.0,
        "weight/auroc": 0.5,
        "weight/auroc/plain": 0.6,
        "weight/recall/plain": 0.8,
    }
    assert prefer_unmasked(run) == run  # An offline run has no such metrics.
    online = prefer_unmasked({**run, "weight_unmasked/auroc": 0.9})
    assert online == {"base/upper_heldout": 1.0, "weight/auroc": 0.9}


def test_the_base_model_comes_first_without_its_ranking():
    run = {"upper_heldout": 1.0, "base/upper_heldout": 2.0, "base/auroc": 0.5}
    results = with_base({"BDS": [run]})
    assert list(results) == ["base model", "BDS"]
    assert results["base model"] == [{"upper_heldout": 2.0}]
