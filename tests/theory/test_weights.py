"""Response weights, LSE bounds and convexity as assertions."""

import math

import pytest
import torch
from theory_cases import random, random_class

from bmo_weights import importance_ratio, lse_merit, response_weights
from theory import equivalence, model, weights
from theory.model import F64


def sup_min(losses):
    return (losses[:, None, :] - losses[None, :, :]).amin(-1).amax(1)


def inf_lse(losses, tau):
    return (-lse_merit(losses[:, None, :] - losses[None, :, :], tau)).amin(1)


@pytest.mark.parametrize("tau", [0.25, 1.0, 4.0])
def test_implicit_weights_are_the_gradient_of_the_merit_function(tau):
    tokens, theta = weights.answers_problem()
    ours = model.flat(weights.merit_gradient(theta, tokens, tau))
    exact = model.flat(weights.merit_autograd(theta, tokens, tau))
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-10)
    paper = model.flat(weights.merit_autograd(theta, tokens, tau)) / tau
    torch.testing.assert_close(tau * paper, ours, rtol=0, atol=1e-10)     # lambda / tau
    assert bool((paper - ours).abs().max() > 0.1) == (tau != 1)
    losses = weights.sequence_losses(theta, tokens)
    exp = [math.exp(-tau * float(loss)) for loss in losses]
    expected = torch.tensor([e / sum(exp) for e in exp], dtype=F64)
    torch.testing.assert_close(response_weights(-losses, tau), expected, rtol=0, atol=1e-12)


def test_sequence_loss_is_minus_the_log_probability():
    tokens, theta = weights.answers_problem()
    p = torch.exp(-model.forward(theta, tokens).losses)
    answer = math.prod(float(p[i]) for i in (3, 4, 5))
    assert math.exp(-float(weights.sequence_losses(theta, tokens)[1])) == pytest.approx(answer)


def test_lse_bounds_are_tight_at_both_ends():
    for tau in (0.3, 1.0, 5.0):
        for seed in range(20):
            losses = random(6, seed=seed).abs() * 3
            u = float(lse_merit(losses, tau))
            assert float(losses.min()) - math.log(6) / tau <= u <= float(losses.min())
        same = torch.full((6,), 1.3, dtype=F64)
        assert float(lse_merit(same, tau)) == pytest.approx(1.3 - math.log(6) / tau, abs=1e-12)
        apart = torch.tensor([1.3, 500.0, 900.0], dtype=F64)
        assert float(lse_merit(apart, tau)) == pytest.approx(1.3, abs=1e-12)


def test_merit_function_is_zero_on_the_weak_pareto_set_and_the_minimum_when_separable():
    for seed in range(20):
        _, losses = random_class(seed, separable=False)
        merit = sup_min(losses)
        assert (merit >= 0).all()
        assert torch.equal(merit == 0, equivalence.weakly_pareto(losses))
        _, losses = random_class(seed, separable=True)
        torch.testing.assert_close(sup_min(losses), losses.amin(1), rtol=0, atol=1e-14)


def test_lse_reformulation_is_an_equality_without_log_M():
    for seed, tau in ((0, 0.5), (1, 1.0), (2, 4.0)):
        _, losses = random_class(seed, separable=True)
        torch.testing.assert_close(inf_lse(losses, tau), -lse_merit(losses, tau),
                                   rtol=0, atol=1e-12)
        brute = min(float(torch.logsumexp(tau * (losses[k] - losses[4]), 0)) / tau
                    for k in range(len(losses)))
        assert float(inf_lse(losses, tau)[4]) == pytest.approx(brute, abs=1e-12)


def test_ratio_is_proportional_to_lambda_exactly_when_old_log_probs_are_equal():
    tokens, theta = weights.answers_problem()
    logps = -weights.sequence_losses(theta, tokens)
    lam = response_weights(logps)
    for level in (-3.0, -20.0):
        r = importance_ratio(logps, torch.full_like(logps, level), math.inf)
        assert weights.proportionality(r, lam) < 1e-12
        torch.testing.assert_close(r / r.sum(), lam, rtol=0, atol=1e-14)
    old = torch.full_like(logps, -5.0)
    old[2] -= math.log(2)                                       # one answer half as likely before
    unequal = importance_ratio(logps, old, math.inf)
    assert weights.proportionality(unequal, lam) == pytest.approx(1.0)
    equal = importance_ratio(logps, torch.full_like(logps, -5.0), math.inf)
    assert weights.proportionality(equal, response_weights(logps, 0.5)) > 0.1      # tau != 1
    assert weights.proportionality(equal, response_weights(logps / 3)) > 0.1       # mean over D


def test_sft_loss_is_convex_in_the_logits():
    for seed in range(5):
        logits, y = random(4, 5, seed=seed, scale=2), torch.tensor([0, 4, 2, 2])
        hessian = weights.logit_hessian(logits, y)
        blocks = model.softmax_jacobian(torch.softmax(logits, -1))
        torch.testing.assert_close(hessian, torch.block_diag(*blocks), rtol=0, atol=1e-12)
        off = torch.stack([hessian[5 * i:5 * i + 5, 5 * j:5 * j + 5]
                           for i in range(4) for j in range(4) if i != j])
        assert (off == 0).all()
        eigenvalues = torch.linalg.eigvalsh(hessian)
        assert float(eigenvalues[0]) > -1e-12
        assert int((eigenvalues.abs() < 1e-12).sum()) == 4      # one flat direction per token
        z = logits.clone().requires_grad_()
        loss = -torch.log_softmax(z, -1).gather(-1, y[:, None]).sum()
        gradient, = torch.autograd.grad(loss, z)
        torch.testing.assert_close(model.residuals(logits, y), gradient, rtol=0, atol=1e-12)
