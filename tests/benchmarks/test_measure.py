"""Turns, medians, ratios and peak memory. No time is asserted."""

import pytest
import torch

from benchmarks.measure import peak_memory, ratio, spread, time_variants


def test_the_median_and_the_ratio():
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert spread([4.0, 1.0, 2.0, 3.0])["median"] == 2.5
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_variants_take_turns_and_the_first_call_is_not_timed():
    called = []
    variants = {name: lambda turn, name=name: called.append((name, turn)) for name in "abc"}
    seconds = time_variants(variants, 4, torch.device("cpu"), "test")
    assert [len(s) for s in seconds.values()] == [4, 4, 4]
    names = "".join(name for name, _ in called)
    assert names == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [turn for _, turn in called[3::3]] == [0, 1, 2, 3]


def test_peak_memory_sees_what_a_call_holds():
    """64 MB of float32, freed before the call returns."""
    found = peak_memory(lambda: torch.ones(16 * 2**20).sum(), torch.device("cpu"))
    if found is None:
        pytest.skip("the system lets no process reset its own high-water mark")
    assert 60 * 2**20 < found < 90 * 2**20
