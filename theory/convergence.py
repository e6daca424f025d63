"""Theorem 2 and its complete version: PBGD reaches L_gamma <= epsilon.

The constants of the proof, measured along runs of Algorithm PBGD with full gradients: smoothness,
PL, descent and drift at every step or checkpoint, then every hypothesis of the complete theorem.
"correction" counts the list in the package's docstring.
"""

import math
from collections import namedtuple

import torch

from theory.model import (
    F64,
    Theta,
    flat,
    forward,
    level_losses,
    make_problem,
    pbgd,
    penalty_gradient,
    residuals,
)

TITLE = "Convergence (Theorem 2): PBGD with full gradients, gamma = epsilon^(-1/2)"
# Targets epsilon, one run each, and a bound on sigma_max(W_ov) to set eta.
TARGETS = {2.0: 3.0, 1.0: 8.0, 0.5: 11.5, 0.25: 12.5, 0.125: 13.5}

# What is fixed during a run; B_X, B_q as in `geometry`.
Setting = namedtuple("Setting", "problem gamma eta B_X B_q")
# One iterate: L_gamma, R = sigma_max(W_ov), sigma_min(H), three PL constants (the paper's, with mu
# measured per token, measured |grad|^2 / (2 L_gamma)), L_k, S = sum_t eta L_gamma^t, |grad|^2, and
# left/right of the condition on the start, were k_0 = k.
Trace = namedtuple("Trace", "k loss R sigma_min mu_paper mu_tokens mu_seen L S square ratio")


def convergence_problem():
    """N = 4, N' = 1, D = 2, a = V = (N + N') D = 10: every prefix ends in a token of its own.

    Then the features h of all M = 10 prefixes are independent (sigma_min(H) > 0) and any answers
    are separable. The third column of a row is its first answer token, the last its second.
    """
    rows = [[8, 0, 5, 3], [7, 1, 6, 8], [6, 2, 7, 0], [5, 3, 8, 9], [2, 4, 9, 2]]
    return make_problem(rows[:1], rows[1:], 2, 10, scale=0.5)


def convergence_start():
    """theta^0: small random W_ov, attention leaning to the last token; omega^0 = 0 (uniform)."""
    generator = torch.Generator().manual_seed(1)
    W_ov = 0.1 * torch.randn(10, 10, dtype=F64, generator=generator)
    return Theta(W_ov, 4.0 * torch.eye(10, dtype=F64))


def geometry(tokens):
    """B_X = max sigma_max(X_d), B_q = max |X_{d,-1}|           (Assumption token geometry)"""
    return (float(torch.linalg.matrix_norm(tokens.X, 2).max()),
            float(tokens.X[:, :, -1].norm(dim=1).max()))


def feature_matrix(c, h):
    """H: columns sqrt(c_m) h_m; c (M,), h (M, a) -> (a, M)."""
    return (c.sqrt()[:, None] * h).T


def smoothness_constant(R, B_X, B_q, gamma, N, V):
    """L_k, the non-uniform smoothness constant at sigma_max(W_ov) = R             (Eq. def L_k)"""
    return (4 * B_X**2 * (1 + B_q) * (1 + B_X * B_q * R) ** 2 * (1 + gamma / N)
            + 3 * gamma / math.sqrt(N) * (math.log(V) + B_X + B_X * (1 + B_X * B_q) * R))


def token_pl(logit_norm, V):
    """mu_g(u) = exp(-sqrt2 |u|) / (2V): |grad g_y(u)|^2 >= 2 mu_g g_y(u)      (Lemma PL of g_y)"""
    return math.exp(-math.sqrt(2) * logit_norm) / (2 * V)


def pl_constant(sigma_min, R, B_X, V):
    """mu_PL = sigma_min(H)^2 exp(-sqrt2 B_X R) / (2V): |grad L|^2 >= 2 mu L   (Lemma PL)"""
    return sigma_min**2 * token_pl(B_X * R, V)


