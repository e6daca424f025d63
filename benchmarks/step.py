"""A training step: plain SFT, BDS, online, and the same rows as two padded forwards.

`two padded forwards` pads to the longest row of a micro batch, one forward a level, full logits,
cross_entropy, PEFT's LoRA layers as they are: how the authors' earlier library (BIPOST) does it.
The floor of the bilevel step is 1 + T_lower / (2 (T_upper + T_lower)) of plain SFT with the loss at
theta^{k+1} (its extra forward is half a LoRA step's products), 1 with the loss at theta^k.
"""

import contextlib
import copy

import torch

import logprobs
import models
import train_offline
import train_online
from batches import row_losses
from benchmarks.measure import (
    mebibytes,
    peak_memory,
    product_rate,
    ratio,
    shown,
    spread,
    store_and_print,
    time_variants,
)
from benchmarks.shapes import load
from bmo_weights import MAX_LOG_RATIO
from runtime import processes
from selector import Selector

RHO, GAMMA, CLIP = 0.5, 0.1, 1.0
MASKED_SHARE = 0.1  # R of the online steps
PADDED = "two padded forwards"


# --- the steps ------------------------------------------------------------------------------------

def train_step(model, theta, optimizer, upper, lower, weights, micro_batch, num_answers=1):
    """One step of a training script. The losses before it, upper (B,) and lower (B,).

    lower: rows for train_offline.py, or one `train_online.Answers` a row for train_online.py.
    The only place that calls the scripts' own steps.
    """
    limits = {"clip": CLIP, "micro_batch": micro_batch}
    if isinstance(lower[0], train_online.Answers):
        upper_losses, _, lower_losses, *_ = train_online.descend(
            model, theta, optimizer, upper, lower, weights, RHO, num_answers=num_answers,
            weighing=("sequence", MAX_LOG_RATIO), **limits)
    else:
        upper_losses, lower_losses, _ = train_offline.descend(
            model, theta, optimizer, upper, lower, weights, RHO, **limits)
    return upper_losses, lower_losses


@contextlib.contextmanager
def as_transformers_has_it(model):
    """Torch's attention and PEFT's own LoRA layers, for a while."""
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        vars(module).pop("forward", None)
    try:
        yield
    finally:
        model.set_attn_implementation(logprobs.ATTENTION)
        models.speed_up_lora(model)


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


