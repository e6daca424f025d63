"""Head and log-probs: time, memory and error against the obvious way and other libraries.

Compared with log_softmax over full logits; with torch's `linear_cross_entropy` (2.13); on CUDA with
liger-kernel, QuACK and cut-cross-entropy where they are installed. The floor is two matrix products
of the same sizes (one without a gradient) in float32 (CUDA: bf16) in the same rounds.

The head is frozen, as under LoRA: no variant makes its gradient but Liger's CuTe kernel, which has
no switch for it and so runs three products.
"""

import contextlib
import importlib.util

import torch

import logprobs
from benchmarks.measure import (
    mebibytes,
    milliseconds,
    peak_memory,
    ratio,
    shown,
    spread,
    store_and_print,
    time_variants,
)
from runtime import processes

CHECKED = 64  # rows compared with float64; more float64 logits would not fit


class Problem:
    """Random hidden states (T, d), a frozen head (V, d), targets (T,), and float64 truth.

    bf16 on CUDA, float32 elsewhere. `logps` and `gradient`: of the first CHECKED rows.
    """

    def __init__(self, length, width, vocabulary, device):
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.hidden = torch.randn(length, width, device=device).to(dtype).requires_grad_()
        self.head = (torch.randn(vocabulary, width, device=device) / width**0.5).to(dtype)
        self.targets = torch.randint(0, vocabulary, (length,), device=device)
        self.part = slice(0, min(length, CHECKED))
        exact = self.hidden[self.part].detach().double().requires_grad_()
        logps = logprobs.token_logprobs_reference(exact, self.head.double(),
                                                  self.targets[self.part])
        logps.sum().backward()
        self.logps, self.gradient = logps.detach(), exact.grad

    def gradient_error(self):
        """Of `hidden.grad` against float64: the norm of the difference over the norm."""
        found = self.hidden.grad[self.part].double()
        return ((found - self.gradient).norm() / self.gradient.norm()).item()

    def logps_error(self, logps):
        """Of log-probs (T,) against float64: the largest difference in nats."""
        return (logps[self.part].double() - self.logps).abs().max().item()


def own_kernels(hidden):
    """The kernels of logprobs.py that run here; Triton's interpreter only where asked for."""
    found = ["torch"]
    with contextlib.suppress(ValueError):
        found.append(logprobs._pick("triton", hidden))
    return found


def installed(name):
    return importlib.util.find_spec(name) is not None


def peers(device):
    """Names of the other libraries for "cuda" or "cpu": (those that are here, those that lack)."""
    here = ["torch"] if hasattr(torch.nn.functional, "linear_cross_entropy") else []
    names = ["torch"]
    if device == "cuda":  # cutlass is what QuACK and Liger's CuTe kernels are written in
        names += ["cut_cross_entropy", "liger_kernel", "cutlass", "quack"]
        here += filter(installed, names[1:])
    return here, [name for name in names if name not in here]


def gradient_variants(problem, peers=True):
    """{name: callable} that each leave d sum(log p) / d hidden in `hidden.grad`."""
    hidden, head, targets = problem.hidden, problem.head, problem.targets

    def call(logps_of):
        def step(_):
            hidden.grad = None
            logps_of().sum().backward()
        return step

    variants = {f"here, {kernel}": call(lambda kernel=kernel: logprobs.token_logprobs(
        hidden, head, targets, kernel=kernel)) for kernel in own_kernels(hidden)}
    variants["full logits"] = call(
        lambda: logprobs.token_logprobs(hidden, head, targets, kernel="reference"))
    if not peers:
        return variants
    fused = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if fused is not None:
        options = torch.nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions()
        variants["torch linear_cross_entropy"] = call(
            lambda: -fused(hidden, head, targets, reduction="none"))
        variants["torch linear_cross_entropy, chunked"] = call(
            lambda: -fused(hidden, head, targets, reduction="none", options=options))
    if hidden.is_cuda:
        variants |= {name: call(lambda loss=loss: -loss(hidden, head, targets))
                     for name, loss in peer_losses().items()}
    return variants


def peer_losses():
    """{name: loss(hidden, head, targets)} of the libraries that are installed, for CUDA.

    The sum where a library has no gradient of single tokens. Each imports its kernels when first
    called, so one that breaks on import is a failed variant and no more.
    """
    found = {}
    if installed("cut_cross_entropy"):
        def cut(hidden, head, targets):
            from cut_cross_entropy import linear_cross_entropy

            return linear_cross_entropy(hidden, head, targets, reduction="none")
        found["cut-cross-entropy"] = cut
    if installed("liger_kernel"):
        def liger(hidden, head, targets):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(head, hidden, targets)
        found["liger-kernel (sum only)"] = liger
    if installed("liger_kernel") and installed("cutlass"):
        def liger_cute(hidden, head, targets):
            from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90

            return fused_linear_cross_entropy_sm90.liger_fused_linear_cross_entropy_sm90(
                hidden, head, targets, reduction="sum")
        found["liger-kernel, CuTe (sum only, three products)"] = liger_cute
    if installed("quack"):
        def quack(hidden, head, targets):
            from quack.linear_cross_entropy import chunked_linear_cross_entropy

            return chunked_linear_cross_entropy(hidden, head, targets, reduction="sum")
        found["QuACK (sum only)"] = quack
    return found


