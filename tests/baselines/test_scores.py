"""Random, length, loss and IFD scores against independent computations."""

import itertools
import re

import numpy as np
import pytest
import torch
from conftest import WORDS, read_rows, write_rows

import models
from baselines import scores
from data import tokens


def spearman(a, b):
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def tokenised(folder, path, cache):
    return tokens.load_rows(path, models.load_tokenizer(folder), cache_dir=str(cache))[0]


def brute_loss(model, ids, trained):
    ids, trained = torch.tensor([ids]), torch.tensor(trained).bool()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits[trained[1:]], ids[0, 1:][trained[1:]]).item()


def test_loss_equals_the_models_own_logits(rank, files, folders, tmp_path):
    files = files(lower=15)
    rows = tokenised(folders["llama"], files["lower"], tmp_path / "cache")
    model = models.load_model(folders["llama"], torch.device("cpu"), "float64")
    given = [brute_loss(model, row["input_ids"], row["trained"]) for row in rows]
    loss = rank("loss", files, dtype="float64")
    assert np.allclose(-loss.scores, given, atol=1e-9)
    assert loss.order == list(np.argsort(given, kind="stable"))


def shared_start(lists):
    return [column[0] for column in itertools.takewhile(
        lambda column: len({*column}) == 1, zip(*lists, strict=False))]


BLANK = {"llama": r"User: ?\nAssistant:",
         "neox": r"<\|im_start\|>user\n<\|im_end\|>\n<\|im_start\|>assistant\n"}


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_eq_ifd_by_the_models_own_logits(rank, folders, tmp_path, name, monkeypatch):
    """log p(y) stands behind what all prompts share: the template around an empty question."""
    monkeypatch.setattr(scores, "ROWS_AT_ONCE", 4)  # the last block is not a full one
    path = write_rows(tmp_path / "rows.jsonl", [
        {"prompt": f"{word} {number} {word}", "response": f"{word} stone {'river ' * number}."}
        for number, word in enumerate(WORDS[:15])])
    tokenizer, model = models.load_tokenizer(folders[name]), models.load_model(
        folders[name], torch.device("cpu"), "float64")
    rows = list(tokenised(folders[name], path, tmp_path / "cache"))
    prompts = [row["input_ids"][:row["trained"].index(1)] for row in rows]
    head = shared_start(prompts)
    tail = shared_start([prompt[len(head):][::-1] for prompt in prompts])[::-1]
    assert re.fullmatch(BLANK[name], tokenizer.decode(head + tail))
    ratios = []
    for row, prompt in zip(rows, prompts, strict=True):
        answer = row["input_ids"][len(prompt):]
        ratios.append(brute_loss(model, row["input_ids"], row["trained"]) / brute_loss(
            model, [*head, *tail, *answer], [0] * len(head + tail) + [1] * len(answer)))
    made = rank("ifd", {"lower": path}, model=folders[name], dtype="float64")
    assert np.allclose([row["ifd"] for row in made.rows], ratios, atol=1e-9)
    assert made.order == list(np.argsort(ratios, kind="stable"))


def test_the_blank_prompt_of_a_sorted_file_is_the_templates(folders, tmp_path):
    """The first hundred questions begin alike; rows from all over the file do not."""
    path = write_rows(tmp_path / "rows.jsonl", [
        {"prompt": f"red stone {n}" if n < 100 else f"blue {n}", "response": "x"}
        for n in range(120)])
    rows = tokenised(folders["llama"], path, tmp_path / "cache")
    blank = models.load_tokenizer(folders["llama"]).decode(scores.blank_prompt(rows, sample=10))
    assert re.fullmatch(BLANK["llama"], blank)


def test_ifd_orders():
    ratios = torch.tensor([0.3, 1.2, 0.9, 1.0, 0.5])
    order = {name: scores.ifd_scores(ratios, name).argsort(descending=True).tolist()
             for name in ("aligned", "hard")}
    assert order == {"aligned": [0, 4, 2, 3, 1], "hard": [2, 4, 0, 3, 1]}


def test_equal_losses_are_equally_surprising():
    """-ln of the share at or above."""
    found = scores.rank_surprise(torch.tensor([2.0, 1.0, 3.0, 2.0]))
    assert found.exp().tolist() == pytest.approx([4 / 3, 1, 4, 4 / 3])


def test_length_counts_characters_and_random_is_seeded(rank, files):
    files = files(lower=50)
    length = rank("length", files)
    assert length.scores.tolist() == [len(row["response"]) for row in read_rows(files["lower"])]
    first, again, other = (rank("random", files, seed=seed) for seed in (0, 0, 1))
    assert first.order == again.order != other.order
    assert sorted(first.order) == list(range(50)) and first.order != list(range(50))
    assert abs(spearman(first.scores, torch.arange(50.0))) < 0.4
