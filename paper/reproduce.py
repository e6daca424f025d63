"""The paper's tables and the questions around them, one command each.

    python reproduce.py demo                      # what `make demo` runs: one seed of the toy
    python reproduce.py table1 [--scale toy]      # quality: losses of every method
    python reproduce.py table3                    # safety, guided by trusted rows
    python reproduce.py table3-dpo                # safety, guided by preference pairs
    python reproduce.py ranking                   # figure: what the top 10 % are, by epoch
    python reproduce.py qa                        # zero-shot questions to the runs of table1
    python reproduce.py winrate                   # their answers against the base model's
    python reproduce.py examples                  # their answers side by side
    python reproduce.py readme                    # the stored results into README.md
    python reproduce.py table1 --scale paper --list      # only print the training commands

Scales: `toy` needs nothing; `small` is a small model on real text, `--data` names which; `paper`
holds the published models, data and settings. Every run is a plain command of a training script
(runs.py); those of `paper` need a GPU. The runtime table is bench.py's. The paper's QA results are
pictures without values in its source, so there is nothing to print beside ours.

Budgets. All methods read the same number of lower-level tokens. random, LESS and DSIR train on
their kept rows alone, until they have read as many as mixing has; the others read as many rows of
the upper level besides.
"""

import argparse
import json
import os
import re
import shlex
import time
from pathlib import Path

import toy
import utils
from eval import read_result, table
from paper.running import (
    cell,
    line_figure,
    mean_std,
    prefer_unmasked,
    run_all,
    save_results,
    slug,
    verdict,
)
from utils import UserError

# --- what is run ----------------------------------------------------------------------------------

# Arguments of all commands, of training, of online training, and of ranking without training.
SCALES = {
    # The toy is over in 225 steps, so K_gen is smaller than the paper's 500; answers are short.
    "toy": {"data": "", "train": "", "online": "--k-gen 25 --max-new-tokens 16", "select": ""},
    "small": {"data": "--model HuggingFaceTB/SmolLM2-135M --lower tatsu-lab/alpaca --lower-limit "
                      "2000 --upper openorca --upper-limit 1000 --max-length 512",
              "train": "--lr 1e-3 --correction 0", "online": "--k-gen 25 --max-new-tokens 48",
              "select": "--lora-rank 16 --lora-alpha 16"},
    "paper": {"data": "--model meta-llama/Meta-Llama-3-8B-Instruct --lower alpaca-cleaned "
                      "--lower-limit 56000 --upper openorca",
              "train": "--preset llama3-8b-quality", "online": "", "select": ""},
}
SAFETY = {  # what the safety tables change
    "table3": {"toy": {"data": "--toy-noise 0.2 --toy-contrary 1"},  # a fifth is red there too
               "paper": {"data": "--model meta-llama/Meta-Llama-3-8B-Instruct --lower redorca "
                                 "--lower-limit 56000 --upper blueorca",
                         "train": "--preset llama3-8b-safety"}},
    "table3-dpo": {"toy": {"data": "--toy-noise 0.2 --toy-contrary 1 --upper-loss dpo"},
                   "paper": {"data": "--model meta-llama/Meta-Llama-3-8B-Instruct --lower redorca "
                                     "--lower-limit 56000 --upper rm-hh-rlhf --upper-loss dpo",
                             "train": "--preset llama3-8b-safety"}},
}
OFF, ON = "train_offline.py", "train_online.py"
DYNAMIC = f"{ON} --mask dynamic --ratio-masked 0.1"
METHODS = {
    "mixing rho=1": f"{OFF} --method mix --rho 1",
    "mixing rho=0.5": f"{OFF} --method mix --rho 0.5",
    "mixing, rho schedule": f"{OFF} --omega-lr 0",
    "random": "random",
    "LESS": "less",
    "DSIR": "dsir",
    "BDS": OFF,
    "online R=5% G=1": f"{ON} --ratio-masked 0.05",
    "online R=10% G=1": f"{ON} --ratio-masked 0.1",
    "online R=10% G=5": f"{ON} --ratio-masked 0.1 --num-answers 5",
    "online R=20% G=1": f"{ON} --ratio-masked 0.2",
    "online dynamic": DYNAMIC,
    "control: drop": f"{ON} --ratio-masked 0.1 --masked drop",
    "control: dynamic, drop": f"{DYNAMIC} --masked drop",
    "control: original": f"{ON} --ratio-masked 0.1 --masked original",
}
# In short runs the dynamic mask is drawn from centred weights after 25 steps: else every row that
# was read sinks, and the bottom R are the rows read last.
SHORT_DYNAMIC = " --first-refresh 25 --center"
REFERENCE = "mixing rho=1"  # reads the tokens that runs on kept rows get
DEMO = ("mixing rho=0.5", "BDS", "online R=10% G=1", "online dynamic", "control: drop")
SAFETY_METHODS = ("mixing rho=0.5", "mixing rho=1", "random", "LESS", "DSIR", "BDS",
                  "online R=5% G=1", "online R=10% G=1", "online dynamic", "control: drop",
                  "control: dynamic, drop")

