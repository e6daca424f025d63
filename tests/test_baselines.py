"""baselines.py and recipes.py: every score against an independent computation, and bad input."""

import gzip
import json
import shutil
from types import SimpleNamespace

import common
import loading
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import recipes
import torch
from conftest import ROOT, flags, listing, make_llama, read_rows, write_rows
from safetensors.torch import load_file

import baselines
import data
import train_offline
import utils
from utils import UserError

REFERENCE = json.loads((ROOT / "tests" / "data" / "dsir_reference.json").read_text())


@pytest.fixture
def rank(tmp_path, capfd, folders):
    """rank(method, files, **flags): `baselines.main` -> rows by row_id, order, text, result."""
    def call(method, files, out="kept.jsonl", **options):
        if files:
            options = {key: files[key] for key in ("lower", "upper") if key in files} | {
                "model": folders["llama"]} | options
        options = {"out": tmp_path / out, "cache_dir": tmp_path / "cache"} | options
        capfd.readouterr()
        baselines.main([method, *flags(**options)])
        text = capfd.readouterr().out
        rows = read_rows(options["out"])
        return SimpleNamespace(
            order=[row["row_id"] for row in rows], text=text, file=options["out"],
            rows=sorted(rows, key=lambda row: row["row_id"]), ranked=rows,
            scores=torch.tensor([row["score"] for row in sorted(rows, key=lambda r: r["row_id"])],
                                dtype=torch.float64),
            result=json.loads(text.splitlines()[-1].removeprefix("RESULT ")))
    return call


def spearman(a, b):
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


# --- DSIR -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("limit, key", [(None, "log_weights"), (600, "log_weights_fitted_on_600")])
@pytest.mark.parametrize("at_once", [7, 1000])
def test_dsir_log_weights_equal_the_packages(limit, key, at_once):
    lower = [REFERENCE["lower"][i:i + at_once] for i in range(0, len(REFERENCE["lower"]), at_once)]
    weights, words = baselines.dsir_log_weights(lower, [REFERENCE["upper"]], fit_ngrams=limit)
    assert np.abs(weights - np.array(REFERENCE[key])).max() < 1e-6
    assert words.tolist() == REFERENCE["words"]


def test_dsir_hashes_survive_a_full_table_and_a_forgotten_vocabulary():
    texts = REFERENCE["lower"]
    whole, _ = baselines.NgramHasher()(texts)
    small = baselines.NgramHasher(table_bits=2, max_words=10)
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
    ours, _ = baselines.dsir_log_weights([rows], [REFERENCE["upper"]])
    assert np.abs(ours - theirs).max() < 1e-6


def test_gumbel_top_k_samples_in_proportion_to_the_weights():
    log_weights = np.log([1.0, 2.0, 7.0])
    first = [np.argmax(log_weights + baselines.gumbel(3, seed)) for seed in range(4000)]
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
        assert torch.allclose(noise, torch.from_numpy(baselines.gumbel(40, seed)), atol=1e-4)
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
    weights, _ = baselines.dsir_log_weights([lower], [upper])
    assert np.allclose([row["log_weight"] for row in given.rows], weights, atol=1e-9)


@pytest.fixture
def preferences(files, tmp_path):
    """Row files whose 30 upper pairs hold one of two equal answers and one without an answer."""
    files = files(lower=12, upper=30)
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {n}"}
             for n, row in enumerate(read_rows(files["upper"]))]
    pairs[4]["rejected"], pairs[9]["rejected"] = pairs[4]["chosen"], ""
    return {"lower": files["lower"], "upper": write_rows(tmp_path / "pairs.jsonl", pairs)}, pairs


def test_the_upper_rows_of_pairs_are_those_of_training(preferences, folders, tmp_path):
    files, _ = preferences
    words = flags(**files, model=folders["llama"], upper_loss="dpo", heldout_rows=6,
                  cache_dir=tmp_path / "cache", out=tmp_path / "kept.jsonl")
    tokenizer = loading.load_tokenizer(folders["llama"])
    for seed in range(3):
        theirs = common.load_levels(
            train_offline.parse_args([*words, "--seed", str(seed)]), tokenizer, 128)
        for method in ("dsir", "less"):
            ours, _ = baselines.load_levels(baselines.parse_args([method, *words, "--seed",
                                                                  str(seed)]))
            for name, count in (("upper", 22), ("upper_heldout", 6)):
                ids = list(getattr(ours, name)["row_id"])
                assert ids == list(getattr(theirs, name)["row_id"])
                assert len(ids) == count and not {4, 9} & {*ids}


