"""Evaluation: losses, rankings, comparisons of runs; and the commands that look at finished runs.

    python eval.py compare RUN [RUN ...]                one table, seeds as mean and std
    python eval.py report RUN [RUN ...] --out out.html  one page to look at (report.py)
    python eval.py keep RUN --keep-fraction 0.7         another share of kept rows, no training
    python eval.py losses RUN [--rows FILE]             before and after, on every set; row by row
    python eval.py ranking RUN [RUN ...]                top and bottom 10 % over the epochs
    python eval.py qa RUN|MODEL --tasks arc_easy,piqa   zero-shot questions (qa.py)
    python eval.py answers RUN [RUN ...] --prompt TEXT  base and runs answer side by side
    python eval.py tensorboard RUN                      the metrics as event files

Losses are in nats. "Sequence mean" is the mean over response tokens of a row, then over rows: what
training optimises and the paper's tables report. "Token mean" weighs long responses more.
"""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from tqdm import tqdm

import loading
import utils
from data import pack, tokens_only
from logprobs import packed_forward, sequence_logprobs
from utils import UserError

TOKENS_AT_ONCE = 4096  # packed into one forward when no gradient is kept
SPARE_ROW = {"input_ids": [0, 0], "trained": [0, 1]}  # runs a forward whose result is not used


# --- losses ---------------------------------------------------------------------------------------

def token_groups(rows, indices, label=None):
    """Lists of the rows at `indices`, in order, of at most TOKENS_AT_ONCE tokens or one row."""
    group, tokens = [], 0
    # Inside another bar, and only for people: in a log file the outer bar is enough.
    for index in tqdm(indices, desc=label, disable=label is None or None, unit="row", delay=2,
                      leave=False):
        row = rows[index]
        if group and tokens + len(row["input_ids"]) > TOKENS_AT_ONCE:
            yield group
            group, tokens = [], 0
        group.append(row)
        tokens += len(row["input_ids"])
    if group:
        yield group


def own_groups(model, rows, indices, label=None):
    """This process's share of the rows at `indices`: (their places in `indices`, packed batch).

    Every world_size()-th row. A sharded model also gets batches that count for nothing (no places),
    while other processes have more.
    """
    indices = indices[utils.rank()::utils.world_size()]
    start, groups = 0, token_groups(tokens_only(rows), indices, label)
    for group in utils.together(groups, model):
        count = len(group or ())
        places = (start + torch.arange(count)) * utils.world_size() + utils.rank()
        yield places, pack(group or [SPARE_ROW], model.device)
        start += count


@torch.no_grad()
def row_losses(model, rows, indices=None, label=None):
    """Per-token mean loss of every row, no gradient (Eq. SFT_def divided by the response length).

    rows: a data set of tokenised rows, indices: which of them, in order (None: all).
    label: text of a progress bar, None for none. The work is split over all processes; each
    returns (losses (n,), lengths (n,)) of all rows, on the CPU.
    """
    indices = range(len(rows)) if indices is None else [int(i) for i in indices]
    losses = torch.zeros(len(indices), dtype=torch.float64 if model.dtype == torch.float64
                         else torch.float32)
    lengths = torch.zeros(len(indices), dtype=torch.int64)
    for places, batch in own_groups(model, rows, indices, label):
        logps, counts = sequence_logprobs(model, batch)
        losses[places] = (-logps / counts).cpu()[:len(places)]
        lengths[places] = counts.cpu()[:len(places)]
    return utils.all_sum(losses), utils.all_sum(lengths)


@torch.no_grad()
def exact_match(model, rows):
    """Share of rows whose whole response is the model's greedy answer to the prompt.

    Teacher-forced: greedy decoding writes exactly the response when every response token, EOS
    included, is the likeliest one after the true ones before it. No generation needed.
    """
    causal_lm, exact = utils.bare(model), torch.tensor(0)
    for places, batch in own_groups(model, rows, range(len(rows))):
        where = batch["response_mask"].nonzero().squeeze(1)
        hidden = packed_forward(causal_lm.base_model, batch)[where]
        logits = causal_lm.get_output_embeddings()(hidden)
        wrong = where[logits.argmax(dim=1) != batch["targets"][where]]
        starts = batch["cu_seqlens"].long()
        wrong_rows = torch.searchsorted(starts[1:], wrong, right=True).unique()
        if len(places):
            exact += len(starts) - 1 - len(wrong_rows)
    return utils.all_sum(exact).item() / len(rows)


