"""The paper's five statements, as something one can run and see (float64, CPU, under a minute).

    python theory.py [benefit|coverage|convergence|equivalence|weights|all] [--out results/theory]

Each part makes its own data, prints a table, saves a figure and measures what a theorem claims:

    benefit      Theorem 1: direct mixing loses to BDS beyond rho_c
    coverage     Proposition: BDS puts all its weight on the useful set U, mixing |U| / N
    convergence  Theorem 3 and its complete version, Algorithm PBGD
    equivalence  Theorem 4: BMO and BDS have the same solutions
    weights      implicit weights, importance ratio, log-sum-exp bound, convexity in the logits

The model is the paper's one-layer softmax Transformer, theta = (W_ov, W_kq): for a prefix X of
token embeddings with last column x, U = W_ov h, h = X softmax(X^T W_kq x), and the next token has
probabilities softmax(U). Where a proof needs models of loss exactly zero, which no finite theta of
a softmax has, a finite class of policies with probabilities 0 and 1 is the witness. omega lives in
`selector.Selector`, response weights in `bmo_weights`: the code the training scripts run.

Readings and corrections of the paper's text, with the reason:
 1. Averages over D. Eq. SFT_def sums over tokens, the convergence appendix averages over D. Here
    the convergence part averages; the weights part sums, because exp(-L) is the probability of an
    answer only for the sum (and lambda is the normalised probability only at tau = 1).
 2. 1/N. The softmax already sums to one and the paper divides by N once more; the lemma on the
    penalty gradient drops this 1/N from its first line and keeps it in its gradients. Only with
    it do the gradients belong to the objective, so it stays: the data term weighs gamma / N.
    `Selector` averages N sigma_i over rows, N times as much: it is handed gamma / N.
 3. Dimension. H lives in R^a, so full column rank needs a >= (N + N') D; the statement has V, and
    the appendix sets a = V. Here a = V = (N + N') D.
 4. Steps. The main text has two rates, an omega step at theta^{k+1} and stray indices i_k inside a
    full sum; the appendix one eta for all three blocks, simultaneously. `pbgd` does both: coverage
    runs the first form, convergence the second. The main text allows every eta <= 1/L, the
    appendix fixes eta = 1/L; its argument holds for every constant eta <= 1/L.
 5. Smoothness. The lemma bounds the change of grad_theta by the movement of theta alone, which
    fails when only omega moves; its proof bounds the whole gradient by the movement of
    z = (omega, theta), and that is what is checked. R is defined once as a maximum and used as a
    minimum; the proofs support the minimum.
 6. Drift of W_kq. The lemma states B_X^3 B_q S^2 / 2; its proof also has the term
    (sqrt 2 / 2) B_X^2 B_q sigma_max(W_ov^0) S. Without it the bound fails for small S (a test).
 7. PL constant of one token. The lemma states (V-1) / (2 V^2) exp(-sqrt2 |u|); its proof shows the
    larger 1 / (2V) exp(-sqrt2 |u|), which everything after it uses, and so do we.
 8. The complete Theorem 3 assumes, at the start k_0, 8 V l exp(sqrt2 B_X R) / sigma^2 <= M_H. No
    instance and no k_0 satisfies it. With M = (N + N') D columns, sigma^2 is at most the mean
    squared column norm, sigma^2 <= B_X^2 / M; |U| <= B_X R gives every token a loss of at least
    log(1 + (V-1) e) with e = exp(-sqrt2 B_X R), and log(1 + (V-1) e) / e >= log V for e <= 1, so
    l exp(sqrt2 B_X R) >= log V; and max_S S exp(-2 B_X^2 S) <= 1 / (2 exp(1) B_X^2). Together
    left / right >= 16 exp(1) V M log V >= 120 (`condition_floor`). S(k_0) is always empty and
    S_eps, mu_eps, L_eps, eps_0 are undefined. What is true regardless: each local inequality
    (smoothness, PL, descent, drift), checked at every step or checkpoint, and the hitting itself.
 9. The gap of 8 is not slack in constants. Descent times drift certifies, for small steps, a
    decrease of at most int_0^inf sigma^2 (1 + gamma/N) / (2V) exp(-sqrt2 B_X R - 2 B_X^2 S) dS,
    by the same three facts a share 1 / (4 V M log V) of the loss (`certifiable_share`): a bound on
    |W_ov| by path length is exponential in what in truth grows like a logarithm.
10. eps_0 depends on S_eps(k_0), which depends on gamma = eps^(-1/2): "for every eps > eps_0" is a
    condition on each eps, not a threshold. S_eps as a supremum gives the worst rate of the set.
11. Theorems 1 and 3 exclude each other in the closure: features of full rank let one W_ov fit both
    sets, so the minimisers are shared, and Assumption 2 (disjoint S_val, S_sft) fails.
12. Theorem 1 with a softmax. If one context has different answers in D and D_SFT, models that
    fit either are at infinity, both Deltas are infinite and rho_c is infinity over infinity.
    With bounded norm Assumption 1 fails instead: then the proof needs Delta_val minus the minimum
    of the mixed loss (`deltas`), and BDS need not reach v_*: useful rows no longer
    leave the rest of the model free. One equality sign in the proof is a >=.
13. omega in the extended reals is essential, not a convenience. Under Assumption 1 every *finite*
    omega gives the lower level the same minimisers S_sft, whatever the weights; BDS selects only
    through sigma_i = 0, omega_i = -infinity. sigma(+infinity) is not defined and not needed, and
    weighted sums use 0 * infinity = 0.
14. Proposition: |U| < N does not follow from Assumptions 1 and 2 (`everything_useful` has every row
    useful, no model of S_val fitting all). The mixing half needs it as an assumption.
15. PMO_LSE carries an extra 1/tau: LSE(q; tau) has one already. Its gradient is lambda / tau, while
    the update printed after it has lambda: right for tau = 1 only.
16. The lemma before it concludes up to log(M) / tau. The infimum is an equality: LSE is monotone
    and L(theta') >= 0 = L(theta*).
17. r is proportional to lambda exactly when the old log-probs of a question's answers are equal.
"""

import argparse
import io
import itertools
import json
import math
from collections import namedtuple
from pathlib import Path

import torch

from bmo_weights import importance_ratio, lse_merit, response_weights
from selector import Selector
from utils import UserError, run, write_atomic

F64 = torch.float64
# Targets epsilon of the convergence part, one run each, and a bound on sigma_max(W_ov) to set eta.
TARGETS = {2.0: 3.0, 1.0: 8.0, 0.5: 11.5, 0.25: 12.5, 0.125: 13.5}
RADII = (2.0, 4.0, 8.0, 16.0, 32.0)      # bounds on |W_ov|_F in the benefit part
INF = math.inf


# ---------------------------------------------------------------------------------------------
# The one-layer softmax Transformer
# ---------------------------------------------------------------------------------------------

# One entry per predicted token: prefix X (M, a, L), padded on the left, its last column the query;
# valid (M, L) false on padding; y (M,) the token to predict.
Tokens = namedtuple("Tokens", "X valid y")
Theta = namedtuple("Theta", "W_ov W_kq")                              # (V, a), (a, a)
Forward = namedtuple("Forward", "attention h logits losses")          # (M, L) (M, a) (M, V) (M,)
# `tokens` holds the N' D validation tokens first, then the N D lower-level tokens, row by row.
Problem = namedtuple("Problem", "tokens N N_val D V")
Gradient = namedtuple("Gradient", "omega W_ov W_kq")                  # (N,) (V, a) (a, a)


def make_tokens(sequences, answer_length, embedding):
    """Prefix matrices of every answer token (Eq. transformer).

    sequences: lists of token ids, question then answer of `answer_length` tokens; embedding (a, V).
    """
    pairs = [(row[:t], row[t]) for row in sequences
             for t in range(len(row) - answer_length, len(row))]
    longest = max(len(prefix) for prefix, _ in pairs)
    X = torch.zeros(len(pairs), embedding.shape[0], longest, dtype=F64)
    valid = torch.zeros(len(pairs), longest, dtype=torch.bool)
    for m, (prefix, _) in enumerate(pairs):
        X[m, :, longest - len(prefix):] = embedding[:, prefix]
        valid[m, longest - len(prefix):] = True
    return Tokens(X, valid, torch.tensor([y for _, y in pairs]))


