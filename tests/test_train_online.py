"""train_online.py: whole runs on tiny models, against Algorithm 1 and Eqs. PBGD_LLM.

`by_hand` is the independent computation of a run: each row and answer alone in a plain forward,
autograd through a literal softmax for omega, Adam written out. The answers themselves and the mask
are taken from the run; what follows from them is not.
"""

import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    CHATML,
    ROOT,
    copy_tree,
    flags,
    listing,
    make_llama,
    make_neox,
    make_rows,
    make_tokenizer,
    read_rows,
    write_rows,
)
from test_generate import only_ends
from test_train_offline import adam_step, adapter, load_float64, mean_loss, omega, tokenise

import accept
import batches
import curate
import generate
import options
import ranking
import selector
import train_offline
import train_online
from data import tokens

SPECIALS = "<|im_start|>", "<|im_end|>", "<eos>", "<pad>"


@pytest.fixture
def spied(monkeypatch):
    """What a run generated and masked: answers [(step, {position: Answers})], masks [bool (N,)].

    `spied.shift` is added to the old log-probs of every refresh, so that ratios are not one; `true`
    holds them before. `spied.written` are the tokens of each refresh.
    """
    spy = SimpleNamespace(answers=[], masks=[], true=[], written=[], shift=None)
    answer, refresh = train_online.answer, train_online.refresh
    new_mask = train_online.new_mask

    def record(*args, num_answers, **options):
        made, written = answer(*args, num_answers=num_answers, **options)
        spy.true.append([answers.old_logps.clone() for answers in made])
        if spy.shift is not None:
            generator = torch.Generator().manual_seed(len(spy.answers))
            for answers in made:
                noise = torch.rand(num_answers, generator=generator, dtype=torch.float64)
                answers.old_logps = answers.old_logps + spy.shift * (2 * noise - 1)
        spy.written.append(written)
        return made, written

    def record_refresh(run, *rest):
        mask, made, values = refresh(run, *rest)
        if made and run.args.refine == "generate":
            spy.answers.append((run.step, made))
            spy.true[-1] = dict(zip(made, spy.true[-1], strict=True))
        return mask, made, values

    def record_mask(*rest):
        spy.masks.append(new_mask(*rest))
        return spy.masks[-1]

    monkeypatch.setattr(train_online, "answer", record)
    monkeypatch.setattr(train_online, "refresh", record_refresh)
    monkeypatch.setattr(train_online, "new_mask", record_mask)
    return spy


def decide(places, refresh):
    """{place: (way, weight)} given to a run: an accepted answer, a prefix, others dropped."""
    turns = itertools.cycle([("search", 0.85), ("prefix", 1.0), (None, None)])
    return {p: next(turns) for p in (places if refresh != 1 else places[::-1])}


@pytest.fixture
def decided(monkeypatch):
    """`decide` in the place of accept.py's rule; and trusted parts of three rows."""
    def repair(run, places, sampling, number, write):
        made = []
        for p, (way, weight) in decide(places, number).items():
            new, old = [40 + p, 50, 60 + p, 0], batches.response_of(run.lower[p])[:-1]
            made.append((p, {"way": way, "weight": weight, "source": None, "margin": -0.5,
                             "tokens": {"search": new, "prefix": old, None: None}[way],
                             "why": "given"}))
        return [dict(made)[p] for p in places], {"dropped": 1}

    monkeypatch.setattr(accept, "ENOUGH", 3)
    monkeypatch.setattr(accept, "repair", repair)


# --- Algorithm 1 against brute force --------------------------------------------------------------

def token_logps(model, row):
    ids, start = row
    logps = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], dim=-1)
    return logps[torch.arange(start - 1, len(ids) - 1), ids[start:]]


