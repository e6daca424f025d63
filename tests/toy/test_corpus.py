"""The embedded default: rows with planted faults that are what they claim, and the base model."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, python
from safetensors.torch import load_file

from toy import __main__ as command
from toy import corpus
from toy.base import TEMPLATE, encode, train_base
from utils import read_jsonl

SEEDS = (0, 1)


@pytest.fixture(scope="module", params=SEEDS)
def sets(request):
    return corpus.make_rows(seed=request.param)


@pytest.fixture(scope="module")
def base():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (AutoModelForCausalLM.from_pretrained(corpus.MODEL, dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(corpus.MODEL))


def auroc(rows, scores, kind):
    """Chance that a row of `kind` scores above a clean one; ties count one half."""
    scores = torch.as_tensor(scores, dtype=torch.float64)
    bad = scores[[row["kind"] == kind for row in rows]][:, None]
    clean = scores[[row["kind"] == "clean" for row in rows]][None]
    return ((bad > clean).double() + (bad == clean).double() / 2).mean().item()


# ---- the rows ----------------------------------------------------------------------------------

def test_runs_of_one_seed_may_write_the_rows_at_the_same_time(tmp_path, monkeypatch):
    """A second process writes all four files while the first is about to put one in its place."""
    small, replace, second = {"num_lower": 8, "num_upper": 8, "num_heldout": 8}, os.replace, []

    def interrupted(*paths):
        if not second:
            second.append(subprocess.run(
                [sys.executable, "-c",
                 f"from toy import corpus; corpus.write({str(tmp_path)!r}, **{small})"],
                cwd=ROOT, check=True))
        replace(*paths)

    monkeypatch.setattr(os, "replace", interrupted)
    paths = corpus.write(tmp_path, **small)
    assert second and sorted(tmp_path.iterdir()) == sorted(paths.values())
    assert [len(read_jsonl(path)) for path in paths.values()] == [8] * 4


def test_same_seed_same_bytes(tmp_path):
    small = {"num_lower": 50, "num_upper": 10, "num_heldout": 10}
    written = [corpus.write(tmp_path / name, seed=seed, **small)
               for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    assert list(written[0]) == ["upper", "lower", "heldout", "lower_heldout"]
    for name in written[0]:
        first, again, other = (paths[name].read_bytes() for paths in written)
        assert first == again != other
        assert json.loads(first.splitlines()[0]).keys() == {
            "prompt", "response", "bad", "kind", "family", "answer"}


@pytest.mark.parametrize(("words", "options"), [
    ([], {}), (["--seed", "3"], {"seed": 3}),
    (["--noise", "0.6", "--contrary", "0.5", "--upper", "unrelated"],
     {"noise": 0.6, "contrary_share": 0.5, "upper": "unrelated"}),
    (["--noise", "0", "--upper", "pairs"], {"noise": 0, "upper": "pairs"})])
def test_write_by_the_command_line(tmp_path, capsys, words, options):
    """The four files by name, their rows those of `make_rows`; their paths are printed."""
    command.main(["write", "--out", str(tmp_path / "new" / "rows"), *words])
    printed, expected = capsys.readouterr().out.split(), corpus.make_rows(**options)
    assert [Path(path).stem for path in printed] == list(expected)
    for path, rows in zip(printed, expected.values(), strict=True):
        assert Path(path).parent == tmp_path / "new" / "rows" and read_jsonl(path) == rows


def test_write_refuses_a_share_that_is_none(tmp_path, refused):
    for words in (["--noise", "1.5"], ["--contrary", "-0.1"], ["--noise", "nan"]):
        line = refused(lambda words=words: command.main(
            ["write", "--out", str(tmp_path / "rows"), *words]))
        assert f"{words[0]} {words[1]}: must lie in [0, 1]" in line
    assert not (tmp_path / "rows").exists()


def test_the_module_is_a_command(tmp_path):
    """`python -m toy write`; a folder that cannot be made is one line and exit code 2."""
    (tmp_path / "file").write_text("")
    given, environment = python("-m", "toy", "write", "--out")
    done = subprocess.run([*given, str(tmp_path / "rows"), "--seed", "1"], cwd=ROOT,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(".jsonl") == 4, done.stderr
    assert read_jsonl(tmp_path / "rows" / "lower.jsonl") == corpus.make_rows(seed=1)["lower"]
    done = subprocess.run([*given, str(tmp_path / "file" / "rows")], cwd=ROOT, env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "choose another path" in done.stderr


def test_counts_and_shares(sets):
    assert {name: len(rows) for name, rows in sets.items()} == {
        "upper": 256, "lower": 2400, "heldout": 400, "lower_heldout": 400}
    kinds = collections.Counter(row["kind"] for row in sets["lower"])
    assert kinds == {"clean": 1440, "plain": 480, "contrary": 480}
    for kind in kinds:  # each family has its share of every kind
        families = collections.Counter(r["family"] for r in sets["lower"] if r["kind"] == kind)
        assert set(families.values()) == {kinds[kind] // len(corpus.CONTESTED)}


def test_no_prompt_occurs_twice(sets):
    prompts = [row["prompt"] for rows in sets.values() for row in rows]
    assert len(set(prompts)) == len(prompts)


def test_every_row_is_what_it_claims(sets):
    for name, rows in sets.items():
        for row in rows:
            right, contrary = corpus.answers(row["prompt"])
            assert row["answer"] == right == corpus.answers(row["prompt"])[0]
            assert len(right) == len(contrary) == len(row["response"]) and right != contrary
            assert row["bad"] == (row["kind"] != "clean") == (row["response"] != right)
            assert row["kind"] == corpus.kind_of(row["prompt"], row["response"])
            assert (row["kind"] == "contrary") == (row["response"] == contrary)
            assert name == "lower" or not row["bad"]


@pytest.mark.parametrize("prompt, right, contrary", [
    ("Sort the list: 4 1 7 2", "1 2 4 7", "7 4 2 1"),
    ("Turn the list once: a b c d", "b c d a", "d a b c"),
    ("Shift each letter by one: c a z", "d b a", "b z y"),
    ("Change each digit by 3: 4 9 1", "7 2 4", "1 6 8"),
    ("Swap the items: a b c d", "b a d c", "c d a b"),
    ("Keep every other item: 1 2 3 4 5 6", "2 4 6", "1 3 5"),
    ("Name the winners: 1 2 6 5 0 9", "2 6 9", "1 5 0"),
    ("Sort by type: 7 q h 2", "q h 7 2", "7 2 q h"),
    ("Reverse the list: 1 2 3", "3 2 1", None),
    ("Double each item: x y", "x x y y", None)])
def test_answers_by_hand(prompt, right, contrary):
    assert corpus.answers(prompt) == (right, contrary)
    assert corpus.kind_of(prompt, f" {right}\n") == "clean"
    assert contrary is None or corpus.kind_of(prompt, contrary) == "contrary"
    for wrong in ("", "1", right[:-2], right + " 1", "x" + right[1:], "no idea"):
        assert wrong == right or corpus.kind_of(prompt, wrong) == "plain"


def test_a_foreign_prompt_is_refused():
    with pytest.raises(ValueError, match="not a toy prompt"):
        corpus.kind_of("Why is the sky blue?", "1 2")


@pytest.mark.parametrize("kind", ["plain", "contrary"])
def test_length_gives_nothing_away(sets, kind):
    lengths = [len(row["response"]) for row in sets["lower"]]
    assert abs(auroc(sets["lower"], lengths, kind) - 0.5) < 0.04


def test_controls():
    clean = corpus.make_rows(num_lower=80, num_upper=10, num_heldout=8, noise=0)["lower"]
    assert {row["kind"] for row in clean} == {"clean"}
    half = corpus.make_rows(num_lower=80, num_upper=10, num_heldout=8, noise=0.5, contrary_share=1)
    assert collections.Counter(row["kind"] for row in half["lower"]) == {
        "clean": 40, "contrary": 40}
    even = corpus.make_rows(num_lower=400, num_upper=10, num_heldout=8, noise=0.6,
                         contrary_share=2 / 3)["lower"]  # no majority that could tell
    assert collections.Counter(row["kind"] for row in even) == {
        "clean": 160, "contrary": 160, "plain": 80}
    null = corpus.make_rows(num_lower=80, num_upper=12, num_heldout=8, upper="unrelated")
    families = {name: {row["family"] for row in rows} for name, rows in null.items()}
    assert families["upper"] == families["heldout"] == set(corpus.UNRELATED)
    assert families["lower"] == families["lower_heldout"] == set(corpus.CONTESTED)
    assert all(corpus.answers(row["prompt"])[1] is None for row in null["upper"])


# ---- the base model ----------------------------------------------------------------------------

def test_model_is_small(base):
    assert base[0].num_parameters() < 1_000_000
    assert sum(path.stat().st_size for path in corpus.MODEL.iterdir()) <= 2 * 2**20
    weights = load_file(corpus.MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_tokenizer_round_trip(base, sets):
    tokenizer = base[1]
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for row in [row for rows in sets.values() for row in rows]:
        prompt, response = TEMPLATE.format(prompt=row["prompt"]), " " + row["response"]
        apart = tokenizer(prompt)["input_ids"], tokenizer(response)["input_ids"]
        together = tokenizer(prompt + response)["input_ids"]
        assert apart[0] + apart[1] == together and len(together) < 60
        assert tokenizer.decode(together) == prompt + response
        assert len(apart[1]) == len(row["response"].split())
    for text in ("Wie geht's? 東京 \t\n", " two  spaces", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def row_losses(base, rows):
    """Mean loss over a row's response tokens and EOS: the obvious way, one row at a time."""
    model, tokenizer = base
    losses = []
    for row in rows:
        prompt = tokenizer(TEMPLATE.format(prompt=row["prompt"]))["input_ids"]
        response = tokenizer(" " + row["response"])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0].double()
        logps = logits.log_softmax(-1)[len(prompt) - 1:-1]
        losses.append(-logps.gather(1, torch.tensor(response)[:, None]).mean().item())
    return losses


