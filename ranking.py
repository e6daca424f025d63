"""From scores to ranks, ranking files, and how well a ranking finds rows that are known to be bad.

A ranking file has one line a row, best first: row_id, hash, rank (1 is the best), kept, and more.
"""

import detect
from batches import SPARE_ROW, answer_row, pack, take, token_groups, tokens_only
from curate import empty_prompt
from logprobs import token_logps
from models import is_sharded
from runtime.processes import all_sum, in_step, rank, world_size
from utils import UserError, each_jsonl, table, write_jsonl

# ruff: isort: split
import torch

EVIDENCE = ("end", "relevance", "fluency", "repetition", "copied", "news", "length", "loss")
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


# --- row tests ------------------------------------------------------------------------------------

def blank_prompt(rows, sample=500):
    """The template around an empty question: the tokens that all prompts share.

    Taken from some `sample` rows all over the file, because neighbours may ask alike.
    """
    places = range(0, len(rows), max(1, len(rows) // sample))
    return empty_prompt([row["input_ids"][:row["trained"].index(1)]
                         for row in take(tokens_only(rows), places)])


def last_turns(model, rows, ends):
    """One forward: (prompt, answer, logps, end logps, row loss) of the last turn of every row.

    prompt, answer: tokens before the last trained run, and that run without its end tokens, the
    last ones of the row that are in `ends`. logps, end logps: of answer and end tokens, nats, on
    the CPU. row loss: the mean over all trained tokens, as `batches.row_losses` computes it.
    """
    batch = pack(rows, model.device)
    logps, owner = token_logps(model, batch)
    counts = torch.bincount(owner, minlength=len(rows))
    sums = torch.zeros(len(rows), dtype=logps.dtype, device=logps.device).index_add(0, owner, logps)
    turns = []
    for row, own, loss in zip(rows, logps.double().cpu().split(counts.tolist()),
                              (-sums / counts).tolist(), strict=True):
        ids, trained = row["input_ids"], row["trained"]
        stop = len(trained) - trained[::-1].index(1)
        start = stop - next((n for n, t in enumerate(trained[stop - 1::-1]) if not t), stop)
        last = stop
        while last > start and ids[last - 1] in ends:
            last -= 1
        body = len(own) - (stop - last)
        turns.append((ids[:start], ids[start:last], own[max(0, body - (last - start)):body],
                      own[body:], loss))
    return turns


@torch.no_grad()
def row_evidence(model, rows, ends, blank, label=None):
    """What the row tests read, {name: (N,) float64}: two forwards of every row, no gradient.

    ends: token ids that end a turn; blank: tokens of the blank prompt. The names are those of
    detect.py, all of the row's last turn: end (NaN where the row has no end token), relevance,
    fluency, repetition, copied, news, length (tokens of the answer); and loss, the mean over all
    trained tokens. The rows are shared by all processes; each returns all of them.
    """
    found = torch.zeros(len(rows), len(EVIDENCE), dtype=torch.float64)
    mine, place = range(rank(), len(rows), world_size()), rank()
    groups = token_groups(tokens_only(rows), mine, label)
    for group in in_step(groups, is_sharded(model)):
        turns = last_turns(model, group or [SPARE_ROW], ends)
        # An empty answer, an end token alone, still needs a token to be a row.
        behind = last_turns(model, [answer_row(blank, answer or prompt[:1])
                                    for prompt, answer, *_ in turns], ())
        for (prompt, answer, c, end, loss), (_, _, u, _, _) in zip(turns, behind, strict=True):
            if group is None:
                break
            u = u[:len(c)]
            found[place] = torch.tensor([
                detect.end(end), detect.relevance(c, u), detect.fluency(c),
                detect.repetition(answer), *detect.copied(answer, prompt), len(answer), loss],
                dtype=torch.float64)
            place += world_size()
    return dict(zip(EVIDENCE, all_sum(found).T, strict=True))
