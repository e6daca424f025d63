"""Stored results."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from paper import results
from utils import UserError


def test_results_are_stored_without_git(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    results.save_results(tmp_path / "r.json", "python x.py", {}, hardware="here")
    assert json.loads((tmp_path / "r.json").read_text())["commit"] is None


def test_one_table_has_one_dtype(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = SimpleNamespace(name="mine", target="table1", command="python -m paper table1")
    runs = {"base model": [{"upper_heldout": 1.0}], "BDS": [{"dtype": "float32"}] * 2}
    results.store(args, runs, {})
    made = (tmp_path / "results/mine_table1.json").read_bytes()
    with pytest.raises(UserError, match="'BDS' was trained in float32, 'online' in bfloat16"):
        results.store(args, runs | {"online": [{"dtype": "bfloat16"}] * 2}, {})
    assert (tmp_path / "results/mine_table1.json").read_bytes() == made