# Upper and lower evaluation loss, mean over 4 runs (Tables 1 and 3 of the paper).
PUBLISHED = {
    "table1": {"mixing rho=1": ("1.56 / 1.62", "0.92 / 0.908"),
               "mixing rho=0.5": ("1.41 / 1.58", "0.84 / 0.908"),
               "random": ("1.55 / 1.61", "0.94 / 0.901"), "LESS": ("1.54 / 1.49", "0.88 / 0.892"),
               "DSIR": ("1.52 / 1.57", "0.92 / 0.896"), "BDS": ("1.38 / 1.54", "0.80 / 0.893"),
               "online R=5% G=1": ("1.37 / 1.46", "0.80 / 0.887"),
               "online R=10% G=1": ("1.34 / 1.41", "0.78 / 0.857"),
               "online R=10% G=5": ("1.32 / 1.37", "0.76 / 0.835")},
    "table3": {"mixing rho=0.5": ("0.88 / 1.31",), "mixing rho=1": ("0.94 / 1.27",),
               "random": ("0.92 / 1.25",), "LESS": ("0.92 / 1.28",), "DSIR": ("0.91 / 1.24",),
               "BDS": ("0.85 / 1.25",), "online R=5% G=1": ("0.84 / 1.22",),
               "online R=10% G=1": ("0.83 / 1.20",), "online dynamic": ("0.82 / 1.02",)},
    "table3-dpo": {"mixing rho=0.5": ("0.58 / 1.77",), "mixing rho=1": ("0.71 / 2.07",),
                   "random": ("0.74 / 1.63",), "LESS": ("0.64 / 1.75",),
                   "DSIR": ("0.82 / 1.67",), "BDS": ("0.53 / 1.72",),
                   "online R=5% G=1": ("0.49 / 1.58",), "online R=10% G=1": ("0.47 / 1.45",),
                   "online dynamic": ("0.43 / 1.37",)},
}
PUBLISHED_NAMES = {"table1": ("Pythia-1b", "Llama-8b"), "table3": ("Llama-8b",),
                   "table3-dpo": ("Llama-8b",)}
