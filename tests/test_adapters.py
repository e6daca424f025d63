"""Adapters and base weights that are not the right ones: refused, never trained by mistake.

PEFT warns about tensors that match nothing and goes on with random ones; a resumed run would go on
over other base weights without a word.
"""

import json
import shutil

import pytest
import torch
from conftest import copy_tree, make_adapter, make_llama, make_tokenizer
from safetensors.torch import load_file, save_file

import batches
import models
from data.tokens import load_rows
from logprobs import token_logps
from runtime.folder import fingerprint


@pytest.fixture
def edited(adapters, tmp_path):
    """edited(change): the Llama's adapter with what change makes of its tensors by name."""
    def make(change, name="edited"):
        folder = copy_tree(adapters["llama"], tmp_path / name)
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
        return folder
    return make


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(("change", "words"), [
    (lambda t: {name.replace("layers", "blocks"): value for name, value in t.items()},
     ("lacks", "layers.0.")),
    (lambda t: {name: value for name, value in t.items() if name != FIRST},
     ("lacks", "layers.0.mlp.down_proj.lora_A.default.weight (one of 1 tensors)")),
    (lambda t: t | {FIRST.replace("layers.0", "layers.7"): t[FIRST].clone()},
     ("no place for", "layers.7.mlp.down_proj.lora_A")),
    (lambda t: t | {FIRST: t[FIRST][:, :-1].contiguous()},
     ("another shape", "layers.0.mlp.down_proj.lora_A.default.weight (one of 1 tensors)")),
    (lambda t: {}, ("lacks", "layers.0."))],
    ids=["renamed", "missing", "of other layers", "other shape", "empty"])
def test_an_adapter_that_does_not_match_is_refused(train, files, refused, edited, tmp_path, change,
                                                   words):
    folder = edited(change)
    line = refused(lambda: train(files(), adapter=folder))
    assert "edited: not an adapter of this model" in line and "give the --model" in line
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


def test_an_adapter_that_would_learn_nothing_is_refused(train, files, refused, edited):
    folder = edited(lambda tensors: tensors)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 0}))
    assert "alpha 0" in refused(lambda: train(files(), adapter=folder))


def test_an_adapter_of_a_wider_and_of_a_deeper_model(train, files, refused, tmp_path):
    for name, changes in (("wider", {"hidden_size": 64}), ("deeper", {"num_hidden_layers": 3})):
        make_llama(**changes).save_pretrained(tmp_path / f"{name} base")
        make_adapter(tmp_path / f"{name} base", tmp_path / name)
        line = refused(lambda n=name: train(files(), adapter=tmp_path / n))
        assert f"{name}: not an adapter of this model" in line and "lora_" in line


def test_a_runs_adapter_over_another_base_is_said(train, files, tmp_path):
    """A base and its instruct model have the same shapes; PEFT says nothing either."""
    folder = tmp_path / "model"
    for seed in (0, 5):
        make_llama(seed=seed).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        if seed == 0:
            first = train(files(), str(folder), out="first", epochs=1)
        again = train(files(), str(folder), adapter=first.out / "adapter", out=f"again {seed}",
                      epochs=1)
        assert ("began on other base weights or in another dtype" in again.text) == (seed == 5)


def test_a_matching_adapter_is_loaded_bit_for_bit(folders, adapters):
    model = models.add_lora(models.load_model(str(folders["llama"]), torch.device("cpu")),
                            adapter=str(adapters["llama"]))
    saved = load_file(adapters["llama"] / "adapter_model.safetensors")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if "lora_" in name:
            assert torch.equal(parameter, saved.pop(name.replace(".default.", ".")))
    assert not saved


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_a_trained_adapter_is_plain_pefts(train, files, folders, name):
    """`PeftModel` on the same base: every token's log-prob, float32, and not the base model's."""
    import peft
    from transformers import AutoModelForCausalLM

    paths = files(lower=9, upper=6)
    run = train(paths, model=folders[name], batch=4, epochs=2, lr=1e-2)
    rows = batches.take(load_rows(str(paths["lower"]), models.load_tokenizer(folders[name]),
                                  cache_dir=run.out)[0], range(9))
    ours = models.add_lora(models.load_model(str(folders[name]), torch.device("cpu"), "float32"),
                           adapter=str(run.out / "adapter"))
    found, _ = token_logps(ours, batches.pack(rows))
    base = AutoModelForCausalLM.from_pretrained(folders[name])
    plain = plain_logps(base, rows)
    theirs = plain_logps(peft.PeftModel.from_pretrained(base, run.out / "adapter"), rows)
    assert torch.allclose(found, theirs, atol=1e-4, rtol=0)
    assert (theirs - plain).abs().max() > 0.1


