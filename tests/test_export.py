"""Exports of a curated set, read back: the same turns, the same tokens, in every trainer's eyes."""

import math

import datasets
import pytest
from conftest import make_rows, read_rows, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import curate
from data import layouts, tokens

TURNS = ("messages", "prompt-completion")  # formats that keep them


def talks(count=12):
    """Conversations: one turn, a system prompt, several turns, a greeting in front."""
    rows = []
    for number, row in enumerate(make_rows(count, 1)):
        ask, reply = ({"role": "user", "content": row["prompt"]},
                      {"role": "assistant", "content": row["response"]})
        before = ([], [{"role": "system", "content": "Be brief."}],
                  [{"role": "user", "content": f"first {number}?"},
                   {"role": "assistant", "content": "6"}],
                  [{"role": "assistant", "content": "Hello"}])[number % 4]
        rows.append({"messages": [*before, ask, reply | ({"content": "5"} if number == 2 else {})]})
    return rows


@pytest.fixture
def curated(online, files, tmp_path):
    """curated(layout, ...): an online run on `talks` that keeps every row, its export written."""
    def call(layout, **options):
        paths = files(lower=1, upper=6)
        paths["lower"] = write_rows(tmp_path / "talks.jsonl", talks())
        return online(paths, batch=6, epochs=1, keep_fraction=1.0, export_format=layout, **options)
    return call


def exported(run, layout):
    return run.out / f"curated.{layout}.jsonl"


def test_messages_go_from_the_source_to_every_file(curated):
    run, source = curated("messages"), talks()
    for entry in run.curated:
        whole = source[entry["row_id"]]["messages"]
        whole = whole[whole[0]["role"] == "assistant":]  # the greeting, which is never read
        assert layouts.conversation(entry) == whole
        assert entry.get("messages") == (whole if len(whole) > 2 else None)
        assert entry["response"] == whole[-1]["content"]
    assert {"messages" in entry for entry in run.curated} == {True, False}
    found = {entry["row_id"]: entry for entry in run.curated}
    for line in read_rows(run.out / "shown.jsonl"):
        entry = found[line["row_id"]]
        assert line == {key: entry[key] for key in ("row_id", "hash", "prompt", "response",
                                                    "messages") if key in entry}


@pytest.mark.parametrize("layout", TURNS)
@pytest.mark.parametrize("model", ["llama", "neox"])
def test_unchanged_answers_have_the_tokens_of_the_original_rows(
        curated, tmp_path, folders, layout, model):
    """Read with `datasets`, as a trainer does, and by our own reader: token by token."""
    run = curated(layout, model=model)
    tokenizer = AutoTokenizer.from_pretrained(folders[model])
    before, _ = tokens.load_rows(tmp_path / "talks.jsonl", tokenizer, cache_dir=tmp_path / "c")
    assert {entry["recommended"] for entry in run.curated} <= {"original", "undecided"}
    order = {row_id: place for place, row_id in enumerate(before["row_id"])}
    expected = before.select([order[entry["row_id"]] for entry in run.curated])
    raw = datasets.load_dataset("json", data_files=str(exported(run, layout)), split="train",
                                cache_dir=str(tmp_path / "hf"))
    again = write_rows(tmp_path / "again.jsonl", list(raw))
    for source in (exported(run, layout), again):
        rows, report = tokens.load_rows(source, tokenizer, cache_dir=tmp_path / "c")
        assert report["layout"] == layout.replace("-", "/") and not report["dropped"]
        for column in ("input_ids", "trained", "hash", "prompt", "response", "messages"):
            assert list(rows[column]) == list(expected[column]), column


@pytest.mark.parametrize("layout", curate.FORMATS)
def test_formats_by_hand(tmp_path, capsys, layout):
    """A kept row, a rewritten conversation that is not kept, and one row that is dropped."""
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "2*3?"},
             {"role": "assistant", "content": "6"}, {"role": "user", "content": "minus 1?"},
             {"role": "assistant", "content": "4"}]
    entries = [
        {"kept": True, "recommended": "original", "prompt": "p", "response": "r", "refined": "x"},
        {"kept": False, "recommended": "refined", "prompt": "transcript", "response": "4",
         "refined": "5", "messages": turns},
        {"kept": False, "recommended": "undecided", "prompt": "q", "response": "r", "refined": "x"}]
    curate.export(iter(entries), tmp_path / "x.jsonl", layout)
    user, reply = {"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}
    five = {"role": "assistant", "content": "5"}
    assert read_rows(tmp_path / "x.jsonl") == {
        "alpaca": [{"instruction": "p", "input": "", "output": "r"},
                   {"instruction": "transcript", "input": "", "output": "5"}],
        "prompt-completion": [{"prompt": [user], "completion": [reply]},
                              {"prompt": turns[:-1], "completion": [five]}],
        "messages": [{"messages": [user, reply]}, {"messages": [*turns[:-1], five]}],
        "pairs": [{"prompt": turns[:-1], "chosen": [five], "rejected": turns[-1:]}]}[layout]
    told = capsys.readouterr().out
    assert ("1 rows are conversations" in told) == (layout == "alpaca")
    assert turns[-1]["content"] == "4", "the line itself is unchanged"


def test_alpaca_keeps_the_tokens_of_one_turn_and_counts_the_others(curated, tmp_path, folders):
    run = curated("alpaca")
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    before, after = (tokens.load_rows(path, tokenizer, cache_dir=tmp_path / "c")[0]
                     for path in (tmp_path / "talks.jsonl", exported(run, "alpaca")))
    ids = dict(zip(before["row_id"], before["input_ids"], strict=True))
    same = [list(row) == list(ids[entry["row_id"]])
            for row, entry in zip(after["input_ids"], run.curated, strict=True)]
    assert same == ["messages" not in entry for entry in run.curated] and sum(same) == 6
    assert "6 rows are conversations, and alpaca has no turns" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("layout", TURNS)
def test_trl_sees_the_turns_that_were_trained_on(curated, tmp_path, folders, layout):
    """The rows of TRL's own data set, decoded: every turn, and a separator before the answer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    run = curated(layout, model="neox")
    rows = datasets.load_dataset("json", data_files=str(exported(run, layout)), split="train",
                                 cache_dir=str(tmp_path / "hf"))
    tokenizer = AutoTokenizer.from_pretrained(folders["neox"])
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folders["neox"]), train_dataset=rows,
        processing_class=tokenizer, args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False,
            max_steps=1, save_strategy="no"))
    for made, entry in zip(trainer.train_dataset, run.curated, strict=True):
        text = tokenizer.apply_chat_template(layouts.conversation(entry), tokenize=False)
        assert tokenizer.decode(made["input_ids"]).strip().startswith(text.strip())
        if mask := made.get("completion_mask"):
            trained = [t for t, loss in zip(made["input_ids"], mask, strict=True) if loss]
            assert tokenizer.decode(trained).startswith(entry["response"])
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
