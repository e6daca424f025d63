"""Exports of a curated set, read back: the same turns, the same tokens, in every trainer's eyes."""

import itertools
import json
import math

import datasets
import pytest
import torch
from conftest import listing, make_rows, make_tokenizer, read_rows, write_rows
from fabricated import fabricate
from transformers import AutoModelForCausalLM, AutoTokenizer

import curate
import eval as front
import utils
from data import layouts, tokens
from evaluation.export import FORMATS, export

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
    """curated(...): an online run on `talks` that keeps every row."""
    def call(**options):
        paths = files(lower=1, upper=6)
        paths["lower"] = write_rows(tmp_path / "talks.jsonl", talks())
        return online(paths, batch=6, epochs=1, keep_fraction=1.0, **options)
    return call


def exported(run, layout):
    """The file that an export of a run makes."""
    export(run.out, layout)
    return run.out / f"curated.{layout}.jsonl"


def test_messages_go_from_the_source_to_every_file(curated):
    run, source = curated(), talks()
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
    run = curated(model=model)
    tokenizer = AutoTokenizer.from_pretrained(folders[model])
    before, _ = tokens.load_rows(tmp_path / "talks.jsonl", tokenizer, cache_dir=tmp_path / "c")
    assert {entry["recommended"] for entry in run.curated} <= {"original", "undecided"}
    order = {row_id: place for place, row_id in enumerate(before["row_id"])}
    expected = before.select([order[entry["row_id"]] for entry in run.curated])
    file = exported(run, layout)
    raw = datasets.load_dataset("json", data_files=str(file), split="train",
                                cache_dir=str(tmp_path / "hf"))
    again = write_rows(tmp_path / "again.jsonl", list(raw))
    for source in (file, again):
        rows, report = tokens.load_rows(source, tokenizer, cache_dir=tmp_path / "c")
        assert report["layout"] == layout.replace("-", "/") and not report["dropped"]
        for column in ("input_ids", "trained", "hash", "prompt", "response", "messages"):
            assert list(rows[column]) == list(expected[column]), column