def mean_losses(losses, lengths, prefix):
    """{prefix: sequence mean, prefix_per_token: token mean} of (n,) losses and (n,) lengths."""
    lengths = lengths.to(losses)
    return {prefix: losses.mean().item(),
            f"{prefix}_per_token": ((losses * lengths).sum() / lengths.sum()).item()}


# --- rankings against known labels ----------------------------------------------------------------

def auroc(scores, bad):
    """P(score of a good row > score of a bad row), ties one half; None without both sorts of rows.

    scores (n,) higher is better, bad (n,) bool. Mann-Whitney U by mean ranks.
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    num_bad, num_good = int(bad.sum()), int((~bad).sum())
    if not num_bad or not num_good:
        return None
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
    return float((ranks[~bad].sum() - num_good * (num_good + 1) / 2) / (num_good * num_bad))


def ranking_metrics(scores, bad, kinds):
    """How well low scores find bad rows, in all and by kind of fault.

    scores (n,) higher is better; bad (n,) bool; kinds: n strings. As many rows are flagged as are
    bad (the bottom of the ranking, ties in row order), so precision equals recall over all kinds.
    Keys: auroc, precision, and auroc/KIND, recall/KIND for every kind among the bad rows (AUROC of
    a kind is against the good rows alone).
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    flagged = torch.zeros_like(bad)
    flagged[scores.argsort(stable=True)[: int(bad.sum())]] = True
    metrics = {"auroc": auroc(scores, bad),
               "precision": float(bad[flagged].double().mean()) if bad.any() else None}
    for kind in sorted({k for k, b in zip(kinds, bad.tolist(), strict=True) if b}):
        own = torch.tensor([k == kind for k in kinds]) & bad
        metrics[f"auroc/{kind}"] = auroc(scores[own | ~bad], own[own | ~bad])
        metrics[f"recall/{kind}"] = float(flagged[own].double().mean())
    return metrics


# --- tables ---------------------------------------------------------------------------------------

