"""Theorem 2 as assertions: constants by hand, inequalities on runs, the condition that fails."""

import math

import pytest
import torch
from theory_cases import GAMMA, OMEGA, random, small_problem, small_theta

from theory import convergence, model
from theory.model import F64, Theta


@pytest.fixture(scope="module")
def problem():
    return small_problem()


@pytest.fixture(scope="module")
def theta():
    return small_theta()


def test_gradient_factors_as_G_H_transposed(problem, theta):
    sigma = torch.softmax(OMEGA, 0)
    _, gradient, c, state = model.penalty_gradient(sigma, theta, problem, GAMMA)
    H = convergence.feature_matrix(c, state.h)
    G = convergence.feature_matrix(c, model.residuals(state.logits, problem.tokens.y))
    torch.testing.assert_close(G @ H.T, gradient.W_ov, rtol=0, atol=1e-12)
    torch.testing.assert_close(H[:, 0], state.h[0] / math.sqrt(4), rtol=0, atol=1e-12)
    expected = (GAMMA * sigma[2] / 6).sqrt() * state.h[-1]
    torch.testing.assert_close(H[:, -1], expected, rtol=0, atol=1e-12)


def test_smoothness_constant_by_hand():
    L = convergence.smoothness_constant
    assert L(0.0, 1.0, 1.0, 4.0, 4, 1) == pytest.approx(4 * 2 * 2 + 6 * 1)
    assert L(1.0, 1.0, 1.0, 4.0, 4, 1) == pytest.approx(4 * 2 * 4 * 2 + 6 * (1 + 2))
    assert L(0.5, 2.0, 3.0, 2.0, 4, 10) == pytest.approx(
        16 * 4 * 16 * 1.5 + 3 * (math.log(10) + 2 + 7))


def test_pl_constants_by_hand():
    assert convergence.token_pl(0.0, 5) == pytest.approx(0.1)
    assert convergence.token_pl(math.log(2) / math.sqrt(2), 5) == pytest.approx(0.05)
    assert convergence.pl_constant(3.0, 0.5, 2.0, 5) == pytest.approx(
        9 / 10 * math.exp(-math.sqrt(2)))


def test_token_pl_inequality_with_the_larger_constant():
    for seed in range(200):
        V = 2 + seed % 7
        u = random(V, seed=seed, scale=0.1 + seed % 5)
        r = model.residuals(u[None], torch.tensor([seed % V]))[0]
        loss = -torch.log_softmax(u, 0)[seed % V]
        assert r @ r >= 2 * convergence.token_pl(float(u.norm()), V) * loss
        assert convergence.token_pl(1.0, V) >= (V - 1) / (2 * V**2) * math.exp(-math.sqrt(2))


def move(omega, theta, seed, scale, only_omega=False):
    parts = (omega, *theta)
    factor = [1.0, 0.0, 0.0] if only_omega else [1.0, 1.0, 1.0]
    return [p + f * random(*p.shape, seed=seed + i, scale=scale)
            for i, (p, f) in enumerate(zip(parts, factor, strict=True))]


def test_smoothness_holds_between_any_two_points_in_z(problem, theta):
    B_X, B_q = convergence.geometry(problem.tokens)
    start = model.penalty_gradient(torch.softmax(OMEGA, 0), theta, problem, GAMMA)[1]
    for seed, scale in ((0, 1e-3), (10, 0.1), (20, 1.0), (30, 3.0)):
        there = move(OMEGA, theta, seed, scale)
        end = model.penalty_gradient(torch.softmax(there[0], 0), Theta(*there[1:]), problem, GAMMA)
        R = min(float(torch.linalg.matrix_norm(W, 2)) for W in (theta.W_ov, there[1]))
        L = convergence.smoothness_constant(R, B_X, B_q, GAMMA, problem.N, problem.V)
        change = (model.flat(end[1]) - model.flat(start)).norm()
        assert change <= L * (model.flat(there) - model.flat((OMEGA, *theta))).norm()


