"""data/: every layout, every trap about rows and borders, every malformed input, the cache."""

import collections
import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
from conftest import ROOT
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import batches
from data import sets, tokens
from runtime.hub import hub_answers
from utils import UserError, content_hash

SHARED = ROOT.parent / "shared"
SPECIALS = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
            "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = ["football is a game", "User: what is a foot? Assistant: a ball", "football football",
          "Human: name the days. Assistant: Monday and Tuesday are days."] * 20
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
LLAMA3 = ("<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
          "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
          "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
          "{% endif %}")


def make_tokenizer(bos=False, chat=None, **tokens):
    """A byte-level BPE of 400 tokens that knows the word "football"."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    if bos:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokens = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"} | tokens
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, **{key: value for key, value in tokens.items() if value})
    tokenizer.chat_template = chat
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def load(tmp_path, tokenizer):
    """load(rows or file name, ...) -> (rows, report), with a cache of its own."""
    def call(rows, tok=tokenizer, **options):
        path = tmp_path / (rows if isinstance(rows, str) else "source.jsonl")
        if not isinstance(rows, str):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tokens.load_rows(path, tok, cache_dir=tmp_path / "cache", **options)
    return call


def pairs(*texts):
    return [{"prompt": prompt, "response": response} for prompt, response in texts]


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def trained(row):
    return [token for token, loss in zip(row["input_ids"], row["trained"], strict=True) if loss]


def shown(rows, tokenizer, number=0):
    return tokens.show_example(rows[number], tokenizer)


# ------------------------------------------------------------------------------ layouts

DIALOGUE = "\n\nHuman: a?\n\nAssistant: b\n\nHuman: c?\n\nAssistant: "
CHAT = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]
SHAREGPT = [{"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in CHAT]
TWO = "User: a?\nAssistant: b\nUser: c?"
LAYOUTS = [
    ("alpaca", {"instruction": "i", "input": "", "output": "o"}, "i", "o"),
    ("alpaca", {"instruction": "i", "input": "x", "output": "o"}, "i\nx", "o"),
    ("prompt/response", {"prompt": "p", "response": "r"}, "p", "r"),
    ("prompt/completion", {"prompt": "p", "completion": "r"}, "p", "r"),
    ("prompt/completion", {"prompt": CHAT[:3], "completion": CHAT[3:]}, TWO, "d"),
    ("openorca", {"system_prompt": "Be brief", "question": "q", "response": "r"}, "q", "r"),
    ("messages", {"messages": CHAT}, TWO, "d"),
    ("conversations", {"conversations": SHAREGPT}, TWO, "d"),
    ("chosen/rejected dialogues", {"chosen": DIALOGUE + "d", "rejected": DIALOGUE + "e"}, TWO, "d"),
    ("chosen/rejected dialogues", {"chosen": CHAT, "rejected": CHAT}, TWO, "d"),
    ("prompt/chosen/rejected", {"prompt": "p", "chosen": "c", "rejected": "r"}, "p", "c"),
    ("prompt/chosen/rejected", {"prompt": "p", "chosen": CHAT, "rejected": CHAT}, TWO, "d"),
    ("prompt/chosen/rejected", {"prompt": DIALOGUE.rstrip(), "chosen": " d", "rejected": " e"},
     TWO, "d"),
]


@pytest.mark.parametrize(("layout", "row", "prompt", "response"), LAYOUTS)
def test_layouts(load, tokenizer, layout, row, prompt, response):
    rows, report = load([row])
    assert report["layout"] == layout
    assert (rows[0]["prompt"], rows[0]["response"]) == (prompt, response)
    assert rows[0]["hash"] == content_hash(prompt, response)
    opening = "" if prompt.startswith("User:") else "User: "
    assert shown(rows, tokenizer) == f"{opening}{prompt}\nAssistant:⟦ {response}<eos>⟧"


def test_both_sides_of_a_pair_share_row_ids(load):
    rows = [{"chosen": DIALOGUE + f"good {n}", "rejected": DIALOGUE + f"bad {n}"} for n in range(3)]
    rows[0]["rejected"] = DIALOGUE  # an empty answer: that side loses the row, not the numbering
    chosen, rejected = (load(rows, side=side)[0] for side in ("chosen", "rejected"))
    assert list(chosen["row_id"]) == [0, 1, 2] and list(rejected["row_id"]) == [1, 2]
    assert rejected[1]["response"] == "bad 2" and chosen[2]["response"] == "good 2"
    assert rejected[1]["prompt_hash"] == chosen[2]["prompt_hash"]


def test_a_label_may_be_named_alone(load):
    rows = [{"instruction": "a", "input": "b", "output": "c", "red": n} for n in (0, 1)]
    loaded, report = load(rows, columns="bad=red")
    assert report["layout"] == "alpaca" and loaded["bad"][:] == [False, True]
    assert loaded["prompt"][0] == load(rows)[0]["prompt"][0] == "a\nb"


def test_named_columns(load):
    rows = [{"q": "p", "a": "r", "bad": True, "kind": "cut"}]
    for columns in ("prompt=q, response=a", {"prompt": "q", "response": "a"}):
        loaded, _ = load(rows, columns=columns)
        assert (loaded[0]["prompt"], loaded[0]["response"]) == ("p", "r")
        assert (loaded[0]["bad"], loaded[0]["kind"]) == (True, "cut")
    with pytest.raises(UserError, match=r"line 1: no column \"z\".*found q, a"):
        load(rows, columns="prompt=q,response=z")
    with pytest.raises(UserError, match=r"columns 'q', 'a', 'bad', 'kind'\. .*Name every column"):
        load(rows, columns="input=q")
    for columns in ("prompt", "nonsense=q"):
        with pytest.raises(UserError, match="--lower-columns"):
            load(rows, columns=columns)


def test_multi_turn_under_a_plain_template(load, tokenizer):
    last, _ = load([{"messages": CHAT}])
    assert shown(last, tokenizer) == TWO + "\nAssistant:⟦ d<eos>⟧"
    every, _ = load([{"messages": CHAT}], turns="all")
    assert shown(every, tokenizer) == (
        "User: a?\nAssistant:⟦ b<eos>⟧\nUser: c?\nAssistant:⟦ d<eos>⟧")
    assert every[0]["hash"] == last[0]["hash"]


def test_odd_dialogues(load, tokenizer):
    greeting = {"role": "assistant", "content": "Hello"}
    system = {"role": "system", "content": "Be brief."}
    rows, report = load([{"messages": [greeting, *CHAT, CHAT[0]]}, {"messages": [system, *CHAT]},
                         {"messages": [CHAT[0]]}, {"messages": []}, {"messages": [greeting]}])
    assert report["dropped"] == {"no_assistant_turn": [2, 3, 4]}
    assert shown(rows, tokenizer, 0) == TWO + "\nAssistant:⟦ d<eos>⟧"
    assert shown(rows, tokenizer, 1).startswith("User: Be brief.\na?\nAssistant: b")
    assert rows[1]["prompt"].startswith("System: Be brief.\nUser: a?")


def test_a_system_column_and_a_value_beside_an_empty_content(load):
    """Both as merged files have them: ShareGPT's system prompt, and columns of another source."""
    system = {"role": "system", "content": "Be brief."}
    other = [{"from": "human" if m["role"] == "user" else "gpt", "role": None, "content": None,
              "value": m["content"]} for m in CHAT]
    expected, _ = load([{"messages": [system, *CHAT]}])
    for row in ({"messages": CHAT, "system": "Be brief."},
                {"messages": [system, *CHAT], "system": "Be brief."},  # twice is once
                {"conversations": other, "system": "Be brief."}):
        assert load([row])[0][0]["input_ids"] == expected[0]["input_ids"]
    without, _ = load([{"conversations": other, "system": None}])
    assert without[0]["input_ids"] == load([{"messages": CHAT}])[0][0]["input_ids"]


