"""One page that shows what finished (or running) runs did: `python eval.py report RUN [RUN ...]`.

The page is a single file: plots are inline SVG, there is no script and no request; a content policy
in the page forbids both, so text of a data set can do no harm even where escaping it failed. Every
text of the data is escaped, direction-isolated and cut visibly.
"""

import collections
import html
import json
import re
from pathlib import Path

import compare
import plots
import utils
from utils import UserError

TEXT = 700     # characters of a prompt or an answer that are shown
EXAMPLES = 6   # rows shown at each end of the ranking

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --fg: #1d1f22; --muted: #60656d;
  --line: #e1e3e6; --good: #117a3d; --warn: #9a5b00; --bad: #b42318; --soft: #f1f2f4;
  --c00: #2563c9; --c01: #c2571a; --c02: #12805c; --c03: #a3338f; --c04: #7a6a00; --c05: #0e7c92;
  --c06: #b42318; --c07: #5f6368; }
@media (prefers-color-scheme: dark) { :root { --bg: #131416; --card: #1b1d20; --fg: #e8e9eb;
  --muted: #9da3ab; --line: #33373c; --good: #5bd08a; --warn: #f0b458; --bad: #ff8578;
  --soft: #26292d; --c00: #7fb0ff; --c01: #ffa066; --c02: #57cfa2; --c03: #e58fd6; --c04: #dbc64d;
  --c05: #5cc8de; --c06: #ff8578; --c07: #a9afb7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 20px 16px 60px; max-width: 1160px; background: var(--bg);
  color: var(--fg); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 36px 0 10px; }
h3 { font-size: .95rem; margin: 22px 0 8px; }
p { margin: 6px 0; max-width: 75ch; }
.muted, figcaption { color: var(--muted); font-size: .85rem; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
.verdict { font-size: 1.15rem; font-weight: 650; margin: 10px 0 4px; }
ul.checks { list-style: none; margin: 8px 0 0; padding: 0; }
ul.checks li { padding: 3px 0 3px 1.6em; text-indent: -1.6em; overflow-wrap: anywhere; }
ul.checks b { display: inline-block; width: 1.6em; text-indent: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 10px;
  margin: 14px 0; }
.tile, figure, .row { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.tile { padding: 10px 12px; }
.tile span { display: block; color: var(--muted); font-size: .8rem; }
.tile strong { font-size: 1.25rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr));
  gap: 12px; }
figure { margin: 0; padding: 12px 12px 8px; min-width: 0; }
figure b { font-size: .92rem; } figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .82rem; margin: 3px 0;
  overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 12px; height: 3px; border-radius: 2px; margin-right: 5px;
  vertical-align: middle; }
.scroll { overflow-x: auto; margin: 8px 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 12px 4px 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--muted); font-weight: 500; } td:first-child, th:first-child { text-align: left; }
table.config td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.row { padding: 10px 12px; margin: 8px 0; contain: paint; }
.row header { font-size: .82rem; color: var(--muted); margin-bottom: 6px; }
.tag { background: var(--soft); border-radius: 4px; padding: 1px 6px; color: var(--fg); }
.pair { display: grid; gap: 8px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px),
  1fr)); }
.text { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; font-size: .9rem;
  max-height: 17em; overflow-y: auto; }
.line { border-left: 2px solid var(--line); padding-left: 10px; margin: 3px 0; }
.label { color: var(--muted); font-size: .78rem; display: block; margin-top: 4px; }
.cut { color: var(--warn); font-size: .8rem; unicode-bidi: isolate; }
details { margin: 18px 0; } summary { cursor: pointer; font-weight: 600; }
"""


# --- text and tables ------------------------------------------------------------------------------

def plain(text):
    """Text that is safe to write: no lone surrogates, no control characters but newline and tab."""
    text = text.encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)


def escape(text):
    return html.escape(str(text))


def shown(label, text):
    """A labelled text of the data, cut visibly."""
    text = str(text)
    cut = f'<span class="cut">… {len(text) - TEXT:,} more characters</span>' \
        if len(text) > TEXT else ""
    return (f'<div><span class="label">{escape(label)}</span>'
            f'<div class="text" dir="auto">{escape(text[:TEXT])}</div>{cut}</div>')


def number(value):
    """Four digits for a float, - for nothing."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
    return str(value)


