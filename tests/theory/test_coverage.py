"""The Proposition as assertions."""

import pytest
import torch
from theory_cases import random_class

from theory import benefit, coverage, policies
from theory.model import F64, token_losses


def test_every_solution_of_bds_has_its_weight_on_the_useful_set():
    seen = 0
    for seed in range(40):
        val, losses = random_class(seed, separable=True)
        useful = coverage.useful_set(val, losses)
        if not useful.any():
            continue  # Assumption 2 fails
        solves = policies.bds_solutions(val, losses).any(1)
        for support in policies.supports(3)[solves]:
            on_useful = float(policies.support_weights(support)[useful].sum())
            assert on_useful == pytest.approx(1, abs=1e-15)
            seen += 1
    assert seen > 30


def test_useless_rows_do_not_follow_from_the_assumptions():
    val, losses = coverage.everything_useful()
    best = policies.argmin_set(val)
    fit = policies.argmin_set(losses.mean(1))
    assert float(losses[fit].sum()) == 0  # Assumption 1
    assert not (best & fit).any()  # Assumption 2
    assert coverage.useful_set(val, losses).all()  # and yet |U| = N


def test_useful_rows_of_the_transformer_are_those_some_validation_optimum_fits():
    """Fit the trusted rows and one lower-level row by pseudo-inverse: possible for U only; and all
    lower-level rows together are separable (Assumption 1, in the limit of large W_ov)."""
    problem, useful = benefit.conflict_problem(neutral=True)
    h = benefit.fixed_features(problem)
    y = problem.tokens.y
    target = 40.0 * torch.nn.functional.one_hot(y, 9).to(F64)
    for i in range(problem.N):
        rows = [*range(problem.N_val), problem.N_val + i]
        W = target[rows].T @ torch.linalg.pinv(h[rows].T)
        fits = token_losses(h[rows] @ W.T, y[rows]).max() < 1e-9
        assert bool(fits) == bool(useful[i])
    c = torch.cat([torch.zeros(problem.N_val), torch.ones(problem.N)]).to(F64)
    W, _ = benefit.bounded_minimisers(problem, c[None] / problem.N, 60.0)
    lower = token_losses(h @ W[0].T, y)[problem.N_val :]
    assert float(lower.max()) < 1e-3


@pytest.mark.parametrize("exponent", [-2.0, -0.5])
def test_decay_exponent_of_a_power_law(exponent):
    k = torch.arange(401, dtype=F64)
    weight = 1 - 0.3 * k**exponent
    assert coverage.decay_exponent(weight) == pytest.approx(exponent, abs=1e-9)


@pytest.mark.slow
def test_coverage_over_training():
    numbers, figure = coverage.measure()
    assert numbers["enumerated_useful"] == [0, 2]
    assert numbers["enumerated_weights"] == [1, 1, 1]
    assert numbers["all_useful"] == 2
    assert numbers["share"] == pytest.approx(4 / 7)
    assert numbers["slope"] == pytest.approx(-1.1275, abs=0.002)
    _, bds = figure.curves["BDS"]
    _, mixing = figure.curves["direct mixing"]
    assert (mixing - 3 / 7).abs().max() < 1e-12  # uniform weights throughout
    assert (bds.diff() < 0).all()
    assert float(bds[-1]) > 0  # the useful rows never have all weight at finite omega
    start, _, hundred, _, last = numbers["training"]
    assert start["BDS: 1 - sum_U sigma"] == pytest.approx(3 / 7)
    assert hundred["BDS: 1 - sum_U sigma"] == pytest.approx(1 - 0.99914, abs=2e-5)
    assert hundred["BDS: L_val"] == pytest.approx(0.021451, abs=1e-5)
    assert last["BDS: 1 - sum_U sigma"] == pytest.approx(8.3e-6, abs=2e-7)
    assert last["BDS: L_val"] == pytest.approx(0.0005298, abs=1e-6)
    assert last["mixing: 1 - sum_U 1/N"] == pytest.approx(3 / 7)
    assert last["mixing: L_val"] == pytest.approx(0.21844, abs=1e-5)
