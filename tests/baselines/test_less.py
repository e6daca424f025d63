"""LESS against a brute-force computation from the model's own logits, and its interrupted runs."""

import shutil

import numpy as np
import pytest
import torch
from conftest import listing, make_llama, make_rows, read_rows, write_rows
from safetensors.torch import load_file

import batches
import models
from baselines import less
from data import tokens
from runtime import folder

LESS = {"epochs": 2, "warmup_fraction": 0.5, "lr": 1e-2, "batch": 4, "lora_rank": 2,
        "lora_alpha": 4}


def test_adam_direction_by_hand():
    gradient, m, v = (torch.tensor(x, dtype=torch.float64) for x in
                      ([0.5, 1e-3, 0.0], [0.2, 0.0, 0.01], [0.04, 0.0, 1e-4]))
    wanted = [0.23 / (0.04021 + 1e-8) ** 0.5,      # 0.9 * 0.2 + 0.1 * 0.5; 0.999 * 0.04 + 0.00025
              1e-4 / (1e-9 + 1e-8) ** 0.5,         # outside the root the epsilon would give 3.16
              0.009 / (9.99e-5 + 1e-8) ** 0.5]
    made = less.adam_direction(gradient, m, v)
    assert torch.allclose(made, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12)


def brute_gradients(folder, checkpoint, rows, rank, alpha):
    """Per-row gradients by the model's own logits and .backward(), float64, (n, P)."""
    base = models.load_model(folder, torch.device("cpu"), "float64")
    model = models.add_lora(base, rank, alpha)
    theta = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float64 for p in theta)
    torch.nn.utils.vector_to_parameters(checkpoint, theta)
    gradients = []
    for row in rows:
        ids, trained = torch.tensor([row["input_ids"]]), torch.tensor(row["trained"]).bool()
        logits = model(input_ids=ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits[trained[1:]], ids[0, 1:][trained[1:]])
        model.zero_grad()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in theta]))
    return torch.stack(gradients)


def tokenised(folder, path, cache):
    return tokens.load_rows(path, models.load_tokenizer(folder), cache_dir=str(cache))[0]


def test_less_score_equals_brute_force(rank, folders, tmp_path):
    lower = write_rows(tmp_path / "lower.jsonl", make_rows(9, 1))
    upper = [row | {"kind": "a"} for row in make_rows(7, 2)]
    for position, row, group in ((1, 5, "b"), (3, 2, "c")):  # what two groups ask for is there
        upper[position] = make_rows(9, 1)[row] | {"kind": group}
    upper = write_rows(tmp_path / "upper.jsonl", upper)
    heldout = write_rows(tmp_path / "heldout.jsonl", make_rows(2, 3))
    made = rank("less", {"lower": lower, "upper": upper}, upper_heldout=heldout, dtype="float64",
                upper_groups=True, micro_batch=3, **LESS | {"warmup_fraction": 0.6})
    checkpoints = [load_file(f"{made.file}.less/warmup_{epoch}.safetensors") for epoch in (0, 1)]
    rates = [float(checkpoint["lr"]) for checkpoint in checkpoints]
    # 5 warm-up rows in batches of 4: two steps an epoch, of which one of four rises.
    assert np.allclose(rates, [1e-2 * (1 / 2 + 3 / 3) / 2, 1e-2 * (2 / 3 + 1 / 3) / 2])
    folder, cache = folders["llama"], tmp_path / "cache"
    lower_rows, upper_rows = (tokenised(folder, path, cache) for path in (lower, upper))
    scores = torch.zeros(9, 3, dtype=torch.float64)
    for rate, checkpoint in zip(rates, checkpoints, strict=True):
        train = brute_gradients(folder, checkpoint["theta"], lower_rows, 2, 4)
        valid = brute_gradients(folder, checkpoint["theta"], upper_rows, 2, 4)
        for i in range(9):
            m = 0.9 * checkpoint["m"] + 0.1 * train[i]
            v = 0.999 * checkpoint["v"] + 0.001 * train[i] ** 2
            step = m / torch.sqrt(v + 1e-8)
            cosines = torch.nn.functional.cosine_similarity(step[None], valid, dim=1)
            for j, members in enumerate(([0, 2, 4, 5, 6], [1], [3])):
                scores[i, j] += rate / sum(rates) * cosines[members].mean()
    assert scores.argmax(dim=1)[[5, 2]].tolist() == [1, 2]
    assert torch.allclose(made.scores, scores.max(dim=1).values, rtol=0, atol=1e-10)


