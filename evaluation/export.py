"""The curated rows of a finished online run, in layouts that other trainers load unchanged."""

from pathlib import Path

from data.layouts import conversation
from evaluation.runs import check_output, each_curated
from runtime.command import reading
from utils import UserError, write_jsonl

FORMATS = ("alpaca", "prompt-completion", "messages", "pairs")


def exported_row(entry, layout):
    """A row of curated.jsonl in one of FORMATS; None if it does not belong into the file.

    A row belongs there if it is kept or its answer is rewritten; into pairs, if the new answer is
    recommended and differs from the original one.
    """
    rewritten = entry.get("recommended") == "refined"
    if layout == "pairs":
        if not rewritten or entry["refined"] == entry["response"]:
            return None
    elif not entry["kept"] and not rewritten:
        return None
    response = entry["refined"] if rewritten else entry["response"]
    messages = conversation(entry, response)
    if layout == "alpaca":
        return {"instruction": entry["prompt"], "input": "", "output": response}
    if layout == "messages":
        return {"messages": messages}
    if layout == "prompt-completion":
        return {"prompt": messages[:-1], "completion": messages[-1:]}
    rejected = conversation(entry)[-1:]
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": rejected}


def export(source, layout, out=None):
    """Write the rows of a curated.jsonl, or of a run's, that are kept or whose answer is rewritten.

    Conversations keep their turns. Prompt and completion are lists of messages, since trainers join
    two texts without a space between them. Only alpaca has no turns and takes a transcript. In
    pairs the new answer is chosen and the original one rejected, for DPO. Returns one line: how
    many rows were written, and how many of them are transcripts.
    """
    source = Path(source)
    if source.is_dir():
        source = source / "curated.jsonl"
    out = Path(out) if out else source.with_suffix(f".{layout}.jsonl")
    check_output(out, source, source.parent)
    rows, transcripts = [], 0
    with reading(source):
        for entry in each_curated(source):
            row = exported_row(entry, layout)
            if row is not None:
                rows.append(row)
                transcripts += bool(entry.get("messages"))
    if not rows:
        raise UserError(
            f"{source}: holds no row for --format {layout}: none is kept or rewritten "
            "(pairs: none has a recommended new answer)"
        )
    write_jsonl(out, rows)
    words = f"{len(rows)} rows: {out}"
    if transcripts and layout == "alpaca":
        words += (
            f"; {transcripts} rows are conversations, and alpaca has no turns: their "
            "instruction is the transcript; --format messages keeps the turns"
        )
    return words