def by_hand(folder, adapter_folder, lower, upper, epochs, spied, lr, omega_lr, clip, refine,
            ratio, num_answers, omega_loss, max_log_ratio, correction, k_gen):
    """Full-batch Algorithm 1 in float64, straight from Eqs. PBGD-1 and PBGD-2."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lower, upper = ([tokenise(tokenizer, row) for row in rows] for rows in (lower, upper))
    model, theta, moments = load_float64(folder, adapter_folder)
    hat, hat_theta, hat_moments = load_float64(folder, adapter_folder)
    size, logits = len(lower), torch.zeros(len(lower), dtype=torch.float64, requires_grad=True)

    def answers_of(refresh, i):
        made = spied.answers[refresh][1][i]
        return [(torch.tensor(row["input_ids"]), row["trained"].index(1))
                for row in made.rows], made.old_logps.tolist()

    def lower_loss(model, i, refresh, used=None):
        """Row i's loss; with a list `used`, answers weighted by their ratio, and [(r, clamped)]."""
        if not spied.masks[refresh][i] or refine == "original":
            return mean_loss(model, lower[i])
        if refine == "drop":
            return torch.zeros((), dtype=torch.float64)
        if refine == "accept":
            masked = spied.masks[refresh].nonzero().flatten().tolist()
            (way, weight), (ids, start) = decide(masked, refresh)[i], lower[i]
            if way is None:
                return torch.zeros((), dtype=torch.float64)
            row = (ids[:-1], start) if way == "prefix" else (
                torch.cat([ids[:start], torch.tensor([40 + i, 50, 60 + i, 0])]), start)
            loss = -token_logps(model, row).mean()
            return loss if used is None else weight * loss
        answers, old = answers_of(refresh, i)
        losses = [-token_logps(model, y).mean() for y in answers]
        if used is None:
            return sum(losses) / num_answers
        sums = [token_logps(model, y).sum().item() for y in answers]
        mine = []
        for now, before in zip(sums, old, strict=True):
            log_r = {"sequence": now - before, "lambda": now + math.log(num_answers)
                     - math.log(sum(math.exp(other) for other in sums))}[ratio]
            over = ratio != "lambda" and abs(log_r) > max_log_ratio
            mine.append((math.exp(math.copysign(max_log_ratio, log_r) if over else log_r), over))
        used += mine
        return sum(r * loss for (r, _), loss in zip(mine, losses, strict=True)) / num_answers

    def all_losses(model, refresh, used=None):
        return torch.stack([lower_loss(model, i, refresh, used) for i in range(size)])

    record = []
    for k in range(epochs):
        rho, refresh, used = 0.1 + 0.1 * k, k // k_gen, []
        gamma = rho / (1 - rho)
        if refine == "generate":
            assert sorted(spied.answers[refresh][1]) == spied.masks[refresh].nonzero(
                ).flatten().tolist()
            if k % k_gen == 0:  # pi_old is the model of this step, at temperature 1
                with torch.no_grad():
                    for i, logps in spied.true[refresh].items():
                        mine = [token_logps(model, y).sum() for y in answers_of(refresh, i)[0]]
                        torch.testing.assert_close(logps, torch.stack(mine), rtol=1e-6, atol=1e-6)
        # theta (PBGD-1, scaled by 1 - rho): (1 - rho) L_val + rho mean_i N sigma_i (1/G) sum r L
        sigma = torch.softmax(logits.detach(), dim=0)
        val = sum(mean_loss(model, row) for row in upper) / len(upper)
        losses = all_losses(model, refresh, used)
        with torch.no_grad():
            plain = all_losses(model, refresh)
        objective = (1 - rho) * val + rho * (sigma * losses).sum()
        hat_objective = (sigma * all_losses(hat, refresh)).sum()
        norm = adam_step(objective, theta, moments, k, lr, clip)
        adam_step(hat_objective, hat_theta, hat_moments, k, lr, clip)
        # omega (PBGD-2): gamma mean_i N sigma_i C_i, C the plain mean over answers
        with torch.no_grad():
            C = all_losses(model, refresh) if omega_loss == "next" else plain
            C = C - correction * all_losses(hat, refresh)
        penalised = gamma * (torch.softmax(logits, dim=0) * C).sum()
        (gradient,) = torch.autograd.grad(penalised, logits)
        with torch.no_grad():
            logits -= omega_lr * gradient
        record.append({"omega": logits.detach().clone(), "upper_loss": val.item(), "rho": rho,
                       "lower_loss": (sigma * losses).sum().item(), "loss": objective.item(),
                       "grad_norm": norm, "ratio_clamped": sum(over for _, over in used),
                       "ratio_mean": sum(r for r, _ in used) / len(used) if used else None,
                       "ratio_max": max(r for r, _ in used) if used else None})
    return record, {name: p.detach() for name, p in theta.items()}


CASES = {
    "G = 1": {"num_answers": 1},
    "G = 5, NeoX": {"num_answers": 5, "model": "neox", "micro_batch": 3},
    "G = 5, dynamic, loss at theta^k": {"num_answers": 5, "mask": "dynamic",
                                        "omega_loss": "current", "micro_batch": 7},
    "clamped": {"num_answers": 2, "max_log_ratio": 0.3},
    "lambda": {"num_answers": 3, "ratio": "lambda", "micro_batch": 4},
    "corrected": {"num_answers": 2, "correction": 0.6},
    "drop": {"refine": "drop"},
    "original": {"refine": "original"},
    "accept": {"refine": "accept", "correction": 0.6},
    "accept, dynamic": {"refine": "accept", "mask": "dynamic", "micro_batch": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_eq_online_run_in_float64(online, files, folders, adapters, spied, decided, case):
    """Algorithm 1, Eqs. PBGD-1 and PBGD-2: three full-batch steps of theta and omega, three of
    seven rows masked, refreshes before the first and the third, ratios not one, clipping active.
    accept: an accepted answer with its weight, a prefix without an end, and a dropped row."""
    options = {"mask": "static", "refine": "generate", "ratio": "sequence", "num_answers": 1,
               "omega_loss": "next", "max_log_ratio": 5.0, "correction": 0.0, "lr": 3e-3,
               "omega_lr": 2.0, "clip": 0.7, "k_gen": 2, "micro_batch": 2} | CASES[case]
    model = options.pop("model", "llama")
    paths, spied.shift = files(lower=7, upper=7), 0.7
    upper = read_rows(paths["upper"])
    run = online(paths, model, adapter=adapters[model], dtype="float64", batch=7, epochs=3,
                 ratio_masked=0.43, template=tokens.TEMPLATE, **options)
    for name in ("mask", "micro_batch"):
        del options[name]
    record, theta = by_hand(folders[model], adapters[model], read_rows(paths["lower"]),
                            upper, 3, spied, **options)
    assert [int(mask.sum()) for mask in spied.masks] == [3, 3] and len(run.metrics) == 3
    for k, (found, expected) in enumerate(zip(run.metrics, record, strict=True)):
        torch.testing.assert_close(omega(run, k + 1), expected["omega"], rtol=1e-6, atol=1e-7)
        for key, value in expected.items():
            if key == "omega":
                continue
            assert found[key] == (value if value is None else pytest.approx(value, rel=1e-6)), (
                k, key)
    assert record[0]["grad_norm"] > 0.7  # the clip had something to do
    saved = adapter(run)
    assert len(saved) == len(theta)
    for name, value in theta.items():
        torch.testing.assert_close(saved[name.replace(".default", "")], value, rtol=1e-5,
                                   atol=3e-3 * 1e-4, msg=name)
    if options["refine"] == "generate" and options["ratio"] == "sequence":
        assert all(abs(step["ratio_mean"] - 1) > 1e-3 for step in record)
    assert (record[0]["ratio_clamped"] > 0) == (case == "clamped")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-6), ("float32", 1e-4)])
