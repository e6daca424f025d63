"""The figures of the report as inline SVG, drawn by matplotlib and coloured by the page.

Colours follow the reader's light or dark mode: matplotlib draws with placeholder colours, and
`draw` turns them into CSS variables (--c00 to --c07, --muted, --line).
"""

import io
import math
import re

import torch

from evaluation.comparison import final_metrics
from evaluation.rankings import ranking_over_epochs
from evaluation.texts import escaped_html, one_line

POINTS = 240  # of a curve over steps; more would only make the file larger
NAME = 40     # characters of a curve's name
MUTED, LINE = "#0002aa", "#0002bb"  # placeholder colours, see `recoloured`


# --- one figure -----------------------------------------------------------------------------------

def thin(xs, ys):
    """At most POINTS points of a curve: means over equal stretches."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None and math.isfinite(y)]
    width = max(1, math.ceil(len(pairs) / POINTS))
    parts = [pairs[i:i + width] for i in range(0, len(pairs), width)]
    return [[sum(p[i] for p in part) / len(part) for part in parts] for i in (0, 1)]


def smooth(ys):
    """Centred running mean over a tenth of the curve."""
    reach = len(ys) // 20
    return [sum(part) / len(part) for part in
            (ys[max(0, i - reach):i + reach + 1] for i in range(len(ys)))]


def draw(title, caption, series, xlabel, ylabel, noisy=False, log=False):
    """A <figure> of curves [(name, xs, ys)], over epochs with markers; "" without any point.

    noisy: the curves are drawn faintly, their running means on top. log: a logarithmic y axis.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    series = [(one_line(name, NAME), *thin(xs, ys)) for name, xs, ys in series]
    series = [(name, xs, ys) for name, xs, ys in series if xs]
    if not series:
        return ""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "text.color": MUTED,
                     "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
                     "axes.edgecolor": LINE, "font.size": 9}):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        axes = figure.subplots()
        for index, (_, xs, ys) in enumerate(series):
            colour = f"#0001{index % 8:02x}"
            style = {"color": colour, "linewidth": 1.8,
                     "linestyle": "-" if index < 8 else "--",
                     "marker": "o" if xlabel == "epoch" or len(xs) == 1 else None,
                     "markersize": 4}
            if noisy and len(xs) >= 40:
                axes.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.35)
                ys = smooth(ys)
            axes.plot(xs, ys, **style)
        set_axes(axes, series, xlabel, ylabel, log)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    legend = "".join(
        f'<span><i style="background:var(--c{i % 8:02x})"></i>{escaped_html(name)}</span>'
        for i, (name, _, _) in enumerate(series)) if len(series) > 1 else ""
    return (f'<figure><b>{escaped_html(title)}</b><div class="legend">{legend}</div>'
            f"{recoloured(buffer.getvalue(), title)}"
            f"<figcaption>{escaped_html(caption)}</figcaption></figure>")


