"""What bf16 costs in accuracy: log-probs of the same rows under a float32 and a bfloat16 base.

Rows are packed as training packs them. Per token the error of log p, per row that of its mean loss.
"""

import torch

import batches
import models
from benchmarks.measure import store_and_print
from data.tokens import load_rows
from logprobs import token_logps
from runtime import processes
from utils import UserError


@torch.no_grad()
def logps_of(source, dtype, device, rows):
    """log p of every trained token under a model, a float64 tensor a row, on the CPU."""
    model, found = models.load_model(source, device, dtype), []
    for group in batches.token_groups(rows, range(len(rows))):
        logps, owner = token_logps(model, batches.pack(group, device))
        found += logps.double().cpu().split(torch.bincount(owner).tolist())
    return found


def errors(exact, rounded):
    """{name: figure} of two lists of log-probs, a tensor a row."""
    token = (torch.cat(rounded) - torch.cat(exact)).abs()
    row = torch.stack([a.mean() - b.mean() for a, b in zip(exact, rounded, strict=True)])
    return {"tokens": len(token), "token mean": token.mean().item(),
            "token largest": token.max().item(), "row mean": row.abs().mean().item(),
            "row largest": row.abs().max().item(), "mean of all rows": row.mean().item()}


def bench_accuracy(args):
    if args.model is None or args.lower is None:
        raise UserError("accuracy: --model and --lower are needed, a model and its rows")
    device = processes.pick_device(args.device)
    rows = load_rows(args.lower, models.load_tokenizer(args.model), name="lower",
                     limit=args.rows, max_length=args.max_length, cache_dir=args.cache_dir)[0]
    rows = batches.take(batches.tokens_only(rows), range(len(rows)))
    results = errors(*(logps_of(args.model, dtype, device, rows)
                       for dtype in ("float32", "bfloat16")))
    store_and_print(args, device, {"rows": len(rows)}, results, ["error of bfloat16", "nats"],
                    list(results.items()))