def test_eq_ratio_is_one_right_after_a_refresh(online, files, adapters, dtype, tolerance):
    """Choice 10: old log-probs are scored by the training forward, so r = 1 to 1e-6 at the step of
    the refresh (float32: to its rounding of a sum), whatever the temperature; later it is not."""
    paths = files(lower=12, upper=8)
    options = {"adapter": adapters["llama"], "dtype": dtype, "batch": 6, "epochs": 2, "lr": 1e-2,
               "num_answers": 3, "temperature": 0.5, "max_new_tokens": 12, "ratio_masked": 0.5,
               "micro_batch": 4}
    fresh = online(paths, out="fresh", k_gen=1, **options)
    assert len(fresh.metrics) == 4
    for step in fresh.metrics:
        assert step["ratio_mean"] == pytest.approx(1, abs=tolerance)
        assert step["ratio_max"] == pytest.approx(1, abs=tolerance)
        assert step["ratio_ess"] == pytest.approx(3 * 6 * step["masked_share"], rel=tolerance)
        assert step["ratio_clamped"] == 0
    used = online(paths, out="used", k_gen=9, **options)
    assert abs(used.metrics[-1]["ratio_mean"] - 1) > 0.01


def test_eq_ratio_flags():
    """r and G lambda: (n, G) log-probs, by their formulas."""
    now = torch.tensor([[-3.0, -8.0], [-2.0, -2.5]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-3.5, -7.0], [-9.0, -2.5]], dtype=torch.float64)
    found = {}
    for flag in ("sequence", "lambda"):
        r, count = train_online.answer_weights(flag, now, old, 2.0)
        assert not r.requires_grad and r.dtype == torch.float64
        found[flag] = r.tolist(), count
    e = math.exp
    for flag, rows, count in (
            ("sequence", [[e(0.5), e(-1)], [e(2), 1]], 1),
            ("lambda", [[2 * e(-3) / (e(-3) + e(-8)), 2 * e(-8) / (e(-3) + e(-8))],
                        [2 * e(-2) / (e(-2) + e(-2.5)), 2 * e(-2.5) / (e(-2) + e(-2.5))]], 0)):
        assert found[flag][1] == count
        for mine, theirs in zip(found[flag][0], rows, strict=True):
            assert mine == pytest.approx(theirs), flag


def test_ratios_that_overflow(online, files, spied, refused, tmp_path):
    """Log-ratios of ten thousand nats: clamped and counted; without a clamp, one clear line."""
    spied.shift = 1e5
    paths = files(lower=9, upper=6)
    run = online(paths, batch=9, epochs=2, ratio_masked=0.4, num_answers=2, max_log_ratio=3)
    step = run.metrics[0]
    assert step["ratio_clamped"] == 8 and step["ratio_max"] <= math.exp(3) * (1 + 1e-6)
    assert all(math.isfinite(value) for value in run.result.values() if isinstance(value, float))
    line = refused(lambda: online(paths, out="free", batch=9, epochs=2, ratio_masked=0.4,
                                  num_answers=2, max_log_ratio="inf"))
    assert "step 0: the loss or its gradient is not finite" in line and "lower --lr" in line
    assert not (tmp_path / "free" / "curated.jsonl").exists()


# --- the controls ---------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [
    {"dtype": "float64", "omega_lr": 5}, {"omega_optimizer": "adam", "omega_lr": 0.1,
                                          "center": True, "omega_loss": "current"},
    {"correction": 0.7, "omega_lr": 5, "schedule": "cosine"}],
    ids=["float64", "adam, centred, current", "corrected"])
def test_original_is_offline_selection_bit_for_bit(train, online, files, adapters, options):
    """`--refine original` at any mask: theta, omega after every epoch, and each logged number."""
    paths = files(lower=19, upper=9)
    options = {"batch": 8, "micro_batch": 3, "epochs": 4, "lr": 5e-3, "rho_start": 0.4,
               "adapter": adapters["llama"]} | options
    bds = train(paths, out="bds", **options)
    run = online(paths, out="online", refine="original", mask="dynamic", k_gen=2, **options)
    for name in ("adapter/adapter_model.safetensors", *(f"weights/epoch_{e}.safetensors"
                                                        for e in (1, 2, 3, 4))):
        assert (bds.out / name).read_bytes() == (run.out / name).read_bytes(), name
    for a, b in zip(bds.metrics, run.metrics, strict=True):
        assert [key for key in a if a[key] != b[key] and not key.startswith("time/")] == []
    for key in ("upper_heldout", "lower_original", "base/auroc"):
        assert bds.result.get(key) == run.result.get(key)
    assert [e["row_id"] for e in bds.weights] == [e["row_id"] for e in run.weights]
    assert run.result["answers_generated"] == 0


def test_drop_reads_nothing_of_a_masked_row(online, files, tmp_path):
    """Other responses in the masked rows: the same theta and omega, bit for bit. All masked rows
    get the same omega, from the softmax's common part alone; with `original` both differ."""
    paths = files(lower=13, upper=6)
    options = {"batch": 5, "epochs": 2, "lr": 1e-2, "omega_lr": 20, "ratio_masked": 0.4}
    first = online(paths, out="first", refine="drop", **options)
    masked = {e["row_id"] for e in first.weights if e["masked"]}
    rows = read_rows(paths["lower"])
    changed = [row | ({"response": "light river stone"} if i in masked else {})
               for i, row in enumerate(rows)]
    other = paths | {"lower": write_rows(tmp_path / "other.jsonl", changed)}
    second = online(other, out="second", refine="drop", **options)
    name = "adapter/adapter_model.safetensors"
    assert len(masked) == 5
    assert (first.out / name).read_bytes() == (second.out / name).read_bytes()
    assert torch.equal(omega(first, 2), omega(second, 2))
    assert len(set(omega(first, 2)[sorted(masked)].tolist())) == 1
    assert len(set(omega(first, 2).tolist())) > 5
    a, b = (online(p, out=f"{i}", refine="original", **options) for i, p in enumerate(
        (paths, other)))
    assert (a.out / name).read_bytes() != (b.out / name).read_bytes()
    for step in first.metrics:
        assert step["lower_loss_masked"] is None and step["ratio_mean"] is None
        assert "answers" not in step


