"""Theorem 1 as assertions."""

import math

import pytest
import torch
from theory_cases import random, random_class

from theory import benefit, coverage, model, policies
from theory.model import F64, Theta


def test_deltas_and_threshold_of_the_two_policies():
    val, losses = policies.benefit_class()
    delta_val, delta_sft, rho_c = benefit.deltas(val, losses.mean(1))
    assert delta_val == pytest.approx(-math.log(0.05 * 0.2 * 0.3) / 4, abs=1e-12)
    assert delta_sft == pytest.approx(-math.log(0.5 * 0.3) / 2 + math.log(0.9 * 0.8) / 2, abs=1e-12)
    assert rho_c == pytest.approx(delta_sft / (delta_val + delta_sft), abs=1e-12)
    assert benefit.threshold(3.0, 1.0) == pytest.approx(0.25)


def test_threshold_is_tight_for_two_policies_and_only_sufficient_for_three():
    val, losses = policies.benefit_class()
    sft = losses.mean(1)
    rho_c = benefit.deltas(val, sft)[2]
    assert benefit.switch_point(val, sft) == pytest.approx(rho_c, abs=1e-10)
    below, above = (benefit.mixing_minimisers(val, sft, rho_c + d) for d in (-1e-6, 1e-6))
    assert val[below].tolist() == [float(val.min())]           # mixing loses nothing below
    assert val[above].tolist() == [float(val.max())]
    val3, losses3 = policies.benefit_class(with_compromise=True)
    assert benefit.deltas(val3, losses3.mean(1))[2] == pytest.approx(rho_c, abs=1e-12)
    assert benefit.switch_point(val3, losses3.mean(1)) < 0.3 * rho_c


def test_bds_attains_the_best_validation_loss_and_mixing_does_not_beyond_rho_c():
    for compromise in (False, True):
        val, losses = policies.benefit_class(compromise)
        assert float(losses[1].sum()) == 0                      # Assumption 1
        best = policies.argmin_set(val)
        assert not (best & policies.argmin_set(losses.mean(1))).any()       # Assumption 2
        assert coverage.useful_set(val, losses).tolist() == [False, False, True, False]
        solutions = policies.bds_solutions(val, losses)
        assert torch.equal(solutions.any(0), best)
        rho_c = benefit.deltas(val, losses.mean(1))[2]
        for rho in torch.linspace(rho_c + 1e-6, 1.0, 50, dtype=F64):
            mix = benefit.mixing_minimisers(val, losses.mean(1), float(rho))
            assert float(val[mix].min()) > float(val.min())


def test_finite_omega_selects_nothing():
    """Under Assumption 1 every lambda without zeros has the lower-level minimisers S_sft."""
    _, losses = policies.benefit_class(with_compromise=True)
    for seed in range(20):
        weights = torch.softmax(random(4, seed=seed, scale=3), 0)
        minimisers = policies.argmin_set(policies.weighted(losses, weights))
        assert torch.equal(minimisers, policies.argmin_set(losses.mean(1)))


def test_theorem_1_on_random_finite_classes_with_and_without_separability():
    """With Delta_val taken minus the minimum, the mixing half needs no Assumption 1."""
    for seed in range(60):
        val, losses = random_class(seed, separable=seed % 2 == 0)
        sft = losses.mean(1)
        if (policies.argmin_set(val) & policies.argmin_set(sft)).any():
            continue
        rho_c = benefit.deltas(val, sft)[2]
        for rho in torch.linspace(rho_c + 1e-6, 1, 20, dtype=F64):
            mix = benefit.mixing_minimisers(val, sft, float(rho))
            assert float(val[mix].min()) > float(val.min())


@pytest.fixture(scope="module")
def bounded():
    rhos = torch.tensor([0.01, 0.1, 0.5, 0.9], dtype=F64)
    return rhos, [named(radius, rhos, grid=4) for radius in benefit.RADII]