def table(header, rows):
    """A plain-text table, columns aligned, numbers with four digits."""
    cells = [[f"{c:.4f}" if isinstance(c, float) else "-" if c is None else str(c) for c in row]
             for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in
                       enumerate(zip(row, widths, strict=True))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def read_result(folder):
    """The final metrics of a run folder (`result.json`)."""
    try:
        return json.loads((Path(folder) / "result.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{folder}: no result.json; not a run folder, or the run has not finished "
                        "(continue it with --resume)") from None
    except ValueError as error:
        raise UserError(f"{folder}/result.json: not valid JSON ({error})") from None


# --- losses before and after ----------------------------------------------------------------------

def load_trained(name, device="auto"):
    """(model, tokenizer, run) of a run folder with its adapter, or of a base model (run None)."""
    device, config = utils.pick_device(device), Path(name) / "config.json"
    # A model's own folder has a config.json too, without a run's arguments.
    if not config.exists() or '"model_type"' in config.read_text():
        return loading.load_model(str(name), device), loading.load_tokenizer(str(name)), None
    import toy
    from compare import Run

    run = Run(name)
    base = str(toy.MODEL) if run.args.toy else run.args.model
    if not (run.folder / "adapter").is_dir():
        raise UserError(f"{name}: no adapter folder; the run has not finished (continue it with "
                        "--resume)")
    tokenizer = loading.load_tokenizer(base)
    model = loading.load_model(base, device, run.args.dtype, run.args.four_bit)
    return loading.add_lora(model, adapter=run.folder / "adapter").eval(), tokenizer, run


def load_start(model, adapter):
    """The adapter that the run began with (`--adapter`), beside its own, as "start"."""
    try:
        model.load_adapter(adapter, "start")
    except Exception as error:  # PEFT, safetensors and the hub raise a dozen classes here
        raise UserError(f"{adapter}: the adapter that the run began with cannot be loaded "
                        f"({utils.first_line(error)}); put it back there") from None
    model.set_adapter("default")


def check_base(run, name, losses):
    """`UserError` when the base model or the lower rows are not those that the run started from."""
    from safetensors.torch import load_file

    file = run.folder / "weights" / "base_losses.safetensors"
    if name == "lower_original" and file.exists():
        before = load_file(file)["losses"]
        # A keep file makes the run's own lower level smaller than all rows: nothing to compare.
        if len(before) == len(losses) and (before - losses).abs().mean() > 0.02:
            raise UserError(f"{run.folder}: the base model or the lower rows have changed since "
                            f"the run (mean loss of the lower rows {before.mean():.4f} then, "
                            f"{losses.mean():.4f} now): the figures would compare two models")


def refined_rows(run, args, tokenizer):
    """An online run's kept rows with the recommended refined answers, tokenised; None without."""
    import tempfile

    import data

    if not (run.folder / "curated.jsonl").exists():
        return None
    rows = [{"prompt": e["prompt"],
             "response": e["refined"] if e["recommended"] == "refined" else e["response"]}
            for e in utils.read_jsonl(run.folder / "curated.jsonl") if e["kept"]]
    with tempfile.TemporaryDirectory() as folder:
        utils.write_jsonl(Path(folder) / "refined.jsonl", rows)
        return data.load_rows(
            f"{folder}/refined.jsonl", tokenizer, name="refined", template=args.template,
            max_length=args.max_length, max_prompt=args.max_prompt, cache_dir=folder)[0]


def losses(folder, rows=None, out=None, device="auto"):
    """Every set of a run (or a file of rows) under the base and the trained model, one table.

    The base of a run that began with an adapter has that adapter on, as in its result.json. Writes
    losses.json in the run folder (keys of result.json, the base's under "base/"), and one
    line a row to `out`: set, row_id, hash, base_loss, loss, length.
    """
    import common
    import data

    if out:
        utils.make_parent(out)
    model, tokenizer, run = load_trained(folder, device)
    if run is None:
        raise UserError(f"{folder}: not a run folder; losses compares a run with its base model")
    # A run of an older version lacks the newest flags: their defaults.
    parser = argparse.ArgumentParser()
    common.add_arguments(parser)
    args = SimpleNamespace(**vars(parser.parse_args([])) | vars(run.args))
    if args.adapter:
        load_start(model, args.adapter)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    if rows:
        sets = {"rows": data.load_rows(
            rows, tokenizer, template=args.template, turns=args.turns, max_length=args.max_length,
            max_prompt=args.max_prompt, cache_dir=args.cache_dir)[0]}
        data.check_lengths(sets["rows"], context, str(rows))
    else:
        levels = common.load_levels(args, tokenizer, context)
        sets = {"lower_original": levels.lower, "lower_heldout": levels.lower_heldout}
        if args.upper_loss == "sft":  # else pairs, whose loss is not that of a row
            sets = {"upper_heldout": levels.upper_heldout} | sets
        sets["lower_refined"] = refined_rows(run, args, tokenizer)
    lines, values, cells = [], {}, []
    for name, part in sets.items():
        if part is None:
            continue
        tuned, lengths = row_losses(model, part, label=name)
        with loading.adapter(model, "start") if args.adapter else model.disable_adapter():
            base, _ = row_losses(model, part, label=f"{name}, base")
        values |= mean_losses(tuned, lengths, name) | {
            f"base/{k}": v for k, v in mean_losses(base, lengths, name).items()}
        check_base(run, name, base)
        cells.append([name, len(part), *(values[f"{a}{name}{b}"] for b in ("", "_per_token")
                                         for a in ("base/", ""))])
        lines += [{"set": name, "row_id": i, "hash": h, "base_loss": b, "loss": t, "length": n}
                  for i, h, b, t, n in zip(part["row_id"], part["hash"], base.tolist(),
                                           tuned.tolist(), lengths.tolist(), strict=True)]
    print(table(["set", "rows", "base, sequence mean", "run", "base, token mean", "run"], cells))
    if not rows:
        utils.write_atomic(run.folder / "losses.json", json.dumps(values, indent=2) + "\n")
    if out:
        utils.write_jsonl(out, lines)


# --- the command line -----------------------------------------------------------------------------

def side_by_side(names, prompts, args):
    """A Markdown table: every prompt answered greedily by the base model and by each run.

    A run whose name is taken gets its whole path as its name; "base" is the base model's.
    """
    import winrate

    answers, based = {}, False
    for name in names:
        model, tokenizer, run = load_trained(name, args.device)
        options = {"max_new_tokens": args.max_new_tokens, "template": run and run.args.template}
        if run is not None and not based:
            with model.disable_adapter():
                answers["base"], based = winrate.respond(model, tokenizer, prompts, **options), True
        column = run.name if run else str(name)
        if column in ("base", *answers):
            column = str(Path(name).absolute())
        answers[column] = winrate.respond(model, tokenizer, prompts, **options)
    return winrate.markdown(["prompt", *answers],
                            [[p, *row] for p, *row in zip(prompts, *answers.values(), strict=True)])


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Look at finished runs.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name, text, runs="+"):
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("runs", nargs=runs, metavar="RUN", help="run folder")
        return made.add_argument

    add = command("compare", "runs side by side; runs that differ in the seed alone in one row")
    add("--json", help="also write the numbers, intervals included")
    add = command("report", "one self-contained HTML page, and its tables as Markdown beside it")
    add("--out", default="report.html", help="the page (report.html)")
    add = command("keep", "re-threshold a ranking: kept.jsonl for --keep of train_offline.py", None)
    add("--keep-fraction", type=float, required=True, help="share of the rows to keep")
    add("--out", help="file to write (kept.jsonl beside the ranking)")
    add = command("losses", "losses of every set, before and after training", None)
    add("--rows", help="a file of rows instead of the run's own sets")
    add("--out", help="also write one line a row")
    add("--device", default="auto")
    command("ranking", "top and bottom 10 %% of the rows over the epochs")
    add = command("qa", "zero-shot question answering through lm-evaluation-harness", None)
    add("--tasks", default="arc_easy,arc_challenge,openbookqa,piqa,winogrande",
        help="also hellaswag, boolq (default: %(default)s)")
    add("--local", help="folder of TASK.jsonl files with question, choices, label")
    add("--limit", type=int, help="questions a task")
    add("--batch-size", type=int, default=8)
    add("--base", action="store_true", help="the run's base model instead")
    add("--device", default="auto")
    add("--out", help="also write the numbers as json")
    add = command("answers", "the base model and every run answer the same prompts, greedily")
    add("--prompt", action="append", default=[], help="a prompt; may be repeated")
    add("--prompts", help="file of prompts (AlpacaEval's outputs, or json/jsonl with instruction)")
    add("--max-new-tokens", type=int, default=256)
    add("--device", default="auto")
    add("--out", help="write the Markdown table here instead of printing it")
    add = command("tensorboard", "metrics and weights as TensorBoard event files", None)
    add("--out", help="folder (RUN/tensorboard)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    import compare  # not above: compare imports this file, and so does every training script

    runs = [compare.Run(folder) for folder in args.runs] if args.command in (
        "compare", "report", "ranking") else args.runs
    out = args.json if args.command == "compare" else getattr(args, "out", None)
    if out and args.command in ("compare", "qa", "answers"):
        utils.make_parent(out)
    if args.command == "compare":
        rows = compare.summarise(runs)
        if args.json:
            utils.write_atomic(args.json, json.dumps(rows, indent=2) + "\n")
        compare.print_comparison(rows)
    elif args.command == "report":
        import report

        print(report.write(runs, args.out))
    elif args.command == "keep":
        print(compare.keep(runs, args.keep_fraction, args.out))
    elif args.command == "losses":
        losses(runs, args.rows, args.out, args.device)
    elif args.command == "ranking":
        compare.print_rankings(runs)
    elif args.command == "qa":
        import qa

        qa.main(args)
    elif args.command == "answers":
        import winrate

        prompts = args.prompt + (winrate.read_prompts(args.prompts) if args.prompts else [])
        if not prompts:
            raise UserError("answers: give --prompt TEXT or --prompts FILE")
        text = side_by_side(runs, prompts, args)
        utils.write_atomic(args.out, text) if args.out else print(text, end="")
    elif args.command == "tensorboard":
        print(compare.tensorboard(compare.Run(runs), args.out))


if __name__ == "__main__":
    utils.run(main)
