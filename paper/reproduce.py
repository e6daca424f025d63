"""The paper's tables and figures, one function each.

The runtime table is that of `python -m benchmarks table2`. The paper's QA results are pictures
without values in its source, so there is nothing to print beside ours.
"""

import json
import shlex
import time
from pathlib import Path

from evaluation import winrate
from evaluation.rankings import ranking_over_epochs
from evaluation.runs import Run
from paper.figures import line_figure
from paper.plans import METHODS, SAFETY, chosen, execute, words_of
from paper.results import LOSSES, LOWER, RANKS, UPPER, added, store, stored_before
from paper.running import run_all, slug
from paper.statistics import (
    claims_of,
    mean_std,
    measured,
    print_claims,
    results_of,
    seed_verdict,
    summary_rows,
    with_base,
)
from toy import corpus
from utils import UserError, each_jsonl, table

WIN_RATE = ["eval.py", "winrate"]  # the words behind `python` that name the win rate's command
DEMO = ("mixing rho=0.5", "BDS", "online R=10% G=1", "online dynamic", "control: drop")
SAFETY_METHODS = ("mixing rho=0.5", "mixing rho=1", "mixing, rho schedule", "random", "LESS",
                  "DSIR", "BDS", "online R=5% G=1", "online R=10% G=1", "online dynamic",
                  "control: drop", "control: dynamic, drop")

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
CLAIMS = {
    "table1": [
        ("BDS is better than mixing at rho = 1", "BDS", "mixing rho=1", UPPER),
        ("BDS is better than mixing at rho = 0.5", "BDS", "mixing rho=0.5", UPPER),
        ("BDS is better than random selection", "BDS", "random", UPPER),
        ("BDS is better than LESS", "BDS", "LESS", UPPER),
        ("BDS is better than DSIR", "BDS", "DSIR", UPPER),
        ("(beyond it) BDS is better from the tests than from zero", "BDS from the tests", "BDS",
         UPPER),
        ("(beyond it) BDS from the tests is better than mixing at rho = 0.5", "BDS from the tests",
         "mixing rho=0.5", UPPER),
        ("online is better than offline", "online R=10% G=1", "BDS", UPPER),
        ("online is better than offline, clean rows", "online R=10% G=1", "BDS", LOWER),
        ("R = 10 % is better than 5 %", "online R=10% G=1", "online R=5% G=1", UPPER),
        ("R = 20 % is worse than 10 % (\"unstable\")", "online R=10% G=1", "online R=20% G=1",
         UPPER),
        ("G = 5 is better than G = 1", "online R=10% G=5", "online R=10% G=1", UPPER),
        ("(control) online is better than dropping", "online R=10% G=1", "control: drop", UPPER),
        ("(control) dynamic is better than dropping", "online dynamic", "control: dynamic, drop",
         UPPER)],
    "table3": [
        ("BDS is better than mixing at rho = 0.5", "BDS", "mixing rho=0.5", UPPER),
        ("(control) BDS is better than mixing with its rho", "BDS", "mixing, rho schedule", UPPER),
        ("online is better than offline", "online R=10% G=1", "BDS", UPPER),
        ("dynamic is better than static", "online dynamic", "online R=10% G=1", UPPER),
        ("dynamic is better than static, clean rows", "online dynamic", "online R=10% G=1", LOWER),
        ("(control) online is better than dropping", "online R=10% G=1", "control: drop", UPPER),
        ("(control) dynamic is better than dropping", "online dynamic", "control: dynamic, drop",
         UPPER)],
}
CLAIMS["table3-dpo"] = CLAIMS["table3"]


# --- Tables 1 and 3 -------------------------------------------------------------------------------

