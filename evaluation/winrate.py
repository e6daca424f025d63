"""Win rate against a reference: responses, pairwise judgements, and the figures made of them.

    python eval.py winrate generate RUN|MODEL --prompts prompts.jsonl --out outputs.json [--base]
    python eval.py winrate judge outputs.json --reference base.json --out annotations.json \
        --url https://api.openai.com/v1 --judge gpt-4o-mini
    python eval.py winrate rate annotations.json

Files are AlpacaEval's. Outputs: a list of {instruction, output, generator, dataset}. Annotations:
{instruction, output_1, generator_1, output_2, generator_2, preference, annotator}, where 1 is the
reference and 2 the model, and preference lies in [1, 2]: 1 the reference is better, 2 the model is,
1.5 a tie. json and jsonl are read. The paper's reference is the untuned model (`generate --base`).

 1. Every pair is judged in both orders and the two preferences are averaged: judges favour a
    position. A judge that contradicts itself has said "tie".
 2. Answers are cached next to the annotations the moment they arrive, keyed by everything that was
    sent; nothing is paid for twice, after a kill either. What failed is not cached: the next call
    asks for it again, and the win rate says how many pairs are missing.
The length-controlled rate is that of the package `alpaca_eval`, which reads the annotations.
"""

import contextlib
import json
import math
import statistics
import tempfile
from pathlib import Path

import batches
import curate
import models
import utils
from data import tokens
from evaluation import judge
from evaluation.losses import load_trained
from evaluation.runs import (
    called,
    check_entry,
    check_output,
    is_number,
    json_value,
    read_text,
    whole_texts,
)
from evaluation.texts import one_line, show_table
from generate import generate
from utils import UserError

# --- files ----------------------------------------------------------------------------------------

TEXTS = ("instruction", "prompt", "input", "output", "output_1", "output_2", "generator",
         "generator_1", "generator_2", "dataset")


