"""logprobs.py: the two-product log-prob and the packed forward against the obvious computations.

Brute force here: autograd through log_softmax, and each row alone through the model's own logits
with transformers' own attention (sdpa: eager rounds to float32 on the way). Neither touches the
packed path.
"""

import contextlib
import copy
import json
import math
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_llama, make_neox, python
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

import logprobs
import models
from batches import pack
from logprobs import check_model, sequence_logprobs, token_logprobs, token_logprobs_reference


def problem(T, V, d=24, seed=0, scale=1.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(T, d, generator=generator, dtype=torch.float64)).to(dtype)
    head = torch.randn(V, d, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, head, torch.randint(0, V, (T,), generator=generator)


def brute_force(hidden, head, targets, upstream):
    """Values and gradient by autograd through log_softmax, in float64 whatever comes in."""
    hidden = hidden.detach().double().requires_grad_()
    logps = torch.log_softmax(hidden @ head.detach().double().T, dim=-1)
    logps = logps[torch.arange(len(targets)), targets]
    (gradient,) = torch.autograd.grad(logps, hidden, upstream.double())
    return logps.detach(), gradient


def fast(hidden, head, targets, upstream):
    hidden = hidden.detach().clone().requires_grad_()
    logps = token_logprobs(hidden, head, targets)
    logps.backward(upstream.to(logps.dtype))
    return logps.detach(), hidden.grad


# --- token_logprobs -------------------------------------------------------------------------------

@pytest.mark.parametrize(("T", "V"), [(1, 2), (1, 290), (5, 37), (16, 101), (17, 101), (53, 1009),
                                      (64, 290)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_eq_token_logprobs_and_gradient(monkeypatch, T, V, scale):
    """Eq. SFT_def: log p = W[y] h - log sum exp(W h), and g = W[y] - softmax(W h) W.

    Chunks of 16 rows, so lengths of 17 and 53 end in a ragged one; scale 30 gives logits of +-500.
    """
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 16 * V)
    hidden, head, targets = problem(T, V, scale=scale)
    upstream = torch.randn(T, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    upstream[T // 2] = 0.0  # a masked token
    values, gradient = fast(hidden, head, targets, upstream)
    expected, expected_gradient = brute_force(hidden, head, targets, upstream)
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(token_logprobs_reference(hidden, head, targets), expected,
                               rtol=1e-12, atol=1e-12)


def test_eq_gradient_by_finite_differences():
    """g against central differences of the value: no autograd on either side."""
    hidden, head, targets = problem(3, 41)
    _, gradient = fast(hidden, head, targets, torch.ones(3))
    for t, k in ((0, 0), (1, 7), (2, 23)):
        step = torch.zeros_like(hidden)
        step[t, k] = 1e-5
        with torch.no_grad():
            slope = (token_logprobs(hidden + step, head, targets)
                     - token_logprobs(hidden - step, head, targets)).sum() / 2e-5
        assert slope.item() == pytest.approx(gradient[t, k].item(), abs=1e-8)


def test_no_tokens():
    hidden, head, targets = problem(0, 37)
    values, gradient = fast(hidden, head, targets, torch.zeros(0))
    assert values.shape == (0,) and gradient.shape == (0, 24)


def test_probability_near_one_and_near_zero():
    """Where one-hot minus softmax cancels, and where exp underflows: still exact."""
    head = torch.eye(4, dtype=torch.float64)
    hidden = torch.tensor([[40.0, 0, 0, 0], [0, 2000.0, 0, 0]], dtype=torch.float64)
    values, gradient = fast(hidden, head, torch.tensor([0, 2]), torch.ones(2))
    assert values[0].item() == pytest.approx(-3 * math.exp(-40), rel=1e-6, abs=1e-16)
    assert values[1].item() == -2000.0
    assert gradient[1].tolist() == [0.0, -1.0, 1.0, 0.0]
    # In float32 1 - p would have lost all but two digits of the target's entry.
    _, gradient = fast(torch.tensor([[12.0, 0, 0, 0]]), head.float(), torch.tensor([0]),
                       torch.ones(1))
    rest = 3 / (math.exp(12) + 3)
    assert gradient[0].tolist() == pytest.approx([rest, -rest / 3, -rest / 3, -rest / 3], rel=1e-5)


@pytest.mark.parametrize(("dtype", "value_error", "gradient_error"), [
    (torch.float32, 2e-5, 2e-5), (torch.bfloat16, 2e-5, 2e-2), (torch.float16, 2e-5, 3e-3)])
def test_low_precision(dtype, value_error, gradient_error):
    """Log-probs are float32 and good to float32 even when hidden states and head are not.

    The brute force gets the same rounded inputs. g is kept in the dtype of `hidden`, so its error
    is that of one rounding (2^-8 relative for bfloat16) and a few in the product.
    """
    hidden, head, targets = problem(40, 503, dtype=dtype)
    upstream = torch.ones(40)
    values, gradient = fast(hidden, head, targets, upstream)
    expected, expected_gradient = brute_force(hidden, head, targets, upstream)
    assert values.dtype == torch.float32 and gradient.dtype == dtype
    assert (values - expected).abs().max() < value_error
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert error < gradient_error


@pytest.mark.parametrize(("hidden_dtype", "head_dtype", "most"), [
    (torch.float64, torch.float32, 1e-12), (torch.float64, torch.bfloat16, 1e-12),
    (torch.float32, torch.bfloat16, 1e-5)])
def test_the_gradient_has_the_precision_of_the_hidden_states(hidden_dtype, head_dtype, most):
    hidden, head, targets = problem(40, 503)
    hidden, head, upstream = hidden.to(hidden_dtype), head.to(head_dtype), torch.ones(40)
    values, gradient = fast(hidden, head, targets, upstream)
    expected, expected_gradient = brute_force(hidden, head, targets, upstream)
    assert values.dtype == gradient.dtype == hidden_dtype
    assert (values - expected).abs().max() < 3 * most
    assert (gradient - expected_gradient).norm() < most * expected_gradient.norm()


def test_bf16_products_on_a_cpu_are_exact_and_switched_on_for_a_while(monkeypatch):
    """As exact as float32's at sizes where oneDNN takes over; the setting is back, also after an
    error; float32 and fp16 never see it."""
    settings, seen = torch.backends.mkldnn.matmul, []
    before = settings.fp32_precision
    monkeypatch.setattr(logprobs, "_logits", lambda *given, logits=logprobs._logits: (
        seen.append(settings.fp32_precision), logits(*given))[1])
    for dtype, expected in ((torch.bfloat16, "bf16"), (torch.float32, before),
                            (torch.float16, before)):
        hidden, head, targets = problem(300, 5000, d=256, scale=0.1, dtype=dtype)
        values = token_logprobs(hidden, head, targets)
        exact = token_logprobs_reference(hidden.double(), head.double(), targets)
        assert (values - exact).abs().max() < 5e-5
        assert set(seen) == {expected} and settings.fp32_precision == before
        seen.clear()
    hidden, head, targets = problem(40, 503, dtype=torch.bfloat16)
    monkeypatch.setattr(logprobs, "_logits", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        token_logprobs(hidden, head, targets)
    assert settings.fp32_precision == before


def test_two_products_with_a_gradient_one_without():
    """Forward 2 T d V each product; backward none; no_grad or a frozen input: the first only."""
    hidden, head, targets = problem(40, 503, dtype=torch.float32)
    one = 2 * 40 * 24 * 503

    def flops(call):
        with FlopCounterMode(display=False) as counter:
            result = call()
        return counter.get_total_flops(), result

    wanted = hidden.clone().requires_grad_()
    count, logps = flops(lambda: token_logprobs(wanted, head, targets))
    assert count == 2 * one and logps.requires_grad
    count, _ = flops(lambda: logps.sum().backward())
    assert count == 0
    with torch.no_grad():
        count, logps = flops(lambda: token_logprobs(wanted, head, targets))
    assert count == one and not logps.requires_grad and logps.grad_fn is None
    count, logps = flops(lambda: token_logprobs(hidden, head, targets))
    assert count == one and not logps.requires_grad


def test_nothing_of_vocabulary_size_is_kept():
    """What backward holds is one (T, d) tensor."""
    hidden, head, targets = problem(40, 503, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t,
                                                  lambda t: t):
        token_logprobs(hidden.requires_grad_(), head, targets)
    assert kept == [(40, 24)]


def test_eq_trained_head_gets_its_gradient():
    """A head that wants a gradient gets one from the reference, by the argument or the module's
    switch: d log p / d W by finite differences of the definition. Elsewhere it is refused."""
    hidden, head, targets = problem(7, 19)
    head.requires_grad_()
    hidden.requires_grad_()
    for kernel in (None, "auto", "torch"):
        with pytest.raises(ValueError, match=r"head wants a gradient, .* kernel='reference'"):
            token_logprobs(hidden, head, targets, kernel=kernel)
        with torch.no_grad():  # nobody wants one
            token_logprobs(hidden, head, targets, kernel=kernel)
    token_logprobs(hidden, head, targets, kernel="reference").sum().backward()
    for v, k in ((0, 0), (18, 23), (int(targets[0]), 4)):
        step = torch.zeros_like(head)
        step[v, k] = 1e-5

        def total(weights):
            logits = hidden.detach() @ weights.detach().T
            return sum(logits[t, y] - math.log(sum(math.exp(z) for z in logits[t]))
                       for t, y in enumerate(targets.tolist()))

        slope = (total(head + step) - total(head - step)) / 2e-5
        assert slope.item() == pytest.approx(head.grad[v, k].item(), abs=1e-7)
    assert hidden.grad is not None


def test_the_switch_forces_a_path(monkeypatch):
    """Argument, module constant; a name that is none, and Triton without a GPU, are errors."""
    hidden, head, targets = problem(5, 31, dtype=torch.float32)
    called = []
    whole = logprobs.token_logprobs_reference
    monkeypatch.setattr(logprobs, "token_logprobs_reference",
                        lambda *args: called.append(1) or whole(*args))
    token_logprobs(hidden, head, targets, kernel="reference")
    assert len(called) == 1
    token_logprobs(hidden, head, targets, kernel="torch")
    monkeypatch.setattr(logprobs, "KERNEL", "reference")
    token_logprobs(hidden, head, targets)
    assert len(called) == 2
    with pytest.raises(ValueError, match="one of auto, torch, triton, reference"):
        token_logprobs(hidden, head, targets, kernel="cuda")
    with pytest.raises(ValueError, match=r"not for torch.float32 on cpu"):
        token_logprobs(hidden, head, targets, kernel="triton")


def test_a_surrounding_autocast_does_not_round_the_logits():
    hidden, head, targets = problem(40, 503, dtype=torch.float32)
    for kernel in ("torch", "reference"):
        found = []
        for enabled in (False, True):
            wanted = hidden.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                logps = token_logprobs(wanted, head, targets, kernel=kernel)
            logps.sum().backward()
            found.append((logps.detach(), wanted.grad))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_weights_may_be_decided_after_the_forward():
    """Importance ratios: two backward passes with other weights give two right gradients."""
    hidden, head, targets = problem(9, 31)
    hidden.requires_grad_()
    logps = token_logprobs(hidden, head, targets)
    for seed in range(2):
        upstream = torch.randn(9, generator=torch.Generator().manual_seed(seed),
                               dtype=torch.float64)
        (gradient,) = torch.autograd.grad(logps, hidden, upstream, retain_graph=True)
        _, expected = brute_force(hidden, head, targets, upstream)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_shapes_that_do_not_match_are_refused():
    hidden, head, targets = problem(5, 31)
    with pytest.raises(ValueError, match=r"hidden \(5, 23\), head \(31, 24\)"):
        token_logprobs(hidden[:, :-1], head, targets)
    for wrong in (targets[:-1], targets[:1], targets[:, None]):
        with pytest.raises(ValueError, match="do not match"):
            token_logprobs(hidden, head, wrong)


def test_second_derivatives_are_refused_and_not_wrong():
    hidden, head, targets = problem(5, 31)
    hidden.requires_grad_()
    loss = token_logprobs(hidden, head, targets, kernel="torch").pow(2).sum()
    gradient, = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.pow(2).sum().backward()


# --- packed rows ----------------------------------------------------------------------------------

MAKERS = {"llama": make_llama, "neox": make_neox}


class Quantised(torch.nn.Linear):
    """A base layer of another class, which PEFT's own forward under autocast has to serve."""


def load(name, dtype=torch.float64, lora=False, checkpointing=False, base_layer=None, **changes):
    """(packed model, the same weights under transformers' attention), both with random A and B.

    The packed one's adapters are the fast ones of models.py, the other's PEFT's own. base_layer:
    another class for the layers below the packed one's adapters.
    """
    import peft

    plain = MAKERS[name](**changes).to(dtype).eval().requires_grad_(False)
    packed = copy.deepcopy(plain)
    plain.set_attn_implementation("sdpa")
    packed.set_attn_implementation(logprobs.ATTENTION)
    if not lora:
        return packed, plain
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    packed, plain = (peft.get_peft_model(model, config).to(dtype) for model in (packed, plain))
    for model in (packed, plain):
        generator = torch.Generator().manual_seed(5)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    for layer in (m for m in packed.modules() if hasattr(m, "lora_A")):
        layer.base_layer.__class__ = base_layer or torch.nn.Linear
    models.speed_up_lora(packed)
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    return packed, plain


def ragged_rows(seed=0, borders=((9, 4), (2, 1), (31, 30), (12, 11), (5, 1), (17, 6))):
    """Rows of (length, response tokens): one-token responses, one-token prompts, 2 to 31 long."""
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(4, 290, (length,), generator=generator).tolist(),
             "trained": [0] * (length - response) + [1] * response}
            for length, response in borders]


def alone(plain, row):
    """log pi(y | x) of one row by the model's own logits: sum over its response tokens."""
    ids = torch.tensor([row["input_ids"]])
    logps = torch.log_softmax(plain(input_ids=ids, use_cache=False).logits[0], dim=-1)
    return sum(logps[t - 1, ids[0, t]] for t in range(1, ids.shape[1]) if row["trained"][t])


@pytest.mark.parametrize("name", MAKERS)
def test_eq_packed_logprobs_are_those_of_single_rows(name):
    """Eq. SFT_def on packed ragged rows, against each row alone in a plain forward, float64."""
    packed, plain = load(name)
    rows = ragged_rows()
    for reference in (False, True):
        logps, lengths = sequence_logprobs(packed, pack(rows), reference=reference)
        expected = torch.stack([alone(plain, row) for row in rows])
        assert logps.dtype == torch.float64
        torch.testing.assert_close(logps, expected, rtol=1e-11, atol=1e-11)
        assert lengths.tolist() == [sum(row["trained"]) for row in rows]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_eq_theta_gradients_are_those_of_single_rows(name, checkpointing):
    """grad_theta of a weighted sum of mean losses: packed and chunked, through PEFT and gradient
    checkpointing, against plain per-row autograd in float64."""
    packed, plain = load(name, lora=True, checkpointing=checkpointing)
    rows = ragged_rows()
    weights = torch.linspace(0.2, 2, len(rows), dtype=torch.float64)
    logps, lengths = sequence_logprobs(packed, pack(rows))
    (weights * -logps / lengths).mean().backward()
    loss = sum(w * -alone(plain, row) / sum(row["trained"])
               for w, row in zip(weights, rows, strict=True)) / len(rows)
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in packed.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() and len(found) == 2 * {"llama": 14, "neox": 8}[name]
    for key, gradient in found.items():
        assert gradient.norm() > 1e-6
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-11, msg=key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_low_precision_models(name, dtype):
    packed, _ = load(name, dtype)
    _, plain = load(name)
    rows = ragged_rows()
    logps, _ = sequence_logprobs(packed, pack(rows))
    expected = torch.stack([alone(plain, row) for row in rows])
    assert logps.dtype == torch.float32
    assert ((logps - expected) / expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("name", MAKERS)
def test_rows_do_not_leak(name):
    """Another row in the middle, longer or shorter, leaves every other row as it was; and so do
    rows before and behind."""
    packed, _ = load(name)
    rows = ragged_rows()
    before, _ = sequence_logprobs(packed, pack(rows))
    for middle in ragged_rows(7, ((31, 30), (3, 1))):
        changed, _ = sequence_logprobs(packed, pack([*rows[:2], middle, *rows[3:]]))
        others = torch.tensor([0, 1, 3, 4, 5])
        torch.testing.assert_close(changed[others], before[others], rtol=1e-13, atol=1e-12)
        assert abs(changed[2] - before[2]) > 0.1
    again, _ = sequence_logprobs(packed, pack(rows[3:5]))
    torch.testing.assert_close(again, before[3:5], rtol=1e-13, atol=1e-12)
    order = [4, 2, 0, 5, 1, 3]
    permuted, _ = sequence_logprobs(packed, pack([rows[i] for i in order]))
    torch.testing.assert_close(permuted, before[order], rtol=1e-13, atol=1e-12)


def test_a_row_does_not_see_its_own_future():
    packed, _ = load("llama")
    row = ragged_rows(borders=((20, 19),))[0]
    cut = {"input_ids": row["input_ids"][:12], "trained": row["trained"][:12]}
    short, _ = sequence_logprobs(packed, pack([cut]))
    row["trained"] = row["trained"][:12] + [0] * 8
    long, _ = sequence_logprobs(packed, pack([row]))
    torch.testing.assert_close(short, long, rtol=1e-13, atol=1e-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_is_refused(implementation):
    packed, _ = load("llama")
    packed.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match="packed rows see each other"):
        sequence_logprobs(packed, pack(ragged_rows()))


def give_bias(model):
    """A head with a bias, as Phi's has."""
    head = model.lm_head
    model.lm_head = torch.nn.Linear(head.in_features, head.out_features).to(head.weight.dtype)
    model.lm_head.weight = head.weight
    with torch.no_grad():
        model.lm_head.bias.copy_(torch.linspace(-2, 2, head.out_features))
    return model.requires_grad_(False)


def test_a_head_with_a_bias_takes_the_reference_path():
    packed, plain = (give_bias(model) for model in load("llama"))
    rows = ragged_rows()
    logps, _ = sequence_logprobs(packed, pack(rows))
    torch.testing.assert_close(logps, torch.stack([alone(plain, row) for row in rows]),
                               rtol=1e-11, atol=1e-11)
    check_model(packed, 1e-9)


def test_eq_a_trained_head_takes_the_reference_path():
    """The model's own logits: log-probs and the head's gradient are those of single rows."""
    packed, plain = load("llama")
    rows = ragged_rows()
    for model in (packed, plain):
        model.lm_head.weight.requires_grad_()
    logps, _ = sequence_logprobs(packed, pack(rows))
    expected = torch.stack([alone(plain, row) for row in rows])
    torch.testing.assert_close(logps, expected, rtol=1e-11, atol=1e-11)
    logps.sum().backward()
    expected.sum().backward()
    assert plain.lm_head.weight.grad.norm() > 1
    torch.testing.assert_close(packed.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-9,
                               atol=1e-11)


def gemma(**changes):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**{
        "vocab_size": 290, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4096,
        "initializer_range": 0.5, "max_position_embeddings": 128, "attn_logit_softcapping": None,
        "final_logit_softcapping": 3.0} | changes)).double().eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    model.set_attn_implementation(logprobs.ATTENTION)
    return model, plain


def test_soft_capped_logits_take_the_reference_path():
    packed, plain = gemma()
    rows = ragged_rows()
    logps, _ = sequence_logprobs(packed, pack(rows))
    torch.testing.assert_close(logps, torch.stack([alone(plain, row) for row in rows]),
                               rtol=1e-6, atol=1e-6)  # eager attention rounds to float32


def test_soft_capped_attention_is_refused():
    with pytest.raises(ValueError, match="attention needs softcap, which is not supported"):
        check_model(gemma(attn_logit_softcapping=5.0)[0], 1e-3)


def test_attention_sinks_are_refused():
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1))
    model.set_attn_implementation(logprobs.ATTENTION)
    with pytest.raises(ValueError, match="attention needs s_aux, which is not supported"):
        check_model(model, 1e-3)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "position_bias", "indices"])
