"""What every benchmark shares: turns, medians, ratios, peak memory, the printed and saved result.

Machines are shared and clocks change, so the variants of a benchmark take turns: round after round
each runs once, in rotating order. A time is the median over rounds with the smallest and the
largest; a ratio is the median of the rounds' own ratios.
"""

import contextlib
import ctypes
import gc
import importlib.util
import re
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from paper.results import cpu_name, save_results
from runtime.processes import pick_device
from utils import table


def installed(package):
    return importlib.util.find_spec(package) is not None


# --- time -----------------------------------------------------------------------------------------


def clock():
    """Seconds, once all work on the GPU has ended."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def time_variants(variants, rounds, label):
    """Seconds of every variant in every round, {name: [seconds]}; a first, untimed call each.

    variants: {name: callable of the round's number}. label: of the progress bar.
    """
    names = list(variants)
    seconds = {name: [] for name in names}
    calls = (rounds + 1) * len(names)
    with tqdm(total=calls, desc=label, unit="call", delay=2, leave=False) as bar:
        for turn in range(-1, rounds):
            number = max(turn, 0)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                started = clock()
                variants[name](number)
                ended = clock()
                if turn >= 0:
                    seconds[name].append(ended - started)
                bar.update()
    return seconds


def spread(values):
    """{"median", "min", "max"} of a list of numbers."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(a, b):
    """Spread of the rounds' own ratios a / b, of two lists with a number a round."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def product_rate(device, dtype):
    """FLOP/s of a large square matrix product: what a step's share of the machine refers to."""
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    seconds = time_variants({"mm": lambda _: a @ b}, 5, "product rate")["mm"]
    return 2 * size**3 / statistics.median(seconds)


# --- memory ---------------------------------------------------------------------------------------


def process_memory(key):
    """A line of Linux's /proc/self/status in bytes: VmRSS, or VmHWM."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(key + r":\s+(\d+) kB", status)[1])


def peak_memory(call, device):
    """Bytes a call needs at most beyond what was held before it; None where it cannot be read."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(
            0
        )  # freed memory goes back to the system first
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from now
    except OSError:
        call()
        return None
    before = process_memory("VmRSS")
    call()
    return process_memory("VmHWM") - before


# --- the result -----------------------------------------------------------------------------------


def hardware(device):
    """What ran: the GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def store_and_print(args, settings, results, header, rows):
    """Print the table; save everything that --json asks for."""
    machine = hardware(pick_device())
    words = [f"{key} {value}" for key, value in settings.items()]
    print(f"{args.benchmark} on {machine}, torch {torch.__version__}, " + ", ".join(words))
    print(table(header, rows))
    if args.json:
        save_results(
            Path(args.json),
            f"python -m benchmarks {args.words}",
            results,
            hardware=machine,
            benchmark=args.benchmark,
            settings=settings,
        )


def milliseconds(figure):
    """ "median (min-max)" of a `spread` of seconds."""
    return "{median:.1f} ({min:.1f}-{max:.1f})".format(
        **{key: 1e3 * value for key, value in figure.items()}
    )


def shown(figure):
    """ "median (min-max)" of a `spread`."""
    return "{median:.2f} ({min:.2f}-{max:.2f})".format(**figure)


def mebibytes(size):
    return None if size is None else f"{size / 2**20:.0f}"