def read_list(path, needed):
    """Rows of a json list or a jsonl file, each with the `needed` keys: text, and a preference."""
    text = read_text(path)
    parts = [(path, text)] if text.lstrip()[:1] == "[" else [
        (f"{path} line {n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = []
    for place, part in parts:
        value = json_value(place, part, nan=True)  # a missing preference may be NaN
        rows += value if isinstance(value, list) else [value]
    for number, row in enumerate(rows, 1):
        check_row(f"{path} row {number}", row, needed)
    if not rows:
        raise UserError(f"{path}: holds no rows")
    return [whole_texts(row) for row in rows]


def check_row(place, row, needed):
    """`UserError` unless `row` has the needed keys, and every known key its type."""
    check_entry(place, row, {})
    for key in needed:
        if key not in row:
            raise UserError(f"{place}: no {key!r}; needed: {', '.join(needed)}")
    for key, value in row.items():
        if key == "preference" and not (value is None or value != value or (is_number(value) and (
                value == 0 or 1 <= value <= 2))):
            what = "null or a number from 1 to 2"
        elif key in TEXTS and not isinstance(value, str) and (key in needed or value is not None):
            what = "text"
        else:
            continue
        raise UserError(f"{place}: {key!r} must be {what}, not {called(value)}; correct or "
                        "remove the row")


def read_prompts(path):
    """Prompts of a file with instruction (AlpacaEval's, Alpaca's with its input) or prompt."""
    rows = read_list(path, ())
    key = "instruction" if "instruction" in rows[0] else "prompt"
    rows = read_list(path, (key,))
    return [f"{row[key]}\n{row['input']}" if row.get("input") else row[key] for row in rows]


def write_list(path, rows):
    utils.write_atomic(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


# --- responses ------------------------------------------------------------------------------------

def respond(model, tokenizer, prompts, *, max_new_tokens=512, template=None, temperature=0.0,
            seed=0):
    """Texts answered to `prompts`, each prompt rendered exactly as in training. Greedy by default.

    A prompt without text has no answer (""). One that leaves no room for the answer is refused.
    """
    rows = [{"prompt": p, "response": "."} for p in prompts]
    context = models.context_length(model.config)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "prompts.jsonl"
        utils.write_jsonl(source, rows)
        tokenised, _ = tokens.load_rows(str(source), tokenizer, name="prompts", template=template,
                                         max_length=2**31, cache_dir=folder)
        encoded = {row["row_id"]: batches.prompt_of(row) for row in tokenised}
        ends = curate.end_tokens(tokenised, tokenizer)
    longest = max(encoded, key=lambda i: len(encoded[i]))
    if len(encoded[longest]) + max_new_tokens > context:
        raise UserError(f"row {longest + 1} of the prompts: its {len(encoded[longest])} tokens and "
                        f"--max-new-tokens {max_new_tokens} exceed the model's context of "
                        f"{context}; lower --max-new-tokens or shorten the prompt")
    written = generate(model, list(encoded.values()), [f"{seed} {i}" for i in encoded],
                       max_new_tokens=max_new_tokens, temperature=temperature, end_ids=ends,
                       label="answers")
    texts = {i: tokens.response_text(tokenizer, ids, template)
             for i, (ids, _) in zip(encoded, written, strict=True)}
    return [texts.get(i, "") for i in range(len(prompts))]


def generate_outputs(args):
    """AlpacaEval's outputs file for a run or a model."""
    prompts = read_prompts(args.prompts)
    sets = [row.get("dataset") or "" for row in read_list(args.prompts, ())]
    model, tokenizer, run = load_trained(args.model, args.device)
    template = args.template or (getattr(run.args, "template", None) if run else None)
    untuned = args.base and run is not None
    with model.disable_adapter() if untuned else contextlib.nullcontext():
        texts = respond(model, tokenizer, prompts, max_new_tokens=args.max_new_tokens,
                        template=template, temperature=args.temperature, seed=args.seed)
    name = args.name or (f"{run.name} (base)" if untuned else run.name if run else args.model)
    write_list(args.out, [{"instruction": p, "output": t, "generator": name, "dataset": d}
                          for p, t, d in zip(prompts, texts, sets, strict=True)])
    print(f"{len(texts)} answers of {one_line(name)}, {sum(map(len, texts)) / len(texts):.0f} "
          f"characters on average, {sum(not t for t in texts)} empty: {args.out}")


# --- figures --------------------------------------------------------------------------------------

def win_rate(preferences):
    """AlpacaEval's figures from preferences in [1, 2] (None is missing, 0 an old-style tie).

    win_rate = 100 mean(p - 1), standard_error = 100 sd / sqrt(n); discrete: wins plus half the
    draws, in per cent.
    """
    known = [1.5 if p == 0 else float(p) for p in preferences if p is not None and p == p]
    if not known or not all(1 <= p <= 2 for p in known):
        raise UserError("preferences must lie in [1, 2], and there must be at least one")
    n = len(known)
    wins, draws = sum(p > 1.5 for p in known), sum(p == 1.5 for p in known)
    return {"win_rate": 100 * (statistics.fmean(known) - 1),
            "standard_error": 100 * statistics.stdev(known) / math.sqrt(n) if n > 1 else None,
            "n_wins": wins, "n_wins_base": n - wins - draws, "n_draws": draws, "n_total": n,
            "discrete_win_rate": 100 * (wins + draws / 2) / n,
            "n_missing": len(preferences) - n}


def rate(args):
    """Win rates of every model in a file of annotations or preferences, as a table."""
    rows = read_list(args.annotations, ("generator_2", "preference"))
    models, cells, results = {}, [], {}
    for row in rows:
        reference = row.get("generator_1") or "reference"
        models.setdefault((row["generator_2"], reference), []).append(row)
    names = [model for model, _ in models]
    for (model, reference), own in models.items():
        figures = win_rate([row["preference"] for row in own])
        results[model if names.count(model) == 1 else f"{model} against {reference}"] = figures
        cells.append([model, reference, *(figures[k] for k in (
            "win_rate", "standard_error", "discrete_win_rate", "n_wins", "n_draws", "n_wins_base",
            "n_total", "n_missing"))])
    show_table(["model", "against", "win rate", "std. error", "discrete", "wins", "draws", "losses",
                "n", "missing"], cells)
    print("RESULT " + json.dumps(results))


# --- judging --------------------------------------------------------------------------------------

def pairs_of(outputs, reference):
    """Annotations without preference, of instructions that both have, in the outputs' order.

    An instruction that stands in both files twice is judged twice, first with first. What has no
    partner, and what is doubled, is said by number.
    """
    theirs, pairs, alone = {}, [], []
    for number, row in enumerate(reference, 1):
        theirs.setdefault(row["instruction"], []).append((number, row))
    for number, row in enumerate(outputs, 1):
        if not theirs.get(row["instruction"]):
            alone.append(number)
            continue
        _, other = theirs[row["instruction"]].pop(0)
        pairs.append({
            "instruction": row["instruction"], "output_1": other["output"],
            "generator_1": other.get("generator") or "reference", "output_2": row["output"],
            "generator_2": row.get("generator") or "model",
            "dataset": row.get("dataset") or "",
            "preference": None})
    if not pairs:
        raise UserError("the outputs and the reference have no instruction in common")
    left = sorted(number for rows in theirs.values() for number, _ in rows)
    say_rows("outputs have no answer in the reference and are not judged", alone, outputs)
    say_rows("answers of the reference have no output and are not used", left, reference)
    for name, rows in (("outputs", outputs), ("reference", reference)):
        seen = set()
        say_rows(f"rows of the {name} repeat an instruction", [
            number for number, row in enumerate(rows, 1)
            if row["instruction"] in seen or seen.add(row["instruction"])], rows)
    return pairs


def say_rows(what, numbers, rows):
    """A warning that names rows of a file by number, counted from one; none for no rows."""
    if numbers:
        print(f"warning: {len(numbers)} of {len(rows)} {what}: rows "
              + ", ".join(map(str, numbers[:20])) + (" ..." if len(numbers) > 20 else ""))


def judge_outputs(args):
    """Judge outputs against a reference; writes annotations, prints an estimate and a summary."""
    outputs = read_list(args.outputs, ("instruction", "output"))
    pairs = pairs_of(outputs, read_list(args.reference, ("instruction", "output")))
    name = args.local or args.judge
    if bool(args.local) == bool(args.url and args.judge):
        raise UserError("judge: give --url and --judge for an endpoint, or --local MODEL")
    if not args.local:
        judge.check_url(args.url)
    cache = judge.Cache(args.cache or f"{args.out}.cache.jsonl")
    print(judge.estimate(pairs, cache, name, args.price_in, args.price_out), flush=True)
    if args.estimate:
        return
    if args.local:
        judged = judge.LocalJudge(args.local, args.device)
    else:
        judged = judge.Endpoint(args.url, args.judge, judge.read_key(args.key_variable),
                                args.timeout, args.retries, args.wait)
    counts = judge.judge_pairs(pairs, judged, cache, 1 if args.local else args.parallel)
    write_list(args.out, pairs)
    done = sum(pair["preference"] is not None for pair in pairs)
    line = (f"judged {done} of {len(pairs)} pairs: {counts['asked']} asked, {counts['cached']} "
            f"from the cache, {counts['equal']} equal, {counts['failed']} failed")
    if counts["failed"]:
        line += f" ({one_line(counts['problem'], 120)}); the same command asks for these again"
    if done:
        figures = win_rate([pair["preference"] for pair in pairs])
        error = figures["standard_error"]
        line += f"; win rate {figures['win_rate']:.2f}" + (f" ± {error:.2f}" if error else "")
    print(f"{line}: {args.out}")


# --- the command line -----------------------------------------------------------------------------

def add_commands(parser):
    """generate, judge and rate as subcommands of `parser`."""
    commands = parser.add_subparsers(dest="winrate_command", required=True)
    made = commands.add_parser("generate", help="answers of a run or model, AlpacaEval's format")
    add = made.add_argument
    add("model", metavar="RUN|MODEL")
    add("--prompts", required=True, help="json or jsonl with instruction (or prompt)")
    add("--out", required=True)
    add("--base", action="store_true", help="the run's base model: the paper's reference")
    add("--name", help="generator's name in the file")
    add("--max-new-tokens", type=int, default=512)
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--template", help="plain template (default: the run's)")
    add("--seed", type=int, default=0)
    add("--device", default="auto")
    made.set_defaults(call=generate_outputs)

    made = commands.add_parser("judge", help="judge outputs against a reference, both orders")
    add = made.add_argument
    add("outputs")
    add("--reference", required=True, help="outputs of the model to compare with")
    add("--out", required=True, help="annotations file")
    add("--url", help="address of an OpenAI-compatible endpoint, up to /v1")
    add("--judge", help="the judge's name at that endpoint")
    add("--local", help="a local model as judge instead")
    add("--key-variable", default="OPENAI_API_KEY", help="environment variable with the key")
    add("--cache", help="verdicts on disk (OUT.cache.jsonl)")
    add("--parallel", type=int, default=4, help="questions at a time")
    add("--timeout", type=float, default=60.0, help="seconds for a whole reply")
    add("--retries", type=int, default=5)
    add("--wait", type=float, default=1.0, help="seconds before the first retry, then doubled")
    add("--price-in", type=float, default=0.0, help="per million tokens, for the estimate")
    add("--price-out", type=float, default=0.0)
    add("--estimate", action="store_true", help="print the estimate and stop")
    add("--device", default="auto")
    made.set_defaults(call=judge_outputs)

    made = commands.add_parser("rate", help="win rates from annotations or preferences")
    made.add_argument("annotations")
    made.set_defaults(call=rate)


def run_winrate(args):
    """`python eval.py winrate`: one of the three commands, after checks of single values."""
    for name in ("retries", "parallel", "max_new_tokens"):
        if getattr(args, name, 1) < (name != "retries"):
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: is too small")
    for name in ("price_in", "price_out"):
        if not 0 <= getattr(args, name, 0.0) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: 0 or more, finite")
    if not 0 <= getattr(args, "temperature", 0.0) < math.inf:
        raise UserError(f"--temperature {args.temperature}: 0 is greedy, else a finite number "
                        "above it")
    read = ("model", "prompts", "outputs", "reference")
    inputs = [getattr(args, name) for name in read if hasattr(args, name)]
    for name in ("out", "cache"):
        if getattr(args, name, None):
            check_output(getattr(args, name), *inputs)
            inputs.append(getattr(args, name))
    args.call(args)
