"""Pairs of fluent answers, one better than the other: which score sees the worse one?

    python -m paper pairs --name 6m --data "--model MODEL --lower pairs.jsonl --upper trusted.jsonl"

The rows have prompt, chosen, rejected and, in a column `set`, where they come from. Both answers
are fluent, unlike the faults of `python -m paper noise`, so these figures stand apart: the share of
pairs whose worse answer has the worse score, ties one half, with the 95 % interval of pairs drawn
anew. The row tests see all answers as one file, half of them bad.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

import ranking
from baselines.__main__ import parse_args as parse_baseline
from data import sources
from paper import noise
from paper.plans import words_of
from paper.results import save_results
from utils import UserError, table


def pairs_table(args):
    """Shares of pairs by set and ranking; results/pairs_NAME.json."""
    if not args.data:
        raise UserError("pairs: name the rows: --data '--model MODEL --lower pairs.jsonl'")
    folder = Path("runs") / f"pairs_{args.name}"
    given = parse_baseline(["tests", *words_of(args.data), "--out", str(folder / "unused")])
    if given.lower is None or given.model is None:
        raise UserError("pairs: --data must name --model and --lower")
    noise.check_maker(folder / "command.json", args.command)
    levels, scorer = noise.open_scorer(given)
    answers, sets = read_pairs(given.lower, set(levels.lower["row_id"][:]))
    noise.write_maker(folder / "command.json", args.command)
    tokens = noise.saved_rows(folder, "answers", answers, scorer)
    scorer.blank = ranking.blank_prompt(tokens)
    read = {"answers": SimpleNamespace(tokens=tokens)}
    if rows := noise.trusted_rows(levels):
        read["trusted"] = SimpleNamespace(tokens=noise.saved_rows(folder, "trusted", rows, scorer))
    for name, part in read.items():
        part.found = noise.evidence_of(folder, name, part.tokens, scorer)
    answers, trusted = read["answers"], read.get("trusted")
    made = ranking.made_faults(noise.Losses(scorer.model, folder / "made.jsonl"), tokens,
                               scorer.ends, answers.found, given.seed)
    scores, _ = noise.scores_and_verdicts(answers, made, trusted, given.seed)
    place = {row_id: n for n, row_id in enumerate(tokens["row_id"][:])}
    both = [n for n in range(len(sets)) if {2 * n, 2 * n + 1} <= set(place)]  # none was too long
    if not both:
        raise UserError(f"{given.lower}: of no pair both answers fit; a larger --max-length")
    right = {name: torch.tensor([shares_of(values[place[2 * n]], values[place[2 * n + 1]])
                                 for n in both]) for name, values in scores.items()}
    names = ["all", *sorted({sets[n] for n in both})]
    results = {name: {method: share_and_interval(values[torch.tensor(
        [name in ("all", sets[n]) for n in both])], given.seed)
        for method, values in right.items()} for name in names}
    save_results(Path("results") / f"pairs_{args.name}.json", args.command, results,
                 pairs=len(both), trusted=0 if trusted is None else len(trusted.tokens))
    print(table(["worse answer found", "pairs", *right], [
        [name, own["loss"]["pairs"], *(f"{own[m]['share']:.3f} ({own[m]['interval'][0]:.2f}-"
                                       f"{own[m]['interval'][1]:.2f})" for m in right)]
        for name, own in results.items()]))


def read_pairs(source, usable):
    """(answers, sets): two rows a pair, the better one first, and the pair's set; `usable` row_ids.
    """
    answers, names = [], []
    rows = (row for part in sources.find_parts(source) for row in sources.read_part(part, source))
    for row_id, (place, row) in enumerate(rows):
        if missing := [key for key in ("prompt", "chosen", "rejected") if key not in row]:
            raise UserError(f"{place}: no {missing[0]!r}; pairs have prompt, chosen and rejected")
        if row_id in usable:
            answers += [{"prompt": row["prompt"], "response": row[key]}
                        for key in ("chosen", "rejected")]
            names.append(str(row.get("set", "all")))
    return answers, names


def shares_of(better, worse):
    """1.0 where the better answer has the higher score, 0.5 for a tie."""
    return float(better > worse) + 0.5 * float(better == worse)


def share_and_interval(right, seed):
    """{"share", "interval", "pairs"} of (n,) numbers 0, 0.5, 1."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(right), (noise.RESAMPLES, len(right)), generator=generator)
    interval = torch.quantile(right[drawn].mean(dim=1), torch.tensor([0.025, 0.975]))
    return {"share": float(right.mean()), "interval": interval.tolist(), "pairs": len(right)}
