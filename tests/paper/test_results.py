"""Stored results: cells, claims, and what they were made by."""

import json
import shlex
import subprocess
from types import SimpleNamespace

from paper import results


def test_a_table_is_printed_and_stored_with_its_claims(here, capsys):
    args = SimpleNamespace(name="mine", target="table1", command="python -m paper table1")
    runs = {
        "BDS": [{"upper_heldout": 1.0}, {"upper_heldout": 1.5}],
        "LESS": [{"upper_heldout": 2.0}, {"upper_heldout": 2.5}],
    }
    results.show(args, runs, {"upper_heldout": "held-out loss", "upper_exact": "exact"})
    printed = capsys.readouterr().out
    assert (
        "1.250 ± 0.354" in printed
        and "BDS beats LESS" in printed
        and "exact" not in printed
    )
    entries = json.loads((here / "results/mine_table1.json").read_text())
    assert entries["columns"] == {"upper_heldout": "held-out loss"}
    assert entries["rows"]["LESS"]["upper_heldout"]["seeds"] == [2.0, 2.5]
    assert entries["claims"] == [["BDS beats LESS", "2 of 2", "-1.0 ± 0.0", "as claimed"]]
    assert entries["command"] == "python -m paper table1"
    assert entries["hardware"] and entries["torch"] and entries["date"]


def test_results_are_stored_without_git(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    results.save_results(tmp_path / "r.json", "python x.py", {}, hardware="here")
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored["commit"] is None and stored["hardware"] == "here"


def test_flags_are_dropped_with_their_values():
    words = shlex.split(
        "--model m --lower 'a b' --lower-limit=2 --lower-heldout h --keep --lower"
    )
    assert results.without_flags(words, "--lower", "--lower-limit") == shlex.split(
        "--model m --lower-heldout h --keep"
    )
