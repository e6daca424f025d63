"""Stored results."""

import json
import subprocess

from paper import results


def test_results_are_stored_without_git(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    results.save_results(tmp_path / "r.json", "python x.py", {}, hardware="here")
    assert json.loads((tmp_path / "r.json").read_text())["commit"] is None
