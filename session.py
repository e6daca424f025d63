"""What both training scripts set up and finish alike: rows, plan, model, start or resume, results.

    run = session.plan(args)     rows and steps, printed; --dry-run stops after it
    session.start(run)           model, optimisers, selector; a new run folder, or a resumed one
    monitor.end_step(run, ...)   log, evaluate, save: runtime/monitor.py
    session.finish(run, ...)     the ranking of every lower row, the adapter, one table

The method is in the scripts; nothing here takes a gradient. `run` is a plain namespace: args, the
rows (levels: data sets; lower, upper: their tokens alone), the steps, the model and what trains it.
"""

import contextlib
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import batches
import logprobs
import models
import ranking
from batches import mean_losses, row_losses
from data import sets
from data.layouts import conversation
from data.tokens import end_ids, fact_reader, show_example
from runtime import folder, metrics, monitor, processes
from runtime.cache import cached_columns
from runtime.precision import pick_dtype
from selector import Selector, penalty
from upper import reference_margins
from utils import UserError, content_hash, read_jsonl, table, write_atomic, write_jsonl

# ruff: isort: split
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

# What a resumed run may change: training stays the same. keep_fraction moves `kept`.
FREE_TO_CHANGE = ("out", "resume", "save_every", "dry_run", "cache_dir", "merge", "keep_fraction",
                  "fsdp")
SHOWN = 60  # rows at either end of the ranking whose text the run folder keeps, for the report


# --- before the first step ------------------------------------------------------------------------

def plan(args):
    """Rows, steps and what they need, printed; the `run` that `start` goes on with."""
    device = processes.join_processes(args.device)
    tokenizer, config = models.load_tokenizer(args.model), models.load_config(args.model)
    levels = sets.load_levels(args, tokenizer, models.context_length(config))
    sets.check_vocabulary(row_sets(levels), config)
    all_lower = levels.lower
    if getattr(args, "keep", None):
        kept = ranking.kept_by(levels.lower, args.keep)
        if True not in kept:
            raise UserError(f"{args.keep}: keeps none of the {len(kept)} lower rows")
        levels.lower = levels.lower.select([n for n, one in enumerate(kept) if one])
    run = SimpleNamespace(
        args=args, device=device, tokenizer=tokenizer, config=config, levels=levels,
        all_lower=all_lower, lower=batches.tokens_only(levels.lower), num_rows=len(levels.lower),
        context=models.context_length(config), selects=args.method in ("bds", "online"),
        upper=levels.upper and batches.tokens_only(levels.upper))
    print("trained tokens in brackets: " + show_example(run.lower[0], tokenizer))
    run.steps_per_epoch = math.ceil(run.num_rows / args.batch)
    run.total_steps = run.steps_per_epoch * args.epochs
    if getattr(args, "token_budget", None) is not None:
        run.total_steps = budget_steps(args.token_budget, sets.row_lengths(levels.lower),
                                       args.batch, args.seed)
    if not round(args.keep_fraction * run.num_rows):
        raise UserError(f"--keep-fraction {args.keep_fraction}: keeps none of the {run.num_rows} "
                        "lower rows")
    hidden = config.get_text_config().hidden_size
    if args.adapter:
        models.find_adapter(args.adapter)
    elif args.lora_rank > hidden:
        raise UserError(f"--lora-rank {args.lora_rank}: the model's hidden size is {hidden}; a "
                        "larger rank adds nothing")
    print_plan(run)
    return run


def budget_steps(budget, lengths, batch, seed):
    """Steps until `budget` tokens of the lower rows (prompts included) are read; lengths (N,)."""
    epochs, rest = divmod(budget - 1, int(lengths.sum()))
    order = batches.permutation(len(lengths), seed, epochs, stream=0)
    read = torch.stack([part.sum() for part in lengths[order].split(batch)]).cumsum(0)
    return epochs * len(read) + int((read <= rest).sum()) + 1


def row_sets(levels):
    """{name: rows} of the sets that there are."""
    names = ("lower", "upper", "upper_heldout", "lower_heldout")
    return {name: getattr(levels, name) for name in names if getattr(levels, name) is not None}