def make_problem(val_rows, sft_rows, answer_length, vocabulary, scale=1.0):
    """A bilevel problem over one-hot embeddings of norm `scale` (a = V)."""
    embedding = scale * torch.eye(vocabulary, dtype=F64)
    tokens = make_tokens([*val_rows, *sft_rows], answer_length, embedding)
    return Problem(tokens, len(sft_rows), len(val_rows), answer_length, vocabulary)


def forward(theta, tokens):
    """attention softmax(B), B = X^T W_kq x; h = X softmax(B); U = W_ov h; l = -log softmax(U)_y."""
    X, valid, y = tokens
    query = X[:, :, -1] @ theta.W_kq.T                                # W_kq x, (M, a)
    scores = (query.unsqueeze(1) @ X).squeeze(1)                      # X^T W_kq x, (M, L)
    attention = torch.softmax(scores.masked_fill(~valid, -INF), -1)
    h = (X @ attention.unsqueeze(-1)).squeeze(-1)
    logits = h @ theta.W_ov.T
    losses = -torch.log_softmax(logits, -1).gather(-1, y[:, None]).squeeze(-1)
    return Forward(attention, h, logits, losses)


def softmax_jacobian(probabilities):
    """J = Diag(p) - p p^T; p (..., n) -> (..., n, n)."""
    return torch.diag_embed(probabilities) - probabilities[..., None] * probabilities[..., None, :]


def residuals(logits, y):
    """grad g_y(u) = softmax(u) - e_y; logits (..., M, V), y (M,) -> (..., M, V)."""
    return torch.softmax(logits, -1) - torch.nn.functional.one_hot(y, logits.shape[-1])


def sample_gradients(theta, tokens):
    """The factors of every token's gradient                        (Lemma sample gradient formulas)

    grad_{W_ov} l_m = r_m h_m^T with r = softmax(U) - e_y;
    grad_{W_kq} l_m = s_m x_m^T with s = X J(B) X^T W_ov^T r.
    Returns the forward pass and r (M, V), s (M, a); h and the query x are in it and in `tokens`.
    """
    state = forward(theta, tokens)
    r = residuals(state.logits, tokens.y)
    v = ((r @ theta.W_ov).unsqueeze(1) @ tokens.X).squeeze(1)         # X^T W_ov^T r, (M, L)
    p = state.attention
    Jv = p * (v - (p * v).sum(-1, keepdim=True))                      # J(B) v without forming J
    return state, r, (tokens.X @ Jv.unsqueeze(-1)).squeeze(-1)


def coefficients(sigma, gamma, problem):
    """The weight of each token's loss in L_gamma: 1/(N'D), then gamma sigma_i/(ND) -> (M,)."""
    N, N_val, D = problem.N, problem.N_val, problem.D
    upper = torch.full((N_val * D,), 1.0 / (N_val * D), dtype=F64)
    return torch.cat([upper, (gamma / (N * D) * sigma).repeat_interleave(D)])


def row_losses(token_losses, problem):
    """Mean over the D answer tokens -> validation (N',), lower level l_seq (N,)."""
    rows = token_losses.reshape(-1, problem.D).mean(1)
    return rows[:problem.N_val], rows[problem.N_val:]


def penalty_objective(omega, theta, problem, gamma):
    """L_gamma = (1/N') sum_j L(val_j) + (gamma/N) sum_i softmax(omega)_i L(sft_i), differentiable.

    Written from the definition, so that autograd checks `penalty_gradient`, not itself.
    """
    upper, lower = row_losses(forward(theta, problem.tokens).losses, problem)
    return upper.mean() + gamma / problem.N * (torch.softmax(omega, 0) * lower).sum()


def penalty_gradient(sigma, theta, problem, gamma):
    """L_gamma, its gradient, the token weights c and the forward pass.   (Lemma penalty gradient)

    grad_{W_ov} = sum_m c_m r_m h_m^T, grad_{W_kq} = sum_m c_m s_m x_m^T,
    grad_omega = (gamma/N) J(omega) l_seq, J l = sigma * (l - sigma.l).
    sigma (N,) = softmax(omega), which is all that L_gamma sees of omega.
    """
    state, r, s = sample_gradients(theta, problem.tokens)
    c = coefficients(sigma, gamma, problem)
    lower = row_losses(state.losses, problem)[1]
    omega = gamma / problem.N * sigma * (lower - sigma @ lower)
    W_ov = (c[:, None] * r).T @ state.h
    W_kq = (c[:, None] * s).T @ problem.tokens.X[:, :, -1]
    return c @ state.losses, Gradient(omega, W_ov, W_kq), c, state


Step = namedtuple("Step", "k loss gradient c state sigma theta omega")


def pbgd(problem, gamma, theta, eta, steps, alpha=None, sequential=False, until=0.0, watch=None):
    """Penalty-based gradient descent with full gradients         (Algorithm PBGD, Eq. offline_PBGD)

    eta: step of theta, and of omega unless `alpha` is given (alpha = 0 is direct mixing: omega
    stays uniform). sequential: omega sees theta^{k+1} (main text), else theta^k (appendix).
    Stops at the first k with L_gamma <= until, or after `steps`. watch(Step) sees every iterate.
    Returns the last Step. omega is the training scripts' Selector, started at zero.
    """
    selector = Selector(problem.N, eta if alpha is None else alpha, "sgd", dtype=F64)
    rows = torch.arange(problem.N)
    for k in range(steps + 1):
        sigma = selector.weights() / problem.N
        loss, gradient, c, state = penalty_gradient(sigma, theta, problem, gamma)
        step = Step(k, float(loss), gradient, c, state, sigma, theta,
                    selector.logits.clone())
        if watch:
            watch(step)
        if step.loss <= until or k == steps:
            return step
        theta = Theta(theta.W_ov - eta * gradient.W_ov, theta.W_kq - eta * gradient.W_kq)
        seen = forward(theta, problem.tokens).losses if sequential else state.losses
        selector.step(rows, row_losses(seen, problem)[1], gamma / problem.N)


# ---------------------------------------------------------------------------------------------
# Finite classes of policies: losses of exactly zero and exactly infinity
# ---------------------------------------------------------------------------------------------

def policy_losses(policies, rows):
    """-log pi(answer | question); policies (K, Q, A) probabilities, rows (question, answer)
    -> (K, len(rows)), with 0 and infinity."""
    questions, answers = zip(*rows, strict=True)
    return -torch.log(policies[:, list(questions), list(answers)])


def weighted(losses, weights):
    """sum_i w_i L_i over the last dimension, with 0 * infinity = 0."""
    return torch.where(weights > 0, weights * losses, torch.zeros_like(losses)).sum(-1)


def argmin_set(values, tolerance=1e-12):
    """The set of minimisers, ties included, as a boolean mask (K,)."""
    return values <= values.min() + tolerance


def deltas(val, sft):
    """Delta_val, Delta_sft, rho_c of Theorem 1 for a finite class.

    val (K,) validation losses, sft (K,) mean lower-level losses. Delta_val is taken minus min sft,
    which is zero under Assumption 1; with it the proof needs no Assumption 1.
    """
    delta_val = float(sft[argmin_set(val)].min() - sft.min())
    delta_sft = float(val[argmin_set(sft)].min() - val.min())
    return delta_val, delta_sft, threshold(delta_val, delta_sft)


def threshold(delta_val, delta_sft):
    """rho_c = Delta_sft / (Delta_val + Delta_sft)                                (Theorem 1)"""
    return delta_sft / (delta_val + delta_sft)


def mixing_minimisers(val, sft, rho):
    """S_mix(rho): minimisers of rho * sft + (1 - rho) * val over a finite class, mask (K,)."""
    weights = torch.tensor([rho, 1.0 - rho], dtype=F64)
    return argmin_set(weighted(torch.stack([sft, val], -1), weights))


