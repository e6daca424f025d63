"""Packed rows -> log pi(y | x), with the gradient made in the forward   (Eq. SFT_def).

    log pi(y | x) = sum_t log p_t,    log p_t = W[y_t] . h_t - log sum_v exp(W[v] . h_t)

Two things make this cheap. Rows are packed one after another into a single sequence, so no token is
padding; attention stays inside each row. And the head W is frozen (LoRA leaves it alone), so

    g_t = d log p_t / d h_t = W[y_t] - softmax(W h_t) W

does not depend on what the loss later does with log p_t. It is made chunk by chunk next to log p_t
while the logits are still at hand; backward only scales rows of g. Two matrix products, no T x V
tensor, and per-token weights may be decided *after* the forward (importance ratios are).

    memory for T response tokens        logits and gradient   here: T d, and a chunk
    T = 4,096, V = 50,304, d = 2,048    1.6 GB (float32)      34 MB (float32) + 32 MB
    T = 16,384, V = 128,256, d = 4,096  16.8 GB (float32)     134 MB (bf16) + 1 GB on CUDA

Only response positions reach the head. Under no_grad one matrix product runs instead of two.

On CUDA a Triton kernel turns a row of float32 logits into its log-prob and, in place, into the
bf16 row of one-hot minus softmax that the second product reads; and attention is torch's
`varlen_attn`. Elsewhere plain torch computes the same. `kernel=` (or KERNEL, or the environment
variable LOGPROBS_KERNEL) forces one: "auto", "torch", "triton", "reference".

Plain tensors in and out; imports nothing from the project. float64 in gives float64 out, anything
else returns float32 log-probs: bf16 ones are off by 0.06-0.35 a token, and sums are exponentiated.

Not supported, and routed to `reference=True` (the model's own logits, slow but general): heads with
a bias, soft-capped or scaled logits, an adapted or trained head. Refused: sliding windows shorter
than a row, soft caps or sinks in attention. `check_model` compares both paths on a loaded model.
"""

import contextlib
import inspect
import os

import torch
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

try:  # not on Windows, macOS and most CPU installations
    import triton
    import triton.language as tl
except ImportError:
    triton = None
try:  # torch 2.10 has another signature; CUDA only, whatever the import says
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

ATTENTION = "packed"          # the name under which the attention below is known to transformers
KERNEL = os.environ.get("LOGPROBS_KERNEL", "auto")
BLOCK = 8192                  # columns of a row that the Triton kernel holds at a time
HEADROOM = 40.0               # nats that a logit may lie above the kernel's offset
KERNELS = ("auto", "torch", "triton", "reference")
CHUNK_ELEMENTS = 8 * 2**20    # logits held at a time on the CPU: 32 MB in float32
CUDA_CHUNK_BYTES = 2**30      # on CUDA at most; products of 2,000 rows run at full speed
CUDA_CHUNK_SHARE = 0.25       # and no larger part of the free memory


# --- hidden states -> log-probs -------------------------------------------------------------------

def token_logprobs_reference(hidden, head, targets):
    """What `token_logprobs` computes, written the obvious way; holds all logits at once."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    with torch.autocast(hidden.device.type, enabled=False):
        logits = hidden.to(dtype) @ head.to(dtype).T
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)


def token_logprobs(hidden, head, targets, kernel=None):
    """log p(target) for every position.

    hidden (T, d), head (V, d), targets (T,) int64 -> (T,) float32 (float64 for float64), nats.
    Differentiable in `hidden`, once (twice with kernel="reference"); a head that wants a gradient
    gets it from the reference alone, and is refused elsewhere. kernel: one of KERNELS, None for the
    module's KERNEL. Targets outside [0, V) are the caller's error and, as in `gather`, checked on
    no path that is fast. ValueError for shapes that do not match.
    """
    if hidden.ndim != 2 or head.ndim != 2 or hidden.shape[1] != head.shape[1] \
            or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, head {tuple(head.shape)} and targets "
                         f"{tuple(targets.shape)} do not match")
    kernel = _pick(kernel or KERNEL, hidden)
    if kernel == "reference":
        return token_logprobs_reference(hidden, head, targets)
    if torch.is_grad_enabled() and head.requires_grad:
        raise ValueError("the head wants a gradient, which only kernel='reference' gives")
    with torch.autocast(hidden.device.type, enabled=False):
        wants_grad = torch.is_grad_enabled() and hidden.requires_grad
        return _TokenLogprobs.apply(hidden, head, targets, wants_grad, kernel)


def _pick(kernel, hidden):
    """The kernel that runs; ValueError for a name that is none, or Triton where it cannot run."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r}: one of {', '.join(KERNELS)}")
    fits = triton is not None and hidden.dtype in (torch.bfloat16, torch.float32) and (
        hidden.is_cuda or _interpreted())
    if kernel == "triton" and not fits:
        raise ValueError(f"kernel 'triton': not for {hidden.dtype} on {hidden.device.type}, or "
                         "Triton is not installed; use 'auto' or 'torch'")
    if kernel == "auto":
        return "triton" if fits and hidden.is_cuda else "torch"
    return kernel


