"""Random, length, loss and IFD scores against independent computations."""

import numpy as np
import torch
from conftest import read_rows

import data
import loading
from baselines import scores


def spearman(a, b):
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def tokenised(folder, path, cache):
    return data.load_rows(path, loading.load_tokenizer(folder), cache_dir=str(cache))[0]


def brute_loss(model, ids, trained):
    ids, trained = torch.tensor([ids]), torch.tensor(trained).bool()
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits[trained[1:]], ids[0, 1:][trained[1:]]).item()


def test_loss_and_ifd_equal_the_models_own_logits(rank, files, folders, tmp_path):
    files = files(lower=15)
    rows = tokenised(folders["llama"], files["lower"], tmp_path / "cache")
    model = loading.load_model(folders["llama"], torch.device("cpu"), "float64")
    given, ratios = [], []
    for row in rows:
        response = [t for t, loss in zip(row["input_ids"], row["trained"], strict=True) if loss]
        given.append(brute_loss(model, row["input_ids"], row["trained"]))
        ratios.append(given[-1] / brute_loss(model, [0, *response], [0] + [1] * len(response)))
    loss = rank("loss", files, dtype="float64")
    assert np.allclose(-loss.scores, given, atol=1e-9)
    assert loss.order == list(np.argsort(given, kind="stable"))
    made = rank("ifd", files, dtype="float64")
    assert np.allclose([row["ifd"] for row in made.rows], ratios, atol=1e-9)
    assert made.order == list(np.argsort(ratios, kind="stable"))


def test_ifd_orders():
    ratios = torch.tensor([0.3, 1.2, 0.9, 1.0, 0.5])
    order = {name: scores.ifd_scores(ratios, name).argsort(descending=True).tolist()
             for name in ("aligned", "hard")}
    assert order == {"aligned": [0, 4, 2, 3, 1], "hard": [2, 4, 0, 3, 1]}


def test_length_counts_characters_and_random_is_seeded(rank, files):
    files = files(lower=50)
    length = rank("length", files)
    assert length.scores.tolist() == [len(row["response"]) for row in read_rows(files["lower"])]
    first, again, other = (rank("random", files, seed=seed) for seed in (0, 0, 1))
    assert first.order == again.order != other.order
    assert sorted(first.order) == list(range(50)) and first.order != list(range(50))
    assert abs(spearman(first.scores, torch.arange(50.0))) < 0.4