def test_less_warm_up_is_adam_on_the_chosen_rows(rank, folders, files, tmp_path):
    """One step: the checkpoint holds theta_1, 0.1 g and 0.001 g^2 of the clipped mean gradient."""
    files = files(lower=10, upper=8)
    made = rank("less", files, dtype="float64", **LESS | {"epochs": 1, "warmup_fraction": 0.4})
    state = load_file(f"{made.file}.less/warmup_0.safetensors")
    rows = tokenised(folders["llama"], files["lower"], tmp_path / "cache")
    chosen = batches.permutation(10, 0, 0, stream=4)[:4].tolist()
    folder.seed_everything(0)
    base = models.load_model(folders["llama"], torch.device("cpu"), "float64")
    model = models.add_lora(base, 2, 4)
    start = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    gradient = brute_gradients(folders["llama"], start, [rows[i] for i in chosen], 2, 4).mean(dim=0)
    gradient *= min(1.0, 1.0 / (gradient.norm().item() + 1e-6))
    assert gradient.norm() > 1e-3
    assert torch.allclose(state["m"], 0.1 * gradient, atol=1e-12)
    assert torch.allclose(state["v"], 0.001 * gradient ** 2, atol=1e-14)
    # Adam's first step, bias-corrected, is lr * sign(g); the one step of the run is a rising one.
    assert torch.allclose(start - state["theta"],
                          0.5e-2 * gradient / (gradient.abs() + 1e-8), atol=1e-9)


@pytest.mark.parametrize("stop, again", [
    (8 + 30 + 8 + 18, 30 - 16),  # in the fifth block of the last checkpoint's lower rows
    (8 + 30 + 6, 4 + 30)])       # in the second block of its upper rows: 9 less one held out
def test_less_continues_after_a_kill(rank, files, monkeypatch, stop, again):
    files = files(lower=30, upper=9)
    monkeypatch.setattr(less, "ROWS_A_SAVE", 4)
    settings = LESS | {"micro_batch": 3}
    whole = rank("less", files, out="whole.jsonl", **settings)
    real, calls = less.row_gradients, []

    def killed(model, theta, rows):
        calls.extend(rows)
        if len(calls) >= stop:
            raise KeyboardInterrupt
        return real(model, theta, rows)
    monkeypatch.setattr(less, "row_gradients", killed)
    with pytest.raises(KeyboardInterrupt):
        rank("less", files, **settings)
    assert not (whole.file.parent / "kept.jsonl").exists()
    calls.clear()
    monkeypatch.setattr(less, "row_gradients", lambda *a: calls.extend(a[2]) or real(*a))
    made = rank("less", files, **settings)
    assert len(calls) == again  # what was written was not made again
    assert made.ranked == whole.ranked
    calls.clear()
    kept = rank("less", files, keep_fraction=0.5, **settings)  # another share costs no gradient
    assert not calls and sum(row["kept"] for row in kept.rows) == 15


def test_less_needs_memory_for_some_rows_at_a_time_only(rank, files, monkeypatch):
    """--micro-batch gradients, whatever the number of rows; the score does not depend on it."""
    rows, sizes, real = files(lower=20, upper=9), [], less.row_gradients
    whole = rank("less", rows, out="whole.jsonl", dtype="float64", micro_batch=64, **LESS)

    def counted(model, theta, rows):
        made = real(model, theta, rows)
        sizes.append(len(made))
        return made
    monkeypatch.setattr(less, "row_gradients", counted)
    made = rank("less", rows, dtype="float64", micro_batch=2, **LESS)
    assert max(sizes) == 2 and sum(sizes) == 2 * (20 + 8)
    assert torch.allclose(made.scores, whole.scores, rtol=0, atol=1e-9)


def test_less_refuses_the_work_of_another_run(rank, files, refused, folders, tmp_path):
    rows = files()
    made = rank("less", rows, **LESS)
    before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)
              if name.startswith("kept.jsonl")}
    other = shutil.copytree(folders["llama"], tmp_path / "other")
    make_llama(seed=7).save_pretrained(other)
    changed = read_rows(rows["lower"])
    changed[3]["response"] += " stone"
    changed = write_rows(tmp_path / "changed.jsonl", changed)
    for word, options in (("model", {"model": other}), ("lower rows", {"lower": changed}),
                          ("lora_rank", {"lora_rank": 3}), ("seed", {"seed": 1}),
                          ("upper groups", {"upper_groups": True, "upper_columns": "kind=prompt"})):
        line = refused(lambda options=options: rank("less", rows, **LESS | options))
        assert "cannot resume: " in line and f" {word} was" in line
        assert str(made.file) + ".less" in line
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_less_groups_need_a_column(rank, files, refused):
    rows = files()
    assert "no column kind" in refused(lambda: rank("less", rows, upper_groups=True, **LESS))