def test_dsir_and_less_see_the_chosen_responses(rank, preferences, tmp_path):
    """As if the upper rows were the chosen ones and nothing else."""
    files, pairs = preferences
    chosen = [{"prompt": pair["prompt"], "response": pair["chosen"]}
              for number, pair in enumerate(pairs) if number not in (4, 9)]
    alone = files | {"upper": write_rows(tmp_path / "chosen.jsonl", chosen)}
    for method, options in (("dsir", {}), ("less", LESS)):
        made = rank(method, files, out=f"{method} pairs", upper_loss="dpo", **options)
        same = rank(method, alone, out=f"{method} chosen", **options)
        assert "26 upper rows" in made.text
        assert made.ranked == same.ranked


def test_dsir_short_rows_come_last_or_are_refused(rank, files, refused):
    files = files(lower=40, upper=20)
    words = np.array([len(baselines.WORDS.findall(row["prompt"] + "\n" + row["response"]))
                      for row in read_rows(files["lower"])])
    made = rank("dsir", files, dsir_min_words=10, keep_fraction=0.3)
    assert set(np.flatnonzero(words < 10)) == set(made.order[(words >= 10).sum():])
    line = refused(lambda: rank("dsir", files, out="no.jsonl", dsir_min_words=1000))
    assert "only 0 of 40 lower rows" in line and "32" in line
    assert not (made.file.parent / "no.jsonl").exists()


# --- LESS -----------------------------------------------------------------------------------------

LESS = {"epochs": 2, "warmup_fraction": 0.5, "lr": 1e-2, "batch": 4, "lora_rank": 2,
        "lora_alpha": 4}


def test_adam_direction_by_hand():
    gradient, m, v = (torch.tensor(x, dtype=torch.float64) for x in
                      ([0.5, 1e-3, 0.0], [0.2, 0.0, 0.01], [0.04, 0.0, 1e-4]))
    wanted = [0.23 / (0.04021 + 1e-8) ** 0.5,      # 0.9 * 0.2 + 0.1 * 0.5; 0.999 * 0.04 + 0.00025
              1e-4 / (1e-9 + 1e-8) ** 0.5,         # outside the root the epsilon would give 3.16
              0.009 / (9.99e-5 + 1e-8) ** 0.5]
    made = baselines.adam_direction(gradient, m, v)
    assert torch.allclose(made, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12)


