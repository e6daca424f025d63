"""bmo_weights.py: lemma, corollary and merit function against autograd and enumeration.

The last part walks through every answer of a tiny model with two tokens, so expectations are exact.
"""

import functools
import itertools
import math

import pytest
import torch
from conftest import make_llama

import logprobs
from bmo_weights import (
    MAX_LOG_RATIO,
    clamped,
    effective_sample_size,
    importance_ratio,
    lse_merit,
    response_weights,
)

SHAPES = [(1,), (5,), (3, 5), (2, 3, 4)]


def random_losses(shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.rand(shape, generator=generator, dtype=torch.float64)


# --- the lemma ------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_eq_bmo_weight(shape, tau):
    """Eq. BMO-weight (Lemma implicit_BMO): lambda_g = exp(-tau L_g) / sum_g' exp(-tau L_g')."""
    losses = random_losses(shape)
    found = response_weights(-losses, tau)
    for index in itertools.product(*map(range, shape)):
        row = losses[index[:-1]].tolist()
        expected = math.exp(-tau * row[index[-1]]) / sum(math.exp(-tau * loss) for loss in row)
        assert found[index].item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(shape[:-1], dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_eq_gradient_of_the_merit_function_is_the_weighted_sum(shape, tau):
    """Eq. penalty_BMO_lse and Lemma implicit_BMO: grad u = sum_m lambda_m grad L_m, for every tau.

    The losses depend on a shared theta, as answers of one model do.
    """
    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(*shape, 4, generator=generator, dtype=torch.float64)
    losses = (matrix @ theta) ** 2
    (found,) = torch.autograd.grad(lse_merit(losses, tau).sum(), theta, retain_graph=True)
    weights = response_weights(-losses.detach(), tau)
    expected = torch.zeros(4, dtype=torch.float64)
    for index in itertools.product(*map(range, shape)):
        (one,) = torch.autograd.grad(losses[index], theta, retain_graph=True)
        expected += weights[index] * one
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tau", [0.1, 1.0, 7.0])
def test_eq_merit_function_bounds(tau):
    """Eq. penalty_BMO_lse smooths the minimum: min - log(M)/tau <= u <= min, tight at both ends."""
    losses = random_losses((200, 6), seed=2)
    merit, least = lse_merit(losses, tau), losses.amin(-1)
    assert (merit <= least).all() and (merit >= least - math.log(6) / tau).all()
    assert (merit < least - 1e-9).any()
    equal = torch.full((6,), 1.7, dtype=torch.float64)
    assert lse_merit(equal, tau).item() == pytest.approx(1.7 - math.log(6) / tau, rel=1e-12)
    apart = torch.tensor([0.5, 1e4, 1e4], dtype=torch.float64)
    assert lse_merit(apart, tau).item() == pytest.approx(0.5, rel=1e-12)
    assert lse_merit(losses[:, :1], tau).tolist() == pytest.approx(losses[:, 0].tolist())


# --- the corollary --------------------------------------------------------------------------------

def test_eq_importance_ratio():
    """Corollary importance_ratio: pi(y|x) / pi_old(y|x) from the probabilities themselves."""
    now = torch.tensor([0.02, 0.5, 0.125, 0.9], dtype=torch.float64)
    old = torch.tensor([0.01, 0.5, 0.25, 0.3], dtype=torch.float64)
    assert importance_ratio(now.log(), old.log()).tolist() == pytest.approx([2, 1, 0.5, 3])


def test_eq_ratio_is_proportional_to_lambda_only_for_equal_old_log_probs():
    """Corollary importance_ratio, deviation 2: r_g / lambda_g = sum_g' pi(y_g') / pi_old(y_g)."""
    logps = -random_losses((4, 5), seed=3)
    weights = response_weights(logps)
    equal = torch.full_like(logps, -1.3)
    share = importance_ratio(logps, equal) / weights
    torch.testing.assert_close(share, share[:, :1].expand_as(share), rtol=1e-12, atol=0)
    differ = -random_losses((4, 5), seed=4)
    share = importance_ratio(logps, differ) / weights
    expected = logps.exp().sum(-1, keepdim=True) / differ.exp()
    torch.testing.assert_close(share, expected, rtol=1e-12, atol=0)
    assert ((share.amax(-1) / share.amin(-1)) > 1.5).all()


def test_ratio_is_one_where_nothing_moved_and_carries_no_gradient():
    logps = torch.tensor([-700.0, -0.25, -3.0], requires_grad=True)
    ratio = importance_ratio(logps, logps.detach().clone())
    assert ratio.tolist() == [1.0, 1.0, 1.0] and not ratio.requires_grad
    assert not importance_ratio(logps.detach(), logps).requires_grad


def test_clamp_is_counted_and_nothing_overflows():
    """Log-ratios far beyond float32's and float64's exponents: the clamp's value, or infinity."""
    old = torch.zeros(6)
    now = torch.tensor([-1e4, -MAX_LOG_RATIO - 1e-3, -MAX_LOG_RATIO, 0.0, MAX_LOG_RATIO, 1e4])
    ratio = importance_ratio(now, old)
    low, high = math.exp(-MAX_LOG_RATIO), math.exp(MAX_LOG_RATIO)
    assert ratio.tolist() == pytest.approx([low, low, low, 1, high, high])
    assert clamped(now, old).tolist() == [True, True, False, False, False, True]
    assert importance_ratio(now, old, 0.5).max().item() == pytest.approx(math.exp(0.5))
    assert clamped(now, old, 0.5).sum() == 5
    free = importance_ratio(now, old, math.inf)
    assert free[0] == 0 and free[-1] == math.inf and not clamped(now, old, math.inf).any()
    assert free[1].item() == pytest.approx(math.exp(-MAX_LOG_RATIO - 1e-3))


def test_extreme_log_probs_neither_overflow_nor_become_nan():
    """Sequence log-probs of thousands of nats, equal and far apart."""
    logps = torch.tensor([[-5000.0, -5000.0], [-9000.0, -1.0]])
    assert response_weights(logps).tolist() == [[0.5, 0.5], [0.0, 1.0]]
    assert lse_merit(-logps).tolist() == pytest.approx([5000 - math.log(2), 1.0])


def test_log_probs_of_two_shapes_are_refused():
    """(G,) beside (n, G) would be stretched over all questions."""
    for function in (importance_ratio, clamped):
        with pytest.raises(ValueError, match="log-probs now and at generation"):
            function(torch.zeros(3, 2), torch.zeros(2))


# --- all of them ----------------------------------------------------------------------------------

def test_the_order_of_responses_does_not_matter():
    """A permutation of the answers permutes the weights and ratios; u and the ESS stay."""
    logps, old = -random_losses((3, 5), seed=5), -random_losses((3, 5), seed=6)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled = logps[:, order]
    close = functools.partial(torch.testing.assert_close, rtol=1e-14, atol=0)
    close(response_weights(shuffled), response_weights(logps)[:, order])
    close(importance_ratio(shuffled, old[:, order]), importance_ratio(logps, old)[:, order])
    close(lse_merit(-shuffled), lse_merit(-logps))
    close(effective_sample_size(shuffled.exp()), effective_sample_size(logps.exp()))


def test_effective_sample_size():
    """(sum w)^2 / sum w^2 (Kish); any scale; zero where there is no weight at all."""
    weights = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [2, 2, 0, 0], [3, 1, 0, 0], [0, 0, 0, 0]],
                           dtype=torch.float64)
    expected = [4, 1, 2, 16 / 10, 0]
    assert effective_sample_size(weights).tolist() == pytest.approx(expected)
    for scale in (1e-200, 1e200):
        assert effective_sample_size(weights * scale).tolist() == pytest.approx(expected)


