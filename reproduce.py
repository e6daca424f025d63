"""The paper's tables and the questions around them, one command each.

    python reproduce.py demo                      # what `make demo` runs: one seed of the toy
    python reproduce.py table1 [--scale toy]      # quality: losses of every method
    python reproduce.py table3 / table3-dpo       # safety: trusted rows, or preference pairs
    python reproduce.py ranking                   # figure: what the top 10 % are, by epoch
    python reproduce.py qa / winrate / examples   # what the runs of table1 answer
    python reproduce.py selectors                 # known bad rows: which ranking finds them
    python reproduce.py curated                   # is the curated set worth it?
    python reproduce.py ablations / controls      # what matters, and what must come out as nothing
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
import math
import os
import re
import time
from pathlib import Path

import utils
from eval import ranking_metrics, read_result, table
from runs import (
    HERE,
    cell,
    mean_std,
    prefer_unmasked,
    run_all,
    save_results,
    seconds_of,
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
              "train": "--lr 1e-3", "online": "--k-gen 25 --max-new-tokens 48",
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
    "table3-dpo": {"toy": {"data": "--toy-noise 0.2 --toy-contrary 1",
                           "train": "--upper-loss dpo"},
                   "paper": {"data": "--model meta-llama/Meta-Llama-3-8B-Instruct --lower redorca "
                                     "--lower-limit 56000 --upper rm-hh-rlhf",
                             "train": "--preset llama3-8b-safety --upper-loss dpo"}},
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
    "control: original": f"{ON} --ratio-masked 0.1 --masked original",
}
# On the toy the dynamic mask is drawn from centred weights after 25 steps: else every row that was
# read sinks, and the bottom R are the rows read last.
TOY_DYNAMIC = " --first-refresh 25 --center"
DEMO = ("mixing rho=1", "mixing rho=0.5", "mixing, rho schedule", "BDS", "online R=10% G=1",
        "online dynamic", "control: drop")
SAFETY_METHODS = ("mixing rho=0.5", "mixing rho=1", "random", "LESS", "DSIR", "BDS",
                  "online R=5% G=1", "online R=10% G=1", "online dynamic", "control: drop")

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
        ("... on clean lower rows", "online R=10% G=1", "BDS", LOWER),
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
        ("... on clean lower rows", "online dynamic", "online R=10% G=1", LOWER),
        ("(control) dynamic is better than dropping the rows", "online dynamic", "control: drop",
         UPPER)],
}
CLAIMS["table3-dpo"] = CLAIMS["table3"]

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


def execute(args, methods, folder, extra="", scale=None, also_score=()):
    """Run {method: command} over the seeds. Returns {method: [result file or ranking, ...]}.

    A command that is no script but a name of baselines.py ranks the rows and trains on those kept;
    also_score: methods of baselines.py whose ranking alone is wanted.
    """
    scale = scale or setting(args)
    first, second, found = {}, {}, {}
    for method, command in [*methods.items(), *((name, None) for name in also_score)]:
        for seed in range(args.seeds):
            out = folder / slug(method) / f"seed-{seed}"
            file, tail = out / "result.json", f"{extra} --seed {seed}"
            if command is not None and (script := command.split()[0]).endswith(".py"):
                flags = command.removeprefix(script)  # last, so that they win
                toy = TOY_DYNAMIC if command == DYNAMIC and args.scale == "toy" else ""
                first[file] = " ".join(
                    f"{script} {scale['data']} {scale['train']} "
                    f"{scale['online'] if script == ON else ''} {flags}{toy} {tail} "
                    f"--out {out}".split())
            else:
                kept = out.with_name(f"seed-{seed}.kept.jsonl")
                first[kept] = " ".join(f"baselines.py {command or method} {scale['data']} "
                                       f"{scale['select']} {tail} --out {kept}".split())
                if command is None:
                    file = kept
                else:
                    reference = folder / slug("mixing rho=1") / f"seed-{seed}"
                    second[file] = reference, " ".join(
                        f"{OFF} --method sft --keep {kept} {scale['data']} {scale['train']} {tail} "
                        f"--out {out}".split())
            found.setdefault(method, []).append(file)
    if args.list:
        print("\n".join(f"python {command}" for command in first.values()))
        for reference, command in second.values():
            budget = budget_of(reference) if (reference / "result.json").exists() else "TOKENS"
            print(f"python {command} --token-budget {budget}")
        return found
    if args.scale == "paper":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--scale paper: needs a GPU (an 8B model in bfloat16: 16 GB and room "
                            "for activations); --list prints the commands for another machine")
    run_all(first, args.workers)
    run_all({file: f"{command} --token-budget {budget_of(reference)}"
             for file, (reference, command) in second.items()}, args.workers)
    return found


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


def store(args, target, results, **more):
    """Save results/NAME_TARGET.json with the command that makes it."""
    flags = "".join(f" --{name} {json.dumps(value)}" for name in ("data", "train", "online",
                                                                  "select")
                    if (value := getattr(args, name)) is not None)
    name = "" if args.name == args.scale else f" --name {args.name}"
    save_results(HERE / "results" / f"{args.name}_{slug(target).replace('-', '_')}.json",
                 f"python reproduce.py {target} --scale {args.scale} --seeds {args.seeds}{name}"
                 f"{flags}", results, **more)


def claims_of(claims, results):
    """[[claim, verdict, figures], ...] for the claims whose two methods were run."""
    return [[text, *verdict([run[key] for run in results[lower]],
                            [run[key] for run in results[than]])]
            for text, lower, than, key in claims
            if {lower, than} <= set(results) and all(
                run.get(key) is not None for run in results[lower] + results[than])]


# --- the paper's tables ---------------------------------------------------------------------------

def losses_table(args, target):
    """Table 1 or 3: every method over the seeds, the published figures beside, each claim."""
    methods = {name: METHODS[name] for name in SAFETY_METHODS} if target in SAFETY else METHODS
    folder = Path("runs") / args.name
    found = execute(args, methods, folder / target if target in SAFETY else folder,
                    scale=setting(args, target))
    if args.list:
        return
    results = results_of(found)
    columns = present(LOSSES, results)
    published = PUBLISHED[target]
    rows = [row + list(published.get(row[0], ("-",) * len(PUBLISHED_NAMES[target])))
            for row in summarise(with_base(results), columns)]
    print("\nlosses in nats a token, mean ± std over seeds; the last columns are the paper's upper "
          "/ lower losses")
    print(table(["method", *columns.values(), *PUBLISHED_NAMES[target]], rows))
    orders = orders_of(results, published, PUBLISHED_NAMES[target])
    print("\nfrom best to worst by upper loss:")
    print("\n".join(f"  {name}: {', '.join(order)}" for name, order in orders.items()))
    found_claims = claims_of(CLAIMS[target], results)
    print()
    print(table(["claim", "here", "difference in loss"], found_claims))
    if args.scale == "toy" and target == "table1":
        print_ranks(results)
    store(args, target, results, claims=found_claims, orders=orders)


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

    methods = {name: METHODS[name] for name in ("BDS", "online R=10% G=1", "online dynamic")}
    found = execute(args, methods, Path("runs") / args.name)
    if args.list:
        return
    results, curves = {}, {}
    for method, files in found.items():
        rows = [compare.ranking_over_epochs(compare.Run(file.parent)) for file in files]
        results[method] = [{f"epoch {row['epoch']}, {row['group']}": row["top_length"]
                            for row in seed if row["group"] != "masked"} for seed in rows]
        curves[method] = [[row["top_length"] for row in seed if row["group"] != "masked"]
                          for seed in rows]
    columns = sorted({key for runs in results.values() for run in runs for key in run})
    print("\nmean response length (tokens) of the top 10 % by weight")
    print(table(["method", *columns], summarise(results, dict.fromkeys(columns, ""))))
    claims = [[f"{method} starts with short answers: epoch 1 below the last epoch",
               *verdict([seed[0] for seed in seeds], [seed[-1] for seed in seeds])]
              for method, seeds in curves.items()]
    print(table(["claim", "here", "difference in tokens"], claims))
    line_figure(HERE / "results" / f"{args.name}_ranking.png", "epoch",
                "response length of the top 10 %",
                {method: [(epoch + 1, [seed[epoch] for seed in seeds])
                          for epoch in range(len(seeds[0]))] for method, seeds in curves.items()})
    store(args, "ranking", results, claims=claims)


def qa(args):
    """Zero-shot accuracy of table1's runs through lm-evaluation-harness."""
    if args.scale == "toy":
        raise UserError("qa: the toy's model knows list puzzles only; use --scale small or paper")
    found = execute(args, {name: METHODS[name] for name in DEMO}, Path("runs") / args.name)
    runs, commands = {}, {}
    for method, files in ({"base model": found["BDS"][:1]} | found).items():
        base = "base" if method == "base model" else ""
        for file in files:
            out = file.parent.with_name(f"qa{base}-{file.parent.name}.json")
            commands[out] = " ".join((f"eval.py qa {file.parent} {args.qa or ''} --out {out} "
                                      + ("--base" if base else "")).split())
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
    store(args, "qa", results)


