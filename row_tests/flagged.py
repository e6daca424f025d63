"""Rows that look bad: what `ranking.first_look` wrote into tests.json, shown at the head of a page.

The texts are those of the data set, so the worst examples can be judged without opening the source.
"""

from evaluation.runs import NUMBER, TEXT, WHOLE, check_entry, json_value, read_text
from evaluation.texts import escaped_html, html_table, one_line
from ranking import REASONS
from utils import UserError

EXAMPLE = {"row_id": WHOLE, "reason": TEXT, "prompt": TEXT, "response": TEXT, "surprise": NUMBER}


def read_look(run):
    """{"line", "notes", "groups", "worst"} of a run's tests.json, None where there is none."""
    path = run.folder / "tests.json"
    if not path.exists():
        return None
    look = json_value(path, read_text(path))
    check_entry(path, look, {"line": TEXT})
    for name in ("notes", "groups", "worst"):
        if type(look.get(name)) is not list:
            raise UserError(f"{path}: {name} is no list; not written by a training script")
    for note in look["notes"]:
        check_entry(path, {"note": note}, {"note": TEXT})
    for group in look["groups"]:
        named = dict(zip(("group", "rows", "flagged"), group, strict=False)) \
            if type(group) is list else {}
        check_entry(f"{path}, groups", named, {"group": TEXT, "rows": WHOLE, "flagged": WHOLE})
    for row in look["worst"]:
        check_entry(f"{path}, worst", row, EXAMPLE)
    return look


def opening_line(run):
    """The first line of a page: how many rows look bad, and why; "" without row tests."""
    look = read_look(run)
    return f'<p class="lead"><strong>{escaped_html(one_line(look["line"], 400))}</strong></p>' \
        if look else ""


def flagged_section(run, row_card):
    """The worst rows of each reason with their texts, and who is flagged; "" without row tests.

    row_card: of evaluation/report.py, shows one row.
    """
    look = read_look(run)
    if not look:
        return ""
    parts = ["<h2>Rows that look bad</h2>"]
    parts += [f"<p class='muted'>Note: {escaped_html(one_line(note, 300))}.</p>"
              for note in look["notes"]]
    by_reason = {}
    for row in look["worst"]:
        by_reason.setdefault(row["reason"], []).append(row)
    for reason, rows in by_reason.items():
        title = REASONS.get(reason, reason)
        cards = [row_card(row, (("prompt", row["prompt"]), ("response", row["response"])))
                 for row in rows]
        parts.append(f"<details{' open' if reason == next(iter(by_reason)) else ''}><summary>"
                     f"{escaped_html(one_line(title))}: the worst {len(rows)}</summary>"
                     + "".join(cards) + "</details>")
    shares = [[group, count, flagged / count if count else None]
              for group, count, flagged in look["groups"]]
    if shares:
        parts.append("<p class='muted'>Who is flagged: what is rare looks bad to a likelihood, so "
                     "compare the shares.</p>" + html_table(["rows", "number", "share flagged"],
                                                            shares))
    return "".join(parts)
