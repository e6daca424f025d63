"""Finished runs: reading their folders, side by side, another threshold, the ranking over epochs.

Used by `python eval.py compare | keep | ranking | tensorboard` and by report.py. Nothing here loads
a model.

The paper does not define the lower loss of its tables for online runs, and a model scored on its
own text flatters itself, so there are three columns: `lower_original` (the original responses of
all lower rows, the same for every method), `lower_heldout` (clean rows never trained on) and
`lower_kept` (the method's own selected rows; `eval.py losses` adds `lower_refined`, the same rows
with the refined answers that were recommended).
"""

import functools
import itertools
import json
import math
import os
import statistics
from pathlib import Path
from types import SimpleNamespace

import torch

import utils
from eval import auroc, read_result, table
from utils import UserError

SEQUENCE = ("upper_heldout", "lower_original", "lower_heldout", "lower_kept", "lower_refined")
COLUMNS = (*SEQUENCE, "upper_exact", "upper_accuracy", "weight/auroc", "final/auroc", "base/auroc",
           "length/auroc")
# Arguments that make no other experiment: runs that differ in nothing else are seeds of one.
SAME_EXPERIMENT = ("seed", "out", "resume", "save_every", "dry_run", "cache_dir", "merge",
                   "skip_scores", "device", "fsdp", "micro_tokens")
# Arguments that say which rows a held-out set or the lower level holds.
TOY = ("toy_noise", "toy_contrary", "toy_upper")
DATA_ARGUMENTS = {
    "upper_heldout": ("upper_loss", "upper_split", "upper_columns", "template", "turns",
                      "max_length", "max_prompt", "model", "toy", *TOY),
    "lower": ("lower_split", "lower_columns", "lower_limit", "template", "turns", "max_length",
              "max_prompt", "model", "toy", *TOY),
    "lower_heldout": ("lower_split", "lower_columns", "template", "turns", "max_length",
                      "max_prompt", "model", "toy", *TOY)}


# --- run folders ----------------------------------------------------------------------------------

class Run:
    """A run folder as its files; everything is read when asked for, missing parts are None."""

    def __init__(self, folder):
        self.folder = Path(folder)
        # runs/bds/seed-0 is called bds/seed-0: the last part alone says too little.
        parts = self.folder.absolute().parts
        seeds = parts[-1].lower().startswith("seed") and len(parts) > 2
        self.name = "/".join(parts[-2:]) if seeds else parts[-1]
        try:
            self.config = json.loads((self.folder / "config.json").read_text())
            self.args = SimpleNamespace(**self.config["args"])
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder}: no config.json; not a run folder of train_offline.py or "
                            "train_online.py") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder}/config.json: not a run's configuration ({error})") from None

    @functools.cached_property
    def metrics(self):
        """One dictionary a step."""
        rows = []
        path = self.folder / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:  # a run may be writing its next line just now
                continue
        if not rows:
            raise UserError(f"{self.folder}: no metrics.jsonl with a step in it; the run has not "
                            "taken a step yet")
        return rows

    @functools.cached_property
    def result(self):
        """The final metrics, None while the run is not finished."""
        return read_result(self.folder) if (self.folder / "result.json").exists() else None

    @functools.cached_property
    def extra(self):
        """Held-out metrics before training, and what `eval.py losses` measured afterwards."""
        found = {}
        for path in (self.folder / "base.json", self.folder / "losses.json"):
            found |= json.loads(path.read_text()) if path.exists() else {}
        return found

    @functools.cached_property
    def rows(self):
        """Rows of weights.jsonl in the order of omega, which is that of row_id; or None."""
        path = self.folder / "weights.jsonl"
        return sorted(utils.read_jsonl(path), key=lambda r: r["row_id"]) if path.exists() else None

    @functools.cached_property
    def omegas(self):
        """{epoch: omega (N,)} of every epoch, {} for methods without a selector."""
        from safetensors.torch import load_file

        files = (self.folder / "weights").glob("epoch_*.safetensors")
        found = {int(f.stem.removeprefix("epoch_")): load_file(f)["omega"].double() for f in files}
        return dict(sorted(found.items()))

    @property
    def labelled(self):
        """Whether every position of omega has its row of weights.jsonl."""
        return bool(self.rows and self.omegas
                    and len(self.rows) == len(next(iter(self.omegas.values()))))

    def data(self, name):
        """What a set of rows is made of, comparable between runs."""
        args = dict(vars(self.args))
        source = args.get(name)
        if name == "upper_heldout" and not source and args.get("upper"):
            source = (f"{args.get('heldout_rows') or 'a tenth'} of {args['upper']}, limit "
                      f"{args.get('upper_limit')}")
        if isinstance(source, str) and os.path.exists(source):
            source = os.path.abspath(source)
        args.setdefault("upper_loss", "sft")  # runs of versions that knew no other
        return source, *(args.get(key) for key in DATA_ARGUMENTS[name])