def set_axes(axes, series, xlabel, ylabel, log):
    """Limits, ticks and labels of the curves [(name, xs, ys)]."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    lowest, highest = (f(y for _, _, ys in series for y in ys) for f in (min, max))
    if not log and highest - lowest < 0.1 * abs(highest):
        # A difference of a few per cent must not look like a collapse.
        axes.set_ylim(lowest - 0.05 * abs(highest), highest + 0.05 * abs(highest))
    if ylabel in ("AUROC", "share"):
        axes.set_ylim(top=min(1.01, axes.get_ylim()[1]))
    if xlabel in ("epoch", "step"):
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=LINE, linewidth=0.7)
    axes.set(xlabel=xlabel, ylabel=ylabel)


def recoloured(svg, title):
    """matplotlib's SVG as an element of the page, placeholder colours as the page's own."""
    svg = svg[svg.index("<svg"):]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # the same names in every plot of the page
    svg = re.sub(r"#0001([0-9a-f]{2})", r"var(--c\1)", svg)
    svg = svg.replace(MUTED, "var(--muted)").replace(LINE, "var(--line)")
    label = f'<svg role="img" aria-label="{escaped_html(title)}" '
    return re.sub(r"\s*\n\s*", " ", svg).replace("<svg ", label, 1)


# --- what is drawn --------------------------------------------------------------------------------

def column(rows, key):
    """(xs, ys) of a metric over the steps that have it; x counts steps from one."""
    pairs = [(r["step"] + 1, r[key]) for r in rows if isinstance(r.get(key), (int, float))]
    return [x for x, _ in pairs], [y for _, y in pairs]


def over_epochs(run, key):
    """(epochs, values) of a metric that is measured at the end of an epoch; 0 is the base model."""
    pairs = [(r["epoch"] + 1, r[key]) for r in run.metrics if isinstance(r.get(key), (int, float))]
    if run.extra.get(f"base/{key}") is not None:
        pairs.insert(0, (0, run.extra[f"base/{key}"]))
    return [x for x, _ in pairs], [y for _, y in pairs]


def histogram(weights, edges):
    """Shares of (N,) weights in the bins, as the corners of a step curve."""
    counts = torch.histogram(weights.float().clamp(edges[0], edges[-1]), edges.float()).hist
    shares = (counts / len(weights)).tolist()
    xs = [x for x in edges.tolist() for _ in "12"]
    return xs, [0.0] + [s for s in shares for _ in "12"] + [0.0]


def loss_figures(run):
    return [
        draw("Training losses", "Each step's batch before its update; the strong line is a running "
             "mean. The lower loss is weighted.", [
                 ("upper", *column(run.metrics, "upper_loss")),
                 ("lower", *column(run.metrics, "lower_loss")),
                 ("lower, masked rows", *column(run.metrics, "lower_loss_masked"))],
             "step", "nats a token", noisy=True),
        draw("Held-out losses", "Rows never trained on, sequence mean, at the end of each epoch"
             + ("; epoch 0 is the base model." if run.extra else "."), [
                 ("upper, held out", *over_epochs(run, "upper_heldout")),
                 ("lower, held out", *over_epochs(run, "lower_heldout"))],
             "epoch", "nats a token")]


def weight_figures(run):
    """How the weights spread, in all and by known label; [] without a selector."""
    epochs = {k: len(w) * w.softmax(0) for k, w in run.omegas.items()}
    if not epochs:
        return []
    picked = sorted({k for i, k in enumerate(epochs)
                     if i in (0, len(epochs) // 2, len(epochs) - 1)})
    every = torch.cat([epochs[k] for k in picked]).clamp_min(1e-4)
    wide = every.max() > 20 * every.min()  # then the axis is logarithmic

    def scaled(weights):
        return weights.clamp_min(1e-4).log10() if wide else weights

    every, axis = scaled(every), "log10 weight" if wide else "weight"
    bins = max(8, min(40, round(len(next(iter(epochs.values()))) ** 0.5)))
    edges = torch.linspace(every.min().item(), every.max().item() + 1e-6, bins + 1)
    quantiles = {q: [w.quantile(q).item() if len(w) < 1e7 else None for w in epochs.values()]
                 for q in (0.99, 0.9, 0.5, 0.1, 0.01)}
    figures = [
        draw("Weight histogram", "Share of the lower rows by weight (mean one).",
             [(f"epoch {k}", *histogram(scaled(epochs[k]), edges)) for k in picked],
             axis, "share of rows"),
        draw("Weights over the epochs", "Quantiles of the weights.",
             [(f"{q:.0%}", list(epochs), values) for q, values in quantiles.items()],
             "epoch", "weight")]
    if run.labelled and "bad" in run.rows[0]:
        last = scaled(epochs[picked[-1]].clamp_min(1e-4))
        kinds = [("good" if not r["bad"] else r.get("kind") or "bad") for r in run.rows]
        figures.append(draw(
            "Final weights by label", "Share of each label's rows.",
            [(kind, *histogram(last[torch.tensor([k == kind for k in kinds])], edges))
             for kind in sorted(set(kinds), key=lambda k: (k != "good", k))],
            axis, "share of the label"))
    return figures


def ranking_figures(run):
    """How the ends of the ranking move."""
    ranking = ranking_over_epochs(run)
    groups = list(dict.fromkeys(row["group"] for row in ranking))

    def curve(name, key, group):
        own = [row for row in ranking if row["group"] == group and row[key] is not None]
        return (name if group == "all" else f"{name}, {group}", [row["epoch"] for row in own],
                [row[key] for row in own])

    ends = [(end, group) for group in groups for end in ("top", "bottom")]
    return [
        draw("Response length of the top 10 %", "Mean response tokens (of the original responses) "
             "of the rows with the largest and smallest weights.",
             [curve(f"{end} 10 %", f"{end}_length", group) for end, group in ends],
             "epoch", "tokens"),
        draw("Overlap of the ranking's ends", "Share of the rows in the top (bottom) 10 % that "
             "were there an epoch before.",
             [curve(f"{end} 10 %", f"{end}_previous", group) for end, group in ends],
             "epoch", "share"),
        draw("Telling bad rows by weight", "AUROC of the weights against the known labels; one "
             "half is chance.",
             [*(curve("weight", "auroc", group) for group in groups if group != "masked"),
              *rivals(run, sorted(run.omegas))], "epoch", "AUROC")]


def answer_figures(run):
    """The answers that an online run generated."""
    rows = run.metrics
    kinds = sorted({k for r in rows for k in r if k.startswith("answers_right/")})
    return [
        draw("Importance ratios", "Of the answers in each step's batch. Far above or below "
             "one, the answers are stale: a smaller --k-gen.", [
                 ("mean", *column(rows, "ratio_mean")), ("largest", *column(rows, "ratio_max"))],
             "step", "ratio", noisy=True, log=True),
        draw("Effective sample size of the ratios", "Answers that the ratios leave in a batch.",
             [("answers", *column(rows, "ratio_ess"))], "step", "answers", noisy=True),
        draw("Generated answers", f"Mean length at each refresh. {generation_time(run)}",
             [("length", *column(rows, "answer_length"))], "step", "tokens"),
        draw("Generated answers that are right", "By the label of the original, where the "
             "truth is known.", [(k.split("/", 1)[1], *column(rows, k)) for k in kinds],
             "step", "share")]


def of_run(run):
    """Every figure of one run that its files allow."""
    figures = loss_figures(run) + weight_figures(run) + ranking_figures(run)
    return "".join(figures + (answer_figures(run) if run.args.method == "online" else []))


def rivals(run, epochs):
    """AUROC of the base model's loss and of the length as flat curves."""
    values = final_metrics(run) if run.result else {}
    return [(name, epochs, [values[key]] * len(epochs)) for name, key in
            (("base model's loss", "base/auroc"), ("length", "length/auroc"))
            if epochs and values.get(key) is not None]


