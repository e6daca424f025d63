"""What both training scripts share: arguments, the four sets of rows, the ranking at the end.

The method itself is in the scripts; nothing here takes a gradient.
"""

import hashlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pyarrow.compute
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

import data
import loading
import toy
import utils
from eval import SPARE_ROW, exact_match, mean_losses, ranking_metrics, row_losses, table
from selector import penalty
from utils import UserError

# --- arguments ------------------------------------------------------------------------------------

# Published values (section 5, appendix D) and nothing else; what the paper leaves out is a default.
PAPER = {"lora_rank": 16, "lora_alpha": 16, "lr": 5e-6, "optimizer": "adam", "batch": 32,
         "micro_batch": 8, "epochs": 3, "rho_start": 0.1, "rho_step": 0.1, "omega_lr": 1e-4,
         "omega_optimizer": "adam", "omega_loss": "next", "max_prompt": 2048,
         "gradient_checkpointing": True, "correction": 0.0}
PRESETS = {
    "pythia-1b-quality": PAPER | {
        "model": "EleutherAI/pythia-1b", "lower": "alpaca-cleaned", "lower_limit": 9600,
        "upper": "openorca"},
    "llama3-8b-quality": PAPER | {
        "model": "meta-llama/Meta-Llama-3-8B-Instruct", "lower": "alpaca-cleaned",
        "lower_limit": 56000, "upper": "openorca"},
    "llama3-8b-safety": PAPER | {
        "model": "meta-llama/Meta-Llama-3-8B-Instruct", "lower": "redorca",
        "lower_limit": 56000, "upper": "blueorca"},
}
# The embedded default: a tiny model, and hundreds of steps where the paper's takes thousands. Its
# rows can be fitted to a loss near zero, so the paper's Assumption 1 holds: no correction.
TOY = {"lr": 1e-3, "omega_lr": 30.0, "micro_batch": 32, "max_length": 128, "correction": 0.0}


