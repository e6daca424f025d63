"""The four sets of rows of a run, checked against each other; pairs; parts of a set.

Tokenised rows (data/tokens.py): lower (noisy), upper (trusted), and held-out ones of each kind.
"""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import pyarrow.compute
import torch

from batches import TOKEN_COLUMNS, each_row, permutation
from data.tokens import load_rows
from runtime.processes import first_goes_first
from toy import corpus
from utils import UserError, content_hash


def load_levels(args, tokenizer, context_length):
    """Lower, upper and held-out rows, checked against each other.

    args: those of options.add_data_arguments, with `toy` and `seed`. Returns a namespace: lower,
    upper (None for sft without one), upper_heldout, lower_heldout (None without a source): data
    sets of tokenised rows; reports: {name: report of tokens.load_rows}.
    """
    try:
        Path(args.cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache-dir {args.cache_dir}: the folder cannot be made "
                        f"({error.strerror})") from None
    with first_goes_first():
        sources = {name: getattr(args, name) for name in (
            "lower", "upper", "upper_heldout", "lower_heldout")}
        levels, reports = dict.fromkeys(sources), {}
        for name, source in sources.items():
            if source is None:
                continue
            level = name.split("_")[0]  # held-out rows are read the way their level is
            pairs = level == "upper" and args.upper_loss == "dpo"
            levels[name], reports[name] = (load_pairs if pairs else load_rows)(
                source, tokenizer, name=name, max_length=args.max_length, turns=args.turns,
                columns=getattr(args, f"{level}_columns"), template=args.template, seed=args.seed,
                limit=getattr(args, f"{name}_limit", None), cache_dir=args.cache_dir)
            check_lengths(levels[name], context_length, name)
        if levels["upper"] is not None and levels["upper_heldout"] is None:
            levels["upper"], levels["upper_heldout"] = split_held_out(
                levels["upper"], max(1, min(500, len(levels["upper"]) // 10)), args.seed)
        check_overlap(levels, True)
    return SimpleNamespace(**levels, reports=reports)


def toy_sources(args):
    """The embedded toy's four files, written into the cache; pairs as its upper level under DPO."""
    for name in ("upper_heldout", "lower_heldout"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')}: the embedded toy has its own held-out "
                            "rows; name --lower, --upper and --model, too")
    upper = "pairs" if args.upper_loss == "dpo" else "right"
    paths = corpus.write(Path(args.cache_dir) / "toy" / f"{args.seed}-{upper}", seed=args.seed,
                         upper=upper)
    return {"lower": paths["lower"], "upper": paths["upper"], "upper_heldout": paths["heldout"],
            "lower_heldout": paths["lower_heldout"]}


def check_overlap(levels, allow_overlap):
    """Report shared prompts; refuse them between training and held-out rows."""
    present = {name: rows for name, rows in levels.items() if rows is not None}
    if "upper" in present:
        shared = prompt_overlap(present["lower"], present["upper"])
        print(f"prompts of lower rows that upper rows have too: {len(shared)}")
    for train in ("lower", "upper"):
        for held_out in ("upper_heldout", "lower_heldout"):
            if train not in present or held_out not in present:
                continue
            shared = prompt_overlap(present[train], present[held_out])
            if shared and not allow_overlap:
                raise UserError(f"{len(shared)} {train} rows have prompts that are held out in "
                                f"{held_out} (first row_id {shared[0]}): their losses would "
                                "flatter the run; remove them or pass --allow-overlap")
            if shared:
                print(f"warning: {len(shared)} {train} rows share prompts with {held_out}")


def load_pairs(source, tokenizer, **options):
    """Preference pairs: `load_rows` of the chosen side, with the rejected side's token columns.

    A pair needs both sides, of one question; one whose sides are equal says nothing. The others
    are dropped: the report gains "unpaired", "two questions" and "equal", lists of row_ids.
    """
    import datasets

    chosen, report = load_rows(source, tokenizer, side="chosen", **options)
    rejected, other_report = load_rows(source, tokenizer, side="rejected", **options)
    if report["layout"] not in ("prompt/chosen/rejected", "chosen/rejected dialogues"):
        raise UserError(f"{source}: preference pairs need chosen and rejected columns; this is "
                        f"the {report['layout']} layout")
    own, other = ({row_id: (place, asked, {content_hash(answer), content_hash(str(tokens))})
                   for place, (row_id, asked, answer, tokens) in enumerate(each_row(
                       rows, "row_id", "prompt_hash", "response", "input_ids"))}
                  for rows in (chosen, rejected))
    dropped = {"unpaired": [], "two questions": [], "equal": []}
    for row_id, (_, asked, answer) in own.items():
        if row_id not in other:
            dropped["unpaired"].append(row_id)
        elif other[row_id][1] != asked:
            dropped["two questions"].append(row_id)
        elif other[row_id][2] & answer:  # as texts, or as what --max-length leaves of them
            dropped["equal"].append(row_id)
    keep = sorted(own.keys() - {row_id for left in dropped.values() for row_id in left})
    if not keep:
        raise UserError(f"{source}: no pair with two different responses is left")
    rejected = rejected.select([other[row_id][0] for row_id in keep]).select_columns(
        ["input_ids", "trained"]).rename_columns(
        {"input_ids": "rejected_input_ids", "trained": "rejected_trained"})
    chosen = chosen.select([own[row_id][0] for row_id in keep])
    return datasets.concatenate_datasets([chosen, rejected], axis=1), report | {
        "layout": "pairs", "truncated": report["truncated"] + other_report["truncated"],
        "dropped": report["dropped"] | dropped}


def split_held_out(rows, count, seed):
    """(train, held_out): `count` rows that training never sees, fewer where prompts repeat. Rows
    of one prompt stay together, so no prompt is on both sides."""
    groups = {}
    for position, (prompt,) in enumerate(each_row(rows, "prompt_hash")):
        groups.setdefault(prompt, []).append(position)
    groups, held = list(groups.values()), []
    for group in (groups[number] for number in permutation(len(groups), seed, 0, 2).tolist()):
        if len(held) + len(group) <= count:
            held += group
    if not held or len(held) == len(rows):
        raise UserError(f"cannot hold out {count} of {len(rows)} rows ({len(groups)} different "
                        "prompts) and still have rows on both sides; choose another number or "
                        "pass a separate held-out source")
    chosen = set(held)
    return (rows.select([p for p in range(len(rows)) if p not in chosen]),
            rows.select(sorted(held)))


def first_places(prompts):
    """{prompt: place of its first row}; of a few thousand trusted rows."""
    return {prompt: place for place, prompt in reversed([*enumerate(prompts)])}


def prompt_overlap(a, b):
    """The row_ids of `a` whose prompt, up to whitespace, also occurs in `b`. In Arrow's own memory:
    ten million rows as Python objects would take a gigabyte and minutes."""
    def parts(rows, columns):
        return rows.select_columns(columns).with_format("arrow").iter(batch_size=500_000)

    other = pyarrow.chunked_array([chunk for part in parts(b, ["prompt_hash"])
                                   for chunk in part["prompt_hash"].chunks], pyarrow.string())
    return [row_id for part in parts(a, ["row_id", "prompt_hash"]) for row_id in part.filter(
        pyarrow.compute.is_in(part["prompt_hash"], value_set=other))["row_id"].to_pylist()]


def left_out(report):
    """How many rows were dropped and why, how many answers cut, which columns ignored, in words."""
    dropped = {why: len(ids) for why, ids in report.get("dropped", {}).items() if ids}
    sided = "chosen" in (report.get("layout") or "")  # pairs, of which one side is read
    told = [f"dropped {dropped}"] * bool(dropped) + [
        "rejected answers not read (--upper-loss dpo reads the upper ones)"] * sided + [
        f"{report[key]} {what}" for key, what in (
            ("truncated", "responses cut"), ("bad", "labelled bad"),
            ("unlabelled", "without a label count as good")) if report.get(key)]
    if unread := report.get("unread"):
        more = f" and {len(unread) - 9} more" * (len(unread) > 9)
        told.append("not read: " + ", ".join(unread[:9]) + more)
    return "".join(f", {part}" for part in told)


def sequence_lengths(rows):
    """Tokens of every sequence, (1, n) int64, of pairs (2, n); no token list becomes Python's."""
    names = [name for name in rows.column_names if name.endswith("input_ids")]
    parts = [torch.zeros(len(names), 0, dtype=torch.int64)]
    for table in rows.select_columns(names).with_format("arrow").iter(batch_size=10_000):
        counts = [pyarrow.compute.list_value_length(table[name]).to_numpy() for name in names]
        parts.append(torch.stack([torch.from_numpy(c.astype("int64")) for c in counts]))
    return torch.cat(parts, dim=1)


def row_lengths(rows):
    """Tokens of every row, (n,) int64; of a pair those of both sides."""
    return sequence_lengths(rows).sum(dim=0)


def check_lengths(rows, context_length, name):
    """`UserError` when a row, or either side of a pair, is longer than the model's context."""
    lengths = sequence_lengths(rows).amax(dim=0)
    if too_long := (lengths > context_length).nonzero().flatten().tolist():
        raise UserError(
            f"{name}: {len(too_long)} rows are longer than the model's context of {context_length} "
            f"tokens (longest: {int(lengths.max())}; first: row_id {rows[too_long[0]]['row_id']}); "
            f"pass --max-length {context_length} or less")


def check_vocabulary(levels, config):
    """`UserError` when a row of {name: rows} holds a token that the model has no embedding for."""
    size = config.get_text_config().vocab_size
    for name, rows in levels.items():
        for part in rows.with_format("arrow").iter(batch_size=10_000):
            largest = max(pyarrow.compute.max(pyarrow.compute.list_flatten(part[column])).as_py()
                          for column in part.column_names if column.endswith("input_ids"))
            if largest >= size:
                raise UserError(f"{name}: the tokenizer writes token {largest}, the model's "
                                f"vocabulary has {size} tokens; they do not belong together")


def rows_hash(rows):
    """16 hex digits over ids, texts and tokens: a file written again unchanged is the same data."""
    digest = hashlib.sha256()
    for part in rows.with_format("arrow").iter(batch_size=10_000):
        for column in ("row_id", "hash", *TOKEN_COLUMNS):
            if column not in part.column_names:
                continue
            values = part[column].combine_chunks()
            if column in TOKEN_COLUMNS:
                digest.update(pyarrow.compute.list_value_length(values).to_numpy().tobytes())
                values = values.flatten()
            digest.update("".join(values.to_pylist()).encode() if column == "hash"
                          else values.to_numpy().tobytes())
    return digest.hexdigest()[:16]