# (what the paper says, the method that should be lower, than which, in what)
UPPER, LOWER = "upper_heldout", "lower_heldout"
CLAIMS = {
    "table1": [
        ("BDS is better than mixing at rho = 1", "BDS", "mixing rho=1", UPPER),
        ("BDS is better than mixing at rho = 0.5", "BDS", "mixing rho=0.5", UPPER),
        ("BDS is better than random selection", "BDS", "random", UPPER),
        ("BDS is better than LESS", "BDS", "LESS", UPPER),
        ("BDS is better than DSIR", "BDS", "DSIR", UPPER),
        ("online is better than offline", "online R=10% G=1", "BDS", UPPER),
        ("online is better than offline on clean lower rows", "online R=10% G=1", "BDS", LOWER),
        ("R = 10 % is better than 5 %", "online R=10% G=1", "online R=5% G=1", UPPER),
        ("R = 20 % is worse than 10 % (\"unstable\")", "online R=10% G=1", "online R=20% G=1",
         UPPER),
        ("G = 5 is better than G = 1", "online R=10% G=5", "online R=10% G=1", UPPER),
        ("(control) online is better than dropping the rows", "online R=10% G=1", "control: drop",
         UPPER)],
    "table3": [
        ("BDS is better than mixing at rho = 0.5", "BDS", "mixing rho=0.5", UPPER),
        ("online is better than offline", "online R=10% G=1", "BDS", UPPER),
        ("the dynamic mask is better than the static one", "online dynamic", "online R=10% G=1",
         UPPER),
        ("the dynamic mask is better than the static one on clean lower rows", "online dynamic",
         "online R=10% G=1", LOWER),
        ("(control) online is better than dropping the rows", "online R=10% G=1", "control: drop",
         UPPER),
        ("(control) dynamic is better than dropping its rows", "online dynamic",
         "control: dynamic, drop", UPPER)],
}
CLAIMS["table3-dpo"] = CLAIMS["table3"]

# Of the README's list of claims: the table, where its figures are stored for the toy and for text.
GLANCE = (("Table 1", "toy_table1", "planted_table1"), ("Table 3", "toy_table3", "redorca_table3"),
          ("Table 3, pairs", "toy_table3_dpo", None), ("ranking", "toy_ranking", "planted_ranking"),
          ("curated set", "toy_curated", "planted_default_curated"))

LOSSES = {"upper_heldout": "held-out upper", "upper_exact": "exact answers",
          "upper_accuracy": "pairs right", "lower_original": "lower, originals",
          "lower_heldout": "lower, clean", "lower_kept": "lower, kept"}
RANKS = {f"{name}/{key}": f"{name}, {key.removeprefix('auroc/')}"
         for name in ("weight", "final", "base", "length")
         for key in ("auroc/contrary", "auroc/plain")}


# --- plans ----------------------------------------------------------------------------------------

def setting(args, target="table1"):
    """Arguments of the scale, with the safety tables' and the command line's in place of them."""
    scale = SCALES[args.scale] | SAFETY.get(target, {}).get(args.scale, {})
    given = {name: getattr(args, name) for name in scale if getattr(args, name) is not None}
    if target in SAFETY and args.scale == "small" and "data" not in given:
        raise UserError(f"{target} --scale small: name the rows, such as --data '--model NAME "
                        "--lower redorca --lower-limit 2000 --upper blueorca'")
    return scale | given


def chosen(args, names):
    """Those of the names that --only gives, separated by '; '; all of them without it."""
    if args.only is None:
        return list(names)
    wanted = args.only.split("; ")
    if unknown := [name for name in wanted if name not in names]:
        raise UserError(f"--only: nothing here has the name {unknown[0]!r}; there are "
                        + "; ".join(names))
    return [name for name in names if name in wanted]


def words_of(*texts):
    """The words of the texts, as a shell splits them."""
    words = []
    for text in texts:
        try:
            words += shlex.split(text)
        except ValueError as error:
            raise UserError(f"{text}: not words of a command line ({error})") from None
    return words