def drift_bounds(S, R0, B_X, B_q):
    """How far PBGD has come at S = sum_t eta L_gamma^t  (Lemma trajectory drift, correction 6)

    Bounds on the movement of W_ov, omega, W_kq (sigma_max, 2-norm) and on
    sigma_max(H^k - H^0) / sqrt(1 + gamma/N); R0 = sigma_max(W_ov^0).
    """
    root = math.sqrt(2)
    W_kq = B_X**2 * B_q / 2 * (B_X * S**2 + root * R0 * S)
    H = B_X**5 * B_q**2 / 4 * S**2 + (root / 4 * B_X**4 * B_q**2 * R0 + B_X / 2) * S
    return root * B_X * S, root * S, W_kq, H


def certified_radius(sigma, R, B_X, B_q):
    """S_H(k_0): where the drift of H has used half of sigma              (complete Theorem 2)"""
    linear, square = math.sqrt(2) / 2 * B_X**4 * B_q**2 * R + B_X, B_X**5 * B_q**2
    return 2 * sigma / (linear + math.sqrt(linear**2 + 2 * square * sigma))  # stable for small B_q


def initial_condition(loss, sigma, R, B_X, B_q, V):
    """Both sides of the condition at k_0: 8 V l exp(sqrt2 B_X R)/sigma^2 <= M_H.

    loss is l = L_gamma / (1 + gamma/N), sigma = sigma_min(H) / sqrt(1 + gamma/N). M_H is the
    maximum of S exp(-2 B_X^2 S) on (0, S_H], at S = min(S_H, 1/(2 B_X^2)).
    """
    S = min(certified_radius(sigma, R, B_X, B_q), 1 / (2 * B_X**2))
    return (8 * V * loss * math.exp(math.sqrt(2) * B_X * R) / sigma**2,
            S * math.exp(-2 * B_X**2 * S))


def condition_floor(V, M):
    """The least left/right of `initial_condition` over all instances with V, M (correction 8)."""
    return 16 * math.e * V * M * math.log(V)


def certifiable_share(V, M):
    """The most of L_gamma that PL and drift together can remove, small steps (correction 9)."""
    return 1 / (4 * V * M * math.log(V))


def loss_floor(S, R, B_X, V):
    """A(k_0) = log(1 + (V-1) exp(-2 B_X^2 S - sqrt2 B_X R)): no smaller token loss in the tube."""
    return math.log1p((V - 1) * math.exp(-2 * B_X**2 * S - math.sqrt(2) * B_X * R))


def smallest_epsilon(floor, N):
    """eps_0 = max(2 A, (2 A / N)^(2/3))"""
    return max(2 * floor, (2 * floor / N) ** (2 / 3))


def smoothness_quotients(step, problem, gamma, eta, fractions=(0.25, 0.5, 1.0)):
    """max_s |grad L(z(s)) - grad L(z)| / |z(s) - z| along the step, and the Taylor slack
    L(z) + <grad, dz> + L_k/2 |dz|^2 - L(z(1)) as a function of L_k (Lemmas smoothness, Taylor)."""
    start, quotient = flat(step.gradient), 0.0
    for s in fractions:
        moved = [z - s * eta * g for z, g in zip((step.omega, *step.theta), step.gradient,
                                                 strict=True)]
        loss, gradient, _, _ = penalty_gradient(torch.softmax(moved[0], 0), Theta(*moved[1:]),
                                                problem, gamma)
        change = float((flat(gradient) - start).norm())
        quotient = max(quotient, change / (s * eta * float(start.norm())))
    square = float(start @ start)
    return quotient, lambda L: step.loss - eta * square + L / 2 * eta**2 * square - float(loss)


def normalised(loss, sigma_min, gamma, N):
    """l = L_gamma / (1 + gamma/N) and sigma = sigma_min(H) / sqrt(1 + gamma/N)."""
    return loss / (1 + gamma / N), sigma_min / math.sqrt(1 + gamma / N)