def test_random_signs_are_one_fixed_balanced_matrix():
    signs = baselines.random_signs(0, 3000, 200, seed=0)
    assert signs.shape == (3000, 200) and set(signs.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(baselines.random_signs(1234, 50, 200, seed=0), signs[1234:1284])
    assert abs(signs.mean()) < 5 / signs.numel() ** 0.5
    columns = signs.T @ signs / 3000 - torch.eye(200)
    rows = signs @ signs.T / 200 - torch.eye(3000)
    for products, size in ((columns, 3000), (rows, 200)):  # as many near 0 as of independent signs
        assert 0.97 < products.square().sum().item() * size / (len(products) ** 2 - len(products)) \
            < 1.03
        assert products.abs().max() < 7 / size ** 0.5
    assert (baselines.random_signs(0, 3000, 200, seed=1) == signs).double().mean() < 0.51


def test_project_is_the_product_with_that_matrix():
    vectors = torch.randn(3, 1300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = baselines.project(vectors, 70, seed=5)
    assert torch.allclose(made, vectors @ baselines.random_signs(0, 1300, 70, 5).double())


def brute_gradients(folder, checkpoint, rows, rank, alpha):
    """Per-row gradients by the model's own logits and .backward(), float64, (n, P)."""
    base = loading.load_model(folder, torch.device("cpu"), "float64")
    model = loading.add_lora(base, rank, alpha)
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
    return data.load_rows(path, loading.load_tokenizer(folder), cache_dir=str(cache))[0]


def test_less_score_equals_brute_force(rank, folders, tmp_path):
    from conftest import make_rows

    lower = write_rows(tmp_path / "lower.jsonl", make_rows(9, 1))
    upper = [row | {"kind": "a"} for row in make_rows(7, 2)]
    for position, row, group in ((1, 5, "b"), (3, 2, "c")):  # what two groups ask for is there
        upper[position] = make_rows(9, 1)[row] | {"kind": group}
    upper = write_rows(tmp_path / "upper.jsonl", upper)
    heldout = write_rows(tmp_path / "heldout.jsonl", make_rows(2, 3))
    made = rank("less", {"lower": lower, "upper": upper}, upper_heldout=heldout, dtype="float64",
                project=0, upper_groups=True, **LESS | {"warmup_fraction": 0.6})
    assert "projection skipped" in made.text
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
    chosen = data.permutation(10, 0, 0, stream=4)[:4].tolist()
    utils.seed_everything(0)
    base = loading.load_model(folders["llama"], torch.device("cpu"), "float64")
    model = loading.add_lora(base, 2, 4)
    start = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
    gradient = brute_gradients(folders["llama"], start, [rows[i] for i in chosen], 2, 4).mean(dim=0)
    gradient *= min(1.0, 1.0 / (gradient.norm().item() + 1e-6))
    assert gradient.norm() > 1e-3
    assert torch.allclose(state["m"], 0.1 * gradient, atol=1e-12)
    assert torch.allclose(state["v"], 0.001 * gradient ** 2, atol=1e-14)
    # Adam's first step, bias-corrected, is lr * sign(g); the one step of the run is a rising one.
    assert torch.allclose(start - state["theta"],
                          0.5e-2 * gradient / (gradient.abs() + 1e-8), atol=1e-9)


def test_less_projection_keeps_the_ranking(rank, files):
    files = files(lower=40, upper=20)
    options = LESS | {"lora_rank": 16, "lora_alpha": 16}
    exact = rank("less", files, out="exact", project=0, **options)
    made = rank("less", files, out="projected", **options)
    assert "14848 numbers, projected to 8192" in made.text
    assert spearman(exact.scores, made.scores) >= 0.95
    assert not torch.equal(exact.scores, made.scores)


def test_less_skips_a_projection_that_would_not_shorten(rank, files):
    made = rank("less", files(), **LESS)
    assert "1856 numbers, projection skipped: no longer than --project 8192" in made.text
    features = np.load(f"{made.file}.less/lower_1.npy", mmap_mode="r")
    assert features.shape == (12, 1856) and features.dtype == np.float16
    assert np.allclose(np.linalg.norm(features.astype(np.float64), axis=1), 1, atol=1e-3)


def test_less_continues_after_a_kill(rank, files, monkeypatch):
    files = files(lower=30, upper=9)
    monkeypatch.setattr(baselines, "ROWS_AT_ONCE", 4)
    whole = rank("less", files, out="whole.jsonl", **LESS)
    real, calls = baselines.row_gradients, []

    def killed(model, theta, rows):
        calls.extend(rows)
        if len(calls) >= 9 + 30 + 9 + 18:  # in the fifth block of the last checkpoint's lower rows
            raise KeyboardInterrupt
        return real(model, theta, rows)
    monkeypatch.setattr(baselines, "row_gradients", killed)
    with pytest.raises(KeyboardInterrupt):
        rank("less", files, **LESS)
    assert not (whole.file.parent / "kept.jsonl").exists()
    calls.clear()
    monkeypatch.setattr(baselines, "row_gradients", lambda *a: calls.extend(a[2]) or real(*a))
    made = rank("less", files, **LESS)
    assert len(calls) == 30 - 16  # what was written was not made again
    assert made.ranked == whole.ranked
    calls.clear()
    kept = rank("less", files, keep_fraction=0.5, **LESS)  # another share costs no gradient
    assert not calls and sum(row["kept"] for row in kept.rows) == 15


def test_less_refuses_features_of_another_run(rank, files, refused, folders, tmp_path):
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
                          ("lora_rank", {"lora_rank": 3}), ("seed", {"seed": 1})):
        line = refused(lambda options=options: rank("less", rows, **LESS | options))
        assert "cannot resume: " in line and f" {word} was" in line
        assert str(made.file) + ".less" in line
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_less_groups_need_a_column(rank, files, refused):
    rows = files()
    assert "no column kind" in refused(lambda: rank("less", rows, upper_groups=True, **LESS))


# --- loss, length, IFD, random --------------------------------------------------------------------

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
    order = {name: baselines.ifd_scores(ratios, name).argsort(descending=True).tolist()
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


# --- the command line -----------------------------------------------------------------------------

def test_training_keeps_exactly_the_kept_rows(rank, files, train, tmp_path):
    files = files(lower=20)
    lower = read_rows(files["lower"])
    lower[4]["response"] = ""  # dropped: row numbers and positions differ from here on
    write_rows(files["lower"], lower)
    made = rank("random", files, keep_fraction=0.5)
    kept = {row["row_id"] for row in made.rows if row["kept"]}
    assert len(kept) == 10 and 4 not in {row["row_id"] for row in made.rows}
    trained = train(files, method="sft", keep=made.file, epochs=1)
    assert {row["row_id"] for row in trained.weights} == kept


def test_without_a_model_no_row_is_dropped_for_its_length(rank, files):
    files = files(lower=6)
    rows = read_rows(files["lower"])
    rows[2]["prompt"] = "stone " * 4000
    write_rows(files["lower"], rows)
    assert len(rank("length", files, model=None).rows) == 6
    assert len(rank("length", files, max_prompt=64).rows) == 5


def test_known_labels_are_reported_by_kind(rank):
    made = rank("random", None, seed=3)
    assert made.result["rows"] == 2400 and made.result["kept"] == 1920
    assert 0.45 < made.result["random/auroc"] < 0.55
    assert {"random/auroc/contrary", "random/recall/plain", "time/seconds"} <= made.result.keys()
    assert {"row_id", "hash", "rank", "kept", "score", "bad", "kind"} == made.rows[0].keys()
    assert "ranking by" in made.text


@pytest.mark.slow
def test_every_method_runs_on_the_toy(rank):
    aurocs = {method: rank(method, None).result for method in ("dsir", "loss", "length", "ifd")}
    less = rank("less", None, epochs=2).result
    assert less["less/auroc/contrary"] > 0.7 > aurocs["loss"]["loss/auroc/contrary"]
    assert aurocs["loss"]["loss/auroc/plain"] > 0.9 < aurocs["ifd"]["ifd/auroc/plain"]


@pytest.mark.parametrize("method, options, said", [
    ("dsir", {"upper": None}, "--upper is missing; dsir needs it"),
    ("less", {"model": None}, "--model is missing; less needs it"),
    ("loss", {"lower": None}, "--lower is missing"),
    ("random", {"keep_fraction": 0}, "--keep-fraction 0.0: must lie in (0, 1]"),
    ("random", {"keep_fraction": 0.01}, "of 12 rows keeps none"),
    ("random", {"out": "."}, "is a folder"),
    ("less", {"warmup_fraction": 2}, "--warmup-fraction 2.0"),
    ("less", {"project": -1}, "--project 0 or more"),
    ("less", {"epochs": 0}, "--epochs 0: must be 1 or more"),
    ("dsir", {"seed": -1}, "--seed -1: must lie between 0 and 2**63 - 1"),
    ("less", {"seed": 99999999999999999999}, "--seed 99999999999999999999: must lie between"),
    ("random", {"lower": ""}, "lower: the name of the source is empty"),
    ("loss", {"device": "mps"}, "--device mps: no such device"),
    ("dsir", {"upper_loss": "dpo"}, "preference pairs need chosen and rejected columns"),
    ("dsir", {"upper_loss": "dpo", "toy_upper": "unrelated"}, "--toy-upper unrelated"),
    ("less", {"lr": 1e30, "warmup_fraction": 1, "batch": 2}, "not finite"),
    ("dsir", {"upper": "empty.jsonl"}, "upper: the source holds no rows"),
    ("loss", {"model": "nowhere/at/all"}, "no such folder"),
])
def test_bad_input_is_one_line_and_leaves_nothing(rank, files, refused, tmp_path, monkeypatch,
                                                  method, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    rows = files()
    line = refused(lambda: rank(method, rows, **options))
    assert said in line
    assert not list(tmp_path.glob("*kept.jsonl")) and not list(tmp_path.glob(".*"))


def test_out_may_not_be_one_of_the_sources(rank, files, refused, tmp_path):
    rows = files(lower=12, upper=8, heldout=4)
    before = {name: (tmp_path / name).read_bytes() for name in listing(tmp_path)}
    (tmp_path / "folder").mkdir()
    inside = shutil.copy(rows["lower"], tmp_path / "folder" / "train.jsonl")
    (tmp_path / "link.jsonl").symlink_to(rows["lower"])
    for flag, out, options in (
            ("lower", rows["lower"], {}), ("lower", tmp_path / "link.jsonl", {}),
            ("upper", rows["upper"], {}), ("lower", inside, {"lower": tmp_path / "folder"}),
            ("upper-heldout", rows["heldout"], {"upper_heldout": rows["heldout"]})):
        line = refused(lambda out=out, options=options: rank("dsir", rows, out=out, **options))
        assert f"holds the rows of --{flag}, which the ranking would replace" in line
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    made = rank("random", rows, lower=tmp_path / "folder", out="folder/kept.jsonl")
    assert len(made.rows) == 12  # beside a file that is read


def test_a_ranking_made_without_a_model_fits_all(rank, files, train, folders, tmp_path):
    """Answers that end in the model's end marker: `random` does not know that it is one."""
    files = files(lower=10)
    lower = read_rows(files["lower"])
    for row, marker in zip(lower, ("<|im_end|>", "<eos>", "<|endoftext|>"), strict=False):
        row["response"] += marker
    write_rows(files["lower"], lower)
    model = shutil.copytree(folders["llama"], tmp_path / "model")
    tokenizer = loading.load_tokenizer(model)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(model)
    made = rank("random", files, model=None, keep_fraction=1)
    run = train(files, model=model, method="sft", keep=made.file, epochs=1)
    assert [row["hash"] for row in sorted(run.weights, key=lambda row: row["row_id"])] == [
        row["hash"] for row in made.rows]


# --- recipes --------------------------------------------------------------------------------------

@pytest.fixture
def copies(tmp_path):
    """Small copies of the source files in the hub's layout: 60 SlimOrca rows, 30 attempts ..."""
    root = tmp_path / "copies"
    hubs = {name: root / name for name in (
        "yahma/alpaca-cleaned", "Open-Orca/OpenOrca", "Open-Orca/SlimOrca",
        "Anthropic/hh-rlhf/red-team-attempts", "Dahoas/rm-hh-rlhf/data")}
    for folder in hubs.values():
        folder.mkdir(parents=True)
    (hubs["yahma/alpaca-cleaned"] / "alpaca_data_cleaned.json").write_text(json.dumps(
        [{"instruction": f"do {n}", "input": "", "output": f"done {n}"} for n in range(5)]))
    for name, count in (("1M-GPT4-Augmented", 20), ("3_5M-GPT3_5-Augmented", 9)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
            [{"id": f"{name}.{n}", "system_prompt": "be good", "question": f"q {name} {n}",
              "response": f"r {n}"} for n in range(count)]),
            hubs["Open-Orca/OpenOrca"] / f"{name}.parquet")
    write_rows(hubs["Open-Orca/SlimOrca"] / recipes.SLIMORCA[1], [{"conversations": [
        {"from": "system", "value": "you are", "weight": 0.0},
        {"from": "human", "value": f"slim {n}", "weight": 0.0},
        {"from": "gpt", "value": f"orca {n}", "weight": 1.0}]} for n in range(60)])
    attempts = [{"transcript": f"\n\nHuman: red {n}?\n\nAssistant: bad {n}.\nMore.\n\nHuman: and?"
                               "\n\nAssistant: no", "rating": 4.0, "tags": None} for n in range(30)]
    with gzip.open(root / recipes.RED_TEAM[0] / recipes.RED_TEAM[1], "wt") as file:
        json.dump(attempts, file)
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
            [{"prompt": f"\n\nHuman: {split} {n}\n\nAssistant:", "chosen": " yes",
              "rejected": " no"} for n in range(4)]),
            hubs["Dahoas/rm-hh-rlhf/data"] / f"{split}-00000-of-00001-ab.parquet")
    return root


