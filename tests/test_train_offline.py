"""train_offline.py and session.py: whole runs on tiny models, against the paper's formulas.

Every test calls the command line's `main` and looks at what it printed, wrote, or did to theta.
The independent computation of a run (`by_hand`) uses each row alone in a plain forward, autograd
through a literal softmax for omega, and Adam written out.
"""

import argparse
import functools
import json
import math
import random
import re
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    copy_tree,
    flags,
    listing,
    make_llama,
    make_neox,
    make_rows,
    read_rows,
    write_rows,
)
from safetensors.torch import load_file

import batches
import logprobs
import models
import options
import ranking
import session
import train_offline
import train_online
import utils
from data import sets, tokens
from selector import penalty
from toy import corpus


def omega(run, epoch):
    return load_file(run.out / "weights" / f"epoch_{epoch}.safetensors")["omega"]


def adapter(run):
    return load_file(run.out / "adapter" / "adapter_model.safetensors")


# --- a run against the paper's formulas -----------------------------------------------------------

def tokenise(tokenizer, row):
    """Prompt and response apart, EOS at the end: (ids, prompt length)."""
    prompt, response = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (
        f"User: {row['prompt']}\nAssistant:", " " + row["response"]))
    return torch.tensor(prompt + response + [tokenizer.eos_token_id]), len(prompt)


def mean_loss(model, row):
    """-1/|y| sum_t log pi(y_t | x, y_<t) of one row in a plain forward."""
    ids, start = row
    logps = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], dim=-1)
    return -logps[torch.arange(start - 1, len(ids) - 1), ids[start:]].mean()


def load_float64(folder, adapter_folder):
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(model, adapter_folder, is_trainable=True).double()
    theta = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in theta.items()}
    return model, theta, moments


def adam_step(objective, theta, moments, k, lr, clip):
    """Step k of Adam as its paper writes it, on the clipped gradient; the norm before clipping."""
    gradients = dict(zip(theta, torch.autograd.grad(objective, list(theta.values())), strict=True))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    with torch.no_grad():
        for name, g in gradients.items():
            g = g * min(1.0, clip / (norm + 1e-6))
            m, v = moments[name]
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            theta[name] -= lr * (m / (1 - 0.9 ** (k + 1))) / (
                (v / (1 - 0.999 ** (k + 1))).sqrt() + 1e-8)
    return norm


