"""What the rankings of a run say: another threshold, and how both ends move over the epochs."""

from pathlib import Path

import torch

import utils
from evaluation.runs import Run, check_output, ranking_of, read_ranking
from evaluation.texts import one_line, show_table
from ranking import auroc
from utils import UserError

# --- another threshold ----------------------------------------------------------------------------

def rerank(rows, source, by):
    """The rows with ranks by a loss under the final model: "final", or "corrected" L - A L_hat."""
    needed = ("final_loss",) if by == "final" else ("final_loss", "attainable_loss")
    if missing := [name for name in needed if rows[0].get(name) is None]:
        raise UserError(f"--by {by}: {source} has no {missing[0]}; rank by the weight, or take the "
                        "ranking of a run without --skip-scores" + (
                            "" if by == "final" else " and with --correction"))
    share = 0.0 if by == "final" else getattr(Run(source.parent).args, "correction", None)
    if share is None:
        raise UserError(f"--by {by}: {source.parent}/config.json names no correction")
    losses = [row["final_loss"] - (share and share * row["attainable_loss"]) for row in rows]
    order = sorted(range(len(rows)), key=losses.__getitem__)
    return [rows[i] | {"rank": rank} for rank, i in enumerate(order, 1)]


def rethreshold(source, fraction, out=None, by="weight"):
    """Write the best `fraction` of a run's ranking, or of a file's, best row first.

    out: kept.jsonl in the run, NAME.kept.jsonl beside another NAME.jsonl. by: "weight" keeps the
    file's own ranks, else see `rerank`. Returns one line: how many rows are kept, and of every
    known kind of fault the share dropped.
    """
    if not 0 < fraction <= 1:
        raise UserError(f"--keep-fraction {fraction}: must lie in (0, 1]")
    source = ranking_of(source)
    out = Path(out) if out else source.with_name(
        "kept.jsonl" if source.name in ("weights.jsonl", "curated.jsonl")
        else f"{source.stem}.kept.jsonl")
    rows = read_ranking(source)
    if out.is_dir() or (out.exists() and out.samefile(source)):
        raise UserError(f"--out {out}: is the ranking itself or a folder; choose another file")
    check_output(out, source, source.parent)
    if by != "weight":
        rows = rerank(rows, source, by)
    limit = round(fraction * len(rows))
    for number, row in enumerate(sorted(rows, key=lambda row: row["rank"]), 1):
        row["rank"] = number  # a file that a person has cut may skip or repeat some
    if not limit:
        raise UserError(f"--keep-fraction {fraction}: of {len(rows)} rows none would be kept")
    utils.write_jsonl(out, [{"row_id": row["row_id"], "hash": row["hash"], "rank": row["rank"],
                             "kept": row["rank"] <= limit} for row in rows])
    dropped = {}
    for row in rows:
        if row.get("bad"):
            dropped.setdefault(row.get("kind") or "bad", []).append(row["rank"] > limit)
    parts = [f"kept {sum(row['rank'] <= limit for row in rows)} of {len(rows)} rows: {out}, for "
             "--keep (`export` goes by the curated set's own)"]
    parts += [f"{one_line(kind)}: {sum(own) / len(own):.0%} of {len(own)} dropped"
              for kind, own in sorted(dropped.items())]
    return "; ".join(parts)


# --- over the epochs ------------------------------------------------------------------------------

def ranking_ends(run):
    """{group: {epoch: (top, bottom)}}: positions of the best and worst tenth, best row first.

    Groups: all; masked and unmasked for an online run, whose masked rows are ranked by the model's
    own answers. Positions are those of omega and of `run.rows`.
    """
    count = len(next(iter(run.omegas.values()))) if run.omegas else 0
    groups = {"all": torch.arange(count)}
    if run.labelled and "masked" in run.rows[0]:
        masked = torch.tensor([row["masked"] for row in run.rows])
        groups = {"unmasked": (~masked).nonzero().flatten(), "masked": masked.nonzero().flatten()}
    ends = {}
    for group, members in groups.items():
        size = max(1, round(0.1 * len(members)))
        for epoch, omega in run.omegas.items() if len(members) else ():
            order = members[omega[members].argsort(descending=True, stable=True)]
            ends.setdefault(group, {})[epoch] = order[:size], order[-size:]
    return ends


def ranking_over_epochs(run):
    """How the top and bottom tenth of the rows move (the paper's analysis of the ranking).

    [{epoch, group, rows, top_length, bottom_length, top_previous, bottom_previous, top_last,
    auroc}]: mean response lengths in tokens; overlap of the top (bottom) with that of the epoch
    before and with the last one's top, as shares.
    """
    first = run.rows[0] if run.labelled else {}
    lengths = torch.tensor([r["length"] for r in run.rows]).double() if "length" in first else None
    bad = torch.tensor([r["bad"] for r in run.rows]) if "bad" in first else None
    rows = []
    for group, epochs in ranking_ends(run).items():
        before, last = None, set(epochs[max(epochs)][0].tolist())
        members = torch.arange(len(next(iter(run.omegas.values()))))
        if group != "all":
            members = torch.tensor([r["masked"] == (group == "masked") for r in run.rows])
        for epoch, (top, bottom) in epochs.items():
            now, size = (set(top.tolist()), set(bottom.tolist())), len(top)
            rows.append({
                "epoch": epoch, "group": group, "rows": size,
                "top_length": None if lengths is None else lengths[top].mean().item(),
                "bottom_length": None if lengths is None else lengths[bottom].mean().item(),
                "top_previous": None if before is None else len(now[0] & before[0]) / size,
                "bottom_previous": None if before is None else len(now[1] & before[1]) / size,
                "top_last": len(now[0] & last) / size,
                "auroc": None if bad is None else auroc(run.omegas[epoch][members], bad[members])})
            before = now
    return rows


def print_rankings(runs):
    rows = [{"run": run.name} | row for run in runs for row in ranking_over_epochs(run)]
    if not rows:
        raise UserError(f"{runs[0].folder}: no weights/epoch_*.safetensors; the run has no "
                        "selector or has not finished an epoch")
    print("top and bottom 10 % by weight: response length in tokens, overlap with the epoch before "
          "and with the last")
    show_table(list(rows[0]), [list(row.values()) for row in rows])
