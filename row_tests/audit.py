"""Is a flagged row really bad? A person judges rows in random order, without knowing which are.

    python eval.py audit RANKING [--rows SOURCE] [--verdicts FILE] [--page PAGE.html]

30 flagged and 30 other rows are drawn by a seed. The share of the flagged ones that the person
calls bad is the precision; the share of the others is what was missed. Both with exact intervals
(Clopper and Pearson 1934), by bisection of the binomial tail: no other package is needed.
"""

import json
import random
import sys
from pathlib import Path

import utils
from accept import upper_bound
from data.layouts import clean_messages, find_layout, parse_columns, row_messages, transcript
from data.sources import find_parts, read_part
from data.tokens import ENDOFTEXT, renamed
from evaluation.runs import (
    TEXT,
    WHOLE,
    check_entry,
    check_output,
    each_line,
    ranking_of,
    read_ranking,
    whole_texts,
)
from evaluation.texts import escaped_html, plain, printable
from utils import UserError, content_hash

SHOWN = 1500  # characters of a text that are shown
VERDICTS = {"y": True, "n": False, "s": None}  # bad, good, skipped


def clopper_pearson(count, total):
    """The exact 95 % interval of a share: `count` of `total` were seen; (0, 1) without any."""
    return 1 - upper_bound(total - count, total, 0.975), upper_bound(count, total, 0.975)


# --- the rows -------------------------------------------------------------------------------------

def drawn_rows(path, count, seed):
    """Up to `count` flagged and `count` other rows of a ranking, in random order.

    Flagged: with a reason where the ranking has that column, else the rows it does not keep.
    """
    rows = read_ranking(path)
    if any("reason" in row for row in rows):
        flagged = [row.get("reason") is not None for row in rows]
    elif all("kept" in row for row in rows):
        flagged = [not row["kept"] for row in rows]
    else:
        raise UserError(f"{path}: no reason and no kept in its rows; nothing is flagged there")
    rng, drawn = random.Random(seed), []
    for bad in (True, False):
        group = [row for row, own in zip(rows, flagged, strict=True) if own == bad]
        if not group:
            raise UserError(f"{path}: {'none' if bad else 'all'} of its {len(rows)} rows are "
                            "flagged; there is nothing to compare")
        drawn += [row | {"flagged": bad} for row in rng.sample(group, min(count, len(group)))]
    rng.shuffle(drawn)
    return drawn, sum(flagged), len(rows)


def texts_of(rows, source, path, columns=None):
    """{row_id: (prompt, response)} of these rows, from the data set or the ranking.

    source: file, folder or hub name, None for the ranking itself, as a curated.jsonl holds its
    texts; columns: names of its columns where they are unknown ones, as `parse_columns` takes them.
    """
    wanted, found = {row["row_id"]: row["hash"] for row in rows}, {}
    if source is None:
        texts = path.with_name("curated.jsonl")  # an online run's, beside its weights.jsonl
        path = texts if path.name == "weights.jsonl" and texts.exists() else path
        for place, row in each_line(path):
            if row["row_id"] in wanted:
                if not all(type(row.get(key)) is str for key in ("prompt", "response")):
                    raise UserError(f"{place}: holds no texts; name the ranked rows with --rows")
                found[row["row_id"]] = row["prompt"], row["response"]
        return found
    columns, layout = parse_columns(columns), None
    every = (row for part in find_parts(source) for row in read_part(part, source))
    for number, (place, row) in enumerate(every):
        if number in wanted or layout is None:
            check_entry(place, row, {})
            row = renamed(row, columns, place) if columns else row
            layout = layout or find_layout(row, place)  # of the first row, as `load_rows` has it
        if number in wanted:
            messages = row_messages(row, layout, "chosen", place)
            *before, last = clean_messages(messages, (ENDOFTEXT,)) or [{"content": ""}]
            found[number] = transcript(before), last["content"]
            if content_hash(*found[number]) != wanted[number]:
                raise UserError(f"{place}: another text than row_id {number} of {path}; are these "
                                "the rows that were ranked?")
    if missing := wanted.keys() - found.keys():
        raise UserError(f"{source}: no row_id {min(missing)}, which {path} names; are these the "
                        "rows that were ranked?")
    return found


# --- verdicts -------------------------------------------------------------------------------------

def ask(rows, texts, answers, given, save):
    """Fill in given, {row_id: True (bad), False or None (skipped)}, with the verdicts it lacks.

    answers: an iterator of lines, one a row; save(given) is called after each.
    """
    for number, row in enumerate(rows, 1):
        if row["row_id"] in given:
            continue
        prompt, response = texts[row["row_id"]]
        print(f"\n--- {number} of {len(rows)} ---\nQUESTION: {printable(both_ends(prompt))}\n"
              f"ANSWER: {printable(both_ends(response))}")
        while True:
            print("Is this a bad answer? y, n, s to skip: ", end="", flush=True)
            line = next(answers, None)
            if line is None:
                raise UserError(f"no verdict for row {number} of {len(rows)}: the input ended")
            word = line.strip().lower()
            if word in ("y", "yes", "n", "no", "s", "skip", ""):
                given[row["row_id"]] = VERDICTS.get(word[:1])
                save(given)
                break


