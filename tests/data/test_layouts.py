"""data/layouts.py: every layout, what drops a row by name, and turns that stay turns.

Rows are written as JSON in which a word in capitals stands for a message or a conversation.
"""

import json
import re

import pytest
from conftest import CHATML, make_tokenizer, write_rows

from data import layouts, tokens
from utils import UserError, content_hash

WORDS = {
    "ASK": '{"role": "user", "content": "a?"}',
    "ANSWER": '{"role": "assistant", "content": "b"}',
    "MORE": '{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}',
    "SYSTEM": '{"role": "system", "content": "Be brief."}',
    "CALL": '{"role": "assistant", "content": null, "tool_calls": [{"type": "function"}]}',
    "SILENT": '{"role": "assistant", "content": "b", "weight": 0}',
    "BLANK": '{"role": "assistant", "content": "\\u200b \\ufeff"}',
    "IMAGE": '{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}',
    "DIALOGUE": '"\\n\\nHuman: a?\\n\\nAssistant: b\\n\\nHuman: c?\\n\\nAssistant: d"',
    "GPT": '[{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]',
}
TWO = "User: a?\nAssistant: b\nUser: c?"


def parse(text):
    """The row that such a text writes."""
    return json.loads(re.sub(r"\b[A-Z]+\b", lambda word: WORDS.get(word[0], word[0]), text))


@pytest.fixture
def load(tmp_path):
    """load(row text, ..., chat=template, ...) -> (rows, report)."""

    def call(*rows, chat=None, **options):
        rows = [parse(row) if isinstance(row, str) else row for row in rows]
        return tokens.load_rows(
            write_rows(tmp_path / "source.jsonl", rows),
            make_tokenizer(chat),
            cache_dir=tmp_path / "cache",
            **options,
        )

    return call


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "row", "prompt", "response"),
    [
        ("alpaca", '{"instruction": "i", "input": "", "output": "o"}', "i", "o"),
        ("alpaca", '{"instruction": "i", "input": "x", "output": "o"}', "i\nx", "o"),
        ("prompt/response", '{"prompt": "p", "response": "r"}', "p", "r"),
        ("prompt/completion", '{"prompt": "p", "completion": "r"}', "p", "r"),
        ("prompt/completion", '{"prompt": [ASK], "completion": [ANSWER]}', "a?", "b"),
        (
            "openorca",
            '{"system_prompt": "s", "question": "q", "response": "r"}',
            "q",
            "r",
        ),
        ("messages", '{"messages": [ASK, ANSWER, MORE]}', TWO, "d"),
        ("conversations", '{"conversations": GPT}', "a?", "b"),
        (
            "chosen/rejected dialogues",
            '{"chosen": DIALOGUE, "rejected": DIALOGUE}',
            TWO,
            "d",
        ),
        (
            "chosen/rejected dialogues",
            '{"chosen": [ASK, ANSWER], "rejected": []}',
            "a?",
            "b",
        ),
        (
            "prompt/chosen/rejected",
            '{"prompt": "p", "chosen": "c", "rejected": "r"}',
            "p",
            "c",
        ),
        (
            "prompt/chosen/rejected",
            '{"prompt": "", "chosen": [ASK, ANSWER], "rejected": 0}',
            "a?",
            "b",
        ),
    ],
)
def test_layouts(load, layout, row, prompt, response):
    rows, report = load(row)
    assert report["layout"] == layout
    assert (rows[0]["prompt"], rows[0]["response"]) == (prompt, response)
    assert rows[0]["hash"] == content_hash(prompt, response)


@pytest.mark.parametrize("blank", ["", "\n", "\n\n", " "])
def test_dialogues_in_text_begin_with_any_blank(load, blank):
    prompt = blank + "Human: hi\n\nAssistant:"
    rows, report = load(
        {"prompt": prompt, "chosen": " b", "rejected": "c"},
        {"prompt": prompt, "chosen": [], "rejected": []},
    )
    assert (rows[0]["prompt"], rows[0]["response"]) == ("hi", "b")
    assert report["dropped"] == {"no_assistant_turn": [1]}


@pytest.mark.parametrize(
    "columns", ["prompt=q, response=a", {"prompt": "q", "response": "a"}]
)
def test_named_columns(load, columns):
    row = load('{"q": "p", "a": "r", "bad": true, "kind": "cut"}', columns=columns)[0][0]
    assert (row["prompt"], row["response"], row["bad"], row["kind"]) == (
        "p",
        "r",
        True,
        "cut",
    )