def test_smoothness_in_theta_alone_fails_when_only_omega_moves(problem, theta):
    there = move(OMEGA, theta, 0, 0.5, only_omega=True)
    g = [model.penalty_gradient(torch.softmax(w, 0), theta, problem, GAMMA)[1]
         for w in (OMEGA, there[0])]
    assert float((g[0].W_ov - g[1].W_ov).norm()) > 1e-3     # against a right side of zero


def test_geometry_by_hand():
    X = torch.zeros(2, 3, 2, dtype=F64)
    X[0, 0, 0] = X[0, 0, 1] = 1.0                            # twice the same column: norm sqrt 2
    X[1, 1, 1], X[1, 2, 0] = 1.2, 1.3                        # orthogonal columns: norm 1.3
    tokens = model.Tokens(X, torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 1]))
    assert convergence.geometry(tokens) == pytest.approx((math.sqrt(2), 1.2))


def test_drift_bounds_by_hand():
    S, R0, B_X, B_q = 0.5, 3.0, 2.0, 0.25
    root = math.sqrt(2)
    assert convergence.drift_bounds(S, R0, B_X, B_q) == pytest.approx((
        root, root / 2, 0.5 * (0.5 + 1.5 * root),
        32 / 16 / 4 / 4 + (root / 4 * 16 / 16 * 3 + 1) / 2))


def test_drift_of_W_kq_needs_the_term_the_lemma_drops(problem):
    """One short step from a W_ov that is not small: the move is linear in S, the stated bound is
    quadratic."""
    theta = Theta(random(5, 6, seed=1, scale=3.0), random(6, 6, seed=2, scale=0.1))
    B_X, B_q = convergence.geometry(problem.tokens)
    R0 = float(torch.linalg.matrix_norm(theta.W_ov, 2))
    loss, gradient, _, _ = model.penalty_gradient(torch.softmax(OMEGA, 0), theta, problem, GAMMA)
    eta = 1e-6
    S, moved = eta * float(loss), eta * float(torch.linalg.matrix_norm(gradient.W_kq, 2))
    assert moved > B_X**3 * B_q * S**2 / 2
    assert moved <= convergence.drift_bounds(S, R0, B_X, B_q)[2]


@pytest.mark.parametrize("args", [(0.03, 0.4, 0.5, 0.5), (2.0, 3.0, 1.3, 0.7),
                                  (0.5, 0.0, 2.0, 1.0)])
def test_certified_radius_uses_half_of_sigma(args):
    sigma, R, B_X, B_q = args
    radius = convergence.certified_radius(*args)
    assert convergence.drift_bounds(radius, R, B_X, B_q)[3] == pytest.approx(sigma / 2, rel=1e-12)
    b, a = math.sqrt(2) / 2 * B_X**4 * B_q**2 * R + B_X, B_X**5 * B_q**2
    as_printed = (-b + math.sqrt(b * b + 2 * a * sigma)) / a
    assert radius == pytest.approx(as_printed, rel=1e-9)


@pytest.mark.parametrize("args", [(1.2, 0.03, 0.4, 0.5, 0.5, 7), (0.1, 2.5, 0.2, 2.0, 0.1, 3)])
def test_initial_condition_by_hand_and_by_search(args):
    loss, sigma, R, B_X, B_q, V = args
    left, right = convergence.initial_condition(*args)
    assert left == pytest.approx(8 * V * loss * math.exp(math.sqrt(2) * B_X * R) / sigma**2)
    S_H = convergence.certified_radius(sigma, R, B_X, B_q)
    S = torch.linspace(0, S_H, 200001, dtype=F64)
    assert right == pytest.approx(float((S * torch.exp(-2 * B_X**2 * S)).max()), rel=1e-8)


