"""The benchmark of log-probs at tiny sizes."""

import torch
from conftest import is_spread


def test_logprob(measured):
    results = measured("logprob", "--rounds", 3, "--sizes", 33, 16, 1003)
    for name in ("here, torch", "full logits"):
        assert results[name]["gradient_error"] < 1e-5
        is_spread(results[name]["seconds"])
        assert results[name]["floor"] == "floor: two products"
    assert results["floor: two products"]["ratio_to_floor"]["median"] == 1.0
    assert results["no gradient"]["floor"] == "floor: one product"
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        assert results["torch linear_cross_entropy"]["gradient_error"] < 1e-4