def losses_table(args):
    """Table 1 or 3: every method over the seeds, the published figures beside, each claim."""
    target = args.target
    wanted = chosen(args, SAFETY_METHODS if target in SAFETY else METHODS)
    before = stored_before(args)
    files = execute(args, {name: METHODS[name] for name in wanted}, target)
    if args.list:
        return
    results, pieces = with_base(results_of(files)), []
    if before:
        results, pieces = added(args, before, results, list(METHODS))
    bad_rows = ({"weight/auroc/contrary": "AUROC contrary"} if args.scale == "toy" else
                {"weight/auroc": "AUROC of bad rows"})  # plain faults of the toy are easy
    columns, names = measured(LOSSES | bad_rows, results), PUBLISHED_NAMES[target]
    published = {"heading": [f"published, {name}" for name in names]} | PUBLISHED[target]
    rows = [[*row, *published.get(row[0], ["-"] * len(names))]
            for row in summary_rows(results, columns)]
    print("\nlosses in nats a token, mean ± std over seeds; the last columns are the paper's upper "
          "/ lower losses")
    print(table(["method", *columns.values(), *published["heading"]], rows))
    orders = orders_of(results, PUBLISHED[target], names)
    print("\nfrom best to worst by upper loss:")
    print("\n".join(f"  {name}: {', '.join(order)}" for name, order in orders.items()))
    claims = claims_of(CLAIMS[target], results)
    if claims:
        print_claims(claims, "loss")
    if args.scale == "toy" and target == "table1":
        print_ranks(results)
    store(args, results, columns, published=published, claims=claims, orders=orders,
          **({"pieces": pieces} if pieces else {}))


def print_ranks(results):
    print("\nwhich rows are bad: AUROC by kind of fault. `weight` is omega, `final` the loss under "
          "the final\nmodel, `base` the base model's own loss, `length` the answer's length")
    print(table(["method", *RANKS.values()], summary_rows(results, RANKS)))


def orders_of(results, published, names):
    """Methods from best to worst by upper loss: here, and in each published column."""
    common = [method for method in published if method in results]
    here = sorted(common, key=lambda m: mean_std([run["upper_heldout"] for run in results[m]])[0])
    orders = {"here": here}
    for column, name in enumerate(names):
        orders[name] = sorted(common, key=lambda m: float(published[m][column].split(" / ")[0]))
    return orders


# --- the figure of the top 10 % -------------------------------------------------------------------

def ranking_figure(args):
    """The figure of the top 10 % questions: mean response length by epoch, BDS and online."""
    wanted = chosen(args, ("BDS", "online R=10% G=1", "online dynamic"))
    files_of = execute(args, {name: METHODS[name] for name in wanted})
    if args.list:
        return
    results = {method: [{f"epoch {row['epoch']}": row["top_length"]
                         for row in ranking_over_epochs(Run(file.parent))
                         if row["group"] != "masked"} for file in files]
               for method, files in files_of.items()}
    columns = {key: key for runs in results.values() for run in runs for key in run}
    print("\nmean response length (tokens) of the top 10 % by weight")
    print(table(["method", *columns], summary_rows(results, columns)))
    first, last = next(iter(columns)), list(columns)[-1]
    claims = [[("(control) " if method == "BDS" else "") + f"{method}: short answers come first",
               *seed_verdict([run[first] for run in runs], [run[last] for run in runs])]
              for method, runs in results.items()]
    print_claims(claims, "tokens, first epoch less last")
    line_figure(Path("results") / f"{args.name}_ranking.png", "epoch",
                "response length of the top 10 %",
                {method: [(epoch, [run[key] for run in runs])
                          for epoch, key in enumerate(columns, 1)]
                 for method, runs in results.items()})
    store(args, results, columns, claims=claims)


# --- questions and answers ------------------------------------------------------------------------

