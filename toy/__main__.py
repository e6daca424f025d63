"""The toy's rows as files, and its base model.

    python -m toy write --out FOLDER [--seed 0 --noise 0.4 --contrary 0.5 --upper right]
    python -m toy train --out FOLDER [--seed 0] [--steps 6000]
"""

import argparse
from pathlib import Path

from options import at_least_one, check_seed
from runtime.command import run
from toy import base, corpus
from utils import UserError


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m toy", description="The embedded default.")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("write", help="the four sets of rows as jsonl files").add_argument
    add("--out", type=Path, required=True, help="folder of the four files")
    add("--seed", type=int, default=0)
    add("--noise", type=float, default=0.4, help="share of bad lower rows")
    add("--contrary", type=float, default=0.5,
        help="share of contrary faults among them; noise 0.6 and 2/3 make the conventions even")
    add("--upper", choices=corpus.UPPER, default="right",
        help="unrelated: trusted rows of other tasks, a null control; pairs: preference pairs")
    add = commands.add_parser("train", help="tokenizer and base model from nothing").add_argument
    add("--out", type=Path, required=True, help="folder of the model (embedded: toy/model)")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=6000)
    args = parser.parse_args(argv)
    check_seed(args.seed)
    if args.command == "train":
        at_least_one(args, "steps")
        if args.out.exists() and not args.out.is_dir():
            raise UserError(f"--out {args.out}: is a file; give the name of a folder")
        if (args.out / "config.json").exists():
            raise UserError(f"--out {args.out}: holds a model; give another folder, or remove it")
    for name in ("noise", "contrary") if args.command == "write" else ():
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name} {getattr(args, name)}: must lie in [0, 1]")
    return args


def main(argv=None):
    args = parse_args(argv)
    if args.command == "train":
        base.train_base(args.out, args.seed, args.steps)
        return
    for path in corpus.write(args.out, seed=args.seed, noise=args.noise,
                             contrary_share=args.contrary, upper=args.upper).values():
        print(path)


if __name__ == "__main__":
    run(main)