@pytest.mark.parametrize(
    "columns",
    [
        "prompt",
        "nonsense=q",
        "prompt=q,prompt=a,response=a",
        "prompt=,response=a",
        "prompt=q",
        "prompt=q,response=z",
    ],
)
def test_wrong_names_of_columns(load, columns):
    with pytest.raises(UserError, match=r"--lower-columns"):
        load('{"q": "p", "a": "r"}', columns=columns)


def test_a_label_may_be_named_alone(load):
    rows, report = load('{"instruction": "a", "output": "c", "red": 1}', columns="bad=red")
    assert report["layout"] == "alpaca"
    assert rows["bad"][:] == [True]


def test_columns_beside_renamed_ones_are_read(load):
    """The input of an instruction, the system turn and an image; a renamed one is read once."""
    row = '{"q": "Sort:", "input": "b a", "a": "a b", "system": "in French"}'
    prompt = load(row, columns="instruction=q,output=a")[0][0]["prompt"]
    assert prompt == "System: in French\nUser: Sort:\nb a"
    prompt = load(row, columns="instruction=input,output=a,system=q")[0][0]["prompt"]
    assert prompt == "System: Sort:\nUser: b a"
    image = parse(row) | {"image": "x.png"}
    _, report = load(row, image, columns="instruction=q,output=a")
    assert report["dropped"] == {"image_or_other_part": [1]}


@pytest.mark.parametrize(
    "row",
    [
        '{"instruction": "a?", "output": "b"}',
        '{"prompt": "a?", "response": "b"}',
        '{"question": "a?", "response": "b"}',
        '{"prompt": "a?", "chosen": "b", "rejected": "c"}',
        '{"messages": [ASK, ANSWER]}',
        '{"messages": [SYSTEM, ASK, ANSWER]}',
        '{"messages": [{"role": "system", "content": "\\u200b\\n"}, ASK, ANSWER]}',
        '{"conversations": GPT}',
    ],
)
def test_a_system_column_is_the_system_turn_of_every_layout(load, row):
    wanted = load('{"messages": [SYSTEM, ASK, ANSWER]}')[0][0]
    assert load(parse(row) | {"system": "Be brief."})[0][0] == wanted


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "Sort:", "response": "a b"}',
        '{"prompt": "Sort:", "chosen": "a", "rejected": "b"}',
        '{"question": "Sort:", "response": "a b"}',
        '{"messages": [ASK, ANSWER]}',
    ],
)
def test_an_input_that_would_not_be_read_is_refused(load, row):
    wanted = load(row)[0]["hash"][0]
    for empty in ("", " \n", None):
        assert load(parse(row) | {"input": empty})[0]["hash"][0] == wanted
    with pytest.raises(UserError, match='line 1: "input" has text'):
        load(parse(row) | {"input": "b a"})


def test_columns_and_keys_that_are_not_read_are_named(load):
    thought = '{"role": "assistant", "content": "b", "reasoning": "think", "name": ""}'
    _, report = load(
        '{"messages": [ASK, ANSWER]}', f'{{"messages": [ASK, {thought}], "id": 3}}'
    )
    assert report["unread"] == ["'id'", "'reasoning of messages'"]


@pytest.mark.parametrize(
    "row",
    [
        "3",
        '{"prompt": "a"}',
        '{"prompt": "a", "response": 3}',
        '{"prompt": ["a"], "response": "b"}',
        '{"messages": "hello"}',
        '{"messages": [{"role": "wizard", "content": "x"}]}',
        '{"messages": [ASK, {"role": "assistant", "content": "b", "weight": 0.5}]}',
        '{"messages": [{"role": "user", "content": 4}]}',
        '{"chosen": "no dialogue", "rejected": "x"}',
        '{"text": "x", "label": 1}',
        '{"prompt": "a", "response": "b", "bad": "perhaps"}',
        '{"prompt": "a", "response": "b", "row_id": 0, "hash": "0", "rank": 1, "recommended": "c"}',
    ],
)
def test_rows_that_are_refused_with_their_line(load, row):
    with pytest.raises(UserError, match=r"source\.jsonl line 1: ") as caught:
        load(row)
    assert "\n" not in str(caught.value)