def zero_shot(args):
    """Zero-shot accuracy of table1's runs through lm-evaluation-harness."""
    if args.scale == "toy":
        raise UserError("qa: the toy's model knows list puzzles only; use --scale small or paper")
    files_of = execute(args, {name: METHODS[name] for name in chosen(args, DEMO)})
    answered, commands, first = {}, {}, next(iter(files_of.values()))[:1]
    for method, files in ({"base model": first} | files_of).items():
        base = method == "base model"
        for file in files:
            out = file.parent.with_name(f"qa{'base' if base else ''}-{file.parent.name}.json")
            commands[out] = shlex.join(["eval.py", "qa", str(file.parent), *words_of(args.qa or ""),
                                        "--out", str(out), *(["--base"] if base else [])])
            answered.setdefault(method, []).append(out)
    if args.list:
        print("\n".join(f"python {command}" for command in commands.values()))
        return
    run_all(commands, 1)  # the harness uses every core
    results = {method: [{task: values["acc"] for task, values in
                         json.loads(file.read_text()).items()} for file in files]
               for method, files in answered.items()}
    tasks = {key for runs in results.values() for run in runs for key in run}
    columns = {key: key for key in sorted(tasks)}
    print(table(["zero-shot accuracy", *columns], summary_rows(results, columns)))
    store(args, results, columns)


def win_rates(args):
    """AlpacaEval win rate of table1's runs against the base model.

    On the toy the judge is the truth: a right answer beats a wrong one, else it is a tie.
    """
    if args.scale == "toy" and (args.prompts or args.judge):
        raise UserError("winrate: on the toy the truth about its own puzzles is the judge; "
                        "--prompts and --judge need --scale small or paper")
    if args.scale != "toy" and not (args.prompts and args.judge):
        raise UserError("winrate: name --prompts FILE (AlpacaEval's instructions) and --judge "
                        "'--url https://api.openai.com/v1 --judge gpt-4-turbo'")
    folder = Path("runs") / args.name
    files_of = execute(args, {name: METHODS[name] for name in chosen(args, DEMO)})
    prompts = args.prompts or folder / "prompts.json"
    if not args.prompts and not args.list:
        winrate.write_list(prompts, [{"instruction": row["prompt"]}
                                     for row in corpus.make_rows(seed=0)["heldout"][:200]])
    first = next(iter(files_of.values()))[0].parent
    base = first.with_name("answers-base.json")
    generate, judge = {base: [str(first), "--base"]}, {}
    for file in (file for files in files_of.values() for file in files):
        answers = answer_file(file)
        generate[answers], verdicts = [str(file.parent)], answers.with_suffix(".judged.json")
        if args.scale != "toy":
            judge[verdicts] = shlex.join(
                [*WIN_RATE, "judge", str(answers), "--reference", str(base), "--out",
                 str(verdicts), *words_of(args.judge)])
    generate = {out: shlex.join([*WIN_RATE, "generate", *words, "--prompts", str(prompts), "--out",
                                 str(out), "--max-new-tokens", str(args.tokens)])
                for out, words in generate.items()}
    if args.list:
        print("\n".join(f"python {c}" for c in [*generate.values(), *judge.values()]))
        return
    run_all(generate, args.workers)
    for verdicts in judge:
        if verdicts.exists() and any(row.get("preference") is None
                                     for row in winrate.read_list(verdicts, ())):
            verdicts.unlink()  # asked again for what is missing; the others lie in its cache
    run_all(judge, 1)
    columns = {"win_rate": "win rate %", "n_draws": "ties", "n_missing": "not judged"}
    results = {}
    for method, files in files_of.items():
        rates = [winrate.win_rate(preferences(args, file, base)) for file in files]
        results[method] = [{key: rate[key] for key in columns} for rate in rates]
    print(table(["against the base model", *columns.values()], summary_rows(results, columns)))
    store(args, results, columns)


def answer_file(file):
    """Where a run's answers to the prompts of `winrate` lie."""
    return file.parent.with_name(f"answers-{file.parent.name}.json")


def preferences(args, file, base):
    """AlpacaEval's preference for each answer: 1 the base model's, 2 the run's, 1.5 a tie."""
    if args.scale != "toy":
        judged = answer_file(file).with_suffix(".judged.json")
        return [row["preference"] for row in winrate.read_list(judged, ())]
    right, base_right = ([corpus.kind_of(row["instruction"], row["output"]) == "clean"
                          for row in winrate.read_list(answers, ())]
                         for answers in (answer_file(file), base))
    return [1.5 + 0.5 * (a - b) for a, b in zip(right, base_right, strict=True)]