def test_attention_that_would_be_read_wrongly_is_refused(name):
    """What transformers hands to an attention that this one does not compute; None is fine."""
    query, key, value = torch.randn(3, 1, 2, 7, 4)
    borders = torch.tensor([0, 3, 7], dtype=torch.int32)
    logprobs.packed_attention(None, query, key, value, None, cu_seqlens=borders, **{name: None})
    with pytest.raises(ValueError, match=f"needs {name}, which is not supported"):
        logprobs.packed_attention(None, query, key, value, None, cu_seqlens=borders,
                                  **{name: torch.ones(1)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_is_one_piece_of_memory(dtype):
    """Some models take a view of what their attention returns."""
    query, key, value = torch.randn(3, 1, 2, 7, 4, dtype=dtype)
    output, _ = logprobs.packed_attention(None, query, key, value, None,
                                          cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    assert output.view(1, 7, 8).dtype == dtype


def test_a_sliding_window_shorter_than_a_row_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=290, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=16)).eval()
    model.set_attn_implementation(logprobs.ATTENTION)
    rows = ragged_rows()
    sequence_logprobs(model, pack([row for row in rows if len(row["input_ids"]) <= 16]))
    with pytest.raises(ValueError, match="31 tokens is longer than the model's sliding window"):
        sequence_logprobs(model, pack(rows))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("lora", [False, True])
def test_check_model_accepts_what_fits(name, lora):
    check_model(load(name, lora=lora)[0], 1e-9)
    check_model(load(name, torch.float32, lora=lora)[0], 1e-3)


def leaking_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                      **kwargs):
    """What an architecture does that ignores row borders: causal over the whole sequence."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True,
                                                              scale=scaling)
    return output.transpose(1, 2), None


@pytest.mark.parametrize("name", MAKERS)
def test_check_model_rejects_a_leak(name):
    packed, _ = load(name)
    AttentionInterface.register(logprobs.ATTENTION, leaking_attention)
    try:
        with pytest.raises(ValueError, match="packed log-probs differ from the model's own"):
            check_model(packed, 1e-3)
    finally:
        AttentionInterface.register(logprobs.ATTENTION, logprobs.packed_attention)
    check_model(packed, 1e-9)


def test_check_model_rejects_a_head_that_does_more(monkeypatch):
    """A scale on the logits that no configuration entry names."""
    packed, _ = load("llama")
    whole = packed.forward

    def scaled(*args, **kwargs):
        output = whole(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(packed, "forward", scaled)
    with pytest.raises(ValueError, match="this architecture does not fit"):
        check_model(packed, 1e-3)


def test_generation_works_beside_packed_training():
    """The packed attention is the model's only one, so `generate` runs through it: left-padded
    prompts must give what each gives alone under transformers' attention."""
    packed, plain = load("llama", torch.float32)
    prompts = [[5, 9, 30, 31], [77], [8, 200, 3]]
    ids = torch.ones(3, 4, dtype=torch.long)
    mask = torch.zeros(3, 4, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, -len(prompt):], mask[i, -len(prompt):] = torch.tensor(prompt), 1
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    together = packed.generate(input_ids=ids, attention_mask=mask, **options)
    for i, prompt in enumerate(prompts):
        single = plain.generate(input_ids=torch.tensor([prompt]),
                                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                                **options)
        assert together[i, 4:].tolist() == single[0, len(prompt):].tolist()


