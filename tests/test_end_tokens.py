"""What ends an answer: EOS, and in a chat the end of the turn, which is another token."""

from types import SimpleNamespace

import datasets
import pytest
from conftest import CHATML, make_rows, make_tokenizer, write_rows

import curate
from data import tokens as data_tokens

EOS, TURN_END = 0, 3
TOKENIZER = SimpleNamespace(eos_token_id=EOS)


def row(last, complete=True):
    return {"input_ids": [7, 8, last], "trained": [0, 1, 1], "complete": complete}


@pytest.mark.parametrize(("rows", "ends"), [
    ([row(TURN_END)], {EOS, TURN_END}),
    ([row(EOS)], {EOS}),
    ([row(9, complete=False), row(TURN_END)], {EOS, TURN_END}),  # a cut row ends anywhere
    ([row(9, complete=False)], {EOS}),
    ([row(9, complete=False)] * 100 + [row(TURN_END)], {EOS, TURN_END})],  # the longest first
    ids=["chat", "plain", "after a cut row", "cut rows alone", "a hundred cut rows"])
def test_end_tokens(rows, ends):
    assert curate.end_tokens(datasets.Dataset.from_list(rows), TOKENIZER) == ends


def test_end_tokens_of_a_chat_template_and_of_a_plain_one(tmp_path):
    """Of rows as they are tokenised: the chat's <|im_end|> ends an answer, EOS always does."""
    path = write_rows(tmp_path / "rows.jsonl", make_rows(3, 1))
    for chat, names in ((CHATML, {"<eos>", "<|im_end|>"}), (None, {"<eos>"})):
        tokenizer = make_tokenizer(chat)
        rows, _ = data_tokens.load_rows(path, tokenizer, cache_dir=str(tmp_path / "cache"))
        ends = curate.end_tokens(rows, tokenizer)
        found = set(tokenizer.convert_ids_to_tokens(sorted(ends)))
        assert names <= found, found
        assert ends <= {tokenizer.eos_token_id, rows[0]["input_ids"][-1]}
