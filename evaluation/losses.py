"""Losses of every set of a run before and after training: `python eval.py losses RUN`.

Losses are in nats. "Sequence mean" is the mean over response tokens of a row, then over rows: what
training optimises and the paper's tables report. "Token mean" weighs long responses more.
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace

import models
import options
import utils
from batches import mean_losses, row_losses
from data import sets, tokens
from data.layouts import conversation
from evaluation.runs import (
    Run,
    check_entry,
    check_output,
    each_curated,
    json_value,
    make_parent,
    read_text,
    read_vector,
)
from evaluation.texts import show_table
from runtime import processes
from runtime.folder import fingerprint
from toy import corpus
from utils import UserError

# --- the trained model ----------------------------------------------------------------------------

def is_model_folder(name):
    """Whether `name` is a model's own folder: its config.json has no run's arguments."""
    path = Path(name) / "config.json"
    if not path.is_file():
        return True  # a name on the hub, or a path that loading will refuse
    config = json_value(path, read_text(path))
    check_entry(path, config, {})
    return "model_type" in config


def base_of(run):
    """The base model of a run: a hub name, or the path of a folder."""
    toy = getattr(run.args, "toy", False)
    name = str(corpus.MODEL) if toy else getattr(run.args, "model", None)
    if name is None:
        raise UserError(f"{run.folder}/config.json: names no base model")
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def load_trained(name, device="auto"):
    """(model, tokenizer, run) of a run folder with its adapter, or of a base model (run None)."""
    device = processes.pick_device(device)
    if is_model_folder(name):
        return models.load_model(str(name), device), models.load_tokenizer(str(name)), None
    run = Run(name)
    base, dtype = base_of(run), getattr(run.args, "dtype", None) or "auto"
    trained = run.config["environment"]
    if dtype == "auto" and trained.get("device") == device.type == "cpu":
        dtype = trained.get("dtype", "auto")  # what auto was there: processors differ
    if dtype not in ("auto", "float32", "bfloat16", "float64"):
        raise UserError(f"{run.folder}/config.json: the dtype {dtype!r} is not one of the scripts'")
    if not (run.folder / "adapter").is_dir():
        raise UserError(f"{name}: no adapter folder; the run has not finished (continue it with "
                        "--resume)")
    tokenizer = models.load_tokenizer(base)
    model = models.load_model(base, device, dtype, getattr(run.args, "four_bit", False))
    check_weights(run, model)
    return models.add_lora(model, adapter=run.folder / "adapter").eval(), tokenizer, run


def check_weights(run, model):
    """`UserError` when the base's weights are not those that the adapter was trained on.

    Of the run's dtype and on its kind of device alone: elsewhere the same weights are other bits.
    """
    before, trained = run.config.get("model", {}).get("base_weights"), run.config["environment"]
    alike = (str(model.dtype).removeprefix("torch.") == trained.get("dtype") and
             (model.device.type == "cpu") == (trained.get("device") == "cpu"))
    if before and alike and before != fingerprint(
            dict(model.named_buffers()) | model.state_dict()):
        raise UserError(f"{run.folder}: its base model {base_of(run)} has changed since the run; "
                        "the adapter belongs to the weights of then: put them back, or train anew")


def load_start(model, adapter):
    """The adapter that the run began with (`--adapter`), beside its own, as "start"."""
    try:
        model.load_adapter(adapter, "start")
    except Exception as error:  # PEFT, safetensors and the hub raise a dozen classes here
        raise UserError(f"{adapter}: the adapter that the run began with cannot be loaded "
                        f"({utils.first_line(error)}); put it back there") from None
    model.set_adapter("default")


# --- its rows -------------------------------------------------------------------------------------

def training_arguments(run):
    """The run's arguments, each of its flag's type. An older run lacks the newest: their defaults.
    """
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    words = []
    for name in vars(parser.parse_args([])):
        value = getattr(run.args, name, None)
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag}={value}")

    def refuse(message):
        raise UserError(f"{run.folder}/config.json: {message}")

    parser.error = refuse
    return SimpleNamespace(**{"toy": False} | vars(run.args) | vars(parser.parse_args(words)))


def refined_rows(run, args, tokenizer):
    """An online run's kept rows and those with a recommended answer, which replaces the original:
    the rows that `export` writes, tokenised. None of a run that wrote no answers.
    """
    if not (run.folder / "curated.jsonl").exists():
        return None
    rows = [{"messages": conversation(row, row["refined"] if row.get("recommended") == "refined"
                                      else row["response"])}
            for row in each_curated(run.folder / "curated.jsonl")
            if row["kept"] or row.get("recommended") == "refined"]
    with tempfile.TemporaryDirectory() as folder:
        utils.write_jsonl(Path(folder) / "refined.jsonl", rows)
        return tokens.load_rows(
            f"{folder}/refined.jsonl", tokenizer, name="refined", template=args.template,
            max_length=args.max_length, cache_dir=folder)[0]


def sets_of(run, args, tokenizer, context, rows=None, columns=None):
    """{name: tokenised rows} of everything to measure: the run's sets, or the file `rows` alone.

    context: tokens that the model can read; columns: names of the file's, see data/layouts.py.
    """
    if rows:
        part, report = tokens.load_rows(
            rows, tokenizer, columns=columns, template=args.template, turns=args.turns,
            max_length=args.max_length, cache_dir=args.cache_dir)
        sets.check_lengths(part, context, str(rows))
        print(f"{rows}: {len(part)} of {report['rows_in_source']} rows{sets.left_out(report)}")
        return {"rows": part}
    levels = sets.load_levels(args, tokenizer, context)
    parts = {"lower_original": levels.lower, "lower_heldout": levels.lower_heldout,
            "lower_refined": refined_rows(run, args, tokenizer)}
    if args.upper_loss == "sft":  # else pairs, whose loss is not that of a row
        parts = {"upper_heldout": levels.upper_heldout} | parts
    parts = {name: part for name, part in parts.items() if part is not None}
    check_rows(run, parts)
    return parts


def check_rows(run, parts):
    """`UserError` when rows are not those that the run measured; of --keep `check_base` says it."""
    names = {"upper_heldout": "upper_heldout", "lower_heldout": "lower_heldout"} | (
        {} if getattr(run.args, "keep", None) else {"lower": "lower_original"})
    for name, part in names.items():
        if (before := run.config["data"].get(name)) and part in parts and (
                sets.rows_hash(parts[part]) != before):
            raise UserError(f"{run.folder}: the rows of {name} have changed since the run: its "
                            "figures would be of other rows than those of result.json; measure "
                            "these with --rows")


def check_base(run, losses, after):
    """`UserError` when the base model or the lower rows are not those that the run started from.

    losses: (N,) of the lower rows under the base model now; after: their mean under the run's.
    """
    then = (run.result or {}).get("lower_original")
    if then is not None and abs(then - after) > 0.02:  # of --keep, too, whose base losses are fewer
        raise UserError(f"{run.folder}: the base model or the lower rows have changed since the "
                        f"run (lower_original {then:.4f} in result.json, {after:.4f} now): the "
                        "figures would be of others")
    path = run.folder / "weights" / "base_losses.safetensors"
    before = read_vector(path, "losses") if path.exists() else losses
    # A keep file makes the run's own lower level smaller than all rows: nothing to compare.
    if len(before) == len(losses) and (before - losses).abs().mean() > 0.02:
        raise UserError(f"{run.folder}: the base model or the lower rows have changed since "
                        f"the run (mean loss of the lower rows {before.mean():.4f} then, "
                        f"{losses.mean():.4f} now): the figures would compare two models")


# --- before and after -----------------------------------------------------------------------------

def measure_losses(folder, rows=None, columns=None, out=None, device="auto"):
    """Every set of a run (or a file of rows) under the base and the trained model, one table.

    columns: names of the file's columns where they are unknown ones.
    The base of a run that began with an adapter has that adapter on, as in its result.json. Writes
    losses.json in the run folder (keys of result.json, the base's under "base/"), and one
    line a row to `out`: set, row_id, hash, base_loss, loss, length.
    """
    if columns and not rows:
        raise UserError("--lower-columns: names the columns of --rows; give both")
    if is_model_folder(folder):
        raise UserError(f"{folder}: not a run folder; losses compares a run with its base model")
    if out:
        check_output(out, folder, *([rows] if rows else []))
    model, tokenizer, run = load_trained(folder, device)
    if not rows:
        make_parent(run.folder / "losses.json")
    args = training_arguments(run)
    if args.adapter:
        load_start(model, args.adapter)
    context = models.context_length(model.config)
    lines, values, cells = [], {}, []
    for name, part in sets_of(run, args, tokenizer, context, rows, columns).items():
        tuned, lengths = row_losses(model, part, label=name)
        with models.adapter(model, "start") if args.adapter else model.disable_adapter():
            base, _ = row_losses(model, part, label=f"{name}, base")
        values |= mean_losses(tuned, lengths, name) | {
            f"base/{k}": v for k, v in mean_losses(base, lengths, name).items()}
        if name == "lower_original":
            check_base(run, base, values[name])
        cells.append([name, len(part), *(values[f"{a}{name}{b}"] for b in ("", "_per_token")
                                         for a in ("base/", ""))])
        lines += [{"set": name, "row_id": i, "hash": h, "base_loss": b, "loss": t, "length": n}
                  for i, h, b, t, n in zip(part["row_id"], part["hash"], base.tolist(),
                                           tuned.tolist(), lengths.tolist(), strict=True)]
    show_table(["set", "rows", "base, sequence mean", "run", "base, token mean", "run"], cells)
    if not rows:
        utils.write_atomic(run.folder / "losses.json", json.dumps(values, indent=2) + "\n")
    if out:
        utils.write_jsonl(out, lines)
