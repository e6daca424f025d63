"""Proposition: BDS puts all its weight on the useful set U; direct mixing puts |U| / N there.

By enumeration on a finite class, and as it happens when a Transformer trains.
"""

import torch

from theory.benefit import conflict_problem
from theory.model import F64, Theta, level_losses, pbgd
from theory.policies import argmin_set, bds_solutions, separable_class, support_weights, supports

TITLE = "Coverage (Proposition): weight on the useful set U"


def useful_set(val, losses):
    """U: rows that some model of S_val answers with loss zero -> mask (N,)     (Proposition)"""
    return (losses[argmin_set(val)] <= 1e-12).any(0)


def everything_useful():
    """Assumptions 1 and 2 hold, yet U = [N]: three policies, two rows -> val (3,), losses (3, 2).

    The first two policies are validation-optimal and each fits one row; the third fits both rows
    and is not. So |U| < N has to be assumed for the mixing half of the Proposition.
    """
    right = torch.tensor([[1.0, 0.3, 0.9], [0.4, 1.0, 0.9], [1.0, 1.0, 0.5]], dtype=F64)
    losses = -torch.log(right)
    return losses[:, 2], losses[:, :2]


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
            upper, lower = level_losses(step.state.losses, problem)
            rows.append((step.k, float(step.sigma[useful].sum()), float(upper.mean()),
                         float(lower[useful].mean())))

        pbgd(problem, gamma, theta, eta, steps, alpha=rate, sequential=True, watch=watch)
    return useful, {name: torch.tensor(rows, dtype=F64) for name, rows in runs.items()}


def decay_exponent(rows):
    """b of 1 - sum_U sigma ~ k^b, between a quarter of a run and its end; rows of (k, weight, ...).

    A straight line in the figure's logarithmic axes: d log(1 - weight) / d log k.
    """
    first, last = rows[len(rows) // 4], rows[-1]
    return float(torch.log((1 - last[1]) / (1 - first[1])) / torch.log(last[0] / first[0]))


def measure():
    """The Proposition by enumeration on a finite class, and as it happens in training."""
    _, val, losses = separable_class()
    enumerated_useful = useful_set(val, losses)
    solutions = supports(losses.shape[1])[bds_solutions(val, losses).any(1)]
    on_useful = torch.stack([support_weights(s)[enumerated_useful].sum() for s in solutions])
    useful, runs = coverage_runs()
    bds, mixing = runs["bds"], runs["mixing"]
    numbers = {"share": float(useful.double().mean()), "bds": float(bds[-1, 1]),
               "slope": decay_exponent(bds), "mixing": float(mixing[-1, 1]),
               "bds_val": float(bds[-1, 2]), "mixing_val": float(mixing[-1, 2]),
               "all_useful": int(useful_set(*everything_useful()).sum()),
               "enumerated_min": float(on_useful.min())}
    return numbers, {"enumerated_useful": enumerated_useful, "on_useful": on_useful,
                     "useful": useful, **runs}


def print_table(numbers, curves):
    enumerated, useful, bds = curves["enumerated_useful"], curves["useful"], curves["bds"]
    print(f"  27 policies: U = rows {enumerated.nonzero()[:, 0].tolist()}, |U| = "
          f"{int(enumerated.sum())} < N = 3; {len(curves['on_useful'])} of {len(supports(3))} "
          f"supports of lambda solve BDS,\n    weight on U {numbers['enumerated_min']:.3f} "
          f"in each; mixing |U|/N = {float(enumerated.double().mean()):.3f}")
    print("  |U| < N is an assumption of its own: here Assumptions 1 and 2 hold and |U| = "
          f"{numbers['all_useful']} = N")
    print(f"  Transformer, |U| = {int(useful.sum())} < N = {len(useful)}, gamma 4, uniform start")
    print("       k   BDS: sum_U sigma   L_val    mixing: sum_U 1/N   L_val")
    for k in (0, 10, 100, 1000, len(bds) - 1):
        b, m = bds[k], curves["mixing"][k]
        print(f"  {k:6d}   {float(b[1]):16.5f}  {float(b[2]):.5f}   {float(m[1]):16.5f}  "
              f"{float(m[2]):.5f}")
    print(f"  1 - sum_U sigma falls like k^{numbers['slope']:.2f}: no finite omega reaches one")
