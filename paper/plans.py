"""The runs behind every table: methods, scales, seeds, and the command of each run.

A command is the words behind `python`. Those of a training script stand as they are; a method
without a script is the name of a ranking (`python -m baselines NAME`), whose kept rows are then
trained on. `--list` prints all of them and runs nothing.

Scales: `toy` needs nothing; `small` is a small model on real text, `--data` names which; `paper`
holds the published models, data and settings and needs a GPU.

Budgets. All methods read the same number of lower-level tokens. random, LESS and DSIR train on
their kept rows alone, until they have read as many as mixing has; the others read as many rows of
the upper level besides.
"""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

from evaluation.runs import read_result
from options import RECIPES
from paper.recipes import build_missing
from paper.running import run_all, slug
from toy import corpus
from utils import UserError

LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
# Arguments of all commands, of training, of online training, and of ranking without training.
SCALES = {
    # The toy is over in 225 steps, so K_gen is smaller than the paper's 500; answers are short.
    "toy": {"data": "", "train": "", "online": "--k-gen 25 --max-new-tokens 16", "select": ""},
    "small": {"data": "--model HuggingFaceTB/SmolLM2-135M --lower tatsu-lab/alpaca --lower-limit "
                      f"2000 --upper {RECIPES}/openorca.jsonl --upper-limit 1000 --max-length 512",
              "train": "--lr 1e-3 --correction 0", "online": "--k-gen 25 --max-new-tokens 48",
              "select": "--lora-rank 16 --lora-alpha 16"},
    "paper": {"data": f"--model {LLAMA} --lower {RECIPES}/alpaca-cleaned.jsonl --lower-limit 56000 "
                      f"--upper {RECIPES}/openorca.jsonl",
              "train": "--preset llama3-8b-quality", "online": "", "select": ""},
}
# What the safety tables change. `toy_rows`: arguments of `python -m toy write`; a fifth of the
# lower rows is bad, as a fifth of the recipe's is red.
SAFETY = {
    "table3": {"toy": {"toy_rows": "--noise 0.2 --contrary 1"},
               "paper": {"data": f"--model {LLAMA} --lower {RECIPES}/redorca.jsonl --lower-limit "
                                 f"56000 --upper {RECIPES}/blueorca.jsonl",
                         "train": "--preset llama3-8b-safety"}},
    "table3-dpo": {"toy": {"toy_rows": "--noise 0.2 --contrary 1 --upper pairs",
                           "data": "--upper-loss dpo"},
                   "paper": {"data": f"--model {LLAMA} --lower {RECIPES}/redorca.jsonl "
                                     f"--lower-limit 56000 --upper {RECIPES}/rm-hh-rlhf.jsonl "
                                     "--upper-loss dpo",
                             "train": "--preset llama3-8b-safety"}},
}
OFF, ON = "train_offline.py", "train_online.py"
BDS = f"{OFF} --omega-start zero"  # as published
DYNAMIC = f"{ON} --mask dynamic --ratio-masked 0.1"
METHODS = {
    "mixing rho=1": f"{OFF} --method mix --rho 1",
    "mixing rho=0.5": f"{OFF} --method mix --rho 0.5",
    "mixing, rho schedule": f"{BDS} --omega-lr 0",
    "random": "random",
    "LESS": "less",
    "DSIR": "dsir",
    "BDS": BDS,
    "BDS from the tests": f"{OFF} --omega-start tests",
    "online R=5% G=1": f"{ON} --ratio-masked 0.05",
    "online R=10% G=1": f"{ON} --ratio-masked 0.1",
    "online R=10% G=5": f"{ON} --ratio-masked 0.1 --num-answers 5",
    "online R=20% G=1": f"{ON} --ratio-masked 0.2",
    "online dynamic": DYNAMIC,
    "control: drop": f"{ON} --ratio-masked 0.1 --refine drop",
    "control: dynamic, drop": f"{DYNAMIC} --refine drop",
    "control: original": f"{ON} --ratio-masked 0.1 --refine original",
}
# In short runs the dynamic mask is drawn from centred weights after 25 steps: else every row that
# was read sinks, and the bottom R are the rows read last.
SHORT_DYNAMIC = " --first-refresh 25 --center"
REFERENCE = "mixing rho=1"  # reads the tokens that runs on kept rows get


# --- what the command line chooses ----------------------------------------------------------------

def setting(args, target="table1"):
    """Arguments of the scale, with the safety tables' and the command line's in place of them."""
    scale = {"toy_rows": ""} | SCALES[args.scale] | SAFETY.get(target, {}).get(args.scale, {})
    given = {name: getattr(args, name) for name in ("data", "train", "online", "select")
             if getattr(args, name) is not None}
    if "data" in given:
        given["toy_rows"] = ""
        return scale | given
    if target in SAFETY and args.scale == "small":
        raise UserError(f"{target} --scale small: name the rows, such as --data '--model NAME "
                        f"--lower {RECIPES}/redorca.jsonl --lower-limit 2000 --upper "
                        f"{RECIPES}/blueorca.jsonl'")
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


# --- the toy's rows -------------------------------------------------------------------------------

def write_toy_rows(folder, seed, text):
    """What `python -m toy write --out FOLDER --seed SEED TEXT` does: four files of rows."""
    words = text.split()
    given = dict(zip(words[::2], words[1::2], strict=True))
    corpus.write(folder, seed=seed, noise=float(given.get("--noise", 0.4)),
                 contrary_share=float(given.get("--contrary", 0.5)),
                 upper=given.get("--upper", "right"))


