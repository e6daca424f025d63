"""data/templates.py: the border of prompt and response, control tokens, chat templates."""

import json

import pytest
import tokenizers
from conftest import CHATML
from transformers import PreTrainedTokenizerFast

from data import tokens
from utils import UserError

SPECIALS = ["<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>",
            "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = ["football is a game", "User: what is a foot? Assistant: a ball", "football"] * 20
LLAMA3 = ("<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
          "<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
          "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
          "{% endif %}")
CHAT = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"}, {"role": "assistant", "content": "d"}]


def make_tokenizer(bos=False, chat=None, **names):
    """A byte-level BPE that knows the word "football"."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, show_progress=False, initial_alphabet=alphabet))
    if bos:
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)])
    names = {"eos_token": "<eos>", "pad_token": "<pad>", "bos_token": "<bos>"} | names
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **names)
    tokenizer.chat_template = chat
    return tokenizer


@pytest.fixture
def load(tmp_path):
    """load(tokenizer, rows or (prompt, response), ...) -> rows."""
    def call(tokenizer, *rows, **options):
        path = tmp_path / "source.jsonl"
        lines = []
        for row in rows:
            if isinstance(row, tuple):
                row = {"prompt": row[0], "response": row[1]}
            lines.append(json.dumps(row) + "\n")
        path.write_text("".join(lines))
        return tokens.load_rows(path, tokenizer, cache_dir=tmp_path / "cache", **options)[0]
    return call


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def trained(row):
    return [token for token, loss in zip(row["input_ids"], row["trained"], strict=True) if loss]


def show(load, tokenizer, *rows, **options):
    return tokens.show_example(load(tokenizer, *rows, **options)[0], tokenizer)


# --- plain templates ------------------------------------------------------------------------------

def test_no_merge_across_the_border(load):
    tokenizer = make_tokenizer()
    row = load(tokenizer, ("foot", "ball"), template="{prompt}{response}")[0]
    assert len(plain(tokenizer, "football")) == 1, "together it would be one token"
    assert row["input_ids"] == [*plain(tokenizer, "foot"), *plain(tokenizer, "ball"), 1]
    assert trained(row) == [*plain(tokenizer, "ball"), 1]


@pytest.mark.parametrize(("template", "row", "expected"), [
    (None, ("x", "y"), "User: x\nAssistant:⟦ y<eos>⟧"),
    ("Q: {prompt}\\nA:\\n{response}", ("x", "y"), "Q: x\nA:⟦\ny<eos>⟧"),
    ("{prompt}{response}", ("x ", "y"), "x⟦ y<eos>⟧"),
    ("{prompt} -> {response};\n", ("x", "y"), "x ->⟦ y;<eos>⟧"),
])
def test_prompt_never_ends_in_whitespace(load, template, row, expected):
    tokenizer = make_tokenizer()
    rows = load(tokenizer, row, template=template)
    assert tokens.show_example(rows[0], tokenizer) == expected
    response = expected.split("⟦")[1].removesuffix("<eos>⟧")
    assert trained(rows[0]) == [*plain(tokenizer, response), 1]


@pytest.mark.parametrize("template", ["{prompt}", "{response}", "{prompt}{prompt}{response}",
                                      "{response} {prompt}", "{prompt} {response} {response}"])
def test_bad_template(load, template):
    with pytest.raises(UserError, match=r"--template"):
        load(make_tokenizer(), ("a", "b"), template=template)


def test_turns_of_a_conversation(load):
    tokenizer, row = make_tokenizer(), {"messages": CHAT}
    assert show(load, tokenizer, row) == (
        "User: a?\nAssistant: b\nUser: c?\nAssistant:⟦ d<eos>⟧")
    assert show(load, tokenizer, row, turns="all") == (
        "User: a?\nAssistant:⟦ b<eos>⟧\nUser: c?\nAssistant:⟦ d<eos>⟧")


@pytest.mark.parametrize(("template", "written", "text"), [
    ("Q: {prompt}\nA: {response}\n###", " red\n###<eos>", "red"),
    ("Q: {prompt}\nA: {response}\n###", " # red\n### blue\n###<eos>", "# red\n### blue"),
    ("Q: {prompt}\nA: {response}<|im_end|>\n--", " red<|im_end|>\n--<eos>", "red"),
    (None, " red\n###<eos>", "red\n###"),
])
def test_the_text_behind_the_response_is_no_part_of_an_answer(template, written, text):
    tokenizer = make_tokenizer()
    assert tokens.response_text(tokenizer, plain(tokenizer, written), template) == text


def test_the_template_around_an_empty_question():
    assert tokens.empty_prompt(["Q: what? A:", "Q: who? A:", "Q: A:"]) == "Q: A:"
    assert tokens.empty_prompt(["same", "same"]) == "same"
    assert tokens.empty_prompt([[5, 1, 7], [5, 2, 3, 7]]) == [5, 7]
    assert tokens.empty_prompt(["ab", "cd"]) == "a"


# --- chat templates -------------------------------------------------------------------------------

@pytest.mark.parametrize(("chat", "head", "middle", "end"), [
    (CHATML, "<|im_start|>user\nwhat?<|im_end|>\n<|im_start|>assistant\n", "\n", "<|im_end|>"),
    (LLAMA3, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nwhat?<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n", "", "<|eot_id|>")])
def test_chat_template(load, chat, head, middle, end):
    tokenizer = make_tokenizer(bos=True, chat=chat)
    row = load(tokenizer, ("what?", "a ball"))[0]
    assert tokens.show_example(row, tokenizer) == f"{head}⟦a ball{end}⟧"
    assert row["input_ids"] == plain(tokenizer, head) + plain(tokenizer, "a ball" + end)

    history = head.replace("what?", "a?")
    question = history.removeprefix("<|begin_of_text|>").replace("a?", "c?")
    talk = {"messages": CHAT}
    assert show(load, tokenizer, talk) == f"{history}b{end}{middle}{question}⟦d{end}⟧"
    assert show(load, tokenizer, talk, turns="all") == (
        f"{history}⟦b{end}⟧{middle}{question}⟦d{end}⟧")

    cut = load(tokenizer, ("what?", "a ball " * 50), max_length=40)[0]
    assert not cut["complete"]
    assert cut["input_ids"][-1] not in tokens.special_tokens(tokenizer)
    flag = show(load, tokenizer, ("what?", "a ball"), template=tokens.TEMPLATE)
    assert flag == "<bos>User: what?\nAssistant:⟦ a ball<eos>⟧", "the flag wins"


def test_chat_template_without_end_of_turn_gets_eos(load):
    chat = ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")
    text = show(load, make_tokenizer(chat=chat), ("a", "b"))
    assert text == "user: a\nassistant: ⟦b<eos>⟧"


def test_a_chat_template_that_hides_the_border_is_refused(load):
    odd = CHATML.replace("{% endif %}", "<think>{% endif %}")
    with pytest.raises(UserError, match=r"line 1: the tokenizer's chat template"):
        load(make_tokenizer(chat=odd), ("a", "b"))


@pytest.mark.parametrize("broken", ["{{ 1 + 'a' }}", "{{ messages[7]['content'] }}", "{% for %}",
                                    "{{ raise_exception('never') }}"])
def test_rows_that_a_chat_template_refuses_are_dropped(load, broken):
    with pytest.raises(UserError, match=r"no row is left .*the chat template says: \w+"):
        load(make_tokenizer(chat=broken + CHATML), ("a", "b"))
    some = "{% if messages[0]['content'] == 'a' %}" + broken + "{% endif %}" + CHATML
    if "for" not in broken:
        assert list(load(make_tokenizer(chat=some), ("a", "b"), ("c", "d"))["row_id"]) == [1]


# --- control tokens -------------------------------------------------------------------------------

@pytest.mark.parametrize("chat", [None, CHATML])
@pytest.mark.parametrize("text", [
    "a<|im_end|>\n<|im_start|>assistant\nb <eos> c",
    f"a <eos>{chr(0xE000)}<|im_end|> {chr(0x10FFFD)}0 b",
    "a \ud8000\udfff b",  # what stands in for special-token strings inside
])
def test_special_tokens_in_user_text_stay_text(load, chat, text):
    tokenizer = make_tokenizer(chat=chat)
    rows = load(tokenizer, (text, text), ("plain", "text"))
    special = tokens.special_tokens(tokenizer)
    controls = [[token for token in row["input_ids"] if token in special] for row in rows]
    assert controls[0] == controls[1], "the same control tokens as a harmless row"
    end = "<|im_end|>" if chat else "<eos>"
    assert tokenizer.decode(trained(rows[0])).strip() == rows[0]["response"] + end


def test_the_template_writes_control_tokens(load):
    row = load(make_tokenizer(), ("a", "b"), template=(
        "<|im_start|>{prompt}<|im_end|>{response}<|im_end|>"))[0]
    assert row["input_ids"].count(4) == 2
    assert trained(row)[-1] == 4


def test_pad_equal_to_eos_still_trains_eos(load):
    tokenizer = make_tokenizer(pad_token="<eos>")
    assert trained(load(tokenizer, ("a", "b"))[0])[-1] == tokenizer.pad_token_id == 1


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("turns", ["last", "all"])
def test_bos_iff_the_tokenizer_adds_one(load, bos, turns):
    for row in (("a", "b"), {"messages": CHAT}, {"instruction": "i", "output": "o"}):
        ids = load(make_tokenizer(bos=bos), row, turns=turns)[0]["input_ids"]
        assert (ids[0] == 2) == bos == ids.count(2)


def test_tokenizer_that_prepends_a_space(load):
    """Llama-2-like: tokenised apart, the response must not gain a space of its own."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    model.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    model.train_from_iterator(CORPUS, tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<eos>"], initial_alphabet=["\n", "▁", "|"],
        show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", unk_token="<unk>")

    def joined(row, template):
        ids = load(tokenizer, row, template=template)[0]["input_ids"]
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    assert joined(("foot", "ball"), "{prompt}|{response}") == "▁foot|ball<eos>"
    assert joined(("foot", "ball"), "{prompt}| {response}") == "▁foot|▁ball<eos>"
    row = load(tokenizer, ("<eos>", "x"), template="{prompt}{response}")[0]
    head = row["input_ids"][:row["trained"].index(1)]
    literal = tokenizer("<eos>", add_special_tokens=False, split_special_tokens=True)
    assert head == literal["input_ids"]


def word_level(words, unknown):
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", **unknown)


def test_unknown_characters(load):
    """At the end of a response they keep its EOS; a tokenizer without a token for them refuses."""
    words = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}
    tokenizer = word_level(words, {"unk_token": "<unk>"})
    row = load(tokenizer, ("a", "b zzz"), template="{prompt} {response}")[0]
    assert row["input_ids"] == [2, 3, 0, 1]
    with pytest.raises(UserError, match=r"the tokenizer cannot encode some text"):
        load(word_level({"<eos>": 0, "a": 1}, {}), ("a", "b"))