def execute(args, methods, folder, scale=None, also_score=()):
    """Run {method: command} over the seeds. Returns {method: [result file or ranking, ...]}.

    A command that is no script but a name of baselines.py ranks the rows and trains on those kept,
    on as many tokens as REFERENCE, which is run for that if it is not among the methods;
    also_score: methods of baselines.py whose ranking alone is wanted.
    """
    scale = {name: words_of(text) for name, text in (scale or setting(args)).items()}
    training, first, second, found = [*scale["data"], *scale["train"]], {}, {}, {}
    needed = dict(methods)
    if not all(command.split()[0].endswith(".py") for command in methods.values()):
        needed.setdefault(REFERENCE, METHODS[REFERENCE])
    for method, command in [*needed.items(), *((name, None) for name in also_score)]:
        script, *flags = words_of(command or method.lower())
        short = words_of(SHORT_DYNAMIC) if args.scale != "paper" and (command or "").startswith(
            DYNAMIC) else []
        for seed in range(args.seeds):
            out = folder / slug(method) / f"seed-{seed}"
            file, tail = out / "result.json", ["--seed", str(seed), "--out"]
            if script.endswith(".py"):
                online = scale["online"] if script == ON else []
                first[file] = shlex.join(  # the method's own flags last, so that they win
                    [script, *short, *training, *online, *flags, *tail, str(out)])
            else:
                kept = out.with_name(f"seed-{seed}.kept.jsonl")
                first[kept] = shlex.join(["baselines.py", script, *scale["data"], *scale["select"],
                                          *tail, str(kept)])
                if command is None:
                    file = kept
                else:
                    second[file] = folder / slug(REFERENCE) / f"seed-{seed}", shlex.join(
                        [OFF, "--method", "sft", "--keep", str(kept), *training, *tail, str(out)])
            found.setdefault(method, []).append(file)
    found = {method: found[method] for method in (*methods, *also_score)}
    if args.scale == "paper":
        print_needs(args, training, needed)
    if args.list:
        print("\n".join(f"python {command}" for command in first.values()))
        for reference, command in second.values():
            budget = budget_of(reference) if (reference / "result.json").exists() else "TOKENS"
            print(f"python {command} --token-budget {budget}")
        return found
    if args.scale == "paper":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--scale paper: no GPU here; --list prints the commands for another "
                            "machine")
    run_all(first, args.workers)
    run_all({file: f"{command} --token-budget {budget_of(reference)}"
             for file, (reference, command) in second.items()}, args.workers)
    return found


def print_needs(args, training, methods):
    """What the published setting asks of a machine, as comment lines: GPU memory, hours, disk.

    Memory and disk are the training scripts' own arithmetic at the published shapes and the longest
    rows that the settings admit; the hours are the paper's.
    """
    from transformers import AutoConfig

    from bench import PUBLISHED_HOURS, PUBLISHED_ROWS, SHAPES
    from common import memory_and_disk
    from train_offline import parse_args as training_args

    settings = training_args(training)
    shape = (settings.preset or "").rpartition("-")[0]
    if shape not in PUBLISHED_ROWS:
        print("# needs: not known without a preset; --dry-run of each command prints them")
        return
    settings.dtype = "bfloat16"  # what a GPU takes
    kind, options = SHAPES[shape]
    needs = memory_and_disk(settings, AutoConfig.for_model(kind, **options), settings.max_length,
                            settings.lower_limit)
    column, hours, unknown = list(PUBLISHED_ROWS).index(shape), 0.0, []
    for method in methods:
        name = "mixing" if method.startswith("mixing rho=") else method
        if name in PUBLISHED_HOURS:
            hours += args.seeds * PUBLISHED_HOURS[name][column]
        else:
            unknown.append(method)
    print(f"# needs, {shape}: GPU memory of at most {needs.memory / 2**30:.0f} GiB "
          f"({needs.parts}), and what generation keeps")
    print(f"# needs: {hours:.0f} hours on the paper's H100 (its runtime table, {args.seeds} seeds; "
          "not measured here)" + (f", and those of {', '.join(unknown)}, which it does not give"
                                  if unknown else ""))
    print(f"# needs: disk for the model ({2 * needs.base / 1e9:.0f} GB), the data sets, and "
          f"{needs.disk / 2**20:.0f} MiB for each of {args.seeds * len(methods)} runs")


def budget_of(folder):
    """Lower-level tokens that a run of a training script reads."""
    epochs = json.loads((folder / "config.json").read_text())["args"]["epochs"]
    return epochs * read_result(folder)["lower_tokens"]


def results_of(found):
    """{method: [result, ...]} of the result files of `execute`."""
    return {method: [prefer_unmasked(read_result(file.parent)) for file in files]
            for method, files in found.items() if files[0].name == "result.json"}


def summarise(results, columns):
    """{method: [result, ...]} -> rows of a table, one column a key of {key: heading}."""
    return [[method, *(cell([run.get(key) for run in runs]) for key in columns)]
            for method, runs in results.items()]


