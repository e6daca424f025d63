"""Models of published shapes with random weights."""

import importlib.util

import pytest
import torch
from torch import nn

from batches import pack
from benchmarks.shapes import load_shape, shape_config, shaped_model, to_four_bit
from logprobs import sequence_logprobs


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes")
@pytest.mark.parametrize("shape", ["tiny", "tiny-neox"])
def test_to_four_bit_keeps_the_head_and_trains(shape):
    """Layers are NF4, log-probs stay near those of the weights they came from, and the adapter
    gets gradients through bitsandbytes' products."""
    import bitsandbytes

    cpu = torch.device("cpu")
    base = shaped_model(shape_config(shape), cpu, torch.float32)
    model, lower, _ = load_shape(shape, cpu, 3, 20, 20, four_bit=True)
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    expected = [m for m in base.modules() if type(m) is nn.Linear]
    assert len(layers) == len(expected) - 1
    assert all(layer.weight.dtype == torch.uint8 for layer in layers)
    assert type(model.get_base_model().get_output_embeddings()) is nn.Linear
    batch = pack(lower)
    logps, lengths = sequence_logprobs(model, batch)
    near, _ = sequence_logprobs(base, batch)
    assert not torch.equal(logps, near)
    assert ((logps - near) / lengths).abs().max() < 0.1
    (-logps / lengths).mean().backward()
    gradients = [p.grad for n, p in model.named_parameters() if "lora_B" in n]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert to_four_bit(base).is_loaded_in_4bit