def winrate(args):
    """AlpacaEval win rate of table1's runs against the base model.

    On the toy the judge is the truth: a right answer beats a wrong one, else it is a tie.
    """
    import toy
    import winrate as rates

    if args.scale != "toy" and not (args.prompts and args.judge):
        raise UserError("winrate: name --prompts FILE (AlpacaEval's instructions) and --judge "
                        "'--url https://api.openai.com/v1 --judge gpt-4-turbo'")
    folder = Path("runs") / args.name
    found = execute(args, {name: METHODS[name] for name in DEMO}, folder)
    prompts = args.prompts or folder / "prompts.json"
    if not args.prompts and not args.list:
        rates.write_list(prompts, [{"instruction": row["prompt"]}
                                   for row in toy.make_rows(seed=0)["heldout"][:200]])
    made, judged, values = {}, {}, {}
    base = folder / "winrate-base.json"
    made[base] = f"winrate.py generate {found['BDS'][0].parent} --base"
    for files in found.values():
        for file in files:
            made[answers_of(file)] = f"winrate.py generate {file.parent}"
            verdicts = answers_of(file).with_suffix(".judged.json")
            judged[verdicts] = (f"winrate.py judge {answers_of(file)} --reference {base} "
                                f"--out {verdicts} {args.judge}")
    made = {out: f"{command} --prompts {prompts} --out {out} --max-new-tokens {args.tokens}"
            for out, command in made.items()}
    if args.list:
        print("\n".join(f"python {c}" for c in [*made.values(), *judged.values()]))
        return
    run_all(made, args.workers)
    if args.scale != "toy":
        run_all(judged, 1)
    for method, files in found.items():
        for file in files:
            if args.scale == "toy":
                preferences = [
                    1.5 + 0.5 * ((toy.kind_of(ours["instruction"], ours["output"]) == "clean")
                                 - (toy.kind_of(theirs["instruction"], theirs["output"]) == "clean"))
                    for ours, theirs in zip(rates.read_list(answers_of(file), ()),
                                            rates.read_list(base, ()), strict=True)]
            else:
                preferences = [row["preference"] for row in
                               rates.read_list(answers_of(file).with_suffix(".judged.json"), ())]
            values.setdefault(method, []).append({
                key: rates.win_rate(preferences)[key] for key in ("win_rate", "n_draws")})
    columns = {"win_rate": "win rate %", "n_draws": "ties"}
    print(table(["against the base model", *columns.values()], summarise(values, columns)))
    store(args, "winrate", values)