def scoring_variants(problem, peers=True):
    """{name: callable} without a gradient; each returns log-probs (T,), or their sum."""
    hidden, head, targets = problem.hidden, problem.head, problem.targets
    best = own_kernels(hidden)[-1]

    def call(logps_of):
        return torch.no_grad()(lambda _: logps_of())

    variants = {"no gradient": call(lambda: logprobs.token_logprobs(hidden, head, targets,
                                                                    kernel=best))}
    if not peers or not hidden.is_cuda:
        return variants
    if installed("liger_kernel") and installed("cutlass"):
        def liger_cute():
            from liger_kernel.ops.cutedsl.ops import fused_scaled_cross_entropy_sm90

            return -fused_scaled_cross_entropy_sm90.fused_scaled_cross_entropy_forward(
                hidden, head, targets)[0]
        variants["no gradient, liger-kernel, CuTe"] = call(liger_cute)
    losses = peer_losses()
    for name in ("cut-cross-entropy", "QuACK (sum only)"):
        if name in losses:
            variants[f"no gradient, {name}"] = call(
                lambda loss=losses[name]: -loss(hidden, head, targets))
    return variants


def floors(problem):
    """The bare products: with a gradient two, without one; in the chunks that logprobs.py takes."""
    hidden, head = problem.hidden.detach(), problem.head
    (length, width), vocabulary = hidden.shape, len(head)
    chunk = min(length, logprobs._chunk_rows(length, vocabulary, problem.device))
    logits = torch.empty(chunk, vocabulary, dtype=problem.dtype, device=problem.device)
    out = torch.empty(length, width, dtype=problem.dtype, device=problem.device)

    def products(backward):
        for start in range(0, length, chunk):
            rows = slice(start, min(start + chunk, length))
            here = torch.mm(hidden[rows], head.T, out=logits[:rows.stop - start])
            if backward:
                torch.mm(here, head, out=out[rows])

    return {"floor: two products": lambda _: products(True),
            "floor: one product": lambda _: products(False)}


def first_calls(problem, variants, scoring):
    """{name: {"peak_bytes", errors}}; a variant that fails is recorded and leaves `variants`.

    No memory, or a peer without a kernel for this machine or these sizes.
    """
    results = {}
    for name, call in list(variants.items()):
        made, problem.hidden.grad = [], None
        try:
            peak = peak_memory(lambda call=call, made=made: made.append(call(0)), problem.device)
        except Exception as error:  # a peer raises anything
            results[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            del variants[name]
            continue
        results[name] = {"peak_bytes": peak}
        if name not in scoring:
            results[name]["gradient_error"] = problem.gradient_error()
        elif made[0].ndim:
            results[name]["logps_error"] = problem.logps_error(made[0])
    return results


def compare_heads(sizes, device, rounds, peers=True):
    """{variant: times, ratios, errors, peak memory} at sizes (T, d, V)."""
    problem = Problem(*sizes, device)
    scoring = scoring_variants(problem, peers)
    variants = gradient_variants(problem, peers) | scoring
    results = first_calls(problem, variants, scoring)
    variants |= floors(problem)
    seconds = time_variants(variants, rounds, device, "logprob")
    for name in variants:
        floor = name if name.startswith("floor") else (
            f"floor: {'one product' if name in scoring else 'two products'}")
        results.setdefault(name, {}).update({
            "seconds": spread(seconds[name]), "floor": floor,
            "ratio_to_floor": ratio(seconds[name], seconds[floor]),
            "ratio_to_full_logits": ratio(seconds["full logits"], seconds[name])
            if "full logits" in seconds else None})
    return results


def bench_logprob(args):
    device = processes.pick_device(args.device)
    sizes = args.sizes or ((16384, 4096, 128256) if device.type == "cuda" else (512, 256, 32000))
    results = compare_heads(sizes, device, args.rounds)
    rows = []
    for name, entry in results.items():
        if "failed" in entry:
            rows.append([name, "failed: " + entry["failed"][:40], None, None, None])
            continue
        error = entry.get("gradient_error")
        rows.append([name, milliseconds(entry["seconds"]), shown(entry["ratio_to_floor"]),
                     mebibytes(entry.get("peak_bytes")), error and f"{error:.1e}"])
    length, width, vocabulary = sizes
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    store_and_print(args, device, {"T": length, "d": width, "V": vocabulary, "dtype": dtype,
                          "rounds": args.rounds}, results,
           ["variant", "ms (min-max)", "of the floor", "peak MiB", "gradient error"], rows)
