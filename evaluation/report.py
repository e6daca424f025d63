"""One page that shows what finished (or running) runs did: `python eval.py report RUN [RUN ...]`.

The page is a single file: plots are pictures inside it, there is no script and no request. A
content policy in the page forbids both, so text of a data set can do no harm even where escaping it
failed. Every text of the data is escaped, direction-isolated and cut visibly. Texts come from the
run folder alone, from shown.jsonl and curated.jsonl: the source may have changed, or be gone.
"""

import heapq
from pathlib import Path

import utils
from evaluation import plots
from evaluation.comparison import check_same_data, comparison_cells, comparison_rows
from evaluation.runs import check_output, each_curated, read_ranking
from evaluation.texts import escaped_html, html_table, one_line, plain
from runtime.command import reading
from utils import UserError, read_jsonl

TEXT = 700  # characters of a prompt or an answer that are shown
EXAMPLES = 6  # rows shown at each end of the ranking
STYLE = (Path(__file__).parent / "report.css").read_text()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
FACTS = ("rank", "row_id", "weight", "base_loss", "final_loss", "margin", "surprise")
TAGS = ("reason", "kind", "masked", "bad")


# --- rows -----------------------------------------------------------------------------------------


def row_card(row, texts):
    """One row of the data: what is known about it, then its texts {label: text}."""
    facts = []
    for key in FACTS:
        if row.get(key) is not None:
            value = f"{row[key]:.3f}" if isinstance(row[key], float) else row[key]
            facts.append(f"{key} {value}")
    for key in TAGS:
        if row.get(key):
            facts.append(key if row[key] is True else one_line(row[key]))
    boxes = ""
    for label, text in texts.items():
        boxes += (
            f'<div><span class="label">{escaped_html(label)}</span>'
            f'<div class="text" dir="auto">{escaped_html(text[:TEXT])}</div>'
        )
        if len(text) > TEXT:
            boxes += f'<span class="cut">… {len(text) - TEXT:,} more characters</span>'
        boxes += "</div>"
    header = escaped_html(" · ".join(facts))
    return (
        f'<article class="row"><header>{header}</header><div class="pair">{boxes}</div>'
        "</article>"
    )


def shown_texts(run):
    """{(row_id, hash): {"prompt": text, "response": text}} of the rows in shown.jsonl."""
    path = run.folder / "shown.jsonl"
    texts = {}
    if path.exists():
        with reading(path):
            for row in read_jsonl(path):
                pair = {"prompt": row["prompt"], "response": row["response"]}
                texts[row["row_id"], row["hash"]] = pair
    return texts


def cards(rows, texts):
    """The cards of the first EXAMPLES of these rows, with the texts that are known."""
    shown = [
        row_card(row, texts.get((row["row_id"], row["hash"]), {}))
        for row in rows[:EXAMPLES]
    ]
    return "".join(shown)


def rows_section(run, texts):
    """Both ends of the ranking, and new answers beside the originals."""
    if not run.rows:
        return "<p class='muted'>No ranking yet: the run has written no weights.jsonl.</p>"
    ordered = sorted(run.rows, key=lambda row: row["rank"])
    page = f"<h3>Best rows</h3>{cards(ordered, texts)}"
    page += f"<h3>Worst rows</h3>{cards(ordered[::-1], texts)}"
    curated = run.folder / "curated.jsonl"
    if curated.exists():
        rewritten = (
            row for row in each_curated(curated) if row.get("recommended") == "refined"
        )
        page += "<h3>Recommended new answers of the largest margin</h3>"
        for row in heapq.nlargest(EXAMPLES, rewritten, key=lambda row: row["margin"]):
            page += row_card(
                row,
                {
                    "prompt": row["prompt"],
                    "original": row["response"],
                    "new answer": row["refined"],
                },
            )
    return page


# --- row tests ------------------------------------------------------------------------------------


def join_row_tests(run, file):
    """Add `reason` and `surprise` of a row tests' ranking to the rows of a run.

    `UserError` unless the ranking has every row of the run, by row_id and hash.
    """
    tests = {row["row_id"]: row for row in read_ranking(file)}
    for row in run.rows or ():
        tested = tests.get(row["row_id"], {})
        if tested.get("hash") != row["hash"]:
            raise UserError(
                f"{file}: row_id {row['row_id']} of {run.folder} is not in it with "
                "this text: the ranking belongs to other data"
            )
        if "reason" not in tested:
            raise UserError(
                f"{file}: has no column reason; `python -m row_tests` writes one"
            )
        row["reason"], row["surprise"] = tested["reason"], tested["surprise"]