def example_answers(args):
    """The paper's table of examples: the base model and each method answer the same prompts."""
    if args.scale != "toy" and not args.prompts:
        raise UserError("examples: name --prompts FILE (with a column instruction)")
    wanted = chosen(args, ("mixing rho=1", "BDS", "online R=10% G=1"))
    files_of = execute(args, {name: METHODS[name] for name in wanted})
    shown = corpus.make_rows(seed=0)["heldout"][:6]
    prompts = ["--prompts", args.prompts] if args.prompts else [
        word for row in shown for word in ("--prompt", row["prompt"])]
    out = Path("runs") / args.name / "examples.md"
    runs = [str(files[0].parent) for files in files_of.values()]
    command = shlex.join(["eval.py", "answers", *runs, *prompts, "--max-new-tokens",
                          str(args.tokens), "--out", str(out)])
    if args.list:
        print(f"python {command}")
        return
    run_all({out: command}, 1)
    print(out.read_text())


# --- what `make demo` runs ------------------------------------------------------------------------

def right_answers(folder):
    """How many answers of an online run on the toy are right, counted in its curated.jsonl.

    Of the rows with a new answer: the share whose final answer is right when the recommendation,
    always the new, or never the new one is taken; and the precision of "refined": of the rows so
    recommended, the share whose new answer is right. repaired: of wrong originals those made right;
    broken: of right ones those made wrong. None where there is no such row.
    """
    rows = []  # (is the original right, is the new answer right, is the new one recommended)
    for entry in each_jsonl(Path(folder) / "curated.jsonl"):
        if entry["refined"] is not None:
            old, new = (corpus.kind_of(entry["prompt"], entry[field]) == "clean"
                        for field in ("response", "refined"))
            rows.append((old, new, entry["recommended"] == "refined"))

    def share(values):
        return sum(values) / len(values) if values else None

    taken = [new if picked else old for old, new, picked in rows]
    return {"refined/right_recommended": share(taken),
            "refined/right_always": share([new for _, new, _ in rows]),
            "refined/right_never": share([old for old, _, _ in rows]),
            "refined/precision": share([new for _, new, picked in rows if picked]),
            "refined/repaired": share([new for old, new, _ in rows if not old]),
            "refined/broken": share([not new for old, new, _ in rows if old])}


def demo(args):
    """One seed of the toy: mixing, BDS, online and a control; tables and where the rows are."""
    if args.scale != "toy" or args.data:
        raise UserError("demo: it is of the toy; for your own rows take train_online.py and "
                        "eval.py report, or `python -m paper table1 --scale small --data ...`")
    started, folder = time.time(), Path("runs") / args.name
    files_of = execute(args, {name: METHODS[name] for name in DEMO})
    if args.list:
        return
    results = results_of(files_of)
    columns = measured(LOSSES, results)
    print("\nlosses (nats a token; lower is better) and exact answers (share of held-out prompts)")
    print(table(["method", *columns.values()], summary_rows(with_base(results), columns)))
    print_ranks(results)
    online = right_answers(files_of["online R=10% G=1"][0].parent)
    print(f"\nrefined answers, online: right {online['refined/repaired']:.0%} of the time where "
          "the original was wrong" + ("" if online["refined/broken"] is None else
          f", wrong {online['refined/broken']:.0%} where it was right"))
    print(f"every row weighted and ranked: {folder}/bds/seed-0/weights.jsonl\n"
          f"bad answers rewritten: {folder}/{slug('online R=10% G=1')}/seed-0/curated.jsonl")
    from evaluation.report import write_report  # matplotlib takes a second to import

    print(write_report([Run(files[0].parent) for files in files_of.values()],
                       folder / "report.html"))
    print("RESULT " + json.dumps({method: runs[0]["upper_heldout"]
                                  for method, runs in results.items()}
                                 | {"seconds": round(time.time() - started)}))
