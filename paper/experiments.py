"""Questions that the paper's tables leave open, one function each.

Scales, seeds and folders are those of the tables, whose finished runs are used again.
"""

import operator
import shlex
from pathlib import Path

import utils
from evaluation.export import export
from evaluation.rankings import rethreshold
from evaluation.runs import read_result
from paper.figures import panels_figure
from paper.kept import report
from paper.plans import (
    BDS,
    METHODS,
    OFF,
    ON,
    SHORT_DYNAMIC,
    budget_of,
    chosen,
    execute,
    setting,
    words_of,
    write_toy_rows,
)
from paper.results import RANKS, UPPER, store, without_flags
from paper.running import run_all, seconds_of, slug
from paper.statistics import (
    claims_of,
    measured,
    prefer_unmasked,
    print_claims,
    results_of,
    seed_verdict,
    summary_rows,
)
from ranking import ranking_metrics
from toy import corpus
from utils import UserError, table

# --- known bad rows: which ranking finds them -----------------------------------------------------

BASELINES = ("random", "DSIR", "LESS", "RDS+", "loss", "length", "IFD", "tests", "joined")
ADAM = "--omega-optimizer adam --omega-lr 1e-4"
CORRECTED = f"{BDS} --correction 0.7"


def compare_selectors(args):
    """AUROC, precision and recall of every selector on a lower set with known bad rows.

    --only names runs and baselines. CoLoR (Brandfonbrener et al. 2024, arXiv 2406.10670): the loss
    that training on the trusted rows alone takes off a row.
    """
    runs = {"BDS": BDS, "BDS corrected": CORRECTED, "BDS, published rate": f"{BDS} {ADAM}",
            "CoLoR": f"{OFF} --method mix --rho 1e-9"}  # as good as the trusted rows alone
    names = chosen(args, [*runs, *BASELINES])
    baselines = [name for name in BASELINES if name in names]
    files_of = execute(args, {name: runs[name] for name in runs if name in names},
                       also_rank=baselines)
    if args.list:
        return
    rows = {}
    for title, run, score in (("omega, published rate", "BDS, published rate", "weight"),
                              ("omega", "BDS", "weight"),
                              ("loss under the guided model", "BDS", "final"),
                              ("omega, corrected", "BDS corrected", "weight"),
                              ("corrected loss", "BDS corrected", "corrected"),
                              ("row tests, guided", "BDS", "tests")):
        rows[title] = [{key.removeprefix(f"{score}/"): value
                        for key, value in read_result(file.parent).items()
                        if key.startswith(f"{score}/")} | {"seconds": seconds_of(file)}
                       for file in files_of.get(run, ())]
    if not all("auroc" in run for runs in rows.values() for run in runs):
        raise UserError("selectors: the lower rows have no column `bad`; name a file that has")
    rows["CoLoR"] = [ranking_scores(file.with_name("weights.jsonl"), color) | {
        "seconds": seconds_of(file)} for file in files_of.get("CoLoR", ())]
    rows = {title: values for title, values in rows.items() if values}
    for run, file in zip(rows.get("row tests, guided", ()), files_of.get("BDS", ()), strict=True):
        run |= guided_rows(file.with_name("weights.jsonl"))
    for method in baselines:
        rows[method] = [ranking_scores(file) | {"seconds": seconds_of(file)}
                        for file in files_of[method]]
    keys = sorted({key for runs in rows.values() for run in runs for key in run} - {"seconds"},
                  key=lambda key: (key.count("/"), key))
    columns = {key: key for key in keys} | {"seconds": "seconds"}
    print("\nAUROC, precision when as many rows are flagged as are bad, recall by kind of fault")
    print(table(["selector", *columns], summary_rows(rows, columns)))
    claims = [[f"{name} misranks fewer pairs than the base model's own loss",
               *seed_verdict([1 - run["auroc"] for run in rows[name]],
                             [1 - run["auroc"] for run in rows["loss"]])]
              for name in ("omega", "omega, corrected", "corrected loss", "row tests, guided",
                           "CoLoR", "LESS", "RDS+", "IFD") if {name, "loss"} <= set(rows)]
    if claims:
        print_claims(claims, "1 - AUROC")
    kinds = [key for key in keys if key.startswith("auroc")]
    panels_figure(Path("results") / f"{args.name}_selectors.png", "AUROC", {
        key.removeprefix("auroc/").replace("auroc", "all"): {
            name: [run[key] for run in runs if run.get(key) is not None]
            for name, runs in rows.items() if any(run.get(key) is not None for run in runs)}
        for key in kinds}, chance=0.5)
    store(args, rows, columns, claims=claims)


