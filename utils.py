"""The small shared module: errors, atomic files, processes, seeds, checkpoints, the metrics log.

Everything here has at least two users among the top-level scripts. Nothing here knows the method.
"""

import contextlib
import errno
import hashlib
import io
import json
import logging
import math
import os
import platform
import random
import shutil
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads cost 80x on busy cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # a network look-up on local loads

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from tqdm import tqdm

# PEFT imports bitsandbytes, which announces that it lacks a CPU kernel nobody asked for.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")

# --- errors and files -----------------------------------------------------------------------------

class UserError(Exception):
    """Bad input from the person who runs a script: one clear line, exit code 2, no traceback.

    The message says which file or flag, which row, what is wrong and what to do about it.
    """


class ProcessLost(BaseException):
    """torchrun asks this process to stop: another one of the run has. Nothing else catches it."""


def run(main):
    """Call `main()`; a `UserError` or a failing disk becomes one line on stderr and exit code 2.

    Of several processes the first that fails prints. One whose partner is gone ends with exit code
    1 and one line.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that a row has
    try:
        main()
    except UserError as error:
        sys.exit(_fail(str(error)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG,
                               errno.EDQUOT, errno.ENOTDIR, errno.EISDIR, errno.ENOENT,
                               errno.EEXIST):
            sys.stderr = sys.__stderr__
            raise
        sys.exit(_fail(f"{error.filename or 'a file'}: {error.strerror}; free space or choose "
                       "another folder, then run the same command again"))
    except (Exception, ProcessLost) as error:
        if world_size() == 1:
            raise
        sys.stderr = sys.__stderr__  # a traceback is shown, whichever process it comes from
        # gloo's errors are plain RuntimeErrors.
        if not isinstance(error, (ProcessLost, dist.DistError)) and not (
                isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise
        _fail("another process of this run has stopped or cannot be reached; start all of them "
              "again with --resume")
        sys.stdout.flush()
        os._exit(1)  # the usual end would wait for the partner
    if world_size() > 1:
        dist.destroy_process_group()


def _fail(message):
    """The line on stderr; always 2, the exit code."""
    if world_size() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, from here to the end
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # the message gets a line of its own
    if _first_to_fail():
        # The first process's bar may stand in the way of another's line.
        print(("\n" if rank() else "") + "error: " + " ".join(message.split()), flush=True,
              file=sys.__stderr__ if rank() else sys.stderr)
    return 2


def make_parent(out):
    """Make the folder of a file that will be written; `UserError` before the work, not after."""
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: its folder cannot be made ({error.strerror}); choose another "
                        "path") from None
    if Path(out).is_dir():
        raise UserError(f"{out}: is a folder; name a file")


def write_atomic(path, content):
    """Write str or bytes to `path` so that readers see the old file or the whole new one."""
    write_parts(path, [content.encode() if isinstance(content, str) else content])


def write_parts(path, parts):
    """`write_atomic` of bytes that come in parts, none of which is kept.

    The half-written file has the process's number in its name: two may write one path at once.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_jsonl(path, rows):
    """Write dictionaries to `path`, one JSON object a line, atomically (NaN is refused)."""
    write_parts(path, ((json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
                       for row in rows))


def read_jsonl(path):
    """The rows of a jsonl file as a list of dictionaries; `UserError` names file and line."""
    return list(each_jsonl(path))


def each_jsonl(path):
    """`read_jsonl` a row at a time."""
    number = 0
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):  # noqa: B007, the message below uses it
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object")
                    yield row
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path} line {number}: not valid JSON ({error})") from None


def content_hash(*texts):
    """16 hex digits of sha256 over the texts, separated so that ("ab", "c") != ("a", "bc")."""
    return hashlib.sha256("\x1f".join(texts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


# --- several processes ----------------------------------------------------------------------------
#
# torchrun starts them; without it there is one, and every function here is the identity. All
# processes hold the same rows, adapter, optimisers and omega; what differs is the share of the
# work. Sums make what they found the same everywhere.

TIMEOUT = timedelta(hours=1)  # of one wait: a first process may be tokenising a large file
_store = None                 # torchrun's key-value store, shared by all processes


def rank():
    """Number of this process, 0 to world_size() - 1."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size():
    """Number of processes that share this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def join_processes(name):
    """Join the processes that torchrun started, if it did; returns this one's device.

    name: --device. CUDA tensors are reduced by NCCL, CPU tensors by gloo. All but the first
    process are silent from here on, errors excepted (see `run`).
    """
    global _store
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return pick_device(name)
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


def _first_to_fail():
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


def split(function, *lists):
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


def together(items, model):
    """The items of this process; None while others have more, when the base is sharded.

    A sharded layer is gathered from all processes, so all must run equally many forwards.
    """
    items = iter(items)
    while True:
        item = next(items, None)
        more = item is not None
        if is_sharded(model):
            more = bool(all_sum(torch.tensor(int(more))))
        if not more:
            return
        yield item


def is_sharded(model):
    """Whether `shard` has split the base over the processes."""
    return getattr(bare(model), "_is_fsdp_managed_module", False)


def bare(model):
    """The causal LM inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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


def hub_answers(info, name, what):
    """Whether the hub knows `name`; `UserError` when it says no; offline from now on when silent.

    info: "model_info" or "dataset_info". Loaders retry for most of a minute without a network;
    this asks once, for three seconds.
    """
    import huggingface_hub

    try:
        getattr(huggingface_hub.HfApi(), info)(name, timeout=3)
    except huggingface_hub.errors.RepositoryNotFoundError:
        raise UserError(f"{name}: no such {what} on the hub, or it is private or gated (log in "
                        "with `hf auth login`); and no file or folder of that name") from None
    except Exception:  # any failure to reach the hub: what is in the local cache still loads
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True


def first_line(error):
    """The first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# --- run folder, checkpoints, metrics -------------------------------------------------------------

def check_seed(seed):
    """`UserError` for a --seed that torch or numpy cannot take."""
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: must lie between 0 and 2**63 - 1")


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


def open_metrics(out, step):
    """`metrics.jsonl` opened for appending, cut back to the rows before `step` (after a resume).

    The first process writes; the lines of the others go nowhere.
    """
    if rank() > 0:
        return open(os.devnull, "w")
    path = Path(out) / "metrics.jsonl"
    kept = []
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the line that was being written at the kill
                if json.loads(line)["step"] < step:
                    kept.append(line + "\n")
    write_atomic(path, "".join(kept))
    return open(path, "a", buffering=1)


def log_metrics(file, metrics):
    """One dictionary, one line. Wall-clock keys live under `time/`; all else is deterministic."""
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"step {metrics['step']}: {key} is {value}; lower --lr and start again "
                            "in another --out")
    file.write(json.dumps(metrics) + "\n")
