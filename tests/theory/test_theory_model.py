"""The Transformer, its gradients and PBGD, against the equations written out and autograd.

Every formula is compared with autograd, with a sum written out by hand, or with a number worked out
on paper, so that a wrong sign, a missing factor or a swapped index fails here; the inequalities
alone would forgive most of them.
"""

import math
from itertools import islice

import pytest
import torch
from theory_cases import GAMMA, OMEGA, random, small_problem, small_theta

from selector import Selector
from theory import model
from theory.model import F64, Theta


@pytest.fixture(scope="module")
def problem():
    return small_problem()


@pytest.fixture(scope="module")
def theta():
    return small_theta()


def penalty_objective(omega, theta, problem, gamma):
    """L_gamma = (1/N') sum_j L(val_j) + (gamma/N) sum_i softmax(omega)_i L(sft_i), differentiable.

    Written from the definition, so that autograd checks `penalty_gradient`, not itself.
    """
    upper, lower = model.level_losses(model.forward(theta, problem.tokens).losses, problem)
    return upper.mean() + gamma / problem.N * (torch.softmax(omega, 0) * lower).sum()


def test_forward_is_the_equation_written_out(problem, theta):
    state, tokens = model.forward(theta, problem.tokens), problem.tokens
    for m in range(len(tokens.y)):
        X = tokens.X[m][:, tokens.valid[m]]
        x = X[:, -1]
        scores = [sum(X[i, t] * theta.W_kq[i, j] * x[j] for i in range(6) for j in range(6))
                  for t in range(X.shape[1])]
        total = sum(math.exp(s) for s in scores)
        h = sum(X[:, t] * math.exp(s) / total for t, s in enumerate(scores))
        u = theta.W_ov @ h
        loss = -u[tokens.y[m]] + math.log(sum(math.exp(v) for v in u))
        torch.testing.assert_close(state.h[m], h, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.losses[m], loss, rtol=0, atol=1e-12)


def test_prefixes_hide_the_answer_and_end_in_the_query():
    embedding = torch.eye(6, dtype=F64)
    tokens = model.make_tokens([[4, 1, 3, 2, 5]], 3, embedding)
    assert tokens.y.tolist() == [3, 2, 5]
    assert tokens.valid.sum(1).tolist() == [2, 3, 4]
    assert tokens.X[:, :, -1].argmax(1).tolist() == [1, 3, 2]      # the last visible token
    assert tokens.X.sum((1, 2)).tolist() == [2, 3, 4]              # nothing of the future


def test_softmax_jacobian_and_its_three_lipschitz_bounds():
    z = random(7, seed=3)
    exact = torch.func.jacrev(lambda v: torch.softmax(v, 0))(z)
    torch.testing.assert_close(model.softmax_jacobian(torch.softmax(z, 0)), exact,
                               rtol=0, atol=1e-14)
    for seed in range(50):
        a, b = random(4, seed=seed, scale=3), random(4, seed=1000 + seed, scale=3)
        p, q, gap = torch.softmax(a, 0), torch.softmax(b, 0), (a - b).norm()
        Jp, Jq = model.softmax_jacobian(p), model.softmax_jacobian(q)
        assert torch.linalg.matrix_norm(Jp, 2) <= 0.5
        assert torch.linalg.matrix_norm(Jp - Jq, 2) <= 1.5 * gap
        assert (p.sqrt() - q.sqrt()).norm() <= math.sqrt(2) / 4 * gap


def test_sample_gradient_formulas_against_autograd(problem, theta):
    state, r, s = model.sample_gradients(theta, problem.tokens)
    leaves = Theta(*(w.clone().requires_grad_() for w in theta))
    losses = model.forward(leaves, problem.tokens).losses
    for m in range(len(losses)):
        W_ov, W_kq = torch.autograd.grad(losses[m], leaves, retain_graph=True)
        x = problem.tokens.X[m, :, -1]
        torch.testing.assert_close(torch.outer(r[m], state.h[m]), W_ov, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.outer(s[m], x), W_kq, rtol=0, atol=1e-10)
        X, J = problem.tokens.X[m], model.softmax_jacobian(state.attention[m])
        lemma = torch.outer(X @ J @ X.T @ theta.W_ov.T @ r[m], x)
        torch.testing.assert_close(lemma, W_kq, rtol=0, atol=1e-10)


