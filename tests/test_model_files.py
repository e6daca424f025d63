"""Model folders and names that are none, and values that no run can have: one line, exit code 2."""

import json
import os
import re

import pytest
from conftest import copy_tree, flags, listing

import train_offline
import train_online


@pytest.fixture
def bad(tmp_path, files, folders, refused):
    """bad(script=..., **flags) -> the line; nothing is left in the run folder."""
    paths = files()

    def check(main=train_offline.main, **options):
        options = {"lower": paths["lower"], "upper": paths["upper"], "batch": 4, "epochs": 1,
                   "upper_heldout": paths["heldout"], "model": folders["llama"],
                   "out": tmp_path / "run", "cache_dir": tmp_path / "cache"} | options
        line = refused(lambda: main(flags(**options)))
        assert 20 < len(line) < 700 + 2 * max(len(str(value)) for value in options.values())
        assert not (tmp_path / "run").exists()
        return line
    return check


CONFIGS = ["[1, 2]", "null", "3", '"llama"', "{}", '{"model_type": 3}', '{"model_type": null}'] + [
    {name: value} for name, value in (
        ("hidden_size", 0), ("hidden_size", 10**12), ("hidden_size", -32), ("hidden_size", 10**30),
        ("hidden_size", "large"), ("hidden_size", None), ("num_attention_heads", 0),
        ("num_attention_heads", 7), ("num_key_value_heads", 0), ("num_hidden_layers", 0),
        ("num_hidden_layers", -1), ("vocab_size", 0), ("vocab_size", 10**12), ("vocab_size", -1),
        ("vocab_size", "many"), ("intermediate_size", 0), ("intermediate_size", 10**12),
        ("max_position_embeddings", -1), ("max_position_embeddings", "long"),
        ("hidden_act", "none"), ("rope_parameters", 3), ("rope_parameters", []),
        ("dtype", "float99"))]


@pytest.mark.parametrize("change", CONFIGS, ids=str)
def test_a_config_that_is_none(bad, folders, tmp_path, change):
    folder = copy_tree(folders["llama"], tmp_path / "model")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    file.write_text(change if isinstance(change, str) else json.dumps(content | change))
    line = bad(model=folder)
    assert "model: the " in line or "context" in line, line


def test_tensors_without_a_place_are_counted(train, files, folders, tmp_path):
    """A config.json of fewer layers: transformers leaves the others out and says nothing."""
    folder = copy_tree(folders["llama"], tmp_path / "shallow")
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    text = train(files(), model=str(folder), epochs=1).text
    assert re.search(r"warning: \S+shallow: \d+ tensors .* no place .*"
                     rf"\(model\.layers\.{layers}\.\S+, \.\.\.\)", text)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[1]", "null", "3", '"text"', "{", "", "{}", '{"a": [1]}'])
def test_a_tokenizer_file_that_is_none(bad, folders, tmp_path, name, content):
    folder = copy_tree(folders["llama"], tmp_path / "model")
    (folder / name).write_text(content)
    try:
        line = bad(model=folder)
    except BaseException as error:  # {} is a valid tokenizer_config.json
        assert name == "tokenizer_config.json" and content[:1] == "{" and content != "{", error
        return
    assert "tokenizer" in line, line


@pytest.mark.parametrize("content", ["[1]", "null", "3", "{"])
def test_other_files_of_a_model(bad, folders, tmp_path, content):
    """generation_config.json is not ours to read; a broken one may stop the loading, in a line."""
    folder = copy_tree(folders["llama"], tmp_path / "model")
    (folder / "generation_config.json").write_text(content)
    try:
        assert "model: the model cannot be loaded" in bad(model=folder)
    except BaseException as error:
        assert "DID NOT RAISE" in str(error), error


@pytest.mark.parametrize(("options", "message"), [
    ({"lr": "1e300"}, r"--lr 1e\+300: must be a finite number, 0 or more and at most 1e30"),
    ({"omega_lr": "1e300"}, r"--omega-lr 1e\+300: must be"),
    ({"lora_rank": 10**9}, "--lora-rank 1000000000: the model's hidden size is 32"),
    ({"lora_rank": 33}, "--lora-rank 33: the model's hidden size is 32; a larger rank adds"),
    ({"lora_rank": 10**400}, "--lora-rank 10+: must be 1 or more and below"),
    ({"lora_alpha": 10**400}, "--lora-alpha 10+: must be 1 or more and below"),
    ({"batch": 10**30}, "--batch 10+: must be 1 or more and below"),
    ({"micro_batch": 10**30}, "--micro-batch 10+: must be 1 or more and below"),
    ({"epochs": 10**30}, "--epochs 10+: must be 1 or more and below"),
    ({"save_every": 10**30}, "--save-every 10+: must be 1 or more and below"),
    ({"max_length": 10**30}, "--max-length 10+: must be 1 or more and below"),
], ids=lambda value: str(value)[:30] if isinstance(value, dict) else "")
def test_values_beyond_any_run(bad, options, message):
    assert re.search(message, bad(**options))


def test_a_rank_that_is_no_number(capsys, tmp_path):
    from runtime import command

    with pytest.raises(SystemExit) as stop:
        command.run(lambda: train_offline.main(flags(lora_rank="1e30", out=tmp_path / "run")))
    assert stop.value.code == 2 and "--lora-rank: invalid int value" in capsys.readouterr().err


@pytest.mark.parametrize("main", [train_offline.main, train_online.main])
@pytest.mark.parametrize("flag", ["model", "adapter", "lower", "upper", "out", "cache_dir"])
def test_names_that_are_too_long(bad, main, flag):
    """Longer than any file's name may be; some of them would be asked of the hub."""
    for name in ("x" * 300, "x" * 5000, "/tmp/" + "x" * 300, "owner/" + "x" * 300):
        more = {"max_new_tokens": 6} if main is train_online.main else {}
        assert "xxx" in bad(main, **more | {flag: name}), flag


def test_a_relative_model_is_known_from_elsewhere(train, files, folders, tmp_path, monkeypatch):
    """It is kept as an absolute path: a run goes on from anywhere, and no hub is asked."""
    import models

    (tmp_path / "a" / "models").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    copy_tree(folders["llama"], tmp_path / "a" / "models" / "tiny")
    paths = files()
    monkeypatch.setattr(models, "hub_answers", lambda *_: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path / "a")
    options = {"batch": 6, "epochs": 1, "skip_scores": True}
    first = train(paths, model="models/tiny", **options)
    config = json.loads((first.out / "config.json").read_text())
    assert config["args"]["model"] == str(tmp_path / "a" / "models" / "tiny")
    monkeypatch.chdir(tmp_path / "b")
    again = train(paths, model=os.path.relpath(tmp_path / "a" / "models" / "tiny"), **options,
                  resume=True)
    assert again.result == first.result


def test_a_relative_model_that_is_not_here_is_not_asked_of_the_hub(bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./models/tiny", "../models/tiny", "models/tiny/llama", "~/models/tiny"):
        assert f"{name}: no such folder for the model" in bad(model=name)
    assert not [name for name in listing(tmp_path) if name.startswith("run")]
