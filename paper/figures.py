"""Figures over seeds as PNG files: every seed a dot, the mean a line."""

import math

from paper.statistics import mean_std


def new_figure(width, height, panels=1):
    """(figure, axes), at most three panels a row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    columns = min(panels, 3)
    axes = figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def panels_figure(path, ylabel, panels, chance=None):
    """{question: {label: values over seeds}}, one panel a question; a dashed line at chance."""
    figure, axes = new_figure(12, 3.4 * math.ceil(len(panels) / 3), len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=False):
        for x, runs in enumerate(values.values()):
            axis.plot([x] * len(runs), runs, "o", color="#8aa4c8", markersize=4)
            axis.plot([x - 0.25, x + 0.25], [mean_std(runs)[0]] * 2, color="#1f3b63", linewidth=2)
        axis.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)
        if chance is not None:
            axis.axhline(chance, color="#999999", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(ylabel, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def line_figure(path, xlabel, ylabel, curves):
    """{name: [(x, values over seeds), ...]}: means, with every seed as a dot."""
    figure, (axis,) = new_figure(5, 3.2)
    for number, (name, points) in enumerate(curves.items()):
        axis.plot([x for x, _ in points], [mean_std(values)[0] for _, values in points],
                  color=f"C{number}", label=name)
        for x, values in points:
            axis.plot([x] * len(values), values, "o", color=f"C{number}", markersize=3, alpha=0.5)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