def print_plan(run):
    """Rows, tokens, steps, and what memory and disk the run needs, with the arithmetic."""
    args, longest = run.args, 0
    for name, rows in row_sets(run.levels).items():
        lengths = sets.row_lengths(rows)
        longest = max(longest, int(lengths.max()))
        print(f"{name}: {len(rows)} rows, {int(lengths.sum())} tokens"
              + sets.left_out(run.levels.reports.get(name, {})))
    count = processes.world_size()
    print(f"steps: ceil({run.num_rows} lower rows / batch {args.batch}) = {run.steps_per_epoch} "
          f"an epoch, x {run.total_steps / run.steps_per_epoch:g} epochs = {run.total_steps}; "
          f"{math.ceil(args.batch / count / args.micro_batch)} forwards a step "
          f"(batch {args.batch} / "
          + (f"{count} processes / " if count > 1 else "") + f"micro batch {args.micro_batch})")
    if args.batch > run.num_rows:
        print(f"batch {args.batch}: a step reads at most all {run.num_rows} lower rows")
    if run.selects and args.omega_optimizer == "sgd":
        gamma = penalty(args.epochs - 1, args.rho_start, args.rho_step)
        pull = args.omega_lr * gamma / args.batch * (1 - args.correction)
        if pull > 0.5:
            print(f"warning: --omega-lr {args.omega_lr:g}: one reading takes about {pull:.2g} x "
                  "its loss off a row's omega, so rows not yet read will hold all the weight; "
                  f"lower it, for instance to {args.omega_lr * 0.1 / pull:.1g}")
    needs = memory_and_disk(args, run.config, longest, run.num_rows)
    print(f"memory: about {needs.memory / 2**30:.2f} GiB{' a process' if count > 1 else ''} "
          f"({needs.parts})")
    print(f"disk: about {needs.disk / 2**20:.0f} MiB in {args.out}")


def memory_and_disk(args, config, longest, num_rows):
    """Bytes that a run needs: a namespace of memory and disk, and parts, memory's sum in words.

    longest: tokens of the longest row; num_rows: lower rows. The answers of an online run to one
    row stand for one row here, and what generation keeps is not counted.
    """
    model = models.without_weights(config)
    base = sum(p.numel() for p in model.parameters())
    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
              and m is not model.get_output_embeddings()]
    adapter = sum(args.lora_rank * (m.in_features + m.out_features) for m in linear)
    if args.correction and args.method in ("bds", "online"):
        adapter *= 2  # theta_hat
    width = 0.5 if args.four_bit else pick_dtype(
        args.dtype, processes.pick_device(args.device), config).itemsize
    tokens, merged = 2 * args.micro_batch * longest, base * width
    if args.fsdp:  # each process has its share, and whole embeddings and head
        whole = sum(m.weight.numel() for m in (
            model.get_input_embeddings(), model.get_output_embeddings()))
        base = whole + (base - whole) / processes.world_size()
    shape, number = config.get_text_config(), max(width, 2)  # bytes
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    # What backward keeps of a token: of every wide product the output and an activation, and about
    # 23 + 3.5 a byte of the rest. With checkpoints: each layer's input, and one layer's worth.
    wide = sum(m.out_features for m in linear
               if m.out_features == getattr(shape, "intermediate_size", None))
    live = 2 * number * wide + layers * hidden * (23 + 3.5 * number)
    if args.gradient_checkpointing:
        live = layers * hidden * number + live / layers
    return SimpleNamespace(
        memory=base * width + adapter * 16 + tokens * live + 12 * num_rows,
        disk=num_rows * (4 * args.epochs + 224) + 3 * adapter * 12 + args.merge * merged,
        parts=f"base {base / 1e6:.1f}M parameters x {width:g} bytes, adapter {adapter / 1e6:.2f}M "
              f"x 16, activations of at most {tokens} tokens", base=base)


# --- start or resume ------------------------------------------------------------------------------

