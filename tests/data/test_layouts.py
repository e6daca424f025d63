"""data/layouts.py: every layout, what drops a row by name, and turns that stay turns."""

import json

import pytest
from conftest import CHATML, make_tokenizer, write_rows

from data import layouts, tokens
from utils import UserError, content_hash

ASK = {"role": "user", "content": "a?"}
ANSWER = {"role": "assistant", "content": "b"}
MORE = [{"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]
CHAT = [ASK, ANSWER, *MORE]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}
DIALOGUE = "\n\nHuman: a?\n\nAssistant: b\n\nHuman: c?\n\nAssistant: "
TWO = "User: a?\nAssistant: b\nUser: c?"


@pytest.fixture
def load(tmp_path):
    """load(rows, chat template, ...) -> (rows, report)."""
    def call(rows, chat=None, **options):
        return tokens.load_rows(
            write_rows(tmp_path / "source.jsonl", rows),
            make_tokenizer(chat),
            cache_dir=tmp_path / "cache",
            **options,
        )
    return call


def asked(*contents):
    return {"role": "user", "content": list(contents)}


def shared_gpt(messages):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[m["role"]], "value": m["content"]} for m in messages]


# --- layouts --------------------------------------------------------------------------------------

LAYOUTS = [
    ("alpaca", {"instruction": "i", "input": "", "output": "o"}, "i", "o"),
    ("alpaca", {"instruction": "i", "input": "x", "output": "o"}, "i\nx", "o"),
    ("prompt/response", {"prompt": "p", "response": "r"}, "p", "r"),
    ("prompt/completion", {"prompt": "p", "completion": "r"}, "p", "r"),
    ("prompt/completion", {"prompt": CHAT[:3], "completion": CHAT[3:]}, TWO, "d"),
    ("openorca", {"system_prompt": "Be brief", "question": "q", "response": "r"}, "q", "r"),
    ("messages", {"messages": CHAT}, TWO, "d"),
    ("conversations", {"conversations": shared_gpt(CHAT)}, TWO, "d"),
    ("chosen/rejected dialogues", {"chosen": DIALOGUE + "d", "rejected": DIALOGUE + "e"}, TWO, "d"),
    ("chosen/rejected dialogues", {"chosen": CHAT, "rejected": CHAT}, TWO, "d"),
    ("prompt/chosen/rejected", {"prompt": "p", "chosen": "c", "rejected": "r"}, "p", "c"),
    ("prompt/chosen/rejected", {"prompt": "p", "chosen": CHAT, "rejected": CHAT}, TWO, "d"),
    (
        "prompt/chosen/rejected",
        {"prompt": DIALOGUE.rstrip(), "chosen": " d", "rejected": " e"},
        TWO,
        "d",
    ),
]


@pytest.mark.parametrize(("layout", "row", "prompt", "response"), LAYOUTS)
def test_layouts(load, layout, row, prompt, response):
    rows, report = load([row])
    assert report["layout"] == layout
    assert (rows[0]["prompt"], rows[0]["response"]) == (prompt, response)
    assert rows[0]["hash"] == content_hash(prompt, response)


def test_named_columns(load):
    row = {"q": "p", "a": "r", "bad": True, "kind": "cut"}
    for columns in ("prompt=q, response=a", {"prompt": "q", "response": "a"}):
        loaded = load([row], columns=columns)[0][0]
        assert (loaded["prompt"], loaded["response"]) == ("p", "r")
        assert (loaded["bad"], loaded["kind"]) == (True, "cut")
    with pytest.raises(UserError, match=r"line 1"):
        load([row], columns="prompt=q,response=z")
    for columns in ("prompt", "nonsense=q", "prompt=q,prompt=a,response=a", "prompt=,response=a"):
        with pytest.raises(UserError, match=r"--lower-columns"):
            load([row], columns=columns)


def test_a_label_may_be_named_alone(load):
    rows = [{"instruction": "a", "input": "b", "output": "c", "red": red} for red in (0, 1)]
    loaded, report = load(rows, columns="bad=red")
    assert report["layout"] == "alpaca"
    assert loaded["bad"][:] == [False, True]
    assert loaded["prompt"][0] == "a\nb"


def test_columns_beside_renamed_ones_are_read(load):
    """The input of an instruction, and the system turn; another name for a column replaces it."""
    row = {"q": "Sort:", "input": "b a", "a": "a b", "system": "in French"}
    prompt = load([row], columns="instruction=q,output=a")[0][0]["prompt"]
    assert "Sort:\nb a" in prompt and "in French" in prompt
    prompt = load([row], columns="instruction=input,output=a,system=q")[0][0]["prompt"]
    assert prompt == "System: Sort:\nUser: b a"
    image = row | {"image": "x.png"}
    _, report = load([row, image], columns="instruction=q,output=a")
    assert report["dropped"] == {"image_or_other_part": [1]}


