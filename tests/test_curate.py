"""curate.py: which answer to recommend, and the curated file, from the files alone."""

import functools
import json
import math
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import CHATML, ROOT, flags, make_rows, make_tokenizer, read_rows, write_rows
from test_generate import make_prompts

import batches
import curate
import models
import train_online
import utils
from data.tokens import empty_prompt, load_rows
from paper.reproduce import right_answers
from toy import corpus

COLUMNS = ["row_id", "hash", "rank", "kept", "prompt", "response", "refined", "recommended",
           "margin", "refined_logp", "weight", "masked", "generated_at", "ratio", "logps",
           "old_logps", "way", "source", "why", "reason", "surprise", "end", "relevance",
           "fluency", "slip", "peak", "repetition", "echo", "guidance"]


# --- the rule -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("margin", "threshold", "fine", "expected"), [
    (0.5, 0.4, True, "refined"), (0.4, 0.4, True, "undecided"), (0.1, 0.4, True, "undecided"),
    (0.0, 0.4, True, "original"), (-1.0, 0.4, True, "original"), (9.0, 0.4, False, "original"),
    (9.0, None, True, "undecided"), (-9.0, None, True, "original"), (9.0, None, False, "original"),
    (1e-9, 0.0, True, "refined"), (math.nan, 0.0, True, "original")])
def test_recommendation(margin, threshold, fine, expected):
    """The original by default; the refined one when it is well formed and beyond the threshold;
    undecided in between, and wherever there is no threshold."""
    assert curate.recommend(margin, threshold, fine) == expected


def test_well_formed():
    """Complete, not empty; no more than half of the 4-grams occur before, but in short answers."""
    loop = [5, 6, 7] * 10
    assert not curate.well_formed(loop, True) and curate.well_formed(list(range(40)), True)
    # 24 tokens have 21 4-grams: with 11 different ones they are not repetitive, with 10 they are.
    for unique, expected in ((11, False), (10, True)):
        tokens = list(range(100, 100 + unique)) + [
            100 + i % unique for i in range(24 - unique)]
        grams = {tuple(tokens[i:i + 4]) for i in range(21)}
        assert len(grams) == unique and curate.well_formed(tokens, True) != expected
    assert curate.well_formed([5] * 11, True)  # eight grams
    assert not curate.well_formed([5] * 12, True)  # nine
    assert curate.well_formed([5, 6, 0], True)
    assert not curate.well_formed([5, 6, 7], False)
    assert not curate.well_formed([0], True)
    assert not curate.well_formed([*loop, 0], True)


def test_empty_prompt():
    """The template around an empty question; something also when prompts share all or nothing."""
    assert empty_prompt([[1, 2, 7, 8, 3], [1, 2, 9, 3], [1, 2, 7, 4, 3]]) == [1, 2, 3]
    assert empty_prompt([[1, 2, 3], [1, 2, 3]]) == [1, 2, 3]
    assert empty_prompt([[1, 2, 3]]) == [1, 2, 3]
    assert empty_prompt([[5, 6], [7, 8]]) == [5]
    assert empty_prompt([[1, 1, 3], [1, 3]]) == [1, 3]  # head and tail do not overlap
    assert empty_prompt([[4, 4, 4], [4, 4]]) == [4, 4]