def with_base(results):
    """The base model's own figures in front."""
    first = next(iter(results.values()))
    return {"base model": [{key.removeprefix("base/"): value for key, value in run.items()
                            if key.startswith("base/") and "auroc" not in key}
                           for run in first]} | results


def present(columns, results):
    """The columns that some result has."""
    return {key: heading for key, heading in columns.items()
            if any(run.get(key) is not None for runs in results.values() for run in runs)}


def store(args, results, columns, **more):
    """Save results/NAME_TARGET.json with the command that makes it and the README's columns."""
    given = [word for name, value in vars(args).items()
             if name in ("data", "train", "online", "select", "keep_fraction", "only", "qa",
                         "prompts", "judge", "tokens")
             and value not in (None, args.defaults(name))
             for word in (f"--{name.replace('_', '-')}", str(value))]
    if args.name != args.scale:
        given += ["--name", args.name]
    save_results(Path("results") / f"{args.name}_{args.target.replace('-', '_')}.json",
                 shlex.join(["python", args.script, args.target, "--scale", args.scale,
                             "--seeds", str(args.seeds), *given]),
                 results, columns=columns, **more)


def claims_of(claims, results):
    """[[claim, verdict, figures], ...] for the claims whose two methods were run."""
    return [[text, *verdict([run[key] for run in results[lower]],
                            [run[key] for run in results[than]])]
            for text, lower, than, key in claims
            if {lower, than} <= set(results) and all(
                run.get(key) is not None for run in results[lower] + results[than])]


# --- the paper's tables ---------------------------------------------------------------------------

def losses_table(args):
    """Table 1 or 3: every method over the seeds, the published figures beside, each claim."""
    folder, target = Path("runs") / args.name, args.target
    wanted = chosen(args, SAFETY_METHODS if target in SAFETY else METHODS)
    found = execute(args, {name: METHODS[name] for name in wanted},
                    folder / target if target in SAFETY else folder, scale=setting(args, target))
    if args.list:
        return
    results = with_base(results_of(found))
    found_bad = ({"weight/auroc/contrary": "AUROC contrary"} if args.scale == "toy" else
                 {"weight/auroc": "AUROC of bad rows"})  # plain faults of the toy are easy
    columns, names = present(LOSSES | found_bad, results), PUBLISHED_NAMES[target]
    published = {"heading": [f"published, {name}" for name in names]} | PUBLISHED[target]
    rows = [row + list(published.get(row[0], ("-",) * len(names)))
            for row in summarise(results, columns)]
    print("\nlosses in nats a token, mean ± std over seeds; the last columns are the paper's upper "
          "/ lower losses")
    print(table(["method", *columns.values(), *published["heading"]], rows))
    orders = orders_of(results, PUBLISHED[target], names)
    print("\nfrom best to worst by upper loss:")
    print("\n".join(f"  {name}: {', '.join(order)}" for name, order in orders.items()))
    claims = claims_of(CLAIMS[target], results)
    if claims:
        print("\n" + table(["claim", "here", "difference in loss"], claims))
    if args.scale == "toy" and target == "table1":
        print_ranks(results)
    store(args, results, columns, published=published, claims=claims, orders=orders)


def print_ranks(results):
    print("\nwhich rows are bad: AUROC by kind of fault. `weight` is omega, `final` the loss under "
          "the final\nmodel, `base` the base model's own loss, `length` the answer's length")
    print(table(["method", *RANKS.values()], summarise(results, RANKS)))


def orders_of(results, published, names):
    """Methods from best to worst by upper loss: here, and in each published column."""
    common = [method for method in published if method in results]
    here = sorted(common, key=lambda m: mean_std([run["upper_heldout"] for run in results[m]])[0])
    orders = {"here": here}
    for column, name in enumerate(names):
        orders[name] = sorted(common, key=lambda m: float(published[m][column].split(" / ")[0]))
    return orders


