"""Conversations: what is not text drops a row by name, and turns stay turns."""

import json

import pytest
from conftest import CHATML, make_tokenizer, write_rows

import curate
from data import layouts, tokens
from utils import UserError, content_hash

ASK, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
MORE = [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


@pytest.fixture
def load(tmp_path):
    def call(rows, chat=None, **options):
        return tokens.load_rows(write_rows(tmp_path / "source.jsonl", rows), make_tokenizer(chat),
                                cache_dir=tmp_path / "cache", **options)
    return call


def asked(*parts):
    return {"role": "user", "content": list(parts)}


# --- what is not text -----------------------------------------------------------------------------

@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": [ASK, CALL]}, "tool_call"),
    ({"messages": [ASK, CALL, {"role": "tool", "content": "5"}]}, "tool_call"),
    ({"messages": [ASK, CALL, {"role": "tool", "content": "5"}, ANSWER]}, "tool_call"),
    ({"messages": [ASK, {**ANSWER, "function_call": {"name": "f", "arguments": "{}"}}]},
     "tool_call"),
    ({"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
     "tool_call"),
    ({"conversations": [{"from": "human", "value": "a?"}, {"from": "function_call", "value": "f"},
                        {"from": "observation", "value": "5"}, {"from": "gpt", "value": "b"}]},
     "tool_call"),
    ({"messages": [asked({"type": "text", "text": "what is it?"}, IMAGE), ANSWER]},
     "image_or_other_part"),
    ({"messages": [asked({"image": "x.png"}), ANSWER]}, "image_or_other_part"),
    ({"messages": [ASK, ANSWER, asked({"type": "input_audio", "input_audio": {}}), ANSWER]},
     "image_or_other_part"),
    ({"prompt": [asked({"type": "text", "text": "a"}, IMAGE)], "completion": [ANSWER]},
     "image_or_other_part"),
    ({"messages": [ASK, ANSWER], "images": ["x.png"]}, "image_or_other_part"),
], ids=range(11))
@pytest.mark.parametrize("turns", ["last", "all"])
def test_rows_that_lost_something_are_dropped_by_name(load, row, reason, turns):
    layout = next(iter(row))
    good = {"prompt": [ASK], "completion": [ANSWER]} if layout == "prompt" else {
        layout: [ASK, ANSWER]}
    rows, report = load([good, row, good], turns=turns)
    assert report["dropped"] == {reason: [1]} and list(rows["row_id"]) == [0, 2]
    with pytest.raises(UserError, match=rf"no row is left to train on \(1 {reason}\)"):
        load([row])


def test_renamed_columns_do_not_hide_an_image(load):
    row = {"q": "what is it?", "a": "a cat"}
    rows, report = load([row, row | {"image": "x.png"}, row],
                        columns={"prompt": "q", "response": "a"})
    assert report["dropped"] == {"image_or_other_part": [1]} and list(rows["row_id"]) == [0, 2]


def test_the_input_of_renamed_instructions_is_read(load):
    row = {"q": "Sort:", "input": "b a", "a": "a b"}
    columns = {"instruction": "q", "output": "a"}
    assert "b a" in load([row], columns=columns)[0]["prompt"][0]
    swapped = {"instruction": "input", "output": "a"}  # then it is the instruction and nothing more
    assert load([row], columns=swapped)[0]["prompt"][0] == "b a"


def test_the_system_column_beside_a_renamed_conversation_is_read(load):
    row = {"talk": [ASK, ANSWER], "system": "in French"}
    plain = {"messages": row["talk"], "system": "in French"}
    wanted = load([plain])[0]["prompt"][0]
    assert "in French" in wanted
    assert load([row], columns="messages=talk")[0]["prompt"][0] == wanted
    other = {"messages": row["talk"], "rules": "in French"}
    assert load([other], columns="messages=messages,system=rules")[0]["prompt"][0] == wanted


@pytest.mark.parametrize("row", [
    {"instruction": "a?", "output": "b"}, {"prompt": "a?", "response": "b"},
    {"question": "a?", "response": "b"}, {"prompt": "a?", "chosen": "b", "rejected": "c"}])