def _interpreted():
    """Whether Triton's interpreter stands in for a GPU, on the CPU and slowly: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _TokenLogprobs(torch.autograd.Function):
    """Saves g (T, d) in the dtype of `hidden`; backward is one elementwise product, no matmul."""

    @staticmethod
    def forward(ctx, hidden, head, targets, wants_grad, kernel):
        logps, gradient = _chunked(hidden, head, targets, wants_grad, kernel)
        ctx.save_for_backward(gradient)
        return logps

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps):
        (gradient,) = ctx.saved_tensors
        # In float32, rounded once: `out` keeps a wide T x d product from being written.
        d_hidden = torch.mul(gradient, grad_logps[:, None], out=torch.empty_like(gradient))
        return d_hidden, None, None, None, None


def _chunked(hidden, head, targets, wants_grad, kernel):
    """log-probs (T,) and, if wanted, g (T, d) in the dtype of `hidden`; never T x V."""
    length, vocabulary = len(hidden), len(head)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logps = torch.empty(length, dtype=dtype, device=hidden.device)
    gradient = torch.empty_like(hidden) if wants_grad else None
    # Off CUDA no product of bf16 tensors ends in float32: the head is widened, once for all chunks.
    wide = head if head.dtype == dtype or head.is_cuda else head.to(dtype)
    second = head if hidden.dtype == head.dtype else wide  # factor of the second product
    chunk = _chunk_rows(length, vocabulary, hidden.device)
    # Rows start at multiples of 32 bytes: products of unaligned rows leave the fast kernels.
    buffer = torch.empty(min(chunk, length), -(-vocabulary // 16) * 16, dtype=dtype,
                         device=hidden.device)[:, :vocabulary]
    exps = None
    if kernel == "triton" and wants_grad:
        exps = torch.empty_like(buffer, dtype=second.dtype)
    for start in range(0, length, chunk):
        rows = slice(start, min(start + chunk, length))
        with _exact_products(hidden.dtype, head.dtype):
            logits = _logits(hidden[rows], wide, buffer[: rows.stop - start])
        if kernel == "triton":
            here = None if exps is None else exps[:len(logits)]
            rest, total = _triton_rows(logits, targets[rows], logps[rows], here)
            if wants_grad:
                # (rest W[y] - exps W) / total: the target's share is the product's addend.
                g = second[targets[rows]].mul_(rest[:, None])
                gradient[rows] = g.addmm_(here, second, alpha=-1).mul_(1 / total[:, None])
            continue
        d_logits = _torch_rows(logits, targets[rows], logps[rows], wants_grad, second.dtype)
        if wants_grad and hidden.dtype == head.dtype:
            torch.mm(d_logits, head, out=gradient[rows])
        elif wants_grad:
            gradient[rows] = d_logits @ second
    return logps, gradient


def _chunk_rows(length, vocabulary, device):
    """Rows of logits to hold at a time: on CUDA by free memory, in equal parts."""
    if device.type != "cuda":
        return max(16, CHUNK_ELEMENTS // vocabulary)
    free = torch.cuda.mem_get_info(device)[0] + (
        torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    most = max(128, int(min(CUDA_CHUNK_BYTES, CUDA_CHUNK_SHARE * free)) // (4 * vocabulary))
    parts = max(1, -(-length // most))
    return max(128, -(-length // parts // 128) * 128)


@contextlib.contextmanager
def _exact_products(*dtypes):
    """On the CPU, float32 products of numbers that all are bf16 run in the bf16 units, for a while.

    Nothing is rounded: their factors are exact in bf16, sums and results stay float32. 3 times as
    fast on a processor with AVX512-BF16; on one without, oneDNN multiplies as always.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9
    if settings is None or any(dtype != torch.bfloat16 for dtype in dtypes):
        yield
        return
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _logits(hidden, head, out):
    """hidden @ head.T into `out`, never rounded below float32."""
    if hidden.dtype == out.dtype == head.dtype:
        return torch.mm(hidden, head.T, out=out)
    if hidden.is_cuda and hidden.dtype == head.dtype:
        return torch.mm(hidden, head.T, out_dtype=out.dtype, out=out)
    return torch.mm(hidden.to(out.dtype), head.to(out.dtype).T, out=out)


