"""Speed and memory: every figure a median with its spread, and a ratio inside the same run.

    python -m benchmarks logprob     head and log-probs against the obvious way and other libraries
    python -m benchmarks step        a training step: BDS, online, plain SFT, two padded forwards
    python -m benchmarks floor       a forward and a LoRA step against their bare matrix products
    python -m benchmarks accuracy    log-probs of a bfloat16 base against float32
    python -m benchmarks generate    answers a second, and what folding, sorting and batching buy
    python -m benchmarks selector    omega's step at 10^4 to 10^8 rows, against its optimiser
    python -m benchmarks data        tokenising, start-up, ranking, memory at 10^5 to 10^7 rows
    python -m benchmarks table2      the paper's runtime table, from steps measured here
    python -m benchmarks gpu         all that needs a GPU; it may be cut short (GPU.md)

`--json FILE` saves the figures with the command, date, commit, hardware and versions. Without flags
all but `accuracy` run on the embedded toy. What a figure is compared with stands at the top of its
file.
"""

import argparse
import importlib
import sys
from pathlib import Path

from runtime import command
from utils import UserError

# command: (module, function, default of --rounds, help). A module is imported when it is wanted:
# `gpu --rehearse` must set what Triton reads first.
COMMANDS = {
    "logprob": ("logprob", "bench_logprob", 9, "head and log-probs"),
    "step": ("step", "bench_step", 7, "a training step"),
    "floor": ("floor", "bench_floor", 5, "a forward and a step against their matrix products"),
    "accuracy": ("accuracy", "bench_accuracy", None, "log-probs in bfloat16 against float32"),
    "generate": ("generation", "bench_generate", 3, "answers a second"),
    "selector": ("selector", "bench_selector", 5, "omega's step"),
    "data": ("data", "bench_data", 3, "rows without a model"),
    "table2": ("table2", "bench_table2", 5, "the paper's runtime table"),
    "gpu": ("gpu", "bench_gpu", None, "all that needs a GPU; it may be cut short"),
}
COUNTS = ("rounds", "micro_batch", "batch", "prompts", "max_new_tokens", "generation_batch",
          "lower_tokens", "upper_tokens", "vocabulary", "max_length", "rows")


def add_model(add, name):
    """The flags of the benchmarks that run a model."""
    add("--model", help="folder or hub name; or random weights of the shape pythia-1b, llama3-8b, "
                         "tiny or tiny-neox")
    add("--lower-tokens", type=int, default=160, help="mean length of random lower rows")
    add("--upper-tokens", type=int, default=400, help="mean length of random upper rows")
    add("--gradient-checkpointing", action="store_true")
    if name in ("step", "floor", "generate"):
        add("--lower", help="rows of the noisy level, as in train_offline.py")
        add("--upper", help="rows of the trusted level")
        add("--vocabulary", type=int, help="random weights of the model's shape with so many "
                                           "tokens in the head")
    if name in ("step", "table2"):
        add("--micro-batch", type=int, default=8, help="rows of each level a forward (8)")
    if name == "step":
        add("--batch", type=int, help="rows of each level a step (CUDA: 32, CPU: 8)")
    if name == "floor":
        add("--batch", type=int, default=8, help="rows of each level (8)")
        add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
            help="of the base, as in train_offline.py")
    if name in ("generate", "table2"):
        add("--max-new-tokens", type=int, default=64 if name == "generate" else 512)
        add("--generation-batch", type=int, default=64, help="answers at a time (64)")
    if name == "generate":
        add("--prompts", type=int, default=128)


def add_gpu(add):
    add("--out", default="gpu-results", help="folder of the results; those of an earlier call in "
                                             "it are kept (gpu-results)")
    add("--minutes", type=float, default=9, help="of this call; what is not done is left to the "
                                                 "next (9)")
    add("--rehearse", action="store_true", help="every step at tiny sizes, on the CPU")
    add("--model", help="folder of a model for Table 1 on text, with --lower and --upper")
    add("--lower", help="its noisy rows")
    add("--upper", help="its trusted rows")


def parse_args(argv):
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed and memory, "
                                     "with a peer or a floor beside every figure.")
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, (_, _, rounds, text) in COMMANDS.items():
        add = commands.add_parser(name, help=text).add_argument
        if name == "gpu":
            add_gpu(add)
            continue
        add("--json", help="save settings and results here")
        if name == "accuracy":
            add("--model", help="folder, GGUF file or hub name")
            add("--lower", help="rows, as in train_offline.py")
            add("--rows", type=int, default=100, help="a random subset of so many rows (100)")
            add("--cache-dir", default=".cache", help="tokenised rows live here")
        else:
            add("--rounds", type=int, default=rounds, help="timed calls of every variant")
        if name != "data":
            add("--device", default="auto", help="auto, cpu, cuda")
        if name == "logprob":
            add("--sizes", type=int, nargs=3, metavar=("T", "D", "V"),
                help="tokens, width, vocabulary (CUDA: 16384 4096 128256; CPU: 512 256 32000)")
        if name in ("selector", "data"):
            add("--sizes", type=int, nargs="+", metavar="N", help="numbers of rows")
        if name == "data":
            add("--folder", help="where the generated rows go (default: the system's; 10^7 rows "
                                 "need about 6 GB)")
        if name in ("floor", "accuracy"):
            add("--max-length", type=int, default=2048, help="tokens a row (2048)")
        if name in ("step", "floor", "generate", "table2"):
            add_model(add, name)
    return parser.parse_args(argv)


def check(args):
    for name in COUNTS:
        if getattr(args, name, None) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    if min(getattr(args, "sizes", None) or [1]) < 1:
        raise UserError(f"--sizes {args.sizes}: must be 1 or more")
    if getattr(args, "json", None) and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: no such folder")
    if args.benchmark == "gpu" and not args.minutes > 0:
        raise UserError(f"--minutes {args.minutes}: must be more than 0")


def main(argv=None):
    args = parse_args(argv)
    check(args)
    args.words = " ".join(  # saved for others, to whom this machine's folders say nothing
        Path(word).name if Path(word).is_absolute() else word
        for word in (sys.argv[1:] if argv is None else argv))
    module, function = COMMANDS[args.benchmark][:2]
    getattr(importlib.import_module(f"benchmarks.{module}"), function)(args)


if __name__ == "__main__":
    command.run(main)
