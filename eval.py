"""Losses of rows, rankings against known labels, tables.

Losses are in nats. "Sequence mean" is the mean over response tokens of a row, then over rows: what
training optimises and the paper's tables report. "Token mean" weighs long responses more.
"""

import torch
from tqdm import tqdm

import utils
from data import pack, tokens_only
from logprobs import packed_forward, sequence_logprobs

TOKENS_AT_ONCE = 4096  # packed into one forward when no gradient is kept
SPARE_ROW = {"input_ids": [0, 0], "trained": [0, 1]}  # runs a forward whose result is not used


# --- losses ---------------------------------------------------------------------------------------

def token_groups(rows, indices, label=None):
    """Lists of the rows at `indices`, in order, of at most TOKENS_AT_ONCE tokens or one row."""
    group, tokens = [], 0
    # Inside another bar, and only for people: in a log file the outer bar is enough.
    for index in tqdm(indices, desc=label, disable=label is None or None, unit="row", delay=2,
                      leave=False):
        row = rows[index]
        if group and tokens + len(row["input_ids"]) > TOKENS_AT_ONCE:
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += len(row["input_ids"])
    if group:
        yield group


def own_groups(model, rows, indices, label=None):
    """This process's share of the rows at `indices`: (their places in `indices`, packed batch).

    Every world_size()-th row. A sharded model also gets batches that count for nothing (no places),
    while other processes have more.
    """
    indices = indices[utils.rank()::utils.world_size()]
    start, groups = 0, token_groups(tokens_only(rows), indices, label)
    for group in utils.together(groups, model):
        count = len(group or ())
        places = (start + torch.arange(count)) * utils.world_size() + utils.rank()
        yield places, pack(group or [SPARE_ROW], model.device)
        start += count


@torch.no_grad()
def row_losses(model, rows, indices=None, label=None):
    """Per-token mean loss of every row, no gradient (Eq. SFT_def divided by the response length).

    rows: a data set of tokenised rows, indices: which of them, in order (None: all).
    label: text of a progress bar, None for none. The work is split over all processes; each
    returns (losses (n,), lengths (n,)) of all rows, on the CPU.
    """
    indices = range(len(rows)) if indices is None else [int(i) for i in indices]
    losses = torch.zeros(len(indices), dtype=torch.float64 if model.dtype == torch.float64
                         else torch.float32)
    lengths = torch.zeros(len(indices), dtype=torch.int64)
    for places, batch in own_groups(model, rows, indices, label):
        logps, counts = sequence_logprobs(model, batch)
        losses[places] = (-logps / counts).cpu()[:len(places)]
        lengths[places] = counts.cpu()[:len(places)]
    return utils.all_sum(losses), utils.all_sum(lengths)


@torch.no_grad()
def exact_match(model, rows):
    """Share of rows whose whole response is the model's greedy answer to the prompt.

    Teacher-forced: greedy decoding writes exactly the response when every response token, EOS
    included, is the likeliest one after the true ones before it. No generation needed.
    """
    causal_lm, exact = utils.bare(model), torch.tensor(0)
    for places, batch in own_groups(model, rows, range(len(rows))):
        where = batch["response_mask"].nonzero().squeeze(1)
        hidden = packed_forward(causal_lm.base_model, batch)[where]
        logits = causal_lm.get_output_embeddings()(hidden)
        wrong = where[logits.argmax(dim=1) != batch["targets"][where]]
        starts = batch["cu_seqlens"].long()
        wrong_rows = torch.searchsorted(starts[1:], wrong, right=True).unique()
        if len(places):
            exact += len(starts) - 1 - len(wrong_rows)
    return utils.all_sum(exact).item() / len(rows)


def mean_losses(losses, lengths, prefix):
    """{prefix: sequence mean, prefix_per_token: token mean} of (n,) losses and (n,) lengths."""
    lengths = lengths.to(losses)
    return {prefix: losses.mean().item(),
            f"{prefix}_per_token": ((losses * lengths).sum() / lengths.sum()).item()}


# --- rankings against known labels ----------------------------------------------------------------

def auroc(scores, bad):
    """P(score of a good row > score of a bad row), ties one half; None without both sorts of rows.

    scores (n,) higher is better, bad (n,) bool. Mann-Whitney U by mean ranks.
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    num_bad, num_good = int(bad.sum()), int((~bad).sum())
    if not num_bad or not num_good:
        return None
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
    return float((ranks[~bad].sum() - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def ranking_metrics(scores, bad, kinds):
    """How well low scores find bad rows, in all and by kind of fault.

    scores (n,) higher is better; bad (n,) bool; kinds: n strings. As many rows are flagged as are
    bad (the bottom of the ranking, ties in row order), so precision equals recall over all kinds.
    Keys: auroc, precision, and auroc/KIND, recall/KIND for every kind among the bad rows (AUROC of
    a kind is against the good rows alone).
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    flagged = torch.zeros_like(bad)
    flagged[scores.argsort(stable=True)[: int(bad.sum())]] = True
    metrics = {"auroc": auroc(scores, bad),
               "precision": float(bad[flagged].double().mean()) if bad.any() else None}
    for kind in sorted({k for k, b in zip(kinds, bad.tolist(), strict=True) if b}):
        own = torch.tensor([k == kind for k in kinds]) & bad
        metrics[f"auroc/{kind}"] = auroc(scores[own | ~bad], own[own | ~bad])
        metrics[f"recall/{kind}"] = float(flagged[own].double().mean())
    return metrics


# --- tables ---------------------------------------------------------------------------------------

def table(header, rows):
    """A plain-text table, columns aligned, numbers with four digits."""
    cells = [[f"{c:.4f}" if isinstance(c, float) else "-" if c is None else str(c) for c in row]
             for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in
                       enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