def _torch_rows(logits, targets, logps, wants_grad, dtype):
    """Destroys `logits` (C, V). Fills logps (C,); returns one-hot minus softmax (C, V) in `dtype`.

    The target's entry is rest / total, the share of the *other* tokens: 1 - p would cancel where p
    is near one. Everything is float32 (float64) until the last rounding.
    """
    target = targets[:, None]
    top = logits.amax(dim=1, keepdim=True)  # subtracted first, so that nothing below overflows
    picked = logits.gather(1, target) - top
    rest = logits.scatter_(1, target, -torch.inf).sub_(top).exp_().sum(dim=1, keepdim=True)
    total = rest + picked.exp()
    logps.copy_((picked - total.log()).squeeze(1))
    if wants_grad:
        logits.mul_(-1 / total).scatter_(1, target, rest / total)
        return logits.to(dtype)


if triton is not None:
    @triton.jit
    def _exponentials(logits_ptr, exps_ptr, target, offset, V: tl.constexpr, BLOCK: tl.constexpr,
                      GRADIENT: tl.constexpr, ROUND: tl.constexpr):
        """One reading of a row: (sum of exp(z - offset) off the target, the largest logit).

        Sums stay in float32 lanes; columns past V are masked.
        """
        lanes = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), -3.0e38, tl.float32)
        rest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            at = start + lanes
            z = tl.load(logits_ptr + at, mask=at < V, other=-float("inf"))
            top = tl.maximum(top, z)
            e = tl.where(at == target, 0.0, tl.exp(z - offset))
            rest += e
            if GRADIENT:
                if ROUND:  # to the nearest bf16: a GPU's cast does, the interpreter's cuts off
                    bits = e.to(tl.int32, bitcast=True)
                    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
                    e = bits.to(tl.float32, bitcast=True)
                tl.store(exps_ptr + at, e.to(exps_ptr.dtype.element_ty), mask=at < V)
        return tl.sum(rest, axis=0), tl.max(top, axis=0)

    @triton.jit
    def _row_kernel(logits_ptr, exps_ptr, targets_ptr, logps_ptr, rest_ptr, total_ptr, row_stride,
                    exps_stride, V: tl.constexpr, BLOCK: tl.constexpr, HEADROOM: tl.constexpr,
                    GRADIENT: tl.constexpr, ROUND: tl.constexpr):
        """One program a row of float32 logits (V,), which is read once.

        exp(z - offset) needs an offset before the row's maximum is known: the larger of the
        target's logit and the first block's maximum. bf16 reaches as far as float32, so any offset
        within HEADROOM of the maximum does; a row that rises higher is read a second time.
        """
        row = tl.program_id(0).to(tl.int64)  # 2^31 logits are 16,744 rows of Llama's vocabulary
        logits_ptr += row * row_stride
        exps_ptr += row * exps_stride
        target = tl.load(targets_ptr + row)
        picked = tl.load(logits_ptr + target)
        lanes = tl.arange(0, BLOCK)
        first = tl.load(logits_ptr + lanes, mask=lanes < V, other=-float("inf"))
        offset = tl.maximum(picked, tl.max(first, axis=0))
        rest, top = _exponentials(logits_ptr, exps_ptr, target, offset, V, BLOCK, GRADIENT, ROUND)
        if top > offset + HEADROOM:
            offset = top
            rest, top = _exponentials(logits_ptr, exps_ptr, target, offset, V, BLOCK, GRADIENT,
                                      ROUND)
        total = rest + tl.exp(picked - offset)
        tl.store(logps_ptr + row, picked - offset - tl.log(total))
        tl.store(rest_ptr + row, rest)
        tl.store(total_ptr + row, total)


