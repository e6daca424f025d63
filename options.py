"""The arguments of both training scripts, by group: one home for every default and every check."""

import argparse
import math
import os

from data.tokens import TEMPLATE
from selector import penalty
from toy import corpus
from utils import UserError

RECIPES = ".cache/recipes"  # where `python -m paper.recipes` writes the paper's data sets
# Published values (section 5, appendix D) and nothing else; what the paper leaves out is a default.
PAPER = {"lora_rank": 16, "lora_alpha": 16, "lr": 5e-6, "batch": 32, "micro_batch": 8, "epochs": 3,
         "rho_start": 0.1, "rho_step": 0.1, "omega_lr": 1e-4, "omega_optimizer": "adam",
         "omega_loss": "next", "omega_start": "zero", "gradient_checkpointing": True,
         "correction": 0.0}
OF_BDS = ("rho_start", "rho_step", "omega_lr", "omega_optimizer", "omega_loss", "omega_start",
          "center", "correction")
QUALITY = {"lower": f"{RECIPES}/alpaca-cleaned.jsonl", "upper": f"{RECIPES}/openorca.jsonl"}
SAFETY = {"lower": f"{RECIPES}/redorca.jsonl", "upper": f"{RECIPES}/blueorca.jsonl"}
LLAMA = PAPER | {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "lower_limit": 56000}
PRESETS = {
    "pythia-1b-quality": PAPER | QUALITY | {"model": "EleutherAI/pythia-1b", "lower_limit": 9600},
    "llama3-8b-quality": LLAMA | QUALITY,
    "llama3-8b-safety": LLAMA | SAFETY,
    # A tiny model, and hundreds of steps where the paper's takes thousands. Its rows can be fitted
    # to a loss near zero, so the paper's Assumption 1 holds: no correction.
    "toy": {"model": str(corpus.MODEL), "lr": 1e-3, "omega_lr": 30.0, "micro_batch": 32,
            "max_length": 128, "correction": 0.0, "omega_start": "zero"},
}


def add_arguments(parser):
    """The arguments of both training scripts, in five groups."""
    add_data_arguments(parser.add_argument_group("data (without any: the embedded toy)"))
    add = parser.add_argument_group("model").add_argument
    add("--model", help="base model: hub name, local folder or GGUF file")
    add("--adapter", help="start from this LoRA adapter, with its rank and alpha")
    add("--lora-rank", type=int, default=16, help="(16)")
    add("--lora-alpha", type=int, default=16, help="(16)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float64"), default="auto",
        help="of the base; auto: bfloat16 on CUDA, and for hidden sizes from 512 on CPUs that "
        "multiply it, else float32; the adapter is float32")
    add("--four-bit", action="store_true", help="NF4 base through bitsandbytes")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    add("--fsdp", action="store_true",
        help="split the base over torchrun's processes, when it does not fit one GPU")
    add = parser.add_argument_group("theta").add_argument
    add("--lr", type=float, default=2e-4, help="beta, step size of theta (5e-6)")
    add("--schedule", choices=("constant", "cosine"), default="constant")
    add("--clip", type=float, default=1.0, help="largest gradient norm of theta; inf: no clipping")
    add("--batch", type=int, default=32, help="rows of each level a step (32)")
    add("--micro-batch", type=int, default=8, help="rows of each level a forward (8)")
    add("--epochs", type=int, default=3, help="passes over the lower rows (3)")
    add = parser.add_argument_group("omega").add_argument
    add("--rho-start", type=float, default=0.1, help="rho of the first epoch (0.1)")
    add("--rho-step", type=float, default=0.1, help="rho's growth an epoch (0.1)")
    add("--omega-lr", type=float, default=10.0, help="alpha, step size of omega (1e-4 with adam)")
    add("--omega-optimizer", choices=("adam", "sgd"), default="sgd", help="(adam)")
    add("--omega-loss", choices=("next", "current"), default="next",
        help="C at theta^{k+1} or theta^k (next)")
    add("--center", action="store_true", help="subtract a running mean of past losses from C")
    add("--correction", type=float, default=0.7,
        help="A in C = L(theta) - A L(theta_hat): 0 the paper's, 1 the value function (0)")
    add = parser.add_argument_group("run").add_argument
    add("--preset", choices=PRESETS, help="the paper's published values; toy: of the embedded toy")
    add("--out", default="runs/latest", help="run folder")
    add("--seed", type=int, default=0)
    add("--keep-fraction", type=float, default=0.8, help="share of the lower rows marked kept")
    add("--skip-scores", action="store_true", help="no final losses of rows, no row tests")
    add("--save-every", type=int, default=200, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue the run in --out, bit for bit")
    add("--merge", action="store_true", help="also save the merged model")
    add("--dry-run", action="store_true", help="print rows, tokens, steps, memory, disk; stop")


def add_data_arguments(group):
    """Where the rows come from and how they are read; baselines/ takes the same."""
    add = group.add_argument
    add("--lower", help="noisy rows D-: hub name[:config][@split], folder[@split], or a json, "
        "jsonl, parquet or csv file")
    add("--upper", help="trusted rows D, same kinds of source")
    add("--upper-heldout", help="trusted rows never trained on (default: a tenth of --upper, at "
        "most 500)")
    add("--lower-heldout", help="clean rows of the lower level's kind, never trained on")
    for level in ("lower", "upper"):
        add(f"--{level}-columns", help="names of unknown columns: prompt=question,response=answer")
        add(f"--{level}-limit", type=int, help="a seeded random subset of so many rows")
    add("--template", help=f"plain template (default: the chat template, else {TEMPLATE!r})")
    add("--turns", choices=("last", "all"), default="last", help="assistant turns that carry loss")
    add("--max-length", type=int, default=2048,
        help="tokens a row: longer responses are cut, prompts of so many are dropped (2048)")
    add("--upper-loss", choices=("sft", "dpo"), default="sft",
        help="dpo: the upper rows are preference pairs, the base is the reference")
    add("--dpo-beta", type=float, default=0.1, help="beta of --upper-loss dpo")
    add("--allow-overlap", action="store_true", help="training prompts may be held out as well")
    add("--cache-dir", default=".cache",
        help="tokenised rows live here, and what the base model says of them")


def parse(parser, argv, presets=PRESETS):
    """Arguments with the preset's values below the command line's; checks of single values.

    args.toy: the rows are those of the embedded toy, none were named.
    """
    first, _ = parser.parse_known_args(argv)
    toy = first.lower is first.upper is first.model is None and first.preset in (None, "toy")
    if toy or first.preset:
        parser.set_defaults(**presets["toy" if toy else first.preset])
    args = parser.parse_args(argv)
    args.toy = toy
    check_values(args)
    # Parsed onto None for every flag: what is not None then was given.
    given = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args)))))
    refine = getattr(args, "refine", None)
    none_written = refine in ("drop", "original")
    unread = [name for names, is_unread in (
        ((*OF_BDS, *["keep_fraction"] * args.skip_scores), args.method in ("mix", "sft")),
        (("lora_rank", "lora_alpha"), args.adapter), (("num_answers", "temperature"), none_written),
        (("ratio", "max_log_ratio"), refine not in (None, "generate")),
        (("max_log_ratio",), refine == "generate" and args.ratio == "lambda"),
        (("dpo_beta",), args.upper_loss != "dpo"), (("epochs",), getattr(args, "token_budget", 0)),
        (("k_gen",), none_written and args.mask != "dynamic"),  # the first refresh draws the mask
        (("first_refresh",), none_written and args.mask not in ("static", "dynamic")),
        (("upper_limit", "upper_columns"), not (args.upper or args.toy))) if is_unread
        for name in names]
    flags = [f"--{name.replace('_', '-')}" for name in unread if given[name] is not None]
    if flags and os.environ.get("RANK", "0") == "0":
        print(f"not read by this run: {', '.join(flags)}")
    if not toy:
        for name in ("lower", "upper", "model"):
            if getattr(args, name) is None and not (name == "upper" and args.method == "sft"):
                raise UserError(f"--{name} is missing; give --lower, --upper and --model, or none "
                                "of them for the embedded toy")
    for name in ("model", "adapter"):  # a run is looked at from other folders too
        if getattr(args, name) and os.path.exists(getattr(args, name)):
            setattr(args, name, os.path.abspath(getattr(args, name)))
    return args


