"""RDS+ against transformers' own hidden states and the turns played one by one."""

import numpy as np
import pytest
import torch
from conftest import WORDS, write_rows

import models
from baselines import rds
from data import tokens


def brute_vectors(folder, path, cache):
    """Position-weighted means of the last hidden states, each row alone, float64."""
    model = models.load_model(folder, torch.device("cpu"), "float64")
    vectors = []
    for row in tokens.load_rows(path, models.load_tokenizer(folder), cache_dir=str(cache))[0]:
        ids = torch.tensor([row["input_ids"]])
        with torch.no_grad():
            hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].numpy()
        weights = np.arange(1, len(hidden) + 1)
        vectors.append((weights[:, None] * hidden).sum(axis=0) / weights.sum())
    return np.array(vectors)


def round_robin(cosines):
    """Rows in the order taken: queries in turn pop their largest; a taken one costs the turn."""
    wishes, taken = [list(np.argsort(-row, kind="stable")) for row in cosines], []
    while wishes[0]:
        for wish in wishes:
            if (row := wish.pop(0)) not in taken:
                taken.append(row)
    return taken


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_eq_rds_by_the_models_own_hidden_states(rank, files, folders, tmp_path, name, monkeypatch):
    monkeypatch.setattr(rds, "UPPER_AT_ONCE", 3)  # the last block is not a full one
    paths = files(lower=20) | {"upper": write_rows(tmp_path / "trusted.jsonl", [
        {"prompt": f"{word} {n}", "response": f"{word} {'stone ' * n}."}
        for n, word in enumerate(WORDS[:7])])}
    lower, upper = (brute_vectors(folders[name], paths[level], tmp_path / "cache")
                    for level in ("lower", "upper"))
    cosines = upper @ lower.T / np.outer(*(np.linalg.norm(x, axis=1) for x in (upper, lower)))
    made = rank("rds", paths, model=folders[name], dtype="float64",
                upper_heldout=paths["upper"], allow_overlap=True)
    assert "7 upper rows" in made.text
    assert np.allclose([row["cosine"] for row in made.rows], cosines.max(axis=0), atol=1e-6)
    assert made.order == round_robin(cosines)


def test_first_turns_of_equal_rows():
    """Two rows alike: the earlier one first; a turn is lost where another query was faster."""
    lower = torch.eye(3)[[0, 1, 1, 2]]
    turns, nearest = rds.first_turns(lower, torch.eye(3)[[1, 1]])
    assert turns.tolist() == [4, 0, 2, 6]
    assert nearest.tolist() == [0, 1, 1, 0]


def test_a_hidden_state_that_is_not_finite_is_refused(rank, files, refused, monkeypatch):
    monkeypatch.setattr(rds, "packed_forward", lambda model, batch: torch.full(
        (batch["input_ids"].shape[1], 8), torch.nan))
    assert "not finite" in refused(lambda: rank("rds", files(lower=6)))
