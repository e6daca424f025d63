"""Everything that needs a GPU in one command that may be cut short and called again (GPU.md).

The steps of gpu_steps.py run in the order of their value, each for a limited time and in a process
of its own: a process that hangs in a kernel or in a compiler never comes back to Python, so no
alarm reaches it, but it can be killed; and a kernel that breaks takes its CUDA context with it, not
the other steps. The processes are forked from this one, which has imported everything and never
touched the GPU, so each starts at once; where a fork cannot use it, fresh ones are started.

A step's file, OUT/STEP.json, is written anew after each of its parts. A part that is there is not
measured again; to do so, remove the file. What lacked a package is tried again in the next call.
"""

import gc
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import utils
from benchmarks.gpu_record import Record
from utils import UserError

LIMITS = {  # the steps in the order of their value: seconds of one call at most
    "tests": 150, "logprob": 200, "steps": 300, "generation": 240, "table2": 20, "text": 480}
RESERVE = 10  # seconds of a call kept for the summary


# --- a step in its own process --------------------------------------------------------------------

def child(step, record, settings):
    os.setpgrp()  # what the step starts is killed with it
    from benchmarks import gpu_steps

    found = gpu_steps.machine_of(settings)
    before = record.content.get("hardware", found["hardware"])
    if before != found["hardware"]:
        sys.exit(f"{record.path}: measured on {before}, this is {found['hardware']}; choose "
                 "another --out")
    record.content |= found
    gpu_steps.STEPS[step](record, settings)
    record.ended(True)


def run_process(method, function, arguments, seconds):
    """Exit code of `function(*arguments)` in a process of its own; None when it was killed.

    method: "fork" or "spawn", see multiprocessing.
    """
    process = multiprocessing.get_context(method).Process(target=function, args=arguments)
    sys.stdout.flush()
    process.start()
    try:
        process.join(seconds)
    finally:
        if killed := process.is_alive():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # not yet a group of its own
                process.kill()
            process.join()
    return None if killed else process.exitcode


def use_cuda():
    """Exit code 0 where a GPU can be used."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(1)
    torch.zeros(1, device="cuda")


def start_method():
    """"fork", or "spawn" where something imported here has touched the GPU and spoilt the forks."""
    for method in ("fork", "spawn"):
        if run_process(method, use_cuda, (), 60) == 0:
            return method
    raise UserError("no CUDA device here; --rehearse runs every step at tiny sizes on the CPU")


def run_step(step, folder, settings, method, seconds, limited):
    """Run a step until it ends or `seconds` are over; again from its next part after a crash.

    limited: the time is the step's own limit, so the part that was running counts as cut off; else
    the call's time was over, which says nothing about the part.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        started = time.monotonic()
        code = run_process(method, child, (step, Record(folder, step, settings.rehearse), settings),
                           left)
        record = Record(folder, step, settings.rehearse)
        running, content = record.content["running"], record.content
        content["running"] = None
        content["seconds"] += round(time.monotonic() - started, 2)
        if code is None and running and limited:
            content["cut_off"][running] = content["cut_off"].get(running, 0) + 1
        if code and running:
            content["parts"][running] = {"failed": f"its process ended with code {code}"}
        if code == 0:
            record.save()
            return
        record.ended(False)
        if code is None:
            print(f"{step}: stopped after {seconds:.0f} s" + (f", in {running}" if running else ""))
        if code is None or not running:
            return


# --- the command ----------------------------------------------------------------------------------

def bench_gpu(args):
    deadline = time.monotonic() + 60 * args.minutes - RESERVE
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for step in LIMITS:
        Record(folder, step, args.rehearse)  # refuses a file that is of something else
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to look for a GPU is not to touch it
    if args.rehearse:  # before Triton is imported: it asks when a kernel is defined
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    from benchmarks import gpu_steps, gpu_summary

    settings = gpu_steps.settings_of(args)
    gc.freeze()  # what is imported is no garbage: collections in the forks pass it by
    method = "fork" if args.rehearse else start_method()
    for step, limit in LIMITS.items():
        if Record(folder, step, args.rehearse).content["finished"]:
            print(f"{step}: finished by an earlier call")
            continue
        left = deadline - time.monotonic()
        if left < 1:
            print(f"{step}: no time left; the next call with this --out goes on here")
            continue
        print(f"{step}: at most {min(limit, left):.0f} s", flush=True)
        run_step(step, folder, settings, method, min(limit, left), limited=limit <= left)
    text = gpu_summary.summary({step: Record(folder, step, args.rehearse).content
                                for step in LIMITS})
    utils.write_atomic(folder / "summary.md", text)
    print(text)
