"""Row tests of any file: a reason for every row that looks bad, no trusted rows, no training.

    python -m baselines tests --model NAME --lower FILE [--upper TRUSTED] --out ranking.jsonl

Two forwards of every row; detect.py has the detectors, the formulas and what they cannot see. The
rows that look bad come last and are not kept, unless --keep-fraction says how many are. Beside the
columns of every ranking: reason, surprise (log odds of a fault, nats), end, relevance, fluency,
slip, peak, repetition, echo, loss and length (tokens of the answer); null where a detector has
nothing to judge.

`joined` takes the same forwards and keeps as many rows. It adds the loss to the score: the tests
know some faults, the loss sees others, and of two good rows the likelier one trains better.
"""

import ranking
from data.tokens import end_ids, fact_reader
from utils import table

SHOWN = 200  # characters of an example


def score_by_tests(model, tokenizer, levels, seed):
    """(scores (N,), higher is better; columns of the ranking; tests) of the lower rows, printed.

    The trusted rows, if any, are those that training would train on.
    """
    tests, notes = ranking.row_tests(model, levels.lower, levels.upper, end_ids(tokenizer),
                                     fact_reader(tokenizer), seed)
    print_look(ranking.first_look(tests, notes, levels.lower))
    # Flagged rows last: a score equal to theirs may stand on a row that is not flagged.
    scores = -tests["surprise"] - 1e-9 * (tests["reason"] >= 0)
    return scores, {"loss": tests["loss"], "length": tests["length"].long()}, tests


def one_screen_line(text, end=False):
    """A text on one line of a terminal, its start or its end; control characters are replaced."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}"
                   for c in " ".join(text.split()))
    if len(text) <= SHOWN:
        return text
    return "…" + text[-SHOWN:] if end else text[:SHOWN] + "…"


def print_look(look):
    """How many rows look bad and why, the worst row of each reason, and who is flagged."""
    for note in look["notes"]:
        print(f"note: {note}")
    print(look["line"])
    seen = set()
    for row in look["worst"]:
        if row["reason"] not in seen:
            seen.add(row["reason"])
            print(f"  {ranking.REASONS[row['reason']]}: row_id {row['row_id']}\n"
                  f"    question: {one_screen_line(row['prompt'])}\n"
                  f"    answer: {one_screen_line(row['response'], end=row['reason'] == 'end')}")
    print(table(["who is flagged", "rows", "share"], [
        [group, rows, flagged / rows] for group, rows, flagged in look["groups"]]))