def hypotheses(start, epsilon, gamma, N, V, M, B_X, B_q):
    """What the complete theorem asks of the start, and what is left of it; `start` a Trace row.

    S(k_0) is empty, so its constants take stand-ins, the most favourable value each: eps_0 is
    evaluated at the largest S_eps that the definition allows, S_H; the bound on the hitting time at
    S_eps = 0, that is with mu and L of the start itself.
    """
    loss, sigma = normalised(start.loss, start.sigma_min, gamma, N)
    left, right = initial_condition(loss, sigma, start.R, B_X, B_q, V)
    S_H = certified_radius(sigma, start.R, B_X, B_q)
    mu = (1 + gamma / N) * sigma**2 / 4 * token_pl(B_X * start.R, V)
    return {"B_X": B_X, "B_q": B_q, "V": V, "M": M, "sigma0": sigma, "left": left, "right": right,
            "ratio": left / right, "floor": condition_floor(V, M), "S_H": S_H,
            "epsilon_0": smallest_epsilon(loss_floor(S_H, start.R, B_X, V), N),
            "wished": start.L / mu * math.log(start.loss / epsilon)}


def first_outside(lengths, radius):
    """The first k with S_k > radius, where the path leaves the certified tube, or None."""
    outside = (lengths > radius).nonzero()
    return int(outside[0]) if len(outside) else None


def local_checks(trace, eta):
    """The least ratio or slack of every inequality that is checked at every step; trace in columns.

    share_*: how much of the observed log-decrease prod (1 - eta mu_k) certifies, for three mu.
    """
    gained = float(torch.log(trace.loss[0] / trace.loss[-1]))
    shares = {f"share_{name}": float(-torch.log1p(-eta * mu[:-1]).sum()) / gained
              for name, mu in (("paper", trace.mu_paper), ("tokens", trace.mu_tokens),
                               ("seen", trace.mu_seen))}
    descent = trace.loss[:-1] * (1 - eta * trace.mu_tokens[:-1]) - trace.loss[1:]
    return {"eta_ok": bool((eta * trace.L <= 1).all()), "eta_L_max": float((eta * trace.L).max()),
            "monotone": bool((trace.loss.diff() <= 0).all()),
            "pl_slack": float((trace.square / (2 * trace.mu_paper * trace.loss)).min()),
            "token_pl_slack": float((trace.square / (2 * trace.mu_tokens * trace.loss)).min()),
            "descent_slack": float(descent.min()), "ratio_min": float(trace.ratio.min()),
            "R": float(trace.R.max()), "sigma_min": float(trace.sigma_min.min()), **shares}


def trace_row(step, before, setting):
    """What one iterate shows; before: the Trace row of the previous one, None at the start."""
    problem, gamma, eta, B_X, B_q = setting
    N, V = problem.N, problem.V
    R = float(torch.linalg.matrix_norm(step.theta.W_ov, 2))
    sigma_min = float(torch.linalg.svdvals(feature_matrix(step.c, step.state.h))[-1])
    square = sum(float((g * g).sum()) for g in step.gradient)
    r = residuals(step.state.logits, problem.tokens.y)
    mu_tokens = sigma_min**2 * float(((r * r).sum(1) / (2 * step.state.losses)).min())
    S = before.S + eta * before.loss if before else 0.0
    left, right = initial_condition(*normalised(step.loss, sigma_min, gamma, N), R, B_X, B_q, V)
    return Trace(step.k, step.loss, R, sigma_min, pl_constant(sigma_min, R, B_X, V), mu_tokens,
                 square / (2 * step.loss), smoothness_constant(R, B_X, B_q, gamma, N, V), S, square,
                 left / right)


def drift_ratios(start, step, S, setting):
    """Movement since `start` over `drift_bounds` at S: W_ov, omega, W_kq, H -> four floats."""
    problem, gamma, _, B_X, B_q = setting
    R0 = float(torch.linalg.matrix_norm(start.theta.W_ov, 2))
    H0, H = (feature_matrix(z.c, z.state.h) for z in (start, step))
    moved = (torch.linalg.matrix_norm(step.theta.W_ov - start.theta.W_ov, 2),
             (step.omega - start.omega).norm(),
             torch.linalg.matrix_norm(step.theta.W_kq - start.theta.W_kq, 2),
             torch.linalg.matrix_norm(H - H0, 2) / math.sqrt(1 + gamma / problem.N))
    return [float(a) / b for a, b in zip(moved, drift_bounds(S, R0, B_X, B_q), strict=True)]


