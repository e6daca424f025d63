"""Looking at finished runs: the command line of `evaluation`.

python eval.py compare RUN [RUN ...]                one table, seeds as mean and std
python eval.py report RUN [RUN ...] --out out.html  one page to look at
python eval.py keep RUN --keep-fraction 0.7         another share of kept rows, no training
python eval.py export RUN|FILE --format messages    curated rows for another trainer
python eval.py losses RUN [--rows FILE]             before and after, on every set; row by row
python eval.py ranking RUN [RUN ...]                top and bottom 10 % over the epochs
python eval.py qa RUN|MODEL --tasks arc_easy,piqa   zero-shot questions
python eval.py answers RUN [RUN ...] --prompt TEXT  base and runs answer side by side
python eval.py winrate generate|judge|rate ...      win rate against a reference
"""

import argparse

from evaluation import answers, comparison, export, losses, qa, rankings, report, winrate
from evaluation.runs import Run
from runtime import command


def runs_of(args):
    return [Run(folder) for folder in args.runs]


def run_report(args):
    print(report.write_report(runs_of(args), args.out, args.row_tests))


def run_keep(args):
    print(rankings.rethreshold(args.run, args.keep_fraction, args.out, args.by))


def run_export(args):
    print(export.export(args.run, args.format, args.out))


def run_ranking(args):
    rankings.print_rankings(runs_of(args))


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Look at finished runs.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add_command(name, call, text, several=False):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        if several:
            command.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
        else:
            command.add_argument("run", metavar="RUN", help="run folder")
        return command.add_argument

    add = add_command(
        "compare",
        comparison.run_compare,
        "runs side by side, seeds in one row",
        several=True,
    )
    add("--json", help="also write the numbers, intervals included")
    add = add_command("report", run_report, "one self-contained HTML page", several=True)
    add("--out", default="report.html", help="the page (report.html)")
    add(
        "--row-tests",
        metavar="RANKING",
        help="show the reasons that `python -m row_tests` gave",
    )
    add = add_command(
        "keep", run_keep, "re-threshold a ranking: kept.jsonl for --keep of training"
    )
    add("--keep-fraction", type=float, required=True, help="share of the rows to keep")
    add(
        "--by",
        choices=("weight", "final"),
        default="weight",
        help="rank by the weight, or by the loss under the final model",
    )
    add(
        "--out",
        help="file to write (kept.jsonl in a run; NAME.kept.jsonl beside NAME.jsonl)",
    )
    add = add_command(
        "export", run_export, "rows of a run's curated.jsonl as a trainer's file"
    )
    add(
        "--format",
        choices=export.FORMATS,
        required=True,
        help="pairs: new over original answers",
    )
    add("--out", help="file to write (curated.FORMAT.jsonl beside curated.jsonl)")
    add = add_command(
        "losses", losses.run_losses, "losses of every set, before and after training"
    )
    add("--rows", help="file, folder or hub name of rows instead of the run's own sets")
    add_command(
        "ranking",
        run_ranking,
        "top and bottom 10 %% of the rows over the epochs",
        several=True,
    )
    add = add_command("qa", qa.run_qa, "zero-shot questions through lm-evaluation-harness")
    add(
        "--tasks",
        default="arc_easy,arc_challenge,openbookqa,piqa,winogrande",
        help="also hellaswag, boolq (default: %(default)s)",
    )
    add("--local", help="folder of TASK.jsonl files with question, choices, label")
    add("--limit", type=int, help="questions a task")
    add("--batch-size", type=int, default=8)
    add("--base", action="store_true", help="the run's base model instead")
    add("--out", help="also write the numbers as json")
    add = add_command(
        "answers",
        answers.run_answers,
        "base models and runs answer side by side",
        several=True,
    )
    add("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add(
        "--prompts",
        help="file of prompts (AlpacaEval's outputs, or json/jsonl with instruction)",
    )
    add("--max-new-tokens", type=int, default=256)
    text = "win rate against a reference: generate, judge, rate"
    winrate.add_commands(commands.add_parser("winrate", help=text, description=text))
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    args.call(args)


if __name__ == "__main__":
    command.run(main)