def test_a_system_column_is_the_system_turn_of_every_layout(load, row):
    wanted = load([{"messages": [{"role": "system", "content": "in French"},
                                 {"role": "user", "content": "a?"},
                                 {"role": "assistant", "content": "b"}]}])[0]
    made = load([row | {"system": "in French"}])[0]
    renamed = load([row | {"rules": "in French"}], columns={
        **{name: name for name in row}, "system": "rules"})[0]
    for name in ("input_ids", "trained", "hash"):
        assert made[name][:] == renamed[name][:] == wanted[name][:]


def test_dialogues_in_text_begin_with_any_blank(load):
    """"Human:" at the start, behind one newline or two; an empty list of replies is dropped."""
    text = "Human: hi\n\nAssistant:"
    rows, report = load([
        {"prompt": blank + text, "chosen": " b", "rejected": "c"}
        for blank in ("", "\n", "\n\n", " ")] + [
        {"prompt": "\n\n" + text, "chosen": [], "rejected": []}])
    assert rows["prompt"][:] == ["hi"] * 4 and rows["response"][:] == ["b"] * 4
    assert report["dropped"] == {"no_assistant_turn": [4]}
    rows, _ = load([{"chosen": f"\n{text} b", "rejected": f"\n{text} c"}])
    assert (rows[0]["prompt"], rows[0]["response"]) == ("hi", "b")


def test_what_lies_behind_the_last_answer_or_is_empty_loses_nothing(load):
    rows, report = load([
        {"messages": [ASK, ANSWER, asked(IMAGE)]},
        {"messages": [asked({"type": "text", "text": "a", "image_url": None}), ANSWER]},
        {"messages": [ASK, {**ANSWER, "tool_calls": [], "function_call": None}], "images": []},
        {"messages": [CALL, ASK, ANSWER]},  # before the first question: never read
        {"messages": [asked("a", {"type": "text", "text": "?"}), ANSWER]}])
    assert len(rows) == 5 and not report["dropped"]


def test_the_plan_says_how_many(train, files, tmp_path):
    paths = files(lower=8, upper=6)
    talk = [{"messages": [{"role": "user", "content": f"{n}?"}, ANSWER]} for n in range(8)]
    talk[2]["messages"][1] = CALL
    talk[5]["messages"][0] = asked(IMAGE)
    paths["lower"] = write_rows(tmp_path / "talk.jsonl", talk)
    text = train(paths, dry_run=True, batch=4, epochs=1).text
    assert "lower: 6 rows" in text
    assert "dropped {'tool_call': 1, 'image_or_other_part': 1}" in text
    assert "at most all" not in text
    text = train(paths, dry_run=True, batch=20_000, epochs=1).text
    assert "batch 20000: a step reads at most all 6 lower rows" in text


# --- the messages of a row ------------------------------------------------------------------------

def test_messages_are_kept_for_rows_that_are_more_than_one_turn(load):
    talks = [[ASK, ANSWER], [SYSTEM, ASK, ANSWER], [ASK, ANSWER, *MORE, ASK],
             [ASK, {"role": "assistant", "content": "b <eos>"}, *MORE]]
    rows, _ = load([{"messages": talk} for talk in talks])
    assert [row["messages"] and json.loads(row["messages"]) for row in rows] == [
        None, [SYSTEM, ASK, ANSWER], [ASK, ANSWER, *MORE], [ASK, ANSWER, *MORE]]
    assert layouts.conversation(rows[0]) == [ASK, ANSWER]
    assert layouts.conversation(rows[2], "e") == [ASK, ANSWER, MORE[0],
                                                  {"role": "assistant", "content": "e"}]
    assert layouts.conversation({"prompt": "a?", "response": "b", "messages": talks[1]}) == talks[1]
    assert [row["hash"] for row in rows][:3] == [
        content_hash("a?", "b"), content_hash("System: Be brief.\nUser: a?", "b"),
        content_hash("User: a?\nAssistant: b\nUser: c?", "d")]
    assert "messages" not in load([{"messages": talks[0]}])[0].column_names


@pytest.mark.parametrize("chat", [None, CHATML])
def test_a_row_read_back_from_its_messages_has_the_same_tokens(load, chat):
    talks = [[ASK, ANSWER], [SYSTEM, ASK, ANSWER], [ANSWER, ASK, ANSWER, *MORE], [ASK, ASK, ANSWER]]
    rows, _ = load([{"messages": talk} for talk in talks], chat)
    again, _ = load([{"messages": layouts.conversation(row)} for row in rows], chat)
    assert again.to_dict() == rows.to_dict()


