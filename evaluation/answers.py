"""Base models and runs answer the same prompts, side by side: `python eval.py answers RUN ...`."""

from pathlib import Path

import utils
from evaluation.losses import base_of, is_model_folder, load_trained
from evaluation.runs import Run, check_output
from evaluation.texts import markdown_table
from evaluation.winrate import read_prompts, respond
from utils import UserError


def base_columns(bases):
    """{base model: the name of its column}: "base" for a single one, else the model's name too.

    bases: the base model of every run, None for a model that is no run.
    """
    different = list(dict.fromkeys(base for base in bases if base is not None))
    if len(different) == 1:
        return {different[0]: "base"}
    names = [Path(base).name for base in different]
    return {base: f"base {name if names.count(name) == 1 else base}"
            for base, name in zip(different, names, strict=True)}


def side_by_side(names, prompts, max_new_tokens=256, device="auto"):
    """A Markdown table: every prompt answered greedily by each run and by each base model.

    names: run folders and models. A base model stands before the first run that began with it. A
    run whose name is taken gets its whole path as its name.
    """
    bases = [None if is_model_folder(name) else base_of(Run(name)) for name in names]
    columns = base_columns(bases)
    answers = {}
    for name, base in zip(names, bases, strict=True):
        model, tokenizer, run = load_trained(name, device)
        options = {"max_new_tokens": max_new_tokens,
                   "template": getattr(run.args, "template", None) if run else None}
        if run is not None and columns[base] not in answers:
            with model.disable_adapter():
                answers[columns[base]] = respond(model, tokenizer, prompts, **options)
        title = run.name if run else str(name)
        if title in (*columns.values(), *answers):
            title = str(Path(name).absolute())
        answers[title] = respond(model, tokenizer, prompts, **options)
    return markdown_table(["prompt", *answers],
                          [[p, *row] for p, *row in zip(prompts, *answers.values(), strict=True)])


def print_answers(args):
    """`python eval.py answers`: the table on the terminal or in --out."""
    if args.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {args.max_new_tokens}: must be 1 or more")
    if args.out:
        check_output(args.out, *args.runs, *([args.prompts] if args.prompts else []))
    prompts = args.prompt + (read_prompts(args.prompts) if args.prompts else [])
    if not any(prompt.strip() for prompt in prompts):
        raise UserError("answers: give --prompt TEXT or --prompts FILE, not empty")
    text = side_by_side(args.runs, prompts, args.max_new_tokens, args.device)
    utils.write_atomic(args.out, text) if args.out else print(text, end="")
