"""The floor: which products are counted, and that a model is held against them."""

import json

import pytest
import torch

import batches
from benchmarks import floor, shapes
from benchmarks.__main__ import main


@pytest.mark.parametrize("name", ["tiny", "tiny-neox"])
def test_the_products_are_those_of_every_linear_layer_and_of_the_targets(name, monkeypatch):
    """FLOPs of all calls of a matrix product: 2 a weight and token, the head's by targets."""
    model, lower, upper = shapes.load_shape(name, torch.device("cpu"), 2, 30, 30)
    batch = batches.pack(lower + upper)
    tokens, targets = batch["input_ids"].numel(), int(batch["response_mask"].sum())
    layers = {"tiny": 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128),
              "tiny-neox": 2 * (64 * 64 * 4 + 2 * 64 * 128)}[name]
    counted = []
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: counted.append(
        2 * a.shape[0] * b.shape[0] * b.shape[1]) or real(a, b))
    products = floor.product_variants(model, batch)
    products["forward"](0)
    assert sum(counted) == 2 * (layers * tokens + 640 * 64 * targets)
    products["step"](0)
    assert sum(counted) == 3 * 2 * (layers * tokens + 640 * 64 * targets)


def test_the_command(tmp_path, capsys):
    main(["floor", "--model", "tiny", "--dtype", "bfloat16", "--batch", "3", "--rounds", "2",
          "--lower-tokens", "30", "--upper-tokens", "30", "--device", "cpu", "--json",
          str(tmp_path / "f.json")])
    assert "dtype bfloat16" in capsys.readouterr().out
    stored = json.loads((tmp_path / "f.json").read_text())
    assert stored["settings"]["rows of each level"] == 3
    for name in ("forward", "step"):
        entry = stored["results"][name]
        assert entry["ratio"]["median"] > 0 and entry["processor_ratio"]["median"] > 0
        tokens = stored["settings"]["tokens"]
        assert entry["tokens_per_second"]["min"] == pytest.approx(tokens / entry["seconds"]["max"])
