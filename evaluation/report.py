"""One page that shows what finished (or running) runs did: `python eval.py report RUN [RUN ...]`.

The page is a single file: plots are inline SVG, there is no script and no request; a content policy
in the page forbids both, so text of a data set can do no harm even where escaping it failed. Every
text of the data is escaped, direction-isolated and cut visibly. Texts come from the run folder
alone, from tests.json, shown.jsonl and curated.jsonl: the source may have changed, or be gone.
"""

import collections
from pathlib import Path

import utils
from evaluation import plots
from evaluation.comparison import check_same_data, comparison_cells, comparison_rows
from evaluation.flagged import flagged_section, opening_line
from evaluation.health import headline_figures, health, label_metric, label_table, run_checks
from evaluation.rankings import ranking_ends
from evaluation.runs import check_output, each_curated, read_shown
from evaluation.texts import (
    CELL,
    escaped_html,
    escaped_markdown,
    html_table,
    markdown_table,
    one_line,
    plain,
)
from ranking import REASONS
from utils import UserError

TEXT = 700     # characters of a prompt or an answer that are shown
MARK = b"<!-- made by eval.py report, which replaces this file -->\n\n"
EXAMPLES = 6   # rows shown at each end of the ranking
STYLE = (Path(__file__).parent / "report.css").read_text()
RECOMMENDED = {"refined": "recommended", "undecided": "undecided", "original": "keep the original"}


# --- the rows -------------------------------------------------------------------------------------

def labelled_text(label, text):
    """A text of the data under its label, cut visibly."""
    cut = f'<span class="cut">… {len(text) - TEXT:,} more characters</span>' \
        if len(text) > TEXT else ""
    return (f'<div><span class="label">{escaped_html(label)}</span>'
            f'<div class="text" dir="auto">{escaped_html(text[:TEXT])}</div>{cut}</div>')


def row_card(row, texts):
    """One row of the data: what is known about it, then its texts [(label, text)]."""
    facts = [f"rank {row['rank']}"] if "rank" in row else []
    facts.append(f"row {row['row_id']}")
    facts += [f"{label} {row[key]:.3f}" for key, label in
              (("weight", "weight"), ("base_loss", "base loss"), ("final_loss", "final loss"),
               ("margin", "margin"), ("surprise", "surprise"))
              if isinstance(row.get(key), (int, float))]
    reason = row.get("reason")
    tags = [tag for tag in (reason and REASONS.get(reason, reason), row.get("kind"),
                            "masked" if row.get("masked") else None,
                            "bad" if row.get("bad") and not row.get("kind") else None) if tag]
    return (f'<article class="row"><header>{escaped_html(" · ".join(facts))} '
            + " ".join(f'<span class="tag">{escaped_html(one_line(tag))}</span>' for tag in tags)
            + '</header><div class="pair">'
            + "".join(labelled_text(label, text) for label, text in texts) + "</div></article>")


def curated_rows(path, wanted):
    """(best, worst, refined, texts) of a curated.jsonl, read line by line: it may be large.

    wanted: a set of (row_id, hash). texts: {(row_id, hash): (prompt, response)} of these rows and
    of both ends.
    """
    best, worst, texts = [], collections.deque(maxlen=EXAMPLES), {}
    answered = {choice: [] for choice in RECOMMENDED}
    for row in each_curated(path):
        if len(best) < EXAMPLES:
            best.append(row)
        worst.append(row)
        if (row["row_id"], row["hash"]) in wanted:
            texts[row["row_id"], row["hash"]] = row["prompt"], row["response"]
        if row.get("refined") is not None:
            own = answered[row["recommended"]]
            own.append(row)
            own.sort(key=lambda r: -(r.get("margin") or 0.0))
            del own[EXAMPLES:]
    texts |= {(r["row_id"], r["hash"]): (r["prompt"], r["response"]) for r in (*best, *worst)}
    refined = answered["refined"] + answered["undecided"][:2] + answered["original"][:2]
    return best, list(worst), refined, texts