# --- packed attention: which implementation runs --------------------------------------------------

def fake_varlen(grouped, calls):
    """varlen_attn's place, in torch 2.13's signature (grouped heads) or 2.11's: checks what it
    gets and computes it row by row."""
    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, gqa):
        calls.append((query.shape, key.shape))
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.equal(cu_seq_k)
        lengths = cu_seq_q.diff().tolist()
        assert max_q == max_k == max(lengths) and isinstance(max_q, int)
        assert window_size == (-1, 0)  # what torch calls causal
        assert len(query) == len(key) == len(value) == sum(lengths)  # (T, H, D)
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        groups = query.shape[1] // key.shape[1]
        assert gqa == (groups > 1) or not grouped
        assert groups == 1 or gqa, "fewer key heads need enable_gqa"
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        rows = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (query, key, value)),
                   strict=True)
        return torch.cat([torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale) for q, k, v in rows], 1).transpose(0, 1)

    if grouped:
        def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                        scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None,
                        block_table=None, num_splits=None):
            return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size,
                          enable_gqa)
    else:
        def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None,
                        scale=None, window_size=(-1, -1)):
            return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size,
                          False)
    return varlen_attn


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_varlen_attention_gets_what_it_needs(monkeypatch, grouped, name):
    """Both signatures, with and without grouped heads: the loop's values and gradients."""
    packed, _ = load(name, lora=True)
    rows, found, calls = ragged_rows(), [], []
    for fused in (False, True):
        if fused:
            monkeypatch.setattr(logprobs, "varlen_attn", fake_varlen(grouped, calls))
            monkeypatch.setattr(logprobs, "_varlen", lambda query, value: (True, grouped))
        logps, lengths = sequence_logprobs(packed, pack(rows))
        trained = [p for p in packed.parameters() if p.requires_grad]
        found.append((logps.detach(), *torch.autograd.grad((-logps / lengths).mean(), trained)))
    assert len(calls) == 2  # once a layer
    key_heads = 4 if name == "neox" or not grouped else 2
    assert calls[0] == ((76, 4, 8), (76, key_heads, 8))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("head_dim", "value_dim", "dtype", "fits"), [
    (64, 64, torch.bfloat16, True), (256, 256, torch.float16, True),
    (264, 264, torch.bfloat16, False), (20, 20, torch.bfloat16, False),
    (64, 32, torch.bfloat16, False), (64, 64, torch.float32, False),
    (64, 64, torch.float64, False)])