def instance(seed):
    """A random problem with M <= a = V and a random point: (sides of the condition, V, M)."""
    generator = torch.Generator().manual_seed(seed)
    N, N_val, D = (int(torch.randint(1, 4, (1,), generator=generator)) for _ in range(3))
    M = (N + N_val) * D
    V = M + int(torch.randint(0, 3, (1,), generator=generator))
    rows = torch.randint(0, V, (N + N_val, 2 + D), generator=generator).tolist()
    scale = 0.2 + 2 * float(torch.rand(1, generator=generator))
    tokens = model.make_tokens(rows, D, random(V, V, seed=seed, scale=scale / math.sqrt(V)))
    problem = model.Problem(tokens, N, N_val, D, V)
    theta = Theta(random(V, V, seed=seed + 1, scale=float(torch.rand(1, generator=generator))),
                  random(V, V, seed=seed + 2))
    gamma = 0.1 + 5 * float(torch.rand(1, generator=generator))
    sigma = torch.softmax(random(N, seed=seed + 3), 0)
    loss, _, c, state = model.penalty_gradient(sigma, theta, problem, gamma)
    scale = 1 + gamma / N
    sigma_min = torch.linalg.svdvals(convergence.feature_matrix(c, state.h))[-1]
    B_X, B_q = convergence.geometry(tokens)
    R = float(torch.linalg.matrix_norm(theta.W_ov, 2))
    normal = float(sigma_min) / math.sqrt(scale)
    sides = convergence.initial_condition(float(loss) / scale, max(normal, 1e-12), R, B_X, B_q, V)
    return sides, normal, B_X, R, float(loss) / scale, V, M


def test_condition_on_the_start_cannot_hold():
    """Each link of the derivation on random instances, then the product of the three."""
    for seed in range(0, 400, 10):
        (left, right), sigma, B_X, R, loss, V, M = instance(seed)
        assert sigma**2 <= B_X**2 / M * (1 + 1e-9)
        assert loss * math.exp(math.sqrt(2) * B_X * R) >= math.log(V)
        assert right <= 1 / (2 * math.e * B_X**2) * (1 + 1e-12)
        assert left / right >= convergence.condition_floor(V, M)
    assert convergence.condition_floor(2, 2) == pytest.approx(64 * math.e * math.log(2))
    assert convergence.condition_floor(2, 2) > 120


def test_floor_of_the_condition_is_attained():
    """Orthogonal features of norm B_X, W_ov = 0, a short query: no better floor exists."""
    V, M, B_X = 4, 3, 3.0
    left, right = convergence.initial_condition(math.log(V), B_X / math.sqrt(M), 0.0, B_X, 1e-7, V)
    assert left / right == pytest.approx(convergence.condition_floor(V, M), rel=1e-9)


def test_certifiable_share_is_the_integral():
    V, M, B_X, R, gamma_over_N = 6, 5, 0.8, 0.7, 0.3
    S = torch.linspace(0, 60, 2_000_001, dtype=F64)
    sigma_min = math.sqrt((1 + gamma_over_N) * B_X**2 / M)
    mu = sigma_min**2 / (2 * V) * torch.exp(-math.sqrt(2) * B_X * (R + math.sqrt(2) * B_X * S))
    assert float(mu[0]) == pytest.approx(convergence.pl_constant(sigma_min, R, B_X, V))
    smallest = (1 + gamma_over_N) * math.log(V) * math.exp(-math.sqrt(2) * B_X * R)
    share = float(torch.trapezoid(mu, S)) / smallest
    assert share == pytest.approx(convergence.certifiable_share(V, M), rel=1e-6)


