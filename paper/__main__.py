"""The paper's tables and the questions around them, one command each.

    python -m paper demo             # what `make demo` runs: one seed of the toy
    python -m paper small --lower noisy.jsonl --upper trusted.jsonl  # `make small`: your rows
    python -m paper table1           # quality: losses of every method
    python -m paper table3           # safety, guided by trusted rows
    python -m paper table3-dpo       # safety, guided by preference pairs
    python -m paper ranking          # figure: what the top 10 % are, by epoch
    python -m paper qa               # zero-shot questions to the runs of table1
    python -m paper winrate          # their answers against the base model's
    python -m paper examples         # their answers side by side
    python -m paper selectors        # known bad rows: which ranking finds them, in what time?
    python -m paper curated          # is the curated set worth it?
    python -m paper kept             # training on what each ranking keeps
    python -m paper ablations        # what matters and what does not (toy)
    python -m paper controls         # what must come out as nothing (toy)
    python -m paper refine           # do repaired and new answers beat leaving rows out?
    python -m paper noise            # faults made on purpose: which ranking finds them, and why?
    python -m paper pairs            # fluent pairs: which score sees the worse answer?
    python -m paper readme           # the stored results into README.md and docs/
    python -m paper table1 --scale paper --list      # only print the training commands
"""

import argparse
import os
import shlex

from paper import experiments, kept, noise, pairs, refine, rendering, reproduce, small
from paper.plans import SCALES
from runtime import command
from utils import UserError

TARGETS = {"demo": reproduce.demo, "table1": reproduce.losses_table,
           "table3": reproduce.losses_table, "table3-dpo": reproduce.losses_table,
           "ranking": reproduce.ranking_figure, "qa": reproduce.zero_shot,
           "winrate": reproduce.win_rates, "examples": reproduce.example_answers,
           "selectors": experiments.compare_selectors, "curated": experiments.curated_table,
           "kept": kept.kept_table,
           "ablations": experiments.ablation_table, "controls": experiments.null_controls,
           "noise": noise.noise_table, "pairs": pairs.pairs_table,
           "refine": refine.refine_table, "readme": rendering.render, "small": small.small}
OWN = {"qa": ("qa",), "prompts": ("winrate", "examples"), "judge": ("winrate",),
       "tokens": ("winrate", "examples"), "keep_fraction": ("curated", "kept"),
       "rows": ("noise", "refine"), "first_seed": ("refine",),
       "add": ("table1", "table3", "table3-dpo"),
       "list": (*(name for name in TARGETS if name != "readme"),),
       "lower": ("small",), "upper": ("small",)}  # flag: its targets
ALL_RUNS = ("demo", "readme", "curated", "controls")  # --only has nothing to choose there
OF_RUNS = ("scale", "seeds", "workers", "train", "online", "select", "only")
UNREAD = {"noise": OF_RUNS[:-1], "pairs": OF_RUNS, "refine": ("online", "select"),
          "small": (*(name for name in OF_RUNS if name != "train"), "data")}  # target: its flags


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m paper",
                                     description="The paper's tables, one command each.")
    parser.add_argument("target", choices=TARGETS)
    add = parser.add_argument
    add("--scale", choices=SCALES, help="(toy)")
    add("--seeds", type=int, help="default: demo 1, else 4")
    add("--name", help="of the folder under runs/ and of the files under results/ "
        "(demo, text or the scale)")
    add("--lower", help="small: noisy rows, a file or hub name")
    add("--upper", help="small: trusted rows, a file or hub name")
    add("--data", help="arguments of every command: --model, --lower, --upper ...")
    add("--train", help="arguments of both training scripts")
    add("--online", help="arguments of train_online.py")
    add("--select", help="arguments of `python -m baselines`")
    add("--only", help="only these methods, questions or halves (noise), separated by '; '")
    add("--add", action="store_true", help="table1, table3: keep the stored table's other methods")
    add("--workers", type=int, help="runs at a time (default: the number of cores; paper: 1)")
    add("--list", action="store_true", help="print the commands, run nothing")
    add("--qa", help="qa: arguments of `eval.py qa`, such as '--tasks piqa --limit 100'")
    add("--prompts", help="winrate, examples: file with instructions (toy: its own puzzles)")
    add("--judge", help="winrate: arguments of its judge, such as '--local MODEL'")
    add("--tokens", type=int, default=256, help="winrate, examples: new tokens an answer")
    add("--keep-fraction", type=float, default=0.7, help="curated, kept: k over N")
    add("--rows", type=int, default=600, help="noise, refine: good rows to spoil (600)")
    add("--first-seed", type=int, default=3, help="refine: its settings were chosen on the seeds "
        "below (3)")
    args = parser.parse_args(argv)
    unread = UNREAD.get(args.target, ())
    given = [name for name in ("data", *OF_RUNS, *OWN)
             if getattr(args, name) != parser.get_default(name)]
    for name in given:
        if args.target not in OWN.get(name, TARGETS) or name in unread:
            would = [target for target in OWN.get(name, TARGETS) if name not in UNREAD.get(
                target, ())]
            raise UserError(f"--{name.replace('_', '-')}: {args.target} does not read it; "
                            f"{' and '.join(would[:3])} would")
    args.scale = args.scale or "toy"
    if args.only is not None and args.target in ALL_RUNS:
        raise UserError(f"{args.target}: --only has nothing to choose from here")
    args.seeds = args.seeds if args.seeds is not None else 1 if args.target == "demo" else 4
    own_names = {"demo": "demo", "small": "text"}  # runs/small belongs to --scale small
    args.name = args.name or own_names.get(args.target, args.scale)
    if args.workers is None:  # a GPU holds one 8B model
        args.workers = 1 if args.scale == "paper" else os.cpu_count()
    if args.workers < 1 or args.seeds < 1:
        raise UserError("--workers and --seeds must be 1 or more")
    if args.rows < 20:
        raise UserError(f"--rows {args.rows}: 20 or more; a share of 5 % is to be a row")
    # As it is stored beside the results.
    args.command = shlex.join([
        *["python", "-m", "paper"], args.target,
        *(word for name in ("scale", "seeds") if name not in unread
          for word in (f"--{name}", str(getattr(args, name)))),
        *(word for name in given if name not in ("scale", "seeds", "workers", "add", "list")
          for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))),
        *(["--name", args.name] if args.name != args.scale else [])])
    return args


def main(argv=None):
    args = parse_args(argv)
    TARGETS[args.target](args)


if __name__ == "__main__":
    command.run(main)