def check_values(args):
    """`UserError` for a value that no run can have, whatever the data."""
    check_seed(args.seed)
    at_least_one(args, "batch", "micro_batch", "epochs", "save_every", "lora_rank", "lora_alpha",
                 "max_length")
    for name in ("lr", "omega_lr"):
        if not 0 <= getattr(args, name) <= 1e30:  # float32 ends at 3e38
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a finite "
                            "number, 0 or more and at most 1e30")
    if not args.clip > 0:
        raise UserError(f"--clip {args.clip}: must be above 0, or nothing is trained; inf is no "
                        "clipping")
    if args.upper_loss == "dpo" and not args.toy and args.upper is None:
        raise UserError("--upper-loss dpo: needs preference pairs as --upper")
    if not 0 < args.dpo_beta < math.inf:
        raise UserError(f"--dpo-beta {args.dpo_beta}: must be a finite number above 0")
    if not 0 <= args.correction <= 1:
        raise UserError(f"--correction {args.correction}: must lie in [0, 1]")
    if args.skip_scores and args.method == "bds" and args.omega_start == "tests":
        raise UserError("--skip-scores: the row tests start omega; take --omega-start zero as well")
    if not 0 < args.keep_fraction <= 1:
        raise UserError(f"--keep-fraction {args.keep_fraction}: must lie in (0, 1]")
    if args.fsdp and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError("--fsdp: splits the base over several processes; start them with torchrun "
                        "--nproc-per-node N")
    if args.fsdp + args.four_bit + args.merge > 1:
        raise UserError("--fsdp, --four-bit and --merge: one of them (rounded to 4 bits, a merged "
                        "adapter is lost); merge the finished run's adapter into the whole base")


def check_seed(seed):
    """`UserError` for a --seed that torch or numpy cannot take."""
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed}: must lie between 0 and 2**63 - 1")


def at_least_one(args, *names):
    """`UserError` unless each of these arguments is None or 1 or more (and below 2^31)."""
    for name in names:
        if getattr(args, name) is not None and not 1 <= getattr(args, name) < 2**31:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more "
                            "and below 2147483648")


def penalties(args):
    """(rho_k, gamma_k) of every epoch; a rho that leaves (0, 1) is an error before any start."""
    try:
        gammas = [penalty(epoch, args.rho_start, args.rho_step) for epoch in range(args.epochs)]
        return [(round(gamma / (1 + gamma), 12), gamma) for gamma in gammas]  # 0.6, not 0.59999...
    except ValueError as error:
        raise UserError(f"--epochs {args.epochs}: {error}; use fewer epochs or a smaller "
                        "--rho-step") from None