# ------------------------------------------------------------------------------ chat templates

@pytest.mark.parametrize(("chat", "head", "middle", "end"), [
    (CHATML, "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n", "\n", "<|im_end|>"),
    (LLAMA3, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nwhat?<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>")])
def test_chat_template(load, chat, head, middle, end):
    tok = make_tokenizer(bos=True, chat=chat)
    rows, _ = load(pairs(("what?", "a ball")), tok)
    assert shown(rows, tok) == f"{head}⟦a ball{end}⟧"
    assert rows[0]["input_ids"] == plain(tok, head) + plain(tok, "a ball" + end)

    history = head.replace("what?", "a?")
    rows, _ = load([{"messages": CHAT}], tok, turns="all")
    question = history.removeprefix("<|begin_of_text|>").replace("a?", "c?")
    assert shown(rows, tok) == f"{history}⟦b{end}⟧{middle}{question}⟦d{end}⟧"
    rows, _ = load([{"messages": CHAT}], tok)
    assert shown(rows, tok) == f"{history}b{end}{middle}{question}⟦d{end}⟧"

    rows, report = load(pairs(("what?", "a ball " * 50)), tok, max_length=40)
    assert report["truncated"] == 1 and not rows[0]["complete"]
    assert rows[0]["input_ids"][-1] not in tokens.special_tokens(tok)
    rows, _ = load(pairs(("what?", "a ball")), tok, template=tokens.TEMPLATE)
    assert shown(rows, tok) == "<bos>User: what?\nAssistant:⟦ a ball<eos>⟧"  # the flag wins


def test_chat_template_without_end_of_turn_gets_eos(load):
    chat = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
    tok = make_tokenizer(chat=chat)
    assert shown(load(pairs(("a", "b")), tok)[0], tok) == "user: a\nassistant: ⟦b<eos>⟧"


def test_chat_template_that_hides_the_border_or_refuses(load):
    odd = CHATML.replace("{% endif %}", "<think>{% endif %}")
    with pytest.raises(UserError, match="line 1: the tokenizer's chat template"):
        load(pairs(("a", "b")), make_tokenizer(chat=odd))
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tok = make_tokenizer(chat=strict + CHATML)
    system = [{"role": "system", "content": "s"}, *CHAT]
    _, report = load([{"messages": system}, {"messages": CHAT}], tok)
    assert report["dropped"] == {"template_refused": [0]}
    with pytest.raises(UserError, match=r"no row is left .*no system"):
        load([{"messages": system}], tok)


def test_special_tokens_in_user_text_stay_text(load):
    trick = "a<|im_end|>\n<|im_start|>assistant\nb <eos> c"
    for chat in (None, CHATML):
        tok = make_tokenizer(chat=chat)
        rows, _ = load(pairs((trick, trick), ("plain", "text")), tok)
        special = tokens.special_tokens(tok)
        controls = [[t for t in row["input_ids"] if t in special] for row in rows]
        assert controls[0] == controls[1], "the same control tokens as a harmless row"
        assert rows[0]["prompt"] == trick and trick in tok.decode(rows[0]["input_ids"])
    rows, _ = load(pairs(("a", "b")), make_tokenizer(), template=(
        "<|im_start|>{prompt}<|im_end|>{response}<|im_end|>"))
    assert rows[0]["input_ids"].count(4) == 2 and trained(rows[0])[-1] == 4, "template: control"


@pytest.mark.parametrize("chat", [None, CHATML])
def test_private_use_characters_in_user_text_stay_text(load, chat):
    """Whatever stands in for special-token strings inside, no character of a source is one."""
    tok = make_tokenizer(chat=chat)
    count = len(tokens.special_tokens(tok)) + 2
    for texts in ([f"a {chr(0xF0000 + n)} b" for n in range(count)], ["a \ud8000\udfff b"],
                  [f"a <eos>{chr(0xE000)}<|im_end|> {chr(0x10FFFD)}0 b"]):
        for row in load(pairs(*[("a?", text) for text in texts]), tok)[0]:
            end = "<|im_end|>" if chat else "<eos>"
            assert tok.decode(trained(row)).strip() == row["response"] + end
            controls = [t for t in trained(row) if t in tokens.special_tokens(tok)]
            assert controls == plain(tok, end)
    text = f"a {chr(0xF0000)} b"
    assert trained(load(pairs(("a?", text)))[0][0])[:-1] == plain(make_tokenizer(), " " + text)


# ------------------------------------------------------------------------------ traps

def test_no_merge_across_the_border(load, tokenizer):
    rows, _ = load(pairs(("foot", "ball")), template="{prompt}{response}")
    assert len(plain(tokenizer, "football")) == 1, "together it would be one token"
    assert rows[0]["input_ids"] == [*plain(tokenizer, "foot"), *plain(tokenizer, "ball"), 1]
    assert trained(rows[0]) == [*plain(tokenizer, "ball"), 1]


def test_prompt_never_ends_in_whitespace(load, tokenizer):
    for template, row, expected in [
            ("Q: {prompt}\nA: {response}", ("x", "y"), "Q: x\nA:⟦ y<eos>⟧"),
            ("Q: {prompt}\\nA:\\n{response}", ("x", "y"), "Q: x\nA:⟦\ny<eos>⟧"),
            ("{prompt}{response}", ("x ", "y"), "x⟦ y<eos>⟧"),
            ("{prompt} -> {response};\n", ("x", "y"), "x ->⟦ y;<eos>⟧")]:
        rows, _ = load(pairs(row), template=template)
        assert shown(rows, tokenizer) == expected
        assert trained(rows[0])[:-1] == plain(tokenizer, expected.split("⟦")[1][:-6])


@pytest.mark.parametrize("template", ["{prompt}", "{response}", "{prompt}{prompt}{response}",
                                      "{response} {prompt}", "{prompt} {response} {response}"])
def test_bad_template(load, template):
    with pytest.raises(UserError, match="--template"):
        load(pairs(("a", "b")), template=template)


def test_eos_on_complete_rows_only(load, tokenizer):
    response = "football " * 30
    full = load(pairs(("a", response)))[0][0]
    length = len(full["input_ids"])
    assert full["complete"] and trained(full)[-1] == 1 and full["input_ids"].count(1) == 1
    for cut in (length - 1, length - 2, length // 2):  # length - 1: only the EOS has no room
        rows, report = load(pairs(("a", response)), max_length=cut)
        assert rows[0]["input_ids"] == full["input_ids"][:cut] and not rows[0]["complete"]
        assert 1 not in rows[0]["input_ids"] and report["truncated"] == 1
    rows, report = load(pairs(("a", response)), max_length=length)
    assert rows[0]["complete"] and report["truncated"] == 0


def test_pad_equal_to_eos_still_trains_eos(load):
    tok = make_tokenizer(pad_token="<eos>")
    assert trained(load(pairs(("a", "b")), tok)[0][0])[-1] == tok.pad_token_id == 1


def test_bos_iff_the_tokenizer_adds_one(load, tmp_path):
    for bos in (True, False):
        tok = make_tokenizer(bos=bos)
        sources = [pairs(("a", "b")), [{"messages": CHAT}], [LAYOUTS[0][1]]]
        for rows in sources:
            for turns in ("last", "all"):
                ids = load(rows, tok, turns=turns)[0][0]["input_ids"]
                assert (ids[0] == 2) == bos and ids.count(2) == bos


def test_tokenizer_without_eos(load):
    with pytest.raises(UserError, match="eos_token"):
        load(pairs(("a", "b")), make_tokenizer(eos_token=None))


def test_literal_end_marker_becomes_the_one_eos(load):
    tok = make_tokenizer()
    rows, report = load(pairs(("a", "b<|endoftext|>"), ("a", "b <eos>\n"), ("a", "b"),
                              ("a", "<|endoftext|>")), tok)
    assert rows[0]["input_ids"] == rows[1]["input_ids"] == rows[2]["input_ids"]
    assert [row["response"] for row in rows] == ["b"] * 3
    assert report["dropped"] == {"empty_response": [3]}


def test_the_hash_does_not_depend_on_the_tokenizers_end_marker(load, tokenizer):
    """A ranking made with one tokenizer names the rows of another."""
    texts = pairs(("a", "b <eos>"), ("a", "b<|endoftext|>"), ("a", "b"), ("a", "b<|im_end|>"))
    one, _ = load(texts)
    other, _ = load(texts, make_tokenizer(eos_token="<|im_end|>"))
    assert list(one["hash"]) == list(other["hash"])
    assert one[0]["response"] == "b" and other[0]["response"] == "b <eos>"
    assert one[0]["hash"] != one[1]["hash"] == one[2]["hash"] == content_hash("a", "b")


def test_pairs_that_differ_in_an_end_marker_only_are_equal(tokenizer, tmp_path):
    rows = [{"prompt": f"p{n}", "chosen": "yes", "rejected": f"no {n}"} for n in range(3)]
    rows[1]["rejected"] = "yes<eos>"
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, report = sets.load_pairs(tmp_path / "x.jsonl", tokenizer, cache_dir=tmp_path / "cache")
    assert report["dropped"]["equal"] == [1] and list(made["row_id"]) == [0, 2]


def test_pairs_that_differ_behind_the_cut_only_are_equal(tokenizer, tmp_path):
    """Three of the four long answers are cut: both sides' are counted."""
    long = " ".join(["red"] * 40)
    rows = [{"prompt": "a", "chosen": "yes", "rejected": long},
            {"prompt": "b", "chosen": long + " yes", "rejected": long + " no"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, report = sets.load_pairs(tmp_path / "x.jsonl", tokenizer, max_length=30,
                                   cache_dir=tmp_path / "cache")
    assert report["dropped"]["equal"] == [1] and list(made["row_id"]) == [0]
    assert sets.left_out(report) == ", dropped {'equal': 1}, 3 responses cut"
    _, report = tokens.load_rows(tmp_path / "x.jsonl", tokenizer, cache_dir=tmp_path / "cache")
    assert sets.left_out(report) == (
        ", rejected answers not read (--upper-loss dpo reads the upper ones)")
    assert len(sets.load_pairs(tmp_path / "x.jsonl", tokenizer, cache_dir=tmp_path / "c2")[0]) == 2


def test_a_pair_of_answers_to_two_questions_is_none(tokenizer, tmp_path):
    rows = [{"chosen": f"\n\nHuman: {asked}\n\nAssistant: yes", "rejected":
             f"\n\nHuman: {other}\n\nAssistant: no"} for asked, other in (("a", "a"), ("b", "c"))]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, report = sets.load_pairs(tmp_path / "x.jsonl", tokenizer, cache_dir=tmp_path / "cache")
    assert report["dropped"]["two questions"] == [1] and list(made["row_id"]) == [0]
    assert sets.left_out(report) == ", dropped {'two questions': 1}"


def test_columns_that_no_layout_reads_are_named(tokenizer, tmp_path):
    row = {"instruction": "Who won?", "context": "Bob won.", "response": "Bob"}
    later = row | {"instruction": "Who lost?", "id": 3}  # not only in the first row
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(later)}\n")
    columns, cache = "prompt=instruction,response=response", tmp_path / "cache"
    _, report = tokens.load_rows(tmp_path / "x.jsonl", tokenizer, columns=columns, cache_dir=cache)
    assert sets.left_out(report) == ", not read: 'context', 'id'"
    columns = "instruction=instruction,input=context,output=response"
    _, report = tokens.load_rows(tmp_path / "x.jsonl", tokenizer, columns=columns, cache_dir=cache)
    assert sets.left_out(report) == ", not read: 'id'"
    many = {"unread": [f"c{n}" for n in range(12)]}
    assert sets.left_out(many).endswith(", c8 and 3 more")


def test_an_answer_of_weight_0_is_read_and_not_trained_on(load, tokenizer):
    """OpenAI's format; at the end of a conversation it is cut off."""
    first, last = ([CHAT[0], CHAT[1] | {"weight": a}, CHAT[2], CHAT[3] | {"weight": b}]
                   for a, b in ((0, 1), (1, 0)))
    for turns in ("last", "all"):
        rows, _ = load([{"messages": first}], turns=turns)
        assert shown(rows, tokenizer) == TWO + "\nAssistant:⟦ d<eos>⟧"
        rows, _ = load([{"messages": last}], turns=turns)
        assert shown(rows, tokenizer) == "User: a?\nAssistant:⟦ b<eos>⟧"
        assert (rows[0]["prompt"], rows[0]["response"]) == ("a?", "b")
    for weight in (0.5, 2, -1, "0", [1]):
        with pytest.raises(UserError, match=r"message 1 has the weight .+ must be 0 or 1"):
            load([{"messages": [CHAT[0], CHAT[1] | {"weight": weight}]}])
    _, report = load([{"messages": CHAT}, {"messages": [CHAT[0], CHAT[1] | {"weight": 0}]}])
    assert report["dropped"]["no_assistant_turn"] == [1]


@pytest.mark.parametrize("weights", [(0, 1), (1, 0), (0, 1, 1), (1, 1, 0), (0, 1, 0)])
def test_answers_in_a_row_of_different_weights_are_dropped_by_name(load, weights):
    """Joined they are one turn, and only a part of it would train; never an earlier answer."""
    drafts = [{"role": "assistant", "content": f"d{n}", "weight": w} for n, w in enumerate(weights)]
    _, report = load([{"messages": CHAT}, {"messages": [*CHAT[:3], *drafts]}])
    assert report["dropped"] == {"mixed_weights": [1]}
    assert load([{"messages": [CHAT[0], drafts[0] | {"weight": 1}, drafts[1] | {"weight": 1}]}])[0][
        0]["response"] == "d0\nd1"


def test_roles_may_begin_with_a_capital(load):
    rows, _ = load([{"messages": [turn | {"role": turn["role"].title()} for turn in CHAT]}])
    assert rows[0]["response"] == "d"


def test_keys_of_messages_that_are_not_read_are_named(load):
    thought = CHAT[1] | {"reasoning_content": "think", "name": ""}
    _, report = load([{"messages": CHAT}, {"messages": [CHAT[0], thought]}])
    assert sets.left_out(report) == ", not read: 'reasoning_content of messages'"


def test_rows_without_a_label_are_counted(load):
    row = {"prompt": "a", "response": "b"}
    rows, report = load([row | {"bad": True}, row | {"bad": None}, row, row | {"bad": ""}])
    assert list(rows["bad"]) == [True, False, False, False]
    assert sets.left_out(report) == ", 1 labelled bad, 3 without a label count as good"
    assert sets.left_out(load([row])[1]) == ""


def test_an_input_beside_pairs_or_messages_is_not_dropped(tokenizer, tmp_path):
    say = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "yes"}]
    for row in ({"prompt": "Sum up.", "chosen": "a", "rejected": "b"}, {"messages": say},
                {"chosen": say, "rejected": say}):
        (tmp_path / "x.jsonl").write_text(json.dumps(row | {"input": "THE TEXT"}) + "\n")
        with pytest.raises(UserError, match='"input" has text that would not be read'):
            tokens.load_rows(tmp_path / "x.jsonl", tokenizer, cache_dir=tmp_path / "cache")


def test_tokenizer_that_prepends_a_space(load):
    """Llama-2-like: tokenised apart, the response must not gain a space of its own."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    model.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    model.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<eos>"], initial_alphabet=["\n", "▁", "|"],
        show_progress=False))
    tok = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<unk>")
    rows, _ = load(pairs(("foot", "ball"), ("foot", "ball Ж")), tok, template="{prompt}|{response}")
    assert tok.convert_ids_to_tokens(trained(rows[0]))[0] != "▁ball"
    assert "".join(tok.convert_ids_to_tokens(rows[0]["input_ids"])) == "▁foot|ball<eos>"
    rows, _ = load(pairs(("foot", "ball")), tok, template="{prompt}| {response}")
    assert "".join(tok.convert_ids_to_tokens(rows[0]["input_ids"])) == "▁foot|▁ball<eos>"
    rows, _ = load(pairs(("<eos>", "x"), ("x", "<eos> y")), tok, template="{prompt}{response}")
    for row, text in zip(rows, ("<eos>", "x"), strict=True):
        head = [t for t, loss in zip(row["input_ids"], row["trained"], strict=True) if not loss]
        assert head == tok(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def test_unknown_character_at_the_end_keeps_its_eos(load):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tok = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", unk_token="<unk>")
    rows, _ = load(pairs(("a", "b zzz")), tok, template="{prompt} {response}")
    assert rows[0]["input_ids"] == [2, 3, 0, 1]


# ------------------------------------------------------------------------------ row ids, drops

def test_text_of_invisible_characters_alone_is_empty(load):
    rows, report = load(pairs(("a", "\u200b \ufeff"), ("\u2060", "b"), ("a", "\u200b\U0001f44d")))
    assert report["dropped"] == {"empty_response": [0], "empty_prompt": [1]}
    assert rows["response"][:] == ["\u200b\U0001f44d"]  # the text of the others stays as it is


def test_row_ids_through_filtering(load, tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "BATCH", 7)  # many batches, a partial one at the end
    texts = [(f"question {n}", f"answer {n}") for n in range(60)]
    for n in range(0, 60, 10):
        texts[n] = (texts[n][0], " \n")
    texts[33], texts[44] = ("long " * 200, "x"), ("long " * 30, "y")
    rows, report = load(pairs(*texts), max_length=60)
    assert report["dropped"] == {"empty_response": [0, 10, 20, 30, 40, 50],
                                 "long_prompt": [33, 44]}
    kept = [n for n in range(60) if n % 10 and n not in (33, 44)]
    assert list(rows["row_id"]) == kept and report["rows_kept"] == len(kept) == 52
    for row in rows:
        assert (row["prompt"], row["response"]) == texts[row["row_id"]]
        assert row["hash"] == content_hash(*texts[row["row_id"]])
        assert shown([row], tokenizer) == "User: {}\nAssistant:⟦ {}<eos>⟧".format(
            *texts[row["row_id"]])
    assert report["tokens"] == sum(len(row["input_ids"]) for row in rows)


def test_a_prompt_of_max_length_tokens_is_dropped(load, tokenizer):
    """The template counts; with one token of room the row stays, cut to it."""
    prompt_tokens = len(plain(tokenizer, "User: football\nAssistant:"))
    rows, report = load(pairs(("football", "x")), max_length=prompt_tokens + 1)
    assert sum(rows[0]["trained"]) == 1 and not rows[0]["complete"] and report["truncated"] == 1
    with pytest.raises(UserError, match=r"no row is left to train on \(1 long_prompt\)"):
        load(pairs(("football", "x")), max_length=prompt_tokens)
    # When every turn is trained, that is the first question alone.
    _, report = load([{"messages": CHAT}], turns="all", max_length=len(
        plain(tokenizer, "User: a?\nAssistant:")) + 1)
    assert report["rows_kept"] == 1


def test_limit_is_a_seeded_subset(load):
    rows = pairs(*[(f"p{n}", f"r{n}") for n in range(50)])
    first, report = load(rows, limit=10, seed=1)
    assert report["rows_in_source"] == 50
    ids = list(first["row_id"])
    assert ids == sorted(set(ids)) and len(ids) == 10 and ids != list(range(10))
    assert all(row["prompt"] == f"p{row['row_id']}" for row in first)
    torch.manual_seed(5)
    assert list(load(rows, limit=10, seed=1, max_length=999)[0]["row_id"]) == ids
    assert list(load(rows, limit=10, seed=2)[0]["row_id"]) != ids
    assert len(load(rows, limit=500)[0]) == 50
    with pytest.raises(UserError, match="limit 0"):
        load(rows, limit=0)


def test_a_limit_takes_every_row_as_often():
    rows = [("place", {})] * 4
    counts = collections.Counter(row_id for seed in range(2000) for row_id, *_ in tokens._sample(
        iter(rows), 2, seed, {"rows_in_source": 0}))
    assert all(abs(counts[row_id] - 1000) < 100 for row_id in range(4))  # 4.5 standard errors


def test_bad_and_kind_pass_through(load, tmp_path):
    rows, _ = load([{"prompt": "a", "response": "b", "bad": True, "kind": "swapped"},
                    {"prompt": "a", "response": "c", "bad": 0, "kind": None},
                    {"prompt": "a", "response": "d"}])
    assert list(rows["bad"]) == [True, False, False] and rows[0]["kind"] == "swapped"
    assert "bad" not in load(pairs(("a", "b")))[0].column_names
    rows, _ = load([{"prompt": "a", "response": f"{n}", "bad": bad} for n, bad in enumerate(
        ("1", "TRUE", 1, "0", "False", 0))])  # as spreadsheets write them
    assert list(rows["bad"]) == [True] * 3 + [False] * 3
    late = pairs(*[(f"p{n}", "r") for n in range(8)])
    for number in range(4, 8):
        late[number] |= {"bad": True} | ({"kind": "cut"} if number == 7 else {})
    rows, _ = load(late)
    assert list(rows["bad"]) == [False] * 4 + [True] * 4
    assert list(rows["kind"]) == [""] * 7 + ["cut"]
    with pytest.raises(UserError, match=r"line 1: the label \"bad\""):
        load([{"prompt": "a", "response": "b", "bad": "perhaps"}])


# ------------------------------------------------------------------------------ malformed input

GOOD = '{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(("content", "message"), [
    (GOOD * 4 + '{"prompt": "a", \n', "line 5: not valid JSON"),
    (GOOD + "\n" + "[1, 2]\n", "line 3: a row must be an object, not list"),
    (GOOD + '{"prompt": "a"}\n', 'line 2: no column "response"; found prompt'),
    ("", "holds no rows"),
    ("\n \n", "holds no rows"),
    ('{"prompt": "a", "response": 3}\n', 'line 1: "response" must be text, not int'),
    ('{"prompt": ["a"], "response": "b"}\n', 'line 1: "prompt" message 0 must be an object'),
    ('{"messages": "hello"}\n', 'line 1: "messages" must be a list of messages, not str'),
    ('{"messages": [{"role": "wizard", "content": "x"}]}\n', "role 'wizard'; known: system"),
    ('{"messages": [{"role": ["user"], "content": "x"}]}\n', r"role .\['user'\].; known: system"),
    ('{"instruction": null, "output": "b"}\n', r"no row is left to train on \(1 empty_prompt\)"),
    ('{"messages": [{"role": "user", "content": 4}]}\n', "message 0: content must be text"),
    ('{"chosen": "no dialogue", "rejected": "x"}\n', 'line 1: "chosen" is not a dialogue'),
    ('{"text": "x", "label": 1}\n', "line 1: unknown layout with the columns 'text', 'label'.*"
                                    "alpaca.*--lower-columns"),
    ('{"prompt": "a", "response": " "}\n', r"no row is left to train on \(1 empty_response\)"),
    (b'{"prompt": "a", "response": "\xff\xfe"}\n', "line 1: not valid JSON"),
])
def test_malformed_jsonl(load, tmp_path, content, message):
    (tmp_path / "x.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message) as caught:
        load("x.jsonl", name="lower")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir()), "nothing half-written"


@pytest.mark.parametrize(("file", "content", "message"), [
    ("x.json", '[{"prompt": "a"', "not valid JSON"),
    ("x.json", "[3]", "element 0: a row must be an object, not int"),
    ("x.csv", "prompt,response\na,b\nonly one\n", "line 3: not as many cells"),
    ("x.csv", 'prompt,response\na,"b\n', "not valid CSV"),
    ("x.csv", "prompt,response\n", "holds no rows"),
    ("x.csv", "prompt,response,response\na,b,c\n",
     r'x\.csv: 2 columns are called "response"; rename or remove all but one'),
    ("x.parquet", "PAR1 no", "not a valid parquet file"),
    ("x.txt", "a", "unknown file type"),
    ("folder/readme.md", "a", r"no \.jsonl/\.jsonl\.gz/\.json/\.json\.gz/\.parquet/\.csv file"),
])
def test_malformed_files(load, tmp_path, file, content, message):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load("folder" if file.startswith("folder") else file)


def test_a_name_that_two_columns_have(load, tmp_path):
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["prompt", "response", "response"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r'x\.parquet: 2 columns are called "response"'):
        load("x.parquet")
    (tmp_path / "x.csv").write_text("prompt,response,,\na,b,,\n")  # as spreadsheets write
    assert load("x.csv")[0][0]["response"] == "b"


@pytest.mark.parametrize("source", ["", "  "])
def test_an_empty_name_is_not_the_current_folder(tokenizer, tmp_path, monkeypatch, source):
    (tmp_path / "x.jsonl").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="lower: the name of the source is empty"):
        tokens.load_rows(source, tokenizer, name="lower", cache_dir=tmp_path / "cache")
    assert len(tokens.load_rows(".", tokenizer, cache_dir=tmp_path / "cache")[0]) == 1


def test_surrogate_halves_do_not_crash(load):
    assert load([{"prompt": "a \ud800", "response": "b"}])[0][0]["prompt"] == "a ?"


def test_file_kinds_agree(load, tmp_path):
    texts = [("a, \"quoted\"\nline", "007"), ("c", "é")]
    table = datasets.Dataset.from_list(pairs(*texts))
    table.to_csv(tmp_path / "x.csv"), table.to_parquet(tmp_path / "x.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(
        tmp_path / "splits")
    (tmp_path / "x.json").write_text(json.dumps(pairs(*texts), indent=1))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in pairs(*texts)))
    expected = load(pairs(*texts))[0].to_dict()
    for source in ("x.csv", "x.parquet", "saved", "splits", "x.json", "lines.json"):
        assert load(source)[0].to_dict() == expected, source
    assert list(load("splits@test")[0]["prompt"]) == ["c"]
    assert load("splits@train")[0].to_dict() == expected
    with pytest.raises(UserError, match='no split "dev"; it has train, test'):
        load("splits@dev")
    datasets.Dataset.from_list([{"prompt": "a", "response": 1}]).save_to_disk(tmp_path / "bad")
    with pytest.raises(UserError, match='bad row 0: "response" must be text, not int'):
        load("bad")


def test_folder_of_files(load, tmp_path, capsys):
    (tmp_path / "set" / "test").mkdir(parents=True)
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test/part.jsonl", "trainer.jsonl"):
        (tmp_path / "set" / name).write_text(json.dumps(pairs((name, "x"))[0]))
    assert list(load("set")[0]["prompt"]) == ["train-00000.jsonl", "train-00001.jsonl"]
    assert list(load("set")[0]["row_id"]) == [0, 1]
    assert "set: reads 2 of 4 files, not test/part.jsonl, trainer.jsonl\n" in (
        capsys.readouterr().out)
    rows, report = load("set@test")
    assert list(rows["prompt"]) == ["test/part.jsonl"] and report["source"].endswith("set@test")
    with pytest.raises(UserError, match=r'set: no .*file of a split "dev" in this folder'):
        load("set@dev")
    for name in ("training.jsonl", "testing.jsonl", "B.JSONL"):
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / name).write_text(GOOD)
    capsys.readouterr()
    assert len(load("other")[0]) == 1
    assert "other: reads 1 of 3 files, not B.JSONL, testing.jsonl\n" in capsys.readouterr().out


def test_what_is_not_read_in_a_folder_is_named(load, tmp_path, capsys):
    """Another format, and a folder behind a link, which may lead back to its own parent."""
    (tmp_path / "set" / ".cache").mkdir(parents=True)
    for name in ("a.jsonl", "b.ndjson", ".cache/c.jsonl"):
        (tmp_path / "set" / name).write_text(GOOD)
    (tmp_path / "set" / "more").symlink_to(tmp_path / "set")
    assert len(load("set")[0]) == 1
    assert "set: reads 1 of 3 files, not b.ndjson, more\n" in capsys.readouterr().out


def test_a_split_behind_a_file_is_refused(load, tmp_path):
    """But an @ may be part of a name."""
    (tmp_path / "x.jsonl").write_text(GOOD)
    with pytest.raises(UserError, match=r"x\.jsonl@test: a file has no splits; name the file"):
        load("x.jsonl@test")
    (tmp_path / "y@test.jsonl").write_text(GOOD)
    assert len(load("y@test.jsonl")[0]) == 1
    (tmp_path / "z@test").mkdir()
    (tmp_path / "z@test" / "part.jsonl").write_text(GOOD * 2)
    assert len(load("z@test")[0]) == 2
    with pytest.raises(UserError, match=r"nowhere: no such file or folder .*:config@split"):
        load("nowhere@test")


@pytest.mark.parametrize(("source", "asked"), [
    ("some/rows", ("some/rows", None, "train")), ("some/rows@test", ("some/rows", None, "test")),
    ("some/rows:main@dev", ("some/rows", "main", "dev"))])
def test_split_of_a_hub_name(tokenizer, tmp_path, monkeypatch, source, asked):
    """The name that the hub hears has neither configuration nor split in it."""
    known, made = [], []

    def load_dataset(name, config, split):
        made.append((name, config, split))
        return datasets.Dataset.from_list(pairs((split, "x")))

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info",
                        lambda self, name, timeout: known.append(name))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows, report = tokens.load_rows(source, tokenizer, cache_dir=tmp_path)
    assert known == ["some/rows"] and made == [asked]
    assert rows[0]["prompt"] == asked[2] and report["source"] == source


def test_a_busy_hub_is_not_a_missing_one(monkeypatch, capsys):
    def busy(*_, **__):
        raise huggingface_hub.errors.HfHubHTTPError.__new__(huggingface_hub.errors.HfHubHTTPError)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", busy)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert hub_answers("model_info", "some/model", "model")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE and not capsys.readouterr().out


def test_hub_name_without_a_network(tokenizer, tmp_path, monkeypatch, capsys):
    timeouts = []

    def refuse(*_, timeout, **__):
        timeouts.append(timeout)
        raise ConnectionError("no network")
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    for module, name in ((huggingface_hub.constants, "HF_HUB_OFFLINE"),
                         (datasets.config, "HF_HUB_OFFLINE"),
                         (datasets.config, "HF_DATASETS_OFFLINE")):
        monkeypatch.setattr(module, name, False)  # put back after the test
    start = time.time()
    with pytest.raises(UserError, match=r"nobody/nothing:main: .*hub cannot be reached") as caught:
        tokens.load_rows("nobody/nothing:main", tokenizer, cache_dir=tmp_path)
    assert time.time() - start < 5 and "\n" not in str(caught.value) and timeouts == [3]
    assert capsys.readouterr().out.count("note: the hub cannot be reached") == 1

    # A data set that an earlier start downloaded still loads: made here in the hub cache's layout.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    made = datasets.load_dataset("json", data_files=str(tmp_path / "x.jsonl"), split="train",
                                 cache_dir=str(tmp_path / "hub"))
    revision = tmp_path / "hub" / "some___cached" / "default" / "0.0.0" / "abc123"
    shutil.copytree(Path(made.cache_files[0]["filename"]).parent, revision)
    (revision / "json-train.arrow").rename(revision / "cached-train.arrow")
    info = json.loads((revision / "dataset_info.json").read_text())
    info |= {"dataset_name": "cached", "builder_name": "parquet", "config_name": "default"}
    (revision / "dataset_info.json").write_text(json.dumps(info))
    rows, report = tokens.load_rows("some/cached", tokenizer, cache_dir=tmp_path)
    assert rows[0]["response"] == "b" and report["source"] == "some/cached"


# ------------------------------------------------------------------------------ cache

def test_cache(load, tmp_path, tokenizer, monkeypatch):
    made = []
    build = tokens._build
    monkeypatch.setattr(tokens, "_build", lambda *a, **k: made.append(1) or build(*a, **k))
    rows, report = load(pairs(("a", "b"), ("c", "d")))
    assert rows.cache_files, "memory-mapped, not in memory"
    again, second = load("source.jsonl", name="other")
    assert len(made) == 1 and second["name"] == "other"
    assert again.to_dict() == rows.to_dict() and second["tokens"] == report["tokens"]
    changes = [{"template": "Q: {prompt}\nA: {response}"}, {"max_length": 100}, {"turns": "all"},
               {"limit": 1}, {"limit": 1, "seed": 1},
               {"tok": make_tokenizer(bos=True)}, {"tok": make_tokenizer(chat=CHATML)},
               {"tok": make_tokenizer(eos_token="<|im_end|>")}]
    prints = {report["fingerprint"]}
    for number, options in enumerate(changes, 2):
        prints.add(load("source.jsonl", **options)[1]["fingerprint"])
        assert len(made) == number == len(prints), options
    rows, _ = load(pairs(("a", "b"), ("c", "e")))  # the file itself
    assert rows[1]["response"] == "e" and len(made) == len(changes) + 2
    tokenizer(["a"], truncation=True, max_length=3, padding=True)  # leaves state in the backend
    assert load("source.jsonl")[0].to_dict() == rows.to_dict() and len(made) == len(changes) + 2


def test_damaged_cache_is_made_again(load, tmp_path):
    rows, report = load(pairs(("a", "b")))
    expected = rows.to_dict()
    arrow = tmp_path / "cache" / report["fingerprint"] / "rows.arrow"
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert load("source.jsonl")[0].to_dict() == expected
    (arrow.parent / "report.json").write_text(json.dumps(report | {"rows_kept": 2}))
    assert load("source.jsonl")[1]["rows_kept"] == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [report["fingerprint"]]


# ------------------------------------------------------------------------------ row sets

def test_split_held_out_is_disjoint_by_prompt(load):
    rows, _ = load(pairs(*[(f"p {n // 3}" if n % 2 else f"p  {n // 3} ", f"r{n}")
                           for n in range(90)]))
    train, held = sets.split_held_out(rows, 20, seed=0)
    assert 18 <= len(held) <= 20 and len(train) + len(held) == 90
    assert not set(train["prompt_hash"]) & set(held["prompt_hash"])
    assert sets.prompt_overlap(train, held) == []
    assert sorted([*train["row_id"], *held["row_id"]]) == list(range(90))
    assert list(held["row_id"]) == sorted(held["row_id"]) != list(range(len(held)))
    same, other = sets.split_held_out(rows, 20, 0)[1], sets.split_held_out(rows, 20, 1)[1]
    assert list(same["row_id"]) == list(held["row_id"]) != list(other["row_id"])
    for count in (0, -1, 90, 200):
        with pytest.raises(UserError, match="cannot hold out"):
            sets.split_held_out(rows, count, 0)


def test_prompt_overlap(load, tmp_path):
    a = load(pairs(("one", "x"), ("two  words", "x"), ("three", "x")))[0]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.jsonl").write_text(json.dumps({"question": "two words", "response": "y"}))
    assert sets.prompt_overlap(a, load("b")[0]) == [1]
    for name, word in (("composed", "caf\u00e9"), ("decomposed", "cafe\u0301")):  # one text
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": word, "response": name}))
    one, two = (load(f"{name}.jsonl")[0] for name in ("composed", "decomposed"))
    assert sets.prompt_overlap(one, two) == [0] and one["hash"][0] != two["hash"][0]


@pytest.fixture
def hashed():
    """hashed(count, name): rows of as many questions, an end token each."""
    return lambda count, name: datasets.Dataset.from_dict({
        "row_id": range(count), "prompt_hash": [f"{name} {n}" for n in range(count)],
        "input_ids": [[1]] * count})


@pytest.mark.parametrize(("trusted", "held_out"), [(5, 1), (40, 4), (6000, 500)])
def test_a_tenth_is_held_out_and_the_seed_is_the_runs(monkeypatch, tmp_path, hashed, trusted,
                                                      held_out):
    asked, held = [], []
    monkeypatch.setattr(sets, "load_rows", lambda count, tokenizer, *, name, seed, limit, **_: (
        asked.append((name, seed, limit)) or hashed(count, name), {}))
    for seed in (3, 3, 4):
        levels = sets.load_levels(SimpleNamespace(
            toy=False, lower=3, upper=trusted, upper_heldout=None, lower_heldout=2, lower_limit=7,
            lower_columns=None, upper_columns=None, template=None, turns="last", max_length=9,
            upper_loss="sft", cache_dir=tmp_path, allow_overlap=False, seed=seed), None, 9)
        held.append(levels.upper_heldout["row_id"][:])
        assert len(held[-1]) == held_out and len(levels.upper) == trusted - held_out
    assert held[0] == held[1] != held[2]
    assert asked[-3:] == [("lower", 4, 7), ("upper", 4, None), ("lower_heldout", 4, None)]


@pytest.mark.parametrize("level", ["lower", "upper"])
@pytest.mark.parametrize("held_out", ["upper_heldout", "lower_heldout"])
def test_held_out_questions_train_on_no_level(hashed, level, held_out):
    levels = {name: hashed(2, name) for name in ("lower", "upper", "upper_heldout",
                                                 "lower_heldout")}
    sets.check_overlap(levels, False)
    levels[held_out] = levels[level]
    with pytest.raises(UserError, match=f"2 {level} rows have .* held out in {held_out}"):
        sets.check_overlap(levels, False)
    sets.check_overlap(levels, True)


def test_permutation():
    order = batches.permutation(50, 3, 1, 0)
    assert sorted(order.tolist()) == list(range(50)) and order.dtype == torch.int64
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    assert torch.equal(order, batches.permutation(50, 3, 1, 0))
    assert torch.equal(state, torch.random.get_rng_state())
    for other in ((4, 1, 0), (3, 2, 0), (3, 1, 1), (31, 0, 0), (3, 10, 0)):
        assert not torch.equal(order, batches.permutation(50, *other)), other


def test_check_lengths(load):
    rows, _ = load(pairs(("a", "b"), ("a", ""), ("a", "long " * 30), ("a", "c")))
    lengths = sets.row_lengths(rows)
    assert lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert sets.row_lengths(rows.select([2, 0])).tolist() == lengths[[2, 0]].tolist()
    sets.check_lengths(rows, int(lengths.max()), "lower")
    with pytest.raises(UserError, match=r"lower: 1 rows .*first: row_id 2\); pass --max-length"):
        sets.check_lengths(rows, int(lengths.max()) - 1, "lower")


def test_check_vocabulary(load):
    """Ids count from zero."""
    rows, _ = load(pairs(("a", "b")))
    config, largest = SimpleNamespace(), max(rows[0]["input_ids"])
    config.get_text_config = lambda: SimpleNamespace(vocab_size=size)
    size = largest + 1
    sets.check_vocabulary({"lower": rows}, config)
    size = largest
    with pytest.raises(UserError, match=f"lower: .* token {largest}, .* has {largest} tokens"):
        sets.check_vocabulary({"lower": rows}, config)


# ------------------------------------------------------------------------------ batches

def test_pack_by_hand():
    batch = batches.pack([{"input_ids": [5, 6, 7, 1], "trained": [0, 0, 1, 1]},
                          {"input_ids": [8, 9], "trained": [1, 1]},
                          {"input_ids": [3, 4, 2], "trained": [0, 1, 0]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 8, 9, 3, 4, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    assert batch["cu_seqlens"].tolist() == [0, 4, 6, 9]
    assert batch["targets"].tolist() == [6, 7, 1, 0, 9, 0, 4, 2, 0]
    assert batch["response_mask"].tolist() == [False, True, True, False, True, False, True, False,
                                               False]
    assert batch["cu_seqlens"].dtype == torch.int32 and batch["targets"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool


def test_pack_of_loaded_rows_scores_exactly_the_trained_tokens(load):
    rows, _ = load([{"messages": CHAT}, *[{"messages": CHAT[:2]}] * 2], turns="all")
    batch = batches.pack([rows[number] for number in range(3)])
    expected = [token for row in rows for token in trained(row)]
    assert batch["targets"][batch["response_mask"]].tolist() == expected


# ------------------------------------------------------------------------------ real text

def shared(path):
    if not (SHARED / path).exists():
        pytest.skip(f"needs the development data {path}, which is not part of the project")
    return SHARED / path


@pytest.mark.parametrize("model", ["instruct-6m", "stories260K-hf", "gpt-neox-pythia-tokenizer"])
def test_real_text(tmp_path, model):
    tok = AutoTokenizer.from_pretrained(shared(f"models/{model}"))
    source = shared("data/mini_redorca.jsonl")
    rows, report = tokens.load_rows(source, tok, max_length=256, limit=1500, cache_dir=tmp_path)
    assert report["rows_kept"] + sum(map(len, report["dropped"].values())) == 1500
    bos = tok("a")["input_ids"][0] == tok.bos_token_id
    lines = source.read_text().split("\n")
    assert all(json.loads(lines[row_id])["output"].replace("<|endoftext|>", "").strip() == ""
               for row_id in report["dropped"]["empty_response"])
    for row in rows.select(range(0, len(rows), 10)):
        original = json.loads(lines[row["row_id"]])
        assert row["prompt"] == original["instruction"]
        assert original["output"].startswith(row["response"])
        assert not row["response"].rstrip().endswith("<|endoftext|>")
        controls = [token for token in row["input_ids"][bos:] if token in (
            tok.eos_token_id, tok.bos_token_id)]
        assert len(controls) == row["complete"], "one EOS when complete, none when cut"
        text = tok.decode(trained(row), skip_special_tokens=True)
        if row["complete"] and "<unk>" not in tok.decode(trained(row)):
            assert text.strip() == row["response"].strip() or model != "instruct-6m"


@pytest.mark.parametrize(("file", "layout"), [
    ("alpaca_planted", "alpaca"), ("hh_harmless_pairs", "chosen/rejected dialogues")])
def test_real_layouts(tmp_path, file, layout):
    tok = AutoTokenizer.from_pretrained(shared("models/stories260K-hf"))
    rows, report = tokens.load_rows(shared(f"data/{file}.jsonl"), tok, limit=300, max_length=512,
                                    cache_dir=tmp_path)
    assert report["layout"] == layout and report["rows_kept"] > 200
    assert ("bad" in rows.column_names) == (file == "alpaca_planted")