# --- what drops a row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"messages": [ASK, CALL]}', "tool_call"),
        (
            '{"messages": [ASK, CALL, {"role": "tool", "content": "5"}, ANSWER]}',
            "tool_call",
        ),
        (
            '{"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use"}]}]}',
            "tool_call",
        ),
        ('{"messages": [ASK, {"role": "function_call", "content": "f"}]}', "tool_call"),
        ('{"messages": [IMAGE, ANSWER]}', "image_or_other_part"),
        ('{"messages": [ASK, ANSWER], "images": ["x.png"]}', "image_or_other_part"),
        ('{"messages": [ASK, ANSWER, SILENT]}', "mixed_weights"),
        ('{"messages": [ASK, SILENT, ANSWER, ANSWER]}', "mixed_weights"),
        ('{"messages": [ASK, SILENT]}', "no_assistant_turn"),
        ('{"messages": [ASK]}', "no_assistant_turn"),
        ('{"messages": []}', "no_assistant_turn"),
        ('{"messages": [ANSWER]}', "no_assistant_turn"),
        ('{"messages": [ASK, BLANK]}', "empty_response"),
        (
            '{"messages": [{"role": "user", "content": "\\u2060"}, ANSWER]}',
            "empty_prompt",
        ),
    ],
)
@pytest.mark.parametrize("turns", ["last", "all"])
def test_rows_that_hold_nothing_to_train_on_are_dropped_by_name(load, row, reason, turns):
    good = '{"messages": [ASK, ANSWER]}'
    rows, report = load(good, row, good, turns=turns)
    assert report["dropped"] == {reason: [1]}
    assert list(rows["row_id"]) == [0, 2]
    with pytest.raises(UserError, match=reason):
        load(row)


@pytest.mark.parametrize(
    "row",
    [
        '{"messages": [ASK, ANSWER, IMAGE]}',  # behind the last answer
        '{"messages": [CALL, ASK, ANSWER]}',  # before the first question
        '{"messages": [{"role": "user", "content": ["a", {"text": "?", "image": null}]}, ANSWER]}',
        '{"messages": [ASK, {"role": "Gpt", "content": "b", "tool_calls": []}], "images": []}',
        '{"messages": [ASK, {"role": "bot", "content": "b", "weight": 1}, ASK, SILENT]}',
    ],
)
def test_what_loses_nothing_is_kept(load, row):
    assert load(row)[0][0] == load('{"messages": [ASK, ANSWER]}')[0][0]


def test_an_answer_of_weight_0_is_read_and_not_trained_on(load):
    silent = load('{"messages": [ASK, SILENT, MORE]}', turns="all")[0][0]
    wanted = load('{"messages": [ASK, ANSWER, MORE]}', turns="last")[0][0]
    assert silent["input_ids"] == wanted["input_ids"]
    assert silent["trained"] == wanted["trained"]


# --- messages -------------------------------------------------------------------------------------


def test_turns_are_joined_and_cut_to_the_last_answer():
    end = '{"role": "assistant", "content": "b <e>\\n<e> "}'
    turns = parse(f"[ANSWER, SYSTEM, ASK, ASK, {end}, ASK]")
    cleaned = parse('[SYSTEM, {"role": "user", "content": "a?\\na?"}, ANSWER]')
    assert layouts.clean_messages(turns, ("<e>",)) == cleaned
    assert layouts.clean_messages(turns[:4], ("<e>",)) == []


def test_messages_are_kept_for_rows_that_are_more_than_one_turn(load):
    one, two = '{"messages": [ASK, ANSWER]}', '{"messages": [SYSTEM, ASK, ANSWER, ASK]}'
    rows, _ = load(one, two)
    assert rows[0]["messages"] is None
    assert layouts.conversation(rows[0]) == parse("[ASK, ANSWER]")
    assert layouts.conversation(rows[1]) == parse("[SYSTEM, ASK, ANSWER]")
    other = layouts.conversation(rows[1], "e")
    assert other == parse('[SYSTEM, ASK, {"role": "assistant", "content": "e"}]')
    assert rows[1]["hash"] == content_hash("System: Be brief.\nUser: a?", "b")
    assert "messages" not in load(one)[0].column_names


@pytest.mark.parametrize("chat", [None, CHATML])
def test_a_row_read_back_from_its_messages_has_the_same_tokens(load, chat):
    talks = "[ASK, ANSWER]", "[SYSTEM, ASK, ANSWER, MORE]", "[ANSWER, ASK, ASK, ANSWER]"
    rows, _ = load(*[f'{{"messages": {talk}}}' for talk in talks], chat=chat)
    again, _ = load(*[{"messages": layouts.conversation(row)} for row in rows], chat=chat)
    assert again.to_dict() == rows.to_dict()