@pytest.mark.parametrize("correction", [0.0, 1.0])
def test_drop_with_every_row_masked_is_the_upper_level_alone(online, files, correction):
    """Nothing is left of the lower level, also where theta_hat would descend it."""
    run = online(files(lower=7, upper=6), refine="drop", ratio_masked=1, batch=4, micro_batch=2,
                 epochs=2, correction=correction)
    assert [step["lower_loss"] for step in run.metrics] == [0.0] * 4
    assert set(omega(run, 2).tolist()) == {0.0}
    assert all(step["lower_loss_unmasked"] is None for step in run.metrics)


# --- masks ----------------------------------------------------------------------------------------

def test_static_mask_is_drawn_once(online, files, spied):
    """Exactly round(R N) rows, the same at every refresh; another seed draws others."""
    paths = files(lower=20, upper=6)
    options = {"batch": 5, "epochs": 2, "k_gen": 2, "omega_lr": 50}
    run = online(paths, **options)
    assert [int(mask.sum()) for mask in spied.masks] == [6] * 4
    assert all(torch.equal(mask, spied.masks[0]) for mask in spied.masks)
    churn = [step["mask_churn"] for step in run.metrics if "mask_churn" in step]
    assert churn == [1.0, 0.0, 0.0, 0.0]
    first = spied.masks[0]
    online(paths, out="other", seed=1, **options)
    assert not torch.equal(spied.masks[-1], first)


