"""What the command line refuses."""

import pytest

from benchmarks.__main__ import main


@pytest.mark.parametrize(("words", "message"), [
    (["step", "--lower", "rows.jsonl"], "--lower, --upper and --model belong together"),
    (["generate", "--model", "tiny", "--lower", "rows.jsonl"], "--lower: tiny has random weights"),
    (["step", "--rounds", "0"], "--rounds 0: must be 1 or more"),
    (["selector", "--sizes", "0"], "must be 1 or more"),
    (["selector", "--sizes", "5", "--json", "nowhere/x.json"], "no such folder"),
    (["table2", "--model", "gpt2"], "table2 knows pythia-1b, llama3-8b, tiny")])
def test_bad_flags(refused, words, message):
    assert message in refused(lambda: main(words))