def padded_step(model, theta, optimizer, upper, lower, weights, micro_batch):
    """`train_step` as two padded forwards a micro batch. The loss."""
    total = 0.0
    for start in range(0, len(lower), micro_batch):
        part = slice(start, start + micro_batch)
        loss = RHO * (weights[part] * padded_losses(model, lower[part])).sum() / len(lower)
        loss = loss + (1 - RHO) * padded_losses(model, upper[part]).sum() / len(upper)
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(theta, CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return total


def online_name(group):
    return f"online, R={MASKED_SHARE:.0%}, G={group}"


def masked_rows(rows):
    """The rows of a step, (B,), that count as masked in the online steps."""
    return rows[:max(1, round(MASKED_SHARE * len(rows)))]


def step_variants(model, lower, upper, batches, micro_batch, groups=(1,)):
    """{name: callable of the round}; each is one whole step and returns the loss.

    batches: positions of the rows of each round. groups: G of the online steps, whose answers are
    the masked rows' own responses, G times. The rates of theta and omega are zero: every variant
    and round sees the same model, so the losses can be compared; the arithmetic is that of any
    other rate.
    """
    theta = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(theta, lr=0.0)
    selector = Selector(len(lower), lr=0.0, device=model.device)
    padded = copy.copy(model)  # the same parameters are trained; only the attention differs
    losses, lengths = row_losses(model, lower)
    old = -losses * lengths  # log-probs at generation

    def take(turn):
        rows = batches[turn % len(batches)]
        return torch.tensor(rows), [lower[i] for i in rows], [upper[i] for i in rows]

    def step(up, low, weights, num_answers=1):
        """(losses of the lower rows before the step, the loss)"""
        upper_losses, lower_losses = train_step(model, theta, optimizer, up, low, weights,
                                                micro_batch, num_answers)
        return lower_losses, (1 - RHO) * upper_losses.mean() + RHO * (weights * lower_losses).mean()

    def plain(turn):
        _, low, up = take(turn)
        return step(up, low, torch.ones(len(low), device=model.device))[1].item()

    def bilevel(turn, omega_loss):
        rows, low, up = take(turn)
        losses, loss = step(up, low, selector.weights(rows))
        after = row_losses(model, low)[0] if omega_loss == "next" else losses
        selector.step(rows, after, GAMMA)
        return loss.item()

    def online(turn, group):
        rows, low, up = take(turn)
        masked = set(masked_rows(rows.tolist()))
        answers = [train_online.Answers([row] * group, old[i].repeat(group), 0) if i in masked else
                   train_online.Answers([row]) for i, row in zip(rows.tolist(), low, strict=True)]
        _, loss = step(up, answers, selector.weights(rows), group)
        selector.step(rows, train_online.mean_answer_losses(model, answers), GAMMA)
        return loss.item()

    def two_padded(turn):
        rows, low, up = take(turn)
        weights = selector.weights(rows)
        with as_transformers_has_it(model):
            return padded_step(padded, theta, optimizer, up, low, weights, micro_batch)

    return {"plain SFT": plain, "BDS, loss at theta^k": lambda t: bilevel(t, "current"),
            "BDS, loss at theta^{k+1}": lambda t: bilevel(t, "next"),
            **{online_name(group): lambda t, group=group: online(t, group) for group in groups},
            PADDED: two_padded}


# --- what a step must cost ------------------------------------------------------------------------

def step_flops(model, rows):
    """FLOPs of a LoRA step's products on packed rows: forward and the gradient of activations.

    2 a parameter and token each way, the head only where there is a target, attention causal.
    """
    causal_lm = model.get_base_model()
    head = causal_lm.get_output_embeddings().weight
    linear = sum(m.in_features * m.out_features for m in causal_lm.modules()
                 if isinstance(m, torch.nn.Linear) and m.weight is not head)
    config = causal_lm.config
    lengths = [len(row["input_ids"]) for row in rows]
    head_width = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads)
    attention = (2 * config.num_hidden_layers * config.num_attention_heads * head_width
                 * sum(n * n for n in lengths))
    return (4 * linear * sum(lengths) + 4 * head.numel() * sum(sum(r["trained"]) for r in rows)
            + 3.5 * attention)


def tokens_of(name, rows, lower, upper):
    """(tokens that a variant trains on in a step, its floor as a multiple of plain SFT's time).

    rows: the step's positions. G answers to a masked row are G - 1 rows more.
    """
    lower_tokens, upper_tokens = (sum(len(level[i]["input_ids"]) for i in rows)
                                  for level in (lower, upper))
    plain = lower_tokens + upper_tokens
    if name.startswith("online"):
        group = int(name.rpartition("=")[2])
        lower_tokens += (group - 1) * sum(len(lower[i]["input_ids"]) for i in masked_rows(rows))
    tokens = lower_tokens + upper_tokens
    scored = lower_tokens if name.startswith("online") or name.endswith("{k+1}") else 0
    return tokens, (tokens + scored / 2) / plain


# --- measured -------------------------------------------------------------------------------------

def measured_steps(model, variants, rounds, device):
    """Peak bytes, losses and seconds of every variant: three dictionaries by its name.

    A variant without enough memory leaves `variants`; its peak is the error's first line.
    """
    peaks, losses = {}, {name: [] for name in variants}
    for name, call in list(variants.items()):
        try:
            peaks[name] = peak_memory(lambda call=call: call(0), device)
        except torch.OutOfMemoryError as error:
            peaks[name] = str(error).splitlines()[0][:200]
            del variants[name]
            model.zero_grad()  # of a step that broke off
            torch.cuda.empty_cache()
    timed = {name: lambda turn, name=name, call=call: losses[name].append(call(turn))
             for name, call in variants.items()}
    return peaks, losses, time_variants(timed, rounds, device, "step")