def test_dynamic_mask_is_the_bottom_of_the_current_weights(online, files, spied):
    """Eq. of the dynamic mask: at a refresh the R N smallest sigma(omega).

    A refresh every epoch, so omega at the refresh is the file of the epoch before."""
    paths = files(lower=20, upper=6)
    run = online(paths, mask="dynamic", batch=5, epochs=5, k_gen=4, omega_lr=60, lr=5e-3,
                 rho_start=0.5, rho_step=0, ratio_masked=0.25)
    assert [int(mask.sum()) for mask in spied.masks] == [5] * 5
    churn = [1.0]
    for epoch in range(1, 5):
        bottom = torch.zeros(20, dtype=torch.bool)
        bottom[omega(run, epoch).argsort()[:5]] = True
        before, mask = spied.masks[epoch - 1:epoch + 1]
        assert torch.equal(mask, bottom)
        churn.append(int((mask & ~before).sum()) / int(mask.sum()))
    assert churn[1] > 0 and len(set(omega(run, 1).tolist())) > 15
    assert [step["mask_churn"] for step in run.metrics[::4]] == pytest.approx(churn)
    assert sum("mask_churn" in step for step in run.metrics) == 5
    # Each step's share of masked rows, with the mask of its refresh.
    for step in run.metrics:
        rows = batches.permutation(20, 0, step["epoch"], stream=0)[step["step"] % 4 * 5:][:5]
        share = spied.masks[step["step"] // 4][rows].double().mean().item()
        assert step["masked_share"] == pytest.approx(share)
    assert {e["row_id"] for e in run.weights if e["masked"]} == set(
        spied.masks[-1].nonzero().flatten().tolist())


def test_the_first_dynamic_mask_is_a_random_one(online, files, spied):
    """All weights are equal: the rows that come first in the file are not the masked ones."""
    for seed in (0, 1):
        online(files(lower=30, upper=6), out=f"{seed}", mask="dynamic", batch=30, epochs=1,
               seed=seed)
    first, second = (mask.nonzero().flatten().tolist() for mask in spied.masks)
    assert first != second and first != list(range(9)) != second


def test_first_refresh_trains_on_the_originals_until_then(online, files, refused):
    """Deviation 9: up to step K the run is `--refine original`, number by number, with no mask."""
    paths = files(lower=16, upper=6)
    options = {"batch": 4, "epochs": 3, "lr": 1e-2, "omega_lr": 5, "ratio_masked": 0.5}
    late = online(paths, out="late", first_refresh=5, k_gen=3, **options)
    plain = online(paths, out="plain", refine="original", k_gen=3, **options)
    assert [step["step"] for step in late.metrics if "answers" in step] == [5, 8, 11]
    for a, b in zip(late.metrics[:5], plain.metrics[:5], strict=True):
        assert a["masked_share"] == 0 and a["lower_loss_masked"] is None
        assert {k: v for k, v in a.items() if "time/" not in k and "mask" not in k} == {
            k: v for k, v in b.items() if "time/" not in k and "mask" not in k}
    assert late.metrics[5]["ratio_mean"] is not None
    assert late.metrics[5]["lower_loss"] != plain.metrics[5]["lower_loss"]
    assert "the run has 12 steps, so no row would ever be masked" in refused(
        lambda: online(paths, out="never", first_refresh=12, **options))


# --- what is generated ----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["static", "dynamic"])
def test_window_and_all_train_the_same(online, files, adapters, spied, monkeypatch, mask):
    """Choice 11: same answers, same theta and omega, fewer generations than all masked rows need.

    A refresh every 2 of 6 steps: all answers N R G each time, the window one third of them over an
    epoch, the saving N / min(N, K_gen batch) = 3. Equal up to rounding: an answer is scored in a
    pack with other answers, and the products of packs of other sizes round differently.
    """
    paths = files(lower=24, upper=8)
    options = {"adapter": adapters["llama"], "batch": 4, "epochs": 2, "k_gen": 2, "lr": 5e-3,
               "omega_lr": 5, "num_answers": 2, "ratio_masked": 0.5, "mask": mask,
               "dtype": "float64"}
    runs, made = {}, {}
    for kind in ("all", "window"):
        spied.answers.clear()
        with monkeypatch.context() as patched:
            if kind == "all":
                patched.setattr(batches, "coming_rows", lambda num_rows, *_: range(num_rows))
            runs[kind] = online(paths, out=kind, **options)
        made[kind] = dict(spied.answers)
    assert list(made["all"]) == [0, 2, 4, 6, 8, 10]
    assert torch.equal(torch.stack(spied.masks[:6]), torch.stack(spied.masks[6:]))
    for step, many in made["all"].items():
        few = made["window"].get(step, {})  # no masked row is read: nothing is answered
        epoch, k = divmod(step, 6)
        read = batches.permutation(24, 0, epoch, stream=0)[4 * k:4 * k + 8].tolist()
        masked = spied.masks[step // 2].nonzero().flatten().tolist()
        assert sorted(many) == masked and sorted(few) == sorted(set(masked) & set(read))
        for p, answers in few.items():
            assert answers.rows == many[p].rows
    for a, b in zip(*(runs[kind].metrics for kind in runs), strict=True):
        for key in ("loss", "grad_norm", "ratio_mean", "lower_loss_masked", "upper_loss"):
            assert a[key] == (None if b[key] is None else pytest.approx(b[key], rel=1e-8)), key
    for name, value in adapter(runs["window"]).items():
        torch.testing.assert_close(value, adapter(runs["all"])[name], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(omega(runs["window"], 2), omega(runs["all"], 2), rtol=1e-7,
                               atol=1e-9)
    counts = {kind: runs[kind].result["answers_generated"] for kind in runs}
    assert counts["all"] == 6 * 12 * 2
    assert counts["window"] == sum(len(few) for few in made["window"].values()) * 2
    for kind, run in runs.items():
        assert sum(step.get("answers", 0) for step in run.metrics) == counts[kind]
    if mask == "static":  # every masked row is read once an epoch
        assert counts["all"] == 3 * counts["window"]
    assert ("12 rows masked; a refresh every 2 steps answers about 4 of them 2 times"
            ) in runs["window"].text
    print(mask, counts)


def test_a_window_without_masked_rows(online, files):
    """K_gen 1 and one masked row in twelve: most refreshes have nothing to answer."""
    run = online(files(lower=12, upper=6), k_gen=1, ratio_masked=0.08, batch=4, epochs=2)
    assert [step["answers"] for step in run.metrics].count(1) == 2
    assert run.result["answers_generated"] == 2 and len(run.metrics) == 6
    for step in run.metrics:
        assert (step["ratio_mean"] is None) == (step["answers"] == 0)


def test_a_model_that_only_ends(online, files, tmp_path):
    """Empty answers are legal: counted, trained on, ranked, never recommended."""
    only_ends(make_neox()).save_pretrained(tmp_path / "ends")
    make_tokenizer().save_pretrained(tmp_path / "ends")
    run = online(files(lower=9, upper=6), tmp_path / "ends", batch=3, epochs=2, num_answers=2,
                 k_gen=2, ratio_masked=0.5, lr=1e-4)
    seen = [step for step in run.metrics if step.get("answers")]
    assert len(seen) == 3
    for step in seen:
        assert step["answers_empty"] == step["answers_complete"] == step["answer_length"] == 1.0
    assert run.metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    refined = [entry for entry in run.curated if entry["refined"] is not None]
    assert len(refined) == 4 and {(e["refined"], e["recommended"]) for e in refined} == {
        ("", "original")}


def test_answers_carry_no_end_when_they_are_cut(online, files, spied):
    """A cut answer trains without an end token; a complete one ends in it; prompts are kept."""
    run = online(files(lower=16, upper=6), batch=8, epochs=2, ratio_masked=1.0, num_answers=4,
                 max_new_tokens=30, temperature=1.5)
    complete, rows = 0, []
    for (_, made), written in zip(spied.answers, spied.written, strict=True):
        rows = [row for answers in made.values() for row in answers.rows]
        for row, (drawn, done) in zip(rows, written, strict=True):
            start = row["trained"].index(1)
            assert row["input_ids"][start:] == drawn and set(row["trained"][start:]) == {1}
            assert drawn.count(0) == (drawn[-1] == 0) == done and (done or len(drawn) == 30)
            complete += done
    assert 0 < complete < len(rows) * len(spied.answers)
    (step, *_), (written, *_) = run.metrics, spied.written  # what the log says of them
    sizes = [len(tokens) for tokens, _ in written]
    assert step["answer_length"] == pytest.approx(sum(sizes) / len(sizes))
    assert step["answers_complete"] == pytest.approx(sum(done for _, done in written) / len(sizes))
    assert step["answers_empty"] == pytest.approx(sizes.count(1) / len(sizes))


def test_every_refresh_draws_new_answers_and_a_run_repeats(online, files, spied):
    """Seeded by (seed, refresh, row, g)."""
    paths = files(lower=8, upper=6)
    options = {"batch": 4, "epochs": 2, "k_gen": 2, "ratio_masked": 1.0, "num_answers": 3, "lr": 0}
    for seed in (0, 0, 1):
        online(paths, out=f"run{len(spied.answers)}", seed=seed, **options)
    texts = [{p: [tuple(row["input_ids"]) for row in a.rows] for p, a in made.items()}
             for _, made in spied.answers]
    assert len(texts) == 6 and texts[:2] == texts[2:4]
    assert all(len(set(rows)) > 1 for rows in texts[0].values())  # the G draws differ
    for one, other in ((texts[0], texts[1]), (texts[0], texts[4])):
        assert all(one[p] != other[p] for p in one)


def test_temperature_reaches_the_sampler(online, files, monkeypatch):
    seen, write = [], train_online.generate

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return write(*args, **kwargs)

    monkeypatch.setattr(train_online, "generate", spy)
    online(files(lower=6, upper=6), batch=6, epochs=1, temperature=0.37, max_new_tokens=5,
           generation_batch=3)
    assert {k: seen[0][k] for k in ("temperature", "max_new_tokens", "batch_size", "end_ids")} == {
        "temperature": 0.37, "max_new_tokens": 5, "batch_size": 3, "end_ids": {0}}


# --- both architectures, with and without a chat template -----------------------------------------

@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("model", ["llama", "neox"])
def test_architectures_and_templates(online, files, folders, tmp_path, spied, model, chat):
    """One short run each: the rows, the answers and the log in terms of the template's tokens."""
    folder = copy_tree(folders[model], tmp_path / "model")
    make_tokenizer(CHATML if chat else None).save_pretrained(folder)
    if not chat:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    run = online(files(lower=12, upper=6, lower_heldout=3), folder, batch=4, epochs=2, k_gen=2,
                 num_answers=2, max_new_tokens=20, ratio_masked=0.5, mask="dynamic",
                 omega_lr=20)
    assert ("<|im_start|>assistant" in run.text) == chat
    tokenizer = make_tokenizer()
    for _, made in spied.answers:
        for answers in made.values():
            prompts = {tuple(row["input_ids"][:row["trained"].index(1)]) for row in answers.rows}
            (prompt,) = (tokenizer.decode(p) for p in prompts)
            assert prompt.endswith("<|im_start|>assistant\n" if chat else "\nAssistant:")
    assert len(run.curated) == len(run.weights) == 12
    assert run.metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-4)
    for entry in run.curated:
        assert not any(special in (entry["refined"] or "") for special in SPECIALS)
    keys = {"upper_loss", "lower_loss", "loss", "lower_loss_masked", "lower_loss_unmasked",
            "ratio_mean", "ratio_max", "ratio_ess", "ratio_clamped", "masked_share", "grad_norm",
            "tokens", "lr", "rho", "epoch", "step", "time/step"}
    for step in run.metrics:
        assert keys <= set(step)
        refresh = step["step"] % 2 == 0
        assert ("mask_churn" in step) == ("answers" in step) == ("time/generate" in step) == refresh
        if step["ratio_ess"] is not None:
            assert 1 <= step["ratio_ess"] <= 2 * 4 * step["masked_share"] + 1e-4
    for key in ("upper_heldout", "lower_heldout", "lower_original", "lower_kept"):
        assert math.isfinite(run.result[key])


def test_what_the_log_says_of_a_step_by_hand():
    """Four rows, the last two masked, one of them without an answer; two ratios of one question."""
    said = train_online.step_metrics(
        0.25, torch.tensor([1.0, 3, 2, 0]), torch.tensor([2.0, 4]), torch.tensor([1.0, 2, 5, 9]),
        torch.tensor([1.0, 2, 6, 0]), torch.tensor([False, False, True, True]),
        torch.tensor([True, True, True, False]), torch.tensor([[1.0, 3.0]]), 1)
    assert said == pytest.approx({
        "upper_loss": 3, "lower_loss": 19 / 4, "loss": 0.25 * 19 / 4 + 0.75 * 3,
        "lower_loss_masked": 5, "lower_loss_unmasked": 1.5, "masked_share": 0.5,
        "ratio_mean": 2, "ratio_max": 3, "ratio_ess": 16 / 10, "ratio_clamped": 1})


def test_chat_answers_end_with_the_turn_or_with_eos(folders, files, tmp_path):
    """End tokens: EOS and what complete rows end in; of a plain template EOS alone."""

    paths = files(lower=5)
    for chat, ends in ((None, {"<eos>"}), (CHATML, {"<eos>", "<|im_end|>"})):
        tokenizer = make_tokenizer(chat)
        rows, _ = tokens.load_rows(paths["lower"], tokenizer, name="lower",
                                   cache_dir=tmp_path / "cache")
        assert curate.end_tokens(rows, tokenizer) == {
            tokenizer.convert_tokens_to_ids(end) for end in ends}


def test_preference_pairs_as_the_upper_level(online, files, tmp_path):
    """--upper-loss dpo: log 2 at the start, the tokens of both sides counted; then each beta's."""
    paths = files(lower=8, upper=0, heldout=0)
    for name, seed in (("upper", 2), ("heldout", 3)):
        pairs = [{"prompt": a["prompt"], "chosen": a["response"], "rejected": b["response"]}
                 for a, b in zip(make_rows(6, seed), make_rows(6, seed + 50), strict=True)]
        paths[name] = write_rows(tmp_path / f"{name}.jsonl", pairs)
    run = online(paths, upper_loss="dpo", batch=4, micro_batch=3, epochs=2, lr=5e-3)
    assert run.metrics[0]["upper_loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert run.metrics[-1]["upper_loss"] < math.log(2) and len(run.curated) == 8
    norms = []
    for beta in (0.01, 1e4):  # one step, the same pairs: the loss is log 2, its gradient is beta's
        one = online(paths, upper_loss="dpo", batch=4, epochs=1, dpo_beta=beta, out=f"beta{beta}")
        norms.append(one.metrics[0]["grad_norm"])
    assert norms[1] > 100 * norms[0]


# --- the value-function correction ----------------------------------------------------------------

def test_correction_leaves_theta_alone(online, train, files, adapters):
    """With omega frozen, theta with and without theta_hat is the same, bit for bit, on generated
    answers and offline."""
    paths = files(lower=11, upper=6)
    options = {"adapter": adapters["llama"], "batch": 4, "epochs": 2, "lr": 5e-3, "omega_lr": 0}
    for name, main in (("online", online), ("offline", train)):
        runs = [main(paths, out=f"{name}{a}", correction=a, **options) for a in (0.0, 1.0)]
        adapters_ = [(run.out / "adapter/adapter_model.safetensors").read_bytes() for run in runs]
        assert adapters_[0] == adapters_[1]
        for a, b in zip(*(run.metrics for run in runs), strict=True):
            assert [k for k in a if a[k] != b[k] and not k.startswith("time/")] == []


CONTESTED = [{"prompt": "one", "response": "a"}, {"prompt": "one", "response": "b"}]
CONSISTENT = [{"prompt": "two", "response": "c"}, {"prompt": "ten", "response": "d"}]


@pytest.mark.parametrize("kind", ["offline", "online"])
def test_eq_correction_where_the_lower_minimum_is_known(train, online, tmp_path, monkeypatch,
                                                        kind):
    """Deviation 7: two answers contradict each other under one prompt, so no model does better
    than log 2 on the token in question (log 2 / 3 a token: the space before it and the EOS behind
    are certain); two other rows are consistent, their minimum is zero. With A = 1, C = L - L_hat
    tends to zero on all four; with A = 0 to those minima, and omega pushes the contested rows down
    for what no model can change. Weights stay uniform while the adapters learn."""
    model = make_llama()
    with torch.no_grad():
        model.lm_head.weight *= 2  # a frozen head that can be certain
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    paths = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in {
        "lower": CONTESTED + CONSISTENT, "upper": [{"prompt": "six", "response": "e"}],
        "heldout": [{"prompt": "sky", "response": "f"}]}.items()}
    seen, step = [], selector.Selector.step

    def spy(self, rows, losses, gamma):
        seen.append(losses[rows.argsort()].tolist())
        step(self, rows, losses, gamma)

    monkeypatch.setattr(selector.Selector, "step", spy)
    main, options = (train, {"skip_scores": True}) if kind == "offline" else (online, {
        "refine": "original", "ratio_masked": 0.5})
    last, weights = {}, {}
    for correction in (0.0, 1.0):
        seen.clear()
        main(paths, tmp_path / "model", out=f"{correction}", correction=correction, batch=4,
             epochs=80, lr=1e-2, schedule="cosine", lora_rank=4, omega_lr=0, rho_start=0.5,
             rho_step=0, save_every=1000, **options)
        assert len(seen) == 80
        last[correction] = seen[-1]
        # What omega makes of the second half, when both adapters have learnt what there is.
        omega = selector.Selector(4, 0.2, "sgd")
        for losses in seen[40:]:
            step(omega, torch.arange(4), torch.tensor(losses), 1.0)
        weights[correction] = omega.weights().tolist()
    floor = math.log(2) / 3
    assert last[0.0] == pytest.approx([floor, floor, 0, 0], abs=0.03)
    assert last[1.0] == pytest.approx([0, 0, 0, 0], abs=0.03)
    assert max(weights[0.0][:2]) < 0.85 and min(weights[0.0][2:]) > 1.15
    assert weights[1.0] == pytest.approx([1, 1, 1, 1], abs=0.05)


# --- bad input ------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"ratio_masked": 0}, r"--ratio-masked 0.0: R must lie in \(0, 1\]"),
    ({"ratio_masked": 1.01}, r"--ratio-masked 1.01: R must lie in \(0, 1\]"),
    ({"ratio_masked": -0.1}, r"--ratio-masked -0.1: R must"),
    ({"ratio_masked": "nan"}, r"--ratio-masked nan: R must"),
    ({"ratio_masked": 0.02}, r"--ratio-masked 0.02: masks none of 12 rows"),
    ({"num_answers": 0}, r"--num-answers 0: must be 1 or more"),
    ({"k_gen": 0}, r"--k-gen 0: must be 1 or more"),
    ({"k_gen": -5}, r"--k-gen -5: must be 1 or more"),
    ({"max_new_tokens": 0}, r"--max-new-tokens 0: must be 1 or more"),
    ({"generation_batch": 0}, r"--generation-batch 0: must be 1 or more"),
    ({"first_refresh": -1}, r"--first-refresh -1: a step, 0 or more"),
    ({"temperature": 0}, r"--temperature"),
    ({"temperature": -1}, r"--temperature"),
    ({"temperature": "nan"}, r"--temperature"),
    ({"temperature": "inf"}, r"--temperature"),
    ({"max_log_ratio": 0}, r"--max-log-ratio"),
    ({"max_log_ratio": "nan"}, r"--max-log-ratio"),
    ({"turns": "all"}, r"--turns all: an online run"),
    ({"skip_scores": True}, r"--skip-scores: only they rank .*; leave it out"),
    ({"max_new_tokens": 120}, r"--max-new-tokens 120: behind the longest prompt, \d+ tokens, it "
                              r"exceeds the context of 128"),
    ({"max_new_tokens": 120, "refine": "drop"}, r"--max-new-tokens 120: behind the longest"),
    ({"rho_start": 0.9, "epochs": 3}, r"--epochs 3: rho must lie inside \(0, 1\)"),
], ids=lambda value: None if isinstance(value, str) else " ".join(
    f"{k} {v}" for k, v in value.items()))