def guided_rows(file):
    """Of a ranking's rows with the reason `guidance`: how many, and the share that is bad."""
    bad = [row["bad"] for row in utils.each_jsonl(file) if row["reason"] == "guidance"]
    return {"guided": len(bad), "guided_bad": sum(bad) / len(bad) if bad else None}


def color(row):
    """CoLoR's score of a row of weights.jsonl: what its loss has lost, nats a token."""
    return row["base_loss"] - row["final_loss"]


def ranking_scores(file, score=operator.itemgetter("score"), shuffle=None):
    """Ranking metrics of a file's rows against their columns bad and, where they have one, kind.

    shuffle: a seed; against these labels in random order: AUROCs of one half, or there is a bug.
    """
    import torch

    rows = labels = utils.read_jsonl(file)
    if any("bad" not in row for row in rows):
        raise UserError(f"{file}: the lower rows have no column `bad`; name a file that has")
    if shuffle is not None:
        labels = [rows[i] for i in torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(shuffle)).tolist()]
    return ranking_metrics(torch.tensor([score(row) for row in rows], dtype=torch.float64),
                           torch.tensor([row["bad"] for row in labels]),
                           [row.get("kind") or "bad" for row in labels])


# --- is the curated set worth it? -----------------------------------------------------------------

def curated_table(args):
    """A fresh base on the raw set, a random k, the top k, the top k with the recommended rewrites.

    All read as many tokens as three passes over the raw set. The online run's R covers what is not
    kept, so that every dropped question may come back with a new answer.
    """
    share = args.keep_fraction
    if not 0 < share < 1:
        raise UserError(f"--keep-fraction {share}: must lie between 0 and 1")
    online, raw = f"online R={1 - share:.0%}, curated", "mixing rho=1"  # is plain fine-tuning
    files_of = execute(args, {raw: METHODS[raw], "BDS": BDS, online: (
        f"{ON} --ratio-masked {1 - share:.6g} --keep-fraction {share}")}, also_rank=("random",))
    if args.list:
        return
    plan, files = {}, {"raw set": files_of[raw]}
    for seed in range(args.seeds):
        for name, (file, command) in curated_runs(
                args, seed, *(files_of[name][seed] for name in (raw, "random", "BDS", online))
                ).items():
            plan[file] = command
            files.setdefault(name, []).append(file)
    run_all(plan, args.workers)
    results = results_of(files)
    add_bad_shares(args, results, files, files_of[online])
    report(args, results, {
        "upper_heldout": "held-out upper", "upper_exact": "exact answers",
        "lower_heldout": "lower, clean", "rows": "rows", "bad_share": "bad rows"}, [
        ("the top k are better than the raw set", "top k by BDS", "raw set", UPPER),
        ("the top k are better than a random k", "top k by BDS", "random k", UPPER),
        ("rewrites add to the top k", "... with its rewrites", "top k by the online run", UPPER)])


def curated_runs(args, seed, raw_run, random, bds, online):
    """{name: (result file, command)} of one seed, beside the raw set's.

    raw_run, bds, online: result files of finished runs; random: a ranking.
    """
    scale, folder = setting(args), Path("runs") / args.name
    raw = other = words_of(scale["data"], scale["train"])
    if args.scale == "toy":  # a fresh base reads files: a run's own toy has all of its rows
        rows = folder / "rows" / "default" / f"seed-{seed}"
        write_toy_rows(rows, seed, "")
        other = ["--preset", "toy", "--upper-heldout", str(rows / "heldout.jsonl"),
                 "--lower-heldout", str(rows / "lower_heldout.jsonl"), *other]
        raw = ["--lower", str(rows / "lower.jsonl"), *other]
    export(online.parent, "prompt-completion")
    rewritten = [*without_flags(other, "--lower", "--lower-limit", "--lower-columns"), "--lower",
                 str(online.parent / "curated.prompt-completion.jsonl")]
    place = folder / f"curated-{args.keep_fraction:g}"
    kept = {name: place / f"{name}-{seed}.jsonl" for name in ("random", "bds", "online")}
    for name, source in (("random", random), ("bds", bds.parent), ("online", online.parent)):
        rethreshold(source, args.keep_fraction, kept[name])
    budget, runs = budget_of(raw_run.parent), {}
    for name, flags in (("random k", [*raw, "--keep", str(kept["random"])]),
                        ("top k by BDS", [*raw, "--keep", str(kept["bds"])]),
                        ("top k by the online run", [*raw, "--keep", str(kept["online"])]),
                        ("... with its rewrites", rewritten)):
        out = place / slug(name) / f"seed-{seed}"
        runs[name] = out / "result.json", shlex.join(
            [OFF, "--method", "sft", *flags, "--token-budget", str(budget), "--seed", str(seed),
             "--out", str(out)])
    return runs


