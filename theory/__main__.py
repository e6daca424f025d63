"""Command line: python -m theory [PART] [--out FOLDER]; under a minute on one CPU core."""

import argparse
import json
from pathlib import Path

import utils
from runtime import command
from theory import benefit, convergence, coverage, drawing, equivalence, weights

# ruff: isort: split
import torch

PARTS = {"benefit": (benefit, drawing.draw_benefit),
         "coverage": (coverage, drawing.draw_coverage),
         "convergence": (convergence, drawing.draw_convergence),
         "equivalence": (equivalence, drawing.draw_equivalence),
         "weights": (weights, drawing.draw_weights)}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise utils.UserError(f"{message} (python -m theory --help)")


def main(argv=None):
    parser = Parser(prog="python -m theory", description="The paper's statements, checked "
                    "numerically (see the docstring of theory/__init__.py).")
    parser.add_argument("part", nargs="?", default="all", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path("results/theory"),
                        help="folder of the figures (default: results/theory)")
    args = parser.parse_args(argv)
    if args.out.exists() and not args.out.is_dir():
        raise utils.UserError(f"--out {args.out}: is a file; name a folder for the figures")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for each other
    result = {}
    for name in PARTS if args.part == "all" else (args.part,):
        part, draw = PARTS[name]
        print("\n" + part.TITLE)
        numbers, curves = part.measure()
        part.print_table(numbers, curves)
        drawing.save(draw, numbers, curves, args.out / f"{name}.png")
        result[name] = numbers
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    command.run(main)