def by_hand(folder, adapter_folder, lower, upper, epochs, lr, omega_lr, clip, omega_optimizer,
            omega_loss, batch, correction=0.0, dpo_beta=None):
    """BDS in float64, straight from the text: Eqs. BDS, PBGD-1, PBGD-2.

    Only the order of the rows is the project's own (it has tests of its own).
    With a correction A, theta_hat descends the weighted lower loss alone from the same start, and
    omega sees L_i(theta^{k+1}) - A L_i(theta_hat^{k+1}). With a beta the upper rows are pairs and
    L_val is the DPO loss, the base without an adapter its reference.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lower = [tokenise(tokenizer, row) for row in lower]
    model, theta, moments = load_float64(folder, adapter_folder)
    hat, hat_theta, hat_moments = load_float64(folder, adapter_folder)
    logits = torch.zeros(len(lower), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([logits], lr=omega_lr)

    def weighted(losses, rows, logits):  # mean of N sigma_i L_i over a batch; of all: the paper's
        return (len(lower) * torch.softmax(logits, dim=0)[rows] * losses).mean()

    def losses_of(model, rows):
        return torch.stack([mean_loss(model, lower[i]) for i in rows])

    if dpo_beta is None:
        upper = [tokenise(tokenizer, row) for row in upper]

        def val_loss(chosen):
            return sum(mean_loss(model, upper[i]) for i in chosen) / len(chosen)
    else:
        pairs = [[tokenise(tokenizer, {"prompt": row["prompt"], "response": row[side]})
                  for side in ("chosen", "rejected")] for row in upper]

        def log_ratio(pair):  # log pi(chosen) - log pi(rejected), sums over tokens
            chosen, rejected = (-mean_loss(model, row) * (len(row[0]) - row[1]) for row in pair)
            return chosen - rejected

        with torch.no_grad(), model.disable_adapter():
            reference = [log_ratio(pair) for pair in pairs]

        def val_loss(chosen):
            return sum(torch.log(1 + torch.exp(-dpo_beta * (log_ratio(pairs[i]) - reference[i])))
                       for i in chosen) / len(chosen)

    record, per_epoch = [], math.ceil(len(lower) / batch)
    for k in range(epochs * per_epoch):
        rows = batches.epoch_batch(len(lower), batch, 0, *divmod(k, per_epoch)).tolist()
        rho = 0.1 + 0.1 * (k // per_epoch)
        gamma = rho / (1 - rho)
        # theta: (1 - rho) L_val + rho mean N sigma_i L_i
        val = val_loss(batches.cycle(len(upper), k * batch, batch, 0).tolist())
        losses = losses_of(model, rows)
        low = weighted(losses, rows, logits.detach())
        objective = (1 - rho) * val + rho * low
        hat_objective = weighted(losses_of(hat, rows), rows, logits.detach())
        norm = adam_step(objective, theta, moments, k, lr, clip)
        adam_step(hat_objective, hat_theta, hat_moments, k, lr, clip)
        # omega: gamma mean N sigma_i C_i, with C at theta^{k+1} or theta^k
        with torch.no_grad():
            C = losses_of(model, rows) if omega_loss == "next" else losses.detach()
            C = C - correction * losses_of(hat, rows)
        penalised = gamma * weighted(C, rows, logits)
        (logits.grad,) = torch.autograd.grad(penalised, logits)
        if omega_optimizer == "adam":
            adam.step()
        else:
            with torch.no_grad():
                logits -= omega_lr * logits.grad
        record.append({"omega": logits.detach().clone(), "upper_loss": val.item(),
                       "lower_loss": low.item(), "loss": objective.item(), "grad_norm": norm,
                       "rho": rho})
    return record, {name: p.detach() for name, p in theta.items()}


@pytest.mark.parametrize(("model", "options"), [
    ("llama", {"omega_optimizer": "sgd", "omega_loss": "next", "micro_batch": 2}),
    ("llama", {"omega_optimizer": "adam", "omega_loss": "current", "micro_batch": 7}),
    ("neox", {"omega_optimizer": "adam", "omega_loss": "next", "micro_batch": 3}),
    ("llama", {"omega_optimizer": "sgd", "omega_loss": "next", "micro_batch": 4,
               "correction": 0.6}),
    ("llama", {"omega_optimizer": "sgd", "omega_loss": "next", "micro_batch": 3, "dpo_beta": 0.3}),
    ("llama", {"omega_optimizer": "adam", "omega_loss": "next", "micro_batch": 2, "batch": 3,
               "correction": 0.6}),
], ids=["sgd", "adam, current", "adam, NeoX", "corrected", "DPO", "batches of 3, 3 and 1"])
def test_eq_bds_run_in_float64(train, files, folders, adapters, tmp_path, model, options):
    """Eqs. BDS, offline PBGD, PBGD-1 and PBGD-2, deviations 3 and 7, and the DPO loss above: three
    epochs, all but the last case of one full batch, rho 0.1, 0.2, 0.3, clipping active, from an
    adapter with A and B random."""
    paths = files(lower=7, upper=7)
    if dpo := "dpo_beta" in options:
        for name, seed in (("upper", 2), ("heldout", 3)):
            other = make_rows(7, seed=seed + 50)
            write_rows(paths[name], [
                {"prompt": row["prompt"], "chosen": row["response"], "rejected": no["response"]}
                for row, no in zip(make_rows(7, seed), other, strict=True)])
    options = {"batch": 7} | options
    micro_batch = options.pop("micro_batch")
    options |= {"lr": 3e-3, "omega_lr": {"sgd": 2.0, "adam": 0.3}[options["omega_optimizer"]],
                "clip": 0.5 if dpo else 0.7}
    run = train(paths, model, adapter=adapters[model], dtype="float64", epochs=3,
                micro_batch=micro_batch, template=tokens.TEMPLATE,
                upper_loss="dpo" if dpo else "sft", **options)
    record, theta = by_hand(folders[model], adapters[model], read_rows(paths["lower"]),
                            read_rows(paths["upper"]), epochs=3, **options)
    per_epoch = math.ceil(7 / options["batch"])
    for epoch, expected in enumerate(record[per_epoch - 1::per_epoch], start=1):
        torch.testing.assert_close(omega(run, epoch), expected["omega"], rtol=1e-6, atol=1e-7)
    for k, (found, expected) in enumerate(zip(run.metrics, record, strict=True)):
        for key in ("rho", "upper_loss", "lower_loss", "loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6), (k, key)
    assert record[0]["grad_norm"] > options["clip"]  # the clip had something to do
    saved = adapter(run)
    assert len(saved) == len(theta)
    for name, value in theta.items():
        torch.testing.assert_close(saved[name.replace(".default", "")], value, rtol=1e-5,
                                   atol=3e-3 * 1e-4, msg=name)
    # The weights in the ranking are N softmax(omega).
    weights = 7 * torch.softmax(record[-1]["omega"], dim=0)
    for entry in run.weights:
        assert entry["weight"] == pytest.approx(weights[entry["row_id"]].item(), rel=1e-6)
    assert sum(entry["weight"] for entry in run.weights) == pytest.approx(7, rel=1e-9)


# --- the step and how it is cut -------------------------------------------------------------------

@pytest.fixture
def gradients(monkeypatch):
    """The gradients of theta as they stand before each clipping, a flat vector a step."""
    seen, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters, *args, **kwargs):
        parameters = list(parameters)
        seen.append(torch.cat([p.grad.detach().flatten().double() for p in parameters]))
        return clip(parameters, *args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
    return seen


@pytest.mark.parametrize("method", ["bds", "mix"])
def test_eq_gradient_does_not_depend_on_the_micro_batch(train, files, adapters, gradients, method):
    """Deviation 3's objective is normalised by the whole step: micro batches of 1, 3, 8 and 32 of
    a batch of 32, ragged lengths, and a last batch of 5 lower and 32 upper rows."""
    paths, found = files(lower=37, upper=19), {}
    for size in (1, 3, 8, 32):
        gradients.clear()
        # Frozen theta: both steps see the same point, whatever rounding did to the first.
        train(paths, adapter=adapters["llama"], method=method, batch=32, micro_batch=size, lr=0,
              epochs=1, omega_lr=5, skip_scores=True, out=f"run{size}")
        found[size] = list(gradients)
    assert len(found[32]) == 2 and found[32][1].norm() > 0.1
    for size in (1, 3, 8):
        for mine, whole in zip(found[size], found[32], strict=True):
            assert (mine - whole).norm() < 1e-5 * whole.norm(), size


def test_micro_batches_of_one_level_alone(train, files, adapters, gradients):
    """SFT has no upper rows: only lower rows enter, and each once."""
    paths = files(lower=9)
    del paths["upper"], paths["heldout"]
    runs = [train(paths, adapter=adapters["llama"], method="sft", batch=9, micro_batch=size, lr=0,
                  epochs=1, out=f"run{size}") for size in (2, 9)]
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()
    for run in runs:
        (step,) = run.metrics
        assert step["rho"] == 1.0 and step["upper_loss"] is None
        assert step["loss"] == step["lower_loss"]
        assert step["lower_loss"] == pytest.approx(run.result["lower_original"], rel=1e-5)


@pytest.mark.parametrize(("rho", "dtype"), [(0.5, "float32"), (0.6, "float64")])
def test_eq_frozen_uniform_bds_is_direct_mixing(train, files, rho, dtype):
    """Deviation 3: with omega frozen at uniform and rho fixed, BDS *is* mixing, bit for bit."""
    paths = files(lower=19, upper=9)
    options = {"batch": 8, "micro_batch": 3, "epochs": 2, "lr": 1e-3, "dtype": dtype,
               "schedule": "cosine"}
    bds = train(paths, out="bds", omega_lr=0, rho_start=rho, rho_step=0, **options)
    mix = train(paths, out="mix", method="mix", rho=rho, **options)
    name = "adapter/adapter_model.safetensors"
    assert (bds.out / name).read_bytes() == (mix.out / name).read_bytes()
    assert len(bds.metrics) == 6
    for a, b in zip(bds.metrics, mix.metrics, strict=True):
        for key in b:
            assert key.startswith("time/") or a[key] == b[key], key
    for key in ("upper_heldout", "upper_heldout_per_token", "lower_original", "upper_exact"):
        assert bds.result[key] == mix.result[key]
    assert [entry["weight"] for entry in bds.weights] == [1.0] * 19


def test_bds_that_moves_is_not_direct_mixing(train, files):
    """The test above can fail: the same with omega free."""
    paths = files(lower=19, upper=9)
    options = {"batch": 8, "epochs": 2, "lr": 1e-3}
    runs = [train(paths, out=f"{rate}", omega_lr=rate, rho_start=0.5, rho_step=0, **options)
            for rate in (0, 3)]
    name = "adapter/adapter_model.safetensors"
    assert runs[0].metrics[0]["loss"] == runs[1].metrics[0]["loss"]
    assert (runs[0].out / name).read_bytes() != (runs[1].out / name).read_bytes()


def test_eq_omega_flags_by_their_formula(train, files):
    """One plain step from uniform: omega_i = -alpha gamma (C_i - mean C) / N for a full batch.

    `--center` removes the batch's own mean at the
    first step, which changes nothing for a full batch; `--omega-loss current` has the loss before
    the step, which is the base loss in the ranking, and "next" the one after, the final loss.
    """
    paths, runs = files(lower=6, upper=6), {}
    for name, more in {"next": {}, "current": {"omega_loss": "current"},
                       "center": {"center": True}}.items():
        runs[name] = train(paths, out=name, batch=6, epochs=1, lr=5e-3, omega_lr=2,
                           dtype="float64", **more)
    weights = {entry["row_id"]: entry for entry in runs["next"].weights}
    for name, column in (("next", "final_loss"), ("current", "base_loss"),
                         ("center", "final_loss")):
        losses = torch.tensor([weights[i][column] for i in range(6)], dtype=torch.float64)
        expected = -2 / 9 * (losses - losses.mean()) / 6
        torch.testing.assert_close(omega(runs[name], 1), expected, rtol=1e-6, atol=1e-9)
    assert (omega(runs["next"], 1) - omega(runs["current"], 1)).abs().max() > 1e-5


# --- which rows -----------------------------------------------------------------------------------

@pytest.fixture
def taken(monkeypatch):
    """{rows in the set: [indices of every read]} of `batches.take`."""
    seen, take = {}, batches.take

    def spy(rows, indices):
        seen.setdefault(len(rows), []).append([int(i) for i in indices])
        return take(rows, indices)

    monkeypatch.setattr(batches, "take", spy)
    return seen


def test_eq_omega_starts_from_the_row_tests(train, online, files, tmp_path, refused):
    """Weights before the first step: N softmax of 0, and of ln 0.1 less the log odds above the
    least ones for rows that look bad; by hand from what the run folder keeps of the row tests
    before training. From zero, and online, weights are one, of dropped rows zero."""
    rows = make_rows(24, seed=5)
    for n in (5, 17):  # a row that repeats another one looks bad whatever the model
        rows[n] = dict(rows[n - 1])
    paths = files(upper=8) | {"lower": write_rows(tmp_path / "rows.jsonl", rows)}
    options = {"epochs": 1, "batch": 8, "omega_lr": 0}
    run = train(paths, omega_start="tests", **options)
    tests = load_file(run.out / "weights" / "base_losses.safetensors")
    surprise, bad = tests["surprise"].tolist(), [n >= 0 for n in tests["reason"].tolist()]
    least = min(value for value, flagged in zip(surprise, bad, strict=True) if flagged)
    start = [math.log(0.1) - (value - least) if flagged else 0.0
             for value, flagged in zip(surprise, bad, strict=True)]
    total = sum(math.exp(value) for value in start)
    weights = {row["row_id"]: row["weight"] for row in run.weights}
    assert [weights[n] for n in range(24)] == pytest.approx(
        [24 * math.exp(value) / total for value in start], rel=1e-5)
    assert bad[5] and bad[17] and sum(bad) < 12
    for run in (train(paths, out="zero", omega_start="zero", **options),
                online(paths, out="online", refine="drop", **options)):
        assert all(row["weight"] == 1 - row.get("masked", 0) for row in run.weights)
    assert "--skip-scores: the row tests start omega; take --omega-start zero" in refused(
        lambda: train(paths, out="x", omega_start="tests", skip_scores=True))
    train(paths, out="x", omega_start="tests", skip_scores=True, method="mix")


def test_last_partial_batch_is_used_and_upper_rows_cycle(train, files, taken):
    """11 lower rows in batches of 4, 7 upper rows: neither level is cut to the other's length."""
    run = train(files(lower=11, upper=7), batch=4, micro_batch=4, epochs=3, lr=0, skip_scores=True)
    lower, upper = taken[11], taken[7]
    assert [len(rows) for rows in lower] == [4, 4, 3] * 3 and len(run.metrics) == 9
    epochs = [list(chain(*lower[k:k + 3])) for k in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(11)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3  # another order every epoch
    assert [len(rows) for rows in upper] == [4] * 9
    flat = list(chain(*upper))
    for start in range(0, 35, 7):  # 36 draws: five whole cycles and the first of the sixth
        assert sorted(flat[start:start + 7]) == list(range(7))
    assert [step["epoch"] for step in run.metrics] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [round(step["rho"], 12) for step in run.metrics[::3]] == [0.1, 0.2, 0.3]


def test_seed_decides_everything(train, files):
    paths = files(lower=11, upper=7)
    runs = [train(paths, out=f"run{n}", batch=4, epochs=2, lr=1e-2, seed=seed)
            for n, seed in enumerate((3, 3, 4))]
    files_of = [[(run.out / name).read_bytes() for name in
                 ("adapter/adapter_model.safetensors", "weights.jsonl",
                  "weights/epoch_2.safetensors")] for run in runs]
    assert files_of[0] == files_of[1]
    assert all(a != b for a, b in zip(files_of[0], files_of[2], strict=True))


def plain_losses(folder, rows):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return [mean_loss(model, tokenise(tokenizer, row)).item() for row in rows]


def test_row_ids_survive_filtering(train, tmp_path, files, folders):
    """10 % of 40 source rows cannot be used: every line of the ranking still names its own row.

    Each row's loss under the frozen model is its fingerprint: a shifted index would show at once.
    """
    paths, source = files(upper=6), make_rows(40, seed=11)
    dropped = [0, 11, 12, 38]
    source[0]["response"], source[11]["response"] = "", " "
    source[12]["prompt"], source[38]["prompt"] = "", "long " * 60
    paths["lower"] = write_rows(tmp_path / "lower.jsonl", source)
    run = train(paths, batch=36, epochs=1, lr=0, omega_lr=50, max_length=100, keep_fraction=0.5)
    entries = {entry["row_id"]: entry for entry in run.weights}
    assert sorted(entries) == [i for i in range(40) if i not in dropped]
    losses = dict(zip(entries, plain_losses(folders["llama"], [source[i] for i in entries]),
                      strict=True))
    assert len(set(losses.values())) == 36
    for row_id, entry in entries.items():
        row = source[row_id]
        assert entry["hash"] == utils.content_hash(row["prompt"], row["response"])
        for column in ("base_loss", "final_loss"):
            assert entry[column] == pytest.approx(losses[row_id], rel=1e-4)
    # Frozen theta, one full batch: the weight ranks exactly by minus the loss.
    order = sorted(losses, key=losses.get)
    assert [entry["row_id"] for entry in run.weights] == order
    assert [entry["row_id"] for entry in run.weights if entry["kept"]] == order[:18]


def test_keep_trains_on_exactly_those_rows(train, tmp_path, files):
    """`--keep RANKING` is the same run as one whose source holds the kept rows alone; the ranking
    goes by row_id and hash, so its own order and unusable rows in the source do not matter."""
    paths, source = files(upper=6), make_rows(20, seed=12)
    source[3]["response"] = source[9]["response"] = ""
    usable = [i for i in range(20) if i not in (3, 9)]
    kept = [1, 4, 5, 10, 13, 19]
    entries = [{"row_id": i, "hash": utils.content_hash(source[i]["prompt"], source[i]["response"]),
                "rank": rank, "kept": i in kept, "weight": 1.0}
               for rank, i in enumerate(random.Random(0).sample(usable, 18), 1)]
    options = {"batch": 4, "epochs": 2, "lr": 1e-2}
    files_of = []
    for name, rows in (("all", source), ("few", [source[i] for i in kept])):
        paths["lower"] = write_rows(tmp_path / f"{name}.jsonl", rows)
        keep = write_rows(tmp_path / "kept.jsonl", entries) if name == "all" else None
        run = train(paths, out=name, keep=keep, **options)
        files_of.append((run.out / "adapter/adapter_model.safetensors").read_bytes())
        ids = {entry["row_id"] for entry in run.weights}
        assert ids == (set(kept) if name == "all" else set(range(6)))
    assert files_of[0] == files_of[1]


def test_keep_reads_a_ranking_that_a_run_wrote(train, files):
    """Curate, then SFT on what was kept: the ids and hashes are those of the first run."""
    paths = files(lower=15, upper=6)
    first = train(paths, out="first", batch=8, epochs=1, keep_fraction=0.6)
    second = train(paths, out="second", method="sft", keep=first.out / "weights.jsonl", batch=8,
                   epochs=1, lr=0)
    kept = {(entry["row_id"], entry["hash"]) for entry in first.weights if entry["kept"]}
    assert len(kept) == 9
    assert {(entry["row_id"], entry["hash"]) for entry in second.weights} == kept
    for key, count in (("lower_original", 15), ("lower_kept", 9)):  # its model is the base
        losses = [entry["base_loss"] for entry in first.weights[:count]]
        assert second.result[key] == pytest.approx(sum(losses) / count, rel=1e-4), key


@pytest.mark.parametrize("at_once", [1, 7, 23, 100])
def test_a_ranking_is_the_same_in_blocks_of_any_size(monkeypatch, tmp_path, at_once):
    """Against sorting whole rows: ties in row order, every column beside its own row."""
    import datasets

    monkeypatch.setattr(ranking, "ROWS_AT_ONCE", at_once)
    rng = random.Random(3)
    rows = [{"row_id": 2 * i + 1, "hash": f"{i:016x}", "kind": rng.choice("ab"),
             "bad": rng.random() < 0.5} for i in range(23)]
    scores = [rng.randrange(9) / 8 for _ in rows]
    ranks, kept = ranking.write_ranking(
        tmp_path / "ranking.jsonl", datasets.Dataset.from_list(rows), torch.tensor(scores), 0.4,
        {"weight": torch.tensor(scores) * 2})
    order = sorted(range(23), key=lambda i: (-scores[i], i))
    assert utils.read_jsonl(tmp_path / "ranking.jsonl") == [
        {"row_id": rows[i]["row_id"], "hash": rows[i]["hash"], "rank": rank, "kept": rank <= 9,
         "weight": 2 * scores[i], "bad": rows[i]["bad"], "kind": rows[i]["kind"]}
        for rank, i in enumerate(order, 1)]
    assert [ranks[i].item() for i in order] == list(range(1, 24))
    assert kept.sum() == 9


@pytest.mark.parametrize(("fraction", "count"), [(0.05, 1), (0.31, 4), (0.5, 6), (1.0, 13)])
def test_keep_fraction_and_schema_of_the_ranking(train, files, fraction, count):
    """`kept` is rank <= round(fraction N); best first; one line a row; plain JSON values."""
    run = train(files(lower=13, upper=6), batch=13, epochs=1, omega_lr=20, keep_fraction=fraction)
    assert [entry["rank"] for entry in run.weights] == list(range(1, 14))
    assert [entry["kept"] for entry in run.weights] == [True] * count + [False] * (13 - count)
    weights = [entry["weight"] for entry in run.weights]
    assert weights == sorted(weights, reverse=True) and len(set(weights)) == 13
    for entry in run.weights:
        assert list(entry)[:5] == ["row_id", "hash", "rank", "kept", "weight"]
        assert type(entry["row_id"]) is type(entry["rank"]) is int
        assert type(entry["kept"]) is bool and re.fullmatch("[0-9a-f]{16}", entry["hash"])
    kept = [entry["final_loss"] for entry in run.weights if entry["kept"]]
    assert run.result["lower_kept"] == pytest.approx(sum(kept) / len(kept), rel=1e-5)


# --- labels, held-out rows, what a run leaves -----------------------------------------------------

def test_labels_enter_the_ranking_and_the_result(train, tmp_path, files):
    """AUROC of each ranking, by counting pairs in the file that the run wrote."""
    paths, source = files(upper=6), make_rows(14, seed=13)
    for number, row in enumerate(source):
        row["bad"], row["kind"] = number % 3 == 0, "cut" if number % 6 == 0 else "other"
        row["kind"] = row["kind"] if row["bad"] else "clean"
    paths["lower"] = write_rows(tmp_path / "lower.jsonl", source)
    run = train(paths, batch=14, epochs=1, omega_lr=5)
    good, bad = ([e for e in run.weights if e["bad"] == label] for label in (False, True))
    assert len(bad) == 5 and {e["kind"] for e in bad} == {"cut", "other"}
    for name, score in {"weight": lambda e: e["weight"], "base": lambda e: -e["base_loss"],
                        "final": lambda e: -e["final_loss"]}.items():
        for kind in ("cut", "other", None):
            mine = [e for e in bad if kind in (None, e["kind"])]
            pairs = [score(g) > score(b) for g in good for b in mine]
            key = f"{name}/auroc" + (f"/{kind}" if kind else "")
            assert run.result[key] == pytest.approx(sum(pairs) / len(pairs)), key


def test_run_folder_and_metrics(train, files):
    paths = files(lower=9, upper=6, lower_heldout=5)
    run = train(paths, batch=4, epochs=2, save_every=2)
    found = listing(run.out)
    assert not [name for name in found if name.startswith(".") or "/." in name]
    assert {name for name in found if name.startswith("checkpoints/step_")} == {
        f"checkpoints/step_0000000{k}/{name}" for k in (4, 6)
        for name in ("adapter.safetensors", "state.pt")}  # the last two
    assert set(found) >= {
        "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
        "config.json", "metrics.jsonl", "result.json", "weights.jsonl", "shown.jsonl",
        "weights/base_losses.safetensors", "weights/epoch_1.safetensors",
        "weights/epoch_2.safetensors"}
    assert json.loads((run.out / "result.json").read_text()) == run.result
    assert [step["step"] for step in run.metrics] == list(range(6))
    for step in run.metrics:
        ends = (step["step"] % 3 == 2)
        for key in ("upper_heldout", "lower_heldout", "upper_exact", "omega/entropy"):
            assert (key in step) == ends
        assert step["loss"] == pytest.approx(
            step["rho"] * step["lower_loss"] + (1 - step["rho"]) * step["upper_loss"])
    for key in ("upper_heldout", "lower_heldout", "upper_heldout_per_token", "upper_exact"):
        assert run.result[key] == run.metrics[-1][key]


def test_held_out_losses_are_those_of_the_final_model(train, files, folders):
    """Through the files alone: base plus saved adapter, each held-out row by itself."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    paths = files(lower=9, upper=6, heldout=5)
    run = train(paths, batch=4, epochs=2, lr=1e-2, merge=True)
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folders["llama"]), run.out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(run.out / "merged")
    assert AutoTokenizer.from_pretrained(run.out / "merged").get_vocab() == tokenizer.get_vocab()
    base = AutoModelForCausalLM.from_pretrained(folders["llama"])
    losses = {}
    with torch.no_grad():
        for name, which in (("adapter", model), ("merged", merged), ("base", base)):
            losses[name] = [mean_loss(which, tokenise(tokenizer, row)).item()
                            for row in read_rows(paths["heldout"])]
    mean = sum(losses["adapter"]) / 5
    assert run.result["upper_heldout"] == pytest.approx(mean, rel=1e-5)
    assert sum(losses["merged"]) / 5 == pytest.approx(mean, rel=1e-4)
    assert abs(sum(losses["base"]) / 5 - mean) > 0.01


def test_held_out_rows_are_split_off_the_upper_set(train, files, taken):
    """Without a source of their own: a tenth, seeded, never trained on."""
    paths = files(lower=8, upper=30)
    del paths["heldout"]
    run = train(paths, batch=8, epochs=4, lr=0, skip_scores=True)
    assert set(chain(*taken[27])) == set(range(27))
    assert "upper_heldout" in run.result and 30 not in taken


def test_held_out_rows_may_be_another_split_of_the_upper_source(train, files, folders, tmp_path):
    """FOLDER trains on its files named train, FOLDER@test is what it is judged on."""
    paths, folder = files(lower=6, upper=0, heldout=0), tmp_path / "set"
    folder.mkdir()
    trained, held_out = make_rows(7, seed=21), make_rows(5, seed=22)
    write_rows(folder / "train.jsonl", trained)
    write_rows(folder / "test.jsonl", held_out)
    run = train(paths, upper=folder, upper_heldout=f"{folder}@test", batch=7, epochs=1,
                skip_scores=True)
    assert "upper: 7 rows" in run.text and "upper_heldout: 5 rows" in run.text
    for key, found, rows in (("upper", run.metrics[0]["upper_loss"], trained),
                             ("held out", run.result["base/upper_heldout"], held_out)):
        losses = plain_losses(folders["llama"], rows)
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-4), key


def test_clip_inf_is_no_clipping(train, files, adapters):
    """The same run, bit for bit, as under a norm that nothing reaches; another than under 1."""
    paths, found = files(lower=8, upper=6), []
    for clip in ("inf", 1e30, 0.1):
        run = train(paths, out=f"run{clip}", adapter=adapters["llama"], batch=4, epochs=1, lr=1e-2,
                    clip=clip, omega_optimizer="sgd", skip_scores=True)
        assert all(1 < step["grad_norm"] < math.inf for step in run.metrics)
        found.append((run.out / "adapter/adapter_model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]


def test_shown_rows_are_the_two_ends_of_the_ranking(train, files, monkeypatch):
    """shown.jsonl, for the report: the texts of the 60 best and the 60 worst rows, best first; of
    a small file each row once."""
    paths = files(lower=131, upper=6, longest=3)
    options = {"batch": 131, "epochs": 1, "omega_lr": 20, "omega_loss": "current", "lr": 0}
    run = train(paths, **options)
    source, shown = read_rows(paths["lower"]), read_rows(run.out / "shown.jsonl")
    assert [row["row_id"] for row in shown] == [
        row["row_id"] for row in (*run.weights[:60], *run.weights[-60:])]
    for row in shown:
        assert row == {"row_id": row["row_id"], "hash": row["hash"]} | source[row["row_id"]]
        assert row["hash"] == utils.content_hash(row["prompt"], row["response"])
    run = train(files(lower=9, upper=6), out="few", method="mix", batch=9, epochs=1)
    assert [row["row_id"] for row in read_rows(run.out / "shown.jsonl")] == [
        row["row_id"] for row in run.weights]
    run = train(files(lower=9, upper=6), out="none", method="mix", batch=9, epochs=1,
                skip_scores=True)  # nothing was ranked
    assert not (run.out / "shown.jsonl").exists() and not (run.out / "weights.jsonl").exists()


def test_training_lowers_the_upper_loss(train, files):
    """The loop as a whole goes down hill."""
    run = train(files(lower=16, upper=8), method="mix", rho=0.1, batch=8, epochs=12, lr=2e-2)
    losses = [step["upper_loss"] for step in run.metrics]
    assert losses[-1] < losses[0] - 1.0


def test_cosine_schedule_and_constant(train, files):
    """beta_k = beta (1 + cos(pi k / K)) / 2."""
    paths = files(lower=8, upper=8)
    cosine = train(paths, out="cosine", batch=2, epochs=2, lr=1e-3, schedule="cosine",
                   skip_scores=True)
    assert [step["lr"] for step in cosine.metrics] == pytest.approx(
        [1e-3 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)])
    constant = train(paths, out="constant", batch=2, epochs=1, lr=1e-3, skip_scores=True)
    assert [step["lr"] for step in constant.metrics] == [1e-3] * 4


def test_the_step_at_which_a_token_budget_is_read():
    """Counted step by step, over several epochs and last batches that are smaller."""
    lengths, batch, seed = [3, 9, 4, 1, 7, 2, 8], 3, 5
    read, ends = 0, []
    for epoch in range(3):
        order = batches.permutation(len(lengths), seed, epoch, stream=0).tolist()
        for start in range(0, len(order), batch):
            read += sum(lengths[i] for i in order[start:start + batch])
            ends.append(read)
    for budget in range(1, read + 1):
        assert session.budget_steps(budget, torch.tensor(lengths), batch, seed) == 1 + sum(
            end < budget for end in ends)


def test_theta_hat_follows_the_schedule(train, files):
    """The correction compares two models of the same step size."""
    run = train(files(lower=8, upper=8), batch=4, epochs=2, schedule="cosine", save_every=3,
                correction=0.5)
    state = torch.load(run.out / "checkpoints/step_00000003/state.pt", weights_only=True)
    rates = [state[name]["param_groups"][0]["lr"] for name in ("theta", "theta_hat")]
    assert rates[0] == rates[1] == pytest.approx(2e-4 * 0.5)  # k = 2 of 4


def test_both_losses_of_the_correction_are_of_the_same_step(train, online, files, adapters):
    """theta and theta_hat start equal: at theta^k and A = 1 the first step leaves omega at zero."""
    options = {"adapter": adapters["llama"], "lr": 1e-2, "omega_lr": 5, "batch": 8, "epochs": 1,
               "correction": 1}
    for run, name in ((train, "offline"), (online, "online")):
        paths = files(lower=8, upper=6)
        now = run(paths, out=name, omega_loss="current", **options).out
        assert load_file(now / "weights/epoch_1.safetensors")["omega"].abs().max() < 1e-6
        after = run(paths, out=f"{name}-next", **options).out
        assert load_file(after / "weights/epoch_1.safetensors")["omega"].abs().max() > 1e-4


def test_a_gradient_of_theta_hat_that_is_not_finite_stops_the_run(train, online, files, refused,
                                                                  monkeypatch):
    """theta_hat would stand still for a step, without a word, while theta goes on."""
    update, norms = models.update, []

    def every_second_is_infinite(*given):
        norms.append(update(*given))
        return norms[-1] if len(norms) % 2 else torch.tensor(math.inf)

    monkeypatch.setattr(models, "update", every_second_is_infinite)
    for number, (run, omega_loss) in enumerate(product((train, online), ("next", "current"))):
        norms.clear()
        line = refused(functools.partial(run, files(), out=str(number), correction=0.5, batch=4,
                                         omega_loss=omega_loss))
        assert "step 0: the loss or its gradient is not finite" in line and len(norms) == 2


def test_an_adapters_dropout_is_off(train, online, files, adapters, tmp_path):
    """At rate zero nothing changes: neither a loss nor a ratio may move."""
    dropping = copy_tree(adapters["llama"], tmp_path / "dropping")
    file = dropping / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.5}))
    paths = files(lower=8, upper=6)
    run = train(paths, adapter=dropping, lr=0, batch=4, epochs=1)
    assert run.result["upper_heldout"] == run.result["base/upper_heldout"]
    run = online(paths, out="online", adapter=dropping, lr=0, batch=4, epochs=1, ratio_masked=0.5,
                 correction=0.5, gradient_checkpointing=True)
    ratios = [step["ratio_mean"] for step in run.metrics if step["ratio_mean"] is not None]
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-4) and ratios


def test_kept_rows_that_are_not_there_are_counted(train, files, tmp_path):
    paths = files(lower=8, upper=6)
    keep = train(paths, out="all", keep_fraction=1).out / "weights.jsonl"
    lower = tmp_path / "fewer.jsonl"
    write_rows(lower, read_rows(paths["lower"])[:5])
    text = train(paths | {"lower": lower}, out="fewer", method="sft", keep=keep).text
    assert "warning: 3 of the 8 rows that" in text


def test_gradient_checkpointing_changes_nothing(train, files):
    paths = files(lower=8, upper=8)
    runs = [train(paths, out=f"{flag}", batch=4, epochs=1, lr=1e-2, dtype="float64",
                  gradient_checkpointing=flag) for flag in (False, True)]
    for name, value in adapter(runs[0]).items():
        torch.testing.assert_close(adapter(runs[1])[name], value, rtol=1e-9, atol=1e-10)


# --- the command line -----------------------------------------------------------------------------

@pytest.fixture
def parser(monkeypatch):
    """The parser that `train_offline` builds."""
    made, parse = [], options.parse
    monkeypatch.setattr(options, "parse", lambda parser, argv: made.append(parser) or parse(
        parser, argv))
    train_offline.parse_args([])
    return made[0]


def test_every_flag_is_read_somewhere(parser):
    """By name, as `args.flag`, in a list of names or through a formatted one; a range check alone
    does not count."""
    sources = "".join((ROOT / name).read_text() for name in (
        "train_offline.py", "session.py", "runtime/monitor.py", "data/sets.py", "options.py"))
    checks = sources.index("def check_values"), sources.index("def penalties")
    sources = sources[:checks[0]] + sources[checks[1]:]
    read = set(re.findall(r"\bargs\.(\w+)", sources)) | set(re.findall(r"\bfirst\.(\w+)", sources))
    for names in re.findall(r"getattr\(args, name\) for name in \(([^)]+)\)", sources):
        read |= set(re.findall(r'"(\w+)"', names))
    patterns = [re.sub(r"\{\w+\}", r"(lower|upper|upper_heldout|lower_heldout)", pattern)
                for pattern in re.findall(r'getattr\(args, f"([^"]+)"', sources)]
    read |= set(re.findall(r'getattr\(args, "(\w+)"', sources))
    flags = [action.dest for action in parser._actions if action.dest != "help"]
    assert len(flags) > 40
    unread = [flag for flag in flags if flag not in read
              and not any(re.fullmatch(pattern, flag) for pattern in patterns)]
    assert not unread


@pytest.mark.parametrize("words, line", [
    (["--method", "sft", "--omega-lr", "3", "--rho-step", "0"],
     "not read by this run: --rho-step, --omega-lr\n"),
    (["--method", "mix", "--correction", "0.7", "--rho", "0.5"],
     "not read by this run: --correction\n"),
    (["--adapter", "runs/first/adapter", "--lora-ra", "8"], "not read by this run: --lora-rank\n"),
    (["--preset", "toy", "--method", "sft"], ""),   # a preset's values are nobody's words
    (["--dpo-beta", "0.2"], "not read by this run: --dpo-beta\n"),
    (["--method", "mix", "--skip-scores", "--keep-fraction", "0.5"],
     "not read by this run: --keep-fraction\n"),
    (["--method", "mix", "--keep-fraction", "0.5"], ""),
    (["--method", "mix", "--token-budget", "500", "--epochs", "7"],
     "not read by this run: --epochs\n"),
    (["--method", "sft", "--model", "m", "--lower", "rows", "--upper-limit", "3"],
     "not read by this run: --upper-limit\n"),
    (["--omega-lr", "3", "--lora-rank", "8"], "")])
def test_flags_that_a_run_does_not_read_are_named(capsys, words, line):
    train_offline.parse_args(words)
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("refine, line", [
    ("generate", ""), ("accept", "not read by this run: --ratio\n"),
    ("drop", "not read by this run: --num-answers, --temperature, --ratio\n")])
def test_flags_of_answers_that_no_run_writes_are_named(capsys, refine, line):
    train_online.parse_args(["--refine", refine, "--num-answers", "2", "--temperature", "0.7",
                             "--ratio", "lambda"])
    assert capsys.readouterr().out == line


def test_an_unread_clamp_and_an_unread_k_gen_are_named(capsys):
    train_online.parse_args(["--ratio", "lambda", "--max-log-ratio", "2"])
    train_online.parse_args(["--refine", "drop", "--k-gen", "2", "--first-refresh", "1"])
    train_online.parse_args(["--refine", "drop", "--k-gen", "2", "--mask", "dynamic"])
    assert capsys.readouterr().out == (
        "not read by this run: --max-log-ratio\nnot read by this run: --k-gen\n")
    train_online.parse_args(["--refine", "drop", "--first-refresh", "1", "--mask", __file__])
    assert capsys.readouterr().out == "not read by this run: --first-refresh\n"


def test_every_flag_has_one_default_and_a_word_of_help_or_a_plain_name(parser):
    words = [word for action in parser._actions for word in action.option_strings]
    assert len(words) == len(set(words))
    for name, values in options.PRESETS.items():
        for key in values:
            assert any(action.dest == key for action in parser._actions), (name, key)


PUBLISHED = {  # appendix D and section 5, typed in from the paper
    "lora_rank": 16, "lora_alpha": 16, "lr": 5e-6, "omega_lr": 1e-4,
    "omega_optimizer": "adam", "batch": 32, "micro_batch": 8, "epochs": 3, "rho_start": 0.1,
    "rho_step": 0.1, "omega_loss": "next", "omega_start": "zero",
    "gradient_checkpointing": True, "correction": 0.0}
ALPACA, ORCA, RED, BLUE = (f".cache/recipes/{name}.jsonl" for name in (
    "alpaca-cleaned", "openorca", "redorca", "blueorca"))
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
SETS = {
    "pythia-1b-quality": {"model": "EleutherAI/pythia-1b", "lower": ALPACA, "upper": ORCA,
                          "lower_limit": 9600},
    "llama3-8b-quality": {"model": LLAMA, "lower": ALPACA, "upper": ORCA, "lower_limit": 56000},
    "llama3-8b-safety": {"model": LLAMA, "lower": RED, "upper": BLUE, "lower_limit": 56000},
}


@pytest.mark.parametrize("preset", SETS)
def test_presets_hold_the_published_values_and_nothing_else(preset):
    assert PUBLISHED | SETS[preset] == options.PRESETS[preset] and len(options.PRESETS) == 4
    given = flags(preset=preset, lower="a.jsonl", upper="b.jsonl")
    args, plain = (vars(train_offline.parse_args(argv)) for argv in (
        given, flags(model="m", lower="a.jsonl", upper="b.jsonl")))
    for key, value in args.items():  # what the paper leaves out is the ordinary default
        if key not in ("preset", "lower", "upper"):
            assert value == (PUBLISHED | SETS[preset]).get(key, plain[key]), key
    # The command line stands above the preset.
    assert train_offline.parse_args([*given, "--lr", "1", "--epochs", "2"]).lr == 1
    assert [(0.1 * (epoch + 1), penalty(epoch)) for epoch in range(3)] == [
        pytest.approx(pair) for pair in options.penalties(argparse.Namespace(**args))]


def test_the_toys_preset_is_what_runs_without_arguments(tmp_path):
    """And it can be had for rows of one's own, at any value of one's own."""
    bare, named = (vars(train_offline.parse_args(argv)) for argv in ([], ["--preset", "toy"]))
    assert bare | {"preset": "toy"} == named and bare["toy"] and bare["correction"] == 0
    assert Path(bare["model"]) == corpus.MODEL
    rows = flags(lower="a.jsonl", upper="b.jsonl", lr=0.5)
    own = vars(train_offline.parse_args([*rows, "--preset", "toy"]))
    assert not own["toy"] and own["lr"] == 0.5
    assert {key for key in named if own[key] != named[key]} == {"lower", "upper", "lr", "toy"}
    with pytest.raises(utils.UserError, match="--model is missing"):
        train_offline.parse_args(rows)


def test_dry_run_writes_nothing_and_prints_the_plan(train, files, tmp_path, folders):
    """Rows, tokens, steps, memory and disk; the token counts are those of the tokenizer."""
    from transformers import AutoTokenizer

    paths = files(lower=21, upper=9)
    run = train(paths, batch=8, micro_batch=3, epochs=3, dry_run=True)
    assert not run.out.exists() and run.result is None
    assert {name.split("/")[0] for name in listing(tmp_path)} == {
        "cache", "lower.jsonl", "upper.jsonl", "heldout.jsonl"}
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    for name, rows in (("lower", 21), ("upper", 9)):
        tokens = sum(len(tokenise(tokenizer, row)[0]) for row in read_rows(paths[name]))
        assert f"{name}: {rows} rows, {tokens} tokens" in run.text
    assert "ceil(21 lower rows / batch 8) = 3 an epoch, x 3 epochs = 9" in run.text
    assert "3 forwards a step" in run.text
    assert re.search(r"^memory: about [\d.]+ GiB", run.text, re.M)
    assert re.search(r"^disk: about \d+ MiB", run.text, re.M)


@pytest.mark.parametrize("made", [make_llama, make_neox])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_memory_estimate_is_what_backward_keeps(made, dtype):
    """Of a step's activations, within a quarter, against the tensors that autograd saves."""
    base = made(hidden_size=128, intermediate_size=448, num_hidden_layers=4).to(
        getattr(torch, dtype))
    base.set_attn_implementation(logprobs.ATTENTION)
    model, saved = models.add_lora(base, 2, 2), {}
    known = {p.untyped_storage().data_ptr() for p in chain(model.parameters(), model.buffers())}
    rows = [{"input_ids": list(range(5, 55)), "trained": [0] * 40 + [1] * 10}] * 4

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes(), storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs.sequence_logprobs(model, batches.pack(rows))
    args = train_offline.parse_args(["--micro-batch", "2", "--dtype", dtype, "--lora-rank", "2",
                                     "--lower", "a", "--upper", "b", "--model", "c"])

    def activations():
        needs, none = (session.memory_and_disk(args, base.config, size, 0) for size in (50, 0))
        return needs.memory - none.memory

    assert (whole := activations()) == pytest.approx(sum(n for n, _ in saved.values()), rel=0.25)
    args.correction = 0  # without theta_hat one adapter less: parameter, gradient, two moments
    alone = session.memory_and_disk(args, base.config, 0, 0).memory
    args.correction = 0.7
    assert session.memory_and_disk(args, base.config, 0, 0).memory - alone == 16 * sum(
        p.numel() for name, p in model.named_parameters() if "lora_" in name)
    args.gradient_checkpointing = True
    assert activations() < whole / 2
    alone, args.merge = session.memory_and_disk(args, base.config, 50, 9).disk, True
    assert session.memory_and_disk(args, base.config, 50, 9).disk - alone == sum(
        p.numel() * p.itemsize for name, p in base.named_parameters() if "lora_" not in name)


def test_a_rate_at_which_the_order_of_reading_decides_is_named(train, files):
    """10 x gamma 1 / batch 4 is 2.5 x the loss of a row; a rate of 0.4 would be 0.1 x. Under
    gamma 1/9, Adam, a large correction or mixing there is nothing to say."""
    def warned(**given):
        given = {"epochs": 1, "batch": 4, "rho_start": 0.5} | given
        text = train(files(lower=8, upper=4), dry_run=True, **given).text
        return re.findall(r"warning: --omega-lr .*", text)

    assert warned() == [
        "warning: --omega-lr 10: one reading takes about 2.5 x its loss off a row's omega, so rows "
        "not yet read will hold all the weight; lower it, for instance to 0.4"]
    assert warned(rho_start=0.4, epochs=2) == warned()  # the last epoch decides
    for given in ({"rho_start": 0.1}, {"omega_optimizer": "adam"}, {"correction": 0.9},
                  {"method": "mix"}, {"omega_lr": 0.4}):
        assert warned(**given) == []


@pytest.mark.parametrize("limits, expected", [
    ({"sliding_window": 16}, 16), ({"sliding_window": 500}, 128), ({"sliding_window": None}, 128),
    ({"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 128),
    ({"sliding_window": 16, "use_sliding_window": False}, 128)])
def test_a_sliding_window_is_the_longest_row(limits, expected):
    """It is refused in the plan: packed rows see all of their own tokens."""
    from transformers import MistralConfig

    config = MistralConfig(num_hidden_layers=2, max_position_embeddings=128)
    for name, value in limits.items():
        setattr(config, name, value)
    assert models.context_length(config) == expected


def test_dry_run_needs_no_weights(train, files, folders, tmp_path):
    """The plan is made before the weights are read, let alone downloaded."""
    folder = tmp_path / "no weights"
    folder.mkdir()
    for file in folders["llama"].iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    assert "memory: about" in train(files(), folder, dry_run=True).text


@pytest.mark.skipif(not (ROOT / "toy" / "model" / "config.json").exists(),
                    reason="the embedded base model has not been made yet (python -m toy train)")
def test_the_embedded_toy_runs_without_arguments(capsys, tmp_path):
    train_offline.main(flags(out=tmp_path / "run", cache_dir=tmp_path / "cache", dry_run=True))
    assert "lower: 2400 rows" in capsys.readouterr().out
    with pytest.raises(utils.UserError, match="--upper-heldout: the embedded toy has its own"):
        train_offline.main(flags(out=tmp_path / "run", cache_dir=tmp_path / "cache", dry_run=True,
                                 upper_heldout="gone.jsonl"))


def test_the_toy_is_the_same_data_every_time(folders, tmp_path):
    """Written anew at every start; a run on it can be resumed all the same."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(folders["llama"]), []
    for seed in (0, 0, 1):
        args = train_offline.parse_args(flags(cache_dir=tmp_path, seed=seed))
        levels = sets.load_levels(args, tokenizer, 2**31)
        found.append({name: sets.rows_hash(rows)
                      for name, rows in session.row_sets(levels).items()})
    assert found[0] == found[1] and len(found[0]) == 4
    assert not set(found[0].values()) & set(found[2].values())


SHARED = ROOT.parent / "shared"


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "models" / "instruct-6m").exists(),
                    reason="needs a real model and rows in ../shared")
def test_real_model_and_rows(train, tmp_path):
    """A trained model and real answers with planted faults: to the end, with sane numbers."""
    paths = {}
    for name, file, count in (("lower", "alpaca_planted", 96), ("upper", "alpaca_gpt4_upper", 32),
                              ("heldout", "alpaca_gpt4_heldout", 24)):
        rows = (SHARED / "data" / f"{file}.jsonl").read_text().splitlines()[:count]
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("\n".join(rows) + "\n")
    run = train(paths, SHARED / "models" / "instruct-6m", max_length=192, batch=32, epochs=1,
                lr=1e-3, allow_overlap=True)
    assert len(run.metrics) == 3 and len(run.weights) > 80
    assert 1 < run.result["upper_heldout"] < 6  # nats a token; an untrained model has more
    assert 0.5 < run.result["base/auroc"] < 1