def html_table(header, rows, kind=""):
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(number(cell))}</td>" for cell in row) + "</tr>"
                   for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def markdown_table(header, rows):
    def line(cells):
        texts = [re.sub(r"\s+", " ", escape(number(c))).replace("|", "\\|") for c in cells]
        return "| " + " | ".join(texts) + " |\n"
    return line(header) + "|" + "---|" * len(header) + "\n" + "".join(map(line, rows))


# --- did it work? ---------------------------------------------------------------------------------

def upper_losses(run):
    """[(when, held-out upper loss)] from before training to the end.

    Before training is the base model where the run has measured it, else the first step's batch
    of upper rows, whose losses are those before any update.
    """
    epochs, held = plots.over_epochs(run, "upper_heldout")
    found = [("before training" if epoch == 0 else f"after epoch {epoch}", loss)
             for epoch, loss in zip(epochs, held, strict=True)]
    first = run.metrics[0]
    if epochs[:1] != [0] and first["step"] == 0 and first.get("upper_loss") is not None:
        found.insert(0, ("on the first upper batch, before any update", first["upper_loss"]))
    return found


def upper_check(run):
    """The checks of the held-out upper loss."""
    losses = upper_losses(run)
    if len(losses) < 2:
        return [("info", "No held-out upper loss yet: it is measured at the end of an epoch.")]
    first, last = losses[0][1], losses[-1][1]
    when, best = min(losses[1:], key=lambda pair: pair[1])
    sentence = f"Held-out upper loss {last:.4f} at the end; {first:.4f} {losses[0][0]}."
    if last > 1.01 * best:
        sentence += f" It was lowest {when} ({best:.4f}) and has risen since"
        # A tenth of what was gained is noise on a few hundred rows; more is overfitting.
        if last - best > 0.1 * (first - best):
            return [("warn", f"{sentence}: fewer epochs or a smaller --lr.")]
        sentence += ", by little."
    return [("good" if last < first else "warn", sentence)]


def checks(run):
    """[("good" | "warn" | "bad" | "info", sentence)]: what a reader wants to know first."""
    found, last = [], run.metrics[-1]
    if run.result is None:
        found.append(("bad", f"Not finished: {last['step'] + 1} steps so far, epoch "
                      f"{last['epoch'] + 1} of {run.args.epochs}. Continue with --resume."))
    found += upper_check(run)
    values = compare.final_metrics(run) if run.result else {}
    if values.get("weight/auroc") is not None:
        names = {"the base model's loss": "base/auroc", "length": "length/auroc"}
        rivals = {n: values[k] for n, k in names.items() if values.get(k) is not None}
        rival = max(rivals, key=lambda n: max(rivals[n], 1 - rivals[n]), default=None)
        sentence = f"The weights tell bad rows with AUROC {values['weight/auroc']:.3f}"
        if rival is None:
            found.append(("info", sentence + "; no pass of the base model to compare with."))
        else:
            theirs = max(rivals[rival], 1 - rivals[rival])
            better = values["weight/auroc"] > theirs + 0.01
            found.append(("good" if better else "warn", f"{sentence}, {rival} with {theirs:.3f}"
                          + ("." if better else ": the selection adds nothing to it.")))
    elif run.omegas:
        found.append(("info", "No labels in the lower rows: look at both ends of the ranking below "
                      "to judge it."))
    flags = [r for r in run.metrics if "omega/ess" in r]
    if flags and flags[-1].get("omega/collapsed"):
        found.append(("bad", f"The selector has collapsed onto {flags[-1]['omega/ess']:.1f} rows: "
                      "a smaller --omega-lr."))
    elif flags and flags[-1].get("omega/uniform"):
        found.append(("warn", "The weights are still nearly uniform: only their order informs. A "
                      "larger --omega-lr or more epochs spread them."))
    elif flags:
        found.append(("good", "The selector is neither uniform nor collapsed: effective sample "
                      f"size {flags[-1]['omega/ess_share']:.0%} of the rows."))
    if run.result and values.get("refined/answers"):
        rate = values.get("refined/false_replacement")
        found.append((
            "info", f"{values['refined/answers']} bottom rows answered anew: "
            f"{values['refined/refined']} recommended, {values['refined/undecided']} undecided; "
            + (f"on trusted prompts the rule would replace {rate:.1%} of the right answers."
               if rate is not None else "too few trusted rows to calibrate the recommendation.")))
    clamped = sum(r.get("ratio_clamped") or 0 for r in run.metrics)
    used = sum((r.get("masked_share") or 0) * run.args.batch * run.args.num_answers
               for r in run.metrics) if clamped else 0
    if used and clamped > 0.01 * used:
        found.append(("warn", f"{clamped / used:.0%} of the importance ratios were clamped: the "
                      "answers are older than the model; a smaller --k-gen."))
    return found