def test_loss_floor_is_the_smallest_loss_in_the_tube():
    R, S, B_X, V = 0.9, 0.4, 1.3, 5
    floor, norm = convergence.loss_floor(S, R, B_X, V), R + math.sqrt(2) * B_X * S
    u = torch.full((V,), -1.0 / math.sqrt(V * (V - 1)), dtype=F64)   # unit vector, best for token 0
    u[0] = math.sqrt((V - 1) / V)
    best = float(-torch.log_softmax(B_X * norm * u, 0)[0])
    assert best == pytest.approx(math.log1p((V - 1) * math.exp(
        -math.sqrt(V / (V - 1)) * B_X * norm)))
    assert floor <= best
    assert convergence.loss_floor(S, R, B_X, 2) == pytest.approx(          # exact for two tokens
        float(-torch.log_softmax(B_X * norm * torch.tensor([1.0, -1.0], dtype=F64)
                                  / math.sqrt(2), 0)[0]), rel=1e-12)
    for seed in range(50):
        W = random(V, V, seed=seed)
        W = W * norm / torch.linalg.matrix_norm(W, 2)
        h = random(V, seed=seed + 99)
        assert float(-torch.log_softmax(W @ (B_X * h / h.norm()), 0).amax()) >= floor
        assert norm == pytest.approx(float(torch.linalg.matrix_norm(W, 2)))


def test_smallest_epsilon_by_hand():
    assert convergence.smallest_epsilon(1.0, 1) == pytest.approx(2.0)
    assert convergence.smallest_epsilon(0.004, 1) == pytest.approx(0.04)
    assert convergence.smallest_epsilon(0.5, 8) == pytest.approx(1.0)


def test_both_sets_of_the_convergence_instance_are_separable():
    problem = convergence.convergence_problem()
    losses = convergence.separating_losses(problem, convergence.convergence_start(), t=20.0)
    torch.testing.assert_close(losses, torch.full((10,), math.log1p(9 * math.exp(-20)), dtype=F64),
                               rtol=1e-5, atol=0)
    assert problem.V == len(problem.tokens.y) == (problem.N + problem.N_val) * problem.D


HITS = {2.0: 148, 1.0: 1639, 0.5: 9388, 0.25: 14862, 0.125: 24684}


# Each run's tightest values: L_k over the measured variation, Taylor slack, PL slack, ratio of the
# condition on the start along the path; then the first step outside the certified tube.
TIGHTEST = {2.0: (437.14, 1.5007e-3, 359.55, 6.8791e6, 1),
            1.0: (550.24, 2.2026e-4, 240.51, 4.5040e6, 1),
            0.5: (716.80, 3.1743e-5, 158.83, 3.0365e6, 2),
            0.25: (957.33, 1.8579e-5, 103.81, 2.1197e6, 2),
            0.125: (1308.9, 4.1828e-6, 67.759, 1.5395e6, 3)}


def check_run(epsilon):
    r, trace, smooth = convergence.convergence_run(epsilon)
    tightest = [r[key] for key in ("smooth_slack", "taylor_slack", "pl_slack", "ratio_min")]
    assert tightest == pytest.approx(TIGHTEST[epsilon][:4], rel=0.01)
    assert r["hit"]
    assert r["steps"] == pytest.approx(HITS[epsilon], rel=0.01)
    assert r["gamma"] == pytest.approx(1 / math.sqrt(epsilon))
    assert r["eta_ok"]                                        # eta <= 1/L_k at every step
    assert r["eta_L_max"] > 0.9                               # and not by a wide margin
    assert r["monotone"]
    assert r["pl_slack"] >= 1
    assert 1 <= r["token_pl_slack"] < 100
    assert r["smooth_slack"] >= 1
    assert r["taylor_slack"] >= 0
    assert r["descent_slack"] >= 0
    assert len(r["drift_ratio"]) == 4                         # W_ov, omega, W_kq, H
    assert 0 < min(r["drift_ratio"]) < max(r["drift_ratio"]) <= 1
    assert 0.45 < r["share_seen"] < 0.55       # to first order eta |grad|^2 / 2 of eta |grad|^2
    assert r["share_paper"] < r["share_tokens"] < r["share_seen"]
    assert r["val"] <= epsilon
    assert r["lower"] <= epsilon**1.5                         # gamma times it is at most epsilon
    assert r["ratio"] > r["floor"]                            # the condition fails, as it must
    assert r["ratio_min"] > r["floor"]                        # at every burn-in index k_0
    assert r["sigma0"] > 0
    assert r["exit"] is not None                              # the path leaves the certified tube
    assert r["exit"] <= 5
    assert r["exit"] == TIGHTEST[epsilon][4]
    assert trace.S[r["exit"] - 1] <= r["S_H"] < trace.S[r["exit"]]
    assert float(trace.ratio[0]) == pytest.approx(r["ratio"], rel=1e-12)
    check_taylor(r, trace, smooth)
    assert r["epsilon"] < r["epsilon_0"]
    assert r["wished"] > 50 * r["steps"]
    return r, trace, smooth