def ranking(args):
    """The figure of the top 10 % questions: mean response length by epoch, BDS and online."""
    import compare

    wanted = chosen(args, ("BDS", "online R=10% G=1", "online dynamic"))
    found = execute(args, {name: METHODS[name] for name in wanted}, Path("runs") / args.name)
    if args.list:
        return
    results, curves = {}, {}
    for method, files in found.items():
        rows = [compare.ranking_over_epochs(compare.Run(file.parent)) for file in files]
        results[method] = [{f"epoch {row['epoch']}": row["top_length"]
                            for row in seed if row["group"] != "masked"} for seed in rows]
        curves[method] = [[row["top_length"] for row in seed if row["group"] != "masked"]
                          for seed in rows]
    columns = sorted({key for runs in results.values() for run in runs for key in run})
    print("\nmean response length (tokens) of the top 10 % by weight")
    print(table(["method", *columns], summarise(results, dict.fromkeys(columns, ""))))
    claims = [[("(control) " if method == "BDS" else "") + f"{method} starts with short answers: "
               "epoch 1 below the last epoch",
               *verdict([seed[0] for seed in seeds], [seed[-1] for seed in seeds])]
              for method, seeds in curves.items()]
    print(table(["claim", "here", "difference in tokens"], claims))
    line_figure(Path("results") / f"{args.name}_ranking.png", "epoch",
                "response length of the top 10 %",
                {method: [(epoch + 1, [seed[epoch] for seed in seeds])
                          for epoch in range(len(seeds[0]))] for method, seeds in curves.items()})
    store(args, results, dict(zip(columns, columns, strict=True)), claims=claims)


def qa(args):
    """Zero-shot accuracy of table1's runs through lm-evaluation-harness."""
    if args.scale == "toy":
        raise UserError("qa: the toy's model knows list puzzles only; use --scale small or paper")
    found = execute(args, {name: METHODS[name] for name in chosen(args, DEMO)},
                    Path("runs") / args.name)
    runs, commands, first = {}, {}, next(iter(found.values()))[:1]
    for method, files in ({"base model": first} | found).items():
        base = method == "base model"
        for file in files:
            out = file.parent.with_name(f"qa{'base' if base else ''}-{file.parent.name}.json")
            commands[out] = shlex.join(["eval.py", "qa", str(file.parent), *words_of(args.qa or ""),
                                        "--out", str(out), *(["--base"] if base else [])])
            runs.setdefault(method, []).append(out)
    if args.list:
        print("\n".join(f"python {command}" for command in commands.values()))
        return
    run_all(commands, 1)  # the harness uses every core
    results = {method: [{task: values["acc"] for task, values in
                         json.loads(file.read_text()).items()} for file in files]
               for method, files in runs.items()}
    columns = sorted({key for rows in results.values() for row in rows for key in row})
    print(table(["zero-shot accuracy", *columns],
                summarise(results, dict.fromkeys(columns, ""))))
    store(args, results, dict(zip(columns, columns, strict=True)))


def winrate(args):
    """AlpacaEval win rate of table1's runs against the base model.

    On the toy the judge is the truth: a right answer beats a wrong one, else it is a tie.
    """
    import winrate as rates

    if args.scale != "toy" and not (args.prompts and args.judge):
        raise UserError("winrate: name --prompts FILE (AlpacaEval's instructions) and --judge "
                        "'--url https://api.openai.com/v1 --judge gpt-4-turbo'")
    folder = Path("runs") / args.name
    found = execute(args, {name: METHODS[name] for name in chosen(args, DEMO)}, folder)
    prompts = args.prompts or folder / "prompts.json"
    if not args.prompts and not args.list:
        rates.write_list(prompts, [{"instruction": row["prompt"]}
                                   for row in toy.make_rows(seed=0)["heldout"][:200]])
    made, judged, values = {}, {}, {}
    reference = next(iter(found.values()))[0].parent
    base = reference.with_name("answers-base.json")
    made[base] = [str(reference), "--base"]
    for files in found.values():
        for file in files:
            made[answers_of(file)] = [str(file.parent)]
            verdicts = answers_of(file).with_suffix(".judged.json")
            judged[verdicts] = shlex.join([
                "winrate.py", "judge", str(answers_of(file)), "--reference", str(base), "--out",
                str(verdicts), *words_of(args.judge or "")])
    made = {out: shlex.join(["winrate.py", "generate", *words, "--prompts", str(prompts), "--out",
                             str(out), "--max-new-tokens", str(args.tokens)])
            for out, words in made.items()}
    if args.list:
        print("\n".join(f"python {c}" for c in [*made.values(), *judged.values()]))
        return
    run_all(made, args.workers)
    if args.scale != "toy":
        run_all(judged, 1)
    for method, files in found.items():
        for file in files:
            if args.scale == "toy":
                preferences = [1.5 + 0.5 * (ours - theirs) for ours, theirs in zip(
                    *([toy.kind_of(row["instruction"], row["output"]) == "clean"
                       for row in rates.read_list(answers, ())]
                      for answers in (answers_of(file), base)), strict=True)]
            else:
                preferences = [row["preference"] for row in
                               rates.read_list(answers_of(file).with_suffix(".judged.json"), ())]
            values.setdefault(method, []).append({
                key: rates.win_rate(preferences)[key] for key in ("win_rate", "n_draws")})
    columns = {"win_rate": "win rate %", "n_draws": "ties"}
    print(table(["against the base model", *columns.values()], summarise(values, columns)))
    store(args, values, columns)