def built(name, copies, tmp_path):
    return read_rows(recipes.resolve(f"{name}:{copies}", tmp_path / "cache"))


def test_recipes_build_from_local_copies(copies, tmp_path, monkeypatch):
    def pairs(name):
        return [(row["prompt"], row["response"]) for row in built(name, copies, tmp_path)]

    assert built("alpaca-cleaned", copies, tmp_path)[4] == {
        "instruction": "do 4", "input": "", "output": "done 4"}
    assert pairs("openorca") == [(f"q 1M-GPT4-Augmented {n}", f"r {n}") for n in range(20)]
    assert pairs("slimorca") == [(f"slim {n}", f"orca {n}") for n in range(60)]
    assert pairs("red-team") == [(f"red {n}?", f"bad {n}.\nMore.") for n in range(30)]
    hh = built("rm-hh-rlhf", copies, tmp_path)
    assert len(hh) == 4 and hh[0] == {
        "prompt": "\n\nHuman: train 0\n\nAssistant:", "chosen": " yes", "rejected": " no"}
    for name, value in (("RED_ROWS", 12), ("REDORCA_ROWS", 32), ("BLUEORCA_ROWS", 25)):
        monkeypatch.setattr(recipes, name, value)
    red, blue = built("redorca", copies, tmp_path), pairs("blueorca")
    assert [row["kind"] for row in red] == ["red-team"] * 12 + ["clean"] * 20
    assert [row["bad"] for row in red] == [True] * 12 + [False] * 20
    assert [row["prompt"] for row in red[:12]] == [f"red {n}?" for n in range(12)]
    slim = {row["prompt"] for row in red[12:]}
    assert len(slim) == 20 and len(blue) == 25 and not slim & {prompt for prompt, _ in blue}
    assert slim != {f"slim {n}" for n in range(20)}  # a sample, not the first rows