def start(run):
    """Model, optimisers and selector into `run`, the run folder made or continued.

    Afterwards run.step is the next step, and run.saved what the scripts themselves put into the
    last checkpoint, or None.
    """
    args = run.args
    folder.seed_everything(args.seed)
    base = models.load_model(args.model, run.device, args.dtype, args.four_bit, on_host=args.fsdp)
    tensors = dict(base.named_buffers()) | base.state_dict()  # of a 4-bit base its scales, too
    run.weights = {"base_weights": folder.fingerprint(tensors)}
    model = run.model = models.add_lora(base, args.lora_rank, args.lora_alpha, args.adapter,
                                        args.gradient_checkpointing)
    run.theta = [p for p in model.parameters() if p.requires_grad]
    if args.adapter:
        run.weights["adapter_weights"] = folder.fingerprint(
            {name: p for name, p in model.named_parameters() if p.requires_grad})
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            began = json.loads((Path(args.adapter).parent / "config.json").read_text())["model"]
            if began["base_weights"] != run.weights["base_weights"]:
                print(f"warning: {args.adapter}: began on other base weights or in another dtype")
    run.optimizers = {"theta": torch.optim.Adam(run.theta, lr=args.lr)}
    run.limits = {"clip": args.clip, "micro_batch": args.micro_batch}
    run.omega_options = {"at_next": args.omega_loss == "next", "correction": args.correction}
    if run.selects and args.correction:
        theta_hat = models.add_twin(model, "theta_hat")
        run.optimizers["theta_hat"] = torch.optim.Adam(theta_hat, lr=args.lr)
        run.omega_options |= {"theta_hat": theta_hat, "optimizer": run.optimizers["theta_hat"]}
    if args.fsdp:
        models.shard(model, run.device)
    run.selector = Selector(run.num_rows, args.omega_lr, args.omega_optimizer, args.center,
                            dtype=model.dtype, device=run.device)
    run.out = folder.open_run(args.out, {
        "args": vars(args), "environment": folder.environment(run.device, model.dtype),
        "data": {name: sets.rows_hash(rows) for name, rows in row_sets(run.levels).items()},
        "model": run.weights}, args.resume, FREE_TO_CHANGE)
    run.saved = folder.load_checkpoint(run.out, model)
    run.step = 0
    if run.saved is not None:
        run.step = run.saved["step"]
        run.selector.load_state_dict(run.saved["selector"])
        for name, optimizer in run.optimizers.items():
            optimizer.load_state_dict(run.saved[name])
    run.tests = {} if args.skip_scores else base_tests(run)
    if run.selects and args.omega_start == "tests" and run.saved is None:
        run.selector.logits.copy_(ranking.first_logits(run.tests))
    run.tested = functools.partial(ranking.columns_of_tests, run.tests)  # places -> columns
    run.reference = dict.fromkeys(("upper", "upper_heldout"))
    if args.upper_loss == "dpo":
        run.reference = reference_margins(
            model, {name: getattr(run.levels, name) for name in run.reference}, run.out)
    run.before = base_metrics(run)
    run.metrics_file = metrics.open_metrics(run.out, run.step)
    run.progress = tqdm(total=run.total_steps, initial=run.step, desc=args.method, unit="step")


def before_training(run, file):
    """The model as it was before its first step, while `file` is made, after a resume too."""
    if run.args.adapter is None:  # a fresh adapter adds exact zeros: without it, bit for bit equal
        return run.model.disable_adapter()
    if run.saved is not None:
        raise UserError(f"{file}: missing, and the adapter that the run began with has been "
                        "trained since; restore the file or start a new run")
    return contextlib.nullcontext()


def base_tests(run):
    """{"losses": every lower row's loss before training, and `ranking.row_tests`}, (N,) each.

    Computed once and kept in the run folder; tests.json has what the report shows of them. The
    forwards of every row are made once for a base model and rows, not once a run: runtime/cache.py.
    """
    file, lower = run.out / "weights" / "base_losses.safetensors", run.levels.lower
    saved = folder.read_once(file, lambda f: (columns := load_file(f)) and {
        name: columns[name].view(run.num_rows) for name in ("losses", *columns)})
    if saved is None:
        with before_training(run, file):
            tests, notes = ranking.row_tests(run.model, lower, run.levels.upper,
                end_ids(run.tokenizer), fact_reader(run.tokenizer), run.args.seed,
                ranking.row_evidence if run.args.adapter else functools.partial(remembered, run))
        losses = tests.pop("loss")
        saved = tests | {"losses": losses if run.model.dtype == torch.float64 else losses.float()}
        folder.write_once(run.out / "tests.json", json.dumps(
            ranking.first_look(tests, notes, lower)) + "\n")
        folder.write_once(file, save({name: t.contiguous() for name, t in saved.items()}))
    return saved