def check_same_data(runs):
    """`UserError` unless all runs were evaluated on the same rows by the same tokenizer.

    The same arguments give other rows to another seed, and to --keep a part of the lower ones. A
    set that a run does not have is not compared.
    """
    for name, keys in DATA_ARGUMENTS.items():
        own = ("seed", "keep") if name == "lower" else ("seed",)
        holders = [run for run in runs if run.config["data"].get(name) is not None]
        for one, two in itertools.combinations(holders, 2):
            if one.config["data"][name] == two.config["data"][name]:
                continue
            differences = [f"{key}: {a or 'the toy'} and {b or 'the toy'}" for key, a, b in
                           zip((name, *keys), one.data(name), two.data(name), strict=True)
                           if a != b]
            if not differences and any(getattr(one.args, key, None) != getattr(two.args, key, None)
                                       for key in own):
                continue
            why = differences[0] if differences else f"the rows of {name} changed between them"
            raise UserError(f"{one.folder} and {two.folder} are runs of different data ({why}): "
                            "their losses do not compare")


def student_t(freedom):
    """The 97.5 % quantile of Student's t, to 1e-3: exact for 1-6, else Cornish and Fisher."""
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469}
    z, n = 1.959964, freedom
    return exact.get(n) or (z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
                            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3))


def final_metrics(run):
    """The result of a run with what `eval.py losses` measured; the columns of the comparison."""
    if run.result is None:
        read_result(run.folder)  # says what is missing
    values = run.result | {k: v for k, v in run.extra.items() if k in run.result or k in COLUMNS}
    if "weight_unmasked/auroc" in values:
        # Masked rows were judged by their generated answers: labels fit the unmasked rows alone.
        values |= {k.replace("_unmasked/", "/"): v for k, v in values.items() if "_unmasked/" in k}
    return values


def summarise(runs):
    """[{name, n, key: {mean, std, low, high}}], seeds of one experiment in one row.

    std over runs; low and high are the 95 % interval of the mean (Student's t), None for one run.
    """
    check_same_data(runs)
    groups = {}
    for run in runs:
        key = json.dumps({k: v for k, v in vars(run.args).items() if k not in SAME_EXPERIMENT},
                         sort_keys=True)
        groups.setdefault(key, []).append(run)
    rows = []
    for members in groups.values():
        names = [run.name for run in members]
        name = names[0] if len(names) == 1 else (  # runs/bds/seed-0, runs/bds/seed-1: bds
            os.path.commonprefix(names).removesuffix("seed-").rstrip("/-_. ")  # noqa: RUF071
            or names[0])
        row = {"name": name, "n": len(members)}
        for key in [f"{c}{suffix}" for suffix in ("", "_per_token") for c in COLUMNS]:
            values = [v for v in (final_metrics(run).get(key) for run in members) if v is not None]
            if not values:
                continue
            mean, n = statistics.fmean(values), len(values)
            std = statistics.stdev(values) if n > 1 else None
            half = student_t(n - 1) * std / math.sqrt(n) if n > 1 else None
            row[key] = {"mean": mean, "std": std, "low": mean - half if n > 1 else None,
                        "high": mean + half if n > 1 else None}
        rows.append(row)
    return rows


