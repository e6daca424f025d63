"""Finite classes: infinite losses, supports of lambda."""

import math

import pytest
import torch
from conftest import tensor
from theory_cases import random_class

from theory import policies


def test_zero_weight_times_infinite_loss_is_zero():
    losses = tensor([[math.inf, 2.0], [0.0, math.inf]])
    weights = tensor([0.0, 1.0])
    assert policies.weighted(losses, weights).tolist() == [2.0, math.inf]


def test_support_weights_are_a_softmax_with_minus_infinity():
    weights = policies.support_weights(torch.tensor([True, False, True, True]))
    assert weights.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=1e-15)
    assert float(weights[1]) == 0
    assert len(policies.supports(3)) == 7


def test_only_the_support_of_lambda_matters_when_separable():
    _, losses = random_class(3, separable=True)
    minimisers = policies.lower_level_minimisers(losses)
    for support, expected in zip(policies.supports(3), minimisers, strict=True):
        weights = tensor([0.1, 0.2, 0.7]) * support
        assert torch.equal(
            policies.argmin_set(policies.weighted(losses, weights)),
            expected,
        )