def check_taylor(r, trace, smooth):
    """The Taylor bound at L_k, from the trace: the end of a step is the run's next iterate."""
    eta = r["eta"]
    for k, _, L, slack in smooth.tolist():
        k = int(k)
        if k < r["steps"]:
            assert float(trace.L[k]) == L
            square = float(trace.square[k])
            bound = float(trace.loss[k]) - eta * square + L / 2 * eta**2 * square
            assert slack == pytest.approx(bound - float(trace.loss[k + 1]), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("epsilon", [2.0, 1.0])
def test_convergence_run(epsilon):
    r, trace, _ = check_run(epsilon)
    problem, start = convergence.convergence_problem(), convergence.convergence_start()
    state = model.forward(start, problem.tokens)
    p = torch.exp(-state.losses)                                # of the right token
    quotients = [(float((torch.softmax(u, 0) ** 2).sum() + 1 - 2 * q)) / (2 * float(loss))
                 for u, q, loss in zip(state.logits, p, state.losses, strict=True)]
    assert float(trace.mu_tokens[0]) == pytest.approx(
        float(trace.sigma_min[0]) ** 2 * min(quotients), rel=1e-10)
    if epsilon == 1.0:                                          # as measured when this was written
        assert r["drift_ratio"] == pytest.approx([0.104791, 0.00256464, 0.00685696, 0.00109143],
                                                 rel=1e-4)


@pytest.mark.slow
def test_hitting_times_of_every_epsilon():
    runs = [check_run(epsilon)[0] for epsilon in convergence.TARGETS]
    steps = [r["steps"] for r in runs]
    assert steps == sorted(steps)
    assert min(r["smooth_slack"] for r in runs) == pytest.approx(437, abs=1)
    assert min(r["pl_slack"] for r in runs) == pytest.approx(68, abs=0.5)
    assert min(r["ratio_min"] for r in runs) == pytest.approx(1.5e6, rel=0.03)
    assert max(max(r["drift_ratio"]) for r in runs) == pytest.approx(0.106, abs=0.001)
    assert runs[-1]["sigma_max"] == pytest.approx(0.996, abs=0.001)


def test_first_step_outside_the_certified_tube():
    lengths = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=F64)
    assert convergence.first_outside(lengths, 1.5) == 2
    assert convergence.first_outside(lengths, 2.0) == 3          # its border belongs to the tube
    assert convergence.first_outside(lengths, 3.0) is None


def test_normalised_loss_and_sigma_by_hand():
    loss, sigma = convergence.normalised(3.0, 0.2, 2.0, 4)
    assert loss == pytest.approx(2.0)
    assert sigma == pytest.approx(0.2 / math.sqrt(1.5))


def test_local_checks_by_hand():
    def column(*values):
        return torch.tensor(values, dtype=F64)

    trace = convergence.Trace(k=column(0, 1, 2), loss=column(4, 2, 1), R=column(1, 3, 2),
                         sigma_min=column(3, 1, 2), mu_paper=column(0.1, 0.2, 0.5),
                         mu_tokens=column(0.4, 0.5, 0.6), mu_seen=column(0.8, 0.9, 1.0),
                         L=column(4, 6, 5), S=column(0, 1, 2), square=column(8, 4, 2),
                         ratio=column(7, 6, 9))
    seen = convergence.local_checks(trace, 0.5)
    assert seen == pytest.approx({
        "eta_ok": False, "eta_L_max": 3.0, "monotone": True,
        "pl_slack": 2 / (2 * 0.5 * 1), "token_pl_slack": 2 / (2 * 0.6 * 1),
        "descent_slack": 2 * (1 - 0.25) - 1, "ratio_min": 6, "R": 3, "sigma_min": 1,
        "share_paper": -(math.log(0.95) + math.log(0.9)) / math.log(4),
        "share_tokens": -(math.log(0.8) + math.log(0.75)) / math.log(4),
        "share_seen": -(math.log(0.6) + math.log(0.55)) / math.log(4)})