@pytest.mark.parametrize(("chat", "text"), [
    (None, "User: \nAssistant:"),
    (CHATML, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")])
def test_empty_prompt_of_a_template(tmp_path, chat, text):
    rows = [{"prompt": f"{word} {n}", "response": "x"} for n, word in enumerate(
        ("alpha", "beta", "gamma", "delta"))]
    tokenizer = make_tokenizer(chat)
    loaded, _ = load_rows(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, name="lower",
                                 cache_dir=tmp_path / "cache")
    prompts = [batches.prompt_of(row) for row in loaded]
    found = tokenizer.decode(empty_prompt(prompts))
    assert found.replace("User: ", "User:") == text.replace("User: ", "User:")


def test_prompt_and_answer_rows():
    row = {"input_ids": [4, 5, 6, 7, 8], "trained": [0, 0, 0, 1, 1]}
    assert batches.prompt_of(row) == [4, 5, 6] and batches.response_of(row) == [7, 8]
    assert batches.answer_row([4, 5, 6], [7, 8]) == row


def test_check_room():
    rows = datasets.Dataset.from_list([{"trained": [0] * size + [1, 1]} for size in (5, 40, 12)])
    curate.check_room(rows, 60, 100)
    with pytest.raises(utils.UserError, match=r"61: behind .* prompt, 40 tokens,.*100;.*-length"):
        curate.check_room(rows, 61, 100)


def logp(model, prompt, answer):
    """log p(answer | prompt), summed, in a plain forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    logps = torch.log_softmax(logits[len(prompt) - 1:-1].double(), -1)
    return logps.gather(1, torch.tensor(answer)[:, None]).sum().item()


def test_eq_score_is_information_a_token_under_the_frozen_base(folders, adapters):
    """s(y) = (log p(y|x) - log p(y)) / |y|, the adapter switched off and on again."""
    base = models.load_model(str(folders["neox"]), torch.device("cpu"))
    prompts, answers, blank = make_prompts(5), make_prompts(5, seed=1), [9, 8]
    expected = [(logp(base, p, y) - logp(base, blank, y)) / len(y)
                for p, y in zip(prompts, answers, strict=True)]
    model = models.add_lora(base, adapter=str(adapters["neox"]))
    assert curate.scores(model, prompts, answers, blank).tolist() == pytest.approx(
        expected, abs=1e-5)
    tuned = (logp(model, prompts[0], answers[0]) - logp(model, blank, answers[0])) / len(answers[0])
    assert abs(tuned - expected[0]) > 0.01  # the adapter is on again, and would score otherwise


@pytest.fixture
def calibration(monkeypatch):
    """calibrate(margins, fine) with these margins of the trusted prompts' answers."""
    def call(margins, fine=None, prompt=10, context=64, hashes=None):
        count = len(margins)
        fine = [True] * count if fine is None else fine
        answers = [([5, 6, 0] if ok else [0], True) for ok in fine]
        sampling = {"max_new_tokens": 9, "temperature": 0.8, "end_ids": {0}, "batch_size": 3}
        rows = [batches.answer_row([3] * (prompt if n % 7 else 2), [4, 0]) for n in range(count)]
        rows = datasets.Dataset.from_dict({
            key: [row[key] for row in rows] for key in ("input_ids", "trained")} | {
            "prompt_hash": [*(hashes or range(count))]})
        asked, scored = [], []

        def generate(model, prompts, seeds, **options):
            asked.append((len(prompts), options))
            return answers[:len(prompts)]

        def scores(model, prompts, responses, blank):
            scored.append(responses)
            values = margins if len(scored) == 1 else [0.0] * count
            return torch.tensor(values[:len(prompts)], dtype=torch.float64)

        monkeypatch.setattr(curate, "generate", generate)
        monkeypatch.setattr(curate, "scores", scores)
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(
            max_position_embeddings=context))
        result = curate.calibrate(SimpleNamespace(config=config), rows, sampling, [3])
        return result, asked, scored
    return call


def test_eq_calibration_is_the_95th_percentile_of_one_half(calibration):
    """The even rows set the threshold, the odd ones measure the false-replacement rate."""
    generator = torch.Generator().manual_seed(0)
    margins = torch.randn(60, generator=generator, dtype=torch.float64).tolist()
    fine = [n % 5 != 1 for n in range(60)]
    (threshold, rate), asked, scored = calibration(margins, fine)
    even = sorted(margins[::2])
    place = 0.95 * 29  # linear interpolation between the order statistics around it
    expected = even[27] + (place - 27) * (even[28] - even[27])
    assert threshold == pytest.approx(expected)
    assert rate == sum(m > expected and ok for m, ok in zip(margins[1::2], fine[1::2],
                                                            strict=True)) / 30
    assert 0 < rate < 0.5
    assert asked == [(60, {"max_new_tokens": 9, "temperature": 0.0, "end_ids": {0},
                           "batch_size": 3, "label": "trusted prompts"})]
    assert scored[1] == [[4, 0]] * 60  # against the trusted answers
    assert calibration([-3.0] * 60)[0] == (0.0, 0.0)  # a threshold is never negative


@pytest.mark.parametrize(("count", "calibrated"), [(0, False), (39, False), (40, True)])
def test_too_few_trusted_rows_leave_no_threshold(calibration, count, calibrated):
    (threshold, rate), asked, _ = calibration([0.5] * count)
    assert (threshold is not None, rate is not None, bool(asked)) == (calibrated,) * 3
    if calibrated:
        assert threshold == 0.5 and rate == 0.0


def test_a_question_is_in_one_half_alone(calibration):
    """Of a question that two trusted rows ask the first one counts."""
    (threshold, rate), asked, scored = calibration([0.5] * 60, hashes=[*range(50), *range(10)])
    assert asked[0][0] == 50 and len(scored[1]) == 50 and (threshold, rate) == (0.5, 0.0)
    assert calibration([0.5] * 60, hashes=[*range(39), *[0] * 21])[0] == (None, None)


def test_trusted_prompts_without_room_for_an_answer_are_left_out(calibration):
    """Seven rows in eight would write beyond the context."""
    assert calibration([0.5] * 60, prompt=60)[0] == (None, None)
    assert calibration([0.5] * 60, prompt=55)[1][0][0] == 60


def test_an_answer_without_text_is_not_recommended(monkeypatch):
    """Spaces are complete, and not empty as tokens."""
    tokenizer = make_tokenizer()
    written = [([*tokenizer(text)["input_ids"], 0], True) for text in ("  ", "red stone")]
    for name, made in (("greedy", written), ("calibrate", (0.5, 0.0)), ("blank_prompt", [3]),
                       ("row_losses", (torch.tensor([1.0, 2.0]), torch.tensor([3, 4])))):
        monkeypatch.setattr(curate, name, lambda *rest, made=made: made)
    scores = iter([torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0])])
    monkeypatch.setattr(curate, "scores", lambda *rest: next(scores))
    run = SimpleNamespace(model=None, tokenizer=tokenizer, args=SimpleNamespace(template=None),
                          levels=SimpleNamespace(lower=[batches.answer_row([5], [6, 0])] * 2,
                                                 upper_heldout=None))
    refined, metrics = curate.refine(run, [0, 1], {})
    assert refined == {0: {"refined": "", "recommended": "original", "margin": 1.0,
                           "refined_logp": -3.0},
                       1: {"refined": "red stone", "recommended": "refined", "margin": 1.0,
                           "refined_logp": -8.0}}
    assert metrics == {"refined/threshold": 0.5, "refined/false_replacement": 0.0}


