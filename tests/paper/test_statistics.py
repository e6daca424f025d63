"""Statistics over seeds, by hand."""

import itertools
import statistics

import pytest

from paper.statistics import (
    by_chance,
    cell,
    claims_of,
    paired,
    prefer_unmasked,
    seed_verdict,
)


def test_paired_is_the_sign_flip_test_by_enumeration():
    first, second = [3.0, 1.0, 4.0, 1.5], [2.0, 1.5, 2.0, 1.0]
    d = [a - b for a, b in zip(first, second, strict=True)]  # 1, -0.5, 2, 0.5: sum 3
    extreme = sum(abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= 3
                  for signs in itertools.product((1, -1), repeat=4))
    assert extreme == 6  # +3 twice, +4 once, and their mirror images
    assert paired(first, second) == (0.75, extreme / 16)
    assert paired([1, 1, 1, 1], [2, 2, 2, 2]) == (-1.0, 0.125)  # the least of 4


@pytest.mark.parametrize(("first", "word"), [
    ([0.1, 0.2, 0.3, 0.4], "4 of 4"), ([1.1, 1.2, 1.3, 1.4], "0 of 4"),
    ([0.1, 0.2, 0.3, 1.4], "3 of 4"), ([1.0] * 4, "0 of 4")])
def test_a_verdict_is_the_number_of_seeds(first, word):
    assert seed_verdict(first, [1.0] * 4)[0] == word
    assert seed_verdict(first[:3], [1.0] * 3)[0] == f"{min(3, int(word[0]))} of 3"


def test_a_verdict_has_the_difference_and_p():
    assert seed_verdict([0.5] * 4, [1.0] * 4) == ["4 of 4", "-0.5000", "0.125"]


def test_claims_are_made_where_both_methods_were_measured():
    results = {"a": [{"x": 1.0}] * 4, "b": [{"x": 2.0}] * 4, "c": [{"x": None}] * 4}
    claims = [("a below b", "a", "b", "x"), ("b below a", "b", "a", "x"), ("c", "c", "a", "x"),
              ("not run", "a", "d", "x")]
    assert claims_of(claims, results) == [["a below b", "4 of 4", "-1.0000", "0.125"],
                                          ["b below a", "0 of 4", "+1.0000", "0.125"]]


def test_chance_alone_by_enumeration_of_signs():
    """Fair coins: the share of sign patterns over n seeds that are all alike, times the claims."""
    for seeds in (1, 3, 4):
        patterns = list(itertools.product((1, -1), repeat=seeds))
        alike = sum(len(set(pattern)) == 1 for pattern in patterns) / len(patterns)
        line = by_chance([f"1 of {seeds}"] * 7)
        assert f"{7 * alike:.1f} of these 7 claims" in line and f"p = {alike:.3g} each" in line
    assert "13.2 of these 106 claims" in by_chance(["4 of 4"] * 106)
    assert "0.4 of these 2 claims" in by_chance(["4 of 4", "1 of 3"])  # 1/8 + 1/4
    assert "p = 0.125 or 0.25 each" in by_chance(["4 of 4", "1 of 3"])


def test_cells_are_mean_and_sample_deviation_of_what_was_measured():
    values = [1.0, 2.0, 4.0]
    assert cell([*values, None]) == f"{7 / 3:.3f} ± {statistics.stdev(values):.3f}"
    assert (cell([2.0]), cell([None])) == ("2.000", "-")
    assert (cell([99.0, 101.0]), cell([136.91])) == ("100 ± 1", "137")


def test_masked_rows_and_faults_that_they_alone_have_are_left_out():
    run = {"base/upper_heldout": 1.0, "weight/auroc": 0.5, "weight/auroc/plain": 0.6,
           "base/auroc/contrary": 0.7, "weight/recall/plain": 0.8}
    assert prefer_unmasked(run) == run  # an offline run
    assert prefer_unmasked(run | {"weight_unmasked/auroc": 0.9, "base_unmasked/auroc": None}
                           ) == {"base/upper_heldout": 1.0, "weight/auroc": 0.9,
                                 "base/auroc": None}