def remembered(run, model, rows, ends, facts, blank, label):
    """`ranking.row_evidence` of rows under the base model, made once for all runs. An adapter that
    a run begins with is not in the key (its alpha is no weight): no cache there."""
    sizes = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # the path of a copy changes nothing
        sizes.pop(name, None)
    decides = {"environment": folder.environment(run.device, model.dtype), "model": run.weights,
               "rows": sets.rows_hash(rows), "sizes": json.dumps(sizes, default=str),
               "ends": sorted(ends), "blank": blank, "words": run.tokenizer.get_vocab(),
               "kernel": logprobs.KERNEL, "batch": batches.TOKENS_AT_ONCE, "fsdp": run.args.fsdp,
               "code": [content_hash(Path(module.__file__).read_text(encoding="utf-8"))
                        for module in (ranking, ranking.detect, batches, logprobs, models)]}
    return cached_columns(run.args.cache_dir, decides, ranking.EVIDENCE, len(rows), lambda: (
        ranking.row_evidence(model, rows, ends, facts, blank, label=label)))


def base_metrics(run):
    """{"base/KEY": held-out metric before training}; computed once and kept in the run folder."""
    file = run.out / "base.json"
    values = folder.read_once(file, lambda f: json.loads(f.read_text()) | {})  # | of a list raises
    if values is None:
        with before_training(run, file):
            values = {f"base/{key}": value for key, value in monitor.held_out_metrics(run).items()}
        folder.write_once(file, json.dumps(values) + "\n")
    return values


# --- after the last step --------------------------------------------------------------------------

def finish(run, masked=None, curate=None, mask_is_ranked=False):
    """The ranking of every lower row, adapter, final metrics, one table and the RESULT line.

    masked (N,) bool: rows of which omega judged new answers; mask_is_ranked: they are those that
    weights or a file put last. curate(ranks, kept) writes the curated set, returns more metrics.
    """
    args, lower = run.args, run.levels.lower
    run.progress.close()
    result = {"method": args.method, "seed": args.seed, "rows": len(lower),
              "lower_tokens": int(sets.row_lengths(lower).sum()),
              "dtype": str(run.model.dtype).removeprefix("torch.")} | run.before
    last = processes.on_first(lambda: read_jsonl(run.out / "metrics.jsonl")[-1])
    result |= {key: last[key] for key in (k.removeprefix("base/") for k in run.before)}
    columns = {} if masked is None else {"masked": masked}
    scores, implicit = ({}, None) if args.skip_scores else final_scores(run, columns, result)
    if run.selects:
        omega = run.selector.logits.cpu()
        if masked is not None and args.refine != "original":
            omega = ranking.original_scores(omega, masked, implicit, mask_is_ranked)
        scores = {"weight": omega} | scores
    for key, value in result.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{run.out}: {key} under the final model is {value}; lower --lr and "
                            "start again in another --out")
    ranks = kept = None
    if scores:
        ranks, kept = ranking.write_ranking(
            run.out / "weights.jsonl", lower, next(iter(scores.values())), args.keep_fraction,
            {"weight": ranking.counted_weights(run.selector, masked), **columns}, run.tests)
        write_shown(run, ranks)
        result |= {} if args.skip_scores else kept_losses(run, kept, columns)
    labels = ranking.label_metrics(lower, scores)
    if masked is not None and labels and not masked.all():
        # omega alone: it has judged the originals of the other rows, and labels are theirs.
        rows = (~masked).nonzero().flatten()
        labels |= ranking.label_metrics(lower.select(rows.tolist()), {
            f"{name}_unmasked": values[rows] for name, values in scores.items()})
    result |= labels | (curate(ranks, kept) if curate else {})
    if processes.rank() == 0:
        save_and_print(run, result, labels, scores)