def comparison_cells(rows, per_token=False, interval=False):
    """(header, cells) of `summarise`'s rows, empty columns left out."""
    suffix = "_per_token" if per_token else ""
    keys = [c for c in (SEQUENCE if per_token or interval else COLUMNS)
            if any(c + suffix in row for row in rows)]
    cells = []
    for row in rows:
        values = [row.get(key + suffix) for key in keys]
        texts = ["-" if v is None else
                 f"[{v['low']:.4f}, {v['high']:.4f}]" if interval and v["std"] is not None else
                 f"{v['mean']:.4f}" + (f" ± {v['std']:.4f}" if v["std"] is not None else "")
                 for v in values]
        cells.append([row["name"], row["n"], *texts])
    return ["run", "n", *keys], cells


def print_comparison(rows):
    print("nats a token, sequence mean; ± is the standard deviation over seeds; AUROCs of an\n"
          "online run are over its unmasked rows")
    print(table(*comparison_cells(rows)))
    if any(row["n"] > 1 for row in rows):
        print("\n95 % interval of the mean (Student's t over seeds)")
        print(table(*comparison_cells([r for r in rows if r["n"] > 1], interval=True)))
    print("\nnats a token, token mean")
    print(table(*comparison_cells(rows, per_token=True)))


# --- another threshold ----------------------------------------------------------------------------

def keep(source, fraction, out=None):
    """Write kept.jsonl: the best `fraction` of a ranking file (or a run's), by rank. One line."""
    if not 0 < fraction <= 1:
        raise UserError(f"--keep-fraction {fraction}: must lie in (0, 1]")
    source = Path(source)
    if source.is_dir():
        source = next((source / f"{n}.jsonl" for n in ("weights", "curated")
                       if (source / f"{n}.jsonl").exists()), source / "weights.jsonl")
    out = Path(out) if out else source.with_name("kept.jsonl")
    if out.is_dir() or (out.exists() and out.samefile(source)):
        raise UserError(f"--out {out}: is the ranking itself or a folder; choose another file")
    entries = utils.read_jsonl(source)
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not {"row_id", "hash", "rank"} <= entry.keys():
            raise UserError(f"{source} line {number}: a ranking has row_id, hash and rank in "
                            "every line")
        if type(entry["rank"]) not in (int, float):
            raise UserError(f"{source} line {number}: the rank {json.dumps(entry['rank'])} is not "
                            "a number; write 1 for the best row, 2 for the next")
    limit = round(fraction * len(entries))
    kept = [{key: entry[key] for key in ("row_id", "hash", "rank")} | {
        "kept": entry["rank"] <= limit} for entry in entries]
    if not any(entry["kept"] for entry in kept):
        raise UserError(f"--keep-fraction {fraction}: of {len(entries)} rows none would be kept")
    utils.make_parent(out)
    utils.write_jsonl(out, kept)
    line = f"kept {sum(entry['kept'] for entry in kept)} of {len(entries)} rows: {out}"
    kinds = sorted({e.get("kind") or "bad" for e in entries if e.get("bad")})
    for kind in kinds:
        own = [e["rank"] > limit for e in entries if e.get("bad") and (e.get("kind") or "bad")
               == kind]
        line += f"; {kind}: {sum(own) / len(own):.0%} of {len(own)} dropped"
    return line


# --- the ranking over the epochs ------------------------------------------------------------------

