"""The run folder: what decides a run, its checkpoints, and what a resumed run needs."""

import fcntl
import hashlib
import io
import json
import os
import platform
import random
import shutil
from pathlib import Path

from runtime.processes import on_first, rank, world_size
from utils import UserError, first_line, sync, write_atomic

# ruff: isort: split
import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save

LOCK = "run.lock"  # holds the number of the process that trains in the folder
_lock = None       # its descriptor; the system lets go of it when the process ends


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
            "dtype": str(dtype).removeprefix("torch."), "processes": world_size(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "machine": platform.machine(), "instructions": torch.backends.cpu.get_cpu_capability()}


def fingerprint(tensors):
    """16 hex digits of {name: tensor}: names, shapes, dtypes and the sum of each one's bits. Eight
    bytes a time, modulo 2^64: a changed bit changes the sum, at the speed of memory."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = len(data) // 8 * 8
        words = data[:whole] if data.storage_offset() % 8 == 0 else data[:whole].clone()
        total = int(words.view(torch.int64).sum())
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype), total,
                            data[whole:].tolist())).encode())
    return digest.hexdigest()[:16]


def open_run(out, config, resume, free_to_change=()):
    """Make the run folder, or check that `config` continues the run that is in it.

    config: {"args": ..., "environment": ..., "data": ..., "model": ...}, plain JSON values. Returns
    the folder, which no other process may open from now on. Another number of processes is
    accepted, and their threads: the result is then equal to rounding only.
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
    # config.json may appear in between, written by another process that starts now.
    if not file.exists() and out.exists() and any(
            path.name not in (LOCK, file.name) and not path.match(".*.partial")
            for path in out.iterdir()):
        raise UserError(f"{out}: the folder holds other files and no run; choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: the run folder cannot be made ({error.strerror}); choose another "
                        "--out") from None
    _lock_run(out)
    begun = file.exists()
    if resume and not begun:
        print(f"--resume: there is no run in {out} yet; a new one begins")
    if begun and not resume:
        raise UserError(f"{out}: already holds a run; continue it with --resume or choose another "
                        "--out")
    saved = _check_config(out, file, config, free_to_change) if begun else config
    for stale in list(out.rglob(".*.partial")):  # half-written when the run was killed
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
    # The environment stays that of the beginning; what was free to change is as it is now.
    write_atomic(file, json.dumps(saved | {"args": config["args"]}, indent=2) + "\n")


def _lock_run(out):
    """Keep other processes out of the folder while this one lives, or until it opens another."""
    global _lock
    if _lock is not None:
        os.close(_lock)
    _lock = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(_lock, 100).decode(errors="replace").strip() or "another process"
        raise UserError(f"{out}: {owner} is running in this folder; wait for it, stop it or choose "
                        "another --out") from None
    except OSError:  # a file system without locks
        pass
    os.ftruncate(_lock, 0)
    os.write(_lock, f"process {os.getpid()} on {platform.node()}\n".encode())


def _check_config(out, file, config, free_to_change):
    """What `file` holds; `UserError` unless `config` continues the run that saved it."""
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
    if processes != world_size():
        print(f"{out}: begun with {processes} processes, continued with {world_size()}: equal to "
              "an uninterrupted run to rounding (1e-5), not bit for bit")
    return saved


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
    content = {"fingerprint": _content_of(trained, buffer.getbuffer())}
    if (Path(out) / "metrics.jsonl").exists():
        sync(Path(out) / "metrics.jsonl")  # a checkpoint never outlives the steps before it
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_atomic(partial / "adapter.safetensors", save(trained, content))
        write_atomic(partial / "state.pt", buffer.getbuffer())
        if folder.exists():  # the same step again, after a resume
            shutil.rmtree(folder)
        os.replace(partial, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for old in sorted(folder.parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def _content_of(trained, state):
    """The fingerprint of a checkpoint: adapter tensors by name, and the bytes of its state."""
    return fingerprint(trained | {"state": torch.frombuffer(state, dtype=torch.uint8)})


def load_checkpoint(out, model):
    """Put the newest checkpoint's adapter and RNG in place; its state, None without one."""
    parameters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    shapes = {name: p.shape for name, p in parameters.items()}
    trained, state = on_first(lambda: _newest_checkpoint(Path(out), shapes))
    if state is None:
        return None
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


def _newest_checkpoint(out, shapes):
    """Adapter and state of the newest whole checkpoint, (None, None) when there is none at all."""
    damaged = []
    for folder in sorted((out / "checkpoints").glob("step_*"), reverse=True):
        try:
            found = _read_checkpoint(folder, shapes)
        except Exception as error:  # a damaged file raises anything from EOFError to KeyError
            damaged.append(f"{folder}: damaged checkpoint ({first_line(error)})")
            continue
        if damaged:
            print(f"{damaged[0]}; going on from {folder.name}")
        return found
    if damaged:
        raise UserError(f"{damaged[0]} and no other is whole; restore it, or delete "
                        f"{out / 'checkpoints'} to train from the first step again")
    return None, None


def _read_checkpoint(folder, shapes):
    content = (folder / "state.pt").read_bytes()
    state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    with safe_open(folder / "adapter.safetensors", "pt") as file:
        trained = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no dict
        saved = (file.metadata() or {}).get("fingerprint")
    if saved not in (None, _content_of(trained, bytearray(content))):
        raise ValueError("its files are not those that were written")
    if {name: tensor.shape for name, tensor in trained.items()} != shapes:
        raise ValueError("it belongs to another adapter")
    if f"step_{state['step']:08d}" != folder.name or "rng" not in state:
        raise ValueError("its state is another one's")
    return trained, state


def write_once(file, content):
    """`write_atomic` by the first process, the folder made when it is missing."""
    if rank() == 0:
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, content)


def read_once(file, read):
    """read(file) by the first process, for all; None when there is no such file yet."""
    def reading():
        try:
            return read(file) if file.exists() else None
        except Exception as error:  # safetensors, JSON and tensors raise a dozen classes
            raise UserError(f"{file}: damaged ({first_line(error)}); restore it, or delete it to "
                            "have it made again") from None
    return on_first(reading)