def compare_steps(model, lower, upper, batches, micro_batch, rounds, device, groups=(1,)):
    """({variant: its figures}, tokens of each round, product rate in FLOP/s) of one model."""
    variants = step_variants(model, lower, upper, batches, micro_batch, groups)
    peaks, losses, seconds = measured_steps(model, variants, rounds, device)
    if "plain SFT" not in variants:  # what the others are compared with
        raise torch.OutOfMemoryError(peaks["plain SFT"])
    rate = product_rate(device, model.get_input_embeddings().weight.dtype)
    flops = [step_flops(model, [level[i] for level in (lower, upper) for i in rows])
             for rows in batches]
    results, base = {}, seconds["plain SFT"]
    for name, peak in peaks.items():
        if name not in variants:
            results[name] = {"failed": peak}
            continue
        tokens, floor = zip(*(tokens_of(name, rows, lower, upper) for rows in batches), strict=True)
        # Each round compares with plain SFT on the same rows; the first losses are the warm-up's.
        entry = results[name] = {
            "seconds": spread(seconds[name]), "peak_bytes": peak,
            "tokens_per_second": spread([t / s for t, s in zip(tokens, seconds[name],
                                                               strict=True)]),
            "ratio_to_sft": ratio(seconds[name], base), "loss": losses[name][0],
            "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(
                losses[name], losses["plain SFT"], strict=True)),
            "product_share": spread([f / s / rate for f, s in zip(flops, base, strict=True)])[
                "median"] if name == "plain SFT" else None}
        if name != PADDED:
            entry["floor"] = spread(floor)
            entry["ratio_to_floor"] = ratio([s / f for s, f in zip(seconds[name], floor,
                                                                   strict=True)], base)
        if name != PADDED and PADDED in seconds:
            entry["padded_over_this"] = ratio(seconds[PADDED], seconds[name])
    return results, [tokens_of("plain SFT", rows, lower, upper)[0] for rows in batches], rate


def table_row(name, entry):
    floor = entry.get("floor")
    return [name, f"{entry['tokens_per_second']['median']:.0f}", shown(entry["ratio_to_sft"]),
            floor and f"{floor['median']:.2f}",
            shown(entry["padded_over_this"]) if "padded_over_this" in entry else None,
            mebibytes(entry["peak_bytes"]), f"{entry['loss_difference']:.1e}"]


def batches_of(count, batch):
    """The positions of `count` rows, shuffled once, `batch` at a time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[i:i + batch] for i in range(0, count, batch)]


def bench_step(args):
    device = processes.pick_device(args.device)
    batch = args.batch or (32 if device.type == "cuda" else 8)
    count = batch * args.rounds
    model, lower, upper = load(args, device, count)
    results, tokens, rate = compare_steps(model, lower, upper, batches_of(count, batch),
                                    args.micro_batch, args.rounds, device)
    settings = {"rows of each level": batch, "micro batch": args.micro_batch,
                "V": model.get_base_model().config.vocab_size, "parameters": sum(
                    p.numel() for n, p in model.named_parameters() if "lora_" not in n),
                "tokens a step": round(spread(tokens)["median"]), "rounds": args.rounds}
    rows = [[name, "failed: " + entry["failed"][:40]] + 5 * [None] if "failed" in entry else
            table_row(name, entry) for name, entry in results.items()]
    store_and_print(args, device, settings, results,
           ["step", "tokens/s", "of plain SFT", "floor", "padded takes", "peak MiB", "loss diff."],
           rows)
    print(f"plain SFT runs at {results['plain SFT']['product_share']:.0%} of the rate of a large "
          f"matrix product here ({rate / 1e12:.2f} TFLOP/s)")
