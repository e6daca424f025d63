"""Random, length, loss and IFD scores against independent computations."""

import numpy as np
import pytest
import torch
from by_hand import mean_loss
from conftest import WORDS, write_rows

import models
from baselines import scores
from data.tokens import load_rows
from ranking import blank_prompt

BLANK = {
    "llama": "User: \nAssistant:",
    "neox": "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n",
}


def tokenised(folder, path, cache):
    tokenizer = models.load_tokenizer(folder)
    return load_rows(path, tokenizer, cache_dir=str(cache))[0], tokenizer


@torch.no_grad()
def brute_loss(model, prompt, answer):
    """The mean loss of an answer behind a prompt, token ids both, by the model's own logits."""
    return mean_loss(model, (torch.tensor(prompt + answer), len(prompt))).item()


def split(row):
    start = row["trained"].index(1)
    return row["input_ids"][:start], row["input_ids"][start:]


def test_loss_equals_the_models_own_logits(rank, files, folders, tmp_path):
    files = files(lower=15)
    rows, _ = tokenised(folders["llama"], files["lower"], tmp_path / "cache")
    model = models.load_model(folders["llama"], torch.device("cpu"), "float64")
    losses = [brute_loss(model, *split(row)) for row in rows]
    made = rank("loss", files, dtype="float64")
    assert np.allclose(-made.scores, losses, atol=1e-9)
    assert made.order == list(np.argsort(losses, kind="stable"))


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_eq_ifd_by_the_models_own_logits(rank, folders, tmp_path, name, monkeypatch):
    """log p(y) stands behind what all prompts share: the template around an empty question."""
    monkeypatch.setattr(scores, "ROWS_AT_ONCE", 4)  # the last block is not a full one
    texts = []
    for number, word in enumerate(WORDS[:15]):
        answer = f"{word} stone {'river ' * number}."
        texts.append({"prompt": f"{word} {number} {word}", "response": answer})
    path = write_rows(tmp_path / "rows.jsonl", texts)
    rows, tokenizer = tokenised(folders[name], path, tmp_path / "cache")
    blank = blank_prompt(rows)
    assert tokenizer.decode(blank).replace(" ", "") == BLANK[name].replace(" ", "")
    model = models.load_model(folders[name], torch.device("cpu"), "float64")
    ratios = []
    for row in rows:
        prompt, answer = split(row)
        ratios.append(brute_loss(model, prompt, answer) / brute_loss(model, blank, answer))
    made = rank("ifd", {"lower": path}, model=folders[name], dtype="float64")
    assert np.allclose([row["ifd"] for row in made.rows], ratios, atol=1e-9)
    assert made.order == list(np.argsort(ratios, kind="stable"))


def test_the_blank_prompt_of_a_sorted_file_is_the_templates(folders, tmp_path):
    """The first hundred questions begin alike; rows from all over the file do not."""
    questions = [f"red stone {n}" for n in range(100)] + [f"blue {n}" for n in range(20)]
    path = write_rows(
        tmp_path / "rows.jsonl",
        [{"prompt": question, "response": "x"} for question in questions],
    )
    rows, tokenizer = tokenised(folders["llama"], path, tmp_path / "cache")
    blank = tokenizer.decode(blank_prompt(rows, sample=10))
    assert blank.replace(" ", "") == BLANK["llama"].replace(" ", "")


def test_random_is_seeded(rank, files):
    files = files(lower=50)
    orders = [rank("random", files, seed=seed).order for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(50)) != orders[0]