def answers_of(file):
    """Where a run's answers to the prompts of `winrate` lie."""
    return file.parent.with_name(f"answers-{file.parent.name}.json")


def examples(args):
    """The paper's table of examples: the base model and each method answer the same prompts."""
    wanted = chosen(args, ("mixing rho=1", "BDS", "online R=10% G=1"))
    found = execute(args, {name: METHODS[name] for name in wanted}, Path("runs") / args.name)
    shown = toy.make_rows(seed=0)["heldout"][:6]
    prompts = ["--prompts", args.prompts] if args.prompts else [
        word for row in shown for word in ("--prompt", row["prompt"])]
    out = Path("runs") / args.name / "examples.md"
    runs = [str(files[0].parent) for files in found.values()]
    command = shlex.join(["eval.py", "answers", *runs, *prompts, "--max-new-tokens",
                          str(args.tokens), "--out", str(out)])
    if args.list:
        print(f"python {command}")
        return
    run_all({out: command}, 1)
    print(out.read_text())


def demo(args):
    """One seed of the toy: mixing, BDS, online and a control; tables and where the rows are."""
    started, folder = time.time(), Path("runs") / args.name
    found = execute(args, {name: METHODS[name] for name in DEMO}, folder)
    if args.list:
        return
    results = results_of(found)
    columns = present(LOSSES, results)
    print("\nlosses (nats a token; lower is better) and exact answers (share of held-out prompts)")
    print(table(["method", *columns.values()], summarise(with_base(results), columns)))
    print_ranks(results)
    online = results["online R=10% G=1"][0]
    print(f"\nrefined answers, online: right {online['refined/repaired']:.0%} of the time where "
          "the original was wrong" + ("" if online["refined/broken"] is None else
          f", wrong {online['refined/broken']:.0%} where it was right"))
    print(f"every row weighted and ranked: {folder}/bds/seed-0/weights.jsonl\n"
          f"bad answers rewritten: {folder}/{slug('online R=10% G=1')}/seed-0/curated.jsonl")
    import compare  # matplotlib takes a second to import: only where a page is written
    import report

    print(report.write([compare.Run(files[0].parent) for files in found.values()],
                       folder / "report.html"))
    print("RESULT " + json.dumps({method: runs[0]["upper_heldout"]
                                  for method, runs in results.items()}
                                 | {"seconds": round(time.time() - started)}))


def readme(args):
    """Put the stored results between their markers in README.md."""
    path = Path("README.md")
    utils.write_atomic(path, filled(path.read_text()))
    print(f"{path}: rendered")


def filled(text):
    """The text with the stored results between its markers, <!-- begin NAME --> <!-- end NAME -->.
    """
    for name in re.findall(r"<!-- begin (\w+) -->", text):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, rest = text.split(begin)
        body = claims_at_a_glance() if name == "claims" else rendered(stored(name))
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    return text