def row_tests_section(run, texts):
    """How many rows look bad by reason, how many of them the run keeps, and a few of them."""
    flagged = [row for row in run.rows if row["reason"]]
    counts = {}
    for row in flagged:
        count = counts.setdefault(row["reason"], [row["reason"], 0, 0])
        count[1] += 1
        count[2] += row["kept"]
    counts = sorted(counts.values(), key=lambda count: -count[1])
    known = [row for row in flagged if (row["row_id"], row["hash"]) in texts]
    known.sort(key=lambda row: -row["surprise"])
    return (
        f"<h2>Rows that look bad</h2><p>{len(flagged)} of {len(run.rows)} rows look bad.</p>"
        + html_table(["reason", "rows", "of these kept by the run"], counts)
        + cards(known, texts)
    )


# --- tables ---------------------------------------------------------------------------------------


def before_and_after(run):
    """(header, rows): every held-out figure of the base model and of the run."""
    values = run.extra | run.metrics[-1] | (run.result or {})
    rows = []
    for key, before in values.items():
        name = key.removeprefix("base/")
        if name != key and name in values:
            rows.append([name, before, values[name]])
    return ["figure", "base model", "run"], rows


def folded_table(title, values):
    """A folded table of {name: value}."""
    rows = []
    for key, value in values.items():
        rows.append([key, f"{value:.6g}" if isinstance(value, float) else str(value)])
    table = html_table(["name", "value"], rows, "config", limit=300)
    return f"<details><summary>{title}</summary>{table}</details>"


# --- the page -------------------------------------------------------------------------------------


def subtitle(run):
    """What was run, on how much, for how long; one line."""
    last = run.metrics[-1]
    minutes = sum(row.get("time/step", 0.0) for row in run.metrics) / 60
    words = [
        run.args.method,
        run.args.model,
        f"seed {run.args.seed}",
        f"{last['step'] + 1} steps",
        f"epoch {last['epoch'] + 1} of {run.args.epochs}",
        f"{minutes:.1f} min of training",
    ]
    if run.result is None:
        words.append("not finished: continue it with --resume")
    return " · ".join(one_line(word) for word in words)


def run_section(run, row_tests):
    """Everything about one run."""
    texts = shown_texts(run)
    page = f"<p class='muted'>{escaped_html(subtitle(run))}</p>"
    page += html_table(*before_and_after(run))
    if row_tests and run.rows:
        join_row_tests(run, row_tests)
        page += row_tests_section(run, texts)
    page += f'<h2>Curves</h2><div class="plots">{plots.of_run(run)}</div>'
    page += "<h2>Rows</h2>" + rows_section(run, texts)
    page += folded_table("Final metrics", run.result or {})
    return page + folded_table("Configuration", vars(run.args) | run.config["environment"])


def page_of(runs, row_tests):
    """The HTML of one or several runs."""
    title = escaped_html(", ".join(one_line(run.name) for run in runs[:4]))
    body = f"<h1>{title}</h1>"
    finished = [run for run in runs if run.result]
    if finished:
        rows = comparison_rows(finished)
        body += (
            "<p class='muted'>Nats a token, sequence mean; ± is the standard deviation over "
            "seeds.</p>" + html_table(*comparison_cells(rows))
        )
    body += f'<div class="plots">{plots.of_runs(runs)}</div>'
    for run in runs:
        is_open = " open" if len(runs) == 1 else ""
        body += (
            f"<details{is_open}><summary>{escaped_html(one_line(run.name))}</summary>"
            f"{run_section(run, row_tests)}</details>"
        )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def write_report(runs, out, row_tests=None):
    """Write the page to `out`; returns one line with its path. row_tests: see `join_row_tests`."""
    check_output(out, *(run.folder for run in runs), *filter(None, [row_tests]))
    check_same_data(runs)
    utils.write_atomic(out, plain(page_of(runs, row_tests)))
    return f"report: {out}"
