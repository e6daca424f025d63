"""runtime/cache.py and the base losses of runs: computed once, the same bits, never stale."""

import json

import pytest
import torch
from conftest import make_llama, make_tokenizer
from safetensors.torch import load_file, save_file

import session
from runtime.cache import cached_losses


@pytest.fixture
def counted(monkeypatch):
    """The labels of all passes over rows."""
    labels, real = [], session.row_losses
    monkeypatch.setattr(session, "row_losses", lambda *given, label=None: (
        labels.append(label), real(*given, label=label))[1])
    return labels


def losses_of(run):
    return load_file(run.out / "weights" / "base_losses.safetensors")["losses"]


def test_one_pass_for_many_runs(train, online, files, counted, tmp_path):
    """Other seeds, methods and rates, another --out; with or without the cache the bits agree."""
    paths = files()
    runs = [train(paths, out=tmp_path / "a", batch=4, epochs=1),
            train(paths, out=tmp_path / "b", batch=4, epochs=1, seed=3, lr=1e-3, method="mix"),
            online(paths, out=tmp_path / "c", batch=4, epochs=1)]
    assert counted.count("base losses") == 1
    assert len(list((tmp_path / "cache" / "losses").iterdir())) == 1
    runs.append(train(paths, out=tmp_path / "d", batch=4, epochs=1, cache_dir=tmp_path / "other"))
    assert counted.count("base losses") == 2
    assert all(torch.equal(losses_of(run), losses_of(runs[0])) for run in runs)
    assert runs[3].result == runs[0].result


def test_another_model_or_other_rows_are_computed(train, files, counted, tmp_path):
    """Other weights under the same path, another dtype, length, epsilon or row: no old losses."""
    folder = tmp_path / "model"
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    paths, number = files(), 0

    def passes(**options):
        nonlocal number
        number += 1
        train(paths, model=str(folder), out=tmp_path / f"run {number}", batch=4, epochs=1,
              **options)
        return counted.count("base losses")

    assert (passes(), passes()) == (1, 1)
    assert (passes(dtype="bfloat16"), passes(max_length=60)) == (2, 3)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    assert passes() == 4
    make_llama(seed=5).save_pretrained(folder)
    assert passes() == 5
    paths = files(longest=9)
    assert (passes(), passes()) == (6, 6)


def test_with_an_adapter_nothing_is_cached(train, files, adapters, counted, tmp_path):
    """Its alpha is no weight: two adapters may share their fingerprint."""
    for name in "ab":
        train(files(), adapter=adapters["llama"], out=tmp_path / name, batch=4, epochs=1)
    assert counted.count("base losses") == 2 and not (tmp_path / "cache" / "losses").exists()


@pytest.mark.parametrize("damage", [
    lambda file: file.write_bytes(b"not safetensors"), lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(file.read_bytes()[:-3]), lambda file: file.unlink(),
    lambda file: save_file({"losses": torch.zeros(3)}, file),
    lambda file: save_file({"other": torch.zeros(4)}, file)])
def test_a_damaged_file_is_made_again(tmp_path, damage):
    calls = []

    def compute():
        calls.append(1)
        return torch.arange(4.0) / 3

    for _ in range(2):
        assert torch.equal(cached_losses(tmp_path, {"a": 1}, 4, compute), torch.arange(4.0) / 3)
    (file,) = (tmp_path / "losses").iterdir()
    damage(file)
    for _ in range(2):
        assert torch.equal(cached_losses(tmp_path, {"a": 1}, 4, compute), torch.arange(4.0) / 3)
    assert len(calls) == 2
    cached_losses(tmp_path, {"a": 2}, 4, compute)
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_costs_the_cache_alone(tmp_path, capfd):
    (tmp_path / "losses").write_text("a file in the way")
    assert cached_losses(tmp_path, {}, 4, lambda: torch.ones(4)).sum() == 4
    assert "warning: " in capfd.readouterr().out