def test_bad_input(online, files, refused, tmp_path, options, message):
    """Exit code 2, one line, before a run folder is made."""
    paths = files()
    before = listing(tmp_path)
    line = refused(lambda: online(paths, **{"batch": 4, "epochs": 1} | options))
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()
    assert not [n for n in listing(tmp_path) if n not in before and not n.startswith("cache/")]


def test_the_largest_limit_that_fits_is_accepted(online, files, refused):
    """One token more is refused: prompts are counted with their template."""
    paths = files(lower=6, upper=6)
    line = refused(lambda: online(paths, max_new_tokens=127, batch=6, epochs=1))
    longest = int(re.search(r"prompt, (\d+) tokens", line)[1])
    run = online(paths, max_new_tokens=128 - longest, batch=6, epochs=1)
    assert run.result["answers_generated"] == 2
    refused(lambda: online(paths, out="b", max_new_tokens=129 - longest, batch=6, epochs=1))


@pytest.mark.parametrize("omega_loss", ["next", "current"])
def test_a_loss_that_is_not_finite(online, files, refused, tmp_path, omega_loss):
    """A rate of 1e30, also in the only step of a run: nothing is written from such a model."""
    for batch in (4, 12):
        line = refused(lambda batch=batch: online(
            files(lower=12), out=f"run{batch}", batch=batch, epochs=1, lr=1e30,
            omega_loss=omega_loss))
        assert re.search("not finite| is nan", line) and "lower --lr" in line
        run = tmp_path / f"run{batch}"
        assert not {"adapter", "weights.jsonl", "curated.jsonl", "result.json"} & {
            path.name for path in run.iterdir()}
        for row in read_rows(run / "metrics.jsonl"):
            assert all(not isinstance(v, float) or math.isfinite(v) for v in row.values())