def answers_of(file):
    """Where a run's answers to the prompts of `winrate` lie."""
    return file.parent.with_name(f"answers-{file.parent.name}.json")


def examples(args):
    """The paper's table of examples: the base model and each method answer the same prompts."""
    import toy

    found = execute(args, {name: METHODS[name] for name in
                           ("mixing rho=1", "BDS", "online R=10% G=1")}, Path("runs") / args.name)
    runs = " ".join(str(files[0].parent) for files in found.values())
    prompts = f"--prompts {args.prompts}" if args.prompts else " ".join(
        f"--prompt {json.dumps(row['prompt'])}" for row in toy.make_rows(seed=0)["heldout"][:6])
    out = Path("runs") / args.name / "examples.md"
    command = f"eval.py answers {runs} {prompts} --max-new-tokens {args.tokens} --out {out}"
    if args.list:
        print(f"python {command}")
        return
    run_all({out: command}, 1)
    print(out.read_text())


# --- known bad rows: which ranking finds them -----------------------------------------------------

BASELINES = ("random", "DSIR", "LESS", "loss", "length", "IFD")
ADAM = "--omega-optimizer adam --omega-lr 1e-4"
CORRECTED = f"{OFF} --correction 0.7"


def selectors(args):
    """AUROC, precision and recall of every selector on a lower set with known bad rows."""
    runs = {"BDS": OFF, "BDS, published rate": f"{OFF} {ADAM}", "BDS corrected": CORRECTED}
    found = execute(args, runs, Path("runs") / args.name, also_score=BASELINES)
    if args.list:
        return
    rows = {}
    for title, run, score in (("omega, published rate", "BDS, published rate", "weight"),
                              ("omega", "BDS", "weight"),
                              ("loss under the guided model", "BDS", "final"),
                              ("omega, corrected", "BDS corrected", "weight"),
                              ("corrected loss", "BDS corrected", "corrected"),
                              ("loss of the base model", "BDS", "base")):
        rows[title] = [{key.removeprefix(f"{score}/"): value
                        for key, value in read_result(file.parent).items()
                        if key.startswith(f"{score}/")} | {"seconds": seconds_of(file)}
                       for file in found[run]]
    for run in rows.pop("loss of the base model"):
        if not run:
            raise UserError("selectors: the lower rows have no column `bad`; name a file that has")
    for method in BASELINES:
        rows[method] = [ranking_scores(file) | {"seconds": seconds_of(file)}
                        for file in found[method]]
    keys = sorted({key for runs in rows.values() for run in runs for key in run} - {"seconds"},
                  key=lambda key: (key.count("/"), key))
    columns = {key: key for key in keys} | {"seconds": "seconds"}
    print("\nAUROC, precision when as many rows are flagged as are bad, recall by kind of fault")
    print(table(["selector", *columns], summarise(rows, columns)))
    claims = [[f"{name} above the base model's loss",
               *verdict([-run["auroc"] for run in rows[name]],
                        [-run["auroc"] for run in rows["loss"]])]
              for name in ("omega", "omega, corrected", "corrected loss", "LESS", "IFD")]
    print(table(["claim (AUROC)", "here", "difference, negated"], claims))
    kinds = [key for key in keys if key.startswith("auroc")]
    panels_figure(HERE / "results" / f"{args.name}_selectors.png", "AUROC",
               {key.removeprefix("auroc/").replace("auroc", "all"): {
                   name: [run[key] for run in runs] for name, runs in rows.items()}
                for key in kinds}, chance=0.5)
    store(args, "selectors", rows, claims=claims)