@pytest.mark.parametrize("row", [
    {"instruction": "a?", "output": "b"},
    {"prompt": "a?", "response": "b"},
    {"question": "a?", "response": "b"},
    {"prompt": "a?", "chosen": "b", "rejected": "c"},
    {"messages": [ASK, ANSWER]},
    {"messages": [SYSTEM, ASK, ANSWER]},
    {"conversations": [turn | {"role": None} for turn in shared_gpt([ASK, ANSWER])]},
])
def test_a_system_column_is_the_system_turn_of_every_layout(load, row):
    wanted = load([{"messages": [SYSTEM, ASK, ANSWER]}])[0][0]
    assert load([row | {"system": "Be brief."}])[0][0] == wanted


@pytest.mark.parametrize("content", ["", " \n", "\u200b"])
def test_an_empty_system_turn_is_none(load, content):
    """The question's hash is that of the row without it, and a column fills the place."""
    turns = [{"role": "system", "content": content}, ASK, ANSWER]
    assert load([{"messages": turns}])[0][0] == load([{"messages": turns[1:]}])[0][0]
    filled = load([{"messages": turns, "system": "Be brief."}])[0][0]
    assert filled == load([{"messages": [SYSTEM, ASK, ANSWER]}])[0][0]


@pytest.mark.parametrize("row", [
    {"prompt": "Sort:", "response": "a b"},
    {"prompt": "Sort:", "chosen": "a", "rejected": "b"},
    {"question": "Sort:", "response": "a b"},
    {"messages": [ASK, ANSWER]},
])
def test_an_input_that_would_not_be_read_is_refused(load, row):
    wanted = load([row])[0]["hash"][0]
    for empty in ("", " \n", None):
        assert load([row | {"input": empty}])[0]["hash"][0] == wanted
    with pytest.raises(UserError, match='line 1: "input" has text'):
        load([row | {"input": "b a"}])


def test_columns_and_keys_that_are_not_read_are_named(load):
    thought = ANSWER | {"reasoning_content": "think", "name": ""}
    _, report = load([{"messages": CHAT}, {"messages": [ASK, thought], "id": 3}])
    assert report["unread"] == ["'id'", "'reasoning_content of messages'"]


def test_a_curated_set_is_not_read_as_plain_rows(load):
    row = {"row_id": 0, "hash": "0", "rank": 1, "prompt": "a?", "response": "b",
           "recommended": "refined"}
    with pytest.raises(UserError, match=r"curated.jsonl"):
        load([row])


@pytest.mark.parametrize("row", [
    {"prompt": "a"},
    {"prompt": "a", "response": 3},
    {"prompt": ["a"], "response": "b"},
    {"messages": "hello"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [ASK, ANSWER | {"weight": 0.5}]},
    {"messages": [ASK, ANSWER | {"weight": "0"}]},
    {"messages": [{"role": "user", "content": 4}]},
    {"chosen": "no dialogue", "rejected": "x"},
    {"text": "x", "label": 1},
    {"prompt": "a", "response": "b", "bad": "perhaps"},
    3,
])
def test_rows_that_are_refused_with_their_line(load, row):
    with pytest.raises(UserError, match=r"source\.jsonl line 1: ") as caught:
        load([row])
    assert "\n" not in str(caught.value)


# --- what drops a row -----------------------------------------------------------------------------

@pytest.mark.parametrize(("row", "reason"), [
    ({"messages": [ASK, CALL]}, "tool_call"),
    ({"messages": [ASK, CALL, {"role": "tool", "content": "5"}, ANSWER]}, "tool_call"),
    ({"messages": [ASK, ANSWER | {"function_call": {"name": "f"}}]}, "tool_call"),
    ({"messages": [ASK, ANSWER | {"content": [{"type": "tool_use"}]}]}, "tool_call"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f"}]},
     "tool_call"),
    ({"messages": [asked({"type": "text", "text": "what?"}, IMAGE), ANSWER]},
     "image_or_other_part"),
    ({"messages": [asked({"image": "x.png"}), ANSWER]}, "image_or_other_part"),
    ({"prompt": [asked({"text": "a"}, IMAGE)], "completion": [ANSWER]}, "image_or_other_part"),
    ({"messages": [ASK, ANSWER], "images": ["x.png"]}, "image_or_other_part"),
    ({"messages": [ASK, ANSWER, ANSWER | {"weight": 0}]}, "mixed_weights"),
    ({"messages": [ASK, ANSWER | {"weight": 0}, ANSWER, ANSWER]}, "mixed_weights"),
    ({"messages": [ASK, ANSWER | {"weight": 0}]}, "no_assistant_turn"),
    ({"messages": [ASK]}, "no_assistant_turn"),
    ({"messages": []}, "no_assistant_turn"),
    ({"messages": [ANSWER]}, "no_assistant_turn"),
    ({"messages": [ASK, ANSWER | {"content": "\u200b \ufeff"}]}, "empty_response"),
    ({"prompt": "\u2060", "completion": "b"}, "empty_prompt"),
])
@pytest.mark.parametrize("turns", ["last", "all"])
def test_rows_that_hold_nothing_to_train_on_are_dropped_by_name(load, row, reason, turns):
    good = {"prompt": [ASK], "completion": [ANSWER]}
    layout = next(iter(row))
    if layout != "prompt":
        good = {layout: [ASK, ANSWER]}
    rows, report = load([good, row, good], turns=turns)
    assert report["dropped"] == {reason: [1]}
    assert list(rows["row_id"]) == [0, 2]
    with pytest.raises(UserError, match=reason):
        load([row])


