"""The benchmark of rows at tiny sizes."""

import pytest
from conftest import read_rows

from benchmarks.data import write_generated
from benchmarks.measure import memory


@pytest.mark.slow
def test_data(measured, tmp_path):
    results = measured("data", "--rounds", 1, "--sizes", 300, "--folder", tmp_path)
    entry = results["300"]
    assert entry["rows_per_second"] == pytest.approx(300 / entry["tokenise_seconds"])
    assert 20 * 300 < entry["tokens"] < 100 * 300
    assert entry["cache_bytes"] > 10_000
    if memory("RssAnon"):
        assert 0 < entry["anonymous_bytes"] < entry["resident_bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json"]


def test_generated_rows_differ(tmp_path):
    write_generated(tmp_path / "rows.jsonl", 50)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len({row["prompt"] for row in rows}) == 50
    assert all(row["response"] for row in rows)