def ranking_scores(file):
    """Ranking metrics of a kept.jsonl against its own columns bad and kind."""
    import torch

    rows = utils.read_jsonl(file)
    return ranking_metrics(torch.tensor([row["score"] for row in rows], dtype=torch.float64),
                           torch.tensor([row["bad"] for row in rows]),
                           [row["kind"] for row in rows])


# --- is the curated set worth it? -----------------------------------------------------------------

def curated(args):
    """A fresh base on the raw set, a random k, the top k, the top k with the recommended rewrites.

    All read as many tokens as three passes over the raw set. The online run's R covers what is not
    kept, so that every dropped question may come back with a new answer.
    """
    import compare
    import toy

    scale, folder, share = setting(args), Path("runs") / args.name, args.keep_fraction
    online = f"online R={1 - share:.0%}, exported"
    found = execute(args, {"BDS": OFF, online: (
        f"{ON} --ratio-masked {1 - share:.6g} --keep-fraction {share} "
        "--export-format prompt-completion")}, folder, also_score=("random",))
    if args.list:
        return
    plan, files = {}, {}
    for seed in range(args.seeds):
        raw = other = f"{scale['data']} {scale['train']}"
        if args.scale == "toy":
            paths = toy.write(folder / "rows" / f"seed-{seed}", seed=seed)
            other = (f"--model {toy.MODEL} --upper-heldout {paths['heldout']} --lower-heldout "
                     f"{paths['lower_heldout']} --max-length 128 --lr 1e-3 --micro-batch 32")
            raw = f"{other} --lower {paths['lower']}"
        bds, refined = found["BDS"][seed].parent, found[online][seed].parent
        kept = {name: folder / "curated" / f"{name}-{seed}.jsonl"
                for name in ("random", "bds", "online")}
        for name, source in (("random", found["random"][seed]), ("bds", bds), ("online", refined)):
            compare.keep(source, share, kept[name])
        rewritten = re.sub(r"--lower(-limit|-columns|-split)? \S+", "", other)
        for name, flags in (
                ("raw set", raw), ("random k", f"{raw} --keep {kept['random']}"),
                ("top k by BDS", f"{raw} --keep {kept['bds']}"),
                ("top k by the online run", f"{raw} --keep {kept['online']}"),
                ("... with its rewrites",
                 f"{rewritten} --lower {refined / 'curated.prompt-completion.jsonl'}")):
            out = folder / "curated" / slug(name) / f"seed-{seed}"
            plan[out / "result.json"] = " ".join(
                f"{OFF} --method sft {flags} --token-budget {budget_of(bds)} --seed {seed} "
                f"--out {out}".split())
            files.setdefault(name, []).append(out / "result.json")
    run_all(plan, args.workers)
    results = results_of(files)
    for name in ("raw set", "random k", "top k by BDS", "top k by the online run"):
        for run, file in zip(results[name], files[name], strict=True):
            rows = utils.read_jsonl(file.with_name("weights.jsonl"))
            if "bad" in rows[0]:
                run["bad_share"] = sum(row["bad"] for row in rows) / len(rows)
    if args.scale == "toy":
        for run, file in zip(results["... with its rewrites"], found[online], strict=True):
            rows = utils.read_jsonl(file.with_name("curated.prompt-completion.jsonl"))
            run["bad_share"] = sum(toy.kind_of(row["prompt"], row["completion"]) != "clean"
                                   for row in rows) / len(rows)
    columns = present({"upper_heldout": "held-out upper", "upper_exact": "exact answers",
                       "lower_heldout": "lower, clean", "rows": "rows", "bad_share": "bad rows"},
                      results)
    print("\na fresh base fine-tuned on each set, equal tokens")
    print(table(["trained on", *columns.values()], summarise(with_base(results), columns)))
    claims = claims_of([
        ("the top k are better than the raw set", "top k by BDS", "raw set", UPPER),
        ("the top k are better than a random k", "top k by BDS", "random k", UPPER),
        ("rewrites add to the top k", "... with its rewrites", "top k by the online run", UPPER)],
        results)
    print(table(["claim", "here", "difference in loss"], claims))
    store(args, "curated", results, claims=claims)


