"""Theorem 3: BMO and BDS have the same global solutions under Assumption 1, and where that ends.

By enumeration: on a separable class, and on two fronts of a class that is not separable.
"""

import math
from collections import namedtuple

import torch

from theory.model import F64
from theory.policies import argmin_set, bds_solutions, lower_level_minimisers, separable_class

TITLE = "Equivalence (Theorem 3): BMO = BDS under Assumption 1"
# t, val (K,), losses (K, 2), and masks (K,): WP, the union of S(lambda), the solutions of both.
Front = namedtuple("Front", "t val losses pareto union bmo bds")


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
    losses = -torch.log(right)
    return t, losses[:, 2], losses[:, :2]


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


def solve(val, feasible):
    """Global solutions of min val over a feasible mask -> mask."""
    return feasible & (val <= val[feasible].min() + 1e-12)


def front_solutions(concave):
    """BMO and BDS on one front, by the exact sets -> Front."""
    t, val, losses = front_class(concave)
    pareto, union = weakly_pareto(losses), scalarised(losses)
    return Front(t, val, losses, pareto, union, solve(val, pareto), solve(val, union))


def measure():
    """Theorem 3 by enumeration, and where it ends."""
    p, val, losses = separable_class()
    feasible = lower_level_minimisers(losses)
    union, pareto = feasible.any(0), weakly_pareto(losses)
    bmo, bds = solve(val, pareto), bds_solutions(val, losses).any(0)
    fronts = {"convex": front_solutions(False), "non-convex": front_solutions(True)}
    numbers = {"pareto": int(pareto.sum()), "union": int(union.sum()), "bmo": int(bmo.sum()),
               "bds": int(bds.sum()), "same": bool((bmo == bds).all() and (union == pareto).all())}
    for name, front in fronts.items():
        numbers[name] = {"pareto": int(front.pareto.sum()), "union": int(front.union.sum()),
                         "bmo_val": float(front.val[front.pareto].min()),
                         "bds_val": float(front.val[front.union].min())}
    return numbers, {"p": p, "val": val, "best": argmin_set(val), "pareto": pareto,
                     "union": union, "bmo": bmo, "bds": bds, "fronts": fronts,
                     "finite": feasible[-1]}                          # every row carries weight


def print_table(numbers, curves):
    val, finite = curves["val"], curves["finite"]
    print(f"  separable: {len(val)} policies, WP {numbers['pareto']}, union of S(lambda) "
          f"{numbers['union']}, same: {bool((curves['union'] == curves['pareto']).all())}; S_val "
          f"has {int(curves['best'].sum())}, BMO and BDS both pick {numbers['bmo']}, same: "
          f"{bool((curves['bmo'] == curves['bds']).all())}")
    print(f"    without omega_i = -infinity the union is {int(finite.sum())} policy, S_sft: L_val "
          f"{float(val[finite].min()):.3f} instead of {abs(float(val[curves['bds']].min())):.3f}")
    for name, front in curves["fronts"].items():
        found = numbers[name]
        print(f"  not separable, {name} front: WP {found['pareto']}, union {found['union']} of "
              f"{len(front.t)}; BMO t = {float(front.t[front.bmo][0]):.3f}, L_val "
              f"{found['bmo_val']:.4f}; BDS t = {float(front.t[front.bds][0]):.3f}, L_val "
              f"{found['bds_val']:.4f}")