def test_stand_ins_of_the_theorem_by_hand():
    """eps_0 at S_H; steps = L/mu log(L_gamma/epsilon), with mu as the theorem has it at S = 0."""
    N, V, M, B_X, B_q, gamma, R = 4, 6, 5, 0.7, 0.6, 2.0, 1.5
    start = convergence.Trace(0, 3.0, R, 0.2, 0, 0, 0, 11.0, 0.0, 0, 0)
    told = convergence.hypotheses(start, 0.5, gamma, N, V, M, B_X, B_q)
    sigma = 0.2 / math.sqrt(1.5)
    assert told["sigma0"] == pytest.approx(sigma)
    mu = 1.5 * sigma**2 / (8 * V) * math.exp(-math.sqrt(2) * B_X * R)
    assert told["wished"] == pytest.approx(11.0 / mu * math.log(6.0))
    assert told["left"] == pytest.approx(8 * V * 2.0 * math.exp(math.sqrt(2) * B_X * R) / sigma**2)
    assert told["ratio"] == pytest.approx(told["left"] / told["right"])
    A = math.log1p(5 * math.exp(-2 * 0.49 * told["S_H"] - math.sqrt(2) * B_X * R))
    assert told["epsilon_0"] == pytest.approx(max(2 * A, (A / 2) ** (2 / 3)))
    assert told["floor"] == pytest.approx(16 * math.e * V * M * math.log(V))


def test_measured_quantities_of_a_step(problem, theta):
    """The gradient variation along the step and the Taylor bound, against their definitions."""
    seen = []
    model.pbgd(problem, GAMMA, theta, 0.05, 1, watch=seen.append)
    quotient, taylor = convergence.smoothness_quotients(seen[0], problem, GAMMA, 0.05, (1.0,))
    g = [model.flat(step.gradient) for step in seen]
    assert quotient == pytest.approx(float((g[1] - g[0]).norm() / (0.05 * g[0].norm())), rel=1e-9)
    square = float(g[0] @ g[0])
    assert taylor(3.0) == pytest.approx(
        seen[0].loss - 0.05 * square + 1.5 * 0.05**2 * square - seen[1].loss, abs=1e-12)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_gradient_variation_inside_a_step(problem, theta, fraction):
    """|grad L(z(s)) - grad L(z)| / |z(s) - z| at z(s) = z - s eta grad L(z), by hand."""
    seen, eta = [], 0.05
    model.pbgd(problem, GAMMA, theta, eta, 0, watch=seen.append)
    start = seen[0].gradient
    omega = -fraction * eta * start.omega
    there = Theta(theta.W_ov - fraction * eta * start.W_ov,
                  theta.W_kq - fraction * eta * start.W_kq)
    end = model.penalty_gradient(torch.softmax(omega, 0), there, problem, GAMMA)[1]
    change = (model.flat(end) - model.flat(start)).norm()
    distance = fraction * eta * model.flat(start).norm()
    quotients = [convergence.smoothness_quotients(seen[0], problem, GAMMA, eta, fractions)[0]
                 for fractions in ((fraction,), (fraction, 1.0), (1.0,))]
    assert quotients[0] == pytest.approx(float(change / distance), rel=1e-9)
    assert quotients[1] == max(quotients[0], quotients[2])      # the largest of its fractions
    assert quotients[0] != pytest.approx(quotients[2], rel=1e-4)
