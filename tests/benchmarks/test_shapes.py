"""Models of published shapes with random weights."""

import importlib.util

import pytest
from torch import nn

from batches import pack
from benchmarks.shapes import load_shape, shape_config, shaped_model
from logprobs import sequence_logprobs


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="no bitsandbytes"
)
def test_four_bit_keeps_the_head_and_trains():
    """Layers are NF4, log-probs stay near those of the weights they came from, and the adapter
    gets gradients through bitsandbytes' products."""
    import bitsandbytes

    model, lower, _ = load_shape("tiny", 3, four_bit=True)
    base = shaped_model(shape_config("tiny"), model.device)
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    expected = [m for m in base.modules() if type(m) is nn.Linear]
    assert len(layers) == len(expected) - 1
    batch = pack(lower, model.device)
    logps, lengths = sequence_logprobs(model, batch)
    near, _ = sequence_logprobs(base, batch)
    difference = (logps - near) / lengths
    assert 0 < difference.abs().max() < 0.1
    logps.mean().backward()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert parameter.grad.abs().sum() > 0