def stored(name):
    file = Path("results") / f"{name}.json"
    if not file.exists():
        raise UserError(f"{file}: missing; the README has a place for it")
    return json.loads(file.read_text())


def claims_at_a_glance():
    """One line a claim: its verdict in the stored results, on the toy and on real text."""
    lines = ["| | claim | the toy | real text |", "|---|---|---|---|"]
    for table_name, toy_file, text_file in GLANCE:
        verdicts = [{claim: f"{word} ({figures.split(',')[0]})" for claim, word, figures in
                     (stored(name)["claims"] if name else ())} for name in (toy_file, text_file)]
        lines += [f"| {table_name} | {claim} | {verdicts[0].get(claim, '')} "
                  f"| {verdicts[1].get(claim, '')} |" for claim in dict.fromkeys(
                      [*verdicts[0], *verdicts[1]])]
    return "\n".join(lines)


def rendered(result):
    """A stored result as Markdown: its table, its claims, what it was made by."""
    published = result.get("published", {})
    headings = [*result["columns"].values(), *published.get("heading", ())]
    blank = ["-"] * len(published.get("heading", ()))
    rows = [row + list(published.get(row[0], blank))
            for row in summarise(result["results"], result["columns"])]
    lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---|" * len(headings),
             *("| " + " | ".join(row) + " |" for row in rows)]
    if result.get("claims"):
        lines += ["", "| claim | here | difference |", "|---|---|---|",
                  *("| " + " | ".join(claim) + " |" for claim in result["claims"])]
    return "\n".join([*lines, "", f"`{result['command']}`, {result['date']}, commit "
                      f"{result['commit']}, {result['hardware']}, torch {result['torch']}."])


def parse_args(argv, targets, script, description):
    """The command line of reproduce.py and experiments.py."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("target", choices=targets)
    add = parser.add_argument
    add("--scale", choices=SCALES, default="toy")
    add("--seeds", type=int, help="default: demo 1, else 4")
    add("--name", help="of the folder under runs/ and of the files under results/ (the scale)")
    add("--data", help="arguments of every command: --model, --lower, --upper ...")
    add("--train", help="arguments of both training scripts")
    add("--online", help="arguments of train_online.py")
    add("--select", help="arguments of baselines.py")
    add("--only", help="only these methods or questions, separated by '; '")
    add("--workers", type=int, help="runs at a time (default: the number of cores; paper: 1)")
    add("--list", action="store_true", help="print the commands, run nothing")
    if script == "reproduce.py":
        add("--qa", help="qa: arguments of `eval.py qa`, such as '--tasks piqa --limit 100'")
        add("--prompts", help="winrate, examples: file with instructions (toy: its own puzzles)")
        add("--judge", help="winrate: arguments of `winrate.py judge`")
        add("--tokens", type=int, default=256, help="winrate, examples: new tokens an answer")
    else:
        add("--keep-fraction", type=float, default=0.7, help="curated: k over N")
    args = parser.parse_args(argv)
    args.script, args.defaults = script, parser.get_default
    args.seeds = args.seeds if args.seeds is not None else 1 if args.target == "demo" else 4
    args.name = args.name or ("demo" if args.target == "demo" else args.scale)
    if args.only is not None and args.target in ("demo", "readme", "curated", "controls"):
        raise UserError(f"{args.target}: --only has nothing to choose from here")
    if args.workers is None:  # a GPU holds one 8B model
        args.workers = 1 if args.scale == "paper" else os.cpu_count()
    if args.workers < 1 or args.seeds < 1:
        raise UserError("--workers and --seeds must be 1 or more")
    return args


TARGETS = {"demo": demo, "table1": losses_table, "table3": losses_table,
           "table3-dpo": losses_table, "ranking": ranking, "qa": qa, "winrate": winrate,
           "examples": examples, "readme": readme}


def main(argv=None):
    args = parse_args(argv, TARGETS, "reproduce.py", "The paper's tables, one command each.")
    TARGETS[args.target](args)


if __name__ == "__main__":
    utils.run(main)
