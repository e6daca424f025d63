"""The benchmark of generation at tiny sizes."""

import pytest


def test_generate(measured):
    results = measured("generate", "--rounds", 1, "--prompts", 6, "--max-new-tokens", 5,
                  "--generation-batch", 4)
    assert results.keys() == {"as it is", "adapter not folded", "prompts not sorted",
                              "batch of 8", "one by one"}
    for name, entry in results.items():
        assert entry["equal_answers"] > 0.7 if name == "adapter not folded" else (
            entry["equal_answers"] == 1.0)  # folding rounds otherwise
        assert 6 <= entry["tokens"] <= 30
        assert entry["tokens_per_second"]["median"] == pytest.approx(
            entry["tokens"] / entry["seconds"]["median"])
