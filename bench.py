"""Speed and memory: every figure a median with its spread, and a ratio inside the same run.

    python bench.py logprob      head and log-probs, against the obvious way and other libraries
    python bench.py step         a training step: BDS, online, plain SFT, two padded forwards
    python bench.py generate     answers a second, and what folding, sorting and batching buy
    python bench.py selector     omega's step at 10^4 to 10^8 rows, against its optimiser's passes
    python bench.py data         tokenising, start-up, ranking and memory at 10^5 to 10^7 rows
    python bench.py table2       the paper's runtime table, extrapolated from steps measured here

Machines are shared and clocks change, so the variants of a benchmark take turns: round after round
each runs once, in rotating order. A time is the median over rounds with the smallest and the
largest; a ratio is the median of the rounds' own ratios. `--json FILE` saves all of it with the
command, date, commit, hardware and versions. Without flags everything runs on the embedded toy.

What is compared with:
 logprob   log_softmax over full logits; torch's `linear_cross_entropy` (2.13), liger-kernel and
           cut-cross-entropy where installed (the last two on CUDA only). Floor: two products of
           the same sizes, from a float32 (CUDA: bf16) `mm` in the same rounds.
 step      the same rows padded to the longest of a micro batch, one forward a level, full logits,
           cross_entropy, PEFT's LoRA layers as they are: how the authors' earlier library
           (BIPOST) does it. Floor of the bilevel
           step: 1 + T_lower / (2 (T_upper + T_lower)) of plain SFT with the loss at theta^{k+1}
           (its extra forward is half a LoRA step's products), 1 with the loss at theta^k.
 selector  the fused optimiser alone on vectors of that size, and one exponential of omega more.
"""

import argparse
import contextlib
import copy
import gc
import json
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import utils  # first: it sets what torch reads when it is imported

# ruff: isort: split
import torch
from tqdm import tqdm

import common
import data
import generate
import loading
import logprobs
import toy
import train_offline
import train_online
from bmo_weights import MAX_LOG_RATIO
from eval import row_losses, table
from runs import cpu_name, save_results
from selector import Selector
from utils import UserError

PUBLISHED_HOURS = {  # H100 96 GB, Pythia-1b and Llama-3-8b (the paper's runtime table)
    "mixing": (0.24, 10.53), "DSIR": (0.27, 11.23), "BDS": (0.31, 11.75), "LESS": (0.84, 28.75),
    "online R=5% G=1": (0.43, 13.28), "online R=10% G=1": (0.47, 13.78),
    "online R=10% G=5": (0.86, 30.46)}
SHAPES = {  # architectures by name, with random weights
    "pythia-1b": ("gpt_neox", {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 8, "max_position_embeddings": 2048}),
    "llama3-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192}),
    "tiny": ("llama", {
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}),
}


# --- measuring ------------------------------------------------------------------------------------

def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(variants, rounds, device, label):
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