def moving_rows(run):
    """[(epoch, group, "top" | "bottom", rows)]: a few rows of both ends at some epochs."""
    moving = []
    for group, epochs in ranking_ends(run).items() if run.labelled else ():
        numbers = sorted(epochs)
        for epoch in dict.fromkeys((numbers[0], numbers[len(numbers) // 2], numbers[-1])):
            top, bottom = (part.tolist() for part in epochs[epoch])
            for end, part in (("top", top[:3]), ("bottom", bottom[::-1][:3])):
                moving.append((epoch, group, end, [run.rows[i] for i in part]))
    return moving


def rows_section(run):
    """Both ends of the ranking with their texts, and refined answers beside the originals."""
    moving, curated, refined = moving_rows(run), run.folder / "curated.jsonl", []
    texts = read_shown(run.folder / "shown.jsonl")
    if curated.exists():
        wanted = {(row["row_id"], row["hash"]) for *_, rows in moving for row in rows}
        best, worst, refined, more = curated_rows(curated, wanted)
        texts |= more
    elif run.rows:
        ordered = sorted(run.rows, key=lambda row: row["rank"])
        best, worst = ordered[:EXAMPLES], ordered[-EXAMPLES:]
    else:
        return "<p class='muted'>No ranking yet: the run has written no weights.jsonl.</p>"
    by_id = {row["row_id"]: row for row in run.rows or ()}
    best_ids = {row["row_id"] for row in best}
    worst = [row for row in worst[::-1] if row["row_id"] not in best_ids]  # fewer than examples
    parts = ["" if texts else "<p class='muted'>Texts are not shown: the run folder has no "
             "shown.jsonl.</p>"]
    for title, rows in (("Best rows", best), ("Worst rows", worst)):
        parts.append(f"<h3>{title}</h3>")
        for row in rows:
            pair = texts.get((row["row_id"], row["hash"]), ())
            parts.append(row_card(by_id.get(row["row_id"], {}) | row,
                                  zip(("prompt", "response"), pair, strict=False)))
    if refined:
        parts.append("<h3>Refined answers beside the originals</h3>")
    parts += [row_card(row, [("prompt", row["prompt"]), ("original", row["response"]),
                             (f"refined: {RECOMMENDED[row['recommended']]}", row["refined"]),
                             *([("why", row["why"])] if row.get("why") else [])])
              for row in refined]
    return "".join(parts) + moving_section(moving, texts)


def moving_section(moving, texts):
    """The questions of `moving_rows`, folded away; "" without a text."""
    if not moving or not texts:
        return ""
    parts = ["<details><summary>Questions at both ends, epoch by epoch</summary>"]
    for epoch, group, end, rows in moving:
        where = f"epoch {epoch}, {end}" + ("" if group == "all" else f", {group}")
        pairs = [texts.get((row["row_id"], row["hash"])) for row in rows]
        parts.append(f'<p class="muted">{where}</p>' + "".join(
            f'<div class="text line" dir="auto">{escaped_html(" ".join(pair[0].split())[:160])}'
            "</div>" for pair in pairs if pair))
    return "".join([*parts, "</details>"])


# --- the page -------------------------------------------------------------------------------------

def first_screen(run):
    checks = run_checks(run)
    kind, headline = health(checks)
    marks = {"good": "✓", "warn": "!", "bad": "✗", "info": "·"}
    items = "".join(f'<li><b class="{k}">{marks[k]}</b>{escaped_html(text)}</li>'
                    for k, text in checks)
    tiles = "".join(f'<div class="tile"><span>{escaped_html(label)}</span>'
                    f"<strong>{escaped_html(text)}</strong></div>"
                    for label, text in headline_figures(run))
    return (f'{opening_line(run)}<p class="verdict {kind}">{headline}</p>'
            f'<div class="tiles">{tiles}</div><ul class="checks">{items}</ul>')


def selector_table(run):
    keys = ("ess_share", "weight_min", "weight_q10", "weight_q50", "weight_q90", "weight_max",
            "spearman", "uniform", "collapsed")
    rows = [[r["epoch"] + 1, r.get("rho"), *(r.get(f"omega/{key}") for key in keys)]
            for r in run.metrics if "omega/ess" in r]
    return html_table(["epoch", "rho", *keys], rows) if rows else ""


def details(run):
    """Everything below the first screen."""
    labels = label_table(run)
    parts = [flagged_section(run, row_card),
             f'<h2>Curves</h2><div class="plots">{plots.of_run(run)}</div>']
    if table := selector_table(run):
        parts.append("<h2>Selector</h2>" + table)
    if labels:
        parts.append("<h2>Known bad rows</h2><p class='muted'>AUROC: a good row ranks above a bad "
                     "one. Recall: of a kind's rows, the share among the lowest ranks, as many as "
                     "there are bad rows.</p>" + html_table(*labels))
    parts.append("<h2>Rows</h2>" + rows_section(run))
    if run.result:
        parts.append("<details><summary>Final metrics</summary>" + html_table(
            ["metric", "value"], [[key, value] for key, value in run.result.items()
                                  if not label_metric(key)[0]]) + "</details>")
    for title, values in (("Configuration", vars(run.args)),
                          ("Versions and machine", run.config["environment"])):
        parts.append(f"<details><summary>{title}</summary>" + html_table(
            ["name", "value"], [[k, "-" if v is None else str(v)] for k, v in values.items()],
            "config", limit=300) + "</details>")
    return "".join(parts)


def side_by_side_section(runs):
    """What heads the page of several runs: their health, one table, common plots."""
    parts = ['<ul class="checks">']
    for run in runs:
        checks = run_checks(run)
        kind, headline = health(checks)
        why = " ".join(text for k, text in checks if k in ("warn", "bad"))
        parts.append(f'<li><b class="{kind}">●</b><strong>{escaped_html(one_line(run.name))}'
                     f'</strong> {headline} <span class="muted">{escaped_html(why)}</span></li>')
    parts.append("</ul>")
    finished = [run for run in runs if run.result]
    if finished:
        rows = comparison_rows(finished)
        parts.append("<h2>Side by side</h2><p class='muted'>Nats a token, sequence mean; ± is "
                     "the standard deviation over seeds.</p>"
                     + html_table(*comparison_cells(rows)))
        if any(row["n"] > 1 for row in rows):
            parts.append("<p class='muted'>95 % interval of the mean</p>" + html_table(
                *comparison_cells(rows, interval=True)))
    return "".join([*parts, plots.of_runs(runs)])


def page(runs):
    """The HTML of one or several runs."""
    names = escaped_html(", ".join(one_line(run.name) for run in runs))
    body = [f"<h1>{names if len(runs) < 4 else f'{len(runs)} runs'}</h1>"]
    if len(runs) == 1:
        body.append(f'<p class="muted">{escaped_html(subtitle(runs[0]))}</p>'
                    + first_screen(runs[0]) + details(runs[0]))
    else:
        body.append(side_by_side_section(runs))
        body += [f"<details><summary>{escaped_html(one_line(run.name))}</summary>"
                 f"<p class='muted'>{escaped_html(subtitle(run))}</p>{first_screen(run)}"
                 f"{details(run)}</details>" for run in runs]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv='
            f'"Content-Security-Policy" content="{policy}"><meta name="viewport" content="width='
            f'device-width, initial-scale=1"><link rel="icon" href="data:,"><title>{names}'
            f"</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n")


def subtitle(run):
    """What was run, on how much, for how long; one line."""
    args, epochs = vars(run.args), run.metrics[-1]["epoch"] + 1
    seconds = sum(row.get("time/step", 0.0) for row in run.metrics)
    rows = run.result["rows"] if run.result else next((len(w) for w in run.omegas.values()), None)
    return " · ".join(one_line(part) for part in (
        args["method"], f"{rows} lower rows" if rows else None, f"{len(run.metrics)} steps",
        f"{epochs} epoch{'s' * (epochs > 1)}", "toy" if args.get("toy") else args.get("model"),
        f"seed {args['seed']}", f"{seconds / 60:.1f} min of training") if part)


def report_markdown(runs):
    """The page's tables as Markdown."""
    parts = []
    for run in runs:
        checks = run_checks(run)
        parts.append(f"## {escaped_markdown(one_line(run.name))}\n\n"
                     f"{escaped_markdown(subtitle(run))}\n\n**{health(checks)[1]}**\n\n"
                     + "".join(f"- {escaped_markdown(text)}\n" for _, text in checks))
        if labels := label_table(run):
            parts.append(markdown_table(*labels, limit=CELL))
    finished = [run for run in runs if run.result]
    if finished:
        parts.insert(0, markdown_table(*comparison_cells(comparison_rows(finished)), limit=CELL))
    return "\n".join(parts)


def write_report(runs, out):
    """Write the page to `out` and its tables beside it as .md; one line with both paths."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file such as {out / 'report.html'}")
    if out.suffix.lower() == ".md":
        raise UserError(f"--out {out}: the tables are written to a .md file beside the page; name "
                        f"the page, such as {out.with_suffix('.html')}")
    tables = out.with_suffix(".md")
    if tables.is_file() and not (tables.read_bytes() or MARK).startswith(MARK):
        raise UserError(f"--out {out}: the tables would replace {tables}; choose another name")
    for path in (out, tables):
        check_output(path, *(run.folder for run in runs))
    check_same_data(runs)
    text, markdown = plain(page(runs)), MARK.decode() + report_markdown(runs)
    utils.write_atomic(out, text)
    utils.write_atomic(tables, markdown)
    return f"report: {out} ({len(text.encode()) / 2**20:.1f} MiB), tables: {tables}"