def add_arguments(parser):
    """The arguments of both training scripts; one home for every default."""
    group = parser.add_argument_group("data (without --lower: the embedded toy)")
    add = group.add_argument
    add("--lower", help="noisy rows D-: hub name[:config], folder, or json/jsonl/parquet/csv file")
    add("--upper", help="trusted rows D, same kinds of source")
    add("--upper-heldout", help="trusted rows never trained on (default: split off --upper)")
    add("--lower-heldout", help="clean rows of the lower level's kind, never trained on")
    add("--heldout-rows", type=int, help="rows split off --upper (default: a tenth, at most 500)")
    for level in ("lower", "upper"):
        add(f"--{level}-split", help="split of a hub name or folder (default: train)")
        add(f"--{level}-columns", help="names of unknown columns: prompt=question,response=answer")
        add(f"--{level}-limit", type=int, help="a seeded random subset of so many rows")
    add("--template", help=f"plain template (default: the chat template, else {data.TEMPLATE!r})")
    add("--turns", choices=("last", "all"), default="last", help="assistant turns that carry loss")
    add("--max-length", type=int, default=2048, help="tokens a row; longer responses are cut")
    add("--max-prompt", type=int, default=2048, help="prompts of so many tokens are dropped (2048)")
    add("--upper-loss", choices=("sft", "dpo"), default="sft",
        help="dpo: the upper rows are preference pairs, the base is the reference")
    add("--dpo-beta", type=float, default=0.1, help="beta of --upper-loss dpo")
    add("--allow-overlap", action="store_true", help="training prompts may be held out as well")
    add("--toy-noise", type=float, default=0.4, help="share of bad lower rows of the toy")
    add("--toy-contrary", type=float, default=0.5,
        help="share of contrary faults among them; noise 0.6 and 2/3 make the conventions even")
    add("--toy-upper", choices=("right", "unrelated"), default="right",
        help="unrelated: trusted rows of other tasks, a null control of the toy")
    add("--cache-dir", default=".cache", help="tokenised rows live here")

    add = parser.add_argument_group("model").add_argument
    add("--model", help="base model: hub name or local folder")
    add("--adapter", help="start from this LoRA adapter, with its rank and alpha")
    add("--lora-rank", type=int, default=16, help="(16)")
    add("--lora-alpha", type=int, default=16, help="(16)")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float64"), default="auto",
        help="of the base; auto: bfloat16 on CUDA, float32 on the CPU; the adapter is float32")
    add("--four-bit", action="store_true", help="NF4 base through bitsandbytes")
    add("--gradient-checkpointing", action="store_true", help="less memory, a third more time")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    add("--fsdp", action="store_true",
        help="split the base over torchrun's processes, when it does not fit one GPU")

    add = parser.add_argument_group("theta").add_argument
    add("--lr", type=float, default=2e-4, help="beta, step size of theta (5e-6)")
    add("--schedule", choices=("constant", "cosine"), default="constant")
    add("--optimizer", choices=("adam", "adam8bit", "paged-adam8bit"), default="adam")
    add("--clip", type=float, default=1.0, help="largest gradient norm of theta")
    add("--batch", type=int, default=32, help="rows of each level a step (32)")
    add("--micro-batch", type=int, default=8, help="rows of each level a forward (8)")
    add("--micro-tokens", type=int, help="tokens a forward, a longer row alone (default: no limit)")
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
    add("--no-omega-gamma", action="store_true", help="omega's step without gamma")

    add = parser.add_argument_group("run").add_argument
    add("--preset", choices=PRESETS, help="the paper's published values")
    add("--out", default="runs/latest", help="run folder")
    add("--seed", type=int, default=0)
    add("--keep-fraction", type=float, default=0.8, help="share of the lower rows marked kept")
    add("--rank-by", choices=("weight", "final", "corrected"), default="weight",
        help="rank by omega's weight, by the loss L under the final model, or (with --correction "
             "A) by L - A L(theta_hat)")
    add("--skip-scores", action="store_true", help="no passes for each row's base and final loss")
    add("--save-every", type=int, default=200, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue the run in --out, bit for bit")
    add("--merge", action="store_true", help="also save the merged model")
    add("--dry-run", action="store_true", help="print rows, tokens, steps, memory, disk; stop")


def parse(parser, argv, presets=PRESETS):
    """Arguments with the preset's values below the command line's; checks of single values."""
    first, _ = parser.parse_known_args(argv)
    if first.preset:
        parser.set_defaults(**presets[first.preset])
    elif first.lower is None and first.upper is None and first.model is None:
        parser.set_defaults(**TOY)
    args = parser.parse_args(argv)
    utils.check_seed(args.seed)
    args.toy = not args.preset and (args.lower, args.upper, args.model) == (None,) * 3
    for name in ("batch", "micro_batch", "micro_tokens", "epochs", "save_every", "lora_rank",
                 "max_length", "heldout_rows"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    for name in ("lr", "omega_lr", "clip"):
        if not 0 <= getattr(args, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be a finite "
                            "number, 0 or more")
    if not 0 < args.dpo_beta < math.inf:
        raise UserError(f"--dpo-beta {args.dpo_beta}: must be a finite number above 0")
    if not 0 <= args.correction <= 1:
        raise UserError(f"--correction {args.correction}: must lie in [0, 1]")
    if args.fsdp and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        raise UserError("--fsdp: splits the base over several processes; start them with torchrun "
                        "--nproc-per-node N")
    if args.fsdp and (args.four_bit or args.merge):
        raise UserError("--fsdp: not with --four-bit or --merge; merge the adapter of the finished "
                        "run instead")
    if args.rank_by == "corrected" and (not args.correction or args.method in ("mix", "sft")):
        raise UserError("--rank-by corrected: needs bilevel training with --correction A")
    if args.skip_scores and args.rank_by != "weight":
        raise UserError(f"--rank-by {args.rank_by}: needs the scores that --skip-scores leaves out")
    if args.upper_loss == "dpo" and args.toy_upper == "unrelated":
        raise UserError("--toy-upper unrelated: its answers have no second convention to make "
                        "preference pairs of; leave out --upper-loss dpo")
    for name in ("toy_noise", "toy_contrary"):
        if not 0 <= getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must lie in [0, 1]")
    if args.upper_loss == "dpo" and not args.toy and args.upper is None:
        raise UserError("--upper-loss dpo: needs preference pairs as --upper")
    if not 0 < args.keep_fraction <= 1:
        raise UserError(f"--keep-fraction {args.keep_fraction}: must lie in (0, 1]")
    if not args.toy:
        for name in ("lower", "upper", "model"):
            if getattr(args, name) is None and not (name == "upper" and args.method == "sft"):
                raise UserError(f"--{name} is missing; give --lower, --upper and --model, or none "
                                "of them for the embedded toy")
    return args


# --- the four sets of rows ------------------------------------------------------------------------

def load_levels(args, tokenizer, context_length):
    """Lower, upper and held-out rows, checked against each other.

    Returns a namespace: lower, upper (None for sft without one), upper_heldout, lower_heldout
    (None without a source): data sets of tokenised rows; reports: {name: report of data.load_rows}.
    """
    try:
        Path(args.cache_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--cache-dir {args.cache_dir}: the folder cannot be made "
                        f"({error.strerror})") from None
    with utils.first_goes_first():
        return _load_levels(args, tokenizer, context_length)


def _load_levels(args, tokenizer, context_length):
    if args.toy:
        upper = "pairs" if args.upper_loss == "dpo" else args.toy_upper
        paths = toy.write(
            Path(args.cache_dir) / "toy" / "-".join(map(str, (
                args.seed, args.toy_noise, args.toy_contrary, upper))),
            seed=args.seed, noise=args.toy_noise, contrary_share=args.toy_contrary, upper=upper)
        sources = {"lower": paths["lower"], "upper": paths["upper"],
                   "upper_heldout": paths["heldout"], "lower_heldout": paths["lower_heldout"]}
    else:
        sources = {"lower": args.lower, "upper": args.upper, "upper_heldout": args.upper_heldout,
                   "lower_heldout": args.lower_heldout}
    levels, reports = {"lower_heldout": None, "upper_heldout": None, "upper": None}, {}
    for name, source in sources.items():
        if source is None:
            continue
        level = name.split("_")[0]  # held-out rows are read the way their level is
        load = data.load_pairs if level == "upper" and args.upper_loss == "dpo" else data.load_rows
        levels[name], reports[name] = load(
            source, tokenizer, name=name, split=getattr(args, f"{level}_split"),
            columns=getattr(args, f"{level}_columns"), template=args.template, turns=args.turns,
            max_length=args.max_length, max_prompt=args.max_prompt, seed=args.seed,
            limit=getattr(args, f"{name}_limit", None), cache_dir=args.cache_dir)
        data.check_lengths(levels[name], context_length, name)
    if levels["upper"] is not None and levels["upper_heldout"] is None:
        count = args.heldout_rows
        if count is None:
            count = max(1, min(500, len(levels["upper"]) // 10))
        levels["upper"], levels["upper_heldout"] = data.split_held_out(
            levels["upper"], count, args.seed)
    _check_overlap(args, levels)
    return SimpleNamespace(**levels, reports=reports)


def _check_overlap(args, levels):
    """Report shared prompts; refuse them between training and held-out rows."""
    present = {name: rows for name, rows in levels.items() if rows is not None}
    if "upper" in present:
        shared = data.prompt_overlap(present["lower"], present["upper"])
        print(f"prompts of lower rows that upper rows have too: {len(shared)}")
    for train in ("lower", "upper"):
        for held_out in ("upper_heldout", "lower_heldout"):
            if train not in present or held_out not in present:
                continue
            shared = data.prompt_overlap(present[train], present[held_out])
            if shared and not args.allow_overlap:
                raise UserError(
                    f"{len(shared)} {train} rows have prompts that are held out in {held_out} "
                    f"(first row_id {shared[0]}): their losses would flatter the run; remove "
                    "them or pass --allow-overlap")
            if shared:
                print(f"warning: {len(shared)} {train} rows share prompts with {held_out}")


def keep_rows(rows, file):
    """The rows that a weights.jsonl, curated.jsonl or kept.jsonl keeps, by row_id and hash."""
    wanted = {}
    for number, entry in enumerate(utils.each_jsonl(file), 1):
        for key in ("row_id", "hash", "rank", "kept"):
            if key not in entry:
                raise UserError(f"{file} line {number}: no {key!r}; a ranking has row_id, hash, "
                                "rank and kept in every line")
        if not isinstance(entry["row_id"], int) or not isinstance(entry["kept"], bool):
            raise UserError(f"{file} line {number}: row_id must be a whole number, and kept true "
                            "or false")
        if entry["kept"]:
            wanted[entry["row_id"]] = entry["hash"]
    ids, hashes = rows["row_id"][:], rows["hash"][:]
    positions = [p for p, row_id in enumerate(ids) if row_id in wanted]
    for p in positions:
        if hashes[p] != wanted[ids[p]]:
            raise UserError(f"{file}: row_id {ids[p]} has hash {wanted[ids[p]]}, the lower rows "
                            f"have {hashes[p]}: the ranking belongs to other data")
    if not positions:
        raise UserError(f"{file}: keeps none of the {len(rows)} lower rows")
    if len(positions) < len(wanted):
        print(f"warning: {len(wanted) - len(positions)} of the {len(wanted)} rows that {file} "
              "keeps are not among the lower rows")
    return rows.select(positions)


def cycle(num_rows, start, count, seed):
    """Positions start .. start + count - 1 of an endless run of seeded permutations -> (count,)."""
    first, last = start // num_rows, (start + count - 1) // num_rows
    order = torch.cat([data.permutation(num_rows, seed, c, stream=1)
                       for c in range(first, last + 1)])
    return order[start - first * num_rows:][:count]


# --- the upper level's loss -----------------------------------------------------------------------

def upper_losses(args, logps, lengths, reference):
    """L_val of the upper examples, (n,) nats.

    sft: the mean over response tokens of every row (Eq. SFT_def). dpo (Rafailov et al. 2023): rows
    come as chosen, rejected, chosen ...; with sums of log-probs,
    -log sigmoid(beta ((log pi(y_c) - log ref(y_c)) - (log pi(y_r) - log ref(y_r)))).
    logps, lengths: (n,) or (2n,); reference: (n,) the reference's log ref(y_c) - log ref(y_r).
    """
    if args.upper_loss == "sft" or not len(logps):
        return -logps / lengths
    return -torch.nn.functional.logsigmoid(dpo_margins(args, logps, reference))


def dpo_margins(args, logps, reference):
    """beta ((log pi(y_c) - log pi(y_r)) - (log ref(y_c) - log ref(y_r))), (n,) from (2n,)."""
    chosen, rejected = logps.view(-1, 2).unbind(1)
    return args.dpo_beta * (chosen - rejected - reference.to(logps))


def reference_margins(args, model, levels, out):
    """log ref(y_c) - log ref(y_r) of upper and held-out pairs under the frozen base, computed once.

    The adapter is switched off; the run folder keeps them. {"upper": (n,), "upper_heldout": (n,)},
    empty tensors under --upper-loss sft.
    """
    if args.upper_loss == "sft":
        return {"upper": None, "upper_heldout": None}
    file = out / "weights" / "reference_margins.safetensors"
    margins = utils.on_first(lambda: load_file(file) if file.exists() else {})
    if not margins:
        with model.disable_adapter():
            for name in ("upper", "upper_heldout"):
                chosen, rejected = pair_logps(model, getattr(levels, name), f"reference, {name}")
                margins[name] = (chosen - rejected).contiguous()
        write_once(file, save(margins))
    return margins


def write_once(file, content):
    """`utils.write_atomic` by the first process, the folder made when it is missing."""
    if utils.rank() == 0:
        file.parent.mkdir(exist_ok=True)
        utils.write_atomic(file, content)


def pair_logps(model, pairs, label=None):
    """(log pi(y_c), log pi(y_r)) of every pair, sums over tokens, no gradient, on the CPU."""
    rows = data.sequences(list(data.tokens_only(pairs)))
    losses, lengths = row_losses(model, rows, label=label)
    return (-losses * lengths).view(-1, 2).unbind(1)


# --- computed at run time -------------------------------------------------------------------------

def micro_batches(args, model, upper_rows, lower_rows):
    """This process's forwards of a step: (upper places, lower places, sequences to pack) each.

    upper_rows, lower_rows: of every row of the step its sequences (a pair has two, a question G).
    Row i is the share of process i mod W. A forward takes at most --micro-batch rows of each level
    and --micro-tokens tokens, or one longer row. A sharded model also gets sequences that belong to
    no row, while other processes have more forwards.
    """
    def parts():
        places, tokens = ([], []), 0
        for i in range(utils.rank(), max(len(upper_rows), len(lower_rows)), utils.world_size()):
            for mine, rows in zip((0, 1), (upper_rows, lower_rows), strict=True):
                if i >= len(rows):
                    continue
                size = sum(len(sequence["input_ids"]) for sequence in rows[i])
                if len(places[mine]) == args.micro_batch or (
                        args.micro_tokens and tokens and tokens + size > args.micro_tokens):
                    yield places
                    places, tokens = ([], []), 0
                places[mine].append(i)
                tokens += size
        if any(places):
            yield places

    for places in utils.together(parts(), model):
        upper, lower = places or ([], [])
        sequences = [s for rows, mine in ((upper_rows, upper), (lower_rows, lower))
                     for i in mine for s in rows[i]]
        if sequences or utils.is_sharded(model):
            yield upper, lower, sequences or [SPARE_ROW]


def coming_rows(num_rows, args, step, steps, total):
    """The distinct lower rows that steps `step` .. `step + steps - 1` read, epochs included."""
    per_epoch, coming = math.ceil(num_rows / args.batch), {}
    for s in range(step, min(step + steps, total)):
        epoch, k = divmod(s, per_epoch)
        order = data.permutation(num_rows, args.seed, epoch, stream=0)
        coming |= dict.fromkeys(order[k * args.batch:][:args.batch].tolist())
    return sorted(coming)


def budget_steps(args, lower):
    """Steps until --token-budget tokens of the lower rows (prompts included) are read."""
    lengths = torch.as_tensor(data.row_lengths(lower))
    epochs, rest = divmod(args.token_budget - 1, int(lengths.sum()))
    order = data.permutation(len(lower), args.seed, epochs, stream=0)
    read = torch.stack([part.sum() for part in lengths[order].split(args.batch)]).cumsum(0)
    return epochs * len(read) + int((read <= rest).sum()) + 1


def learning_rate(args, step, total):
    """beta_k: constant, or a cosine from --lr to zero over the run."""
    if args.schedule == "constant":
        return args.lr
    return args.lr * 0.5 * (1 + math.cos(math.pi * step / total))


def gammas(args):
    """gamma_k of every epoch; a rho that leaves (0, 1) is an error before anything starts."""
    try:
        return [penalty(epoch, args.rho_start, args.rho_step) for epoch in range(args.epochs)]
    except ValueError as error:
        raise UserError(f"--epochs {args.epochs}: {error}; use fewer epochs or a smaller "
                        "--rho-step") from None


def check_vocabulary(levels, config):
    """`UserError` when a row holds a token that the model has no embedding for."""
    size = config.get_text_config().vocab_size
    for name in ("lower", "upper", "upper_heldout", "lower_heldout"):
        rows = getattr(levels, name)
        for part in rows.with_format("arrow").iter(batch_size=10_000) if rows is not None else ():
            largest = max(pyarrow.compute.max(pyarrow.compute.list_flatten(part[column])).as_py()
                          for column in part.column_names if column.endswith("input_ids"))
            if largest >= size:
                raise UserError(f"{name}: the tokenizer writes token {largest}, the model's "
                                f"vocabulary has {size} tokens; they do not belong together")


def print_plan(args, levels, config, steps_per_epoch, total_steps):
    """Rows, tokens, steps, and what memory and disk the run needs, with the arithmetic."""
    rows = {name: getattr(levels, name) for name in
            ("lower", "upper", "upper_heldout", "lower_heldout")}
    check_vocabulary(levels, config)
    if not round(args.keep_fraction * len(levels.lower)):
        raise UserError(f"--keep-fraction {args.keep_fraction}: keeps none of the "
                        f"{len(levels.lower)} lower rows")
    for name, part in rows.items():
        if part is None:
            continue
        report = levels.reports.get(name, {})
        dropped = {why: len(ids) for why, ids in report.get("dropped", {}).items() if ids}
        print(f"{name}: {len(part)} rows, {int(data.row_lengths(part).sum())} tokens"
              + (f", dropped {dropped}" if dropped else "")
              + (f", {report['truncated']} responses cut" if report.get("truncated") else ""))
    processes = utils.world_size()
    print(f"steps: ceil({len(levels.lower)} lower rows / batch {args.batch}) = {steps_per_epoch} "
          f"an epoch, x {total_steps / steps_per_epoch:g} epochs = {total_steps}; "
          f"{math.ceil(args.batch / processes / args.micro_batch)} forwards a step "
          f"(batch {args.batch} / "
          + (f"{processes} processes / " if processes > 1 else "")
          + f"micro batch {args.micro_batch}"
          + (f", of at most {args.micro_tokens} tokens)" if args.micro_tokens else ")"))
    longest = max(int(data.row_lengths(part).max()) for part in rows.values() if part is not None)
    needs = memory_and_disk(args, config, longest, len(levels.lower))
    print(f"memory: about {needs.memory / 2**30:.2f} GiB{' a process' if processes > 1 else ''} "
          f"({needs.parts})")
    print(f"disk: about {needs.disk / 2**20:.0f} MiB in {args.out}")


def memory_and_disk(args, config, longest, num_rows):
    """Bytes that a run needs: a namespace of memory and disk, and parts, memory's sum in words.

    longest: tokens of the longest row; num_rows: lower rows. The answers of an online run to one
    row stand for one row here, and what generation keeps is not counted.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    base = sum(p.numel() for p in model.parameters())
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
              and m is not model.get_output_embeddings()]
    adapter = sum(args.lora_rank * (m.in_features + m.out_features) for m in linear)
    width = 0.5 if args.four_bit else {"bfloat16": 2, "float32": 4, "float64": 8}.get(
        args.dtype, 4 if utils.pick_device(args.device).type == "cpu" else 2)
    tokens = 2 * args.micro_batch * longest
    if args.micro_tokens:
        tokens = min(tokens, max(args.micro_tokens, longest))
    if args.fsdp:  # each process has its share, and whole embeddings and head
        whole = sum(m.weight.numel() for m in (
            model.get_input_embeddings(), model.get_output_embeddings()))
        base = whole + (base - whole) / utils.world_size()
    layers = config.get_text_config().num_hidden_layers
    hidden = config.get_text_config().hidden_size
    # About 34 d bytes a token and layer at two bytes a number; one layer's worth with checkpoints.
    live = (2 * layers + 34) if args.gradient_checkpointing else 34 * layers
    activations = tokens * hidden * live * max(width, 2) / 2
    return SimpleNamespace(
        memory=base * width + adapter * 16 + activations + 12 * num_rows,
        disk=(args.epochs + 6) * 4 * num_rows + 3 * adapter * 12 + num_rows * 200,
        parts=f"base {base / 1e6:.1f}M parameters x {width:g} bytes, adapter {adapter / 1e6:.2f}M "
              f"x 16, activations of at most {tokens} tokens", base=base)


# What a resumed run may change without another result.
FREE_TO_CHANGE = ("out", "resume", "save_every", "dry_run", "cache_dir", "merge", "keep_fraction",
                  "rank_by", "export_format", "fsdp")


def run_config(args, levels, device, dtype):
    """What decides a run: arguments, library versions and machine, the content of every row."""
    rows = {name: getattr(levels, name) for name in
            ("lower", "upper", "upper_heldout", "lower_heldout")}
    return {"args": vars(args), "environment": utils.environment(device, dtype),
            "data": {name: rows_hash(part) for name, part in rows.items() if part is not None}}


def rows_hash(rows):
    """16 hex digits over ids, texts and tokens: a file written again unchanged is the same data."""
    digest = hashlib.sha256()
    for part in rows.with_format("arrow").iter(batch_size=10_000):
        for column in ("row_id", "hash", *data.TOKEN_COLUMNS):
            if column not in part.column_names:
                continue
            values = part[column].combine_chunks()
            if column in data.TOKEN_COLUMNS:
                digest.update(pyarrow.compute.list_value_length(values).to_numpy().tobytes())
                values = values.flatten()
            digest.update("".join(values.to_pylist()).encode() if column == "hash"
                          else values.to_numpy().tobytes())
    return digest.hexdigest()[:16]


# --- losses and the ranking at the end ------------------------------------------------------------

def held_out_metrics(args, model, levels, reference):
    """Mean losses of the held-out rows, and the share of trusted answers given exactly.

    Of preference pairs: the DPO loss, the share of pairs ranked right, the mean margin.
    """
    metrics = {}
    if args.upper_loss == "dpo":
        logps = torch.stack(pair_logps(model, levels.upper_heldout, "upper_heldout"), 1).flatten()
        margins = dpo_margins(args, logps, reference["upper_heldout"])
        metrics = {"upper_heldout": upper_losses(args, logps, None,
                                                 reference["upper_heldout"]).mean().item(),
                   "upper_accuracy": (margins > 0).double().mean().item(),
                   "upper_margin": margins.mean().item()}
    for name in ("upper_heldout", "lower_heldout"):
        rows = getattr(levels, name)
        if rows is not None and name not in metrics:
            metrics |= mean_losses(*row_losses(model, rows, label=name), name)
    if levels.upper_heldout is not None and args.upper_loss == "sft":
        metrics["upper_exact"] = exact_match(model, levels.upper_heldout)
    return metrics


def base_losses(model, rows, out):
    """Every lower row's loss before training; computed once and kept in the run folder."""
    file = out / "weights" / "base_losses.safetensors"
    losses = utils.on_first(lambda: load_file(file)["losses"] if file.exists() else None)
    if losses is None:
        losses, _ = row_losses(model, rows, label="base losses")
        write_once(file, save({"losses": losses.contiguous()}))
    return losses


def base_metrics(args, model, levels, reference, out):
    """{"base/KEY": held-out metric before training}; computed once and kept in the run folder."""
    file = out / "base.json"
    metrics = utils.on_first(lambda: json.loads(file.read_text()) if file.exists() else None)
    if metrics is None:
        metrics = {f"base/{key}": value for key, value in
                   held_out_metrics(args, model, levels, reference).items()}
        write_once(file, json.dumps(metrics) + "\n")
    return metrics


def save_omega(selector, out, epoch):
    """omega after an epoch (0: before the first), always kept."""
    write_once(out / "weights" / f"epoch_{epoch}.safetensors",
               save({"omega": selector.logits.cpu().contiguous()}))


def rank_rows(scores):
    """Ranks 1 (best) to N of (N,) scores, ties in row order."""
    ranks = torch.empty(len(scores), dtype=torch.long)
    ranks[scores.argsort(descending=True, stable=True)] = torch.arange(1, len(scores) + 1)
    return ranks


def row_scores(args, omega, masked, implicit, mask_is_ranked):
    """How good each row's original answer is, (N,): omega, where omega has judged it.

    implicit (N,): the implicit weight at the final model, None without scores. omega has judged a
    masked row's *new* answers, which any model finds likely; its original is judged by the implicit
    weight. Both become rank shares in the row's own group. Rows of a static mask are a random
    sample, as good as the others; those of a mask drawn by the weights were the worst when they
    were masked and come after them.
    """
    if masked is None or args.masked == "original":
        return omega
    scores = omega if implicit is None else torch.where(masked, implicit.to(omega), omega)
    shares = torch.empty(len(scores), dtype=torch.float64)
    for group in (masked, ~masked):
        ranks = rank_rows(scores[group])
        shares[group] = 1 - ranks.double() / (len(ranks) + 1)
    if mask_is_ranked:
        shares[masked] -= 1.0
    return shares


def answer_labels(lower, positions, written, tokenizer, group):
    """Share of right answers by kind of the original, at a refresh of the toy; {} elsewhere."""
    if "kind" not in lower.column_names or not toy.is_toy(lower[positions[0]]["prompt"]):
        return {}
    shares = {}
    for i, position in enumerate(positions):
        row = lower[position]
        for tokens, _ in written[i * group:(i + 1) * group]:
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            shares.setdefault(row["kind"], []).append(toy.kind_of(row["prompt"], text) == "clean")
    return {f"answers_right/{kind}": sum(v) / len(v) for kind, v in sorted(shares.items())}


ROWS_AT_ONCE = 100_000  # lines of a ranking held in memory: 10^7 would take 5 GB


def write_ranking(path, lower, scores, keep_fraction, columns):
    """A ranking, best row first: row_id, hash, rank, kept, the columns, and bad and kind if known.

    scores (N,) higher is better; columns: {name: (N,) tensor}. Returns ranks (N,), kept (N,) bool.
    """
    ranks = rank_rows(scores)
    kept = ranks <= round(keep_fraction * len(ranks))
    columns = {"rank": ranks, "kept": kept, **columns}
    known = [name for name in ("bad", "kind") if name in lower.column_names]

    def lines():
        for block in ranks.argsort().split(ROWS_AT_ONCE):
            part = lower.select(block.tolist())
            found = {"row_id": part["row_id"][:], "hash": part["hash"][:],
                     **{name: values[block].tolist() for name, values in columns.items()},
                     **{name: part[name][:] for name in known}}
            yield from (dict(zip(found, row, strict=True))
                        for row in zip(*found.values(), strict=True))

    if utils.rank() == 0:
        utils.write_jsonl(path, lines())
    return ranks, kept


def label_metrics(lower, scores):
    """Ranking metrics against known bad rows, {"weight/auroc": ...}; {} when labels are unknown."""
    if "bad" not in lower.column_names:
        return {}
    bad = torch.tensor(lower["bad"][:], dtype=torch.bool)
    kinds = lower["kind"][:] if "kind" in lower.column_names else ["bad"] * len(lower)
    return {f"{name}/{key}": value for name, values in scores.items()
            for key, value in ranking_metrics(values, bad, kinds).items()}


def print_label_table(metrics, scores):
    """AUROC, precision and recall by kind of fault, one line a ranking."""
    keys = sorted({k.split("/", 1)[1] for k in metrics if k.split("/")[0] in scores},
                  key=lambda k: (k.count("/"), k))
    rows = [[name, *(metrics.get(f"{name}/{key}") for key in keys)] for name in scores]
    print(table(["ranking by", *keys], rows))


def check_finite(grad_norm, losses, positions, lower, step, out):
    """`UserError` naming the rows when a step's loss or gradient is not a number."""
    if not torch.isfinite(grad_norm):
        bad = [lower[int(p)]["row_id"] for p, ok in
               zip(positions, torch.isfinite(losses).tolist(), strict=True) if not ok]
        raise UserError(f"step {step}: the loss or its gradient is not finite (lower row_ids "
                        f"{bad}); lower --lr or remove these rows, then --resume from the last "
                        f"checkpoint in {out}")


def selector_report(selector, out, epoch):
    """Save omega after an epoch; its diagnostics as metrics, and a warning when it says little."""
    save_omega(selector, out, epoch)
    report = selector.diagnostics()
    if report["uniform"]:
        tqdm.write(f"epoch {epoch}: the weights are still nearly uniform (1 % to 99 % quantile "
                   f"{report['weight_q01']:.3f} to {report['weight_q99']:.3f}); only their order "
                   "informs; a larger --omega-lr spreads them")
    if report["collapsed"]:
        tqdm.write(f"epoch {epoch}: the selector has collapsed onto {report['ess']:.1f} of "
                   f"{len(selector.logits)} rows; lower --omega-lr")
    return {f"omega/{key}": value for key, value in report.items()}


def finish_run(args, out, model, levels, selector, base_losses, reference, masked=None,
               curate=None, everything=None, mask_is_ranked=False):
    """The ranking of every lower row, adapter, final metrics, one table and the RESULT line.

    curate(ranks, kept) writes the curated set of an online run and returns more metrics.
    everything: all lower rows, when the run trained on some of them. mask_is_ranked: the masked
    rows are those that the weights put last.
    """
    lower = levels.lower
    weights = selector.weights().cpu()
    scores, extra = {}, {} if masked is None else {"masked": masked}
    result = {"method": args.method, "seed": args.seed, "rows": len(lower),
              "lower_tokens": int(data.row_lengths(lower).sum())}
    before = base_metrics(args, model, levels, reference, out)
    last = utils.on_first(lambda: utils.read_jsonl(out / "metrics.jsonl")[-1])
    result |= before | {key: last[key] for key in (k.removeprefix("base/") for k in before)}
    implicit = None
    if base_losses is not None:
        final_losses, lengths = row_losses(model, lower, label="final losses")
        implicit = -final_losses           # the implicit weight (Eq. explicit_data_logit)
        scores = {"final": -final_losses, "base": -base_losses, "length": lengths}
        extra |= {"base_loss": base_losses, "final_loss": final_losses, "length": lengths}
        result |= mean_losses(final_losses, lengths, "lower_original")
        if "theta_hat" in model.peft_config:
            with loading.adapter(model, "theta_hat"):
                attainable, _ = row_losses(model, lower, label="attainable losses")
            implicit = scores["corrected"] = args.correction * attainable - final_losses
            extra["attainable_loss"] = attainable
    if args.method in ("bds", "online"):
        scores = {"weight": row_scores(args, selector.logits.cpu(), masked, implicit,
                                       mask_is_ranked)} | scores
    for key, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{out}: {key} under the final model is {value}; lower --lr and start "
                            "again in another --out")
    by = args.rank_by if args.rank_by in scores else next(iter(scores), None)
    if by is not None:
        ranks, kept = write_ranking(out / "weights.jsonl", lower, scores[by], args.keep_fraction,
                                    {"weight": weights, **extra})
        if base_losses is not None:
            result |= mean_losses(final_losses[kept], lengths[kept], "lower_kept")
    if everything is not None and base_losses is not None:
        # The same rows for every method, and the selection that this run was given.
        result |= mean_losses(final_losses, lengths, "lower_kept")
        result |= mean_losses(*row_losses(model, everything, label="all lower losses"),
                              "lower_original")
    labels = label_metrics(lower, scores)
    if masked is not None and labels and not masked.all():
        # omega alone: it has judged the originals of the other rows, and labels are theirs.
        unmasked = (~masked).nonzero().flatten()
        labels |= {key.replace("/", "_unmasked/", 1): value for key, value in label_metrics(
            lower.select(unmasked.tolist()), {n: s[unmasked] for n, s in scores.items()}).items()}
    result |= labels | (curate(ranks, kept) if curate else {})
    if utils.rank() > 0:
        return
    loading.save_adapter(model, out / "adapter")
    if args.merge:
        name = str(toy.MODEL) if args.toy else args.model
        loading.save_pretrained(model.merge_and_unload(), out / "merged",
                                tokenizer=loading.load_tokenizer(name))
    if labels:
        print_label_table(labels, scores)
    print(table(["metric", "value"], [[key, value] for key, value in result.items()
                                      if key not in labels]))
    utils.write_atomic(out / "result.json", json.dumps(result, indent=2) + "\n")
    print("RESULT " + json.dumps(result), flush=True)