def memory(key, pid="self"):
    """A line of /proc/PID/status in bytes (VmRSS, VmHWM, RssAnon); None where there is none."""
    try:
        found = re.search(key + r":\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
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


def product_rate(device, dtype, rounds=5):
    """FLOP/s of a large square matrix product: what a step's share of the machine refers to."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    seconds = measure({"mm": lambda _: a @ b}, rounds, device, "product rate")["mm"]
    return 2 * size**3 / spread(seconds)["median"]


def hardware(device):
    """What ran: the GPU, or the CPU with the threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def finish(args, device, settings, results, header, rows):
    """Print the table; save everything that --json asks for."""
    print(f"{args.benchmark} on {hardware(device)}, torch {torch.__version__}, "
          + ", ".join(f"{key} {value}" for key, value in settings.items()))
    print(table(header, rows))
    if args.json:
        save_results(Path(args.json), "python bench.py " + args.words, results,
                     hardware=hardware(device), benchmark=args.benchmark, settings=settings)


def milliseconds(values):
    found = spread(values)
    return f"{1e3 * found['median']:.1f} ({1e3 * found['min']:.1f}-{1e3 * found['max']:.1f})"


def shown(found):
    return f"{found['median']:.2f} ({found['min']:.2f}-{found['max']:.2f})"


def mebibytes(size):
    return None if size is None else f"{size / 2**20:.0f}"


# --- logprob --------------------------------------------------------------------------------------

def head_variants(hidden, head, targets, upstream):
    """{name: callable} that each leave d sum(upstream * log p) / d hidden in `hidden.grad`."""
    def call(logps_of):
        def step(_):
            hidden.grad = None
            logps = logps_of()
            logps.backward(upstream.to(logps.dtype))
        return step

    kernels = ["torch"] + ["triton"] * (hidden.is_cuda and logprobs.triton is not None)
    variants = {f"here, {kernel}": call(lambda kernel=kernel: logprobs.token_logprobs(
        hidden, head, targets, kernel=kernel)) for kernel in kernels}
    variants["full logits"] = call(
        lambda: logprobs.token_logprobs(hidden, head, targets, kernel="reference"))
    fused = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused is not None:
        options = torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions()
        variants["torch linear_cross_entropy"] = call(
            lambda: -fused(hidden, head, targets, reduction="none"))
        variants["torch linear_cross_entropy, chunked"] = call(
            lambda: -fused(hidden, head, targets, reduction="none", options=options))
    if hidden.is_cuda:
        with contextlib.suppress(ImportError):
            from cut_cross_entropy import linear_cross_entropy

            variants["cut-cross-entropy"] = call(
                lambda: -linear_cross_entropy(hidden, head, targets, reduction="none"))
        with contextlib.suppress(ImportError):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")

            def summed(_):  # it has no gradient of single tokens: the sum, every weight one
                hidden.grad = None
                liger(head, hidden, targets).backward()

            variants["liger-kernel (sum only)"] = summed
    return variants


def bench_logprob(args):
    device = utils.pick_device(args.device)
    big = device.type == "cuda"
    length, width, vocabulary = args.sizes or (
        (16384, 4096, 128256) if big else (512, 256, 32000))
    dtype = torch.bfloat16 if big else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(length, width, device=device).to(dtype).requires_grad_()
    head = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
    targets = torch.randint(0, vocabulary, (length,), device=device)
    upstream = torch.ones(length, device=device)
    part = min(length, 64)
    exact = hidden[:part].detach().double().requires_grad_()
    logprobs.token_logprobs_reference(exact, head.double(), targets[:part]).sum().backward()

    chunk = min(length, logprobs._chunk_rows(length, vocabulary, device))
    logits = torch.empty(chunk, vocabulary, dtype=dtype, device=device)
    out = torch.empty(length, width, dtype=dtype, device=device)

    def products(backward):
        for start in range(0, length, chunk):
            rows = slice(start, min(start + chunk, length))
            here = torch.mm(hidden.detach()[rows], head.T, out=logits[:rows.stop - start])
            if backward:
                torch.mm(here, head, out=out[rows])

    best = "here, triton" if big and logprobs.triton is not None else "here, torch"

    @torch.no_grad()
    def no_grad(_):
        logprobs.token_logprobs(hidden, head, targets, kernel=best.split(", ")[1])

    variants = head_variants(hidden, head, targets, upstream)
    results = {}
    for name, call in list(variants.items()):
        try:
            results[name] = {"peak_bytes": peak_memory(lambda call=call: call(0), device)}
        except RuntimeError as error:  # no memory, or a peer without a kernel for this machine
            results[name] = {"failed": str(error).splitlines()[0][:200]}
            del variants[name]
            continue
        error = (hidden.grad[:part].double() - exact.grad).norm() / exact.grad.norm()
        results[name]["gradient_error"] = error.item()
    variants |= {"floor: two products": lambda _: products(True), "no gradient": no_grad,
                 "floor: one product": lambda _: products(False)}
    seconds = measure(variants, args.rounds, device, "logprob")
    rows = []
    for name in variants:
        floor = f"floor: {'one product' if name == 'no gradient' else 'two products'}"
        floor = name if name.startswith("floor") else floor
        entry = results.setdefault(name, {})
        entry |= {"seconds": spread(seconds[name]), "floor": floor,
                  "ratio_to_floor": ratio(seconds[name], seconds[floor]),
                  "ratio_to_full_logits": ratio(seconds["full logits"], seconds[name])
                  if "full logits" in seconds else None}
        rows.append([name, milliseconds(seconds[name]), shown(entry["ratio_to_floor"]),
                     mebibytes(entry.get("peak_bytes")),
                     f"{entry['gradient_error']:.1e}" if "gradient_error" in entry else None])
    rows += [[name, "failed: " + entry["failed"][:40], None, None, None]
             for name, entry in results.items() if "failed" in entry]
    finish(args, device, {"T": length, "d": width, "V": vocabulary, "dtype": str(dtype)[6:],
                          "rounds": args.rounds}, results,
           ["variant", "ms (min-max)", "of the floor", "peak MiB", "gradient error"], rows)


# --- step -----------------------------------------------------------------------------------------

def shaped_model(config, device, dtype, seed=0):
    """A causal LM with random weights and packed attention, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                 attn_implementation=logprobs.ATTENTION)
    return model.eval().requires_grad_(False)


def random_rows(count, mean, vocabulary, seed):
    """Rows of log-normal length (sigma 0.6, 16 to 2,048 tokens), the second half a response."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        length = min(2048, max(16, round(mean * rng.lognormvariate(-0.18, 0.6))))
        rows.append({"input_ids": [rng.randrange(vocabulary) for _ in range(length)],
                     "trained": [0] * (length // 2) + [1] * (length - length // 2)})
    return rows


def load(args, device, count):
    """(model with LoRA, lower rows, upper rows): files and a model, a SHAPES name, or the toy."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.model in SHAPES:
        from transformers import AutoConfig

        kind, options = SHAPES[args.model]
        config = AutoConfig.for_model(kind, **options)
        lower, upper = (random_rows(count, mean, config.vocab_size, seed) for seed, mean in
                        enumerate((args.lower_tokens, args.upper_tokens)))
        base = shaped_model(config, device, dtype)
        return loading.add_lora(base, checkpointing=args.gradient_checkpointing), lower, upper
    if len({args.lower is None, args.upper is None, args.model is None}) > 1:
        raise UserError("--lower, --upper and --model belong together; or give --model one of "
                        + ", ".join(SHAPES) + ", or none of them for the embedded toy")
    source = args.model or str(toy.MODEL)
    tokenizer = loading.load_tokenizer(source)
    with tempfile.TemporaryDirectory() as folder:
        files = (args.lower, args.upper)
        if args.lower is None:
            made = toy.write(folder)
            files = (made["lower"], made["upper"])
        context = loading.load_config(source).max_position_embeddings
        lower, upper = ([dict(row) for row in data.tokens_only(data.load_rows(
            str(file), tokenizer, name=name, limit=count, max_length=min(2048, context),
            cache_dir=folder)[0])] for name, file in zip(("lower", "upper"), files, strict=True))
    if args.vocabulary:
        config = loading.load_config(source)
        if args.vocabulary < config.vocab_size:
            raise UserError(f"--vocabulary {args.vocabulary}: the tokenizer writes tokens up to "
                            f"{config.vocab_size}")
        config.vocab_size = args.vocabulary
        base = shaped_model(config, device, dtype)
    else:
        base = loading.load_model(source, device)
    lower, upper = ((rows * math.ceil(count / len(rows)))[:count] for rows in (lower, upper))
    return loading.add_lora(base, checkpointing=args.gradient_checkpointing), lower, upper


def padded_losses(model, rows):
    """Mean loss of every row from full logits of a right-padded batch, (n,)."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[i, :size], mask[i, :size] = torch.tensor(row["input_ids"]), 1
        labels[i, :size] = torch.where(torch.tensor(row["trained"]) == 1, ids[i, :size], -100)
    ids, mask, labels = (x.to(model.device) for x in (ids, mask, labels))
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = logits[:, :-1].float().contiguous()
    losses = torch.nn.functional.cross_entropy(
        logits.view(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="none")
    trained = (labels[:, 1:] != -100).sum(dim=1)
    return losses.view(len(rows), -1).sum(dim=1) / trained


def padded_step(args, model, parameters, optimizer, upper, lower, weights, rho):
    """`train_offline.descend` as two padded forwards a micro batch. The loss."""
    total = 0.0
    for start in range(0, len(lower), args.micro_batch):
        part = slice(start, start + args.micro_batch)
        loss = rho * (weights[part] * padded_losses(model, lower[part])).sum() / len(lower)
        loss = loss + (1 - rho) * padded_losses(model, upper[part]).sum() / len(upper)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(parameters, args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def step_variants(args, model, lower, upper, batches):
    """{name: callable of the round}; each is one whole step and returns the loss.

    The rates of theta and omega are zero: every variant and round sees the same model, so the
    losses can be compared; the arithmetic is that of any other rate.
    """
    settings = SimpleNamespace(micro_batch=args.micro_batch, micro_tokens=None, clip=1.0,
                               upper_loss="sft", ratio="sequence", num_answers=1,
                               max_log_ratio=MAX_LOG_RATIO)
    theta = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(theta, lr=0.0)
    selector = Selector(len(lower), lr=0.0, device=model.device)
    padded = copy.copy(model)  # the same parameters are trained; only the attention differs

    def take(turn):
        rows = batches[turn % len(batches)]
        return rows, [lower[i] for i in rows], [upper[i] for i in rows]

    def plain(turn):
        _, low, up = take(turn)
        upper_losses, lower_losses, _ = train_offline.descend(
            settings, model, theta, optimizer, up, low, torch.ones(len(low), device=model.device),
            0.5)
        return 0.5 * (upper_losses.mean() + lower_losses.mean()).item()

    def bilevel(turn, omega_loss):
        rows, low, up = take(turn)
        rows = torch.tensor(rows)
        weights = selector.weights(rows)
        upper_losses, lower_losses, _ = train_offline.descend(
            settings, model, theta, optimizer, up, low, weights, 0.5)
        after = row_losses(model, low)[0] if omega_loss == "next" else lower_losses
        selector.step(rows, after, 0.1)
        return 0.5 * (upper_losses.mean() + (weights * lower_losses).mean()).item()

    losses, lengths = row_losses(model, lower)
    old = -losses * lengths  # log-probs at generation

    def online(turn):
        rows, low, up = take(turn)
        masked = max(1, round(0.1 * len(rows)))  # R = 10 % of the batch, G = 1
        answers = [train_online.Answers([row], old[i:i + 1], 0) if n < masked else
                   train_online.Answers([row]) for n, (i, row) in enumerate(zip(rows, low,
                                                                               strict=True))]
        rows = torch.tensor(rows)
        weights = selector.weights(rows)
        upper_losses, _, lower_losses, *_ = train_online.descend(
            settings, model, theta, optimizer, up, answers, weights, 0.5)
        selector.step(rows, train_online.mean_answer_losses(model, answers), 0.1)
        return 0.5 * (upper_losses.mean() + (weights * lower_losses).mean()).item()

    def two_padded(turn):
        rows, low, up = take(turn)
        weights = selector.weights(torch.tensor(rows))
        model.set_attn_implementation("sdpa")
        for module in model.modules():  # PEFT's own LoRA; the packed forward puts ours back
            vars(module).pop("forward", None)
        try:
            return padded_step(settings, padded, theta, optimizer, up, low, weights, 0.5)
        finally:
            model.set_attn_implementation(logprobs.ATTENTION)

    return {"plain SFT": plain, "BDS, loss at theta^k": lambda t: bilevel(t, "current"),
            "BDS, loss at theta^{k+1}": lambda t: bilevel(t, "next"), "online, R=10%, G=1": online,
            "two padded forwards": two_padded}


def step_flops(model, rows):
    """FLOPs of a LoRA step's products on packed rows: forward and the gradient of activations.

    2 a parameter and token each way, the head only where there is a target, attention causal.
    """
    causal_lm = model.get_base_model()
    head = causal_lm.get_output_embeddings().weight
    linear = sum(m.weight.numel() for m in causal_lm.modules()
                 if isinstance(m, torch.nn.Linear) and m.weight is not head)
    config = causal_lm.config
    lengths = [len(row["input_ids"]) for row in rows]
    width = config.num_attention_heads * getattr(config, "head_dim", None) or config.hidden_size
    attention = 2 * config.num_hidden_layers * width * sum(n * n for n in lengths)
    return (4 * linear * sum(lengths) + 4 * head.numel() * sum(sum(r["trained"]) for r in rows)
            + 3.5 * attention)


def bench_step(args):
    device = utils.pick_device(args.device)
    batch = args.batch or (32 if device.type == "cuda" else 8)
    count = batch * args.rounds
    model, lower, upper = load(args, device, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    batches = [order[i:i + batch] for i in range(0, count, batch)]
    variants = step_variants(args, model, lower, upper, batches)
    peaks = {name: peak_memory(lambda call=call: call(0), device)
             for name, call in variants.items()}
    losses = {name: [] for name in variants}
    timed = {name: lambda turn, name=name, call=call: losses[name].append(call(turn))
             for name, call in variants.items()}
    seconds = measure(timed, args.rounds, device, "step")
    rate = product_rate(device, model.get_input_embeddings().weight.dtype)

    # --- the floor: of each round's own batch -----------------------------------------------------
    tokens, floors, flops = [], [], []
    for rows in batches:
        low, up = ([level[i] for i in rows] for level in (lower, upper))
        t_low, t_up = (sum(len(row["input_ids"]) for row in level) for level in (low, up))
        tokens.append(t_low + t_up)
        floors.append(1 + t_low / (2 * (t_up + t_low)))
        flops.append(step_flops(model, low + up))
    base, results, rows = seconds["plain SFT"], {}, []
    for name in variants:
        # Each round compares with plain SFT on the same rows; the first losses are the warm-up's.
        difference = max(abs(a - b) / abs(b) for a, b in
                         zip(losses[name], losses["plain SFT"], strict=True))
        floor = floors if name in ("BDS, loss at theta^{k+1}", "online, R=10%, G=1") else \
            [1.0] * len(floors)
        entry = results[name] = {
            "seconds": spread(seconds[name]), "peak_bytes": peaks[name],
            "tokens_per_second": spread([t / s for t, s in zip(tokens, seconds[name],
                                                               strict=True)]),
            "ratio_to_sft": ratio(seconds[name], base), "loss": losses[name][0],
            "loss_difference": difference, "product_share": spread(
                [f / s / rate for f, s in zip(flops, base, strict=True)])["median"]
            if name == "plain SFT" else None}
        if name != "two padded forwards":
            entry["floor"] = spread(floor)
            entry["ratio_to_floor"] = ratio([s / f for s, f in zip(seconds[name], floor,
                                                                   strict=True)], base)
            entry["padded_over_this"] = ratio(seconds["two padded forwards"], seconds[name])
        rows.append([name, f"{entry['tokens_per_second']['median']:.0f}",
                     shown(entry["ratio_to_sft"]),
                     f"{spread(floor)['median']:.2f}" if "floor" in entry else None,
                     shown(entry["padded_over_this"]) if "floor" in entry else None,
                     mebibytes(peaks[name]), f"{difference:.1e}"])
    config = model.get_base_model().config
    settings = {"rows of each level": batch, "micro batch": args.micro_batch,
                "V": config.vocab_size, "parameters": sum(
                    p.numel() for n, p in model.named_parameters() if "lora_" not in n),
                "tokens a step": round(spread(tokens)["median"]), "rounds": args.rounds}
    finish(args, device, settings, results,
           ["step", "tokens/s", "of plain SFT", "floor", "padded takes", "peak MiB", "loss diff."],
           rows)
    print(f"plain SFT runs at {results['plain SFT']['product_share']:.0%} of the rate of a large "
          f"matrix product here ({rate / 1e12:.2f} TFLOP/s)")
    return SimpleNamespace(seconds=seconds, tokens=tokens)


# --- generate -------------------------------------------------------------------------------------

@contextlib.contextmanager
def unfolded():
    """`generate` with the adapter left beside the base weights."""
    before, generate.folded = generate.folded, lambda model: contextlib.nullcontext()
    try:
        yield
    finally:
        generate.folded = before


def bench_generate(args):
    device = utils.pick_device(args.device)
    model, rows, _ = load(args, device, args.prompts)
    with torch.no_grad():  # B is zero in a new adapter, which would make folding look free
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1e-3)
    prompts = [row["input_ids"][:row["trained"].index(1)] for row in rows]
    vocabulary = model.get_input_embeddings().num_embeddings
    answers = {}

    def call(name, batch_size, shuffle=False, **options):
        def run(_):
            # In batches of its own the order given is the order kept: nothing is sorted.
            size = batch_size if shuffle else len(prompts)
            made = [answer for start in range(0, len(prompts), size)
                    for answer in generate.generate(
                        model, prompts[start:start + size],
                        [str(i) for i in range(start, min(start + size, len(prompts)))],
                        max_new_tokens=args.max_new_tokens, temperature=0.8,
                        end_ids=[vocabulary - 1], batch_size=batch_size, **options)]
            answers[name] = made
        return run

    full = args.generation_batch
    without = call("adapter not folded", full)

    def not_folded(turn):
        with unfolded():
            without(turn)

    variants = {"as it is": call("as it is", full),
                "adapter not folded": not_folded,
                "prompts not sorted": call("prompts not sorted", full, shuffle=True),
                "batch of 8": call("batch of 8", 8), "one by one": call("one by one", 1)}
    if device.type == "cuda":
        variants["dynamic cache, not compiled"] = call("dynamic cache, not compiled", full,
                                                       static_cache=False)
    seconds = measure(variants, args.rounds, device, "generate")
    results, rows = {}, []
    for name in variants:
        tokens = sum(len(answer) for answer, _ in answers[name])
        equal = sum(a == b for a, b in zip(answers[name], answers["as it is"], strict=True))
        results[name] = {"seconds": spread(seconds[name]), "tokens": tokens,
                         "tokens_per_second": spread([tokens / s for s in seconds[name]]),
                         "ratio_to_as_it_is": ratio(seconds[name], seconds["as it is"]),
                         "equal_answers": equal / len(prompts)}
        rows.append([name, shown(results[name]["tokens_per_second"]),
                     shown(results[name]["ratio_to_as_it_is"]), f"{equal}/{len(prompts)}"])
    finish(args, device, {"prompts": len(prompts), "new tokens": args.max_new_tokens,
                          "batch": full, "rounds": args.rounds}, results,
           ["variant", "tokens/s", "time of the first", "answers equal"], rows)


# --- selector -------------------------------------------------------------------------------------

def bench_selector(args):
    device = utils.pick_device(args.device)
    results, table_rows = {}, []
    for num_rows in args.sizes or (10**4, 10**5, 10**6, 10**7, 10**8):
        for optimizer in ("adam", "sgd"):
            generator = torch.Generator().manual_seed(0)
            rows = torch.randint(0, num_rows, (32,), generator=generator)
            losses = torch.rand(32, generator=generator)
            selector = Selector(num_rows, 1e-4, optimizer, device=device)

            def step(_, selector=selector, rows=rows, losses=losses):
                selector.weights(rows)
                selector.step(rows, losses, 0.1)

            omega = torch.zeros(num_rows, device=device)
            omega.grad = torch.full_like(omega, 1e-6)
            alone = (torch.optim.Adam([omega], lr=1e-4, fused=True) if optimizer == "adam" else
                     torch.optim.SGD([omega], lr=1e-4, fused=True))

            def softmax_too(_, omega=omega, alone=alone):
                torch.exp(omega, out=omega.grad)
                alone.step()

            seconds = measure({"step": step, "optimizer": lambda _, alone=alone: alone.step(),
                               "floor": softmax_too}, args.rounds, device,
                              f"selector, {num_rows} rows")
            entry = results[f"{num_rows} {optimizer}"] = {
                "seconds": {name: spread(values) for name, values in seconds.items()},
                "ratio_to_floor": ratio(seconds["step"], seconds["floor"]),
                "ratio_to_optimizer": ratio(seconds["step"], seconds["optimizer"])}
            table_rows.append([f"{num_rows} {optimizer}", milliseconds(seconds["step"]),
                               milliseconds(seconds["floor"]), shown(entry["ratio_to_floor"]),
                               milliseconds(seconds["optimizer"]),
                               shown(entry["ratio_to_optimizer"])])
            del selector, omega, alone
    finish(args, device, {"rows a step": 32, "rounds": args.rounds}, results,
           ["N", "step, ms", "exp + optimiser, ms", "ratio", "optimiser alone, ms", "ratio"],
           table_rows)


# --- data -----------------------------------------------------------------------------------------

def write_generated(path, count):
    """`count` rows of toy-like text, about 100 characters each, every prompt its own."""
    rng = random.Random(0)
    words = [wording for name in toy.CONTESTED for wording in toy.FAMILIES[name][3]]
    with open(path, "w") as file:
        for number in tqdm(range(count), desc="writing rows", unit="row", delay=3, leave=False):
            items = " ".join(rng.choices(toy.LETTERS + toy.DIGITS, k=8))
            file.write(f'{{"prompt": "{rng.choice(words)}, number {number}: {items}", '
                       f'"response": "{items[::-1]}"}}\n')


class Watch(threading.Thread):
    """The most anonymous and resident memory that this process holds, sampled 20 times a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.anonymous, self.resident = threading.Event(), 0, 0

    def run(self):
        while True:
            self.anonymous = max(self.anonymous, memory("RssAnon") or 0)
            self.resident = max(self.resident, memory("VmRSS") or 0)
            if self.over.wait(0.05):
                return

    def stop(self):
        self.over.set()
        self.join()


def data_child(args):
    """What train_offline.py does with its rows before and after training; one line of JSON."""
    lower, upper, cache = args.child
    words = ["--lower", lower, "--upper", upper, "--model", str(toy.MODEL), "--cache-dir", cache,
             "--template", toy.TEMPLATE.replace("Assistant:", "Assistant: {response}")]
    options = train_offline.parse_args(words)
    tokenizer, config = loading.load_tokenizer(options.model), loading.load_config(options.model)
    before, watch = memory("RssAnon"), Watch()
    watch.start()
    started = time.perf_counter()
    with contextlib.redirect_stdout(None):
        levels = common.load_levels(options, tokenizer, config.max_position_embeddings)
        loaded = time.perf_counter() - started
        steps = math.ceil(len(levels.lower) / options.batch)
        common.print_plan(options, levels, config, steps, steps * options.epochs)
        common.run_config(options, levels, torch.device("cpu"), torch.float32)
        selector = Selector(len(levels.lower), options.omega_lr, options.omega_optimizer)
        order = data.permutation(len(levels.lower), options.seed, 0, stream=0)[:options.batch]
        batch = data.pack(data.take(data.tokens_only(levels.lower), order))
        selector.weights(order)
        seconds = time.perf_counter() - started
        common.write_ranking(Path(cache) / "weights.jsonl", levels.lower, selector.logits,
                             options.keep_fraction, {"weight": selector.weights()})
    ranking = time.perf_counter() - started - seconds
    watch.stop()
    print(json.dumps({
        "rows": len(levels.lower), "tokens": levels.reports["lower"]["tokens"],
        "load_seconds": loaded, "start_seconds": seconds, "ranking_seconds": ranking,
        "batch_tokens": len(batch["targets"]),
        "anonymous_bytes": watch.anonymous - before if before else None,
        "resident_bytes": watch.resident or None, "before_bytes": before}))


def bench_data(args):
    if args.child:
        data_child(args)
        return
    results, rows = {}, []
    for count in args.sizes or (10**5, 10**6):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            folder = Path(folder)
            write_generated(folder / "lower.jsonl", count)
            utils.write_jsonl(folder / "upper.jsonl", toy.make_rows(num_lower=8)["upper"])
            command = [sys.executable, __file__, "data", "--child", str(folder / "lower.jsonl"),
                       str(folder / "upper.jsonl"), str(folder / "cache")]

            def child(command=command):
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
                if done.returncode:
                    raise UserError(f"the measured process failed with code {done.returncode}")
                return json.loads(done.stdout.splitlines()[-1])

            first = child()
            warm = [child() for _ in range(args.rounds)]
            size = sum(f.stat().st_size for f in (folder / "cache").rglob("*") if f.is_file())
        starts = spread([run["start_seconds"] for run in warm])
        results[str(count)] = {
            "tokenise_seconds": first["load_seconds"],
            "tokens": first["tokens"], "rows_per_second": count / first["load_seconds"],
            "start_seconds": starts,
            "ranking_seconds": spread([run["ranking_seconds"] for run in warm]),
            "ratio_first_to_start": ratio(
                [first["start_seconds"]] * len(warm), [run["start_seconds"] for run in warm]),
            "anonymous_bytes_tokenising": first["anonymous_bytes"],
            "anonymous_bytes": max(run["anonymous_bytes"] or 0 for run in warm),
            "resident_bytes": max(run["resident_bytes"] or 0 for run in warm),
            "process_bytes_before": warm[0]["before_bytes"], "cache_bytes": size}
        entry = results[str(count)]
        rows.append([str(count), f"{entry['tokenise_seconds']:.1f}",
                     f"{entry['rows_per_second']:.0f}", shown(starts),
                     shown(entry["ranking_seconds"]),
                     mebibytes(entry["anonymous_bytes_tokenising"]),
                     mebibytes(entry["anonymous_bytes"]), mebibytes(entry["resident_bytes"]),
                     mebibytes(size)])
    finish(args, torch.device("cpu"), {"rounds": args.rounds}, results,
           ["rows", "tokenise s", "rows/s", "start s", "ranking s", "anon. MiB first", "anon. MiB",
            "resident MiB", "cache MiB"], rows)


# --- table2 ---------------------------------------------------------------------------------------

PUBLISHED_RUN = {"batch": 32, "epochs": 3, "k_gen": 500, "max_new_tokens": 512}
PUBLISHED_ROWS = {"pythia-1b": 9600, "llama3-8b": 56000}


def bench_table2(args):
    """Hours of the paper's runs at its sizes, from steps and answers measured here."""
    device = utils.pick_device(args.device)
    measured = {}
    if device.type == "cuda" or args.model:
        for shape in [args.model] if args.model else PUBLISHED_ROWS:
            measured[shape] = extrapolate(args, device, shape)
    else:
        print("no CUDA device: the published hours stand alone; a CPU's step says nothing about "
              "them")
    shapes = list(PUBLISHED_ROWS)
    results, rows = {}, []
    for name, hours in PUBLISHED_HOURS.items():
        results[name] = {"published_hours": dict(zip(shapes, hours, strict=True))}
        row = [name]
        for shape, published in zip(shapes, hours, strict=True):
            here = measured.get(shape, {}).get(name)
            row += [published, "not measured" if here is None else round(here, 2)]
        results[name]["extrapolated_hours"] = {
            shape: found.get(name) for shape, found in measured.items()}
        results[name]["published_over_here"] = {
            shape: hours[shapes.index(shape)] / found[name]
            for shape, found in measured.items() if shape in shapes and name in found}
        rows.append(row)
    finish(args, device, {"lower tokens a row": args.lower_tokens, "upper tokens a row":
                          args.upper_tokens, **PUBLISHED_RUN}, results,
           ["hours", "Pythia-1b, published", "extrapolated here", "Llama-8b, published",
            "extrapolated here"], rows)
    if measured:
        print("extrapolated: seconds of a measured step x steps of three epochs, plus the answers "
              "of every refresh at the measured tokens a second, rows of the assumed mean lengths; "
              "evaluation and loading are left out")


def extrapolate(args, device, shape):
    """{method: hours} for one of SHAPES."""
    count = PUBLISHED_RUN["batch"] * args.rounds
    options = SimpleNamespace(**vars(args) | {"model": shape, "lower": None, "upper": None})
    model, lower, upper = load(options, device, count)
    batches = [list(range(i, i + PUBLISHED_RUN["batch"]))
               for i in range(0, count, PUBLISHED_RUN["batch"])]
    variants = step_variants(args, model, lower, upper, batches)
    names = {"mixing": "plain SFT", "BDS": "BDS, loss at theta^{k+1}",
             "online": "online, R=10%, G=1"}
    seconds = measure({key: variants[name] for key, name in names.items()}, args.rounds, device,
                      f"steps, {shape}")
    prompts = [row["input_ids"][:row["trained"].index(1)] for row in lower]
    speed = measure({"answers": lambda _: generate.generate(
        model, prompts, [str(i) for i in range(count)], max_new_tokens=args.max_new_tokens,
        temperature=0.8, end_ids=[0], batch_size=args.generation_batch)}, 1, device,
        f"answers, {shape}")["answers"][0] / count
    rows = PUBLISHED_ROWS.get(shape, count)
    steps = math.ceil(rows / PUBLISHED_RUN["batch"]) * PUBLISHED_RUN["epochs"]
    refreshes = math.ceil(steps / PUBLISHED_RUN["k_gen"])
    window = min(rows, PUBLISHED_RUN["k_gen"] * PUBLISHED_RUN["batch"])  # only what will be read
    step = {key: spread(values)["median"] for key, values in seconds.items()}
    hours = {"mixing": step["mixing"] * steps / 3600, "BDS": step["BDS"] * steps / 3600}
    for share, group in ((0.05, 1), (0.1, 1), (0.1, 5)):
        # G answers to a masked row: G - 1 more rows in that share of the lower level.
        extra = (group - 1) * share * args.lower_tokens / (args.lower_tokens + args.upper_tokens)
        training = step["online"] * (1 + extra) * steps
        answering = refreshes * window * share * group * speed
        hours[f"online R={round(100 * share)}% G={group}"] = (training + answering) / 3600
    return hours


# --- the command line -----------------------------------------------------------------------------

def main(argv=None):
    parser = argparse.ArgumentParser(description="Speed and memory, with a peer or a floor beside "
                                                 "every figure.")
    commands = parser.add_subparsers(dest="benchmark", required=True)
    functions = {"logprob": bench_logprob, "step": bench_step, "generate": bench_generate,
                 "selector": bench_selector, "data": bench_data, "table2": bench_table2}
    rounds = {"logprob": 9, "step": 7, "generate": 3, "selector": 5, "data": 3, "table2": 5}
    for name, function in functions.items():
        command = commands.add_parser(name, help=(function.__doc__ or "").split("\n")[0])
        add = command.add_argument
        add("--json", help="save settings and results here")
        add("--rounds", type=int, default=rounds[name], help="timed calls of every variant")
        if name != "data":
            add("--device", default="auto", help="auto, cpu, cuda")
        if name == "logprob":
            add("--sizes", type=int, nargs=3, metavar=("T", "D", "V"),
                help="tokens, width, vocabulary (CUDA: 16384 4096 128256; CPU: 512 256 32000)")
        if name in ("selector", "data"):
            add("--sizes", type=int, nargs="+", metavar="N", help="numbers of rows")
        if name == "data":
            add("--folder", help="where the generated rows go (default: the system's; 10^7 rows "
                                 "need about 6 GB)")
            add("--child", nargs=3, help=argparse.SUPPRESS)
        if name in ("step", "generate", "table2"):
            add("--model", help="folder or hub name; or random weights: " + ", ".join(SHAPES))
            add("--lower-tokens", type=int, default=160, help="mean length of random lower rows")
            add("--upper-tokens", type=int, default=400, help="mean length of random upper rows")
            add("--gradient-checkpointing", action="store_true")
        if name in ("step", "generate"):
            add("--lower", help="rows of the noisy level, as in train_offline.py")
            add("--upper", help="rows of the trusted level")
            add("--vocabulary", type=int, help="random weights of the model's shape with so many "
                                               "tokens in the head")
        if name in ("step", "table2"):
            add("--micro-batch", type=int, default=8, help="rows of each level a forward (8)")
        if name == "step":
            add("--batch", type=int, help="rows of each level a step (CUDA: 32, CPU: 8)")
        if name in ("generate", "table2"):
            add("--max-new-tokens", type=int, default=64 if name == "generate" else 512)
            add("--generation-batch", type=int, default=64, help="answers at a time (64)")
        if name == "generate":
            add("--prompts", type=int, default=128)
    args = parser.parse_args(argv)
    args.words = " ".join(  # saved for others, to whom this machine's folders say nothing
        Path(word).name if Path(word).is_absolute() else word
        for word in (sys.argv[1:] if argv is None else argv))
    for name in ("rounds", "micro_batch", "batch", "prompts", "max_new_tokens",
                 "generation_batch", "lower_tokens", "upper_tokens", "vocabulary"):
        if getattr(args, name, None) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    if min(getattr(args, "sizes", None) or [1]) < 1:
        raise UserError(f"--sizes {args.sizes}: must be 1 or more")
    if getattr(args, "json", None) and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: no such folder")
    if args.benchmark == "table2":
        args.vocabulary = None
        if args.model and args.model not in SHAPES:
            raise UserError(f"--model {args.model}: table2 knows " + ", ".join(SHAPES))
    functions[args.benchmark](args)


if __name__ == "__main__":
    utils.run(main)
