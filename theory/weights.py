"""Response weights: Lemma implicit_BMO, Corollary importance_ratio, the LSE bound, convexity.

The code under test is `bmo_weights`, which the online training script runs.
"""

import math

import torch

from bmo_weights import importance_ratio, lse_merit, response_weights
from theory.model import F64, Theta, flat, forward, make_tokens, sample_gradients, softmax_jacobian
from theory.policies import benefit_class

TITLE = "Weights (Lemma implicit_BMO, Corollary importance_ratio, LSE bound, convexity)"


def answers_problem():
    """Five answers of three tokens to one question -> tokens (15,), a start theta."""
    rows = [[0, 1, *answer] for answer in ((2, 3, 4), (2, 4, 3), (5, 3, 2), (4, 4, 5), (3, 5, 2))]
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


def merit_table(tokens, theta, taus=(0.25, 1.0, 4.0, 16.0)):
    """For every tau: the error of sum lambda grad L, the same with the paper's extra 1/tau, and
    lower bound, value, upper bound of the merit function -> {tau: (5 floats)}."""
    losses, rows = sequence_losses(theta, tokens, 3), {}
    for tau in taus:
        formula = flat(merit_gradient(theta, tokens, 3, tau))
        good = (formula - flat(merit_autograd(theta, tokens, 3, tau))).abs().max()
        extra = (formula - flat(merit_autograd(theta, tokens, 3, tau, 1 / tau))).abs().max()
        low = losses.min() - math.log(len(losses)) / tau
        rows[tau] = [float(x) for x in (good, extra, low, lse_merit(losses, tau), losses.min())]
    return rows


def measure():
    """The response weights: closed form, bounds, the ratio and its limit, convexity."""
    tokens, theta = answers_problem()
    losses = sequence_losses(theta, tokens, 3)
    merit = merit_table(tokens, theta)
    lam = response_weights(-losses)
    equal = importance_ratio(-losses, torch.full_like(losses, -5.0), math.inf)
    old = torch.tensor([-3.0, -7.0, -5.0, -4.0, -6.0], dtype=F64)
    unequal = importance_ratio(-losses, old, math.inf)
    logits = forward(theta, tokens).logits[:3]
    hessian = logit_hessian(logits, tokens.y[:3])
    blocks = softmax_jacobian(torch.softmax(logits, -1))
    eigenvalues = torch.linalg.eigvalsh(hessian)
    numbers = {"gradient_error": max(row[0] for row in merit.values()),
               "extra_tau": {tau: row[1] for tau, row in merit.items()},
               "equal": proportionality(equal, lam), "unequal": proportionality(unequal, lam),
               "block_error": float((hessian - torch.block_diag(*blocks)).abs().max()),
               "smallest": float(eigenvalues[0])}
    _, finite = benefit_class(with_compromise=True)
    tau = torch.logspace(-1, 2, 100, dtype=F64)
    curves = {"losses": losses, "lambda": lam, "equal": equal, "unequal": unequal,
              "averaged": proportionality(equal, response_weights(-losses / 3)),
              "merit": merit, "tau": tau,
              "u": torch.stack([lse_merit(losses, float(t)) for t in tau]),
              "sup_min_error": float((sup_min(finite) - finite.amin(1)).abs().max()),
              "inf_lse_error": float((inf_lse(finite, 1.0) + lse_merit(finite)).abs().max()),
              "hessian": hessian, "eigenvalues": eigenvalues}
    return numbers, curves


def print_table(numbers, curves):
    print("     tau  |grad u - sum lambda grad L|  with the paper's extra 1/tau  "
          "  min L - log(M)/tau <= u <= min L")
    for tau, (good, extra, low, u, high) in curves["merit"].items():
        print(f"  {tau:6.2f}  {good:28.1e}  {extra:27.1e}    {low:.4f} <= {u:.4f} <= {high:.4f}")
    print(f"  r / lambda, spread: equal old log-probs {numbers['equal']:.1e}, unequal "
          f"{numbers['unequal']:.1f}; loss averaged over D instead of summed "
          f"{curves['averaged']:.1f}")
    print("  finite separable class: |sup_theta' min_m (L_m - L_m') - min_m L_m| "
          f"{curves['sup_min_error']:.1e}, |inf_theta' LSE(L' - L) - LSE(-L)| "
          f"{curves['inf_lse_error']:.1e}")
    print(f"  Hessian in the logits: |H - blockdiag J(softmax(z_d))| {numbers['block_error']:.1e}, "
          f"smallest eigenvalue {numbers['smallest']:.1e} (one zero per token), largest "
          f"{float(curves['eigenvalues'][-1]):.3f}")