@pytest.mark.parametrize("layout", FORMATS)
def test_formats_by_hand(tmp_path, layout):
    """A kept row, a rewritten conversation that is not kept, and one row that is dropped."""
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "2*3?"},
             {"role": "assistant", "content": "6"}, {"role": "user", "content": "minus 1?"},
             {"role": "assistant", "content": "4"}]
    entries = [
        {"kept": True, "recommended": "original", "prompt": "p", "response": "r", "refined": "x"},
        {"kept": False, "recommended": "refined", "prompt": "transcript", "response": "4",
         "refined": "5", "messages": turns},
        {"kept": False, "recommended": "undecided", "prompt": "q", "response": "r", "refined": "x"}]
    place = {"row_id": 1, "hash": "h", "rank": 1}
    told = export(write_rows(tmp_path / "set.jsonl", [place | e for e in entries]), layout)
    user, reply = {"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}
    five = {"role": "assistant", "content": "5"}
    assert read_rows(tmp_path / f"set.{layout}.jsonl") == {
        "alpaca": [{"instruction": "p", "input": "", "output": "r"},
                   {"instruction": "transcript", "input": "", "output": "5"}],
        "prompt-completion": [{"prompt": [user], "completion": [reply]},
                              {"prompt": turns[:-1], "completion": [five]}],
        "messages": [{"messages": [user, reply]}, {"messages": [*turns[:-1], five]}],
        "pairs": [{"prompt": turns[:-1], "chosen": [five], "rejected": turns[-1:]}]}[layout]
    assert ("1 rows are conversations" in told) == (layout == "alpaca")


def test_alpaca_keeps_the_tokens_of_one_turn_and_counts_the_others(curated, tmp_path, folders):
    run = curated()
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    before, after = (tokens.load_rows(path, tokenizer, cache_dir=tmp_path / "c")[0]
                     for path in (tmp_path / "talks.jsonl", exported(run, "alpaca")))
    ids = dict(zip(before["row_id"], before["input_ids"], strict=True))
    same = [list(row) == list(ids[entry["row_id"]])
            for row, entry in zip(after["input_ids"], run.curated, strict=True)]
    assert same == ["messages" not in entry for entry in run.curated] and sum(same) == 6
    assert "6 rows are conversations, and alpaca has no turns" in export(run.out, "alpaca")


def pair_of(row, layout):
    """(prompt, response) of an exported row."""
    if layout == "alpaca":
        assert set(row) == {"instruction", "input", "output"} and row["input"] == ""
        return row["instruction"], row["output"]
    assert set(row) == ({"messages"} if layout == "messages" else {"prompt", "completion"})
    messages = row.get("messages") or row["prompt"] + row["completion"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    return tuple(message["content"] for message in messages)


@pytest.mark.parametrize("layout", [name for name in FORMATS if name != "pairs"])
def test_export(online, files, tmp_path, monkeypatch, layout):
    """Kept or rewritten rows in rank order with the recommended response; data/ reads them back.

    The rule is bent to recommend every other refined answer: all four kinds of row occur."""
    choices = itertools.cycle(("refined", "original"))
    monkeypatch.setattr(curate, "recommend", lambda margin, threshold, fine: next(choices))
    run = online(files(lower=14, upper=6), batch=7, epochs=2, omega_lr=30, keep_fraction=0.7,
                 ratio_masked=0.5, lr=1e-2, max_new_tokens=12)
    file = exported(run, layout)
    rows = read_rows(file)
    kept = [entry for entry in run.curated if entry["kept"] or entry["recommended"] == "refined"]
    assert 10 < len(rows) == len(kept) < 14
    assert len({(entry["kept"], entry["recommended"]) for entry in run.curated}) == 4
    for row, entry in zip(rows, kept, strict=True):
        response = entry["refined" if entry["recommended"] == "refined" else "response"]
        assert pair_of(row, layout) == (entry["prompt"], response)
    loaded, _ = tokens.load_rows(file, make_tokenizer(), name="lower", cache_dir=tmp_path / "cache")
    texts = [pair_of(row, layout) for row in rows]
    assert list(loaded["hash"]) == [utils.content_hash(*text) for text in texts if text[1].strip()]


def test_export_of_pairs(train, online, files, tmp_path, monkeypatch):
    """The new answer over the original of every rewritten row, kept or not, where they differ: our
    own loader reads both sides, conversations too, and a DPO run trains on them."""
    choices = itertools.cycle(("refined", "original", "undecided"))
    monkeypatch.setattr(curate, "recommend", lambda margin, threshold, fine: next(choices))
    paths = files(lower=24, upper=6)
    turns = ("one", "two", "three")
    talk = [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(
        (*turns, "four"))]
    rows = [{"messages": [{"role": "user", "content": row["prompt"]},
                          {"role": "assistant", "content": row["response"]}]} if n % 3 else
            {"messages": [*talk[:2], {"role": "user", "content": row["prompt"]}, talk[3]]}
            for n, row in enumerate(read_rows(paths["lower"]))]
    paths["lower"] = write_rows(tmp_path / "talks.jsonl", rows)
    run = online(paths, batch=8, epochs=2, omega_lr=30, keep_fraction=0.7, ratio_masked=0.8,
                 lr=1e-2, max_new_tokens=12)
    file = exported(run, "pairs")
    found, rewritten = read_rows(file), [e for e in run.curated if e["recommended"] == "refined"]
    assert 4 < len(found) == len(rewritten) and len({len(pair["prompt"]) for pair in found}) == 2
    for pair, entry in zip(found, rewritten, strict=True):
        (chosen,), (rejected,) = pair["chosen"], pair["rejected"]
        assert chosen == {"role": "assistant", "content": entry["refined"]}
        assert rejected == {"role": "assistant", "content": entry["response"]}
        assert pair["prompt"] == json.loads(json.dumps(rows[entry["row_id"]]["messages"][:-1]))
    for side in ("chosen", "rejected"):
        loaded, _ = tokens.load_rows(file, make_tokenizer(), name="upper", side=side,
                                     cache_dir=tmp_path / "cache")
        wanted = [pair[side][0]["content"] for pair in found]
        assert set(loaded["response"]) <= set(wanted) and len(loaded) > 3
    dpo = train({"lower": write_rows(tmp_path / "new.jsonl", make_rows(8, seed=9)),
                 "upper": str(file)}, out="dpo", upper_loss="dpo", batch=4, epochs=1)
    assert math.isfinite(dpo.result["upper_heldout"])
    entries = [entry | {"refined": entry["response"]} for entry in rewritten[:3]] + rewritten[3:]
    export(write_rows(tmp_path / "same.jsonl", entries), "pairs", file)
    assert read_rows(file) == found[3:]  # an answer over itself says nothing
    with pytest.raises(utils.UserError, match="recommends no new answer, so there are no pairs"):
        export(write_rows(tmp_path / "none.jsonl", entries[:3]), "pairs", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    (tmp_path / "none").write_text("old")
    for rows in ([], [entries[0] | {"kept": False, "recommended": "original"}]):
        with pytest.raises(utils.UserError, match="no row in it is kept or rewritten"):
            export(write_rows(tmp_path / "none.jsonl", rows), "messages", tmp_path / "none")
    assert (tmp_path / "none").read_text() == "old"


# --- the command ----------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path):
    """A run of 40 rows, 32 kept, every other one rewritten; half surrogates, which JSON may hold.
    """
    folder = fabricate(tmp_path / "run", method="online", text="x\ud800")
    write_rows(folder / "curated.jsonl", [
        row | {"refined": row["refined"] and "y",
               "messages": [{"role": role, "content": "x\ud800"} for role in ("user", "assistant")]}
        for row in read_rows(folder / "curated.jsonl")])
    return folder


@pytest.mark.parametrize(("layout", "count"), [
    ("alpaca", 36), ("prompt-completion", 36), ("messages", 36), ("pairs", 20)])
def test_a_run_and_its_file_are_exported_alike(run, tmp_path, capfd, layout, count):
    """One file beside curated.jsonl, or where --out says; the run's own files stay as they are."""
    before = {name: (run / name).read_bytes() for name in listing(run)}
    front.main(["export", str(run), "--format", layout])
    made = run / f"curated.{layout}.jsonl"
    assert len(read_rows(made)) == count
    line = capfd.readouterr().out
    assert line.startswith(f"{count} rows: {made}")
    assert ("36 rows are conversations" in line) == (layout == "alpaca")
    out = tmp_path / "new" / "set.jsonl"
    front.main(["export", str(run / "curated.jsonl"), "--format", layout, "--out", str(out)])
    assert out.read_bytes() == made.read_bytes()
    assert before | {made.name: out.read_bytes()} == {
        name: (run / name).read_bytes() for name in listing(run)}


@pytest.mark.parametrize(("change", "said"), [
    ({"kept": 1}, "the kept 1 is not true or false"), ({"prompt": None}, "the prompt null"),
    ({"recommended": "new"}, "has recommended"), ({"refined": None}, "recommended and missing"),
    ({"messages": "[]"}, "is not a list of messages"), ({"messages": [["user", "x"]]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "n": 1}]}, "messages")])
def test_a_line_that_is_not_curated_leaves_no_file(run, refused, change, said):
    file = run / "curated.jsonl"
    rows = read_rows(file)
    rows[35] |= change
    write_rows(file, rows)
    before = listing(run)
    line = refused(lambda: front.main(["export", str(run), "--format", "alpaca"]))
    assert f"{file} line 36: " in line and said in line
    assert listing(run) == before


def test_what_is_no_curated_set_is_refused(run, tmp_path, refused):
    def said(*words):
        return refused(lambda: front.main(["export", *map(str, words), "--format", "pairs"]))
    file = run / "curated.jsonl"
    whole = file.read_bytes()
    for out in (file, run / "weights.jsonl", run / "shown.jsonl"):  # the last is not there yet
        assert f"would overwrite {out}" in said(file, "--out", out)
    assert "is a folder" in said(run, "--out", tmp_path)
    assert file.read_bytes() == whole
    assert "weights.jsonl line 1: no 'prompt'" in said(run / "weights.jsonl")
    file.unlink()
    assert "curated.jsonl: no such file; a finished online run has" in said(run)
    assert "nowhere: no such file" in said(tmp_path / "nowhere")
    assert listing(tmp_path) == [f"run/{name}" for name in listing(run)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", TURNS)
def test_trl_sees_the_turns_that_were_trained_on(curated, tmp_path, folders, layout):
    """The rows of TRL's own data set, decoded: every turn, and a separator before the answer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    run = curated(model="neox")
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


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["prompt-completion", "messages"])
def test_trl_trains_on_an_export(online, files, tmp_path, layout, folders):
    """Three steps of TRL's SFTTrainer on the file as it is: finite losses, weights that move."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    run = online(files(lower=12, upper=6), batch=6, epochs=1, keep_fraction=1.0)
    rows = datasets.load_dataset("json", data_files=str(exported(run, layout)), split="train",
                                 cache_dir=str(tmp_path / "hf"))
    assert len(rows) == 12
    model = AutoModelForCausalLM.from_pretrained(folders["neox"])
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = trl.SFTTrainer(
        model=model, train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folders["neox"]),
        args=trl.SFTConfig(output_dir=str(tmp_path / "trl"), max_steps=3, logging_steps=1,
                           per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
                           save_strategy="no", use_cpu=True, bf16=False))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    assert not torch.equal(model.get_input_embeddings().weight, before)