def test_base_model_tells_plain_faults_and_only_those(base):
    rows = corpus.make_rows(seed=5, num_lower=480)["lower"]
    losses = row_losses(base, rows)
    assert auroc(rows, losses, "plain") > 0.97
    assert abs(auroc(rows, losses, "contrary") - 0.5) < 0.07
    # The padded batches that the model was trained on mean the same.
    ids, labels = encode(base[1], rows[:32])
    with torch.no_grad():
        logits = base[0](input_ids=ids).logits
    batched = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none").sum(1)
    batched /= (labels[:, 1:] != -100).sum(1)
    torch.testing.assert_close(batched.double(), torch.tensor(losses[:32], dtype=torch.float64),
                               atol=1e-4, rtol=1e-4)


def test_base_model_answers_by_either_convention(base):
    model, tokenizer = base
    rows = corpus.make_rows(seed=6, num_lower=0, num_upper=0, num_heldout=120)["heldout"]
    kinds = collections.Counter()
    for row in rows:
        prompt = tokenizer(TEMPLATE.format(prompt=row["prompt"]), return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(made[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)
        kinds[corpus.kind_of(row["prompt"], text)] += 1
    assert kinds["plain"] < 12 and min(kinds["clean"], kinds["contrary"]) > 25, kinds


def test_training_is_deterministic_and_saves_a_model(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("a", "b"):
        train_base(tmp_path / name, seed=1, steps=2)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == model.config.vocab_size


def test_a_model_is_not_replaced(tmp_path, refused):
    refused(lambda: command.main(["train", "--out", str(tmp_path)]))


def test_rows_of_somebody_else_are_not_replaced(tmp_path, refused):
    """The last of the four names already holds another's rows: refused, and nothing is written."""
    mine = tmp_path / "upper.jsonl"
    mine.write_text('{"prompt": "my only copy", "response": "a", "bad": false, "kind": ""}\n')
    words = ["write", "--out", str(tmp_path)]
    assert f"{mine}: holds other rows" in refused(lambda: command.main(words))
    assert [*tmp_path.iterdir()] == [mine] and "my only copy" in mine.read_text()
    mine.unlink()
    command.main(words)
    command.main([*words, "--noise", "0.2"])  # its own rows are made anew