# --- ablations of the toy -------------------------------------------------------------------------

ON40, ON20 = f"{ON} --ratio-masked 0.4", f"{ON} --ratio-masked 0.2 --num-answers 4"
EVEN = "--toy-noise 0.6 --toy-contrary 0.6666667"
ABLATIONS = {  # question: {label: method or (name, command)}
    "omega's optimiser": {
        "frozen": "mixing, rho schedule",
        "Adam 1e-4 (published)": ("BDS, published rate", f"{OFF} {ADAM}"),
        "Adam 5e-3 (SEAL)": ("omega Adam 5e-3",
                             f"{OFF} --omega-optimizer adam --omega-lr 5e-3"),
        "SGD 10": ("omega SGD 10", f"{OFF} --omega-lr 10"), "SGD 30": "BDS",
        "SGD 100": ("omega SGD 100", f"{OFF} --omega-lr 100")},
    "omega's loss": {
        "at theta^{k+1}": "BDS", "at theta^k": ("omega at theta^k", f"{OFF} --omega-loss current"),
        "centred": ("omega centred", f"{OFF} --center"),
        "without gamma": ("omega without gamma", f"{OFF} --no-omega-gamma"),
        "corrected": ("BDS corrected", CORRECTED)},
    "ratio (R = 20 %, G = 4)": {
        name: (f"ratio {name}", f"{ON20} --ratio {name}")
        for name in ("sequence", "token-mean", "lambda", "none")},
    "share of masked rows R": {
        "0": "BDS", "5 %": "online R=5% G=1", "10 %": "online R=10% G=1",
        "20 %": "online R=20% G=1", "40 %": ("online R=40%", ON40)},
    "K_gen (R = 40 %)": {
        "5": ("K_gen 5", f"{ON40} --k-gen 5"), "25": ("online R=40%", ON40),
        "75": ("K_gen 75", f"{ON40} --k-gen 75"), "225": ("K_gen 225", f"{ON40} --k-gen 225")},
    "first refresh (R = 40 %)": {
        "0": ("online R=40%", ON40),
        "75": ("first refresh 75", f"{ON40} --first-refresh 75"),
        "150": ("first refresh 150", f"{ON40} --first-refresh 150")},
    "masked rows (R = 40 %)": {
        "generate": ("online R=40%", ON40), "drop": ("drop R=40%", f"{ON40} --masked drop"),
        "original": "BDS"},
    "mask (R = 40 %)": {
        "static": ("online R=40%", ON40),
        "dynamic": ("dynamic R=40%", f"{ON40} --mask dynamic{TOY_DYNAMIC}"),
        "dynamic, sticky": ("sticky R=40%", f"{ON40} --mask dynamic --sticky-mask{TOY_DYNAMIC}"),
        "dynamic from step 150": ("dynamic late R=40%",
                                  f"{ON40} --mask dynamic --first-refresh 150 --center"),
        "dynamic, dropped": ("dynamic drop R=40%",
                             f"{ON40} --mask dynamic --masked drop{TOY_DYNAMIC}")},
    "answers ahead": {
        "those read next": ("online R=40%", ON40),
        "all": ("generate all", f"{ON40} --generate all")},
    **{f"bad rows: {method}": {
        "0": (f"{method}, no bad rows", f"{METHODS[method]} --toy-noise 0"),
        "20 %": (f"{method}, 20 % bad", f"{METHODS[method]} --toy-noise 0.2"), "40 %": method,
        "60 %": (f"{method}, 60 % bad", f"{METHODS[method]} --toy-noise 0.6"),
        "80 %": (f"{method}, 80 % bad", f"{METHODS[method]} --toy-noise 0.8")}
       for method in ("mixing rho=0.5", "BDS", "online R=10% G=1")},
}
MEASURES = {"upper_heldout": "held-out upper", "lower_heldout": "lower, clean",
            "weight/auroc/contrary": "AUROC contrary", "omega/ess_share": "ess share",
            "answers_generated": "answers", "right": "answers right"}