def switch_point(val, sft):
    """The largest rho at which mixing still keeps a model of S_val, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rho = (low + high) / 2
        keeps = bool((mixing_minimisers(val, sft, rho) & argmin_set(val)).any())
        low, high = (rho, high) if keeps else (low, rho)
    return low


def supports(num_rows):
    """The 2^N - 1 sets of rows that can carry weight, as masks (2^N - 1, N)."""
    masks = itertools.product((False, True), repeat=num_rows)
    return torch.tensor([mask for mask in masks if any(mask)])


def support_weights(support):
    """softmax(omega) spread evenly over `support` (N,): omega_i = 0 there, -infinity elsewhere."""
    selector = Selector(len(support), 1.0, "sgd", dtype=F64)
    selector.logits.masked_fill_(~support, -INF)
    return selector.weights() / len(support)


def lower_level_minimisers(losses):
    """S(lambda) for one lambda per support -> masks (2^N - 1, K); losses (K, N).

    Exact under Assumption 1: the minimum is 0 and which rows carry weight decides, not how much.
    """
    return torch.stack([argmin_set(weighted(losses, support_weights(support)))
                        for support in supports(losses.shape[1])])


def bds_solutions(val, losses):
    """All global solutions of BDS (separable finite class): mask over (support, model)."""
    feasible = lower_level_minimisers(losses)
    best = val[feasible.any(0)].min()
    return feasible & (val <= best + 1e-12)


def useful_set(val, losses):
    """U: rows that some model of S_val answers with loss zero -> mask (N,)     (Proposition)"""
    return (losses[argmin_set(val)] <= 1e-12).any(0)


def weakly_pareto(losses):
    """WP: models that no other model beats strictly in *every* objective; (K, N) -> mask (K,)."""
    beaten = (losses[None, :, :] < losses[:, None, :]).all(-1)       # [k, k']: k' beats k
    return ~beaten.any(1)


def scalarised(losses):
    """The union over lambda of S(lambda) for two objectives, any class: (K, 2) -> mask (K,).

    k is a minimiser of t f_1 + (1-t) f_2 for some t in [0, 1] iff the constraints
    t (f_1(k) - f_1(k')) + (1-t) (f_2(k) - f_2(k')) <= 0 leave an interval of t. Finite losses.
    """
    mask = []
    for point in losses:
        d1, d2 = (point - losses).unbind(-1)
        slope = d1 - d2                                               # t * slope <= -d2
        tied = slope.abs() < 1e-12
        upper = torch.where(slope > 1e-12, -d2 / slope, torch.inf).min().clamp(max=1.0)
        lower = torch.where(slope < -1e-12, -d2 / slope, -torch.inf).max().clamp(min=0.0)
        mask.append(bool(lower <= upper + 1e-12) and bool((d2[tied] <= 1e-12).all()))
    return torch.tensor(mask)


# ---------------------------------------------------------------------------------------------
# 1. Benefit (Theorem 1)
# ---------------------------------------------------------------------------------------------

def benefit_class(with_compromise=False):
    """Two policies, one fitting D best and one fitting all of D_SFT -> val (K,), losses (K, N).

    Four lower-level questions and two validation questions, the trusted answer last column first;
    row 2 is useful: the first policy answers it with certainty. `with_compromise` adds a third
    policy between the two, which direct mixing reaches before rho_c.
    """
    right = [[0.05, 0.2, 1.0, 0.3, 0.9, 0.8],                        # the validation-optimal model
             [1.0, 1.0, 1.0, 1.0, 0.5, 0.3]]                         # Assumption 1: loss zero
    if with_compromise:
        right.append([0.6, 0.7, 1.0, 0.8, 0.8, 0.7])
    right = torch.tensor(right, dtype=F64)
    policies = torch.stack([right, 1.0 - right], -1)
    val = policy_losses(policies, [(4, 0), (5, 0)]).mean(1)
    return val, policy_losses(policies, [(i, 0) for i in range(4)])


# Tokens of the shared small vocabulary: two phrasings, three questions, four answers.
OTHER, ASKED, Q1, Q2, Q3, ANS_A, ANS_B, ANS_C, ANS_D = range(9)


def conflict_problem(neutral=False):
    """Two trusted rows; two rows agreeing with them in another phrasing; two contradicting them.

    Contexts of D_SFT are distinct, so that Assumption 1 holds in the limit of large W_ov; the
    last rows share their context with D and answer differently, so S_val and S_sft are disjoint.
    `neutral` adds a third trusted row with its agreeing and contradicting rows, and a row unrelated
    to D: useful too, by definition, since some model of S_val fits it. Returns problem, U (N,).
    """
    val = [[ASKED, Q1, ANS_A], [ASKED, Q2, ANS_B]]
    sft = [[OTHER, Q1, ANS_A], [OTHER, Q2, ANS_B], [ASKED, Q1, ANS_C], [ASKED, Q2, ANS_C]]
    useful = [True, True, False, False]
    if neutral:
        val.append([ASKED, Q3, ANS_A])
        sft += [[OTHER, Q3, ANS_A], [ASKED, Q3, ANS_D], [OTHER, ANS_D, ANS_B]]
        useful += [True, False, True]
    return make_problem(val, sft, 1, 9), torch.tensor(useful)


def project(W, radius):
    """Onto the Frobenius ball; W (..., V, a)."""
    return W * (radius / W.flatten(-2).norm(dim=-1).clamp_min(radius))[..., None, None]


def bounded_minimisers(h, y, weights, radius, vocabulary, steps=3000):
    """argmin over |W_ov|_F <= radius of sum_m c_m l_m at fixed features, a batch of problems.

    h (M, a), y (M,), weights c (B, M) -> W_ov (B, V, a) and the largest first-order residual
    |W - P(W - grad log L)|. Each L is convex (the loss is convex in the logits, which are linear
    in W_ov), so a point of residual zero is a global minimum. The steps descend log L, which has
    the same minimisers: L itself is flat at large radii, where it is exponentially small.
    """
    W = previous = torch.zeros(len(weights), vocabulary, h.shape[1], dtype=F64)
    eta, momentum = 0.5 / float((h**2).sum(1).max()), torch.ones(len(weights), 1, 1, dtype=F64)
    label = y.expand(len(weights), -1)[..., None]

    def gradient(W):
        log_p = torch.log_softmax(h @ W.mT, -1)
        c = weights / -(weights * log_p.gather(-1, label).squeeze(-1)).sum(-1, keepdim=True)
        r = log_p.exp().scatter_add(-1, label, -torch.ones_like(label, dtype=F64))
        return (c[..., None] * r).mT @ h

    for _ in range(steps):
        ahead = W + (momentum - 1) / (momentum + 2) * (W - previous)
        previous, W = W, project(ahead - eta * gradient(ahead), radius)
        uphill = ((ahead - W) * (W - previous)).sum((-2, -1), keepdim=True) > 0
        momentum = torch.where(uphill, torch.ones_like(momentum), momentum + 1)
    return W, float((W - project(W - gradient(W), radius)).abs().max())


def bounded_benefit(radius, rhos, grid=8):
    """Theorem 1's quantities in the class |W_ov|_F <= radius, W_kq fixed to the identity.

    Fixed attention makes every objective convex and its minimiser unique, so both Deltas are
    numbers and not the outcome of a search. rhos (B,); lambda runs over a grid of the simplex.
    """
    problem, useful = conflict_problem()
    tokens, N, N_val = problem.tokens, problem.N, problem.N_val
    h = forward(Theta(torch.zeros(9, 9, dtype=F64), torch.eye(9, dtype=F64)), tokens).h
    simplex = torch.tensor([cut for cut in itertools.product(range(grid + 1), repeat=N)
                            if sum(cut) == grid], dtype=F64) / grid

    upper = torch.tensor([1 / N_val] * N_val + [0.0] * N, dtype=F64)
    mean = torch.tensor([0.0] * N_val + [1 / N] * N, dtype=F64)
    mixes = (1 - rhos)[:, None] * upper + rhos[:, None] * mean
    lower = torch.cat([torch.zeros(len(simplex), N_val, dtype=F64), simplex], 1)
    c = torch.cat([upper[None], mean[None], mixes, lower])
    W, residual = bounded_minimisers(h, tokens.y, c, radius, problem.V)

    losses = -torch.log_softmax(h @ W.mT, -1).gather(-1, tokens.y.expand(len(W), -1)[..., None])
    losses = losses.squeeze(-1)
    val, sft = losses @ upper, losses @ mean
    delta_val, delta_sft = float(sft[0] - sft[1]), float(val[1] - val[0])
    mixing, bds = val[2:2 + len(rhos)], val[2 + len(rhos):]
    best = simplex[bds.argmin()]
    return {"radius": radius, "residual": residual, "v": float(val[0]), "sft_min": float(sft[1]),
            "delta_val": delta_val, "delta_sft": delta_sft,
            "rho_c": threshold(delta_val, delta_sft), "mixing": mixing,
            "bds": float(bds.min()), "bds_weight_useful": float(best[useful].sum()),
            "crossing": float((rhos * (mixing <= bds.min())).max())}


def mixing_limit(rhos, N=4, N_val=2):
    """Validation loss of mixing as the bound grows: the two answers share a context's mass.

    p(trusted) = ((1-rho)/N') / ((1-rho)/N' + rho/N), for one contradiction per trusted row.
    """
    return -torch.log((1 - rhos) / N_val / ((1 - rhos) / N_val + rhos / N))


def benefit():
    """Theorem 1 on two policies (tight), on three (only sufficient), on bounded Transformers."""
    print("\nBenefit (Theorem 1): beyond rho_c direct mixing loses to BDS")
    val, losses = benefit_class()
    sft = losses.mean(1)
    delta_val, delta_sft, rho_c = deltas(val, sft)
    solutions = bds_solutions(val, losses)
    bds = float(val[solutions.any(0)].max())
    switch = switch_point(val, sft)
    val3, losses3 = benefit_class(with_compromise=True)
    rho_c3, switch3 = deltas(val3, losses3.mean(1))[2], switch_point(val3, losses3.mean(1))
    sweep = torch.linspace(0.01, 0.99, 99, dtype=F64)
    mixing = torch.stack([val[mixing_minimisers(val, sft, float(rho))].max() for rho in sweep])
    mixing3 = torch.stack([val3[mixing_minimisers(val3, losses3.mean(1), float(rho))].max()
                           for rho in sweep])
    print(f"  two policies    v* {float(val.min()):.4f}  Delta_val {delta_val:.4f}  "
          f"Delta_sft {delta_sft:.4f}  rho_c {rho_c:.6f}  mixing leaves S_val at {switch:.6f}")
    print(f"                  L_val: BDS {bds:.4f} at every rho; mixing {float(mixing[0]):.4f} "
          f"below rho_c, {float(mixing[-1]):.4f} above")
    finite = float(val[lower_level_minimisers(losses)[-1]].min())    # the support of all rows
    print(f"                  BDS with finite omega only: L_val {finite:.4f}, whatever the weights")
    print(f"  three policies  rho_c {rho_c3:.6f}  mixing leaves S_val at {switch3:.6f}: "
          "sufficient, not necessary")

    rhos = torch.tensor([0.001, 0.003, 0.01, *[0.02 * i for i in range(1, 50)], 0.99], dtype=F64)
    bounded = [bounded_benefit(radius, rhos) for radius in RADII]
    print("  Transformer, |W_ov|_F <= R: no softmax loss is zero, Assumption 1 fails at every R")
    print("      R      v*  min L_sft  Delta_val  Delta_sft  rho_c      L_val - v*: mixing at rho ="
          "         BDS, best")
    print("                                                          0.01     0.1     0.5     0.9"
          "     lambda")
    for row in bounded:
        excess = [float(row["mixing"][int((rhos - rho).abs().argmin())]) - row["v"]
                  for rho in (0.01, 0.1, 0.5, 0.9)]
        print(f"  {row['radius']:5.0f}  {row['v']:.4f}  {row['sft_min']:9.4f}  "
              f"{row['delta_val']:9.4f}  {row['delta_sft']:9.4f}  {row['rho_c']:.3f}    "
              + " ".join(f"{x:7.4f}" for x in excess) + f"    {row['bds'] - row['v']:7.4f}")
    print("  Seen: the gap to v* opens at every rho > 0, smoothly; rho_c is only where the proof "
          "starts to speak.\n  Both Deltas grow with R; the gap of mixing tends to a finite curve. "
          "The best lambda misses v* too, as\n  Assumption 1 fails, less as R grows; mixing is no "
          "worse than BDS up to rho = "
          + ", ".join(f"{row['crossing']:.2f} (R = {row['radius']:.0f})" for row in bounded
                      if row["crossing"] >= 0.01))
    numbers = {"delta_val": delta_val, "delta_sft": delta_sft, "rho_c": rho_c, "switch": switch,
               "rho_c_three": rho_c3, "switch_three": switch3, "bds": bds, "bds_finite": finite,
               "bounded": [{k: v for k, v in row.items() if k != "mixing"} for row in bounded]}
    return numbers, lambda plt: draw_benefit(plt, sweep, mixing, mixing3, numbers, rhos, bounded)


def draw_benefit(plt, sweep, mixing, mixing3, numbers, rhos, bounded):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    left.plot(sweep, mixing, label="direct mixing, two policies")
    left.plot(sweep, mixing3, "--", label="direct mixing, three policies")
    left.axhline(numbers["bds"], color="C2", label=r"BDS ($=v_*$)")
    left.axvline(numbers["rho_c"], color="k", lw=1, ls=":")
    left.text(numbers["rho_c"] - 0.02, 0.55, rf"$\rho_c={numbers['rho_c']:.3f}$", ha="right")
    left.set(title="finite class: threshold is tight", xlabel=r"$\rho$",
             ylabel=r"$\mathcal{L}_{\rm val}$")
    left.legend(loc="upper left", fontsize=8)
    left.set_ylim(0, 1.45)
    for i, row in enumerate(bounded):
        middle.plot(rhos, row["mixing"] - row["v"], color=f"C{i}",
                    label=rf"$R={row['radius']:.0f}$")
        middle.plot([row["rho_c"]], [1e-4], "^", color=f"C{i}", clip_on=False)
    middle.plot(rhos, mixing_limit(rhos), "k--", lw=1, label=r"$R\to\infty$")
    middle.set(title=r"$\|W_{ov}\|_F\leq R$: mixing misses $v_*$ at every $\rho>0$",
               xlabel=r"$\rho$   ($\blacktriangle$: $\rho_c(R)$)",
               ylabel=r"$\mathcal{L}_{\rm val}(\tilde\theta)-v_*$", yscale="log", xscale="log")
    middle.set_ylim(1e-4, 60)
    middle.legend(fontsize=8)
    radii = [row["radius"] for row in bounded]
    right.plot(radii, [row["delta_val"] for row in bounded], "o-", label=r"$\Delta_{\rm val}(R)$")
    right.plot(radii, [row["delta_sft"] for row in bounded], "s-", label=r"$\Delta_{\rm sft}(R)$")
    right.plot(radii, [row["bds"] - row["v"] for row in bounded], "^-",
               label=r"BDS: $\mathcal{L}_{\rm val}(\theta^*)-v_*$")
    half = int((rhos - 0.5).abs().argmin())
    right.plot(radii, [float(row["mixing"][half]) - row["v"] for row in bounded], "d-",
               label=r"mixing, $\rho=0.5$: $\mathcal{L}_{\rm val}(\tilde\theta)-v_*$")
    right.set(title=r"both $\Delta$ grow with the bound", xlabel=r"$R$", xscale="log", yscale="log")
    right.set_xticks(radii, [f"{radius:.0f}" for radius in radii])
    right.minorticks_off()
    right.legend(fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------
# 2. Coverage (Proposition)
# ---------------------------------------------------------------------------------------------

def everything_useful():
    """Assumptions 1 and 2 hold, yet U = [N]: three policies, two rows -> val (3,), losses (3, 2).

    The first two policies are validation-optimal and each fits one row; the third fits both rows
    and is not. So |U| < N has to be assumed for the mixing half of the Proposition.
    """
    right = torch.tensor([[1.0, 0.3, 0.9], [0.4, 1.0, 0.9], [1.0, 1.0, 0.5]], dtype=F64)
    policies = torch.stack([right, 1.0 - right], -1)
    return policy_losses(policies, [(2, 0)]).mean(1), policy_losses(policies, [(0, 0), (1, 0)])


def coverage_runs(steps=4000, gamma=4.0, eta=1.0, alpha=4.0):
    """PBGD of the main text, omega trained (BDS) and frozen (mixing), on a Transformer.

    Returns useful (N,) and, for "bds" and "mixing", rows of (k, weight on U, L_val, L_lower(U)).
    """
    problem, useful = conflict_problem(neutral=True)
    generator = torch.Generator().manual_seed(0)
    theta = Theta(0.01 * torch.randn(9, 9, dtype=F64, generator=generator), torch.eye(9, dtype=F64))
    runs = {}
    for name, rate in (("bds", alpha), ("mixing", 0.0)):
        runs[name] = []

        def watch(step, rows=runs[name]):
            upper, lower = row_losses(step.state.losses, problem)
            rows.append((step.k, float(step.sigma[useful].sum()), float(upper.mean()),
                         float(lower[useful].mean())))

        pbgd(problem, gamma, theta, eta, steps, alpha=rate, sequential=True, watch=watch)
    return useful, {name: torch.tensor(rows, dtype=F64) for name, rows in runs.items()}


def coverage():
    """The Proposition: by enumeration on a finite class, and as it happens in training."""
    print("\nCoverage (Proposition): weight on the useful set U")
    _, val, losses = separable_class()
    useful = useful_set(val, losses)
    solutions = bds_solutions(val, losses).any(1)
    masks = supports(losses.shape[1])
    on_useful = torch.stack([support_weights(mask)[useful].sum() for mask in masks])[solutions]
    print(f"  27 policies: U = rows {useful.nonzero()[:, 0].tolist()}, |U| = {int(useful.sum())} "
          f"< N = 3; {int(solutions.sum())} of {len(masks)} supports of lambda solve BDS,\n    "
          f"weight on U {float(on_useful.min()):.3f} in each; mixing |U|/N = "
          f"{float(useful.double().mean()):.3f}")
    all_useful = useful_set(*everything_useful())
    print(f"  |U| < N is an assumption of its own: here Assumptions 1 and 2 hold and |U| = "
          f"{int(all_useful.sum())} = N")
    useful, runs = coverage_runs()
    share = float(useful.double().mean())
    print(f"  Transformer, |U| = {int(useful.sum())} < N = {len(useful)}, gamma 4, uniform start")
    print("       k   BDS: sum_U sigma   L_val    mixing: sum_U 1/N   L_val")
    for k in (0, 10, 100, 1000, len(runs["bds"]) - 1):
        b, m = runs["bds"][k], runs["mixing"][k]
        print(f"  {k:6d}   {float(b[1]):16.5f}  {float(b[2]):.5f}   {float(m[1]):16.5f}  "
              f"{float(m[2]):.5f}")
    tail = runs["bds"][[len(runs["bds"]) // 4, -1]]
    slope = float(torch.log((1 - tail[1, 1]) / (1 - tail[0, 1]))
                  / torch.log(tail[1, 0] / tail[0, 0]))
    print(f"  1 - sum_U sigma falls like k^{slope:.2f}: no finite omega reaches one")
    numbers = {"share": share, "bds": float(runs["bds"][-1, 1]), "slope": slope,
               "mixing": float(runs["mixing"][-1, 1]), "bds_val": float(runs["bds"][-1, 2]),
               "mixing_val": float(runs["mixing"][-1, 2]), "all_useful": int(all_useful.sum()),
               "enumerated_min": float(on_useful.min())}
    return numbers, lambda plt: draw_coverage(plt, runs, share, slope)


def draw_coverage(plt, runs, share, slope):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    k, bds, mixing = runs["bds"][1:, 0], runs["bds"][1:], runs["mixing"][1:]
    left.semilogx(k, bds[:, 1], label="BDS")
    left.semilogx(k, mixing[:, 1], "--", label="direct mixing")
    left.axhline(1, color="k", lw=0.5)
    left.text(2, share - 0.05, rf"$|\mathcal{{U}}|/N={share:.3f}$", fontsize=9)
    left.set(title="weight on the useful set", xlabel=r"step $k$",
             ylabel=r"$\sum_{i\in\mathcal{U}}\sigma_i(\omega^k)$")
    left.set_ylim(0.4, 1.03)
    left.legend(loc="center right", fontsize=9)
    middle.loglog(k, 1 - bds[:, 1], label="BDS")
    middle.loglog(k, 1 - mixing[:, 1], "--", label="direct mixing")
    middle.set(title=rf"weight on useless rows, about $k^{{{slope:.2f}}}$", xlabel=r"step $k$",
               ylabel=r"$1-\sum_{i\in\mathcal{U}}\sigma_i(\omega^k)$")
    middle.legend(fontsize=9)
    right.loglog(k, bds[:, 2], label="BDS")
    right.loglog(k, mixing[:, 2], "--", label="direct mixing")
    right.set(title="validation loss", xlabel=r"step $k$",
              ylabel=r"$\mathcal{L}_{\rm val}(\theta^k)$")
    right.legend(fontsize=9)
    return figure


# ---------------------------------------------------------------------------------------------
# 3. Convergence (Theorem 3, Algorithm PBGD)
# ---------------------------------------------------------------------------------------------

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
    """S_H(k_0): where the drift of H has used half of sigma              (complete Theorem 3)"""
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


def flat(gradient_or_z):
    return torch.cat([part.reshape(-1) for part in gradient_or_z])


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


Trace = namedtuple("Trace", "k loss R sigma_min mu_paper mu_tokens mu_seen L S square ratio")


def hypotheses(start, epsilon, gamma, N, V, M, B_X, B_q):
    """What the complete theorem asks of the start, and what is left of it; `start` a Trace row.

    S(k_0) is empty, so its constants take stand-ins, the most favourable value each: eps_0 is
    evaluated at the largest S_eps that the definition allows, S_H; the bound on the hitting time at
    S_eps = 0, that is with mu and L of the start itself.
    """
    sigma = start.sigma_min / math.sqrt(1 + gamma / N)
    left, right = initial_condition(start.loss / (1 + gamma / N), sigma, start.R, B_X, B_q, V)
    S_H = certified_radius(sigma, start.R, B_X, B_q)
    mu = (1 + gamma / N) * sigma**2 / 4 * token_pl(B_X * start.R, V)
    return {"B_X": B_X, "B_q": B_q, "V": V, "M": M, "sigma0": sigma, "left": left, "right": right,
            "ratio": left / right, "floor": condition_floor(V, M), "S_H": S_H,
            "epsilon_0": smallest_epsilon(loss_floor(S_H, start.R, B_X, V), N),
            "wished": start.L / mu * math.log(start.loss / epsilon)}


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


def convergence_run(epsilon, limit=60000, every=50):
    """One run: gamma = epsilon^(-1/2), one fixed eta, from k_0 = 0 to L_gamma <= epsilon.

    eta = 1/L at the radius TARGETS[epsilon], a guess that the run has to justify: `eta_ok` says
    whether eta <= 1/L_k at every step. PL and descent are checked at every step, smoothness and
    drift at every `every`-th. Returns numbers, the trace (one row a step) and rows of (k, measured
    gradient variation, L_k, Taylor slack).
    """
    problem, gamma = convergence_problem(), epsilon ** -0.5
    N, V, M = problem.N, problem.V, len(problem.tokens.y)
    B_X, B_q = geometry(problem.tokens)
    eta = 1 / smoothness_constant(TARGETS[epsilon], B_X, B_q, gamma, N, V)
    theta0, trace, smooth = convergence_start(), [], []
    R0 = float(torch.linalg.matrix_norm(theta0.W_ov, 2))
    scale = math.sqrt(1 + gamma / N)
    drift, first, S = [], [], 0.0

    def watch(step):
        nonlocal S
        R = float(torch.linalg.matrix_norm(step.theta.W_ov, 2))
        H = feature_matrix(step.c, step.state.h)
        sigma_min = float(torch.linalg.svdvals(H)[-1])
        square = sum(float((g * g).sum()) for g in step.gradient)
        r = residuals(step.state.logits, problem.tokens.y)
        mu_tokens = sigma_min**2 * float(((r * r).sum(1) / (2 * step.state.losses)).min())
        L = smoothness_constant(R, B_X, B_q, gamma, N, V)
        sides = initial_condition(step.loss / scale**2, sigma_min / scale, R, B_X, B_q, V)
        trace.append(Trace(step.k, step.loss, R, sigma_min, pl_constant(sigma_min, R, B_X, V),
                           mu_tokens, square / (2 * step.loss), L, S, square, sides[0] / sides[1]))
        if not first:
            first.append(H)
        if step.k % every == 0:
            quotient, taylor = smoothness_quotients(step, problem, gamma, eta)
            smooth.append((step.k, quotient, L, taylor(L)))
            bounds = drift_bounds(S, R0, B_X, B_q)
            moved = (torch.linalg.matrix_norm(step.theta.W_ov - theta0.W_ov, 2),
                     step.omega.norm(), torch.linalg.matrix_norm(step.theta.W_kq - theta0.W_kq, 2),
                     torch.linalg.matrix_norm(H - first[0], 2) / scale)
            if S > 0:
                drift.append([float(a) / b for a, b in zip(moved, bounds, strict=True)])
        S += eta * step.loss

    last = pbgd(problem, gamma, theta0, eta, limit, until=epsilon, watch=watch)
    columns = Trace(*torch.tensor(trace, dtype=F64).unbind(1))
    smooth = torch.tensor(smooth, dtype=F64)
    upper, lower = row_losses(last.state.losses, problem)
    told = hypotheses(trace[0], epsilon, gamma, N, V, M, B_X, B_q)
    outside = (columns.S - told["S_H"] > 0).nonzero()
    numbers = {
        "epsilon": epsilon, "gamma": gamma, "eta": eta, "hit": last.loss <= epsilon,
        "steps": last.k, "start": trace[0].loss, "val": float(upper.mean()),
        "lower": float(last.sigma @ lower) / N, "sigma_max": float(last.sigma.max()),
        "smooth_slack": float((smooth[:, 2] / smooth[:, 1]).min()),
        "taylor_slack": float(smooth[:, 3].min()),
        "drift_ratio": [max(ratios) for ratios in zip(*drift, strict=True)],
        "exit": int(outside[0]) if len(outside) else None,
        **local_checks(columns, eta), **told}
    return numbers, columns, smooth


def separating_losses(problem, theta, t=30.0):
    """Every token loss at W_ov = t E_y h^+, where U = t e_y: log(1 + (V-1) exp(-t)) -> (M,).

    Full column rank of the features lets one W_ov fit both sets: separable as t grows.
    """
    h = forward(theta, problem.tokens).h
    target = torch.nn.functional.one_hot(problem.tokens.y, problem.V).to(F64).T
    return forward(Theta(t * target @ torch.linalg.pinv(h.T), theta.W_kq), problem.tokens).losses


def convergence():
    """Theorem 3: hitting times, every local inequality, every hypothesis."""
    print("\nConvergence (Theorem 3): PBGD with full gradients, gamma = epsilon^(-1/2)")
    results = [convergence_run(epsilon) for epsilon in TARGETS]
    runs = [numbers for numbers, _, _ in results]
    one, problem = runs[0], convergence_problem()
    print("  Observed, one run per epsilon, one fixed eta each")
    print("   epsilon  gamma      eta  eta*max L_k  L_gamma(0)    tau  min sigma_min(H)  max R  "
          "L_val  (1/N) sum sigma L   max sigma")
    for r in runs:
        print(f"  {r['epsilon']:8.3f}  {r['gamma']:5.2f}  {r['eta']:.5f}  {r['eta_L_max']:11.3f}  "
              f"{r['start']:10.3f}  " + ("" if r["hit"] else ">") + f"{r['steps']:5d}  "
              f"{r['sigma_min']:16.4f}  {r['R']:5.2f}  {r['val']:5.3f}  "
              f"{r['lower']:.4f} <= {r['epsilon']**1.5:.4f}  {r['sigma_max']:9.3f}")
    slope = (math.log(runs[-1]["steps"] / runs[1]["steps"])
             / math.log(runs[-1]["epsilon"] / runs[1]["epsilon"]))
    print(f"  tau grows like epsilon^{slope:.2f}. On the way omega moves onto the row that is "
          "easiest to fit,\n  so sigma_min(H) shrinks with the smallest weight.")
    print("  True at every step checked, in all runs (the tightest value; 1 and 0 are the limits)")
    for text, key, better in (
            ("|grad|^2 / (2 mu_PL L_gamma)                      >= 1", "pl_slack", min),
            ("  with mu measured per token, exp(-sqrt2 B_X R) not used", "token_pl_slack", min),
            ("L_k / measured gradient variation                 >= 1", "smooth_slack", min),
            ("Taylor bound - L_gamma(z^{k+1})                   >= 0", "taylor_slack", min),
            ("(1 - eta mu) L_gamma^k - L_gamma^{k+1}            >= 0", "descent_slack", min),
            ("movement / drift bound (W_ov, omega, W_kq, H)     <= 1", "drift_ratio", max)):
        values = [r[key] if isinstance(r[key], float) else better(r[key]) for r in runs]
        print(f"    {text}  {better(values):.3e}")
    fit = float(separating_losses(problem, convergence_start()).max())
    print("  Hypotheses of the complete theorem, k_0 = 0")
    print(f"    holds   both sets separable: one W_ov has every token loss <= {fit:.1e} "
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
    print("  Share of the log-decrease certified by prod (1 - eta mu_k), mu_k along the path")
    for r in runs:
        print(f"    epsilon {r['epsilon']:.3f}: mu_PL of the paper {r['share_paper']:.1e}, mu "
              f"measured per token {r['share_tokens']:.1e}, measured |grad|^2/(2 L_gamma) "
              f"{r['share_seen']:.2f}")
    print("    and the path-length argument itself, for these V and M: at most "
          f"{certifiable_share(one['V'], one['M']):.1e} of the loss")
    return {"slope": slope, "separating": fit, "runs": runs}, \
        lambda plt: draw_convergence(plt, results)


def draw_convergence(plt, results):
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(12, 8.4))
    for i, (r, trace, _) in enumerate(results):
        keep = torch.unique(torch.logspace(0, math.log10(max(r["steps"], 2)), 200).long() - 1)
        label = rf"$\epsilon={r['epsilon']:g}$"
        a.loglog(trace.k[keep] + 1, trace.loss[keep], color=f"C{i}", label=label)
        a.plot([r["steps"]], [r["epsilon"]], "o", color=f"C{i}")
        d.loglog(trace.k[keep] + 1, trace.ratio[keep], color=f"C{i}", label=label)
    a.set(title=r"one run per $\epsilon$, $\gamma=\epsilon^{-1/2}$; dots: $\tau_\epsilon$",
          xlabel=r"step $k$ (from 1)", ylabel=r"$\mathcal{L}_\gamma(\omega^k,\theta^k)$")
    a.legend(fontsize=9)
    a.set_yticks([0.125, 0.25, 0.5, 1, 2, 4], ["0.125", "0.25", "0.5", "1", "2", "4"])
    a.minorticks_off()
    epsilons = [r["epsilon"] for r, _, _ in results]
    b.loglog(epsilons, [r["steps"] for r, _, _ in results], "o-", label=r"observed $\tau_\epsilon$")
    b.loglog(epsilons, [r["wished"] for r, _, _ in results], "s--",
             label=r"$\frac{L}{\mu}\log(\mathcal{L}_\gamma/\epsilon)$ at $S_\epsilon=0$"
                   "\n(the theorem's bound, were it applicable)")
    b.invert_xaxis()
    b.set(title="hitting time", xlabel=r"$\epsilon$", ylabel="steps")
    b.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    b.minorticks_off()
    b.legend(fontsize=9)
    r, trace, smooth = results[-1]
    keep = torch.unique(torch.logspace(0, math.log10(r["steps"]), 200).long() - 1)
    k = trace.k[keep] + 1
    c.loglog(k, trace.L[keep], "C3", label=r"$L_k$")
    c.loglog(smooth[:, 0] + 1, smooth[:, 1], "C3--", label="measured gradient variation")
    c.loglog(k, trace.mu_seen[keep], "C0--",
             label=r"measured $\|\nabla\mathcal{L}_\gamma\|^2/2\mathcal{L}_\gamma$")
    c.loglog(k, trace.mu_tokens[keep], "C0:",
             label=r"$\sigma_{\min}^2(H^k)\,\min\|\nabla g\|^2/2g$")
    c.loglog(k, trace.mu_paper[keep], "C0", label=r"$\mu_{\rm PL}$")
    c.loglog(k, trace.sigma_min[keep], "C2", label=r"$\sigma_{\min}(H^k)$")
    c.set(title=rf"the constants hold, $\epsilon={r['epsilon']:g}$: "
                r"$\mu_{\rm PL}\leq$ measured, measured $\leq L_k$", xlabel=r"step $k$ (from 1)")
    c.set_ylim(1e-15, 1e3)
    c.legend(fontsize=9, ncol=2, loc="lower left")
    d.axhline(1, color="k")
    d.axhline(r["floor"], color="k", ls="--")
    d.text(1.2, r["floor"] * 0.3, r"least over all instances: $16\,e\,V(N{+}N^\prime)D\,\log V$",
           fontsize=9)
    d.text(1.2, 1.6, "the condition asks for at most 1", fontsize=9)
    d.set(title=r"condition on the start: left side over $M_H(k_0)$, at every $k_0=k$",
          xlabel=r"$k$ (from 1)")
    d.set_ylim(0.3, None)
    d.legend(fontsize=9, loc="upper left")
    return figure


# ---------------------------------------------------------------------------------------------
# 4. Equivalence of BMO and BDS (Theorem 4)
# ---------------------------------------------------------------------------------------------

def separable_class():
    """All 27 policies that answer each of three rows with probability 1, 1/2 or 0.

    Validation contradicts row 1 (p is the probability of the row's answer, 1 - p of the trusted
    one). Of the nine policies of S_val only those that fit another row are weakly Pareto optimal.
    Returns p (27, 3), val (27,), losses (27, 3).
    """
    p = torch.tensor(list(itertools.product((1.0, 0.5, 0.0), repeat=3)), dtype=F64)
    policies = torch.stack([p, 1.0 - p], -1)
    return p, policy_losses(policies, [(1, 1)])[:, 0], \
        policy_losses(policies, [(0, 0), (1, 0), (2, 0)])


def front_class(concave, count=41):
    """A curve of policies on a front of two SFT losses, none zero -> t, val, losses (count, 2).

    concave: the front bulges away from the origin and only its ends minimise a weighted sum.
    Validation prefers t = 0.6.
    """
    t = torch.linspace(0, 1, count, dtype=F64)
    sin, cos = torch.sin(math.pi / 2 * t), torch.cos(math.pi / 2 * t)
    losses = 0.2 + (torch.stack([sin, cos], 1) if concave else 1 - torch.stack([cos, sin], 1))
    right = torch.cat([torch.exp(-losses), 0.3 + 0.6 * torch.exp(-((t - 0.6) / 0.2) ** 2)[:, None]],
                      1)
    policies = torch.stack([right, 1.0 - right], -1)
    return t, policy_losses(policies, [(2, 0)])[:, 0], policy_losses(policies, [(0, 0), (1, 0)])


def solve(val, feasible):
    """Global solutions of min val over a feasible mask -> mask."""
    return feasible & (val <= val[feasible].min() + 1e-12)


def equivalence():
    """Theorem 4 by enumeration, and where it ends."""
    print("\nEquivalence (Theorem 4): BMO = BDS under Assumption 1")
    p, val, losses = separable_class()
    feasible = lower_level_minimisers(losses)
    union, pareto = feasible.any(0), weakly_pareto(losses)
    bmo, bds = solve(val, pareto), bds_solutions(val, losses).any(0)
    finite = feasible[-1]                                             # every row carries weight
    print(f"  separable: {len(p)} policies, WP {int(pareto.sum())}, union of S(lambda) "
          f"{int(union.sum())}, same: {bool((union == pareto).all())}; S_val has "
          f"{int(argmin_set(val).sum())}, BMO and BDS both pick {int(bmo.sum())}, same: "
          f"{bool((bmo == bds).all())}")
    print(f"    without omega_i = -infinity the union is {int(finite.sum())} policy, S_sft: L_val "
          f"{float(val[finite].min()):.3f} instead of {abs(float(val[bds].min())):.3f}")
    fronts = {}
    for name, concave in (("convex", False), ("non-convex", True)):
        t, val2, losses2 = front_class(concave)
        fronts[name] = front = (t, val2, losses2, weakly_pareto(losses2), scalarised(losses2))
        picks = [solve(val2, mask) for mask in front[3:]]
        print(f"  not separable, {name} front: WP {int(front[3].sum())}, union "
              f"{int(front[4].sum())} of {len(t)}; BMO t = {float(t[picks[0]][0]):.3f}, L_val "
              f"{float(val2[picks[0]][0]):.4f}; BDS t = {float(t[picks[1]][0]):.3f}, L_val "
              f"{float(val2[picks[1]][0]):.4f}")
    numbers = {"pareto": int(pareto.sum()), "union": int(union.sum()), "bmo": int(bmo.sum()),
               "bds": int(bds.sum()), "same": bool((bmo == bds).all() and (union == pareto).all())}
    for name, (_, val2, _, wp, union2) in fronts.items():
        numbers[name] = {"pareto": int(wp.sum()), "union": int(union2.sum()),
                         "bmo_val": float(val2[wp].min()), "bds_val": float(val2[union2].min())}
    return numbers, lambda plt: draw_equivalence(plt, p, val, pareto, union, bmo, bds, fronts)


def draw_equivalence(plt, p, val, pareto, union, bmo, bds, fronts):
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), width_ratios=(1.5, 1, 1))
    left = axes[0]
    best = val <= val.min() + 1e-12
    names = [r"$\mathcal{L}_1=0$", r"$\mathcal{L}_2=0$", r"$\mathcal{L}_3=0$",
             r"WP$(\mathcal{L})$", r"$\bigcup_\lambda\mathcal{S}(\lambda)$",
             r"$\mathcal{S}_{\rm val}$", "BMO", "BDS"]
    table = torch.cat([(p == 1).T, torch.stack([pareto, union, best, bmo, bds])]).double()
    left.imshow(table, aspect="auto", cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest")
    left.set_yticks(range(len(names)), names)
    left.set_xticks(torch.arange(0, 27, 2).tolist())
    left.set_xticks([i - 0.5 for i in range(28)], minor=True)
    left.set_yticks([i - 0.5 for i in range(9)], minor=True)
    left.grid(which="minor", color="white", lw=1)
    left.tick_params(which="minor", length=0)
    left.set(title=r"separable: 27 policies, $\pi(y^i|x^i)\in\{1,\frac{1}{2},0\}$",
             xlabel="policy (dark: belongs)")
    for axis, (name, (_, val2, losses2, wp, union2)) in zip(axes[1:], fronts.items(), strict=True):
        points = axis.scatter(*losses2.T, c=val2, cmap="viridis_r", s=18, zorder=2)
        axis.scatter(*losses2[union2].T, s=70, facecolors="none", edgecolors="C3", lw=0.9,
                     label=r"$\bigcup_\lambda\mathcal{S}(\lambda)$")
        axis.plot(*losses2[solve(val2, wp)][0], "*", ms=16, color="C1", mec="k", label="BMO")
        axis.plot(*losses2[solve(val2, union2)][0], "X", ms=9, color="C0", mec="k", label="BDS")
        axis.set(title=f"not separable, {name}: " + ("same" if name == "convex" else "they part"),
                 xlabel=r"$\mathcal{L}_1$", ylabel=r"$\mathcal{L}_2$")
        axis.legend(fontsize=9, loc="upper right" if name == "convex" else "lower left")
        figure.colorbar(points, ax=axis, label=r"$\mathcal{L}_{\rm val}$")
    return figure


# ---------------------------------------------------------------------------------------------
# 5. Weights (Lemma implicit_BMO, Corollary importance_ratio, LSE bound, convexity)
# ---------------------------------------------------------------------------------------------

def answers_problem():
    """Five answers of three tokens to one question -> tokens (15,), a start theta."""
    rows = [[0, 1, *answer] for answer in
            ((2, 3, 4), (2, 4, 3), (5, 3, 2), (4, 4, 5), (3, 5, 2))]
    generator = torch.Generator().manual_seed(3)
    theta = Theta(torch.randn(6, 6, dtype=F64, generator=generator),
                  torch.randn(6, 6, dtype=F64, generator=generator))
    return make_tokens(rows, 3, torch.eye(6, dtype=F64)), theta


def sequence_losses(theta, tokens, length):
    """L_m = -log pi(y_m | x): the *sum* over an answer's tokens -> (M,)         (Eq. SFT_def)"""
    return forward(theta, tokens).losses.reshape(-1, length).sum(1)