# --- the curated file -----------------------------------------------------------------------------

@pytest.fixture
def spied(monkeypatch):
    """The answers of every refresh, {position: Answers}."""
    seen, refresh = [], train_online.refresh

    def spy(*args):
        mask, made, values = refresh(*args)
        seen.append(made)
        return mask, made, values

    monkeypatch.setattr(train_online, "refresh", spy)
    return seen


def reload(run, folder):
    """(base, tuned model, tokenizer) from the files alone."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(folder)
    tuned = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder),
                                           run.out / "adapter")
    return base, tuned, AutoTokenizer.from_pretrained(folder)


def test_curated_rows(online, files, folders, spied):
    """Schema, and every value that a reader can compute from the run's other files."""
    paths = files(lower=17, upper=8, heldout=5)
    run = online(paths, batch=5, epochs=3, lr=1e-2, omega_lr=30, num_answers=3, k_gen=6,
                 ratio_masked=0.35, mask="dynamic", keep_fraction=0.6, max_new_tokens=9)
    base, tuned, tokenizer = reload(run, folders["llama"])
    source = read_rows(paths["lower"])
    assert [list(entry) for entry in run.curated] == [COLUMNS] * 17
    assert [entry["rank"] for entry in run.curated] == list(range(1, 18))
    assert [entry["kept"] for entry in run.curated] == [True] * 10 + [False] * 7
    weights = {entry["row_id"]: entry for entry in run.weights}
    for entry in run.curated:
        mine = weights[entry["row_id"]]
        assert {k: entry[k] for k in ("hash", "rank", "kept", "masked", "weight")} == {
            k: mine[k] for k in ("hash", "rank", "kept", "masked", "weight")}
        assert (entry["prompt"], entry["response"]) == (source[entry["row_id"]]["prompt"],
                                                        source[entry["row_id"]]["response"])
        assert entry["hash"] == utils.content_hash(entry["prompt"], entry["response"])
    # The rows that rank last, and no others, have a refined answer: the final model's greedy one.
    worst = {entry["row_id"] for entry in run.weights[-6:]}
    assert {e["row_id"] for e in run.curated if e["refined"] is not None} == worst
    prompts = {i: tokenizer(f"User: {row['prompt']}\nAssistant:")["input_ids"]
               for i, row in enumerate(source)}
    blank = empty_prompt(list(prompts.values()))
    for entry in run.curated:
        if entry["refined"] is None:
            assert entry["recommended"] == "original"
            assert entry["margin"] is entry["refined_logp"] is None
            continue
        prompt = prompts[entry["row_id"]]
        tokens = tuned.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=9,
                                attention_mask=torch.ones(1, len(prompt)))[0, len(prompt):].tolist()
        assert entry["refined"] == tokenizer.decode(tokens, skip_special_tokens=True).strip()
        assert entry["refined_logp"] == pytest.approx(logp(tuned, prompt, tokens), rel=1e-4)
        old = [*tokenizer(" " + entry["response"])["input_ids"], 0]
        margin = ((logp(base, prompt, tokens) - logp(base, blank, tokens)) / len(tokens)
                  - (logp(base, prompt, old) - logp(base, blank, old)) / len(old))
        assert entry["margin"] == pytest.approx(margin, abs=1e-4)
        assert entry["recommended"] in ("original", "undecided")  # five trusted rows are too few
    # The last refresh's answers: when, their log-probs then and now, the ratio.
    assert len(spied) == 2
    for entry in run.curated:
        made = spied[1].get(entry["row_id"])
        keys = ("generated_at", "ratio", "logps", "old_logps")
        if made is None:
            assert [entry[key] for key in keys] == [None] * 4
            continue
        assert entry["masked"] and entry["generated_at"] == 6
        now = [logp(tuned, row["input_ids"][:row["trained"].index(1)], batches.response_of(row))
               for row in made.rows]
        assert entry["logps"] == pytest.approx(now, rel=1e-4)
        assert entry["old_logps"] == made.old_logps.tolist() and len(entry["ratio"]) == 3
        assert entry["ratio"] == pytest.approx([math.exp(a - b) for a, b in zip(
            entry["logps"], entry["old_logps"], strict=True)])
    assert sum(entry["ratio"] is not None for entry in run.curated) == len(spied[1]) > 0
    choices = [entry["recommended"] for entry in run.curated if entry["refined"] is not None]
    assert run.result["refined/answers"] == 6 and run.result["refined/threshold"] is None
    for choice in ("original", "refined", "undecided"):
        assert run.result[f"refined/{choice}"] == choices.count(choice)