def named(radius, rhos, **options):
    row, mixing = benefit.bounded_benefit(radius, rhos, **options)
    names = {"v*": "v", "min L_sft": "sft_min", "Delta_val": "delta_val", "Delta_sft": "delta_sft",
             "BDS": "bds", "its weight on U": "bds_weight_useful",
             "mixing no worse up to": "crossing"}
    return {names.get(key, key): value for key, value in row.items()} | {"mixing": mixing}


def test_bounded_transformer(bounded):
    _, rows = bounded
    for row in rows:
        assert row["residual"] < 1e-5
        assert (row["mixing"] > row["v"]).all()                 # also far below rho_c
        assert (row["mixing"].diff() > 0).all()
        assert row["sft_min"] > 0                               # Assumption 1 fails
        assert row["bds"] > row["v"]                            # and with it theta* in S_val
        assert row["rho_c"] == pytest.approx(
            row["delta_sft"] / (row["delta_sft"] + row["delta_val"]))
        assert row["bds_weight_useful"] == 1
    for key, sign in (("delta_val", 1), ("delta_sft", 1), ("v", -1), ("sft_min", -1)):
        values = [sign * row[key] for row in rows]
        assert values == sorted(values), key
    assert rows[0]["bds"] - rows[0]["v"] == pytest.approx(0.0874, abs=2e-4)
    assert rows[0]["delta_val"] == pytest.approx(0.33629, abs=1e-4)
    assert rows[-1]["delta_val"] == pytest.approx(9.2795, abs=1e-3)
    assert rows[-1]["delta_sft"] == pytest.approx(6.3084, abs=1e-3)
    assert rows[-1]["bds"] - rows[-1]["v"] < 1e-5


def test_crossing_is_the_largest_rho_where_mixing_is_no_worse_than_bds(bounded):
    rhos, rows = bounded
    assert [row["crossing"] for row in rows] == [0.5, 0.1, 0.1, 0.0, 0.0]
    for row in rows:
        no_worse = [float(rho) for rho, loss in zip(rhos, row["mixing"], strict=True)
                    if float(loss) <= row["bds"]]
        assert row["crossing"] == max(no_worse, default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("radius, crossing", [(2.0, 0.50), (4.0, 0.38), (8.0, 0.10)])
def test_reported_crossings(radius, crossing):
    """On the reported grid of steps of 0.02: no worse at the crossing, worse at the next rho."""
    rhos = torch.tensor([0.01, crossing, crossing + 0.02, 0.9], dtype=F64)
    row = named(radius, rhos)
    assert row["crossing"] == pytest.approx(crossing, abs=1e-12)
    assert row["mixing"][1] <= row["bds"] < row["mixing"][2]


def test_mixing_tends_to_the_shared_mass(bounded):
    """One context, two answers: at rho = 1/2, N' = 2, N = 4 the trusted one keeps 2/3."""
    rhos, rows = bounded
    limit = -torch.log((1 - rhos) / 2 / ((1 - rhos) / 2 + rhos / 4))
    assert float(limit[2]) == pytest.approx(math.log(1.5))
    torch.testing.assert_close(rows[-1]["mixing"], limit, rtol=0, atol=5e-4)


def test_bounded_minimiser_against_plain_descent():
    """The same minimum by slow projected descent on L itself, from another start."""
    problem, _ = benefit.conflict_problem()
    h = model.forward(Theta(torch.zeros(9, 9, dtype=F64), torch.eye(9, dtype=F64)),
                       problem.tokens).h
    c = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.05, 0.2], dtype=F64)
    W = benefit.project_to_ball(random(9, 9), 4.0)
    for _ in range(3000):
        r = model.residuals(h @ W.T, problem.tokens.y)
        W = benefit.project_to_ball(W - (c[:, None] * r).T @ h, 4.0)
    fast, residual = benefit.bounded_minimisers(problem, c[None], 4.0)
    assert residual < 1e-9
    torch.testing.assert_close(fast[0], W, rtol=0, atol=1e-6)
    assert float(W.norm()) == pytest.approx(4.0)