def _triton_rows(logits, targets, logps, exps=None):
    """Log-probs of float32 logits (C, V) into `logps` (C,), by one kernel.

    exps: (C, V) bf16 or float32, filled with exp(z - offset) and zero at the target; None without a
    gradient. Returns (rest, total), (C,) each: the row sum of `exps`, and that with the target's.
    Then one-hot minus softmax is (rest at the target, -exps elsewhere) / total.
    """
    assert logits.dtype == logps.dtype == torch.float32 and logits.stride(1) == 1, logits.stride()
    rest, total = torch.empty_like(logps), torch.empty_like(logps)
    out = logits if exps is None else exps
    if len(logits):
        _row_kernel[(len(logits),)](
            logits, out, targets.contiguous(), logps, rest, total, logits.stride(0), out.stride(0),
            V=logits.shape[1], BLOCK=BLOCK, HEADROOM=HEADROOM, GRADIENT=exps is not None,
            ROUND=_interpreted() and out.dtype == torch.bfloat16, num_warps=16)
    return rest, total


# --- packed rows through the model ----------------------------------------------------------------

def pack(rows, device="cpu"):
    """Rows -> one sequence without padding, T tokens in all, for `sequence_logprobs`.

    rows: dictionaries with "input_ids", a list of n token ids, and "trained", a list of n numbers,
    1 where the token carries loss (the tokens of the response, not the positions that predict
    them). Returns, on `device`:
    input_ids, position_ids (1, T) int64: positions restart at every row, which isolates rows.
    cu_seqlens (B + 1,) int32: where each row starts, and T.
    targets (T,) int64: the next token of the same row; 0 at a row's last position.
    response_mask (T,) bool: True where the target carries loss.
    """
    input_ids = []
    position_ids = []
    targets = []
    response_mask = []
    starts = [0]
    for row in rows:
        tokens = row["input_ids"]
        input_ids += tokens
        position_ids += range(len(tokens))
        targets += [*tokens[1:], 0]
        response_mask += [*row["trained"][1:], 0]
        starts.append(len(input_ids))
    return {
        "input_ids": torch.tensor([input_ids], dtype=torch.int64, device=device),
        "position_ids": torch.tensor([position_ids], dtype=torch.int64, device=device),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32, device=device),
        "targets": torch.tensor(targets, dtype=torch.int64, device=device),
        "response_mask": torch.tensor(response_mask, dtype=torch.bool, device=device),
    }


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                     cu_seqlens=None, row_lengths=None, **kwargs):
    """Causal attention inside each packed row; without `cu_seqlens`, transformers' own SDPA.

    query (1, H, T, D), key and value (1, H_kv, T, D), cu_seqlens (B + 1,) int32 row borders,
    row_lengths their differences as a list (made once a forward: on CUDA reading them waits).
    Returns ((1, T, H, D), None). On CUDA one kernel for all rows, else a loop: never a T x T mask.
    """
    if cu_seqlens is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask,
                                      scaling=scaling, dropout=dropout, **kwargs)
    lengths = cu_seqlens.diff().tolist() if row_lengths is None else row_lengths
    window = kwargs.get("sliding_window")
    if window is not None and window < max(lengths):
        raise ValueError(f"a row of {max(lengths)} tokens is longer than the model's sliding "
                         f"window of {window}; lower --max-length")
    if unread := {"softcap", "s_aux", "sinks", "position_bias", "indices"} & {
            name for name, value in kwargs.items() if value is not None}:
        raise ValueError(f"this model's attention needs {min(unread)}, which is not supported")
    dtype = value.dtype
    if value.device.type == "cpu" and dtype == torch.bfloat16:
        value = value.float()  # torch's bf16 backward takes twice as long there, and is less exact
    query, key = query.to(value.dtype), key.to(value.dtype)  # a norm under autocast is float32
    fused, grouped = _varlen(query, value) if not dropout else (False, False)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not grouped:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if fused:
        output = varlen_attn(
            *(x[0].transpose(0, 1) for x in (query, key, value)), cu_seqlens, cu_seqlens,
            max(lengths), max(lengths), scale=scaling, window_size=(-1, 0),  # causal
            **({"enable_gqa": groups > 1} if grouped else {}))
        return output[None], None
    rows = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    output = torch.cat([torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, dropout_p=dropout, scale=scaling) for q, k, v in rows], dim=2)
    return output.transpose(1, 2).contiguous().to(dtype), None


def _varlen(query, value):
    """(varlen_attn takes these heads, and fewer key heads than query heads): torch 2.11 to 2.13."""
    if varlen_attn is None or not _has_flash(query.device) \
            or query.dtype not in (torch.float16, torch.bfloat16) \
            or query.shape[-1] > 256 or query.shape[-1] % 8 or value.shape[-1] != query.shape[-1]:
        return False, False
    parameters = inspect.signature(varlen_attn).parameters
    return "window_size" in parameters, "enable_gqa" in parameters


def _has_flash(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)  # generation pads, and needs real masks


