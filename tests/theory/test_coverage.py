"""The Proposition as assertions."""


import pytest
import torch
from theory_cases import random_class

from theory import benefit, coverage, model, policies
from theory.model import F64, Theta


def test_every_solution_of_bds_has_its_weight_on_the_useful_set():
    seen = 0
    for seed in range(40):
        val, losses = random_class(seed, separable=True)
        if seed == 0:
            _, val, losses = policies.separable_class()
        useful = coverage.useful_set(val, losses)
        if not useful.any():
            continue                                            # Assumption 2 fails
        masks = policies.supports(losses.shape[1])
        for mask in masks[policies.bds_solutions(val, losses).any(1)]:
            on_useful = float(policies.support_weights(mask)[useful].sum())
            assert on_useful == pytest.approx(1, abs=1e-15)
            seen += 1
    assert seen > 30


def test_useful_set_of_the_separable_class():
    _, val, losses = policies.separable_class()
    assert coverage.useful_set(val, losses).tolist() == [True, False, True]
    solved = policies.bds_solutions(val, losses).any(1)
    assert policies.supports(3)[solved].int().tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 1]]


def test_useless_rows_do_not_follow_from_the_assumptions():
    val, losses = coverage.everything_useful()
    best, fit = policies.argmin_set(val), policies.argmin_set(losses.mean(1))
    assert float(losses[fit].sum()) == 0                        # Assumption 1
    assert not (best & fit).any()                               # Assumption 2
    assert coverage.useful_set(val, losses).all()                 # and yet |U| = N


def test_useful_rows_of_the_transformer_are_those_some_validation_optimum_fits():
    """Fit the trusted rows and one lower-level row by pseudo-inverse: possible for U only; and all
    lower-level rows together are separable (Assumption 1, in the limit of large W_ov)."""
    problem, useful = benefit.conflict_problem(neutral=True)
    assert int(useful.sum()) < problem.N
    tokens = problem.tokens
    h = model.forward(Theta(torch.zeros(9, 9, dtype=F64), torch.eye(9, dtype=F64)), tokens).h
    target = 40.0 * torch.nn.functional.one_hot(tokens.y, 9).to(F64)
    for i in range(problem.N):
        rows = [*range(problem.N_val), problem.N_val + i]
        W = target[rows].T @ torch.linalg.pinv(h[rows].T)
        fits = bool((-torch.log_softmax(h[rows] @ W.T, -1)).gather(
            -1, tokens.y[rows][:, None]).max() < 1e-9)
        assert fits == bool(useful[i])
    c = torch.cat([torch.zeros(problem.N_val), torch.ones(problem.N)]).to(F64)[None] / problem.N
    W, _ = benefit.bounded_minimisers(problem, c, 60.0)
    losses = -torch.log_softmax(h @ W[0].T, -1).gather(-1, tokens.y[:, None])[problem.N_val:]
    assert float(losses.max()) < 1e-3


def test_coverage_over_training():
    useful, bds = coverage.coverage_run(4.0, 1500)
    _, mixing = coverage.coverage_run(0.0, 1500)
    bds, mixing = (torch.cat([rows[:, :1], rows], 1) for rows in (bds, mixing))
    share = float(useful.double().mean())
    assert share == pytest.approx(4 / 7)
    assert (mixing[:, 1] - share).abs().max() < 1e-12           # uniform weights throughout
    assert float(bds[0, 1]) == pytest.approx(share)
    assert (bds[1:, 1].diff() > 0).all()
    assert float(bds[100, 1]) == pytest.approx(0.99914, abs=2e-5)
    assert float(bds[-1, 1]) > 0.9999
    assert float(bds[-1, 1]) < 1                                # never at finite omega
    assert float(bds[-1, 2]) < 0.002
    assert float(mixing[-1, 2]) > 100 * float(bds[-1, 2])


@pytest.mark.parametrize("exponent", [-2.0, -0.5])
def test_decay_exponent_of_a_power_law(exponent):
    k = torch.arange(401, dtype=F64)
    rows = torch.stack([k, 1 - 0.3 * k**exponent], 1)
    assert coverage.decay_exponent(rows[:, 1]) == pytest.approx(exponent, abs=1e-9)
