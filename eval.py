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
    python eval.py audit RANKING --rows SOURCE          are the flagged rows bad? you judge 60
    python eval.py tensorboard RUN                      the metrics as event files
"""

import argparse
import json

import utils
from evaluation import answers, audit, losses, qa, rankings, report, winrate
from evaluation.comparison import comparison_rows, print_comparison
from evaluation.events import write_events
from evaluation.export import FORMATS, export
from evaluation.runs import Run, check_output
from runtime.command import run as run_command


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Look at finished runs.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text, runs="+"):
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("runs", nargs=runs, metavar="RUN", help="run folder")
        return made.add_argument

    add = command("compare", "runs side by side; runs that differ in the seed alone in one row")
    add("--json", help="also write the numbers, intervals included")
    add = command("report", "one self-contained HTML page, and its tables as Markdown beside it")
    add("--out", default="report.html", help="the page (report.html)")
    add = command("keep", "re-threshold a ranking: kept.jsonl for --keep of train_offline.py", None)
    add("--keep-fraction", type=float, required=True, help="share of the rows to keep")
    add("--by", choices=("weight", "final", "corrected"), default="weight",
        help="rank by the weight, by the loss L under the final model, or by L - A L(theta_hat)")
    add("--out", help="file to write (kept.jsonl in a run; NAME.kept.jsonl beside NAME.jsonl)")
    add = command("export", "the rows of a run's curated.jsonl as a file for a trainer", None)
    add("--format", choices=FORMATS, required=True, help="pairs: rewritten over original answers")
    add("--out", help="file to write (curated.FORMAT.jsonl beside curated.jsonl)")
    add = command("losses", "losses of every set, before and after training", None)
    add("--rows", help="file, folder or hub name of rows instead of the run's own sets")
    add("--lower-columns", help="names of unknown columns of --rows")
    add("--out", help="also write one line a row")
    add("--device", default="auto")
    command("ranking", "top and bottom 10 %% of the rows over the epochs")
    add = command("qa", "zero-shot question answering through lm-evaluation-harness", None)
    add("--tasks", default="arc_easy,arc_challenge,openbookqa,piqa,winogrande",
        help="also hellaswag, boolq (default: %(default)s)")
    add("--local", help="folder of TASK.jsonl files with question, choices, label")
    add("--limit", type=int, help="questions a task")
    add("--batch-size", type=int, default=8)
    add("--base", action="store_true", help="the run's base model instead")
    add("--device", default="auto")
    add("--out", help="also write the numbers as json")
    add = command("answers", "the base model and every run answer the same prompts, greedily")
    add("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add("--prompts", help="file of prompts (AlpacaEval's outputs, or json/jsonl with instruction)")
    add("--max-new-tokens", type=int, default=256)
    add("--device", default="auto")
    add("--out", help="write the Markdown table here instead of printing it")
    add = command("tensorboard", "metrics and weights as TensorBoard event files", None)
    add("--out", help="folder (RUN/tensorboard)")
    text = "judge flagged and other rows without knowing which: precision and missed share"
    add = commands.add_parser("audit", help=text, description=text).add_argument
    add("ranking", metavar="RANKING", help="file with reason or kept in its rows")
    add("--rows", help="what was ranked: file, folder or hub name (default: the ranking's texts)")
    add("--lower-columns", help="names of its columns, as they were named when it was ranked")
    add("--count", type=int, default=30, help="flagged rows, and as many others (30)")
    add("--seed", type=int, default=0)
    add("--verdicts", help="file of verdicts instead of asking")
    add("--page", help="also write the rows as a page; without --verdicts nothing is asked")
    add("--out", help="the verdicts, written after each; those it has are not asked for again")
    text = "win rate against a reference: generate, judge, rate"
    winrate.add_commands(commands.add_parser("winrate", help=text, description=text))
    return parser.parse_args(argv)


def print_compare(args):
    if args.json:
        check_output(args.json, *args.runs)
    rows = comparison_rows([Run(folder) for folder in args.runs])
    if args.json:
        utils.write_atomic(args.json, json.dumps(rows, indent=2) + "\n")
    print_comparison(rows)


def main(argv=None):
    args = parse_args(argv)
    call = {
        "compare": print_compare,
        "report": lambda args: print(report.write_report([Run(f) for f in args.runs], args.out)),
        "keep": lambda args: print(rankings.rethreshold(args.runs, args.keep_fraction, args.out,
                                                        args.by)),
        "export": lambda args: print(export(args.runs, args.format, args.out)),
        "losses": lambda args: losses.measure_losses(args.runs, args.rows, args.lower_columns,
                                                     args.out, args.device),
        "ranking": lambda args: rankings.print_rankings([Run(f) for f in args.runs]),
        "qa": qa.run_qa,
        "answers": answers.print_answers,
        "winrate": winrate.run_winrate,
        "audit": audit.run_audit,
        "tensorboard": lambda args: print(write_events(Run(args.runs), args.out)),
    }[args.command]
    call(args)


if __name__ == "__main__":
    run_command(main)
