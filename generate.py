"""Answers from the current model: batched sampling, every draw seeded (Algorithm 1, line 6).

Token t of a sequence is the inverse of the cumulative distribution softmax(logits / temperature)
at a uniform number u_t of that sequence alone. So an answer depends on its seed, not on
which other prompts share its batch or on how far a global generator has moved; no top-k, no top-p,
and nothing of the model's own `generation_config` (its default is top-k 50) leaks in. The loop, the
cache and the stopping are transformers' `generate`.
"""

import contextlib

import torch
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from utils import content_hash


class _SeededSampler(LogitsProcessor):
    """Sampling as greedy decoding of the sampled token. uniforms: (B, max_new_tokens) in [0, 1)."""

    def __init__(self, uniforms, prompt_length, temperature):
        self.uniforms, self.start, self.temperature = uniforms, prompt_length, temperature

    def __call__(self, input_ids, scores):
        u = self.uniforms[:, input_ids.shape[1] - self.start, None]
        cumulative = torch.softmax(scores.float() / self.temperature, dim=-1).cumsum(dim=-1)
        # Scaled by the total, which rounding leaves a little off one; a token of probability zero
        # is never the first whose cumulative sum exceeds u.
        token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
        token = token.clamp_max(scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


@torch.no_grad()
def generate(model, prompts, seeds, *, max_new_tokens, temperature, end_ids, batch_size=64,
             label=None):
    """One answer for each prompt.

    prompts: lists of token ids. seeds: one string each; equal seed, prompt and model give the same
    answer. temperature 0 is greedy. end_ids: tokens that end an answer. label: a progress bar's.
    Returns [(tokens, complete)]: the end token is part of a complete answer; an answer cut at
    `max_new_tokens` has none. A bare end token is an empty answer, and legal.
    """
    end_ids = sorted(end_ids)
    # Similar lengths share a batch, so little is padded; longest first shows memory trouble early.
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    answers = [None] * len(prompts)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, use_cache=True,
        eos_token_id=end_ids, pad_token_id=end_ids[0])
    bar = tqdm(total=len(prompts), desc=label, disable=label is None or None, unit="answer",
               delay=2, leave=False)
    with _own_generation_config(model, config), folded(model):
        for start in range(0, len(order), batch_size):
            part = order[start:start + batch_size]
            width = max(len(prompts[i]) for i in part)
            ids = torch.full((len(part), width), end_ids[0])
            mask = torch.zeros(len(part), width, dtype=torch.long)
            for row, i in enumerate(part):  # padded on the left: answers start side by side
                ids[row, width - len(prompts[i]):] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]):] = 1
            processors = LogitsProcessorList()
            if temperature > 0:
                uniforms = torch.stack([torch.rand(max_new_tokens, generator=_generator(seeds[i]))
                                        for i in part]).to(model.device)
                processors.append(_SeededSampler(uniforms, width, temperature))
            output = model.generate(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                generation_config=config, logits_processor=processors)[:, width:].tolist()
            for i, tokens in zip(part, output, strict=True):
                end = next((t + 1 for t, token in enumerate(tokens) if token in end_ids), None)
                answers[i] = (tokens[:end], end is not None)
            bar.update(len(part))
    bar.close()
    return answers


def _generator(seed):
    return torch.Generator().manual_seed(int(content_hash(seed), 16) >> 1)


@contextlib.contextmanager
def _own_generation_config(model, config):
    """The model's generation_config out of the way: transformers fills unset values from it."""
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    before, causal_lm.generation_config = causal_lm.generation_config, config
    training = model.training
    model.eval()
    try:
        yield
    finally:
        causal_lm.generation_config = before
        model.train(training)


@contextlib.contextmanager
def folded(model):
    """The active LoRA adapter added into the base weights for a while, then taken out exactly.

    Unmerged LoRA triples the number of small matrix products of a decoding step. The weights are
    put back from a copy, not by subtraction: rounding would drift, and a resumed run would differ.
    Quantised layers are left as they are, and so are those that FSDP has split over processes.
    """
    copies = []
    for layer in model.modules():
        weight = getattr(getattr(layer, "base_layer", None), "weight", None)
        if hasattr(layer, "lora_A") and weight is not None and weight.is_floating_point() \
                and not isinstance(weight, DTensor) and not layer.disable_adapters:
            copies.append((layer, weight, weight.detach().clone()))
            for name in layer.active_adapters:
                weight.data += layer.get_delta_weight(name).to(weight.dtype)
            layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, weight, copy in copies:
            weight.data.copy_(copy)
            layer._disable_adapters = False