def toy_words(folder):
    """Arguments that name written rows, with the toy's model and step sizes."""
    if folder is None:
        return []
    words = ["--lower", str(folder / "lower.jsonl"), "--upper", str(folder / "upper.jsonl"),
             "--upper-heldout", str(folder / "heldout.jsonl"),
             "--lower-heldout", str(folder / "lower_heldout.jsonl")]
    return ["--preset", "toy", *words]


# --- plans ----------------------------------------------------------------------------------------

def execute(args, methods, target="table1", also_rank=(), toy_rows=None):
    """Run {method: command} over the seeds. Returns {method: [result file or ranking, ...]}.

    Runs lie in runs/NAME, those of a safety table in its own folder there. Rows that are kept by a
    ranking are trained on for as many tokens as REFERENCE reads, which is run for that if it is not
    among the methods. also_rank: rankings that are wanted alone. toy_rows: {method: arguments of
    `python -m toy write`} in place of the scale's.
    """
    scale, needed = setting(args, target), dict(methods)
    folder = Path("runs") / args.name / (target if target in SAFETY else "")
    if not all(command.split()[0] in (OFF, ON) for command in methods.values()):
        needed.setdefault(REFERENCE, METHODS[REFERENCE])
    plan = plan_of(args, [*needed.items(), *((name, None) for name in also_rank)], folder, scale,
                   toy_rows or {})
    files = {method: plan.files[method] for method in (*methods, *also_rank)}
    if args.scale == "paper":
        print_needs(args, words_of(scale["data"], scale["train"]), needed)
    if args.list:
        print_commands(plan)
        return files
    if args.scale == "paper":
        import torch

        if not torch.cuda.is_available():
            raise UserError("--scale paper: no GPU here; --list prints the commands for another "
                            "machine")
    build_missing(words_of(scale["data"]))
    for rows, (seed, text) in plan.toy_rows.items():
        write_toy_rows(rows, seed, text)
    run_all(plan.commands, args.workers)
    run_all({file: f"{command} --token-budget {budget_of(reference)}"
             for file, (reference, command) in plan.on_kept.items()}, args.workers)
    return files


def plan_of(args, methods, folder, scale, toy_rows):
    """What [(method, command, or None for a ranking alone), ...] takes over the seeds.

    Returns a namespace: toy_rows {folder: (seed, text)} to write, commands {file: command}, on_kept
    {file: (folder of the run that sets the budget, command)}, files {method: [one a seed]}.
    """
    plan = SimpleNamespace(toy_rows={}, commands={}, on_kept={}, files={})
    words_of(*scale.values())  # refused also where no command here takes them
    for method, command in methods:
        text, plan.files[method] = toy_rows.get(method, scale["toy_rows"]), []
        for seed in range(args.seeds):
            out, end = folder / slug(method) / f"seed-{seed}", ["--seed", str(seed), "--out"]
            file, rows = out / "result.json", None
            if text:
                rows = Path("runs") / args.name / "rows" / slug(text) / f"seed-{seed}"
                plan.toy_rows[rows] = seed, text
            if command and command.split()[0] in (OFF, ON):
                plan.commands[file] = shlex.join(
                    [*training_words(args, scale, command, rows), *end, str(out)])
            else:
                name, kept = command or slug(method), out.with_name(f"seed-{seed}.kept.jsonl")
                plan.commands[kept] = shlex.join(
                    ["-m", "baselines", name, *toy_words(rows),
                     *words_of(scale["data"], scale["select"]), *end, str(kept)])
                if command is None:
                    file = kept
                else:
                    sft = f"{OFF} --method sft --keep {shlex.quote(str(kept))}"
                    plan.on_kept[file] = folder / slug(REFERENCE) / f"seed-{seed}", shlex.join(
                        [*training_words(args, scale, sft, rows), *end, str(out)])
            plan.files[method].append(file)
    return plan


def training_words(args, scale, command, rows):
    """A training command with the scale's words; the method's own come last, so that they win."""
    script, *flags = words_of(command)
    short = SHORT_DYNAMIC if args.scale != "paper" and command.startswith(DYNAMIC) else ""
    online = scale["online"] if script == ON else ""
    return [script, *words_of(short), *toy_words(rows),
            *words_of(scale["data"], scale["train"], online), *flags]


def print_commands(plan):
    for rows, (seed, text) in plan.toy_rows.items():
        print(f"python {shlex.join(['-m', 'toy', 'write', '--out', str(rows)])} "
              f"--seed {seed} {text}")
    print("\n".join(f"python {command}" for command in plan.commands.values()))
    budgets = [budget_of(reference) if (reference / "result.json").exists() else "TOKENS"
               for reference, _ in plan.on_kept.values()]
    if "TOKENS" in budgets:
        print("# TOKENS: lower_tokens x epochs of the run on all rows; --list prints the number "
              "once that has ended")
    for budget, (_, command) in zip(budgets, plan.on_kept.values(), strict=True):
        print(f"python {command} --token-budget {budget}")


def print_needs(args, training, methods):
    """What the published setting asks of a machine, as comment lines: GPU memory, hours, disk.

    Memory and disk are the training scripts' own arithmetic at the published shapes and the longest
    rows that the settings admit; the hours are the paper's.
    """
    from benchmarks.shapes import shape_config
    from benchmarks.table2 import PUBLISHED_HOURS, PUBLISHED_ROWS
    from session import memory_and_disk
    from train_offline import parse_args as training_args

    settings = training_args(training)
    shape = (settings.preset or "").rpartition("-")[0]
    if shape not in PUBLISHED_ROWS:
        print("# needs: not known without a preset; --dry-run of each command prints them")
        return
    settings.dtype = "bfloat16"  # what a GPU takes
    needs = memory_and_disk(settings, shape_config(shape), settings.max_length,
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