def ablations(args):
    """One change at a time, on the toy; a figure and a table for each question."""
    if args.scale != "toy":
        raise UserError("ablations: of the toy only; --list shows the flags to try elsewhere")
    named = {question: {label: (entry if isinstance(entry, tuple) else (entry, METHODS[entry]))
                        for label, entry in values.items()}
             for question, values in ABLATIONS.items()
             if args.only is None or args.only in question}
    methods = {name: command for values in named.values() for name, command in values.values()}
    found = execute(args, methods, Path("runs") / args.name)
    if args.list:
        return
    results, claims = {}, []
    for question, values in named.items():
        rows = {}
        for label, (name, _) in values.items():
            rows[label] = [prefer_unmasked(read_result(file.parent)) | last_metrics(file)
                           for file in found[name]]
        results[question] = rows
        columns = present(MEASURES, rows)
        print("\n" + table([question, *columns.values()], summarise(rows, columns)))
        labels = list(rows)
        claims += [[f"{question}: {label} below {labels[0]}", *verdict(
            [run["upper_heldout"] for run in rows[label]],
            [run["upper_heldout"] for run in rows[labels[0]]])] for label in labels[1:]]
    print("\n" + table(["upper loss", "here", "difference in loss"], claims))
    panels_figure(HERE / "results" / f"{args.name}_ablations.png", "held-out upper loss", {
        question: {label: [run["upper_heldout"] for run in runs] for label, runs in rows.items()}
        for question, rows in results.items()})
    store(args, "ablations", results, claims=claims)


def last_metrics(file):
    """omega's effective sample size at the end, and the share of generated answers that are right.

    The share is over all refreshes; by kind of the original answer and by refresh it stands in
    metrics.jsonl (`answers_right/KIND`).
    """
    rows, found = utils.read_jsonl(file.with_name("metrics.jsonl")), {}
    for row in rows:
        if "omega/ess_share" in row:
            found["omega/ess_share"] = row["omega/ess_share"]
        for key, value in row.items():
            if key.startswith("answers_right/"):
                found.setdefault(key, []).append(value)
    shares = {key: value for key, value in found.items() if key.startswith("answers_right/")}
    for key, values in shares.items():  # of every refresh, in order
        found[key] = values
    right = [sum(parts) / len(parts) for parts in zip(*shares.values(), strict=False)]
    return found | ({"right": sum(right) / len(right)} if right else {})