def test_recipes_too_small_copies_are_shared(copies, tmp_path, capsys):
    red, blue = (built(name, copies, tmp_path) for name in ("redorca", "blueorca"))
    assert "SlimOrca has 60 rows here" in capsys.readouterr().out
    assert len(red) == 30 + 26 and len(blue) == 34
    assert not {row["prompt"] for row in red} & {row["prompt"] for row in blue}


def test_recipes_are_read_by_training(copies, tmp_path, folders):
    tokenizer = loading.load_tokenizer(folders["llama"])
    for name, count in (("redorca", 56), ("rm-hh-rlhf", 4), ("alpaca-cleaned", 5)):
        path = recipes.resolve(f"{name}:{copies}", tmp_path / "cache")
        rows, _ = data.load_rows(path, tokenizer, cache_dir=str(tmp_path / "cache"))
        assert len(rows) == count
        if name == "redorca":
            assert sum(rows["bad"]) == 30 and rows[0]["kind"] == "red-team"


def test_recipes_are_built_once_and_again_when_a_source_changes(copies, tmp_path):
    cache = tmp_path / "cache"
    first = recipes.resolve(f"red-team:{copies}", cache)
    stamp = first.stat().st_mtime_ns
    assert recipes.resolve(f"red-team:{copies}", cache) == first
    assert first.stat().st_mtime_ns == stamp
    red = copies / recipes.RED_TEAM[0] / recipes.RED_TEAM[1]
    with gzip.open(red, "wt", encoding="utf-8") as file:  # one object a line; U+2028 ends none
        file.write('{"transcript": "\\n\\nHuman: one\\n\\nAssistant: li\u2028ne"}\n')
    second = recipes.resolve(f"red-team:{copies}", cache)
    assert second != first
    assert [row["response"] for row in read_rows(second)] == ["li\u2028ne"]


