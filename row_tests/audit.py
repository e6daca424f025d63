"""Is a flagged row really bad? A person judges rows in random order, without knowing which are.

    python -m row_tests audit ranking.jsonl --model NAME --lower FILE

The flags that say how rows are read are those with which the file was ranked. 30 flagged and 30
other rows are drawn by a seed. The share of the flagged ones that the person calls bad is the
precision; the share of the rest is what was missed. Both with exact intervals (Clopper and Pearson
1934), by bisection of the binomial tail: no other package is needed. The verdicts stand in --out,
y (bad), n or s (skipped) a row; those that it has are not asked for again.
"""

import argparse
import json
import math
import random
import sys
from pathlib import Path

from baselines import shared

# ruff: isort: split
from evaluation.runs import read_ranking
from evaluation.texts import printable
from utils import UserError, each_jsonl, write_jsonl

VERDICTS = ("y", "n", "s")  # bad, good, skipped


def parse_args(argv):
    parser = argparse.ArgumentParser(
        prog="python -m row_tests audit",
        description="Judge flagged and other rows without knowing which are which.",
    )
    parser.add_argument("ranking", help="a ranking with a column reason or kept")
    shared.add_row_arguments(parser)
    add = parser.add_argument_group("audit").add_argument
    add("--count", type=int, default=30, help="flagged rows, and as many others (30)")
    add("--out", default="verdicts.jsonl", help="the verdicts, written after each")
    args = shared.read_arguments(parser, argv)
    shared.check_out(args, args.ranking)
    return args


# --- intervals ------------------------------------------------------------------------------------


def upper_bound(count, total, level=0.95):
    """The upper end of the one-sided interval of a share (Clopper and Pearson), by bisection.

    The p at which `count` or fewer of `total` have probability 1 - level.
    """
    if count >= total:
        return 1.0
    low, high = count / total, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if binomial_tail(count, total, p) > 1 - level:
            low = p
        else:
            high = p
    return high


def binomial_tail(count, total, p):
    """The probability of `count` or fewer of `total`; in logarithms, the factors overflow."""
    tail = 0.0
    for k in range(count + 1):
        orders = math.log(math.comb(total, k))
        tail += math.exp(orders + k * math.log(p) + (total - k) * math.log1p(-p))
    return tail


def clopper_pearson(count, total):
    """The exact 95 % interval of a share: `count` of `total` were seen; (0, 1) without any."""
    low = 1 - upper_bound(total - count, total, 0.975)
    return low, upper_bound(count, total, 0.975)


# --- the rows -------------------------------------------------------------------------------------


def draw_rows(path, count, seed):
    """Up to `count` flagged and `count` other rows of a ranking, in random order.

    Each has a value "flagged": it has a reason where the ranking has that column, else it is not
    kept.
    """
    groups = {True: [], False: []}
    for row in read_ranking(path):
        flagged = row["reason"] is not None if "reason" in row else not row["kept"]
        groups[flagged].append({**row, "flagged": flagged})
    draw = random.Random(seed)
    drawn = []
    for group in groups.values():
        if not group:
            raise UserError(
                f"{path}: of its rows all or none are flagged; there is nothing to compare"
            )
        drawn += draw.sample(group, min(count, len(group)))
    draw.shuffle(drawn)
    return drawn


def texts_of(drawn, lower, path):
    """{row_id: (prompt, response)} of these rows of the ranking `path`, from the lower rows."""
    places = {row_id: place for place, row_id in enumerate(lower["row_id"][:])}
    texts = {}
    for row in drawn:
        place = places.get(row["row_id"])
        if place is None or lower[place]["hash"] != row["hash"]:
            raise UserError(
                f"{path}: row_id {row['row_id']} is not among the lower rows with this "
                "text; give the rows and flags with which the file was ranked"
            )
        texts[row["row_id"]] = lower[place]["prompt"], lower[place]["response"]
    return texts


# --- verdicts -------------------------------------------------------------------------------------


def read_verdicts(path):
    """The lines of a file of verdicts by (row_id, hash); {} where the file does not exist."""
    lines = {}
    for line in each_jsonl(path) if Path(path).exists() else ():
        if line.get("verdict") not in VERDICTS or not {"row_id", "hash"} <= line.keys():
            raise UserError(f"{path}: a line has row_id, hash and a verdict y, n or s")
        lines[line["row_id"], line["hash"]] = line
    return lines


def ask(drawn, texts, lines, out):
    """Ask for the verdicts that `lines` lack, {(row_id, hash): line}; written after each."""
    for number, row in enumerate(drawn, 1):
        key = row["row_id"], row["hash"]
        if key in lines:
            continue
        prompt, response = texts[row["row_id"]]
        print(f"\n--- {number} of {len(drawn)} ---")
        print(f"QUESTION: {printable(prompt)}\nANSWER: {printable(response)}")
        verdict = None
        while verdict not in VERDICTS:
            print("Is this a bad answer? y, n, s to skip: ", end="", flush=True)
            words = sys.stdin.readline()
            if not words:
                raise UserError(
                    f"no verdict for row {number} of {len(drawn)}: the input ended"
                )
            verdict = words.strip().lower()[:1]
        lines[key] = {"row_id": key[0], "hash": key[1], "verdict": verdict}
        write_jsonl(out, lines.values())


def share_of_bad(rows, lines):
    """{"bad", "judged", "low", "high"} of drawn rows, by the verdicts on them."""
    verdicts = [lines[row["row_id"], row["hash"]]["verdict"] for row in rows]
    bad = verdicts.count("y")
    judged = bad + verdicts.count("n")
    low, high = clopper_pearson(bad, judged)
    return {"bad": bad, "judged": judged, "low": low, "high": high}


def main(argv):
    args = parse_args(argv)
    drawn = draw_rows(args.ranking, args.count, args.seed)
    levels, _ = shared.open_rows(args)
    texts = texts_of(drawn, levels.lower, args.ranking)
    lines = read_verdicts(args.out)
    ask(drawn, texts, lines, args.out)
    result = {}
    for name, flagged in (("precision", True), ("missed", False)):
        part = share_of_bad([row for row in drawn if row["flagged"] == flagged], lines)
        words = "flagged" if flagged else "other"
        print(
            f"{name}: {part['bad']} of {part['judged']} {words} rows that were judged are bad, "
            f"{part['low']:.0%} to {part['high']:.0%} at 95 %"
        )
        result[name] = part
    print("RESULT " + json.dumps(result), flush=True)