def verdict(found):
    """(class, headline) of a list of checks."""
    bad, warn = (sum(kind == k for kind, _ in found) for k in ("bad", "warn"))
    if bad:
        return "bad", "This run needs attention."
    if warn:
        return "warn", f"The run finished; {warn} point{'s' * (warn > 1)} to look at."
    return "good", "The run worked."


def tiles(run):
    """The few numbers of the first screen."""
    values = compare.final_metrics(run) if run.result else {}
    losses, made = upper_losses(run), []
    if len(losses) > 1:
        known = losses[0][0] != "on the first upper batch, before any update"
        made.append(("held-out upper loss, before → after" if known else
                     "upper loss: first batch → held out", f"{losses[0][1]:.3f} → "
                     f"{losses[-1][1]:.3f}"))
    for key, label in (("upper_exact", "held-out answered exactly"),
                       ("upper_accuracy", "held-out pairs ranked right"),
                       ("lower_heldout", "held-out lower loss"),
                       ("weight/auroc", "AUROC of the weights"),
                       ("base/auroc", "AUROC of the base loss"),
                       ("length/auroc", "AUROC of the length")):
        if values.get(key) is not None:
            made.append((label, f"{values[key]:.0%}" if key in ("upper_exact", "upper_accuracy")
                         else f"{values[key]:.3f}"))
    ess = [r["omega/ess_share"] for r in run.metrics if "omega/ess_share" in r]
    if ess:
        made.append(("effective sample size", f"{ess[-1]:.0%} of rows"))
    if run.args.method == "online":
        total = sum(r.get("time/step") or 0.0 for r in run.metrics)
        spent = sum(r.get("time/generate") or 0.0 for r in run.metrics)
        made.append(("time spent generating", f"{spent / total:.0%}" if total else "-"))
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><span>{escape(label)}</span><strong>{escape(value)}</strong></div>'
        for label, value in made) + "</div>"


def label_table(run):
    """(header, rows) of AUROC and recall by kind for every ranking, None without labels."""
    values = run.result or {}
    names = [n for n in ("weight", "final", "base", "length") if f"{n}/precision" in values]
    names += [f"{n}_unmasked" for n in names if f"{n}_unmasked/precision" in values]
    if not names:
        return None
    keys = sorted({k.split("/", 1)[1] for k in values if k.split("/")[0] in names},
                  key=lambda k: (k.count("/"), k))
    return ["ranking by", *keys], [[n.replace("_", ", "), *(values.get(f"{n}/{k}") for k in keys)]
                                   for n in names]


# --- the rows themselves --------------------------------------------------------------------------