def add_bad_shares(args, results, files, online):
    """Put `bad_share` into the results where the truth is known; online: the exported runs."""
    for name in ("raw set", "random k", "top k by BDS", "top k by the online run"):
        for run, file in zip(results[name], files[name], strict=True):
            rows = utils.read_jsonl(file.with_name("weights.jsonl"))
            if "bad" in rows[0]:
                run["bad_share"] = sum(row["bad"] for row in rows) / len(rows)
    if args.scale == "toy":
        for run, file in zip(results["... with its rewrites"], online, strict=True):
            rows = utils.read_jsonl(file.with_name("curated.prompt-completion.jsonl"))
            run["bad_share"] = sum(
                corpus.kind_of(row["prompt"][-1]["content"], row["completion"][0]["content"])
                != "clean" for row in rows) / len(rows)


# --- ablations of the toy -------------------------------------------------------------------------

ON40, ON20 = f"{ON} --ratio-masked 0.4", f"{ON} --ratio-masked 0.2 --num-answers 4"
LATE = f"{ON40} --mask dynamic --first-refresh 150 --center"
ABLATIONS = {  # question: {label: method, (name, command) or (name, command, toy rows)}
    "omega's optimiser": {
        "frozen": "mixing, rho schedule",
        "Adam 1e-4 (published)": ("BDS, published rate", f"{BDS} {ADAM}"),
        "Adam 5e-3 (SEAL)": ("omega Adam 5e-3",
                             f"{BDS} --omega-optimizer adam --omega-lr 5e-3"),
        "SGD 10": ("omega SGD 10", f"{BDS} --omega-lr 10"), "SGD 30": "BDS",
        "SGD 100": ("omega SGD 100", f"{BDS} --omega-lr 100"),
        "SGD 300": ("omega SGD 300", f"{BDS} --omega-lr 300")},
    "omega's loss": {
        "at theta^{k+1}": "BDS", "at theta^k": ("omega at theta^k", f"{BDS} --omega-loss current"),
        "centred": ("omega centred", f"{BDS} --center"),
        "corrected": ("BDS corrected", CORRECTED)},
    "ratio (R = 20 %, G = 4)": {
        name: (f"ratio {name}", f"{ON20} --ratio {name}")
        for name in ("sequence", "lambda")},
    "share of masked rows R": {
        "0": "BDS", "5 %": "online R=5% G=1", "10 %": "online R=10% G=1",
        "20 %": "online R=20% G=1", "40 %": ("online R=40%", ON40)},
    "K_gen (R = 40 %)": {
        "5": ("K_gen 5", f"{ON40} --k-gen 5"), "25": ("online R=40%", ON40),
        "75": ("K_gen 75", f"{ON40} --k-gen 75"), "225": ("K_gen 225", f"{ON40} --k-gen 225")},
    "first refresh (R = 40 %)": {
        "0": ("online R=40%", ON40),
        "75": ("first refresh 75", f"{ON40} --first-refresh 75"),
        "150": ("first refresh 150", f"{ON40} --first-refresh 150")},
    "masked rows (R = 40 %)": {
        "generate": ("online R=40%", ON40), "drop": ("drop R=40%", f"{ON40} --refine drop"),
        "original": "BDS"},
    "mask (R = 40 %)": {
        "static": ("online R=40%", ON40),
        "dynamic": ("dynamic R=40%", f"{ON40} --mask dynamic{SHORT_DYNAMIC}"),
        "dynamic from 150": ("dynamic late R=40%", LATE),
        "dynamic from 150, dropped": ("dynamic late drop R=40%", f"{LATE} --refine drop"),
        "dynamic, dropped": ("dynamic drop R=40%",
                             f"{ON40} --mask dynamic --refine drop{SHORT_DYNAMIC}")},
    **{level: {
        method: method if share == 0.4 else (  # the toy as it is
            f"{level}: {method}", METHODS[method], f"--noise {share}")
        for method in ("BDS", "mixing rho=0.5", "online R=10% G=1", "control: drop")}
       for level, share in {"no bad rows": 0, "20 % bad": 0.2, "40 % bad": 0.4, "60 % bad": 0.6,
                            "80 % bad": 0.8}.items()},
}
# New answers against leaving the same rows out: does generation do more?
AGAINST_DROP = (("generate", "drop"), ("dynamic", "dynamic, dropped"),
                ("dynamic from 150", "dynamic from 150, dropped"),
                ("online R=10% G=1", "control: drop"))
