"""From scores to ranks, ranking files, and how well a ranking finds rows that are known to be bad.

A ranking file has one line a row, best first: row_id, hash, rank (1 is the best), kept, and more.
"""

from runtime.processes import rank
from utils import UserError, each_jsonl, table, write_jsonl

# ruff: isort: split
import torch

ROWS_AT_ONCE = 100_000  # lines of a ranking held in memory: 10^7 would take 5 GB


# --- scores to ranks, files -----------------------------------------------------------------------

def rank_rows(scores):
    """Ranks 1 (best) to N of (N,) scores, ties in row order."""
    ranks = torch.empty(len(scores), dtype=torch.long)
    ranks[scores.argsort(descending=True, stable=True)] = torch.arange(1, len(scores) + 1)
    return ranks


def original_scores(omega, masked, implicit, mask_is_ranked):
    """How good each row's original answer is, (N,): omega, where omega has judged it.

    implicit (N,): the implicit weight at the final model. omega has judged a masked row's *new*
    answers, which any model finds likely; its original is judged by the implicit weight. Both
    become rank shares in the row's own group. Rows of a static mask are a random sample, as good as
    the others; those of a mask drawn by the weights (mask_is_ranked) were the worst when they were
    masked and come after them.
    """
    scores = torch.where(masked, implicit.to(omega), omega)
    shares = torch.empty(len(scores), dtype=torch.float64)
    for group in (masked, ~masked):
        ranks = rank_rows(scores[group])
        shares[group] = 1 - ranks.double() / (len(ranks) + 1)
    if mask_is_ranked:
        shares[masked] -= 1.0
    return shares


def write_ranking(path, lower, scores, keep_fraction, columns):
    """A ranking, best row first: row_id, hash, rank, kept, the columns, and bad and kind if known.

    scores (N,) higher is better; columns: {name: (N,) tensor}. Returns ranks (N,), kept (N,) bool.
    """
    ranks = rank_rows(scores)
    kept = ranks <= round(keep_fraction * len(ranks))
    columns = {"rank": ranks, "kept": kept, **columns}
    known = [name for name in ("bad", "kind") if name in lower.column_names]

    def lines():
        for block in ranks.argsort().split(ROWS_AT_ONCE):
            part = lower.select(block.tolist())
            found = {"row_id": part["row_id"][:], "hash": part["hash"][:],
                     **{name: values[block].tolist() for name, values in columns.items()},
                     **{name: part[name][:] for name in known}}
            yield from (dict(zip(found, row, strict=True))
                        for row in zip(*found.values(), strict=True))

    if rank() == 0:
        write_jsonl(path, lines())
    return ranks, kept


def keep_rows(rows, file):
    """The rows that a weights.jsonl, curated.jsonl or kept.jsonl keeps, by row_id and hash."""
    wanted = {}
    for number, entry in enumerate(each_jsonl(file), 1):
        for key in ("row_id", "hash", "rank", "kept"):
            if key not in entry:
                raise UserError(f"{file} line {number}: no {key!r}; a ranking has row_id, hash, "
                                "rank and kept in every line")
        if not isinstance(entry["row_id"], int) or not isinstance(entry["kept"], bool):
            raise UserError(f"{file} line {number}: row_id must be a whole number, and kept true "
                            "or false")
        if entry["kept"]:
            wanted[entry["row_id"]] = entry["hash"]
    ids, hashes = rows["row_id"][:], rows["hash"][:]
    positions = [p for p, row_id in enumerate(ids) if row_id in wanted]
    for p in positions:
        if hashes[p] != wanted[ids[p]]:
            raise UserError(f"{file}: row_id {ids[p]} has hash {wanted[ids[p]]}, the lower rows "
                            f"have {hashes[p]}: the ranking belongs to other data")
    if not positions:
        raise UserError(f"{file}: keeps none of the {len(rows)} lower rows")
    if len(positions) < len(wanted):
        print(f"warning: {len(wanted) - len(positions)} of the {len(wanted)} rows that {file} "
              "keeps are not among the lower rows")
    return rows.select(positions)


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
    bad (the bottom of the ranking), so precision equals recall over all kinds. Rows that tie at the
    border are flagged in part, each as much: the order of the file says nothing.
    Keys: auroc, precision, and auroc/KIND, recall/KIND for every kind among the bad rows (AUROC of
    a kind is against the good rows alone).
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    metrics = {"auroc": auroc(scores, bad), "precision": None}
    if bad.any():
        border = scores.sort().values[int(bad.sum()) - 1]
        below, tied = (scores < border).double(), (scores == border).double()
        flagged = below + tied * ((bad.sum() - below.sum()) / tied.sum())  # (n,) in [0, 1]
        metrics["precision"] = float(flagged[bad].double().mean())
    for kind in sorted({k for k, b in zip(kinds, bad.tolist(), strict=True) if b}):
        own = torch.tensor([k == kind for k in kinds]) & bad
        metrics[f"auroc/{kind}"] = auroc(scores[own | ~bad], own[own | ~bad])
        metrics[f"recall/{kind}"] = float(flagged[own].double().mean())
    return metrics


def label_metrics(lower, scores):
    """Ranking metrics against known bad rows, {"weight/auroc": ...}; {} when labels are unknown."""
    if "bad" not in lower.column_names:
        return {}
    bad = torch.tensor(lower["bad"][:], dtype=torch.bool)
    kinds = lower["kind"][:] if "kind" in lower.column_names else ["bad"] * len(lower)
    return {f"{name}/{key}": value for name, values in scores.items()
            for key, value in ranking_metrics(values, bad, kinds).items()}


def print_label_table(metrics, scores):
    """AUROC, precision and recall by kind of fault, one line a ranking."""
    keys = sorted({k.split("/", 1)[1] for k in metrics if k.split("/")[0] in scores},
                  key=lambda k: (k.count("/"), k))
    rows = [[name, *(metrics.get(f"{name}/{key}") for key in keys)] for name in scores]
    print(table(["ranking by", *keys], rows))