def curated_rows(path, wanted):
    """(best, worst, refined, texts) of a curated.jsonl, read line by line: it may be large.

    texts: {row_id: (prompt, response)} of the wanted rows.
    """
    best, worst, texts = [], collections.deque(maxlen=EXAMPLES), {}
    refined = {"refined": [], "undecided": [], "original": []}
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}: not valid JSON ({error})") from None
            if len(best) < EXAMPLES:
                best.append(entry)
            worst.append(entry)
            if entry["row_id"] in wanted:
                texts[entry["row_id"]] = entry["prompt"], entry["response"]
            if entry.get("refined") is not None and entry.get("recommended") in refined:
                examples = refined[entry["recommended"]]
                examples.append(entry)
                examples.sort(key=lambda e: -(e.get("margin") or 0.0))
                del examples[EXAMPLES:]
    refined = refined["refined"] + refined["undecided"][:2] + refined["original"][:2]
    return best, list(worst), refined, texts


def source_texts(run, wanted):
    """{row_id: (prompt, response)} from the toy or the source, and why some are missing ("").

    wanted: {row_id: hash}. A text whose hash differs is left out: the source has changed.
    """
    def check(row_id, prompt, response):
        if utils.content_hash(prompt, response) == wanted.get(row_id):
            found[row_id] = prompt, response

    found, why, args = {}, "", run.args
    try:
        if args.toy:
            import toy

            rows = toy.make_rows(args.seed, noise=args.toy_noise, upper=args.toy_upper,
                                 contrary_share=args.toy_contrary)["lower"]
            for row_id, row in enumerate(rows):
                check(row_id, row["prompt"], row["response"])
        else:
            read_source(args, check)
    except (UserError, OSError) as error:
        why = str(error)
    return found, why or ("" if found else "the rows of the source are not those of the run")


def read_source(args, check):
    """Call `check` for every row of the lower source, rendered as text without a tokenizer."""
    import data

    columns, row_id = data.parse_columns(args.lower_columns), -1
    for part in data.find_parts(args.lower, args.lower_split):
        for place, row in data.read_part(part, args.lower):
            row_id += 1
            if not isinstance(row, dict):
                raise UserError(f"{place}: not a row with columns")
            if missing := [theirs for theirs in columns.values() if theirs not in row]:
                raise UserError(f'{place}: the column "{missing[0]}" of --lower-columns is gone')
            row = {ours: row[theirs] for ours, theirs in columns.items()} if columns else row
            messages = data.clean_messages(data.row_messages(
                row, data.find_layout(row, place), "chosen", place), ("<|endoftext|>",))
            if messages:
                check(row_id, data.transcript(messages[:-1]), messages[-1]["content"])


def card(entry, bodies):
    """One row of the data: what is known about it, then its texts."""
    facts = [f"rank {entry['rank']}", f"row {entry['row_id']}"]
    facts += [f"{label} {entry[key]:.3f}" for key, label in
              (("weight", "weight"), ("base_loss", "base loss"), ("final_loss", "final loss"),
               ("margin", "margin")) if isinstance(entry.get(key), (int, float))]
    tags = [t for t in (entry.get("kind"), "masked" if entry.get("masked") else None,
                        "bad" if entry.get("bad") and not entry.get("kind") else None) if t]
    return (f'<article class="row"><header>{escape(" · ".join(facts))} '
            + " ".join(f'<span class="tag">{escape(tag)}</span>' for tag in tags)
            + f'</header><div class="pair">{"".join(bodies)}</div></article>')