def controls(args):
    """Null controls of the toy: permuted labels, no bad rows, an upper set about something else.

    By default clean rows outnumber contrary ones three to one, and any training on the lower set
    learns the majority's convention; the pair with even conventions shows what the trusted set
    alone adds.
    """
    if args.scale != "toy":
        raise UserError("controls: of the toy only")
    folder, frozen = Path("runs") / args.name, METHODS["mixing, rho schedule"]
    methods = {"as it is: BDS": OFF, "as it is: BDS corrected": CORRECTED,
               "no bad rows: rho schedule": f"{frozen} --toy-noise 0",
               "no bad rows: BDS": f"{OFF} --toy-noise 0",
               "unrelated upper: BDS": f"{OFF} --toy-upper unrelated",
               "even conventions: BDS": f"{OFF} {EVEN}",
               "even, unrelated upper: BDS": f"{OFF} {EVEN} --toy-upper unrelated"}
    shared = {"as it is: BDS": "BDS", "as it is: BDS corrected": "BDS corrected"}
    found = execute(args, {shared.get(name, name): command for name, command in methods.items()},
                    folder)
    if args.list:
        return
    results = results_of({name: found[shared.get(name, name)] for name in methods})
    for name in list(shared):
        results[name.replace("as it is", "labels permuted")] = [
            permuted_labels(file.parent, seed) for seed, file in enumerate(found[shared[name]])]
    keys = {"upper_heldout": "held-out upper"} | {
        key: heading for key, heading in RANKS.items() if "length" not in key}
    print(table(["control", *keys.values()], summarise(results, keys)))
    store(args, "controls", results)


def permuted_labels(folder, seed):
    """AUROCs of a run's own weights against its labels in random order: one half, or a bug."""
    import torch

    rows = utils.read_jsonl(folder / "weights.jsonl")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    metrics = ranking_metrics(torch.tensor([-float(row["rank"]) for row in rows]),
                              torch.tensor([rows[i]["bad"] for i in order]),
                              [rows[i]["kind"] for i in order])
    return {f"weight/{key}": value for key, value in metrics.items()}


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


# --- figures and the README -----------------------------------------------------------------------

def _figure(width, height, panels=1):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=110)
    columns = min(panels, 3)
    axes = figure.subplots(math.ceil(panels / columns), columns, squeeze=False).flatten()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[panels:]:
        axis.set_visible(False)
    return figure, axes


def _points(axis, values):
    """Every seed as a dot, the mean as a line: {label: [value of each seed]}."""
    for x, runs in enumerate(values.values()):
        axis.plot([x] * len(runs), runs, "o", color="#8aa4c8", markersize=4)
        axis.plot([x - 0.25, x + 0.25], [mean_std(runs)[0]] * 2, color="#1f3b63", linewidth=2)
    axis.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)


