"""bf16 against float32: the figures of known errors, and the command."""

import json

import pytest
import torch
from conftest import make_rows, write_rows

from benchmarks.__main__ import main
from benchmarks.accuracy import errors


def test_errors_are_absolute_by_token_and_of_means_by_row():
    exact = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0])]
    rounded = [torch.tensor([-1.1, -1.9, -3.3]), torch.tensor([-3.8])]
    found = errors(exact, rounded)
    assert found["tokens"] == 4
    assert found["token mean"] == pytest.approx(0.7 / 4) and found["token largest"] == \
        pytest.approx(0.3)
    assert found["row mean"] == pytest.approx(0.15) and found["row largest"] == pytest.approx(0.2)
    assert found["mean of all rows"] == pytest.approx((0.1 - 0.2) / 2)


def test_the_command(tmp_path, folders, refused):
    write_rows(tmp_path / "rows.jsonl", make_rows(8, seed=1))
    words = ["accuracy", "--model", str(folders["llama"]), "--device", "cpu", "--rows", "6",
             "--cache-dir", str(tmp_path / "cache"), "--json", str(tmp_path / "a.json")]
    main([*words, "--lower", str(tmp_path / "rows.jsonl")])
    stored = json.loads((tmp_path / "a.json").read_text())
    assert stored["settings"]["rows"] == 6
    assert 0 < stored["results"]["token mean"] <= stored["results"]["token largest"] < 1
    assert "--model and --lower are needed" in refused(lambda: main(words))
