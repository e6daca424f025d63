"""selector.py: every formula against autograd or enumeration in float64, masks, state, diagnostics.

The brute force below is written from the paper: a softmax, a mean, autograd. It shares no code with
the selector, which never builds the softmax's Jacobian.
"""

import copy
import io
import math
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import selector
from selector import Selector, dynamic_mask, penalty, spearman, static_mask

N, B = 11, 6


def autograd_gradient(omega, rows, losses, gamma):
    """grad_omega of gamma * mean_b N softmax(omega)_{i_b} C_b, by autograd, float64."""
    omega = omega.detach().double().clone().requires_grad_()
    weights = len(omega) * torch.softmax(omega, dim=0)
    objective = gamma * (weights[rows] * losses.double()).mean()
    (gradient,) = torch.autograd.grad(objective, omega)
    return gradient


def draws(seed, duplicates=False):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.tensor([3, 7, 3, 0, 3, 10]) if duplicates
            else torch.randperm(N, generator=generator)[:B])
    return rows, 4 * torch.rand(B, generator=generator, dtype=torch.float64)


def start(seed, optimizer="sgd", **options):
    """A float64 selector somewhere away from uniform."""
    made = Selector(N, options.pop("lr", 0.7), optimizer, dtype=torch.float64, **options)
    made.logits.copy_(torch.randn(N, generator=torch.Generator().manual_seed(seed),
                                  dtype=torch.float64))
    return made


# --- one step against autograd --------------------------------------------------------------------

@pytest.mark.parametrize("duplicates", [False, True])
@pytest.mark.parametrize("gamma", [1 / 9, 1.0, 4.0])
def test_eq_omega_step_is_the_gradient_of_the_softmax_objective(gamma, duplicates):
    """PBGD-2, plain step: omega - alpha grad_omega gamma mean_b N sigma_{i_b} C_b."""
    made = start(0)
    for seed in range(3):  # three steps, so that a stale softmax would show as well
        rows, losses = draws(seed, duplicates)
        expected = made.logits - 0.7 * autograd_gradient(made.logits, rows, losses, gamma)
        made.step(rows, losses, gamma)
        torch.testing.assert_close(made.logits, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("duplicates", [False, True])
def test_eq_omega_step_under_adam(duplicates):
    """PBGD-2 with the published optimiser: torch's Adam on the autograd gradient, every row."""
    made = start(1, "adam", lr=0.05)
    omega = made.logits.clone().requires_grad_()
    adam = torch.optim.Adam([omega], lr=0.05)
    for seed in range(5):
        rows, losses = draws(seed, duplicates)
        omega.grad = autograd_gradient(omega, rows, losses, 0.25 * (seed + 1))
        adam.step()
        made.step(rows, losses, 0.25 * (seed + 1))
        torch.testing.assert_close(made.logits, omega.detach(), rtol=1e-11, atol=1e-11)


def test_eq_omega_gradient_is_the_written_formula():
    """d/d omega_j = gamma (N/B) sum_b C_b sigma_{i_b} (delta_{i_b j} - sigma_j), term by term."""
    made, gamma = start(2, lr=1.0), 0.3
    rows, losses = draws(5, duplicates=True)
    sigma = [math.exp(w) / sum(math.exp(v) for v in made.logits) for w in made.logits]
    expected = made.logits.clone()
    for j in range(N):
        expected[j] -= gamma * N / B * sum(
            float(c) * sigma[i] * ((i == j) - sigma[j])
            for i, c in zip(rows.tolist(), losses, strict=True))
    made.step(rows, losses, gamma)
    torch.testing.assert_close(made.logits, expected, rtol=1e-13, atol=1e-13)


def test_eq_jacobian_rows_sum_to_zero():
    """sum_i grad sigma_i = 0: a constant loss on every row moves nothing, so centring is unbiased.

    The expectation over a uniform row i is the mean over all of them, taken here by enumeration.
    """
    base, constant = start(3, lr=1.0), torch.tensor([2.5], dtype=torch.float64)
    total = torch.zeros(N, dtype=torch.float64)
    for i in range(N):
        made = start(3, lr=1.0)
        made.step(torch.tensor([i]), constant, 1.0)
        assert (made.logits - base.logits).abs().max() > 1e-3  # each single step does move
        total += made.logits - base.logits
    assert total.abs().max() < 1e-13


def test_eq_center_subtracts_a_mean_of_past_losses():
    """Deviation 3: C - b with b known before the batch; b then takes a tenth of the way."""
    made, rows = start(4, center=True), torch.tensor([0, 4, 5, 9])
    baseline = None
    for seed in range(4):
        losses = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if baseline is None:
            baseline = losses.mean()
        expected = made.logits - 0.7 * autograd_gradient(made.logits, rows, losses - baseline, 0.5)
        made.step(rows, losses, 0.5)
        torch.testing.assert_close(made.logits, expected, rtol=1e-13, atol=1e-13)
        baseline = 0.9 * baseline + 0.1 * losses.mean()
        torch.testing.assert_close(made.last_losses[rows], losses)  # the log keeps the true loss


def test_center_does_not_change_the_expected_step():
    """Mean over all rows of single-row steps: the same with and without centring."""
    means = []
    for center in (False, True):
        total = torch.zeros(N, dtype=torch.float64)
        losses = torch.linspace(0.5, 4, N, dtype=torch.float64)
        for i in range(N):
            made = start(6, lr=1.0, center=center)
            if center:
                made.baseline = torch.tensor(2.0, dtype=torch.float64)
            before = made.logits.clone()
            made.step(torch.tensor([i]), losses[i : i + 1], 1.0)
            total += made.logits - before
        means.append(total / N)
    torch.testing.assert_close(*means, rtol=1e-12, atol=1e-13)


def test_high_loss_loses_weight_and_unseen_rows_move_together():
    made = Selector(5, lr=1.0, optimizer="sgd")
    made.step(torch.tensor([1, 3]), torch.tensor([4.0, 1.0]), 1.0)
    weights = made.weights()
    assert weights[1] < weights[3] < weights[0] == weights[2] == weights[4]


# --- weights --------------------------------------------------------------------------------------

def test_eq_weights_are_n_softmax_with_mean_one():
    """W = N softmax(omega), deviation 1; rows picks, order and duplicates kept."""
    made = start(7)
    exact = [math.exp(w) for w in made.logits]
    exact = torch.tensor([N * e / sum(exact) for e in exact], dtype=torch.float64)
    rows = torch.tensor([9, 0, 9])
    torch.testing.assert_close(made.weights(), exact, rtol=1e-14, atol=0)
    torch.testing.assert_close(made.weights(rows), exact[rows], rtol=1e-14, atol=0)
    assert made.weights().mean().item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 49, 93, 1000, 9600, 56000, 10**6 + 3])