def test_float64_stays_and_everything_else_is_float32():
    """Half-precision input is computed in float32: its exponent range alone would overflow."""
    for dtype, expected in ((torch.float64, torch.float64), (torch.float32, torch.float32),
                            (torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        x = torch.tensor([-12.0, -13.0, -20.0], dtype=dtype)
        for value in (response_weights(x), importance_ratio(x, x - 1), lse_merit(-x),
                      effective_sample_size(-x)):
            assert value.dtype == expected, dtype
        assert importance_ratio(x, x - 1)[0].item() == pytest.approx(math.e, rel=1e-6)
    large = torch.tensor([12.0], dtype=torch.float16)  # exp(12) is beyond float16
    assert importance_ratio(large, torch.zeros_like(large), math.inf).item() == pytest.approx(
        math.exp(12))


# --- what the ratio does, by enumeration ----------------------------------------------------------

LENGTH = 3


@pytest.fixture(scope="module")
def two_tokens():
    """two_tokens(stop): every answer to one prompt under a model with two tokens.

    Returns the gradients (answers, parameters) of the summed loss at theta; log-probs at theta and
    at theta_old, whose weights are a little different; lengths; sampled(temperature), the chance of
    drawing each answer from theta_old, and the same from theta. `stop`: token 1 ends an answer.
    """
    model, old_model = (make_llama(7, vocab_size=2, hidden_size=8, intermediate_size=8,
                                   num_hidden_layers=1, num_attention_heads=2,
                                   num_key_value_heads=1, initializer_range=0.6,
                                   attn_implementation=logprobs.ATTENTION).double()
                        for _ in range(2))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in old_model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += 0.1 * noise
    prompt = [0, 1, 1]

    def token_logps(model, answer, temperature=1.0):
        ids = torch.tensor([prompt + list(answer)])
        batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None],
                 "cu_seqlens": torch.tensor([0, ids.shape[1]], dtype=torch.int32)}
        logits = logprobs.packed_forward(model, batch)[len(prompt) - 1:-1] / temperature
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    def of(stop):
        answers = list(itertools.product((0, 1), repeat=LENGTH))
        if stop:
            answers = sorted({a[:a.index(1) + 1] if 1 in a else a for a in answers})
        gradients, now, old = [], [], []
        for answer in answers:
            logp = token_logps(model, answer).sum()
            grads = torch.autograd.grad(-logp, list(model.parameters()))
            gradients.append(torch.cat([g.flatten() for g in grads]))
            now.append(logp.detach())
            old.append(token_logps(old_model, answer).sum().detach())

        def sampled(temperature, model=old_model):
            with torch.no_grad():
                return torch.stack([token_logps(model, answer, temperature).sum().exp()
                                    for answer in answers])

        lengths = torch.tensor([len(answer) for answer in answers], dtype=torch.float64)
        return (torch.stack(gradients), torch.stack(now), torch.stack(old), lengths, sampled,
                functools.partial(sampled, model=model))
    return of