def merit_gradient(theta, tokens, length, tau):
    """sum_m lambda_m grad L_m with lambda = softmax(-tau L), by the sample gradient formulas."""
    state, r, s = sample_gradients(theta, tokens)
    lam = response_weights(-state.losses.reshape(-1, length).sum(1), tau)
    c = lam.repeat_interleave(length)[:, None]
    return Theta((c * r).T @ state.h, (c * s).T @ tokens.X[:, :, -1])


def merit_autograd(theta, tokens, length, tau, scale=1.0):
    """scale * grad of the merit function u(theta) = -LSE(-L; tau), by autograd."""
    theta = Theta(*(w.clone().requires_grad_() for w in theta))
    u = scale * lse_merit(sequence_losses(theta, tokens, length), tau)
    return Theta(*torch.autograd.grad(u, theta))


def sup_min(losses):
    """u(theta) = sup_theta' min_m (L_m(theta) - L_m(theta')), finite class, (K, M) -> (K,)."""
    return (losses[:, None, :] - losses[None, :, :]).amin(-1).amax(1)


def inf_lse(losses, tau):
    """inf_theta' LSE(L(theta') - L(theta); tau) over a finite class, (K, M) -> (K,)."""
    return (-lse_merit(losses[:, None, :] - losses[None, :, :], tau)).amin(1)


