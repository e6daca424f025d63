"""runtime/cache.py, and row tests of runs: forwards once, the same bits, never stale."""

import json

import pytest
import torch
from conftest import make_llama, make_tokenizer
from safetensors.torch import save_file

import logprobs
import ranking
import session
from runtime.cache import cached_columns


@pytest.fixture
def counted(monkeypatch):
    """The labels of all passes over rows."""
    labels, real = [], ranking.row_evidence
    monkeypatch.setattr(ranking, "row_evidence", lambda *given, label=None: (
        labels.append(label), real(*given, label=label))[1])
    return labels


def file_of(run, name="weights/base_losses.safetensors"):
    return (run.out / name).read_bytes()


def test_one_pass_for_many_runs(train, online, files, counted, tmp_path):
    """Other seeds, methods and rates, another --out; with or without the cache the bits agree."""
    paths = files()
    runs = [train(paths, out=tmp_path / "a", batch=4, epochs=1),
            train(paths, out=tmp_path / "b", batch=4, epochs=1, seed=3, lr=1e-3, method="mix"),
            online(paths, out=tmp_path / "c", batch=4, epochs=1)]
    assert (counted.count("row tests"), counted.count("row tests, trusted rows")) == (1, 1)
    assert len(list((tmp_path / "cache" / "evidence").iterdir())) == 2
    runs.append(train(paths, out=tmp_path / "d", batch=4, epochs=1, cache_dir=tmp_path / "other"))
    assert counted.count("row tests") == 2
    for run in (runs[2], runs[3]):  # same seed: the faults made on purpose are drawn by it
        assert file_of(run) == file_of(runs[0])
        assert file_of(run, "tests.json") == file_of(runs[0], "tests.json")
    assert runs[3].result == runs[0].result


def test_another_model_or_other_rows_are_computed(train, files, counted, tmp_path, monkeypatch):
    """Other weights under the same path, another dtype, length, epsilon, row, kernel or torch."""
    folder = tmp_path / "model"
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    paths, number = files(), 0

    def passes(**options):
        nonlocal number
        number += 1
        train(paths, model=str(folder), out=tmp_path / f"run {number}", batch=4, epochs=1,
              **options)
        return counted.count("row tests")

    assert (passes(), passes()) == (1, 1)
    assert (passes(dtype="bfloat16"), passes(max_length=60)) == (2, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    assert passes() == 4
    make_llama(seed=5).save_pretrained(folder)
    assert passes() == 5
    paths = files(longest=9)
    assert (passes(), passes()) == (6, 6)
    with monkeypatch.context() as patch:
        patch.setattr(logprobs, "KERNEL", "reference")
        assert passes() == 7
    real = session.folder.environment
    monkeypatch.setattr(session.folder, "environment",
                        lambda *given: real(*given) | {"torch": "another"})
    assert passes() == 8


def test_with_an_adapter_nothing_is_cached(train, files, adapters, counted, tmp_path):
    """Its alpha is no weight: two adapters may share their fingerprint."""
    for name in "ab":
        train(files(), adapter=adapters["llama"], out=tmp_path / name, batch=4, epochs=1)
    assert counted.count("row tests") == 2 and not (tmp_path / "cache" / "evidence").exists()


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b"not safetensors"), lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-3]), lambda file: file.unlink(),
    lambda file: save_file({"a": torch.zeros(3), "b": torch.zeros(3)}, file),
    lambda file: save_file({"a": torch.zeros(4)}, file)])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    calls = []

    def compute():
        calls.append(1)
        return {"b": torch.arange(4.0) / 3, "a": torch.tensor([1, torch.nan, 2, 3]).double()}

    def again(decides=1):
        found = cached_columns(tmp_path, {"model": decides}, ("b", "a"), 4, compute)
        assert list(found) == ["b", "a"] and found["a"].isnan().tolist() == [0, 1, 0, 0]
        assert torch.equal(found["b"], torch.arange(4.0) / 3) and found["a"].dtype == torch.float64

    again(), again()
    (file,) = (tmp_path / "evidence").iterdir()
    damage(file)
    again(), again()
    assert len(calls) == 2
    again(decides=2)
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(tmp_path, capfd):
    (tmp_path / "evidence").write_text("a file in the way")
    assert cached_columns(tmp_path, {}, ["a"], 4, lambda: {"a": torch.ones(4)})["a"].sum() == 4
    assert "warning: " in capfd.readouterr().out
