"""The one-layer softmax Transformer, its gradients by hand, and Algorithm PBGD.

theta = (W_ov, W_kq) (Eq. transformer): for a prefix X of token embeddings with last column x,
U = W_ov h, h = X softmax(X^T W_kq x), and the next token has probabilities softmax(U). Everything
is float64 on the CPU.
"""

import math
from collections import namedtuple

import torch

from selector import Selector

F64 = torch.float64

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
    attention = torch.softmax(scores.masked_fill(~valid, -math.inf), -1)
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


def level_losses(token_losses, problem):
    """Mean over the D answer tokens -> validation (N',), lower level l_seq (N,)."""
    rows = token_losses.reshape(-1, problem.D).mean(1)
    return rows[:problem.N_val], rows[problem.N_val:]


def penalty_gradient(sigma, theta, problem, gamma):
    """L_gamma, its gradient, the token weights c and the forward pass.   (Lemma penalty gradient)

    grad_{W_ov} = sum_m c_m r_m h_m^T, grad_{W_kq} = sum_m c_m s_m x_m^T,
    grad_omega = (gamma/N) J(omega) l_seq, J l = sigma * (l - sigma.l).
    sigma (N,) = softmax(omega), which is all that L_gamma sees of omega.
    """
    state, r, s = sample_gradients(theta, problem.tokens)
    c = coefficients(sigma, gamma, problem)
    lower = level_losses(state.losses, problem)[1]
    omega = gamma / problem.N * sigma * (lower - sigma @ lower)
    W_ov = (c[:, None] * r).T @ state.h
    W_kq = (c[:, None] * s).T @ problem.tokens.X[:, :, -1]
    return c @ state.losses, Gradient(omega, W_ov, W_kq), c, state


# k, L_gamma(z^k), its Gradient, c (M,), Forward, sigma (N,), Theta, omega (N,): one PBGD iterate.
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
        step = Step(k, float(loss), gradient, c, state, sigma, theta, selector.logits.clone())
        if watch:
            watch(step)
        if step.loss <= until or k == steps:
            return step
        theta = Theta(theta.W_ov - eta * gradient.W_ov, theta.W_kq - eta * gradient.W_kq)
        seen = forward(theta, problem.tokens).losses if sequential else state.losses
        selector.step(rows, level_losses(seen, problem)[1], gamma / problem.N)


def flat(gradient_or_z):
    """The blocks of a gradient or of z = (omega, theta) as one vector."""
    return torch.cat([part.reshape(-1) for part in gradient_or_z])
