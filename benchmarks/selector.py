"""omega's step at 10^4 to 10^8 rows.

Compared with the fused optimiser alone on vectors of that size, and with one exponential of omega
more, which is the floor.
"""

import torch

from benchmarks.measure import milliseconds, ratio, shown, spread, store_and_print, time_variants
from runtime import processes
from selector import Selector


def selector_variants(num_rows, optimizer, device):
    """{name: callable}: the selector's step on 32 rows, its optimiser alone, the floor."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, num_rows, (32,), generator=generator)
    losses = torch.rand(32, generator=generator)
    selector = Selector(num_rows, 1e-4, optimizer, device=device)

    def step(_):
        selector.weights(rows)
        selector.step(rows, losses, 0.1)

    omega = torch.zeros(num_rows, device=device)
    omega.grad = torch.full_like(omega, 1e-6)
    alone = (torch.optim.Adam([omega], lr=1e-4, fused=True) if optimizer == "adam" else
             torch.optim.SGD([omega], lr=1e-4, fused=True))

    def softmax_too(_):
        torch.exp(omega, out=omega.grad)
        alone.step()

    return {"step": step, "optimizer": lambda _: alone.step(), "floor": softmax_too}


def bench_selector(args):
    device = processes.pick_device(args.device)
    results, rows = {}, []
    for num_rows in args.sizes or (10**4, 10**5, 10**6, 10**7, 10**8):
        for optimizer in ("adam", "sgd"):
            seconds = time_variants(selector_variants(num_rows, optimizer, device), args.rounds,
                                    device, f"selector, {num_rows} rows")
            spreads = {name: spread(values) for name, values in seconds.items()}
            entry = results[f"{num_rows} {optimizer}"] = {
                "seconds": spreads,
                "ratio_to_floor": ratio(seconds["step"], seconds["floor"]),
                "ratio_to_optimizer": ratio(seconds["step"], seconds["optimizer"])}
            rows.append([f"{num_rows} {optimizer}", milliseconds(spreads["step"]),
                         milliseconds(spreads["floor"]), shown(entry["ratio_to_floor"]),
                         milliseconds(spreads["optimizer"]), shown(entry["ratio_to_optimizer"])])
    store_and_print(args, device, {"rows a step": 32, "rounds": args.rounds}, results,
           ["N", "step, ms", "exp + optimiser, ms", "ratio", "optimiser alone, ms", "ratio"], rows)