def read_verdicts(path, rows, begun=False):
    """{row_id: verdict} of a file, {"row_id", "verdict": y, n or s} a line, for the rows drawn.

    A line may have the row's hash, as --out writes it: then the verdict must be on this text.
    begun: of an audit that goes on: some may be missing, but none of another audit be there.
    """
    given, hashes = {}, {row["row_id"]: row["hash"] for row in rows}
    for place, entry in each_line(path):
        check_entry(place, entry, {"row_id": WHOLE, "verdict": TEXT}, {"hash": TEXT})
        if entry["verdict"] not in VERDICTS:
            raise UserError(f"{place}: the verdict must be y, n or s")
        verdict = VERDICTS[entry["verdict"]]
        if given.setdefault(entry["row_id"], verdict) != verdict:
            raise UserError(f"{place}: another verdict for row_id {entry['row_id']} than an "
                            "earlier line; leave one of them")
        if entry.get("hash") and entry["hash"] != hashes.get(entry["row_id"], entry["hash"]):
            raise UserError(f"{place}: the verdict is on another text than row_id "
                            f"{entry['row_id']} of the ranking; judge again, with another --out")
    drawn = [row["row_id"] for row in rows]
    if begun:
        if others := given.keys() - set(drawn):
            raise UserError(f"{path}: has a verdict for row_id {min(others)}, which is not drawn; "
                            "take the --seed and --count of before, or another --out")
        return given
    if missing := [row_id for row_id in drawn if row_id not in given]:
        raise UserError(f"{path}: no verdict for row_id {missing[0]}, and {len(missing) - 1} more "
                        "of the rows drawn; the same --seed and --count draw the same rows")
    return given


def audit_summary(rows, verdicts, num_flagged, num_rows):
    """{"precision", "missed": {"share", "low", "high", "bad", "judged"}, "flagged", "rows"}."""
    result = {"flagged": num_flagged, "rows": num_rows}
    for name, group in (("precision", True), ("missed", False)):
        own = [verdict for row, verdict in zip(rows, verdicts, strict=True)
               if row["flagged"] == group and verdict is not None]
        low, high = clopper_pearson(sum(own), len(own))
        result[name] = {"share": sum(own) / len(own) if own else None, "low": low, "high": high,
                        "bad": sum(own), "judged": len(own)}
    return result


def both_ends(text):
    """A text without the middle of a long one: whether an answer is cut is seen at its end."""
    out = len(text) - SHOWN
    return text if out <= 0 else (f"{text[:SHOWN // 2]}\n[... {out:,} characters left out ...]\n"
                                  f"{text[-SHOWN // 2:]}")


def write_page(path, rows, texts):
    """A static page of the rows, in the order of the audit, with boxes to tick on paper."""
    cards = "".join(
        f"<section><h2>{number}. row_id {row['row_id']}</h2><h3>Question</h3>"
        f"<pre dir='auto'>{escaped_html(both_ends(texts[row['row_id']][0]))}</pre><h3>Answer</h3>"
        f"<pre dir='auto'>{escaped_html(both_ends(texts[row['row_id']][1]))}</pre>"
        "<p>bad ☐ &nbsp; good ☐ &nbsp; skip ☐</p></section>"
        for number, row in enumerate(rows, 1))
    utils.write_atomic(path, plain(
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'><meta http-equiv="
        "\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        "<title>Audit</title><style>body{font:16px sans-serif;max-width:46em;margin:2em auto}"
        "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}</style></head><body>"
        f"<h1>Which answers are bad?</h1>{cards}</body></html>\n"))


def run_audit(args):
    """Draw, ask, print; with --page alone only the page is written."""
    if args.count < 1:
        raise UserError(f"--count {args.count}: must be 1 or more")
    if args.page and args.out and not args.verdicts:
        raise UserError("--out: with --page alone nothing is asked; leave it out or give "
                        "--verdicts")
    if args.lower_columns and not args.rows:
        raise UserError("--lower-columns: names the columns of --rows; give both")
    args.ranking = ranking_of(args.ranking)
    rows, num_flagged, num_rows = drawn_rows(args.ranking, args.count, args.seed)
    texts = {key: tuple(whole_texts({"p": p, "r": r}).values())
             for key, (p, r) in texts_of(rows, args.rows, args.ranking,
                                              args.lower_columns).items()}
    inputs = [path for path in (args.ranking, args.rows, args.verdicts) if path]
    inputs.append(Path(args.ranking).parent)
    if args.page:
        check_output(args.page, *inputs)
        write_page(args.page, rows, texts)
        print(f"page: {args.page}; verdicts go into a file, one line a row: "
              '{"row_id": 7, "verdict": "y"}, for --verdicts')
        if not args.verdicts:
            return
    if args.out:
        check_output(args.out, *inputs)
    letters = {verdict: letter for letter, verdict in VERDICTS.items()}

    def save(given):
        if args.out:
            utils.write_jsonl(args.out, [
                {"row_id": row["row_id"], "hash": row["hash"], "flagged": row["flagged"],
                 "verdict": letters[given[row["row_id"]]]}
                for row in rows if row["row_id"] in given])

    if args.verdicts:
        given = read_verdicts(args.verdicts, rows)
        save(given)
    else:
        given = {}
        if args.out and Path(args.out).exists():
            given = read_verdicts(args.out, rows, begun=True)
            print(f"{args.out}: {len(given)} of {len(rows)} rows are judged already")
        ask(rows, texts, iter(sys.stdin.readline, ""), given, save)
    verdicts = [given[row["row_id"]] for row in rows]
    result = audit_summary(rows, verdicts, num_flagged, num_rows)
    for name, text in (("precision", "of the flagged rows are bad"),
                       ("missed", "of the other rows are bad")):
        own = result[name]
        share = "-" if own["share"] is None else f"{own['share']:.0%}"
        print(f"{name}: {share} {text} ({own['bad']} of {own['judged']} judged; 95 % interval "
              f"{own['low']:.0%} to {own['high']:.0%})")
    print("RESULT " + json.dumps(result), flush=True)