def test_untouched_weights_are_exactly_one(num_rows, dtype):
    """Not nearly: BDS with frozen uniform weights must be direct mixing, bit for bit."""
    made = Selector(num_rows, lr=1.0, dtype=dtype)
    rows = torch.arange(min(num_rows, 40))
    assert (made.weights() == 1.0).all() and (made.weights(rows) == 1.0).all()
    made.logits += 0.3  # any constant start is the same
    assert (made.weights() == 1.0).all() and (made.weights(rows) == 1.0).all()


def test_weights_follow_every_change_of_the_logits():
    """`weights(rows)` remembers its normaliser; a step, a load or an edit must renew it."""
    made, rows = start(8), torch.tensor([2, 5])
    for change in (lambda: made.step(rows, torch.tensor([3.0, 1.0]), 1.0),
                   lambda: made.logits.mul_(0.5),
                   lambda: made.load_state_dict(start(9).state_dict())):
        made.weights(rows)
        change()
        expected = N * torch.softmax(made.logits, dim=0)
        torch.testing.assert_close(made.weights(rows), expected[rows], rtol=1e-13, atol=0)


def test_extreme_logits_neither_overflow_nor_lose_mass():
    made = Selector(4, lr=1.0)
    made.logits.copy_(torch.tensor([1e4, 1e4, -1e4, 0.0]))
    assert made.weights().tolist() == [2.0, 2.0, 0.0, 0.0]
    made.step(torch.tensor([0, 2]), torch.tensor([1.0, 1e30]), 1.0)
    assert torch.isfinite(made.logits).all()


