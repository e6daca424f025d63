"""The rules of the house: what may import what, how much a reader of one step has to read."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPYABLE = ("selector.py", "bmo_weights.py", "logprobs.py", "detect.py",
            "data/text_reasons.py")
ROOMS = ("evaluation", "paper", "benchmarks", "theory")  # no step of the method needs them
FILES = sorted(path for path in ROOT.glob("**/*.py")
               if not {"tests", ".venv", ".cache", "runs"} & set(path.relative_to(ROOT).parts))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def imports_of(path):
    """The project's modules that a file imports; an import inside a function counts."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name in MODULES} - {module_of(path)}


IMPORTS = {name: imports_of(path) for name, path in MODULES.items()}


def closure(*names):
    """Everything that these modules import, directly or not, and themselves."""
    seen, wanted = set(), list(names)
    while wanted:
        name = wanted.pop()
        if name not in seen:
            seen.add(name)
            wanted += IMPORTS[name]
    return seen


def lines(names):
    return sum(len(MODULES[name].read_text().splitlines()) for name in names)


def test_no_import_circles():
    circles = [name for name in MODULES
               if any(name in closure(other) for other in IMPORTS[name])]
    assert not circles


@pytest.mark.parametrize("name", COPYABLE)
def test_copyable_files_import_nothing_of_the_project(name):
    assert not imports_of(ROOT / name)


def test_the_method_never_imports_the_rooms_around_it():
    """Root files and the rooms that they stand on; eval.py is the front of evaluation."""
    for name, found in IMPORTS.items():
        if name.split(".")[0] not in (*ROOMS, "eval", "baselines"):
            assert not {other for other in found if other.split(".")[0] in ROOMS}, name
    assert not [name for name, found in IMPORTS.items() if "eval" in found]


@pytest.mark.parametrize("name", ["train_offline", "train_online", "eval", "baselines.__main__",
                                  "paper.__main__", "theory.__main__", "benchmarks.__main__",
                                  "toy.__main__"])
def test_utils_is_imported_before_torch(name):
    """It sets what torch's threads read when they are loaded."""
    seen = []

    def visit(module):
        if module in seen:
            return
        seen.append(module)
        for node in ast.parse(MODULES[module].read_text()).body:
            found = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                     [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                     if isinstance(node, ast.ImportFrom) else [])
            for other in found:
                if other.split(".")[0] in ("torch", "transformers", "peft", "datasets"):
                    seen.append("torch")
                if other in MODULES:
                    visit(other)
    visit(name)
    assert seen.index("utils") < seen.index("torch")


def test_sizes():
    """At most 17 files at the root, a tiny utils.py, no function longer than a screen."""
    assert len([path for path in FILES if path.parent == ROOT]) <= 17
    assert lines(["utils"]) <= 120
    longest = max((node.end_lineno - node.lineno + 1, module_of(path), node.name)
                  for path in FILES for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.FunctionDef))
    print("\nlongest function:", *longest)
    assert longest[0] <= 60, longest


def test_losses_and_steps_take_values_and_not_the_arguments():
    for name in ("batches", "upper", "ranking", "models", "logprobs", "selector", "bmo_weights",
                 "generate"):
        assert " args." not in MODULES[name].read_text().replace("(args.", " args."), name
    for name in ("train_offline", "train_online"):
        for node in ast.parse(MODULES[name].read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in (
                    "descend", "omega_losses", "lower_terms", "answer_weights", "new_mask",
                    "answer", "step_answers", "mean_answer_losses", "step_metrics"):
                assert not {a.arg for a in node.args.args} & {"args", "run"}, node.name


TRACER = """
import os, runpy, sys
root, entered = sys.argv[1] + os.sep, {}
sys.path.insert(0, root)
from runtime import monitor

def trace(frame, event, argument):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(root) and os.sep + ".venv" not in file:
        entered.setdefault(file.removeprefix(root))

def second_step(*values, end_step=monitor.end_step):
    end_step(*values)
    sys.setprofile(None if entered else trace)

script, sys.argv, monitor.end_step = sys.argv[2], sys.argv[2:], second_step
try:
    runpy.run_path(root + script, run_name="__main__")
finally:
    print("ENTERED", *entered)
"""


def entered_by_a_step(script, tmp_path, files, folder, *words):
    """Project files that the second step of a real run enters, in order, a refresh included."""
    done = subprocess.run(
        [sys.executable, "-c", TRACER, str(ROOT), script, "--lower", files["lower"], "--upper",
         files["upper"], "--model", str(folder), "--out", str(tmp_path / script), "--cache-dir",
         str(tmp_path / "cache"), "--batch", "4", "--epochs", "1", "--max-length", "64", *words],
        capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def test_what_a_reader_of_one_step_has_to_read(tmp_path, files, folders):
    """Both counts, and the order in which a row meets the files: the README's reading order."""
    paths = files(lower=12, upper=16)
    order = ["train_offline.py"]
    order += entered_by_a_step("train_offline.py", tmp_path, paths, folders["llama"])
    order += ["train_online.py"]
    order += entered_by_a_step("train_online.py", tmp_path, paths, folders["llama"],
                               "--max-new-tokens", "4", "--ratio-masked", "1", "--k-gen", "1")
    order = list(dict.fromkeys(order))
    step = sum(len((ROOT / name).read_text().splitlines()) for name in order)
    whole = lines(closure("train_offline", "train_online"))
    print(f"\na traced step: {step} lines in {len(order)} files: {', '.join(order)}\n"
          f"import closure of both scripts: {whole} lines")
    assert {"batches.py", "logprobs.py", "selector.py", "bmo_weights.py", "generate.py"} <= set(
        order)
    assert step <= 2600 and whole <= 7020


def test_a_name_has_one_meaning():
    """No two modules define a public function or class of one name; what is listed is the same
    thing twice: command lines, the two scripts' steps, the parts of the theory."""
    same = {"main", "parse_args", "descend", "measure", "print_table"}
    homes = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_":
                homes.setdefault(node.name, []).append(name)
    assert not {name: where for name, where in homes.items()
                if len(where) > 1 and name not in same}