def final_scores(run, columns, result):
    """Scores of every lower row under the final model; fills columns of the ranking and result.

    Returns {"final", "base", "length", "tests", "corrected": (N,) higher is better}, and -L, the
    implicit weight (Eq. explicit_data_logit; ours is the mean over tokens), with the correction
    A L_hat - L.
    """
    losses, lengths = row_losses(run.model, run.levels.lower, label="final losses")
    see_guidance(run, losses, lengths)
    base = run.tests["losses"]
    scores = {"final": -losses, "base": -base, "length": lengths, "tests": -run.tests["surprise"]}
    columns |= {"base_loss": base, "final_loss": losses, "length": lengths}
    result |= mean_losses(losses, lengths, "lower_original")
    implicit = -losses
    if "theta_hat" in run.optimizers:
        with models.adapter(run.model, "theta_hat"):
            attainable, _ = row_losses(run.model, run.levels.lower, label="attainable losses")
        implicit = scores["corrected"] = run.args.correction * attainable - losses
        columns["attainable_loss"] = attainable
    return scores, implicit


def see_guidance(run, losses, lengths):
    """`ranking.with_guidance` into run.tests and tests.json; losses, lengths (N,): of the end. Only
    where trusted answers trained and others are held out, and the run began at the base."""
    args, held_out = run.args, run.levels.upper_heldout
    alone = args.method == "sft" or (args.method == "mix" and args.rho == 1)
    if args.adapter or alone or held_out is None or args.upper_loss == "dpo":
        return
    after, held_lengths = row_losses(run.model, held_out, label="held-out losses")
    with run.model.disable_adapter():
        before, _ = row_losses(run.model, held_out, label="held-out losses before")
    run.tests.update(ranking.with_guidance(
        run.tests, (losses - run.tests["losses"], lengths), (after - before, held_lengths)))
    look = folder.read_once(run.out / "tests.json", lambda file: json.loads(file.read_text()) | {})
    notes = look["notes"] if look else []
    if len(held_out) < ranking.detect.LEAST:
        notes = list(dict.fromkeys([*notes, f"{len(held_out)} held-out trusted rows are too few to "
                                    "say what training does to good answers"]))
    folder.write_once(run.out / "tests.json", json.dumps(
        ranking.first_look(run.tests, notes, run.levels.lower)) + "\n")
    print(ranking.bad_rows_line(run.tested(slice(None))["reason"]))


def kept_losses(run, kept, columns):
    """Mean losses of the rows a run keeps; of a run on kept rows, also those of all lower rows."""
    losses, lengths = columns["final_loss"], columns["length"]
    if len(run.all_lower) == len(losses):
        return mean_losses(losses[kept], lengths[kept], "lower_kept")
    # The same rows for every method, and the selection that this run was given.
    return mean_losses(losses, lengths, "lower_kept") | mean_losses(
        *row_losses(run.model, run.all_lower, label="all lower losses"), "lower_original")


def write_shown(run, ranks):
    """shown.jsonl: the texts of rows at both ends of the ranking, best first, for the report."""
    if processes.rank() > 0:
        return
    order = ranks.argsort().tolist()
    rows = run.levels.lower.select(dict.fromkeys([*order[:SHOWN], *order[-SHOWN:]]))
    write_jsonl(run.out / "shown.jsonl", ({key: row[key] for key in (
        "row_id", "hash", "prompt", "response")} | (
            {"messages": conversation(row)} if row.get("messages") else {}) for row in rows))


def save_and_print(run, result, labels, scores):
    """The adapter, the merged model when asked for, the tables, result.json and the RESULT line."""
    models.save_adapter(run.model, run.out / "adapter")
    if run.args.merge:
        models.save_pretrained(run.model.merge_and_unload(), run.out / "merged",
                               tokenizer=models.load_tokenizer(run.args.model))
    if labels:
        ranking.print_label_table(labels, scores)
    print(table(["metric", "value"], [[key, value] for key, value in result.items()
                                      if key not in labels]))
    file, text = run.out / "result.json", json.dumps(result, indent=2) + "\n"
    if file.exists() and file.read_text() != text:  # ended before, with other kept rows
        (run.out / "losses.json").unlink(missing_ok=True)
    write_atomic(file, text)
    print("RESULT " + json.dumps(result), flush=True)