def test_dtype_float64_stays_and_all_else_is_float32():
    for given, kept in ((torch.float64, torch.float64), (torch.float32, torch.float32),
                        (torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        for optimizer in ("adam", "sgd"):
            made = Selector(3, lr=0.1, optimizer=optimizer, dtype=given)
            made.step(torch.tensor([0, 2]), torch.tensor([1.0, 2.0], dtype=given), 1.0)
            assert made.logits.dtype == made.weights().dtype == kept
            assert made.weights(torch.tensor([1])).dtype == kept


def test_step_leaves_no_graph_and_changes_no_input():
    made = start(10)
    losses = torch.rand(2, dtype=torch.float64, requires_grad=True)
    copy, rows = losses.detach().clone(), torch.tensor([1, 2])
    made.step(rows, losses * 1.0, 0.5)
    assert losses.grad is None and not made.logits.requires_grad
    assert torch.equal(losses, copy) and torch.equal(rows, torch.tensor([1, 2]))


@pytest.mark.parametrize("rows", [
    [0, -1], [0, 11], [0], [], [[0, 1]], [True, False], [0.0, 1.0],
    torch.tensor([0, 1], dtype=torch.uint8), torch.tensor([0, 1], dtype=torch.int16)])
def test_rows_that_are_none_change_nothing(rows):
    made = start(11)
    before = made.weights().clone()
    with pytest.raises(ValueError, match="an index a loss"):
        made.step(torch.as_tensor(rows), torch.ones(2 if len(rows) else 0), 1.0)
    with pytest.raises(FloatingPointError, match="a gamma of nan"):
        made.step(torch.tensor([0]), torch.ones(1), math.nan)
    assert torch.equal(made.weights(), before)
    assert made.last_losses.isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_changes_nothing(bad):
    made = start(11)
    before = made.logits.clone()
    with pytest.raises(FloatingPointError, match="not finite"):
        made.step(torch.tensor([0, 1]), torch.tensor([1.0, bad]), 1.0)
    assert torch.equal(made.logits, before) and made.last_losses.isnan().all()


def test_finite_losses_whose_sum_is_not_change_nothing():
    made = Selector(3, 1.0, "sgd", center=True)
    made.logits.copy_(torch.tensor([1.0, 0.0, 0.0]))
    for losses in ([3e38, 1.0], [1e38, -1e38]):
        with pytest.raises(FloatingPointError, match="the weighted losses are not finite"):
            made.step(torch.tensor([0, 1]), torch.tensor(losses), 10.0)
    assert made.logits.tolist() == [1, 0, 0] and made.baseline is None
    assert made.last_losses.isnan().all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_weights_of_its_own(copied):
    """The version of a copied tensor starts anew and may meet that of the cached exponentials."""
    made = Selector(4, 1.0, "sgd")
    made.logits.zero_()
    made.logits.copy_(torch.tensor([1.0, 0, 0, 0]))
    made.weights()
    other = copied(made)
    for value in range(1, 6):
        omega = torch.tensor([0, 0, 0, float(value)])
        other.logits.copy_(omega)
        torch.testing.assert_close(other.weights(), 4 * omega.softmax(0))
    torch.testing.assert_close(made.weights(), 4 * torch.tensor([1.0, 0, 0, 0]).softmax(0))
    other.step(torch.tensor([1]), torch.ones(1), 1.0)
    assert made.last_losses.isnan().all()


@pytest.mark.parametrize(("options", "message"), [
    ({"num_rows": 0, "lr": 1.0}, "at least one row"),
    ({"num_rows": 2, "lr": 1.0, "optimizer": "lion"}, "'adam' or 'sgd', got 'lion'")])
def test_refused_selectors(options, message):
    with pytest.raises(ValueError, match=message):
        Selector(**options)


# --- penalty --------------------------------------------------------------------------------------

def test_eq_penalty_schedule():
    """gamma_k = rho_k / (1 - rho_k), rho_k = 0.1, 0.2, ... (appendix D), in exact fractions."""
    for epoch in range(9):
        rho = Fraction(epoch + 1, 10)
        assert penalty(epoch) == pytest.approx(float(rho / (1 - rho)), rel=1e-15)
    assert penalty(2) == 0.3 / 0.7 and penalty(4) == 1.0
    assert penalty(7, rho_start=0.5, rho_step=0.0) == 1.0
    assert penalty(3, rho_start=0.2, rho_step=0.05) == pytest.approx(7 / 13, rel=1e-15)


@pytest.mark.parametrize("arguments", [(9,), (0, 0.0, 0.1), (0, 1.0, 0.1), (0, 1.2, 0.0),
                                       (3, 0.3, -0.1), (0, -0.1, 0.1), (0, math.nan, 0.1)])
def test_penalty_outside_the_open_interval_is_refused(arguments):
    with pytest.raises(ValueError, match=r"rho must lie inside \(0, 1\)"):
        penalty(*arguments)


# --- masks ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.1, 0.2, 0.33, 0.5, 1.0])
@pytest.mark.parametrize("num_rows", [1, 7, 49, 200])
def test_masks_hold_exactly_round_r_n_rows(num_rows, ratio):
    for ties in (torch.zeros(num_rows), torch.randn(num_rows), torch.arange(num_rows) // 3 * 1.0):
        masks = (static_mask(num_rows, ratio, torch.Generator().manual_seed(0)),
                 dynamic_mask(ties, ratio, torch.Generator().manual_seed(0)))
        for mask in masks:
            assert mask.dtype == torch.bool and mask.shape == (num_rows,)
            assert mask.sum() == round(ratio * num_rows)


def test_eq_dynamic_mask_is_the_bottom_of_the_ranking():
    """I_M^k = the rows ranked in the bottom R of sigma(omega): by enumeration of all pairs."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(0, 6, (30,), generator=generator).double()  # many ties
        mask = dynamic_mask(logits, 0.3, generator)
        assert mask.sum() == 9
        assert all(logits[i] <= logits[j] for i in mask.nonzero() for j in (~mask).nonzero())
    assert dynamic_mask(torch.tensor([3.0, -1.0, 2.0, 0.0]), 0.5, torch.Generator()).tolist() == [
        False, True, False, True]


@pytest.mark.parametrize("make", [lambda g: static_mask(50, 0.2, g),
                                  lambda g: dynamic_mask(torch.zeros(50), 0.2, g)])
def test_equal_weights_are_masked_at_random_and_seeded(make):
    """At step 0 every weight is equal: no row may be likelier than another, and seeds decide."""
    counts = torch.zeros(50)
    for seed in range(600):
        counts += make(torch.Generator().manual_seed(seed))
    # Binomial(600, 0.2): mean 120, standard deviation 9.8; five of them on either side.
    assert counts.sum() == 6000 and counts.min() > 71 and counts.max() < 169
    assert torch.equal(make(torch.Generator().manual_seed(3)),
                       make(torch.Generator().manual_seed(3)))
    assert not torch.equal(make(torch.Generator().manual_seed(3)),
                           make(torch.Generator().manual_seed(4)))


@pytest.mark.parametrize("ratio", [-0.01, 1.01, math.nan])
def test_masked_share_outside_the_interval_is_refused(ratio):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        static_mask(10, ratio, torch.Generator())
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        dynamic_mask(torch.zeros(10), ratio, torch.Generator())


# --- state ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_state_round_trip_continues_bit_for_bit(optimizer):
    """Through a file, as a checkpoint does it: optimiser moments, baseline and losses included."""
    def go_on(made, seeds):
        for seed in seeds:
            made.step(*draws(seed), 0.4)

    whole = start(12, optimizer, center=True, lr=0.1)
    go_on(whole, range(6))
    half, file = start(12, optimizer, center=True, lr=0.1), io.BytesIO()
    go_on(half, range(3))
    torch.save(half.state_dict(), file)
    file.seek(0)
    resumed = Selector(N, 0.1, optimizer, center=True, dtype=torch.float64)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    go_on(resumed, range(3, 6))
    assert torch.equal(resumed.logits, whole.logits)
    assert torch.equal(resumed.last_losses.nan_to_num(-1), whole.last_losses.nan_to_num(-1))
    assert torch.equal(resumed.baseline, whole.baseline)
    assert resumed.diagnostics() == whole.diagnostics()


def test_state_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 11 rows, this one 4"):
        Selector(4, 1.0).load_state_dict(start(0).state_dict())


# --- diagnostics ----------------------------------------------------------------------------------

def test_diagnostics_by_hand():
    made = Selector(4, 1.0, dtype=torch.float64)
    made.logits.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log())
    made.last_losses[:3] = torch.tensor([5.0, 3.0, 4.0])  # the fourth row has not been seen
    report = made.diagnostics()
    assert report["entropy"] == pytest.approx(-sum(p * math.log(p) for p in (0.1, 0.2, 0.3, 0.4)))
    assert report["ess"] == pytest.approx(1 / (0.01 + 0.04 + 0.09 + 0.16))
    assert report["ess_share"] == pytest.approx(report["ess"] / 4)
    assert (report["weight_min"], report["weight_max"]) == (pytest.approx(0.4), pytest.approx(1.6))
    assert report["spearman"] == pytest.approx(0.5)  # ranks 1 2 3 against 1 3 2
    assert not report["uniform"] and not report["collapsed"]
    assert [report[f"weight_q{q}"] for q in ("01", "10", "50", "90", "99")] == pytest.approx(
        [0.4, 0.4, 1.2, 1.6, 1.6])


def test_diagnostics_flags():
    """Uniform at the start, neither in the middle, collapsed when one row holds the mass."""
    made = Selector(300, 1.0)
    report = made.diagnostics()
    assert report["uniform"] and not report["collapsed"]
    assert report["entropy"] == pytest.approx(math.log(300)) and report["spearman"] == 0.0
    assert report["ess"] == pytest.approx(300) and report["ess_share"] == pytest.approx(1)
    made.logits.copy_(torch.linspace(0, 0.09, 300))
    assert made.diagnostics()["uniform"]
    made.logits.copy_(torch.linspace(0, 0.2, 300))
    report = made.diagnostics()
    assert not report["uniform"] and not report["collapsed"]
    made.logits[17] = 30.0
    report = made.diagnostics()
    assert report["collapsed"] and report["ess"] == pytest.approx(1, abs=1e-3)
    for rows, heavy, collapsed in ((400, 3, True), (400, 5, False), (50, 1, True), (50, 2, False),
                                   (2, 1, False)):
        made = Selector(rows, 1.0, dtype=torch.float64)
        made.logits[:heavy] = 40.0  # all the weight, equally: the sample is worth `heavy` rows
        report = made.diagnostics()
        assert report["ess"] == pytest.approx(heavy) and report["collapsed"] == collapsed
    made = Selector(200, 1.0)
    made.logits[:5] = 1.0
    assert not made.diagnostics()["uniform"]  # too many stand out; one row does not count
    made.logits[1:5] = 0.0
    assert made.diagnostics()["uniform"]


def test_eq_spearman_is_pearson_of_mean_ranks():
    """Ranks by counting pairs (ties one half each), then the textbook correlation."""
    def ranks(x):
        return [1 + sum((b < a) + 0.5 * (b == a) for b in x) - 0.5 for a in x]

    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randint(0, 5, (12,), generator=generator).double()
        b = torch.randint(0, 9, (12,), generator=generator).double()
        expected = torch.corrcoef(torch.tensor([ranks(a.tolist()), ranks(b.tolist())],
                                               dtype=torch.float64))[0, 1].item()
        assert spearman(a, b) == pytest.approx(expected, abs=1e-12)
    assert spearman(torch.arange(5.0), torch.arange(5.0) ** 3) == pytest.approx(1.0)
    assert spearman(torch.arange(5.0), -torch.arange(5.0)) == pytest.approx(-1.0)
    assert spearman(torch.ones(5), torch.arange(5.0)) == 0.0
    assert spearman(torch.ones(1), torch.ones(1)) == spearman(torch.ones(0), torch.ones(0)) == 0.0


def test_selector_file_stands_alone():
    """It can be copied into another codebase: torch and the standard library, nothing else."""
    lines = Path(selector.__file__).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("import ", "from "))] == [
        "import math", "import torch"]


def test_a_state_of_another_optimizer_is_refused():
    saved, other = Selector(3, 1.0, "adam"), Selector(3, 1.0, "sgd")
    saved.step(torch.tensor([0]), torch.ones(1), 1.0)
    with pytest.raises(ValueError, match="another optimizer"):
        other.load_state_dict(saved.state_dict())
    assert not other.logits.any()