def test_objective_is_the_definition_written_out(problem, theta):
    losses = model.forward(theta, problem.tokens).losses
    exp = [math.exp(w) for w in OMEGA]
    sigma = [e / sum(exp) for e in exp]
    upper = sum(float(losses[j * 2 + d]) / 2 for j in range(2) for d in range(2)) / 2
    lower = sum(sigma[i] * float(losses[4 + i * 2 + d]) / 2 for i in range(3) for d in range(2))
    expected = upper + GAMMA / 3 * lower
    assert float(penalty_objective(OMEGA, theta, problem, GAMMA)) == pytest.approx(
        expected, abs=1e-12)
    c = model.coefficients(torch.tensor(sigma, dtype=F64), GAMMA, problem)
    assert float(c @ losses) == pytest.approx(expected, abs=1e-12)


def test_penalty_gradient_formulas_against_autograd(problem, theta):
    omega = OMEGA.clone().requires_grad_()
    leaves = Theta(*(w.clone().requires_grad_() for w in theta))
    objective = penalty_objective(omega, leaves, problem, GAMMA)
    exact = torch.autograd.grad(objective, (omega, *leaves))
    penalty = model.penalty_gradient(torch.softmax(OMEGA, 0), theta, problem, GAMMA)
    loss, gradient = penalty.loss, penalty.gradient
    assert float(loss) == pytest.approx(float(objective.detach()), abs=1e-12)
    for ours, theirs in zip(gradient, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    lower = model.level_losses(model.forward(theta, problem.tokens).losses, problem)[1]
    lemma = GAMMA / 3 * model.softmax_jacobian(torch.softmax(OMEGA, 0)) @ lower
    torch.testing.assert_close(gradient.omega, lemma, rtol=0, atol=1e-12)


def test_lemma_without_its_1_over_N_is_another_objective(problem, theta):
    """The first line of the lemma has gamma sum_i sigma_i L_i; its gradients belong to gamma/N."""
    omega = OMEGA.clone().requires_grad_()
    stated = penalty_objective(omega, theta, problem, GAMMA * problem.N)
    wrong = torch.autograd.grad(stated, omega)[0]
    ours = model.penalty_gradient(torch.softmax(OMEGA, 0), theta, problem, GAMMA).gradient.omega
    torch.testing.assert_close(wrong, 3 * ours, rtol=0, atol=1e-10)
    assert float((wrong - ours).norm()) > 0.1


@pytest.mark.parametrize("sequential", [False, True])
def test_one_pbgd_step_is_the_algorithm(problem, theta, sequential):
    """theta - eta grad; omega - alpha (gamma/N) J l_seq at theta^k (appendix) or theta^{k+1}."""
    seen = []
    for step in islice(model.pbgd(problem, GAMMA, theta, model.Rates(0.3, 0.9, sequential)), 3):
        seen.append((step.theta, step.omega.clone(), step.penalty.loss))
    uniform = torch.full((3,), 1 / 3, dtype=F64)
    gradient = model.penalty_gradient(uniform, theta, problem, GAMMA).gradient
    torch.testing.assert_close(seen[1][0].W_ov, theta.W_ov - 0.3 * gradient.W_ov)
    torch.testing.assert_close(seen[1][0].W_kq, theta.W_kq - 0.3 * gradient.W_kq)
    at = seen[1][0] if sequential else theta
    omega = -0.9 * model.penalty_gradient(uniform, at, problem, GAMMA).gradient.omega
    torch.testing.assert_close(seen[1][1], omega, rtol=0, atol=1e-13)
    second = penalty_objective(seen[2][1], seen[2][0], problem, GAMMA)
    assert seen[2][2] == pytest.approx(float(second), abs=1e-12)


def test_frozen_omega_stays_uniform_and_until_stops(problem, theta):
    last = list(islice(model.pbgd(problem, GAMMA, theta, model.Rates(0.1, 0.0)), 21))[-1]
    assert last.k == 20
    assert torch.equal(last.sigma, torch.full((3,), 1 / 3, dtype=F64))


def test_selector_of_the_training_scripts_carries_omega():
    """N sigma, and a step that is N times the paper's: theory hands it gamma / N."""
    selector = Selector(3, 0.5, "sgd", dtype=F64)
    selector.logits.copy_(OMEGA)
    losses = torch.tensor([0.2, 1.5, 0.7], dtype=F64)
    selector.step(torch.arange(3), losses, GAMMA / 3)
    J = model.softmax_jacobian(torch.softmax(OMEGA, 0))
    torch.testing.assert_close(selector.logits, OMEGA - 0.5 * GAMMA / 3 * J @ losses,
                               rtol=0, atol=1e-14)