def convergence_run(epsilon, limit=60000, every=50):
    """One run with one fixed eta, from k_0 = 0 to L_gamma <= epsilon; gamma = epsilon^(-1/2).

    eta = 1/L at the radius TARGETS[epsilon], a guess that the run has to justify: `eta_ok` says
    whether eta <= 1/L_k at every step. PL and descent are checked at every step, smoothness and
    drift at every `every`-th. Returns numbers, the trace (one row a step) and rows of (k, measured
    gradient variation, L_k, Taylor slack).
    """
    problem, gamma = convergence_problem(), epsilon ** -0.5
    B_X, B_q = geometry(problem.tokens)
    eta = 1 / smoothness_constant(TARGETS[epsilon], B_X, B_q, gamma, problem.N, problem.V)
    setting = Setting(problem, gamma, eta, B_X, B_q)
    trace, checkpoints = [], []

    def watch(step):
        trace.append(trace_row(step, trace[-1] if trace else None, setting))
        if step.k % every == 0:
            checkpoints.append(step)

    last = pbgd(problem, gamma, convergence_start(), eta, limit, until=epsilon, watch=watch)
    smooth = []
    for step in checkpoints:
        quotient, taylor = smoothness_quotients(step, problem, gamma, eta)
        L = trace[step.k].L
        smooth.append((step.k, quotient, L, taylor(L)))
    smooth = torch.tensor(smooth, dtype=F64)
    drift = [drift_ratios(checkpoints[0], step, trace[step.k].S, setting)
             for step in checkpoints[1:]]
    columns = Trace(*torch.tensor(trace, dtype=F64).unbind(1))
    upper, lower = level_losses(last.state.losses, problem)
    told = hypotheses(trace[0], epsilon, gamma, problem.N, problem.V, len(problem.tokens.y), B_X,
                      B_q)
    numbers = {
        "epsilon": epsilon, "gamma": gamma, "eta": eta, "hit": last.loss <= epsilon,
        "steps": last.k, "start": trace[0].loss, "val": float(upper.mean()),
        "lower": float(last.sigma @ lower) / problem.N, "sigma_max": float(last.sigma.max()),
        "smooth_slack": float((smooth[:, 2] / smooth[:, 1]).min()),
        "taylor_slack": float(smooth[:, 3].min()),
        "drift_ratio": [max(ratios) for ratios in zip(*drift, strict=True)],
        "exit": first_outside(columns.S, told["S_H"]),
        **local_checks(columns, eta), **told}
    return numbers, columns, smooth


def separating_losses(problem, theta, t=30.0):
    """Every token loss at W_ov = t E_y h^+, where U = t e_y: log(1 + (V-1) exp(-t)) -> (M,).

    Full column rank of the features lets one W_ov fit both sets: separable as t grows.
    """
    h = forward(theta, problem.tokens).h
    target = torch.nn.functional.one_hot(problem.tokens.y, problem.V).to(F64).T
    return forward(Theta(t * target @ torch.linalg.pinv(h.T), theta.W_kq), problem.tokens).losses


def measure():
    """Theorem 2: hitting times, every local inequality, every hypothesis."""
    results = [convergence_run(epsilon) for epsilon in TARGETS]
    runs = [numbers for numbers, _, _ in results]
    slope = (math.log(runs[-1]["steps"] / runs[1]["steps"])
             / math.log(runs[-1]["epsilon"] / runs[1]["epsilon"]))
    separating = float(separating_losses(convergence_problem(), convergence_start()).max())
    return {"slope": slope, "separating": separating, "runs": runs}, {"results": results}


def print_table(numbers, curves):
    runs = numbers["runs"]
    print_hitting_times(runs, numbers["slope"])
    print_inequalities(runs)
    print_hypotheses(runs, numbers["separating"])
    print_shares(runs)