def packed_forward(model, batch):
    """A backbone's hidden states (T, d), or a causal LM's logits (T, V), for a packed batch.

    In the dtype of the base. Wrapped by PEFT, adapters compute in float32 unless their layers have
    another forward (this project's models.py gives them one).
    """
    dtype = model.get_input_embeddings().weight.dtype
    # A 4-D mask is handed through untouched by transformers, so none is built; ours ignores it.
    placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch["input_ids"].device)
    output = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"],
                   attention_mask=placeholder, use_cache=False, cu_seqlens=batch["cu_seqlens"],
                   row_lengths=batch["cu_seqlens"].diff().tolist())
    return output[0][0].to(dtype)


def _plain_head(causal_lm):
    """The head's weight when log-probs are simply softmax(W h), else None."""
    head, config = causal_lm.get_output_embeddings(), causal_lm.config
    special = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier",
               "output_multiplier_scale")
    if type(head) is not torch.nn.Linear or head.bias is not None or (
            head.weight.requires_grad and torch.is_grad_enabled()):
        return None
    return None if any(getattr(config, name, None) is not None for name in special) else head.weight


def token_logps(model, batch, reference=False, greedy=False):
    """log p of every response token of the packed rows; the arguments of `sequence_logprobs`.

    Returns (logps (n,) nats, row (n,) which row of the batch each belongs to), in the order of
    `response_mask`; with greedy also (n,) bool, whether no other token is likelier.
    """
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    if causal_lm.config._attn_implementation != ATTENTION:
        raise ValueError(f"load the model with attn_implementation={ATTENTION!r}: under "
                         f"{causal_lm.config._attn_implementation!r} packed rows see each other")
    where = batch["response_mask"].nonzero().squeeze(1)
    targets = batch["targets"][where]
    head = _plain_head(causal_lm)
    if reference or head is None:
        logits = packed_forward(causal_lm, batch)[where]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logps = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
        likeliest = logits.argmax(dim=1) if greedy else None
    else:
        hidden = packed_forward(causal_lm.base_model, batch)[where]
        logps = token_logprobs(hidden, head, targets)
        likeliest = torch.cat([(part @ head.T).argmax(dim=1) for part in hidden.split(
            256)]) if greedy else None
    row = torch.searchsorted(batch["cu_seqlens"][1:], where.to(batch["cu_seqlens"]), right=True)
    return (logps, row, likeliest == targets) if greedy else (logps, row)


def sequence_logprobs(model, batch, reference=False, greedy=False):
    """log pi(y | x) of every packed row.

    model: a causal LM of transformers, bare or wrapped by PEFT, loaded with
    `attn_implementation=ATTENTION`. batch: input_ids (1, T), position_ids (1, T), cu_seqlens
    (B + 1,), targets (T,), response_mask (T,). Returns (logps (B,) sums over response tokens in
    nats, lengths (B,) response tokens), so -logps / lengths is the per-token mean. reference: by
    the model's own logits. greedy: return a third tensor, (B,) bool: whether greedy decoding, which
    takes the likeliest token, writes the whole response.
    """
    logps, row, *likeliest = token_logps(model, batch, reference, greedy)
    num_rows = len(batch["cu_seqlens"]) - 1
    sums = torch.zeros(num_rows, dtype=logps.dtype, device=logps.device).index_add(0, row, logps)
    lengths = torch.bincount(row, minlength=num_rows)
    return sums, lengths, *(torch.bincount(row[good], minlength=num_rows) == lengths
                            for good in likeliest)


@torch.no_grad()
def check_model(model, tolerance):
    """ValueError when the fast packed path and the model's own logits on single rows disagree.

    Two short rows of made-up tokens, a fraction of a second: an architecture whose attention
    ignores row borders, or whose head does more than W h, is found before it trains on them.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    rows = []
    for first, length in ((3, 7), (11, 5)):
        tokens = [token % vocabulary for token in range(first, first + length)]
        rows.append({"input_ids": tokens, "trained": [1] * length})
    packed, _ = sequence_logprobs(model, pack(rows, model.device))
    alone = [sequence_logprobs(model, pack([row], model.device), reference=True)[0]
             for row in rows]
    alone = torch.cat(alone)
    error = ((packed - alone).abs() / alone.abs().clamp_min(1.0)).max().item()
    if not error <= tolerance:
        raise ValueError(f"{type(model).__name__}: packed log-probs differ from the model's own by "
                         f"{error:.1e} (allowed {tolerance:.0e}); this architecture does not fit")
