"""Zero-shot question answering through lm-evaluation-harness, with the model in memory.

    python eval.py qa RUN --tasks arc_easy,piqa                  questions from the hub
    python eval.py qa RUN --tasks arc_easy,piqa --local FOLDER   from FOLDER/TASK.jsonl

Local rows have question, choices (a list) and label (an index); a file may be arc_easy.jsonl or
arc-easy.jsonl. The task files in qa_tasks/ ask as the harness asks: prompts, scores (acc: the
log-likelihood; acc_norm: divided by the answer's length in characters) and names are its own. The
question is the sentence with its "_" for WinoGrande, the goal for PIQA.

The harness reseeds and draws from global generators: their states are put back, so that an
evaluation in the middle of a training run does not change the run.
"""

import contextlib
import copy
import json
import logging
import random
from pathlib import Path

import numpy as np
import torch

import utils
from evaluation.losses import load_trained
from evaluation.runs import check_output, each_line
from evaluation.texts import show_table
from utils import UserError, first_line

TASKS = Path(__file__).parent / "qa_tasks"


@contextlib.contextmanager
def untouched_generators():
    """Every global random state as it was before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def local_file(folder, task):
    """The rows of a task in a folder, checked: a broken row would surface deep in the harness."""
    files = [Path(folder) / f"{name}.jsonl" for name in (task, task.replace("_", "-"))]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        raise UserError(f"{files[0]}: no such file (nor {files[1].name})")
    for place, row in each_line(path):
        row = row if isinstance(row, dict) else {}
        label, choices = row.get("label"), row.get("choices")
        if not (type(label) is int and isinstance(row.get("question"), str)
                and isinstance(choices, list) and all(isinstance(c, str) for c in choices)
                and 0 <= label < len(choices)):
            raise UserError(f"{place}: a row needs question (text), choices (a list of texts) and "
                            "label (an index into choices)")
        if task == "winogrande" and ("_" not in row["question"] or len(choices) != 2):
            raise UserError(f"{place}: WinoGrande needs a sentence with _ and two choices")
    return str(path.absolute())


def local_task(folder, task):
    """A task file's configuration with a folder's rows as its data."""
    import yaml

    config = yaml.safe_load((TASKS / f"{task}.yaml").read_text())
    return config | {"dataset_kwargs": {"data_files": {"test": local_file(folder, task)}}}


def harness():
    """The harness's parts, or one clear line."""
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError("lm-evaluation-harness is not installed: pip install 'lm_eval[hf]==0.4.13' "
                        f"({error})") from None
    return lm_eval.simple_evaluate, HFLM, TaskManager


def evaluate(model, tokenizer, tasks, local=None, limit=None, batch_size=8):
    """{task: {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "n"}}, shares of questions.

    model: a causal LM or a PeftModel in memory, left in the mode it was in. local: a folder of
    question files, None for the hub. The adapter counts if it is switched on.
    """
    simple_evaluate, HFLM, TaskManager = harness()
    known = {file.stem for file in TASKS.glob("*.yaml")}
    if local is not None and not set(tasks) <= known:
        raise UserError(f"--tasks {', '.join(sorted(set(tasks) - known))}: no local task of this "
                        f"name; known: {', '.join(sorted(known))}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    wanted = [task if local is None else local_task(local, task) for task in tasks]
    training = model.training
    with untouched_generators():
        try:
            # One bootstrap round asks for standard errors; that of a mean is exact, none is drawn.
            manager = TaskManager(include_defaults=local is None)
            results = simple_evaluate(
                HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=batch_size),
                tasks=wanted, num_fewshot=0, limit=limit, task_manager=manager, log_samples=False,
                bootstrap_iters=1, random_seed=None, numpy_random_seed=None,
                torch_random_seed=None, fewshot_random_seed=None)
        except (ConnectionError, OSError, KeyError, ValueError) as error:
            raise UserError(f"--tasks {','.join(tasks)}: the harness cannot load or run them "
                            f"({first_line(error)}); without a network pass --local FOLDER"
                            ) from None
        finally:
            model.train(training)
    figures = {}
    for task in tasks:
        values = results["results"][task]
        figures[task] = {key: values.get(f"{key},none") for key in
                         ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")}
        figures[task]["n"] = results["n-samples"][task]["effective"]
    return figures


def run_qa(args):
    """`python eval.py qa`: a table of accuracies with standard errors, and a RESULT line."""
    tasks = [task for task in args.tasks.replace(" ", "").split(",") if task]
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"--tasks {args.tasks}: name each task once, separated by commas")
    for name in ("limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    harness()  # both before the model is loaded
    questions = [local_file(args.local, task) for task in tasks] if args.local is not None else []
    if args.out:
        check_output(args.out, args.runs, *questions)
    model, tokenizer, run = load_trained(args.runs, args.device)
    with model.disable_adapter() if args.base and run else contextlib.nullcontext():
        figures = evaluate(model, tokenizer, tasks, args.local, args.limit, args.batch_size)
    print("zero-shot accuracy; chance is one over the number of choices")
    show_table(["task", "acc", "± s.e.", "acc_norm", "± s.e.", "n"],
               [[task, *values.values()] for task, values in figures.items()])
    if args.out:
        utils.write_atomic(args.out, json.dumps(figures, indent=2) + "\n")
    print("RESULT " + json.dumps(figures))
