"""Is training on the rows that a ranking keeps worth it? `python -m paper kept`

A fresh model is plainly fine-tuned on all lower rows, and on the share --keep-fraction that each
ranking keeps. Every run reads as many lower-level tokens, so fewer rows are read more often. The
held-out loss is of trusted rows that nothing was trained on. One pass of the row tests a seed gives
all rankings their numbers, as `python -m baselines` has them; lengths are counted in tokens.

    random          a seeded permutation
    length-matched  random, with as many answers of each length as `joined` keeps
    tests           the least surprising rows
    loss            the lowest losses under the base model
    joined          the surprise plus -ln of the share of rows with as high a loss
    bad last        rows that look bad last, the others by loss
    labels          the rows that are known to be good

Only where --only names them:

    unflagged       all rows that do not look bad, whatever share that is
    loss, as many   that many rows of the lowest loss
    good rows       all rows that are known to be good
"""

import math
import shlex
from pathlib import Path

import torch

import batches
import models
import session
import train_offline
import utils
from baselines import scores
from benchmarks.floor import token_rates
from data import sets
from evaluation.runs import make_parent
from paper.plans import OFF, budget_of, chosen, execute, setting, training_words, words_of
from paper.recipes import build_missing
from paper.results import UPPER, store
from paper.running import run_all, slug
from paper.statistics import claims_of, measured, print_claims, results_of, summary_rows, with_base
from ranking import TRUSTED, rank_rows
from utils import UserError, table

ALL, SFT = "all rows", f"{OFF} --method sft --skip-scores"
RANKINGS = ("random", "length-matched", "tests", "loss", "joined", "bad last", "labels")
AS_MANY = ("unflagged", "loss, as many")
OF_LABELS = ("labels", "good rows")
MEASURES = {UPPER: "held-out loss", "bad_share": "bad rows", "rows": "rows", "steps": "steps",
            "upper_exact": "exact answers"}


def kept_table(args):
    """Held-out loss, share of bad rows and steps after training on what each ranking keeps."""
    if not 0 < args.keep_fraction < 1:
        raise UserError(f"--keep-fraction {args.keep_fraction}: must lie between 0 and 1")
    names = list(RANKINGS)
    if args.only:
        names = chosen(args, (*RANKINGS, *AS_MANY, "good rows"))
    if not args.list:
        build_missing(words_of(setting(args)["data"]))
        print_runs(args, names)
    files_of = execute(args, {ALL: SFT}, also_rank=("tests",))
    plan, files = {}, {ALL: files_of[ALL]}
    folder = Path("runs") / args.name / f"kept-{args.keep_fraction:g}"
    for seed in range(args.seeds):
        if not args.list:
            write_kept(names, files_of["tests"][seed], args.keep_fraction, seed, folder)
        for name in names:
            file, command = training_on(args, name, seed, folder, files_of[ALL][seed])
            plan[file] = command
            files.setdefault(name, []).append(file)
    if args.list:
        print("# TOKENS and the --keep files come of the runs on all rows: `python -m paper kept` "
              "itself makes them")
        print("\n".join(f"python {command}" for command in plan.values()))
        return
    run_all(plan, args.workers)
    results = results_of(files)
    for name, runs in results.items():
        for seed, run in enumerate(runs):
            run |= what_was_read(files[name][seed], name, seed, folder, files_of["tests"][seed])
    report(args, results, MEASURES, [
        (f"{name} is better than {other}", name, other, UPPER)
        for name in ("joined", "bad last", "unflagged")
        for other in (ALL, "random", "length-matched", "tests", "loss",
                      *(("joined", "loss, as many") if name == "unflagged" else ()))])


def report(args, results, measures, claims):
    """The table of fresh models and the claims, printed and stored."""
    columns = measured(measures, results)
    print("\na fresh base fine-tuned on each set, equal tokens")
    print(table(["trained on", *columns.values()], summary_rows(with_base(results), columns)))
    claims = claims_of(claims, results)
    print_claims(claims, "loss")
    store(args, results, columns, claims=claims)


# --- rankings -------------------------------------------------------------------------------------

def kept_file(folder, name, seed):
    return folder / f"{slug(name)}-{seed}.jsonl"


