"""Rank rows by one of the methods; see the package's docstring."""

import argparse
import json
import math
import time
from pathlib import Path

import utils  # noqa: F401  # before torch: it quiets its waiting threads

# ruff: isort: split
import models
import options
import ranking
from baselines import scores
from baselines.dsir import dsir_scores
from baselines.less import run_less
from baselines.rds import rds_scores
from baselines.tests import score_by_tests
from data import sets, sources
from evaluation.runs import check_output
from runtime import command, processes
from toy import corpus
from utils import UserError

# ruff: isort: split
import torch

METHODS = ("random", "dsir", "less", "rds", "loss", "length", "ifd", "tests", "joined")
NEEDS_UPPER, TESTS = ("dsir", "less", "rds"), ("tests", "joined")
NEEDS_MODEL = ("less", "rds", "loss", "ifd", *TESTS)
# Flags of the training scripts that mean the same here, with their one home there: how rows are
# read, and these.
SHARED = ("model", "dtype", "four_bit", "gradient_checkpointing", "device", "micro_batch", "seed",
          "keep_fraction")
NOT_SHARED = ("dpo_beta",)
LESS_ALONE = ("micro_batch", "gradient_checkpointing")  # of SHARED, what no other method reads
# The embedded default: a tiny model on rows of a few tokens.
TOY = {"lora_rank": 8, "lora_alpha": 8, "lr": 1e-3, "batch": 8, "max_length": 128}


def add_shared_arguments(parser):
    """The flags of the training scripts that mean the same here."""
    training = argparse.ArgumentParser(add_help=False)
    options.add_arguments(training)
    shared = parser.add_argument_group("as in the training scripts (no --lower: the embedded toy)")
    for group in training._action_groups:
        for action in group._group_actions:
            if action.dest in SHARED or ((group.title or "").startswith("data")
                                         and action.dest not in NOT_SHARED):
                shared._add_action(action)
            else:  # what reads these rows for training may ask for it
                parser.set_defaults(**{action.dest: action.default})


def add_own_arguments(parser):
    """Where the ranking goes, and one group for each method that has settings."""
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--out", default="kept.jsonl", help="the ranking, one line a row")
    parser.add_argument("--preset", choices=("toy",),
                        help="the toy's model and settings, for rows that `python -m toy` wrote")
    add = parser.add_argument_group("dsir").add_argument
    add("--dsir-buckets", type=int, default=10_000, help="hash buckets of the n-grams")
    add("--dsir-min-words", type=int, default=0, help="shorter rows come last (the package: 100)")
    add("--dsir-no-noise", action="store_true", help="the k largest weights, not a sample")
    add = parser.add_argument_group("less").add_argument
    add("--warmup-fraction", type=float, default=0.05, help="share of lower rows (5 %%)")
    add("--epochs", type=int, default=4, help="of the warm-up, a checkpoint each (4)")
    add("--lr", type=float, default=2e-5, help="of the warm-up, linear, 3 %% rising (2e-5)")
    add("--batch", type=int, default=32, help="rows a warm-up step (32)")
    add("--lora-rank", type=int, default=128, help="(128)")
    add("--lora-alpha", type=int, default=512, help="(512)")
    add("--upper-groups", action="store_true",
        help="best over groups of upper rows: each value of their column kind is a group")
    add("--work", help="folder that a killed run goes on from (default: OUT.less)")
    add = parser.add_argument_group("ifd").add_argument
    add("--ifd-order", choices=("aligned", "hard"), default="aligned",
        help="low is best, or the published order: highest below 1 first")


def parse_args(argv=None):
    """Checked arguments; args.toy: no source is named, so the rows are the embedded toy's."""
    parser = argparse.ArgumentParser(
        prog="python -m baselines",
        description="Rank rows without bilevel training. LESS's published values in brackets.")
    add_shared_arguments(parser)
    add_own_arguments(parser)
    first, _ = parser.parse_known_args(argv)
    toy_run = (first.lower, first.upper, first.model) == (None,) * 3
    if toy_run or first.preset:
        parser.set_defaults(model=str(corpus.MODEL), **TOY)
    if first.method in TESTS:
        parser.set_defaults(keep_fraction=None)  # as many as do not look bad
    args = parser.parse_args(argv)
    args.toy = toy_run
    for group in parser._action_groups:
        for action in group._group_actions:
            reader = "less" if action.dest in LESS_ALONE else group.title
            if reader in METHODS and reader != args.method and (
                    getattr(args, action.dest) != parser.get_default(action.dest)):
                print(f"not read by {args.method}: {action.option_strings[0]}")
    check_args(args)
    check_out(args)
    return args


