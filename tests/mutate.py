"""Small faults put into the source, one at a time: which of them does a suite of tests catch?

    python tests/mutate.py --files selector.py theory/model.py --count 20 --seed 0 \\
        --tests "tests/theory tests/test_selector.py"

A mutation changes one line: it swaps two operators or words of `SWAPS`, makes n + 1 of a number n,
drops a `not`, or puts `pass` for a bare call or an assignment. Docstrings, imports, strings, and
the lines of `print`, `raise`, `assert`, f-strings and functions named print_* stay as they are. The
tests run in a temporary copy of the working tree.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".cache", "runs", "__pycache__")
SWAPS = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "and": "or",
    "or": "and",
    "min": "max",
    "max": "min",
    "True": "False",
    "False": "True",
    "not": "",
}


def stays(node):
    """Whether the lines of this node stay as they are."""
    if isinstance(node, ast.FunctionDef):
        return node.name.startswith("print_")
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "print"
    return isinstance(
        node,
        ast.Import | ast.ImportFrom | ast.Raise | ast.Assert | ast.JoinedStr,
    )


def edits(path):
    """Yields (line number from 1, first column, column after the last, new text)."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    kept = set()
    for node in filter(stays, nodes):
        kept.update(range(node.lineno, node.end_lineno + 1))
    for node in nodes:
        drops = isinstance(node, ast.Assign | ast.AugAssign)
        drops |= isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if drops and node.lineno == node.end_lineno and node.lineno not in kept:
            yield node.lineno, node.col_offset, node.end_col_offset, "pass"
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            new = SWAPS.get(token.string)
            if token.type == tokenize.NUMBER:
                new = f"({token.string} + 1)"
            if new is not None and token.start[0] not in kept:
                yield *token.start, token.end[1], new


def mutants(file):
    """Yields (description, file, whole text) of every mutation that Python still parses."""
    lines = (ROOT / file).read_text().splitlines(keepends=True)
    for number, start, end, new in edits(ROOT / file):
        line = lines[number - 1]
        changed = line[:start] + new + line[end:]
        text = "".join(lines[: number - 1]) + changed + "".join(lines[number:])
        try:
            ast.parse(text)
        except SyntaxError:  # such as a / for the * of f(*values)
            continue
        yield f"{file}:{number}  {line.strip()}  ->  {changed.strip()}", file, text


def passes(folder, tests):
    """Whether all tests pass in this copy; a run of ten minutes does not."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-xqm",
        "not slow",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        done = subprocess.run(
            words,
            cwd=folder,
            # A compiled module of the same size and second would hide a change.
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=str.split, required=True)  # paths between quotes
    args = parser.parse_args()
    every = [mutant for file in args.files for mutant in mutants(file)]
    caught = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = shutil.copytree(ROOT, Path(temporary) / "copy", ignore=LEFT_OUT)
        if not passes(copy, args.tests):
            sys.exit("the tests fail on the source as it is")
        for description, file, text in random.Random(args.seed).sample(every, args.count):
            original = (copy / file).read_text()
            (copy / file).write_text(text)
            survived = passes(copy, args.tests)
            (copy / file).write_text(original)
            caught += not survived
            print("survived" if survived else "caught  ", description, flush=True)
    print(f"caught {caught} of {args.count}")


if __name__ == "__main__":
    main()