def proportionality(r, lam):
    """The spread of r_g / lambda_g, largest over smallest minus one: zero iff proportional."""
    quotient = r / lam
    return float(quotient.max() / quotient.min() - 1)


def logit_hessian(logits, y):
    """Hessian of -sum_d log softmax(z_d)_{y_d} in vec(z): blockdiag J(softmax(z_d)).

    logits (D, V), y (D,) -> (D V, D V), by autograd.                    (Lemma convexity)
    """
    def loss(z):
        return -torch.log_softmax(z.reshape(logits.shape), -1).gather(-1, y[:, None]).sum()

    return torch.func.hessian(loss)(logits.reshape(-1))


def weights():
    """The response weights: closed form, bounds, the ratio and its limit, convexity."""
    print("\nWeights (Lemma implicit_BMO, Corollary importance_ratio, LSE bound, convexity)")
    tokens, theta = answers_problem()
    losses = sequence_losses(theta, tokens, 3)
    print("     tau  |grad u - sum lambda grad L|  with the paper's extra 1/tau  "
          "  min L - log(M)/tau <= u <= min L")
    taus, gaps = (0.25, 1.0, 4.0, 16.0), {}
    for tau in taus:
        formula = flat(merit_gradient(theta, tokens, 3, tau))
        good = float((formula - flat(merit_autograd(theta, tokens, 3, tau))).abs().max())
        extra = float((formula - flat(merit_autograd(theta, tokens, 3, tau, 1 / tau))).abs().max())
        u, low, high = (float(x) for x in (lse_merit(losses, tau),
                                           losses.min() - math.log(5) / tau, losses.min()))
        gaps[tau] = (good, extra, u, low, high)
        print(f"  {tau:6.2f}  {good:28.1e}  {extra:27.1e}    {low:.4f} <= {u:.4f} <= {high:.4f}")
    lam = response_weights(-losses)
    equal = importance_ratio(-losses, torch.full_like(losses, -5.0), None)
    old = torch.tensor([-3.0, -7.0, -5.0, -4.0, -6.0], dtype=F64)
    unequal = importance_ratio(-losses, old, None)
    print(f"  r / lambda, spread: equal old log-probs {proportionality(equal, lam):.1e}, unequal "
          f"{proportionality(unequal, lam):.1f}; loss averaged over D instead of summed "
          f"{proportionality(equal, response_weights(-losses / 3)):.1f}")
    _, finite = benefit_class(with_compromise=True)
    print("  finite separable class: |sup_theta' min_m (L_m - L_m') - min_m L_m| "
          f"{float((sup_min(finite) - finite.amin(1)).abs().max()):.1e}, |inf_theta' LSE(L' - L)"
          f" - LSE(-L)| {float((inf_lse(finite, 1.0) + lse_merit(finite)).abs().max()):.1e}")
    logits = forward(theta, tokens).logits[:3]
    hessian = logit_hessian(logits, tokens.y[:3])
    blocks = softmax_jacobian(torch.softmax(logits, -1))
    block_error = float((hessian - torch.block_diag(*blocks)).abs().max())
    eigenvalues = torch.linalg.eigvalsh(hessian)
    print(f"  Hessian in the logits: |H - blockdiag J(softmax(z_d))| {block_error:.1e}, smallest "
          f"eigenvalue {float(eigenvalues[0]):.1e} (one zero per token), largest "
          f"{float(eigenvalues[-1]):.3f}")
    numbers = {"gradient_error": max(g[0] for g in gaps.values()),
               "extra_tau": {tau: gaps[tau][1] for tau in taus},
               "equal": proportionality(equal, lam), "unequal": proportionality(unequal, lam),
               "block_error": block_error, "smallest": float(eigenvalues[0])}
    return numbers, lambda plt: draw_weights(plt, losses, lam, equal, unequal, hessian, eigenvalues)