def rankings_of(names, rows, share, seed):
    """{name: scores (N,), higher is better} of the rows of a ranking by tests, in its order.

    share: what is kept of `joined` for its lengths.
    """
    def column(name):
        return torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)

    surprise, loss = column("surprise"), column("loss")
    bad = torch.tensor([row["reason"] is not None for row in rows])
    joined = scores.joined_scores(loss, surprise)
    last = torch.where(bad, surprise.min() - surprise - loss.max() - 1, -loss)  # by surprise, loss
    found = {"random": scores.random_scores(len(rows), seed), "tests": column("score"),
             "loss": -loss, "joined": joined, "bad last": last}
    found["length-matched"] = scores.length_matched_scores(
        column("length"), rank_rows(joined) <= round(share * len(rows)), seed)
    found |= {"unflagged": last, "loss, as many": -loss}
    if set(OF_LABELS) & set(names):
        found |= dict.fromkeys(OF_LABELS, found["random"] - len(rows) * column("bad"))
    return found


def write_kept(names, tests, share, seed, folder):
    """The ranking file of every name, from the ranking by tests."""
    rows = sorted(utils.read_jsonl(tests), key=lambda row: row["row_id"])
    found = rankings_of(names, rows, share, seed)
    for name in names:
        file, ranks = kept_file(folder, name, seed), rank_rows(found[name]).tolist()
        count = round(share * len(rows))
        if name in AS_MANY:
            count = sum(row["reason"] is None for row in rows)
        elif name == "good rows":
            count = sum(not row["bad"] for row in rows)
        make_parent(file)
        utils.write_jsonl(file, [
            {"row_id": row["row_id"], "hash": row["hash"], "rank": rank, "kept": rank <= count}
            for row, rank in zip(rows, ranks, strict=True)])


# --- runs -----------------------------------------------------------------------------------------

def training_on(args, name, seed, folder, whole):
    """(result file, command) of a run on the rows that a ranking keeps; whole: all rows' result."""
    out = folder / slug(name) / f"seed-{seed}"
    budget = budget_of(whole.parent) if whole.exists() else "TOKENS"
    words = training_words(args, setting(args), SFT, None)
    return out / "result.json", shlex.join(
        [*words, "--keep", str(kept_file(folder, name, seed)), "--token-budget", str(budget),
         "--seed", str(seed), "--out", str(out)])


def what_was_read(file, name, seed, folder, tests):
    """{"steps", and "bad_share" of the rows that were trained on, where it is known}."""
    rows = {row["row_id"]: row for row in utils.read_jsonl(tests)}
    found = {"steps": utils.read_jsonl(file.with_name("metrics.jsonl"))[-1]["step"] + 1}
    kept = rows if name == ALL else [row["row_id"] for row in utils.read_jsonl(
        kept_file(folder, name, seed)) if row["kept"]]
    if all("bad" in row for row in rows.values()):
        found["bad_share"] = sum(rows[row_id]["bad"] for row_id in kept) / len(kept)
    return found


def print_runs(args, names):
    """Runs times minutes, from one step and one forward timed here, on the one thread of a run."""
    words, count = words_of(*(setting(args)[part] for part in ("data", "train"))), len(names)
    run = session.plan(train_offline.parse_args(["--method", "sft", *words]))
    if set(OF_LABELS) & set(names) and "bad" not in run.levels.lower.column_names:
        raise UserError("kept: the lower rows have no column `bad`, so there are no labels to rank "
                        "by: name the other rankings with --only")
    rates = measured_rates(run)
    step, forward = rates["step"], rates["forward"]
    tokens = {name: int(sets.row_lengths(rows).sum())
              for name, rows in session.row_sets(run.levels).items()}
    held_out = sum(tokens[name] for name in tokens if name.endswith("heldout"))
    looks = 1 + math.ceil(run.args.epochs / args.keep_fraction)  # at held-out rows, twice each
    each = run.args.epochs * tokens["lower"] / step + 2 * looks * held_out / forward
    trusted = tokens.get("upper", 0) * min(1, TRUSTED / max(1, len(run.upper or ())))
    tests = 2 * (tokens["lower"] + trusted) / forward
    total = args.seeds * ((1 + count) * each + tests) / args.workers
    print(f"measured here, one thread: forward {forward:.0f}, LoRA step {step:.0f} tokens/s\n"
          f"{args.seeds} seeds x {1 + count} runs x {each / 60:.1f} minutes, and the tests; "
          f"{args.workers} at a time: about {max(1, round(total / 60))} minutes", flush=True)


def measured_rates(run):
    """`token_rates` of the rows of one forward, on one thread."""
    threads, args = torch.get_num_threads(), run.args
    torch.set_num_threads(1)
    model = models.add_lora(models.load_model(args.model, run.device, args.dtype), args.lora_rank,
                            args.lora_alpha)
    rows = batches.take(run.lower, range(min(args.micro_batch, run.num_rows)))
    rates = token_rates(model, batches.pack(batches.sequences(rows), run.device))
    torch.set_num_threads(threads)
    return rates
