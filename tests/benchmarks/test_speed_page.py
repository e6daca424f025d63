"""The figures in the tables of docs/speed.md are stored in results/gpu_*.json and bench_*.json."""

import json
import re

from conftest import ROOT

from benchmarks.measure import milliseconds, shown


def written_of(value):
    """How the page writes the figures of a stored entry: spreads, tokens a second, GB, hours."""
    if isinstance(value, float):
        return {f"{value:.2f}"}
    if isinstance(value, int):
        return {f"{value / 1e9:.2f}", f"{value / 1e9:.1f}"}
    if not isinstance(value, dict):
        return set()
    words = set()
    if "median" in value:
        words |= {shown(value), milliseconds(value), f"{value['median']:,.0f}"}
    for inner in value.values():
        words |= written_of(inner)
    return words


def test_every_figure_of_a_table_is_stored():
    page = (ROOT / "docs" / "speed.md").read_text()
    stored = set()
    for pattern in ("bench_*.json", "gpu_*.json"):
        for file in (ROOT / "results").glob(pattern):
            stored |= written_of(json.loads(file.read_text()))
    spreads = re.findall(r"\d+\.\d+\s\([\d.]+-[\d.]+\)", page)
    rates = re.findall(r"\| (\d+,\d{3}) \|", page)
    last_cells = re.findall(r"\| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(spreads) > 30
    assert len(rates) == 11
    assert len(last_cells) == 6 + 5 + 6 + 5
    for text in spreads + rates + last_cells:
        assert text.replace("\n", " ") in stored
