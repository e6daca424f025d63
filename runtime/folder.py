"""The run folder: what decides a run, its checkpoints, and what a resumed run needs."""

import io
import json
import os
import platform
import random
import shutil
from pathlib import Path

from runtime.processes import on_first, rank, world_size
from utils import UserError, first_line, write_atomic

# ruff: isort: split
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save


def seed_everything(seed):
    """Seed torch, numpy and python; on one machine and CPU everything after is reproducible."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def environment(device, dtype):
    """What bitwise resume depends on besides the arguments."""
    import peft
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__,
            "peft": peft.__version__, "numpy": np.__version__, "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability(),
            "processes": world_size()}


def open_run(out, config, resume, free_to_change=()):
    """Make the run folder, or check that `config` continues the run that is in it.

    config: {"args": ..., "environment": ..., "data": ...}, plain JSON values. Returns the folder.
    Another number of processes is accepted, and their threads: the result is then equal to
    rounding only.
    """
    configs = [config] * world_size()
    if world_size() > 1:
        dist.all_gather_object(configs, config)
    for number, theirs in enumerate(configs):  # another machine may hold another file
        for section, values in theirs.items():
            for key, value in values.items():
                if value != configs[0][section].get(key) and key not in ("out", "cache_dir"):
                    raise UserError(f"process {number} has the {section} {key} {value!r} and "
                                    f"process 0 has {configs[0][section].get(key)!r}; all need the "
                                    "same")
    on_first(lambda: _open_run(Path(out), config, resume, free_to_change))
    return Path(out)


def _open_run(out, config, resume, free_to_change):
    file = out / "config.json"
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise UserError(f"{out}: the folder holds other files and no run; choose another --out")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{out}: the run folder cannot be made ({error.strerror}); choose "
                            "another --out") from None
        write_atomic(file, json.dumps(config, indent=2) + "\n")
        return
    if not resume:
        raise UserError(f"{out}: already holds a run; continue it with --resume or choose "
                        "another --out")
    try:
        saved = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); the run cannot be resumed") from None
    if not isinstance(saved, dict) or not all(isinstance(v, dict) for v in saved.values()):
        raise UserError(f"{file}: not the configuration of a run, which cannot be resumed; choose "
                        "another --out")
    processes = saved.get("environment", {}).get("processes", 1)
    if processes != world_size():
        free_to_change = (*free_to_change, "threads")
    for section, values in json.loads(json.dumps(config)).items():
        for key, value in values.items():
            before = saved.get(section, {}).get(key)
            if before != value and key not in (*free_to_change, "processes"):
                raise UserError(f"{out}: cannot resume: {section} {key} was {before!r} and is now "
                                f"{value!r}; restore it or start a new run")
    for stale in out.rglob(".*.partial"):  # half-written when the run was killed
        if stale.is_file():
            stale.unlink()
    if processes != world_size():
        print(f"{out}: begun with {processes} processes, continued with {world_size()}: equal to "
              "an uninterrupted run to rounding (1e-5), not bit for bit")


def save_checkpoint(out, step, model, state, keep=2):
    """Everything a resumed run needs, as `checkpoints/step_k`, and drop all but the last `keep`.

    state: {"name": state_dict-like of tensors and plain values}; the adapter and every RNG are
    added. A checkpoint appears whole or not at all, and holds nothing of the number of processes:
    all have the same state, the first one writes.
    """
    if rank() > 0:
        return
    folder = out / "checkpoints" / f"step_{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()
               if "lora_" in name}
    rng = {"torch": torch.get_rng_state(), "python": random.getstate(),
           "numpy": [np.random.get_state()[0], np.random.get_state()[1].tolist(),
                     *np.random.get_state()[2:]]}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state_all()
    buffer = io.BytesIO()  # torch's own writer hides a full disk behind a RuntimeError
    torch.save({"step": step, "rng": rng, **state}, buffer)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_atomic(partial / "adapter.safetensors", save(trained))
        write_atomic(partial / "state.pt", buffer.getbuffer())
        if folder.exists():  # the same step again, after a resume
            shutil.rmtree(folder)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in sorted(folder.parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(out, model):
    """Put the newest checkpoint's adapter and RNG in place; its state, None without one."""
    folder, trained, state = on_first(lambda: _read_checkpoint(Path(out)))
    if state is None:
        return None
    parameters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    if {name: p.shape for name, p in parameters.items()} != {
            name: t.shape for name, t in trained.items()}:
        raise UserError(f"{folder}: the checkpoint belongs to another adapter")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(trained[name])
    rng = state["rng"]
    torch.set_rng_state(rng["torch"])
    random.setstate((rng["python"][0], tuple(rng["python"][1]), rng["python"][2]))
    np.random.set_state((rng["numpy"][0], np.array(rng["numpy"][1], dtype=np.uint32),
                         *rng["numpy"][2:]))
    if torch.cuda.is_available() and "cuda" in rng:
        torch.cuda.set_rng_state_all(rng["cuda"][:torch.cuda.device_count()])
    return state


def _read_checkpoint(out):
    folders = sorted((out / "checkpoints").glob("step_*"))
    if not folders:
        return None, None, None
    try:
        trained = load_file(folders[-1] / "adapter.safetensors")
        state = torch.load(folders[-1] / "state.pt", weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file raises anything from EOFError to SafetensorError
        raise UserError(f"{folders[-1]}: damaged checkpoint ({first_line(error)}); delete this "
                        "folder to resume from the one before") from None
    return folders[-1], trained, state


def write_once(file, content):
    """`write_atomic` by the first process, the folder made when it is missing."""
    if rank() == 0:
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, content)