def print_hitting_times(runs, slope):
    print("  Observed, one run per epsilon, one fixed eta each")
    print("   epsilon  gamma      eta  eta*max L_k  L_gamma(0)    tau  min sigma_min(H)  max R  "
          "L_val  (1/N) sum sigma L   max sigma")
    for r in runs:
        print(f"  {r['epsilon']:8.3f}  {r['gamma']:5.2f}  {r['eta']:.5f}  {r['eta_L_max']:11.3f}  "
              f"{r['start']:10.3f}  " + ("" if r["hit"] else ">") + f"{r['steps']:5d}  "
              f"{r['sigma_min']:16.4f}  {r['R']:5.2f}  {r['val']:5.3f}  "
              f"{r['lower']:.4f} <= {r['epsilon']**1.5:.4f}  {r['sigma_max']:9.3f}")
    print(f"  tau grows like epsilon^{slope:.2f}. On the way omega moves onto the row that is "
          "easiest to fit,\n  so sigma_min(H) shrinks with the smallest weight.")


def print_inequalities(runs):
    print("  True at every step checked, in all runs (the tightest value; 1 and 0 are the limits)")
    for text, value in (
            ("|grad|^2 / (2 mu_PL L_gamma)                      >= 1",
             min(r["pl_slack"] for r in runs)),
            ("  with mu measured per token, exp(-sqrt2 B_X R) not used",
             min(r["token_pl_slack"] for r in runs)),
            ("L_k / measured gradient variation                 >= 1",
             min(r["smooth_slack"] for r in runs)),
            ("Taylor bound - L_gamma(z^{k+1})                   >= 0",
             min(r["taylor_slack"] for r in runs)),
            ("(1 - eta mu) L_gamma^k - L_gamma^{k+1}            >= 0",
             min(r["descent_slack"] for r in runs)),
            ("movement / drift bound (W_ov, omega, W_kq, H)     <= 1",
             max(max(r["drift_ratio"]) for r in runs))):
        print(f"    {text}  {value:.3e}")


def print_hypotheses(runs, separating):
    one = runs[0]
    print("  Hypotheses of the complete theorem, k_0 = 0")
    print(f"    holds   both sets separable: one W_ov has every token loss <= {separating:.1e} "
          "(zero in the limit)")
    print(f"    holds   B_X = {one['B_X']:.3f}, B_q = {one['B_q']:.3f} finite;  V = {one['V']} >= "
          f"(N + N') D = {one['M']};  sigma_k0 = {min(r['sigma0'] for r in runs):.4f} > 0")
    print("    FAILS   condition on the start, 8 V l exp(sqrt2 B_X R) / sigma^2 <= M_H:")
    for r in runs:
        print(f"            epsilon {r['epsilon']:.3f}: {r['left']:.3e} against {r['right']:.3e}, "
              f"ratio {r['ratio']:.2e}; smallest over all k_0 on the path {r['ratio_min']:.2e}")
    print("            It cannot hold: ratio >= 16 e V M log V for every instance, every k_0;")
    print(f"            here {one['floor']:.0f}, at the smallest possible size (V = M = 2) "
          f"{condition_floor(2, 2):.1f}.")
    print("    EMPTY   S(k_0), so S_eps, mu_eps, L_eps and eps_0 have no value. Most favourable "
          "stand-ins:")
    for r in runs:
        print(f"            epsilon {r['epsilon']:.3f}: eps_0 {r['epsilon_0']:.2f} at S_eps = S_H "
              f"= {r['S_H']:.3f} (left at k = {r['exit']}); bound {r['wished']:.1e} steps at "
              f"S_eps = 0, observed {r['steps']}")
    print("            epsilon > eps_0 fails as well: "
          + ("in every run" if all(r["epsilon"] <= r["epsilon_0"] for r in runs) else "not always"))


def print_shares(runs):
    print("  Share of the log-decrease certified by prod (1 - eta mu_k), mu_k along the path")
    for r in runs:
        print(f"    epsilon {r['epsilon']:.3f}: mu_PL of the paper {r['share_paper']:.1e}, mu "
              f"measured per token {r['share_tokens']:.1e}, measured |grad|^2/(2 L_gamma) "
              f"{r['share_seen']:.2f}")
    print("    and the path-length argument itself, for these V and M: at most "
          f"{certifiable_share(runs[0]['V'], runs[0]['M']):.1e} of the loss")
