"""Theorem 3 as assertions."""


import pytest
import torch
from theory_cases import random_class

from theory import equivalence, policies
from theory.model import F64


def test_weakly_pareto_and_scalarised_sets_coincide_when_separable():
    p, val, losses = policies.separable_class()
    assert torch.isinf(losses).any() and (losses == 0).any()
    expected = (p == 1).any(1)                                  # some loss is zero: 27 - 8 models
    assert torch.equal(equivalence.weakly_pareto(losses), expected)
    assert torch.equal(policies.lower_level_minimisers(losses).any(0), expected)
    assert int(expected.sum()) == 19
    bmo = policies.solve(val, equivalence.weakly_pareto(losses))
    assert torch.equal(bmo, policies.bds_solutions(val, losses).any(0))
    assert int(bmo.sum()) == 5
    assert int(policies.argmin_set(val).sum()) == 9               # S_val alone is not enough
    for seed in range(40):
        val, losses = random_class(seed, separable=True)
        union = policies.lower_level_minimisers(losses).any(0)
        assert torch.equal(equivalence.weakly_pareto(losses), union)
        assert torch.equal(union, (losses == 0).any(1))
        bds = policies.bds_solutions(val, losses).any(0)
        assert torch.equal(policies.solve(val, union), bds)


def test_weakly_pareto_is_weak():
    losses = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 2.0], [0.5, 3.0]], dtype=F64)
    assert equivalence.weakly_pareto(losses).tolist() == [True, True, False, True]


@pytest.mark.slow
def test_scalarised_set_of_two_objectives_against_a_fine_grid():
    for seed in range(10):
        _, losses = random_class(seed, separable=False, rows=2)
        grid = torch.linspace(0, 1, 20001, dtype=F64)
        reached = torch.zeros(len(losses), dtype=torch.bool)
        for t in grid:
            reached |= policies.argmin_set(losses @ torch.stack([t, 1 - t]))
        assert torch.equal(equivalence.scalarised(losses), reached)
    corner = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.7, 0.7], [0.0, 2.0]], dtype=F64)
    assert equivalence.scalarised(corner).tolist() == [True, True, False, True]
    parallel = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 2.0]], dtype=F64)  # worse in both alike
    assert equivalence.scalarised(parallel).tolist() == [True, True, False]


def test_bmo_and_bds_part_on_a_concave_front_only():
    for concave in (False, True):
        t, val, losses = equivalence.front_class(concave)
        assert float(losses.min()) > 0                          # not separable
        assert equivalence.weakly_pareto(losses).all()
        union = equivalence.scalarised(losses)
        bmo = policies.solve(val, equivalence.weakly_pareto(losses))
        bds = policies.solve(val, union)
        assert t[bmo].tolist() == pytest.approx([0.6])
        if concave:
            assert union.nonzero()[:, 0].tolist() == [0, len(t) - 1]
            assert float(val[bds].min()) > float(val[bmo].min()) + 1
        else:
            assert union.all()
            assert torch.equal(bmo, bds)