def test_varlen_attention_only_where_it_fits(monkeypatch, head_dim, value_dim, dtype, fits):
    monkeypatch.setattr(logprobs, "varlen_attn", fake_varlen(True, []))
    query, value = (torch.zeros(1, 2, 3, size, dtype=dtype) for size in (head_dim, value_dim))
    assert logprobs._varlen(query, value) == (False, False)  # a CPU
    monkeypatch.setattr(logprobs, "_has_flash", lambda device: True)
    assert logprobs._varlen(query, value) == (fits, fits)
    monkeypatch.setattr(logprobs, "varlen_attn", fake_varlen(False, []))
    assert logprobs._varlen(query, value) == (fits, False)
    monkeypatch.setattr(logprobs, "varlen_attn", lambda query, is_causal: None)  # torch 2.10's
    assert logprobs._varlen(query, value) == (False, False)
    monkeypatch.setattr(logprobs, "varlen_attn", None)
    assert logprobs._varlen(query, value) == (False, False)


def test_no_tensor_of_length_by_length_is_made():
    """Of 96 tokens in 12 rows, with gradients: nothing of 96 x 96 entries, whatever its shape."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2:
                    squares.append(tuple(tensor.shape[-2:]) == (96, 96))
            return output

    packed, _ = load("llama", torch.float32, lora=True)
    squares = []
    with Largest():
        logps, _ = sequence_logprobs(packed, pack(ragged_rows(borders=((8, 4),) * 12)))
        logps.sum().backward()
    assert len(squares) > 100 and not any(squares)


# --- bf16 under LoRA ------------------------------------------------------------------------------

def products(call):
    """(the dtypes of all matrix products' inputs, result) of a call."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm,
                                           torch.ops.aten.bmm):
                seen.extend(x.dtype for x in args if isinstance(x, torch.Tensor) and x.ndim > 1)
            return function(*args, **(kwargs or {}))

    seen = []
    with Dtypes():
        result = call()
    return seen, result