def test_recipes_from_the_hub(copies, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(hub, repo_type, allow_patterns, etag_timeout):
        asked.append((hub, repo_type, allow_patterns))
        return str(copies / hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = recipes.resolve("redorca", tmp_path / "cache")
    assert asked == [(hub, "dataset", [file]) for hub, file in (recipes.RED_TEAM, recipes.SLIMORCA)]
    assert len(read_rows(path)) == 56

    def offline(*_, **__):
        raise OSError("no route\nto host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"cannot be loaded from the hub \(no route\)"):
        recipes.resolve("slimorca", tmp_path / "cache")


def test_recipes_bad_sources(copies, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    for source in ("owner/name", "lower.jsonl", "orca", tmp_path):
        assert recipes.resolve(source, cache) == source
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slimorca").mkdir()
    assert recipes.resolve("slimorca", cache) == "slimorca"  # a folder of that name comes first
    with pytest.raises(UserError, match=r"alpaca_data_cleaned\.json: no such file"):
        recipes.resolve(f"alpaca-cleaned:{tmp_path}", cache)
    red = copies / recipes.RED_TEAM[0] / recipes.RED_TEAM[1]
    red.write_bytes(red.read_bytes()[:40])
    with pytest.raises(UserError, match=r"not a valid jsonl\.gz"):
        recipes.resolve(f"red-team:{copies}", cache)
    write_rows(copies / "Open-Orca/SlimOrca" / recipes.SLIMORCA[1], [{"conversation": []}])
    with pytest.raises(UserError, match=r"row 0: not a row of this data set.*conversations"):
        recipes.resolve(f"slimorca:{copies}", cache)
    assert not [name for name in listing(cache) if "slimorca" in name or "red-team" in name]