def panels_figure(path, ylabel, panels, chance=None):
    """{question: {label: values over seeds}}, one panel a question; a dashed line at chance."""
    figure, axes = _figure(12, 3.4 * math.ceil(len(panels) / 3), len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=False):
        _points(axis, values)
        if chance is not None:
            axis.axhline(chance, color="#999999", linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(ylabel, fontsize=8)
    figure.savefig(path)


def line_figure(path, xlabel, ylabel, curves):
    """{name: [(x, values over seeds), ...]}: means, with every seed as a dot."""
    figure, (axis,) = _figure(5, 3.2)
    for number, (name, points) in enumerate(curves.items()):
        axis.plot([x for x, _ in points], [mean_std(values)[0] for _, values in points],
                  color=f"C{number}", label=name)
        for x, values in points:
            axis.plot([x] * len(values), values, "o", color=f"C{number}", markersize=3, alpha=0.5)
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
    axis.legend(fontsize=8)
    figure.savefig(path)


SHORT_RANKS = {"weight/auroc/contrary": "weight, contrary", "weight/auroc/plain": "weight, plain",
               "final/auroc/contrary": "final, contrary", "base/auroc/contrary": "base, contrary",
               "base/auroc/plain": "base, plain"}
RENDERED = {  # file under results/: columns
    "toy_table1": {key: value for key, value in LOSSES.items() if key != "upper_accuracy"}
                  | {"weight/auroc/contrary": "AUROC contrary"},
    "toy_table3": {key: value for key, value in LOSSES.items() if key != "upper_accuracy"},
    "toy_table3_dpo": {key: value for key, value in LOSSES.items() if key != "upper_exact"},
    "toy_controls": {"upper_heldout": "held-out upper"} | SHORT_RANKS,
    "toy_selectors": {"auroc": "AUROC", "auroc/contrary": "contrary", "auroc/plain": "plain",
                      "precision": "precision at k", "recall/contrary": "recall, contrary",
                      "recall/plain": "recall, plain", "seconds": "seconds"},
    "planted_selectors": {"auroc": "AUROC", "auroc/swapped": "swapped",
                          "auroc/shuffled": "shuffled", "auroc/cut": "cut",
                          "precision": "precision at k", "recall/swapped": "recall, swapped",
                          "recall/shuffled": "recall, shuffled", "recall/cut": "recall, cut",
                          "seconds": "seconds"},
    "toy_curated": {"upper_heldout": "held-out upper", "upper_exact": "exact answers",
                    "lower_heldout": "lower, clean", "rows": "rows", "bad_share": "bad rows"},
    "planted_curated": {"upper_heldout": "held-out upper", "rows": "rows",
                        "bad_share": "bad rows"},
    "toy_ranking": {}, "toy_winrate": {"win_rate": "win rate %", "n_draws": "ties"},
    "small_table1": {"upper_heldout": "held-out upper", "lower_original": "lower, originals",
                     "lower_kept": "lower, kept"},
}


def readme(args):
    """Put the stored results between their markers in README.md."""
    path = HERE / "README.md"
    text = path.read_text()
    for name in re.findall(r"<!-- begin (\w+) -->", text):
        file = HERE / "results" / f"{name}.json"
        if not file.exists():
            raise UserError(f"{file}: missing; make it with `reproduce.py` first")
        stored = json.loads(file.read_text())
        columns = RENDERED[name] or {key: key for run in next(iter(stored["results"].values()))
                                     for key in run}
        published = PUBLISHED.get(name.removeprefix("toy_").removeprefix("small_").replace(
            "_", "-"), {})
        names = PUBLISHED_NAMES[name.split("_", 1)[1].replace("_", "-")] if published else ()
        rows = [row + list(published.get(row[0], ("-",) * len(names)))
                for row in summarise(stored["results"], columns)]
        headings = [*columns.values(), *(f"published, {name}" for name in names)]
        lines = ["| | " + " | ".join(headings) + " |", "|---|" + "---|" * len(headings),
                 *("| " + " | ".join(row) + " |" for row in rows)]
        if stored.get("claims"):
            lines += ["", "| claim | here | difference |", "|---|---|---|",
                      *("| " + " | ".join(row) + " |" for row in stored["claims"])]
        lines += ["", f"`{stored['command']}`, {stored['date']}, commit {stored['commit']}, "
                  f"{stored['hardware']}, torch {stored['torch']}."]
        head, rest = text.split(f"<!-- begin {name} -->")
        text = (f"{head}<!-- begin {name} -->\n" + "\n".join(lines)
                + f"\n<!-- end {name} -->" + rest.split(f"<!-- end {name} -->")[1])
    utils.write_atomic(path, text)
    print(f"{path}: rendered")


TARGETS = {"demo": demo, "ranking": ranking, "qa": qa, "winrate": winrate, "examples": examples,
           "selectors": selectors, "curated": curated, "ablations": ablations,
           "controls": controls, "readme": readme}
TABLES = ("table1", "table3", "table3-dpo")


def main(argv=None):
    parser = argparse.ArgumentParser(description="The paper's tables, one command each.")
    parser.add_argument("target", choices=(*TABLES, *TARGETS))
    add = parser.add_argument
    add("--scale", choices=SCALES, default="toy")
    add("--seeds", type=int, help="default: demo 1, else 4")
    add("--name", help="of the folder under runs/ and of the files under results/ (the scale)")
    add("--data", help="arguments of every command: --model, --lower, --upper ...")
    add("--train", help="arguments of both training scripts")
    add("--online", help="arguments of train_online.py")
    add("--select", help="arguments of baselines.py")
    add("--keep-fraction", type=float, default=0.7, help="curated: k over N")
    add("--only", help="ablations: the questions with these words")
    add("--qa", help="qa: arguments of `eval.py qa`, such as '--tasks piqa --limit 100'")
    add("--prompts", help="winrate, examples: file with instructions (toy: held-out puzzles)")
    add("--judge", help="winrate: arguments of `winrate.py judge`")
    add("--tokens", type=int, default=256, help="winrate, examples: new tokens an answer")
    add("--workers", type=int, default=os.cpu_count(), help="runs at a time")
    add("--list", action="store_true", help="print the commands, run nothing")
    args = parser.parse_args(argv)
    args.seeds = args.seeds if args.seeds is not None else 1 if args.target == "demo" else 4
    args.name = args.name or ("demo" if args.target == "demo" else args.scale)
    if args.workers < 1 or args.seeds < 1:
        raise UserError("--workers and --seeds must be 1 or more")
    if not 0 < args.keep_fraction < 1:
        raise UserError(f"--keep-fraction {args.keep_fraction}: must lie between 0 and 1")
    if args.target in TABLES:
        losses_table(args, args.target)
    else:
        TARGETS[args.target](args)


if __name__ == "__main__":
    utils.run(main)
