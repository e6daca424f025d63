"""What every benchmark shares: turns, medians, ratios, peak memory, the printed and saved result.

Machines are shared and clocks change, so the variants of a benchmark take turns: round after round
each runs once, in rotating order. A time is the median over rounds with the smallest and the
largest; a ratio is the median of the rounds' own ratios.
"""

import contextlib
import gc
import re
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from paper.results import cpu_name, save_results
from utils import table


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_variants(variants, rounds, device, label):
    """Seconds of every variant in every round, {name: [seconds]}; a first, untimed call each.

    variants: {name: callable of the round's number}.
    """
    names, seconds = list(variants), {name: [] for name in variants}
    with tqdm(total=(rounds + 1) * len(names), desc=label, unit="call", delay=2,
              leave=False) as bar:
        for turn in range(-1, rounds):
            for name in names[max(turn, 0) % len(names):] + names[:max(turn, 0) % len(names)]:
                synchronize(device)
                started = time.perf_counter()
                variants[name](max(turn, 0))
                synchronize(device)
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - started)
                bar.update()
    return seconds


def spread(values):
    """{"median", "min", "max"} of a list of numbers."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(a, b):
    """Spread of the rounds' ratios a / b, of two lists of seconds."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def memory(key):
    """A line of /proc/self/status in bytes (VmRSS, VmHWM, RssAnon); None where there is none."""
    try:
        found = re.search(key + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return found and 1024 * int(found[1])


def peak_memory(call, device):
    """Bytes a call needs at most beyond what was held before it; None where it cannot be read."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):  # freed memory back to the system, first
        import ctypes

        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from now
    except OSError:
        return None
    before = memory("VmRSS")
    call()
    return memory("VmHWM") - before


def product_rate(device, dtype):
    """FLOP/s of a large square matrix product: what a step's share of the machine refers to."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = time_variants({"mm": lambda _: a @ b}, 5, device, "product rate")["mm"]
    return 2 * size**3 / spread(seconds)["median"]


def hardware(device):
    """What ran: the GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def store_and_print(args, device, settings, results, header, rows):
    """Print the table; save everything that --json asks for."""
    print(f"{args.benchmark} on {hardware(device)}, torch {torch.__version__}, "
          + ", ".join(f"{key} {value}" for key, value in settings.items()))
    print(table(header, rows))
    if args.json:
        save_results(Path(args.json), "python -m benchmarks " + args.words, results,
                     hardware=hardware(device), benchmark=args.benchmark, settings=settings)


def milliseconds(found):
    """"median (min-max)" of a `spread` of seconds."""
    return f"{1e3 * found['median']:.1f} ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"


def shown(found):
    """"median (min-max)" of a `spread`."""
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def mebibytes(size):
    return None if size is None else f"{size / 2**20:.0f}"


