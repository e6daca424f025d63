"""The paper's claims by scale: paired differences, their intervals, what was not run."""

import json
import statistics

import pytest
from conftest import ROOT

from paper import claims
from paper.rendering import filled


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """stored(name, results): a file of results/ in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return lambda name, results: (tmp_path / "results" / f"{name}.json").write_text(
        json.dumps({"results": results}))


def losses(*values, key="upper_heldout"):
    return [{key: value} for value in values]


def test_an_interval_is_students_t():
    """Against scipy's t: mean 2, n = 4, sd 1.29099, half width 3.1824 x sd / 2 = 2.054."""
    assert claims.t_interval([0.5, 1.5, 2.5, 3.5]) == "+2.0 ± 2.1"
    assert claims.t_interval([-0.1, -0.2]) == "-0.150 ± 0.635"
    assert claims.t_interval([0.1, 0.1, 0.1, 0.2]) == "*+0.125 ± 0.080*"
    assert claims.t_interval([-0.1, -0.1, -0.1, -0.2]) == "**-0.125 ± 0.080**"
    assert claims.t_interval([-0.1]) == "-0.100, one seed"
    many = [0.0, 1.0] * 20
    assert claims.t_interval(many) == f"*+0.500 ± {2.0227 * statistics.stdev(many) / 40**0.5:.3f}*"


def test_which_runs_make_a_cell(stored):
    """The first file with both methods; paired by seed; AUROC is one minus; lengths by epoch."""
    stored("a", {"BDS": losses(1.0, 1.0)})
    stored("b", {"BDS": losses(1.0, 2.0), "LESS": losses(1.5, 2.5, 9.0)})
    assert claims.cell_of(["gone", "a", "b"], "BDS", "LESS", "upper_heldout") == \
        "**-0.500 ± 0.000**"
    assert claims.cell_of(["gone", "a"], "BDS", "LESS", "upper_heldout") == "not run"
    stored("c", {"omega": losses(0.9, 0.8, key="auroc"), "loss": losses(0.7, 0.8, key="auroc")})
    assert claims.cell_of(["c"], "omega", "loss", "auroc").startswith("-0.100 ± ")
    stored("d", {"BDS": [{"base/auroc": 0.7, "weight/auroc": 0.75}] * 2})
    assert claims.cell_of(["a", "d"], "BDS", "BDS", claims.OMEGA) == "**-0.050 ± 0.000**"
    epochs = [{"epoch 1": 5.0, "epoch 2": 7.0, "epoch 3": 8.0}] * 2
    assert claims.differences(epochs, epochs, None) == [-3.0, -3.0]


def test_the_table_says_not_run_until_a_file_is_there(stored):
    marked = "<!-- begin seen -->\n<!-- end seen -->\n"
    stored("toy_table1", {"BDS": losses(1.0, 1.1), "LESS": losses(1.5, 1.6)})
    assert filled(marked, "docs/x.md").splitlines()[1:-1] == [
        "| the paper's claim | toy |", "|---|---|", "| BDS beats LESS | **-0.500 ± 0.000** |"]
    stored("smollm2_table1", {"BDS": losses(1.0, 2.0), "random": losses(1.5, 2.0)})
    table = filled(marked, "docs/x.md").splitlines()[1:-1]
    assert table[0] == "| the paper's claim | toy | text, 135M |"
    assert "| BDS beats random rows | not run | -0.250 ± 3.177 |" in table
    assert "| BDS beats LESS | **-0.500 ± 0.000** | not run |" in table


def test_methods_and_files_of_the_claims_exist(monkeypatch):
    """Every claim is seen on the toy, so no name of a method or file is misspelt."""
    monkeypatch.chdir(ROOT)
    _, rows = claims.claims_by_scale()
    assert len(rows) == len(claims.CLAIMS) and "not run" not in {row[1] for row in rows}
    text = (ROOT / "docs" / "claims.md").read_text()
    assert all(row[1] in text for row in rows)