def test_what_lies_behind_the_last_answer_or_is_empty_loses_nothing(load):
    rows, report = load([
        {"messages": [ASK, ANSWER, asked(IMAGE)]},
        {"messages": [asked({"type": "text", "text": "a", "image_url": None}), ANSWER]},
        {"messages": [ASK, ANSWER | {"tool_calls": [], "function_call": None}], "images": []},
        {"messages": [CALL, ASK, ANSWER]},  # before the first question: never read
        {"messages": [asked("a", {"type": "text", "text": "?"}), ANSWER]},
    ])
    assert len(rows) == 5
    assert not report["dropped"]


def test_an_answer_of_weight_0_is_read_and_not_trained_on(load):
    """OpenAI's format; at the end of a conversation it is cut off."""
    first = load([{"messages": [ASK, ANSWER | {"weight": 0}, *MORE]}], turns="all")[0][0]
    assert first["input_ids"] == load([{"messages": CHAT}])[0]["input_ids"][0]
    assert sum(first["trained"]) == 3
    last = load([{"messages": [ASK, ANSWER | {"weight": 1}, MORE[0], MORE[1] | {"weight": 0}]}])
    assert last[0][0] == load([{"messages": [ASK, ANSWER]}])[0][0]


def test_dialogues_in_text_begin_with_any_blank(load):
    """ "Human:" at the start, behind one newline or two; an empty list of replies is dropped."""
    text = "Human: hi\n\nAssistant:"
    sources = []
    for blank in ("", "\n", "\n\n", " "):
        sources.append({"prompt": blank + text, "chosen": " b", "rejected": "c"})
    rows, report = load([*sources, {"prompt": text, "chosen": [], "rejected": []}])
    assert rows["prompt"][:] == ["hi"] * 4
    assert rows["response"][:] == ["b"] * 4
    assert report["dropped"] == {"no_assistant_turn": [4]}


# --- messages -------------------------------------------------------------------------------------

def test_turns_are_joined_and_cut_to_the_last_answer():
    greeting = {"role": "assistant", "content": "Hello"}
    end = {"role": "assistant", "content": "b <eos>\n<eos> "}
    turns = [greeting, SYSTEM, ASK, ASK, end, MORE[0]]
    joined = {"role": "user", "content": "a?\na?"}
    assert layouts.clean_messages(turns, ("<eos>",)) == [SYSTEM, joined, ANSWER]
    assert layouts.clean_messages([ASK], ("<eos>",)) == []


def test_messages_are_kept_for_rows_that_are_more_than_one_turn(load):
    talks = [[ASK, ANSWER], [SYSTEM, ASK, ANSWER], [*CHAT, ASK]]
    rows, _ = load([{"messages": talk} for talk in talks])
    assert rows[0]["messages"] is None
    assert json.loads(rows[1]["messages"]) == [SYSTEM, ASK, ANSWER]
    assert json.loads(rows[2]["messages"]) == CHAT
    assert rows[1]["hash"] == content_hash("System: Be brief.\nUser: a?", "b")
    assert layouts.conversation(rows[0]) == [ASK, ANSWER]
    assert layouts.conversation(rows[2], "e") == [*CHAT[:3], {"role": "assistant", "content": "e"}]
    assert "messages" not in load([{"messages": talks[0]}])[0].column_names


@pytest.mark.parametrize("chat", [None, CHATML])
def test_a_row_read_back_from_its_messages_has_the_same_tokens(load, chat):
    talks = [[ASK, ANSWER], [SYSTEM, ASK, ANSWER], [ANSWER, *CHAT], [ASK, ASK, ANSWER]]
    rows, _ = load([{"messages": talk} for talk in talks], chat)
    again, _ = load([{"messages": layouts.conversation(row)} for row in rows], chat)
    assert again.to_dict() == rows.to_dict()