MEASURES = {"upper_heldout": "held-out upper", "lower_heldout": "lower, clean",
            "weight/auroc/contrary": "AUROC contrary", "omega/ess_share": "ess share",
            "answers_generated": "answers", "right": "answers right, mean over kinds"}


def ablation_table(args):
    """One change at a time, on the toy; a figure and a table for each question."""
    if args.scale != "toy":
        raise UserError("ablations: of the toy only; --list shows the flags to try elsewhere")
    entries = {question: {label: entry if isinstance(entry, tuple) else (entry, METHODS[entry])
                          for label, entry in ABLATIONS[question].items()}
               for question in chosen(args, ABLATIONS)}
    every = [entry for labels in entries.values() for entry in labels.values()]
    files_of = execute(args, {name: command for name, command, *_ in every},
                       toy_rows={name: rows[0] for name, _, *rows in every if rows})
    if args.list:
        return
    results, claims = {}, []
    for question, labels in entries.items():
        rows = {label: [prefer_unmasked(read_result(file.parent)) | last_metrics(file)
                        for file in files_of[name]] for label, (name, *_) in labels.items()}
        results[question] = rows
        columns = measured(MEASURES, rows)
        print("\n" + table([question, *columns.values()], summary_rows(rows, columns)))
        first, *others = rows
        pairs = [(label, first) for label in others] + [
            pair for pair in AGAINST_DROP if first not in pair and set(pair) <= set(rows)]
        claims += claims_of([(f"{question}: {label} below {than}", label, than, UPPER)
                             for label, than in pairs], rows)
    print_claims(claims, "loss")
    panels_figure(Path("results") / f"{args.name}_ablations.png", "held-out upper loss", {
        question: {label: [run["upper_heldout"] for run in runs] for label, runs in rows.items()}
        for question, rows in results.items()})
    store(args, {f"{question}: {label}": runs for question, rows in results.items()
                 for label, runs in rows.items()}, MEASURES, claims=claims)


def last_metrics(file):
    """omega's effective sample size at the end, and how often generated answers are right.

    `right` is the plain mean of the shares `answers_right/KIND` of metrics.jsonl over kinds of the
    original answer and over refreshes, however many answers each of them has.
    """
    rows, found = utils.read_jsonl(file.with_name("metrics.jsonl")), {}
    for row in rows:
        if "omega/ess_share" in row:
            found["omega/ess_share"] = row["omega/ess_share"]
        for key, value in row.items():
            if key.startswith("answers_right/"):
                found.setdefault(key, []).append(value)
    shares = {key: value for key, value in found.items() if key.startswith("answers_right/")}
    right = [sum(parts) / len(parts) for parts in zip(*shares.values(), strict=False)]
    return found | ({"right": sum(right) / len(right)} if right else {})


# --- null controls of the toy ---------------------------------------------------------------------

EVEN = "--noise 0.6 --contrary 0.6666667"  # both conventions as frequent
CONTROLS = {  # name: (command, toy rows)
    "as it is: BDS": (BDS, ""), "as it is: BDS corrected": (CORRECTED, ""),
    "no bad rows: rho schedule": (METHODS["mixing, rho schedule"], "--noise 0"),
    "no bad rows: BDS": (BDS, "--noise 0"),
    "unrelated upper: BDS": (BDS, "--upper unrelated"),
    "even conventions: BDS": (BDS, EVEN),
    "even, unrelated upper: BDS": (BDS, f"{EVEN} --upper unrelated")}


def null_controls(args):
    """What must come out as nothing: permuted labels, no bad rows, an upper set of other tasks.

    By default clean rows outnumber contrary ones three to one, and any training on the lower set
    learns the majority's convention; the pair with even conventions shows what the trusted set
    alone adds.
    """
    if args.scale != "toy":
        raise UserError("controls: of the toy only")
    run_of = {name: name.removeprefix("as it is: ") for name in CONTROLS}  # these have other runs
    files_of = execute(args, {run_of[name]: command for name, (command, _) in CONTROLS.items()},
                       toy_rows={run_of[name]: rows for name, (_, rows) in CONTROLS.items()})
    if args.list:
        return
    results = results_of({name: files_of[run_of[name]] for name in CONTROLS})
    for name in ("BDS", "BDS corrected"):
        results[f"labels permuted: {name}"] = [
            {f"weight/{key}": value for key, value in ranking_scores(
                file.with_name("weights.jsonl"), lambda row: -row["rank"], seed).items()}
            for seed, file in enumerate(files_of[name])]
    columns = {"upper_heldout": "held-out upper"} | {
        key: heading for key, heading in RANKS.items() if "length" not in key}
    print(table(["control", *columns.values()], summary_rows(results, columns)))
    store(args, results, columns)
