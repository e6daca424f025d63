"""Theorem 3 as assertions."""

import pytest
import torch
from conftest import tensor
from theory_cases import random_class

from theory import equivalence, policies
from theory.model import F64


def test_bmo_and_bds_have_the_same_solutions_when_separable():
    for seed in range(40):
        val, losses = random_class(seed, separable=True)
        if seed == 0:
            _, val, losses = policies.separable_class()
        pareto = equivalence.weakly_pareto(losses)
        assert torch.equal(pareto, (losses == 0).any(1))
        assert torch.equal(pareto, policies.lower_level_minimisers(losses).any(0))
        bds = policies.bds_solutions(val, losses).any(0)
        assert torch.equal(policies.solve(val, pareto), bds)
        assert float(val[bds].max()) == float(val[pareto].min())


def test_weakly_pareto_is_weak():
    losses = tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 2.0], [0.5, 3.0]])
    assert equivalence.weakly_pareto(losses).tolist() == [
        True,
        True,
        False,
        True,
    ]


def test_scalarised_set_of_two_objectives_against_a_fine_grid():
    t = torch.linspace(0, 1, 20001, dtype=F64)[:, None]
    for seed in range(10):
        _, losses = random_class(seed, separable=False, rows=2)
        weighted = t * losses[:, 0] + (1 - t) * losses[:, 1]
        reached = weighted <= weighted.amin(1, keepdim=True) + 1e-12
        assert torch.equal(equivalence.scalarised(losses), reached.any(0))
    corner = tensor([[0.0, 1.0], [1.0, 0.0], [0.7, 0.7], [0.0, 2.0]])
    assert equivalence.scalarised(corner).tolist() == [
        True,
        True,
        False,
        True,
    ]
    parallel = tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 2.0]])
    assert equivalence.scalarised(parallel).tolist() == [True, True, False]


def test_bmo_and_bds_part_on_a_concave_front_only():
    numbers, _ = equivalence.measure()
    assert numbers["same"]
    assert (
        numbers["union"],
        numbers["bmo"],
        numbers["union of finite omega"],
    ) == (19, 5, 1)
    convex, concave = numbers["fronts"]
    for front in (convex, concave):
        assert front["WP"] == 41
        assert front["BMO: t"] == pytest.approx(0.6)
        assert front["BMO: L_val"] == pytest.approx(0.10536, abs=1e-5)
    assert convex["union of S(lambda)"] == 41
    assert convex["BDS: t"] == convex["BMO: t"]
    assert concave["union of S(lambda)"] == 2  # the two ends
    assert concave["BDS: t"] == 1
    assert concave["BDS: L_val"] == pytest.approx(1.168, abs=1e-3)
