"""The command line: python -m theory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import theory
from theory.__main__ import PARTS

ROOT = Path(theory.__file__).parents[1]


def command(*args, cwd=ROOT):
    return subprocess.run([sys.executable, "-m", "theory", *map(str, args)], cwd=cwd,
                          env={**os.environ, "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("args", [["convergance"], ["weights", "--fig"], ["weights", "extra"]])
def test_bad_command_line_is_one_line_and_exit_code_2(args, tmp_path):
    done = command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    done = command("weights", "--out", tmp_path / "taken")
    assert done.returncode == 2
    assert "taken" in done.stderr


@pytest.mark.parametrize("part", ["weights", "equivalence"])
def test_a_part_prints_its_table_and_saves_its_figure(part, tmp_path):
    done = command(part, "--out", tmp_path / "new" / "folder")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    figure = (tmp_path / "new" / "folder" / f"{part}.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and 5_000 < len(figure) < 100_000
    if part == "weights":
        assert result[part]["merit"][0]["|grad u - sum lambda grad L|"] < 1e-10
        spread = result[part]["r / lambda, spread"]
        assert spread["equal old log-probs"] < 1e-10 < 1 < spread["unequal"]
    else:
        assert result[part]["same"]
        front = result[part]["fronts"][1]
        assert front["BDS: L_val"] > front["BMO: L_val"]


def test_every_committed_figure_is_small():
    for name in PARTS:
        figure = ROOT / "results" / "theory" / f"{name}.png"
        assert 5_000 < figure.stat().st_size < 100_000


@pytest.mark.slow
def test_all_parts(tmp_path):
    done = command("all", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert list(result) == list(PARTS)
    assert result["coverage"]["training"][-1]["BDS: 1 - sum_U sigma"] < 1e-5
    assert result["convergence"]["slope"] == pytest.approx(-1.30, abs=0.02)
    assert {path.stem for path in tmp_path.iterdir()} == set(PARTS)