def check_args(args):
    """`UserError` for a value that no method can have, or a source that this one lacks."""
    options.check_seed(args.seed)
    options.at_least_one(args, "epochs", "batch", "micro_batch", "lora_rank", "lora_alpha",
                         "dsir_buckets", "max_length")
    for name in ("keep_fraction", "warmup_fraction"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must lie in (0, 1]")
    if not 0 < args.lr < math.inf:
        raise UserError(f"--lr {args.lr}: must be a finite number above 0")
    for name, needed in (("lower", METHODS), ("upper", NEEDS_UPPER), ("model", NEEDS_MODEL)):
        if not args.toy and getattr(args, name) is None and args.method in needed:
            raise UserError(f"--{name} is missing; {args.method} needs it (none of --lower, "
                            "--upper and --model: the embedded toy)")


def check_out(args):
    """Make --out's folder; `UserError` when it cannot be written, or is a file read or a run's."""
    out = Path(args.out)
    check_output(out, *([out.parent] if (out.parent / "config.json").exists() else []))
    for name in ("lower", "upper", "upper_heldout", "lower_heldout"):
        source = getattr(args, name)
        if not source or not out.exists() or not any(
                map(sources.path_exists, (source, source.rpartition("@")[0] or source))):
            continue
        if any(out.samefile(part) for part in sources.find_parts(source) if isinstance(part, Path)):
            raise UserError(f"--out {out}: holds the rows of --{name.replace('_', '-')}, which the "
                            "ranking would replace; give the name of another file")


def open_levels(args):
    """The rows as training reads them."""
    if args.model is None and not args.toy:  # no model is named, so no row is too long for it
        args.model, args.max_length, context = str(corpus.MODEL), 2**30, 2**31
    else:
        context = models.context_length(models.load_config(args.model))
    return sets.load_levels(args, models.load_tokenizer(args.model), context)


def score_rows(args, levels):
    """Scores of the lower rows, (N,), higher is better, and further columns of the output."""
    lower = levels.lower
    if args.method == "random":
        return scores.random_scores(len(lower), args.seed), {}
    if args.method == "length":
        return scores.length_scores(lower), {}
    if args.method == "dsir":
        values, log_weights = dsir_scores(
            lower, levels.upper, num_buckets=args.dsir_buckets, min_words=args.dsir_min_words,
            num_kept=round(args.keep_fraction * len(lower)), noise=not args.dsir_no_noise,
            seed=args.seed, folder=Path(args.out).parent)
        return values, {"log_weight": torch.from_numpy(log_weights)}
    if args.method == "less":
        return run_less(args, levels), {}
    model = models.load_model(args.model, processes.pick_device(args.device), args.dtype,
                               args.four_bit)
    if args.method == "loss":
        return scores.loss_scores(model, lower), {}
    if args.method == "rds":
        values, cosines = rds_scores(model, lower, levels.upper)
        return values, {"cosine": cosines}
    if args.method in TESTS:
        values, columns, tests = score_by_tests(model, models.load_tokenizer(args.model), levels,
                                                args.seed)
        if args.method == "joined":
            values = scores.joined_scores(tests["loss"], tests["surprise"])
        if args.keep_fraction is None:
            args.keep_fraction = (tests["reason"] < 0).double().mean().item()
        return values, columns | {"tests": tests}
    ratios = scores.ifd_ratios(model, lower)
    return scores.ifd_scores(ratios, args.ifd_order), {"ifd": ratios}


def main(argv=None):
    args = parse_args(argv)
    started = time.perf_counter()
    levels = open_levels(args)
    lower = levels.lower
    if args.keep_fraction is not None and not round(args.keep_fraction * len(lower)):
        raise UserError(f"--keep-fraction {args.keep_fraction} of {len(lower)} rows keeps none")
    for name in ("lower", *["upper"] * (args.method in (*NEEDS_UPPER, *TESTS))):
        if (rows := getattr(levels, name)) is not None:
            print(f"{args.method}: {len(rows)} {name} rows{sets.left_out(levels.reports[name])}",
                  flush=True)
    values, columns = score_rows(args, levels)
    if not torch.isfinite(values).all():
        bad = lower[int((~torch.isfinite(values)).nonzero()[0])]["row_id"]
        raise UserError(f"the {args.method} score of row_id {bad} is not finite; is the model "
                        "sound in this --dtype?")
    tests = columns.pop("tests", None)
    _, kept = ranking.write_ranking(args.out, lower, values, args.keep_fraction,
                                    {"score": values, **columns}, tests)
    labels = ranking.label_metrics(lower, {args.method: values})
    if labels:
        ranking.print_label_table(labels, {args.method: values})
    print("RESULT " + json.dumps({
        "method": args.method, "seed": args.seed, "rows": len(lower), "kept": int(kept.sum()),
        "out": str(args.out), **labels, "time/seconds": round(time.perf_counter() - started, 2)}),
        flush=True)


if __name__ == "__main__":
    command.run(main)