@pytest.mark.parametrize("options", [
    {}, {"correction": 0.6}], ids=["loss", "corrected"])
def test_masked_rows_are_ranked_among_themselves(online, files, options):
    """Ranks interleave the two groups by the share of the group that stands above. In them: by
    weight; a masked row, which gains weight by its own words, by its original's loss at the end."""
    run = online(files(lower=20, upper=6), batch=20, epochs=2, omega_lr=30, ratio_masked=0.5,
                 lr=1e-2, **options)
    for group in (True, False):
        ranked = [e for e in run.weights if e["masked"] == group]
        values = [-e["weight"] for e in ranked]
        if group:
            values = [e["final_loss"] - options.get("correction", 0) * e.get("attainable_loss", 0)
                      for e in ranked]
        assert len(values) == 10 and values == sorted(values)
    for first, second in zip(run.curated[::2], run.curated[1::2], strict=True):
        assert {first["masked"], second["masked"]} == {True, False}


@pytest.mark.parametrize("control", ["drop", "original"])
def test_controls_write_a_curated_set_too(online, files, control):
    run = online(files(lower=10, upper=6), batch=5, epochs=2, omega_lr=10, refine=control)
    assert sum(entry["refined"] is not None for entry in run.curated) == 3
    assert all(entry["ratio"] is None for entry in run.curated)
    assert sum(entry["masked"] for entry in run.curated) == 3