# --- the command line -----------------------------------------------------------------------------

def test_every_flag_is_read_somewhere(monkeypatch):
    """The flags of this script alone; those of options.py have a test of their own."""
    made, parse = [], options.parse
    monkeypatch.setattr(options, "parse", lambda parser, *rest: made.append(parser) or parse(
        parser, *rest))
    train_online.parse_args([])
    train_offline.parse_args([])
    mine, theirs = ({action.dest for action in parser._actions} for parser in made)
    sources = "".join((ROOT / name).read_text() for name in ("train_online.py", "curate.py"))
    body = sources[sources.index("def sampling_options"):]
    unread = [flag for flag in mine - theirs if not re.search(rf"\bargs\.{flag}\b", body)]
    assert len(mine - theirs) == 11 and not unread


def test_dry_run_writes_nothing_and_prints_the_plan(online, files, tmp_path):
    run = online(files(lower=21, upper=9), batch=4, epochs=3, k_gen=2, num_answers=3, dry_run=True)
    assert not run.out.exists() and run.result is None and not (tmp_path / "run").exists()
    assert ("generation: 6 rows masked; a refresh every 2 steps answers about 2 of them 3 times"
            ) in run.text


def test_published_values_are_the_defaults():
    """Section 5 and appendix D, typed in from the paper."""
    args = train_online.parse_args(flags(preset="llama3-8b-quality", lower="a", upper="b"))
    for name, value in {"k_gen": 500, "temperature": 0.8, "max_new_tokens": 512, "num_answers": 1,
                        "generation_batch": 64, "mask": "static", "ratio_masked": 0.1,
                        "correction": 0.0, "refine": "generate", "ratio": "sequence"}.items():
        assert getattr(args, name) == value, name