def draw_weights(plt, losses, lam, equal, unequal, hessian, eigenvalues):
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.9))
    tau = torch.logspace(-1, 2, 100, dtype=F64)
    u = torch.stack([lse_merit(losses, float(t)) for t in tau])
    axes[0].fill_between(tau, losses.min() - math.log(len(losses)) / tau, losses.min(), alpha=0.2,
                         label=r"$[\min\mathcal{L}-\log(M)/\tau,\ \min\mathcal{L}]$")
    axes[0].semilogx(tau, u, label=r"$-\mathrm{LSE}(-\mathcal{L};\tau)$")
    axes[0].set(title="merit function and its bounds", xlabel=r"$\tau$", ylabel="nats")
    axes[0].set_ylim(float(losses.min()) - 6, float(losses.min()) + 1)
    axes[0].legend(fontsize=9, loc="lower right")
    g = torch.arange(1, len(lam) + 1)
    for shift, (values, label) in enumerate((
            (lam, r"$\lambda_g$"), (equal / equal.sum(), r"$r^g/\sum r$, equal old log-probs"),
            (unequal / unequal.sum(), r"$r^g/\sum r$, unequal"))):
        axes[1].bar(g + 0.27 * (shift - 1), values, 0.25, label=label)
    axes[1].set(title="importance ratio and implicit weight", xlabel=r"answer $g$")
    axes[1].set_ylim(0, 1.25 * float(max(lam.max(), (unequal / unequal.sum()).max())))
    axes[1].legend(fontsize=8)
    image = axes[2].imshow(hessian, cmap="RdBu_r", vmin=-0.25, vmax=0.25, interpolation="nearest")
    axes[2].set(title=r"$\partial^2\mathcal{L}_{\rm SFT}/\partial\mathrm{vec}(z)^2$, $D=3$, $V=6$")
    axes[2].set_xticks(range(0, 18, 6))
    axes[2].set_yticks(range(0, 18, 6))
    figure.colorbar(image, ax=axes[2], shrink=0.8)
    axes[3].plot(range(1, len(eigenvalues) + 1), eigenvalues, "o")
    axes[3].axhline(0, color="k", lw=0.5)
    axes[3].set(title=r"its eigenvalues: none below zero", xlabel="index")
    return figure


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------

PARTS = {"benefit": benefit, "coverage": coverage, "convergence": convergence,
         "equivalence": equivalence, "weights": weights}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (python theory.py --help)")


def save(draw, path):
    """Draw and write a PNG without dates or versions: the same numbers give the same file."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image
    figure = draw(plt)
    for axis in figure.axes:
        axis.title.set_fontsize(10)
    figure.tight_layout()
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100, metadata={"Software": None})
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)
    write_atomic(path, small.getvalue())
    print(f"  figure: {path}")


def main(argv=None):
    parser = Parser(description="The paper's statements, checked numerically (see the docstring).")
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path("results/theory"),
                        help="folder of the figures (default: results/theory)")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out}: is a file; name a folder for the figures")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for each other
    result = {}
    for name in PARTS if args.part == "all" else (args.part,):
        result[name], draw = PARTS[name]()
        save(draw, args.out / f"{name}.png")
    print("RESULT " + json.dumps(result))
    return result


if __name__ == "__main__":
    run(main)