@torch.no_grad()
def plain_logps(model, rows):
    """log p of every trained token, each row by itself, by transformers alone."""
    found = []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        logps = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(logps[torch.tensor(row["trained"][1:]) == 1])
    return torch.cat(found)


# --- other weights at a resume --------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16,
                                   torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (4, 16)])
def test_every_bit_counts_in_a_fingerprint(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, shape, generator=generator).to(dtype)
    whole = fingerprint({"a": tensor})
    assert whole == fingerprint({"a": tensor.clone()}) and len(whole) == 16
    data = tensor.reshape(-1).view(torch.uint8)
    for bit in range(8 * len(data) if dtype != torch.bool else 0):
        data[bit // 8] ^= 1 << bit % 8
        assert fingerprint({"a": tensor}) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert fingerprint({"a": tensor}) == whole
    assert fingerprint({"b": tensor}) != whole
    assert fingerprint({"a": tensor.reshape(1, *shape)}) != whole
    assert fingerprint({"a": tensor, "b": tensor}) != whole


def test_views_of_larger_tensors_have_the_fingerprint_of_their_copies():
    whole = torch.arange(101, dtype=torch.bfloat16)
    for part in (whole[3:], whole[::2], whole[1:].view(4, 25).T):
        assert fingerprint({"a": part}) == fingerprint({"a": part.clone()})


@pytest.fixture
def begun(train, files, tmp_path, folders, refused):
    """A finished run on a copy of the model, with a starting adapter; resume() is its line."""
    copy_tree(folders["llama"], tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter")
    paths = files()
    options = {"batch": 6, "epochs": 1, "skip_scores": True, "method": "mix",
               "adapter": tmp_path / "adapter"}
    run = train(paths, model=tmp_path / "base", **options)

    def again():
        return train(paths, model=tmp_path / "base", **options, resume=True)
    return run, again, lambda: refused(again)


def flip(file, name):
    """One bit of one weight."""
    tensors = load_file(file)
    tensors[name].view(torch.int32).view(-1)[5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})


def test_other_weights_in_the_same_place_are_refused(begun, tmp_path):
    run, again, line = begun
    weights, adapter = (tmp_path / "base" / "model.safetensors",
                        tmp_path / "adapter" / "adapter_model.safetensors")
    for file, name, key in ((weights, "model.layers.1.mlp.up_proj.weight", "base_weights"),
                            (adapter, FIRST, "adapter_weights")):
        whole = file.read_bytes()
        flip(file, name)
        assert f"run: cannot resume: model {key} was '" in line()
        file.write_bytes(whole)
    assert again().result == run.result


def test_a_run_that_does_not_say_which_weights_it_had_is_not_resumed(begun, refused):
    run, again, _ = begun
    config = json.loads((run.out / "config.json").read_text())
    assert set(config["model"]) == {"base_weights", "adapter_weights"}
    del config["model"]
    (run.out / "config.json").write_text(json.dumps(config))
    assert "cannot resume: model base_weights was None and is now '" in refused(again)


def test_a_fingerprint_is_the_same_for_the_same_weights(folders, tmp_path):
    """Loaded twice, loaded for sharding, saved again in several files."""
    def of(folder, **options):
        base = models.load_model(str(folder), torch.device("cpu"), **options)
        return fingerprint(dict(base.named_buffers()) | base.state_dict())

    make_llama().save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    shutil.copytree(folders["llama"], tmp_path / "copy")
    make_tokenizer().save_pretrained(tmp_path / "parts")
    whole = of(folders["llama"])
    assert whole == of(tmp_path / "parts") == of(tmp_path / "copy") == of(folders["llama"],
                                                                         on_host=True)
    assert len({whole, of(folders["llama"], dtype="bfloat16"), of(folders["neox"])}) == 3


def test_a_four_bit_base_has_one_too(folders, tmp_path):
    """Its scales as well: a matrix doubled has the same codes."""
    pytest.importorskip("bitsandbytes")

    def of(folder):
        base = models.load_model(str(folder), torch.device("cpu"), four_bit=True)
        return fingerprint(dict(base.named_buffers()) | base.state_dict())

    copy_tree(folders["llama"], tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    assert of(folders["llama"]) == of(folders["llama"]) != of(tmp_path / "other")