SHARED = ROOT.parent / "shared"


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models" / "instruct-6m").exists(),
                    reason="needs a real model and rows in ../shared")
def test_real_model_and_rows(online, tmp_path):
    """A trained model and real answers with planted faults: to the end, with sane numbers."""
    paths = {}
    for name, file, count in (("lower", "alpaca_planted", 64), ("upper", "alpaca_gpt4_upper", 32),
                              ("heldout", "alpaca_gpt4_heldout", 48)):
        rows = (SHARED / "data" / f"{file}.jsonl").read_text().splitlines()[:count]
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("\n".join(rows) + "\n")
    run = online(paths, SHARED / "models" / "instruct-6m", max_length=192, batch=16, epochs=2,
                 k_gen=3, num_answers=2, max_new_tokens=48, lr=1e-3, allow_overlap=True)
    assert len(run.weights) == len(run.curated) > 50
    assert run.metrics[0]["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert 1 < run.result["upper_heldout"] < 6 and run.result["refined/threshold"] is not None
    assert generate.generate is train_online.generate


def test_safety_preset_generates_sixteen_at_a_time():
    given = ["--preset", "llama3-8b-safety"]
    assert train_online.parse_args(given).generation_batch == 16
    assert train_online.parse_args([*given, "--generation-batch", "8"]).generation_batch == 8
    assert train_online.parse_args(["--preset", "llama3-8b-quality"]).generation_batch == 64


def test_masked_rows_are_ranked_within_their_group_or_below():
    """A static mask's rows share the ranks evenly; a dynamic mask's come after all the others.

    A masked row counts by its original's implicit weight."""
    omega = torch.tensor([1.0, 5.0, 2.0, 9.0, 8.0, 7.0])
    masked = torch.tensor([False, False, False, True, True, True])

    def ranks(implicit, mask_is_ranked):
        return ranking.rank_rows(ranking.original_scores(omega, masked, implicit,
                                                         mask_is_ranked)).tolist()

    assert ranks(omega, False) == [5, 1, 3, 2, 4, 6]
    assert ranks(omega, True) == [3, 1, 2, 4, 5, 6]
    implicit = torch.tensor([0.0, 0.0, 0.0, -3.0, -1.0, -2.0])
    assert ranks(implicit, False) == [5, 1, 3, 6, 2, 4]
    assert ranks(implicit, True) == [3, 1, 2, 6, 4, 5]


def test_a_dynamic_mask_that_only_the_first_step_drew_is_ranked_like_a_static_one(online, files):
    """All weights are equal then: the mask is a random one, and its rows are not the worst."""
    ranked = {}
    for mask in ("static", "dynamic"):
        run = online(files(lower=12), out=mask, mask=mask, k_gen=50, ratio_masked=0.5)
        ranked[mask] = [row["rank"] for row in run.weights if row["masked"]]
        assert len(ranked[mask]) == 6
        assert ("a random mask" in run.text) == (mask == "dynamic")
        assert ("the untrained model writes all answers" in run.text) == (mask == "static")
    assert min(ranked["dynamic"]) < 7
    run = online(files(lower=12), out="two", mask="dynamic", k_gen=1, ratio_masked=0.5)
    assert "the only refresh" not in run.text
    assert min(row["rank"] for row in run.weights if row["masked"]) == 7