@pytest.mark.parametrize("stop", [False, True], ids=["fixed length", "ended by a token"])
def test_eq_expected_weighted_gradient_is_zero_at_temperature_one(two_tokens, stop):
    """Design choice 14: sum_y pi_old(y) r(y) grad -log pi(y) = -grad sum_y pi(y) = 0, exactly.

    With theta apart from theta_old, so ratios are not one; answers cut at the limit included. At
    temperature 0.8, or without the ratio, or with per-token means of answers of other lengths,
    something remains. (1e-7: the model's norms compute in float32.)
    """
    gradients, now, old, lengths, sampled, sampled_now = two_tokens(stop)
    ratio = importance_ratio(now, old, math.inf)
    assert sampled(1.0).sum().item() == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(sampled(1.0), old.exp(), rtol=1e-12, atol=0)
    assert (ratio - 1).abs().max() > 0.1
    size = (sampled(1.0) * gradients.norm(dim=1)).sum()

    def expected(probabilities, weights=ratio, gradients=gradients):
        return ((probabilities * weights) @ gradients).norm() / size

    assert expected(sampled(1.0)) < 1e-7
    assert expected(sampled(0.8)) > 0.01
    # Fresh answers, r = 1: the same holds, and the same is left at another temperature.
    ones = torch.ones_like(ratio)
    assert expected(sampled_now(1.0), ones) < 1e-7 and expected(sampled_now(0.8), ones) > 0.01
    assert expected(sampled(1.0), ones) > 0.01  # old answers without their ratio
    means = gradients / lengths[:, None]
    assert (expected(sampled(1.0), gradients=means) < 1e-7) == (not stop)
