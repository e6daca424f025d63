"""The curated rows of a finished online run, in layouts that other trainers load unchanged."""

from pathlib import Path

from data.layouts import conversation
from evaluation.runs import check_output, each_curated
from utils import UserError, write_jsonl

FORMATS = ("alpaca", "prompt-completion", "messages", "pairs")


def export(source, layout, out=None):
    """Write the rows of a curated.jsonl (or a run's) that are kept or whose answer is rewritten.

    Conversations keep their turns; prompt and completion are lists of messages, since trainers join
    two texts without a space between them. Only alpaca has no turns: a transcript instead. pairs:
    of rewritten rows the new answer, chosen, over the original one, rejected; for DPO.
    Returns one line: how many rows, and how many of them are transcripts.
    """
    source = Path(source)
    source = source / "curated.jsonl" if source.is_dir() else source
    if not source.exists():
        raise UserError(f"{source}: no such file; a finished online run has a curated.jsonl")
    out = Path(out) if out else source.with_suffix(f".{layout}.jsonl")
    check_output(out, source, source.parent)
    num_rows = num_transcripts = 0

    def chosen():
        nonlocal num_rows, num_transcripts
        for entry in each_curated(source):
            rewritten = entry.get("recommended") == "refined"
            differs = rewritten and entry["refined"] != entry["response"]
            if not (differs if layout == "pairs" else entry["kept"] or rewritten):
                continue
            response = entry["refined"] if rewritten else entry["response"]
            messages = conversation(entry, response)
            num_rows += 1
            num_transcripts += bool(entry.get("messages"))
            yield {
                "alpaca": {"instruction": entry["prompt"], "input": "", "output": response},
                "prompt-completion": {"prompt": messages[:-1], "completion": messages[-1:]},
                "pairs": {"prompt": messages[:-1], "chosen": messages[-1:],
                          "rejected": conversation(entry)[-1:]},
                "messages": {"messages": messages}}[layout]
        if not num_rows:
            raise UserError(f"{source}: " + (
                "recommends no new answer, so there are no pairs" if layout == "pairs" else
                "no row in it is kept or rewritten"))

    write_jsonl(out, chosen())
    return f"{num_rows} rows: {out}" + (
        f"; {num_transcripts} rows are conversations, and alpaca has no turns: their instruction "
        "is the transcript; --format messages keeps the turns"
        if num_transcripts and layout == "alpaca" else "")
