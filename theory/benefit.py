"""Theorem 1: direct mixing loses to BDS beyond rho_c = Delta_sft / (Delta_val + Delta_sft).

On two policies, where the threshold is tight; on three, where it is only sufficient; and on
Transformers of bounded norm, where Assumption 1 fails.
"""

import itertools

import torch

from theory.model import F64, Theta, forward, make_problem
from theory.policies import (
    argmin_set,
    bds_solutions,
    benefit_class,
    lower_level_minimisers,
    weighted,
)

TITLE = "Benefit (Theorem 1): beyond rho_c direct mixing loses to BDS"
RADII = (2.0, 4.0, 8.0, 16.0, 32.0)      # bounds on |W_ov|_F
# Tokens of the small vocabulary: two phrasings, three questions, four answers.
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


def threshold(delta_val, delta_sft):
    """rho_c = Delta_sft / (Delta_val + Delta_sft)                                (Theorem 1)"""
    return delta_sft / (delta_val + delta_sft)


def deltas(val, sft):
    """Delta_val, Delta_sft, rho_c of Theorem 1 for a finite class.

    val (K,) validation losses, sft (K,) mean lower-level losses. Delta_val is taken minus min sft,
    which is zero under Assumption 1; with it the proof needs no Assumption 1.
    """
    delta_val = float(sft[argmin_set(val)].min() - sft.min())
    delta_sft = float(val[argmin_set(sft)].min() - val.min())
    return delta_val, delta_sft, threshold(delta_val, delta_sft)


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


def project_to_ball(W, radius):
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
        previous, W = W, project_to_ball(ahead - eta * gradient(ahead), radius)
        uphill = ((ahead - W) * (W - previous)).sum((-2, -1), keepdim=True) > 0
        momentum = torch.where(uphill, torch.ones_like(momentum), momentum + 1)
    return W, float((W - project_to_ball(W - gradient(W), radius)).abs().max())


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


def largest_validation_loss(val, losses, rhos):
    """The worst validation loss among the minimisers of mixing, at every rho -> (B,)."""
    sft = losses.mean(1)
    return torch.stack([val[mixing_minimisers(val, sft, float(rho))].max() for rho in rhos])


def measure():
    """Theorem 1 on two policies (tight), on three (only sufficient), on bounded Transformers."""
    val, losses = benefit_class()
    val3, losses3 = benefit_class(with_compromise=True)
    sft, sft3 = losses.mean(1), losses3.mean(1)
    delta_val, delta_sft, rho_c = deltas(val, sft)
    sweep = torch.linspace(0.01, 0.99, 99, dtype=F64)
    rhos = torch.tensor([0.001, 0.003, 0.01, *[0.02 * i for i in range(1, 50)], 0.99], dtype=F64)
    bounded = [bounded_benefit(radius, rhos) for radius in RADII]
    finite = val[lower_level_minimisers(losses)[-1]].min()           # the support of all rows
    numbers = {"delta_val": delta_val, "delta_sft": delta_sft, "rho_c": rho_c,
               "switch": switch_point(val, sft), "rho_c_three": deltas(val3, sft3)[2],
               "switch_three": switch_point(val3, sft3),
               "bds": float(val[bds_solutions(val, losses).any(0)].max()),
               "bds_finite": float(finite),
               "bounded": [{k: v for k, v in row.items() if k != "mixing"} for row in bounded]}
    curves = {"v": float(val.min()), "sweep": sweep,
              "mixing": largest_validation_loss(val, losses, sweep),
              "mixing_three": largest_validation_loss(val3, losses3, sweep),
              "rhos": rhos, "limit": mixing_limit(rhos), "bounded": bounded}
    return numbers, curves


def print_table(numbers, curves):
    n, mixing = numbers, curves["mixing"]
    print(f"  two policies    v* {curves['v']:.4f}  Delta_val {n['delta_val']:.4f}  Delta_sft "
          f"{n['delta_sft']:.4f}  rho_c {n['rho_c']:.6f}  mixing leaves S_val at {n['switch']:.6f}")
    print(f"                  L_val: BDS {n['bds']:.4f} at every rho; mixing "
          f"{float(mixing[0]):.4f} below rho_c, {float(mixing[-1]):.4f} above")
    print(f"                  BDS with finite omega only: L_val {n['bds_finite']:.4f}, "
          "whatever the weights")
    print(f"  three policies  rho_c {n['rho_c_three']:.6f}  mixing leaves S_val at "
          f"{n['switch_three']:.6f}: sufficient, not necessary")
    print("  Transformer, |W_ov|_F <= R: no softmax loss is zero, Assumption 1 fails at every R")
    print("      R      v*  min L_sft  Delta_val  Delta_sft  rho_c      L_val - v*: mixing at rho ="
          "         BDS, best")
    print("                                                          0.01     0.1     0.5     0.9"
          "     lambda")
    for row in curves["bounded"]:
        at = [int((curves["rhos"] - rho).abs().argmin()) for rho in (0.01, 0.1, 0.5, 0.9)]
        excess = [float(row["mixing"][i]) - row["v"] for i in at]
        print(f"  {row['radius']:5.0f}  {row['v']:.4f}  {row['sft_min']:9.4f}  "
              f"{row['delta_val']:9.4f}  {row['delta_sft']:9.4f}  {row['rho_c']:.3f}    "
              + " ".join(f"{x:7.4f}" for x in excess) + f"    {row['bds'] - row['v']:7.4f}")
    print("  Seen: the gap to v* opens at every rho > 0, smoothly; rho_c is only where the proof "
          "starts to speak.\n  Both Deltas grow with R; the gap of mixing tends to a finite curve. "
          "The best lambda misses v* too, as\n  Assumption 1 fails, less as R grows; mixing is no "
          "worse than BDS up to rho = "
          + ", ".join(f"{row['crossing']:.2f} (R = {row['radius']:.0f})"
                      for row in curves["bounded"] if row["crossing"] >= 0.01))