def mixed(name, checkpointing=False, base_layer=None):
    """A bf16 base with float32 adapters, as `models.add_lora` makes them, and its float64 twin."""
    packed, exact = (load(name, dtype, lora=True, initializer_range=0.05, base_layer=base_layer)[0]
                     for dtype in (torch.bfloat16, torch.float64))
    for (key, parameter), twin in zip(packed.named_parameters(), exact.parameters(), strict=True):
        if "lora_" in key:
            parameter.data = 0.25 * twin.data.float()
        twin.data = parameter.data.double()
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    return packed, exact


@pytest.mark.parametrize("kind", ["fused", "fused, checkpointed", "autocast",
                                  "autocast, checkpointed"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_bf16_base_multiplies_in_bf16_and_keeps_float32_adapters(name, kind):
    """Every product of the layers, forward and backward; float32 logits; gradients near those of
    float64, and float32, as Adam's masters need. As PEFT is, the adapters' were float32."""
    checkpointing = kind.endswith("checkpointed")
    packed, exact = mixed(name, checkpointing, Quantised if "autocast" in kind else None)
    rows = ragged_rows()
    trained = [p for p in packed.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}

    def step():
        logps, lengths = sequence_logprobs(packed, pack(rows))
        assert logps.dtype == torch.float32
        return logps.detach(), torch.autograd.grad((-logps / lengths).mean(), trained)

    seen, (logps, gradients) = products(step)
    layers = {"llama": 14, "neox": 8}[name]
    assert seen.count(torch.bfloat16) >= 2 * 3 * layers
    # The head's first product is float32 here (a GPU's reads bf16 and writes float32), rotary
    # angles are: 2 tensors each, and nothing else.
    assert seen.count(torch.float32) <= 2 * 2 * (2 if checkpointing else 1), seen
    widened = [m.cast_input_dtype_enabled for m in packed.modules() if hasattr(m, "lora_A")]
    assert widened == ["autocast" not in kind] * layers  # PEFT's switch, where its forward runs
    expected, lengths = sequence_logprobs(exact, pack(rows))
    assert ((logps - expected) / lengths).abs().max() < 0.02
    exact_trained = [p for p in exact.parameters() if p.requires_grad]
    wanted = torch.autograd.grad((-expected / lengths).mean(), exact_trained)
    flat, wanted = (torch.cat([g.flatten().double() for g in gs]) for gs in (gradients, wanted))
    assert {g.dtype for g in gradients} == {torch.float32}
    assert (flat - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("name", MAKERS)
def test_eq_lora_layers_are_pefts_own(name):
    """Value and gradients of the fused layers against PEFT's forward, float64: one adapter, another
    one active, none; and where fusing would be wrong (dropout, merged) PEFT's own is called."""
    import peft

    fused, plain = load(name, lora=True)
    assert [["forward" in vars(m) for m in model.modules() if hasattr(m, "lora_A")]
            for model in (fused, plain)] == [[fast] * {"llama": 14, "neox": 8}[name]
                                             for fast in (True, False)]
    for model in (fused, plain):
        model.add_adapter("second", peft.LoraConfig(
            r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.double()
        generator = torch.Generator().manual_seed(7)
        for key, parameter in model.named_parameters():
            if ".second." in key:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator,
                                                   dtype=torch.float64)
    rows = ragged_rows(borders=((9, 4), (12, 11)))
    seen = []
    for adapter in ("default", "second", None):
        if adapter:
            fused.set_adapter(adapter)
            plain.set_adapter(adapter)
        with (contextlib.nullcontext() if adapter else fused.disable_adapter(),
              contextlib.nullcontext() if adapter else plain.disable_adapter()):
            logps, _ = sequence_logprobs(fused, pack(rows))
            expected = torch.stack([alone(plain, row) for row in rows])
        torch.testing.assert_close(logps, expected, rtol=1e-11, atol=1e-11)
        seen.append(logps.detach())
        if adapter:
            found, wanted = ([p for p in model.parameters() if p.requires_grad]
                             for model in (fused, plain))
            torch.testing.assert_close(torch.autograd.grad(logps.sum(), found),
                                       torch.autograd.grad(expected.sum(), wanted),
                                       rtol=1e-9, atol=1e-10)
    assert not torch.allclose(seen[0], seen[1]) and not torch.allclose(seen[0], seen[2])
    copied = copy.deepcopy(fused)  # the copy's layers read the copy's weights
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.mul_(0.5)
    torch.testing.assert_close(sequence_logprobs(copied, pack(rows))[0], seen[1])
    layer = next(m for m in copied.modules() if hasattr(m, "lora_A"))
    x = torch.randn(2, layer.in_features, dtype=torch.float64)
    expected = layer(x)
    layer.merge()
    torch.testing.assert_close(layer(x), expected)
    layer.unmerge()
    layer.lora_dropout["second"] = torch.nn.Dropout(0.9)
    layer.train()
    assert not torch.allclose(layer(x), expected)


@pytest.mark.parametrize(("dtype", "lora", "base_layer", "expected"), [
    (torch.float32, True, None, {False}), (torch.float32, True, Quantised, {False}),
    (torch.bfloat16, False, None, {False}), (torch.bfloat16, True, None, {False}),
    (torch.bfloat16, True, Quantised, {False, True})])
def test_autocast_is_for_what_cannot_be_fused(dtype, lora, base_layer, expected):
    """A float32 base stays float32; a bf16 one without adapters, or with fused ones, needs none;
    elsewhere it covers the layers that have an adapter and nothing else."""
    packed, _ = load("neox", dtype, lora=lora, base_layer=base_layer)
    states = {}
    for name, module in packed.named_modules():
        module.register_forward_hook(lambda *_, name=name: states.update(
            {name: torch.is_autocast_enabled("cpu")}))
    sequence_logprobs(packed, pack(ragged_rows()))
    assert set(states.values()) == expected
    adapted = [n for n in states if n.endswith("base_layer") or ".lora_" in n]
    assert {n for n, state in states.items() if state} == (
        set(adapted) if True in expected else set()) and (not adapted) == (base_layer is None)


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
import json, re, torch
from transformers import LlamaConfig, LlamaForCausalLM
import batches, logprobs

def memory(key):  # VmHWM: the most this process has held, VmRSS: what it holds; bytes
    return 1024 * int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=50304, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, bos_token_id=None, eos_token_id=0)).requires_grad_(False)
theta = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
ids = torch.randint(0, 50304, (16, 257))
batch = batches.pack([{"input_ids": row, "trained": [0] + [1] * 256} for row in ids.tolist()])
before, report = memory("VmRSS"), {}
for name in ("packed", "plain"):  # the smaller one first: the high-water mark only rises
    if name == "packed":
        model.set_attn_implementation(logprobs.ATTENTION)
        logps, lengths = logprobs.sequence_logprobs(model, batch)
        loss = (-logps / lengths).mean()
    else:
        model.set_attn_implementation("sdpa")
        loss = model(input_ids=ids, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, theta)
    report[name] = {"peak": memory("VmHWM") - before, "loss": loss.item(),
                    "norm": gradient.norm().item()}
    del loss
print(json.dumps(report))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_of_a_step_at_4096_tokens_and_a_50k_vocabulary():
    """The packed step beside the plain one that holds all logits: the same loss and gradient, at
    most an eighth of the memory. (T V floats are 0.82 GB; the plain step holds about three.)"""
    command, environment = python("-c", MEMORY)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    packed, plain = report["packed"], report["plain"]
    assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert packed["norm"] == pytest.approx(plain["norm"], rel=1e-3)
    assert plain["peak"] > 4096 * 50304 * 4  # the comparison is with what it says
    assert packed["peak"] < plain["peak"] / 8, report