def generation_time(run):
    """How much of the time went into generating, as a sentence."""
    total, spent = (sum(r.get(f"time/{key}", 0.0) for r in run.metrics)
                    for key in ("step", "generate"))
    answers = sum(r.get("answers", 0) for r in run.metrics)
    return f"{answers} answers took {spent:.0f} s of {total:.0f} s ({spent / total:.0%})." \
        if total and answers else ""


def of_runs(runs):
    """Curves of all runs in common plots."""
    def first_group(run, key):
        rows = ranking_over_epochs(run)
        rows = [r for r in rows if r["group"] in ("all", "unmasked") and r[key] is not None]
        return [r["epoch"] for r in rows], [r[key] for r in rows]

    return '<div class="plots">' + "".join([
        draw("Held-out upper loss", "Sequence mean, at the end of each epoch.",
             [(r.name, *over_epochs(r, "upper_heldout")) for r in runs], "epoch", "nats a token"),
        draw("Held-out lower loss", "Clean rows of the lower level's kind.",
             [(r.name, *over_epochs(r, "lower_heldout")) for r in runs], "epoch", "nats a token"),
        draw("Upper loss in training", "Running mean of each step's batch.",
             [(r.name, xs, smooth(ys)) for r in runs
              for xs, ys in [thin(*column(r.metrics, "upper_loss"))]], "step", "nats a token"),
        draw("Response length of the top 10 %", "By weight; of an online run the unmasked rows.",
             [(r.name, *first_group(r, "top_length")) for r in runs], "epoch", "tokens"),
        draw("Telling bad rows by weight", "AUROC; of an online run over the unmasked rows.",
             [(r.name, *first_group(r, "auroc")) for r in runs], "epoch", "AUROC"),
    ]) + "</div>"