def test_labels_travel_with_the_rows(online, files, tmp_path):
    paths, source = files(upper=6), make_rows(18, seed=13)
    for number, row in enumerate(source):
        row |= {"bad": number % 3 == 0, "kind": "cut" if number % 3 == 0 else "clean"}
    paths["lower"] = write_rows(tmp_path / "lower.jsonl", source)
    run = online(paths, batch=18, epochs=1, omega_lr=20, ratio_masked=0.5)
    for entry in run.curated:
        assert list(entry) == [*COLUMNS, "bad", "kind"]
        assert (entry["bad"], entry["kind"]) == (source[entry["row_id"]]["bad"],
                                                 source[entry["row_id"]]["kind"])
    judged = [entry for entry in run.weights if not entry["masked"]]
    pairs = [good["weight"] > bad["weight"] for good in judged for bad in judged
             if bad["bad"] and not good["bad"]]
    assert pairs and run.result["weight_unmasked/auroc"] == pytest.approx(sum(pairs) / len(pairs))


def test_both_rankings_feed_keep(online, train, files):
    """`--keep` of the offline script reads weights.jsonl and curated.jsonl: the same rows."""
    paths = files(lower=12, upper=6)
    run = online(paths, batch=6, epochs=1, omega_lr=30, keep_fraction=0.5)
    kept = {entry["row_id"] for entry in run.curated if entry["kept"]}
    assert len(kept) == 6
    for name in ("weights", "curated"):
        again = train(paths, out=name, method="sft", keep=run.out / f"{name}.jsonl", batch=6,
                      epochs=1)
        assert {entry["row_id"] for entry in again.weights} == kept


def test_the_toy_is_judged_by_its_own_truth(capfd, tmp_path, monkeypatch):
    """The embedded toy, 60 rows of it: shares of right answers by counting in curated.jsonl."""
    if not (ROOT / "toy" / "model" / "config.json").exists():
        pytest.skip("the embedded base model has not been made yet (python -m toy train)")
    monkeypatch.setattr(corpus, "make_rows", functools.partial(
        corpus.make_rows, num_lower=60, num_upper=30, num_heldout=44))
    train_online.main(flags(out=tmp_path / "run", cache_dir=tmp_path / "cache", batch=20, epochs=1,
                            k_gen=2, ratio_masked=0.5, max_new_tokens=24))
    result = json.loads(capfd.readouterr().out.splitlines()[-1].removeprefix("RESULT "))
    rows = read_rows(tmp_path / "run" / "curated.jsonl")
    refined = [row for row in rows if row["refined"] is not None]
    right = [corpus.kind_of(row["prompt"], row["refined"]) == "clean" for row in refined]
    assert len(refined) == 30 and 0 < sum(right) < 30
    found = right_answers(tmp_path / "run")
    assert found["refined/right_always"] == sum(right) / 30
    assert found["refined/right_never"] == sum(not row["bad"] for row in refined) / 30
    assert result["refined/threshold"] > 0 and 0 <= result["refined/false_replacement"] < 0.5
    for row in refined:  # the rule, with the threshold that the run calibrated
        assert row["recommended"] == curate.recommend(
            row["margin"], result["refined/threshold"], row["recommended"] != "original"
            or row["margin"] <= 0)
    steps = read_rows(tmp_path / "run" / "metrics.jsonl")
    shares = [step[key] for step in steps for key in step if key.startswith("answers_right/")]
    assert shares and all(0 <= share <= 1 for share in shares)