# --- curate: ends, room, the template's tail ------------------------------------------------------

def test_the_end_of_a_turn_is_found_behind_many_cut_rows(load):
    """A file sorted longest first: its first complete row is number 150, in a shuffled view too."""
    long = {"prompt": "a", "response": "red blue " * 40}
    rows, _ = load([long] * 150 + [{"prompt": "a", "response": "b"}], CHATML, max_length=60)
    tokenizer = make_tokenizer(CHATML)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert not any(rows["complete"][:150]) and curate.end_tokens(rows, tokenizer) == ends
    assert curate.end_tokens(rows.select(range(150, -1, -1)), tokenizer) == ends
    assert curate.end_tokens(rows.select(range(100)), tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(("template", "written", "text"), [
    ("Q: {prompt}\nA: {response}\n###", " red\n###<eos>", "red"),
    ("Q: {prompt}\nA: {response}\\n###", " red ###", "red"),
    ("Q: {prompt}\nA: {response}\n###", " # red\n### blue\n###<eos>", "# red\n### blue"),
    ("Q: {prompt}\nA: {response}\n###", " ###<eos>", ""),
    ("Q: {prompt}\nA: {response}<|im_end|>\n--", " red<|im_end|>\n--<eos>", "red"),
    ("Q: {prompt}\nA: {response}", " red\n###<eos>", "red\n###"),
    (None, " red\n###<eos>", "red\n###")])
def test_the_text_behind_the_response_is_no_part_of_an_answer(template, written, text):
    tokenizer = make_tokenizer()
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert tokens.response_text(tokenizer, ids, template) == text


def test_refined_answers_do_not_end_in_the_templates_text(online, files, monkeypatch):
    """Every greedy answer is written as a trained model would: closed by the template's tail."""
    tokenizer = make_tokenizer()

    def answers(model, prompts, seeds, **options):
        ids = tokenizer(" red blue\n###<eos>", add_special_tokens=False)["input_ids"]
        return [(ids, True)] * len(prompts)
    monkeypatch.setattr(curate, "generate", answers)
    monkeypatch.setattr(curate, "recommend", lambda *_: "refined")
    run = online(files(lower=10, upper=6), batch=10, epochs=1, template="Q: {prompt}\nA: {response}"
                 "\n###", max_new_tokens=20)
    refined = [entry["refined"] for entry in run.curated if entry["refined"] is not None]
    assert refined == ["red blue"] * 3
    assert "###" not in (run.out / "curated.jsonl").read_text()


@pytest.mark.parametrize("row", [
    {"prompt": "Sort:", "response": "a b"}, {"prompt": "Sort:", "completion": "a b"},
    {"question": "Sort:", "response": "a b"}])
def test_an_input_that_would_not_be_read_is_refused(load, row):
    wanted = load([row])[0]["hash"][0]
    for empty in ("", " \n", None):
        assert load([row | {"input": empty}])[0]["hash"][0] == wanted
    with pytest.raises(UserError, match=r'line 1: "input" has text .*instruction=\.\.\.,input=inp'):
        load([row | {"input": "b a"}])
    first, second = row
    renamed = {"q": row[first], "input": "b a", "a": row[second]}
    with pytest.raises(UserError, match='"input" has text'):
        load([renamed], columns={"prompt": "q", "response": "a"})
    assert "b a" in load([renamed], columns={
        "instruction": "q", "input": "input", "output": "a"})[0]["prompt"][0]


@pytest.mark.parametrize("content", ["", " \n", "\u200b"])
def test_an_empty_system_turn_is_none(load, content):
    """The question's hash is that of the row without it, and a column fills the place."""
    empty = {"role": "system", "content": content}
    for extra in ({}, {"system": content}, {"system": "in French"}):
        made, wanted = (load([{"messages": turns} | more])[0][0] for turns, more in (
            ([empty, ASK, ANSWER], extra),
            ([ASK, ANSWER], extra if extra != {"system": content} else {})))
        assert made == wanted
    assert ("in French" in made["prompt"]) and "messages" in made


def test_a_curated_set_is_not_read_as_plain_rows(load):
    row = {"row_id": 0, "hash": "0", "rank": 1, "kept": False, "prompt": "a?", "response": "b",
           "refined": "c", "recommended": "refined"}
    with pytest.raises(UserError, match=r"curated.jsonl, rejected .*eval.py export.*--keep"):
        load([row])
