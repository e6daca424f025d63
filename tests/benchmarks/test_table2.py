"""The runtime table without a GPU and at a tiny shape."""

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what a machine without CUDA prints")
def test_table2_without_a_gpu_estimates_nothing(measured):
    results = measured("table2")
    assert results["BDS"] == {"published_hours": {"pythia-1b": 0.31, "llama3-8b": 11.75},
                              "extrapolated_hours": {}, "published_over_here": {}}
    assert len(results) == 7
    lines = [line for line in measured.text.splitlines()
             if line.startswith(("BDS", "online", "mix"))]
    assert len(lines) == 5 and all(line.count("not measured") == 2 for line in lines)


def test_table2_extrapolates_measured_steps(measured):
    """A tiny shape: every method has hours, and they stand in the order of their work."""
    results = measured("table2", "--model", "tiny", "--rounds", 1, "--max-new-tokens", 4,
                  "--lower-tokens", 20, "--upper-tokens", 20)
    hours = {name: entry["extrapolated_hours"]["tiny"] for name, entry in results.items()}
    assert hours["DSIR"] is None and hours["LESS"] is None
    assert hours["online R=5% G=1"] < hours["online R=10% G=1"] < hours["online R=10% G=5"]
    assert "extrapolated: seconds of a measured step" in measured.text
