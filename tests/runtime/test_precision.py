"""runtime/precision.py: --dtype auto by device, processor and size; config.json has the choice."""

import json
from types import SimpleNamespace

import pytest
import torch

import models
from evaluation.losses import load_trained
from runtime.precision import pick_dtype

CPU, CUDA, MPS = (torch.device(name) for name in ("cpu", "cuda", "mps"))


def sized(hidden):
    config = SimpleNamespace(hidden_size=hidden)
    config.get_text_config = lambda: config
    return config


@pytest.fixture
def processor(monkeypatch):
    """processor(*features): a CPU with these and no other."""
    def have(*features):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {
            name: name in features for name in ("avx512_bf16", "amx_bf16", "avx512_f", "avx2")})
    return have


def test_the_table(processor):
    """bf16 on CUDA always; on a CPU only with bf16 products, for large models, not for NF4."""
    for features, expected in ((("avx2",), torch.float32), (("avx2", "avx512_f"), torch.float32),
                               (("avx512_bf16",), torch.bfloat16), (("amx_bf16",), torch.bfloat16)):
        processor(*features)
        assert pick_dtype("auto", CPU, sized(512)) == expected
        assert pick_dtype("auto", CPU, sized(511)) == torch.float32
        assert pick_dtype("auto", CPU, sized(4096), four_bit=True) == torch.float32
        assert pick_dtype("auto", CUDA, sized(64)) == torch.bfloat16
        assert pick_dtype("auto", MPS, sized(4096)) == torch.float32
        for name in ("float32", "bfloat16", "float64"):
            assert pick_dtype(name, CPU, None) == getattr(torch, name)


def test_a_torch_that_cannot_tell(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert pick_dtype("auto", CPU, sized(4096)) == torch.float32


def test_the_choice_is_stored_and_taken_again(train, files, monkeypatch):
    """A run's bf16 stays bf16 where it is evaluated; a named dtype is the named one."""
    monkeypatch.setattr(models, "pick_dtype", lambda *_: torch.bfloat16)
    run = train(files(), batch=4, epochs=1)
    config = json.loads((run.out / "config.json").read_text())
    assert config["args"]["dtype"] == "auto" and config["environment"]["dtype"] == "bfloat16"
    assert run.result["dtype"] == "bfloat16"
    monkeypatch.undo()
    assert load_trained(run.out, "cpu")[0].dtype == torch.bfloat16
    run = train(files(), batch=4, epochs=1, out=run.out.with_name("other"))
    assert load_trained(run.out, "cpu")[0].dtype == torch.float32
