"""qa.py: accuracies against brute-force log-likelihoods, random states untouched, bad input."""

import json
import random
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, make_tokenizer, write_rows

import eval as front
from evaluation import qa
from evaluation.losses import load_trained
from utils import UserError

SHARED = ROOT.parent / "shared"
FIVE = ("arc_easy", "arc_challenge", "openbookqa", "piqa", "winogrande")


def question(number):
    rng = random.Random(number)
    words = ["red", "blue", "stone", "river", "cold", "seven"]
    return {"question": " ".join(rng.choices(words, k=5)),
            "choices": [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(3)],
            "label": number % 3}


def blank(number):
    row = question(number)
    return {"question": f"{row['question']} _ {row['choices'][2]}.", "choices": row["choices"][:2],
            "label": number % 2}


def likelihood(model, tokenizer, context, continuation):
    """Sum of log p of the continuation's tokens, one plain forward; spaces belong to its front."""
    stripped = context.rstrip()
    continuation = context[len(stripped):] + continuation
    whole = tokenizer(stripped + continuation)["input_ids"]
    start = len(tokenizer(stripped)["input_ids"])
    with torch.no_grad():
        logps = torch.log_softmax(model(torch.tensor([whole])).logits[0].float(), dim=-1)
    return sum(logps[t - 1, whole[t]].item() for t in range(start, len(whole)))


def brute_force(model, tokenizer, task, rows):
    """(acc, acc_norm) of rows, from nothing but the task's description."""
    right, normed = 0, 0
    for row in rows:
        if task == "winogrande":
            before, after = row["question"].split("_", 1)
            pairs = [(before + choice, " " + after.strip()) for choice in row["choices"]]
        else:
            prompt = row["question"] if task == "openbookqa" else \
                f"{row['question']}\nAnswer:" if task == "boolq" else \
                row["question"] if task == "hellaswag" else \
                f"Question: {row['question']}\nAnswer:"
            pairs = [(prompt, " " + choice) for choice in row["choices"]]
        scores = [likelihood(model, tokenizer, *pair) for pair in pairs]
        per_character = [s / len(c) for s, c in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["label"]
        normed += per_character.index(max(per_character)) == row["label"]
    return right / len(rows), normed / len(rows)


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    pytest.importorskip("lm_eval")


@pytest.mark.slow
@pytest.mark.parametrize("task", [*FIVE, "hellaswag", "boolq"])
def test_eq_harness_is_brute_force_on_generated_questions(tmp_path, quiet, folders, task):
    """Every task file, PEFT model in memory, against one plain forward a choice."""
    import peft
    from transformers import AutoModelForCausalLM

    rows = [(blank if task == "winogrande" else question)(n) for n in range(20)]
    write_rows(tmp_path / f"{task}.jsonl", rows)
    tokenizer = make_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear",
                                                       init_lora_weights=False)).train()
    found = qa.evaluate(model, tokenizer, [task], tmp_path)[task]
    assert model.training
    acc, normed = brute_force(model.eval(), tokenizer, task, rows)
    assert (found["acc"], found["n"]) == (pytest.approx(acc), 20)
    if found["acc_norm"] is not None:
        assert found["acc_norm"] == pytest.approx(normed)
    assert found["acc_stderr"] == pytest.approx((acc * (1 - acc) / 19) ** 0.5)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the question files")
@pytest.mark.parametrize("task", FIVE)
def test_eq_harness_is_brute_force_on_real_questions(quiet, task):
    """50 questions a task with a real model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = SHARED / "models" / "instruct-6m"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), \
        AutoTokenizer.from_pretrained(name)
    path = SHARED / "data" / "qa" / f"{task.replace('_', '-')}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:50]]
    found = qa.evaluate(model, tokenizer, [task], path.parent, limit=50)[task]
    acc, normed = brute_force(model, tokenizer, task, rows)
    assert found["acc"] == pytest.approx(acc)
    if found["acc_norm"] is not None:
        assert found["acc_norm"] == pytest.approx(normed)


@pytest.mark.slow
def test_command_on_a_run_and_random_states(tmp_path, quiet, files, train, capfd):
    """A run's adapter counts; --base is the model without it; no generator has moved."""
    run = train(files(), epochs=1, lr=0.3)
    write_rows(tmp_path / "arc_easy.jsonl", [question(n) for n in range(30)])

    def states():
        return (random.getstate(), np.random.get_state()[1].tolist(),
                torch.get_rng_state().tolist())

    model, tokenizer, _ = load_trained(str(run.out))
    before = states()
    qa.evaluate(model, tokenizer, ["arc_easy"], tmp_path, limit=2)
    assert states() == before
    results = {}
    for name, flags in (("run", []), ("base", ["--base"])):
        front.main(["qa", str(run.out), "--tasks", "arc_easy", "--local", str(tmp_path),
                         "--out", str(tmp_path / f"{name}.json"), *flags])
        assert "RESULT " in capfd.readouterr().out
        results[name] = json.loads((tmp_path / f"{name}.json").read_text())["arc_easy"]
    rows = [question(n) for n in range(30)]
    assert results["run"]["acc"] == pytest.approx(
        brute_force(model, tokenizer, "arc_easy", rows)[0])
    with model.disable_adapter():
        assert results["base"]["acc"] == pytest.approx(
            brute_force(model, tokenizer, "arc_easy", rows)[0])


def test_random_states_are_put_back_after_an_error():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with pytest.raises(KeyError), qa.untouched_generators():
        random.random(), np.random.rand(), torch.rand(3)
        raise KeyError
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize("row, words", [
    ({"question": "a", "choices": ["x", "y"]}, "line 2"), ([1], "line 2"),
    ({"question": "a", "choices": "xy", "label": 0}, "choices"),
    ({"question": "a", "choices": ["x", "y"], "label": 2}, "label")])
def test_broken_question_files_are_named(tmp_path, row, words):
    write_rows(tmp_path / "piqa.jsonl", [question(0), row])
    with pytest.raises(UserError, match=words):
        qa.local_file(tmp_path, "piqa")
    write_rows(tmp_path / "winogrande.jsonl", [question(0)])
    with pytest.raises(UserError, match="sentence with _"):
        qa.local_file(tmp_path, "winogrande")
    with pytest.raises(UserError, match=r"arc_easy\.jsonl: no such file \(nor arc-easy"):
        qa.local_file(tmp_path, "arc_easy")


def test_without_the_harness_one_line_and_no_model_is_loaded(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    line = refused(lambda: front.main(["qa", str(tmp_path / "nowhere"), "--tasks", "piqa"]))
    assert "pip install 'lm_eval[hf]==0.4.13'" in line
    assert "name each task once" in refused(
        lambda: front.main(["qa", "x", "--tasks", "piqa,piqa"]))
    assert "--limit 0" in refused(lambda: front.main(["qa", "x", "--limit", "0"]))


def test_task_files_name_themselves():
    import yaml

    for file in qa.TASKS.glob("*.yaml"):
        config = yaml.safe_load(file.read_text())
        assert config["task"] == file.stem and config["dataset_path"] == "json"
    assert {*FIVE, "hellaswag", "boolq"} == {file.stem for file in qa.TASKS.glob("*.yaml")}
