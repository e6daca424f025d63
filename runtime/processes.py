"""Several processes that share one run, and the device of each.

torchrun starts them; without it there is one, and every function here is the identity. All
processes hold the same rows, adapter, optimisers and omega; what differs is the share of the
work. Sums make what they found the same everywhere.
"""

import contextlib
import math
import os
import signal
import sys
from datetime import timedelta

from utils import UserError

# ruff: isort: split
import torch
import torch.distributed as dist

TIMEOUT = timedelta(hours=1)  # of one wait: a first process may be tokenising a large file
_store = None                 # torchrun's key-value store, shared by all processes


class ProcessLost(BaseException):
    """torchrun asks this process to stop: another one of the run has. Nothing else catches it."""


def rank():
    """Number of this process, 0 to world_size() - 1."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size():
    """Number of processes that share this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_processes(name="auto"):
    """Join the processes that torchrun started, if it did; returns this one's device.

    name: --device. CUDA tensors are reduced by NCCL, CPU tensors by gloo. All but the first
    process are silent from here on, errors excepted (see `runtime.command`).
    """
    global _store
    if os.environ.get("WORLD_SIZE", "1") == "1":
        device = pick_device(name)
        if device.type == "cuda" and device.index is not None:  # Triton takes the current one
            torch.cuda.set_device(device)
        return device
    for needed in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if needed not in os.environ:
            raise UserError(f"WORLD_SIZE is set and {needed} is not: start several processes with "
                            "torchrun, or unset WORLD_SIZE")
    if not dist.is_initialized():
        if int(os.environ["RANK"]) > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, for good
        signal.signal(signal.SIGTERM, _stop)
        _store, number, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                store=_store, rank=number, world_size=count, timeout=TIMEOUT)
    device, local = pick_device(name), int(os.environ["LOCAL_RANK"])
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise UserError(f"--device {name}: torchrun's processes take a GPU each; use --device cuda")
    if local >= torch.cuda.device_count():
        raise UserError(f"torchrun started {local + 1} processes or more on this machine, which "
                        f"has {torch.cuda.device_count()} GPUs; lower --nproc-per-node")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise ProcessLost


def first_to_fail():
    """Whether no other process of this run has printed an error before."""
    if _store is None:  # not joined yet: all processes of a run find the same
        return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"
    try:
        return _store.add("errors", 1) == 1
    except Exception:  # the store went down with torchrun: better twice than never
        return True


def all_sum(values):
    """The sum of a tensor over all processes, in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def sum_gradients(parameters):
    """Each gradient becomes its sum over all processes: one flat all-reduce.

    A parameter without a gradient here may have one elsewhere: it sends zeros.
    """
    if world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    flat = all_sum(torch.cat([gradient.flatten() for gradient in gradients]))
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def on_first(function):
    """function() of the first process, for all; its errors are raised in all of them."""
    if world_size() == 1:
        return function()
    found = [None, None]
    if rank() == 0:
        try:
            found[0] = function()
        except (UserError, OSError) as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


@contextlib.contextmanager
def first_goes_first():
    """One process of every machine, then its others: they read the cache that it has written."""
    later = world_size() > 1 and int(os.environ["LOCAL_RANK"]) > 0
    if later:
        all_sum(torch.zeros(1))  # waits for the first one, below
    try:
        yield
    finally:
        if not later:
            all_sum(torch.zeros(1))


def share_list(function, *lists):
    """function(*lists) -> a list of the same length, its items made by all processes.

    Each process calls it with every world_size()-th item; all get equally many, so that they run
    equally many forwards: some do one of another's again.
    """
    count, total = world_size(), len(lists[0])
    if count == 1 or total == 0:
        return function(*lists)
    mine = [min(rank() + k * count, total - 1) for k in range(math.ceil(total / count))]
    parts = [None] * count
    dist.all_gather_object(parts, function(*([items[i] for i in mine] for items in lists)))
    return [parts[i % count][i // count] for i in range(total)]


def in_step(items, sharded):
    """The items of this process; None while others have more, when the base is sharded.

    A sharded layer is gathered from all processes, so all must run equally many forwards.
    """
    items = iter(items)
    while True:
        item = next(items, None)
        more = item is not None
        if sharded:
            more = bool(all_sum(torch.tensor(int(more))))
        if not more:
            return
        yield item


def pick_device(name):
    """"auto" is CUDA when there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {name}: no CUDA device here; use --device cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: no such device; use auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices "
                        "here, counted from cuda:0; use one of them")
    return device