def moving_rows(run):
    """[(epoch, group, "top" | "bottom", rows)]: a few rows of both ends at some epochs."""
    found = []
    for group, epochs in compare.ends(run).items() if run.labelled else ():
        numbers = sorted(epochs)
        for epoch in dict.fromkeys((numbers[0], numbers[len(numbers) // 2], numbers[-1])):
            top, bottom = (part.tolist() for part in epochs[epoch])
            for end, part in (("top", top[:3]), ("bottom", bottom[::-1][:3])):
                found.append((epoch, group, end, [run.rows[i] for i in part]))
    return found


def examples(run):
    """Both ends of the ranking with their texts, and refined answers beside the originals."""
    curated, refined, note = run.folder / "curated.jsonl", [], ""
    moving = moving_rows(run)
    wanted = {r["row_id"]: r["hash"] for *_, rows in moving for r in rows}
    if curated.exists():
        best, worst, refined, texts = curated_rows(curated, wanted)
        texts |= {e["row_id"]: (e["prompt"], e["response"]) for e in best + worst}
    elif run.rows:
        ordered = sorted(run.rows, key=lambda r: r["rank"])
        best, worst = ordered[:EXAMPLES], ordered[-EXAMPLES:]
        texts, why = source_texts(run, wanted | {e["row_id"]: e["hash"] for e in best + worst})
        if why:
            note = (f"<p class='muted'>{'Some texts' if texts else 'Texts'} are not shown: "
                    f"{escape(why)}</p>")
    else:
        return "<p class='muted'>No ranking yet: the run has written no weights.jsonl.</p>"
    by_id = {r["row_id"]: r for r in run.rows or ()}
    best_ids = {e["row_id"] for e in best}
    parts = [note]
    for title, entries in (("Best rows", best), ("Worst rows", worst[::-1])):
        parts.append(f"<h3>{title}</h3>")
        for e in entries:
            if title == "Worst rows" and e["row_id"] in best_ids:
                continue  # fewer rows than examples
            pair = texts.get(e["row_id"])
            parts.append(card({**by_id.get(e["row_id"], {}), **e}, [
                shown("prompt", pair[0]), shown("response", pair[1])] if pair else []))
    if refined:
        parts.append("<h3>Refined answers beside the originals</h3>")
    for e in refined:
        parts.append(card(e, [shown("prompt", e["prompt"]), shown("original", e["response"]),
                              shown(f"refined: {RECOMMENDED[e['recommended']]}", e["refined"])]))
    if moving and texts:
        parts.append("<details><summary>Questions at both ends, epoch by epoch</summary>")
        for epoch, group, end, rows in moving:
            where = f"epoch {epoch}, {end}" + ("" if group == "all" else f", {group}")
            parts.append(f'<p class="muted">{where}</p>' + "".join(
                f'<div class="text line" dir="auto">{escape(line)}</div>' for line in
                (" ".join(texts[r["row_id"]][0].split())[:160] for r in rows
                 if r["row_id"] in texts)))
        parts.append("</details>")
    return "".join(parts)


RECOMMENDED = {"refined": "recommended", "undecided": "undecided", "original": "keep the original"}


# --- the page -------------------------------------------------------------------------------------

def first_screen(run):
    kind, headline = verdict(checks(run))
    marks = {"good": "✓", "warn": "!", "bad": "✗", "info": "·"}
    items = "".join(f'<li><b class="{k}">{marks[k]}</b>{escape(text)}</li>'
                    for k, text in checks(run))
    return f'<p class="verdict {kind}">{headline}</p>{tiles(run)}<ul class="checks">{items}</ul>'


def selector_table(run):
    keys = ("ess_share", "weight_min", "weight_q10", "weight_q50", "weight_q90", "weight_max",
            "spearman", "uniform", "collapsed")
    rows = [[r["epoch"] + 1, r["rho"], *(r.get(f"omega/{key}") for key in keys)]
            for r in run.metrics if "omega/ess" in r]
    return html_table(["epoch", "rho", *keys], rows) if rows else ""


def details(run):
    """Everything below the first screen."""
    args, labels = vars(run.args), label_table(run)
    parts = [f'<h2>Curves</h2><div class="plots">{plots.of_run(run)}</div>']
    if table := selector_table(run):
        parts.append("<h2>Selector</h2>" + table)
    if labels:
        parts.append("<h2>Known bad rows</h2><p class='muted'>AUROC: a good row ranks above a bad "
                     "one. Recall: of a kind's rows, the share among the lowest ranks, as many as "
                     "there are bad rows.</p>" + html_table(*labels))
    parts.append("<h2>Rows</h2>" + examples(run))
    if run.result:
        shown_keys = [k for k in run.result if not labels or k.split("/")[0].removesuffix(
            "_unmasked") not in ("weight", "final", "base", "length")]
        parts.append("<details><summary>Final metrics</summary>" + html_table(
            ["metric", "value"], [[k, run.result[k]] for k in shown_keys]) + "</details>")
    for title, values in (("Configuration", args), ("Versions and machine",
                                                    run.config.get("environment", {}))):
        parts.append(f"<details><summary>{title}</summary>" + html_table(
            ["name", "value"], [[k, "-" if v is None else str(v)] for k, v in values.items()],
            "config") + "</details>")
    return "".join(parts)


def page(runs):
    """The HTML of one or several runs."""
    names = ", ".join(run.name for run in runs)
    body = [f"<h1>{escape(names if len(runs) < 4 else f'{len(runs)} runs')}</h1>"]
    if len(runs) == 1:
        run = runs[0]
        body.append(f'<p class="muted">{escape(subtitle(run))}</p>' + first_screen(run)
                    + details(run))
    else:
        body.append('<ul class="checks">')
        for run in runs:
            found = checks(run)
            kind, headline = verdict(found)
            why = " ".join(text for k, text in found if k in ("warn", "bad"))
            body.append(f'<li><b class="{kind}">●</b><strong>{escape(run.name)}</strong> '
                        f'{headline} <span class="muted">{escape(why)}</span></li>')
        body.append("</ul>")
        finished = [run for run in runs if run.result]
        if finished:
            rows = compare.summarise(finished)
            body.append("<h2>Side by side</h2><p class='muted'>Nats a token, sequence mean; ± is "
                        "the standard deviation over seeds.</p>"
                        + html_table(*compare.comparison_cells(rows)))
            if any(row["n"] > 1 for row in rows):
                body.append("<p class='muted'>95 % interval of the mean</p>" + html_table(
                    *compare.comparison_cells(rows, interval=True)))
        body.append(plots.of_runs(runs))
        body += [f"<details><summary>{escape(run.name)}</summary><p class='muted'>"
                 f"{escape(subtitle(run))}</p>{first_screen(run)}{details(run)}</details>"
                 for run in runs]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv='
            f'"Content-Security-Policy" content="{policy}"><meta name="viewport" content="width='
            f'device-width, initial-scale=1"><link rel="icon" href="data:,"><title>{escape(names)}'
            f"</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n")


def subtitle(run):
    """What was run, on how much, for how long; one line."""
    args, epochs = vars(run.args), run.metrics[-1]["epoch"] + 1
    seconds = sum(r.get("time/step") or 0.0 for r in run.metrics)
    rows = run.result["rows"] if run.result else next((len(w) for w in run.omegas.values()), None)
    return " · ".join(str(part) for part in (
        args["method"], f"{rows} lower rows" if rows else None, f"{len(run.metrics)} steps",
        f"{epochs} epoch{'s' * (epochs > 1)}", "toy" if args.get("toy") else args.get("model"),
        f"seed {args.get('seed')}", f"{seconds / 60:.1f} min of training") if part)


def markdown(runs):
    """The page's tables as Markdown."""
    parts = []
    for run in runs:
        found = checks(run)
        parts.append(f"## {html.escape(run.name)}\n\n{html.escape(subtitle(run))}\n\n"
                     f"**{verdict(found)[1]}**\n\n"
                     + "".join(f"- {html.escape(text, quote=False)}\n" for _, text in found))
        if labels := label_table(run):
            parts.append(markdown_table(*labels))
    finished = [run for run in runs if run.result]
    if finished:
        parts.insert(0, markdown_table(*compare.comparison_cells(compare.summarise(finished))))
    return "\n".join(parts)


def write(runs, out):
    """Write the page to `out` and its tables beside it as .md; one line with both paths."""
    out = Path(out)
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; name a file such as {out / 'report.html'}")
    compare.check_same_data(runs)
    utils.make_parent(out)
    text, tables = plain(page(runs)), plain(markdown(runs))
    utils.write_atomic(out, text)
    utils.write_atomic(out.with_suffix(".md"), tables)
    return f"report: {out} ({len(text.encode()) / 2**20:.1f} MiB), tables: {out.with_suffix('.md')}"
