"""DSIR's log weights against the reference package, and its ranking."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_rows

from baselines import dsir

REFERENCE = json.loads((Path(__file__).parent / "data" / "dsir_reference.json").read_text())


@pytest.mark.parametrize("limit, key", [(None, "log_weights"), (600, "log_weights_fitted_on_600")])
@pytest.mark.parametrize("at_once", [7, 1000])
def test_dsir_log_weights_equal_the_packages(limit, key, at_once):
    lower = [REFERENCE["lower"][i:i + at_once] for i in range(0, len(REFERENCE["lower"]), at_once)]
    weights, words = dsir.dsir_log_weights(lower, [REFERENCE["upper"]], fit_ngrams=limit)
    assert np.abs(weights - np.array(REFERENCE[key])).max() < 1e-6
    assert words.tolist() == REFERENCE["words"]


def test_dsir_hashes_survive_a_full_table_and_a_forgotten_vocabulary():
    texts = REFERENCE["lower"]
    whole, _ = dsir.NgramHasher()(texts)
    small = dsir.NgramHasher(table_bits=2, max_words=10)
    parts = [small([text]) for text in texts]
    words = [length[0] for _, length in parts]
    unigrams = np.concatenate([buckets[:n] for (buckets, _), n in zip(parts, words, strict=True)])
    bigrams = np.concatenate([buckets[n:] for (buckets, _), n in zip(parts, words, strict=True)])
    assert np.array_equal(np.concatenate([unigrams, bigrams]), whole)
    assert len(small.ids) < 60  # it did forget


def test_dsir_log_weights_equal_the_installed_packages():
    pytest.importorskip("data_selection")
    nltk = pytest.importorskip("nltk")
    if tuple(map(int, nltk.__version__.split(".")[:2])) >= (3, 10):
        pytest.skip("NLTK 3.10 splits words by another engine")
    from make_dsir_reference import package_weights

    rows = [f"{row} {n} words, and more!" * (n % 5 + 1) for n, row in enumerate(REFERENCE["lower"])]
    theirs, _ = package_weights(rows, REFERENCE["upper"])
    ours, _ = dsir.dsir_log_weights([rows], [REFERENCE["upper"]])
    assert np.abs(ours - theirs).max() < 1e-6


def test_gumbel_top_k_samples_in_proportion_to_the_weights():
    log_weights = np.log([1.0, 2.0, 7.0])
    first = [np.argmax(log_weights + dsir.gumbel(3, seed)) for seed in range(4000)]
    assert np.allclose(np.bincount(first) / 4000, [0.1, 0.2, 0.7], atol=0.025)


def test_dsir_ranks_by_weight_plus_seeded_noise(rank, files):
    files = files(lower=40, upper=20)
    first, again, other = (rank("dsir", files, seed=seed) for seed in (0, 0, 1))
    plain = rank("dsir", files, dsir_no_noise=True, keep_fraction=0.25)
    assert first.ranked == again.ranked
    assert first.order != other.order
    weights = torch.tensor([row["log_weight"] for row in first.rows], dtype=torch.float64)
    assert torch.allclose(plain.scores, weights)
    for made, seed in ((first, 0), (other, 1)):
        noise = made.scores - torch.tensor([row["log_weight"] for row in made.rows])
        assert torch.allclose(noise, torch.from_numpy(dsir.gumbel(40, seed)), atol=1e-4)
    best = weights.argsort(descending=True, stable=True)
    assert plain.order == best.tolist()
    assert [row["kept"] for row in plain.ranked] == [True] * 10 + [False] * 30
    assert [row["rank"] for row in plain.ranked] == list(range(1, 41))


def test_dsir_sees_prompt_and_response_of_all_upper_rows_but_the_held_out(rank, files):
    files = files(lower=10, upper=30, heldout=3)
    split = rank("dsir", files)
    given = rank("dsir", files, upper_heldout=files["heldout"])
    assert "27 upper rows" in split.text and "30 upper rows" in given.text
    upper = [row["prompt"] + "\n" + row["response"] for row in read_rows(files["upper"])]
    lower = [row["prompt"] + "\n" + row["response"] for row in read_rows(files["lower"])]
    weights, _ = dsir.dsir_log_weights([lower], [upper])
    assert np.allclose([row["log_weight"] for row in given.rows], weights, atol=1e-9)


def test_dsir_short_rows_come_last_or_are_refused(rank, files, refused):
    files = files(lower=40, upper=20)
    words = np.array([len(dsir.WORDS.findall(row["prompt"] + "\n" + row["response"]))
                      for row in read_rows(files["lower"])])
    made = rank("dsir", files, dsir_min_words=10, keep_fraction=0.3)
    assert set(np.flatnonzero(words < 10)) == set(made.order[(words >= 10).sum():])
    line = refused(lambda: rank("dsir", files, out="no.jsonl", dsir_min_words=1000))
    assert "only 0 of 40 lower rows" in line and "32" in line
    assert not (made.file.parent / "no.jsonl").exists()