def ends(run, share=0.1):
    """{group: {epoch: (top, bottom)}}: positions of the best and worst `share`, best row first.

    Groups: all; masked and unmasked for an online run, whose masked rows are ranked by the model's
    own answers. Positions are those of omega and of `run.rows`.
    """
    count = len(next(iter(run.omegas.values()))) if run.omegas else 0
    groups = {"all": torch.arange(count)}
    if run.labelled and "masked" in run.rows[0]:
        masked = torch.tensor([row["masked"] for row in run.rows])
        groups = {"unmasked": (~masked).nonzero().flatten(), "masked": masked.nonzero().flatten()}
    found = {}
    for group, members in groups.items():
        size = max(1, round(share * len(members)))
        for epoch, omega in run.omegas.items() if len(members) else ():
            order = members[omega[members].argsort(descending=True, stable=True)]
            found.setdefault(group, {})[epoch] = order[:size], order[-size:]
    return found


def ranking_over_epochs(run, share=0.1):
    """How the top and bottom `share` of the rows move (the paper's analysis of the ranking).

    [{epoch, group, rows, top_length, bottom_length, top_previous, bottom_previous, top_last,
    auroc}]: mean response lengths in tokens; overlap of the top (bottom) with that of the epoch
    before and with the last one's top, as shares.
    """
    first = run.rows[0] if run.labelled else {}
    lengths = torch.tensor([r["length"] for r in run.rows]).double() if "length" in first else None
    bad = torch.tensor([r["bad"] for r in run.rows]) if "bad" in first else None
    found = []
    for group, epochs in ends(run, share).items():
        before, last = None, set(epochs[max(epochs)][0].tolist())
        members = torch.arange(len(next(iter(run.omegas.values()))))
        if group != "all":
            members = torch.tensor([r["masked"] == (group == "masked") for r in run.rows]).nonzero()
            members = members.flatten()
        for epoch, (top, bottom) in epochs.items():
            now, size = (set(top.tolist()), set(bottom.tolist())), len(top)
            found.append({
                "epoch": epoch, "group": group, "rows": size,
                "top_length": None if lengths is None else lengths[top].mean().item(),
                "bottom_length": None if lengths is None else lengths[bottom].mean().item(),
                "top_previous": None if before is None else len(now[0] & before[0]) / size,
                "bottom_previous": None if before is None else len(now[1] & before[1]) / size,
                "top_last": len(now[0] & last) / size,
                "auroc": None if bad is None else auroc(run.omegas[epoch][members], bad[members])})
            before = now
    return found


def print_rankings(runs):
    keys = ("epoch", "group", "rows", "top_length", "bottom_length", "top_previous",
            "bottom_previous", "top_last", "auroc")
    cells = [[run.name, *(row[key] for key in keys)]
             for run in runs for row in ranking_over_epochs(run)]
    if not cells:
        raise UserError(f"{runs[0].folder}: no weights/epoch_*.safetensors; the run has no "
                        "selector or has not finished an epoch")
    print("top and bottom 10 % by weight: response length in tokens, overlap with the epoch before "
          "and with the last")
    print(table(["run", *keys], cells))


# --- TensorBoard --------------------------------------------------------------------------------

def tensorboard(run, out=None):
    """The metrics, and the weights of every epoch, as TensorBoard event files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("TensorBoard is not installed: pip install tensorboard") from None
    out = Path(out or run.folder / "tensorboard")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: holds files already; remove them or choose another --out")
    clock = (run.folder / "config.json").stat().st_mtime  # the run's start
    with SummaryWriter(str(out)) as writer:
        for row in run.metrics:
            clock += row.get("time/step") or 0.0
            for key, value in row.items():
                if isinstance(value, (int, float)) and key != "step" and math.isfinite(value):
                    writer.add_scalar(key, value, row["step"], walltime=clock)
        for epoch, omega in run.omegas.items():
            step = max((r["step"] for r in run.metrics if r["epoch"] < epoch), default=0)
            writer.add_histogram("weights", len(omega) * omega.softmax(0), step, walltime=clock)
    return out
