"""Questions that the paper's tables leave open, one command each.

    python experiments.py selectors     # known bad rows: which ranking finds them, in what time?
    python experiments.py curated       # is the curated set worth it?
    python experiments.py ablations     # what matters and what does not (toy)
    python experiments.py controls      # what must come out as nothing (toy)

Scales, seeds and folders are reproduce.py's, whose finished runs are used again.
"""

import shlex
from pathlib import Path

import compare
import toy
import utils
from eval import ranking_metrics, read_result, table
from paper.reproduce import (
    METHODS,
    OFF,
    ON,
    RANKS,
    SHORT_DYNAMIC,
    UPPER,
    budget_of,
    chosen,
    claims_of,
    execute,
    parse_args,
    present,
    results_of,
    setting,
    store,
    summarise,
    with_base,
    words_of,
)
from paper.running import panels_figure, prefer_unmasked, run_all, seconds_of, slug, verdict
from utils import UserError

# --- known bad rows: which ranking finds them -----------------------------------------------------

BASELINES = ("random", "DSIR", "LESS", "loss", "length", "IFD")
ADAM = "--omega-optimizer adam --omega-lr 1e-4"
CORRECTED = f"{OFF} --correction 0.7"


def selectors(args):
    """AUROC, precision and recall of every selector on a lower set with known bad rows."""
    runs = {"BDS": OFF, "BDS corrected": CORRECTED, "BDS, published rate": f"{OFF} {ADAM}"}
    runs = {name: runs[name] for name in runs
            if name in ("BDS", "BDS corrected", *chosen(args, runs))}
    found = execute(args, runs, Path("runs") / args.name, also_score=BASELINES)
    if args.list:
        return
    rows = {}
    for title, run, score in (("omega, published rate", "BDS, published rate", "weight"),
                              ("omega", "BDS", "weight"),
                              ("loss under the guided model", "BDS", "final"),
                              ("omega, corrected", "BDS corrected", "weight"),
                              ("corrected loss", "BDS corrected", "corrected")):
        rows[title] = [{key.removeprefix(f"{score}/"): value
                        for key, value in read_result(file.parent).items()
                        if key.startswith(f"{score}/")} | {"seconds": seconds_of(file)}
                       for file in found.get(run, ())]
    rows = {title: values for title, values in rows.items() if values}
    if "auroc" not in rows["omega"][0]:
        raise UserError("selectors: the lower rows have no column `bad`; name a file that has")
    for method in BASELINES:
        rows[method] = [ranking_scores(file) | {"seconds": seconds_of(file)}
                        for file in found[method]]
    keys = sorted({key for runs in rows.values() for run in runs for key in run} - {"seconds"},
                  key=lambda key: (key.count("/"), key))
    columns = {key: key for key in keys} | {"seconds": "seconds"}
    print("\nAUROC, precision when as many rows are flagged as are bad, recall by kind of fault")
    print(table(["selector", *columns], summarise(rows, columns)))
    claims = [[f"{name} misranks fewer pairs than the base model's own loss",
               *verdict([1 - run["auroc"] for run in rows[name]],
                        [1 - run["auroc"] for run in rows["loss"]])]
              for name in ("omega", "omega, corrected", "corrected loss", "LESS", "IFD")]
    print(table(["claim", "here", "difference in 1 - AUROC"], claims))
    kinds = [key for key in keys if key.startswith("auroc")]
    panels_figure(Path("results") / f"{args.name}_selectors.png", "AUROC", {
        key.removeprefix("auroc/").replace("auroc", "all"): {
            name: [run[key] for run in runs] for name, runs in rows.items()}
        for key in kinds}, chance=0.5)
    store(args, rows, columns, claims=claims)


def ranking_scores(file):
    """Ranking metrics of a kept.jsonl against its own columns bad and, where it has one, kind."""
    import torch

    rows = utils.read_jsonl(file)
    return ranking_metrics(torch.tensor([row["score"] for row in rows], dtype=torch.float64),
                           torch.tensor([row["bad"] for row in rows]),
                           [row.get("kind") or "bad" for row in rows])


# --- is the curated set worth it? -----------------------------------------------------------------

def without(words, *flags):
    """The words less these flags and their values, given as `--flag value` or `--flag=value`."""
    kept, skip = [], False
    for word in words:
        if not skip and word.split("=")[0] not in flags:
            kept.append(word)
        skip = not skip and word in flags
    return kept


def curated(args):
    """A fresh base on the raw set, a random k, the top k, the top k with the recommended rewrites.

    All read as many tokens as three passes over the raw set. The online run's R covers what is not
    kept, so that every dropped question may come back with a new answer.
    """
    if not 0 < args.keep_fraction < 1:
        raise UserError(f"--keep-fraction {args.keep_fraction}: must lie between 0 and 1")
    scale, folder, share = setting(args), Path("runs") / args.name, args.keep_fraction
    online = f"online R={1 - share:.0%}, exported"
    plain = "mixing rho=1"  # is plain fine-tuning on the raw set
    found = execute(args, {plain: METHODS[plain], "BDS": OFF, online: (
        f"{ON} --ratio-masked {1 - share:.6g} --keep-fraction {share} "
        "--export-format prompt-completion")}, folder, also_score=("random",))
    if args.list:
        return
    plan, files = {}, {"raw set": found[plain]}
    for seed in range(args.seeds):
        raw = other = words_of(scale["data"], scale["train"])
        if args.scale == "toy":
            paths = toy.write(folder / "rows" / f"seed-{seed}", seed=seed)
            other = ["--model", str(toy.MODEL), "--upper-heldout", str(paths["heldout"]),
                     "--lower-heldout", str(paths["lower_heldout"]),
                     *words_of("--max-length 128 --lr 1e-3 --micro-batch 32")]
            raw = [*other, "--lower", str(paths["lower"])]
        bds, refined = found["BDS"][seed].parent, found[online][seed].parent
        kept = {name: folder / "curated" / f"{name}-{seed}.jsonl"
                for name in ("random", "bds", "online")}
        for name, source in (("random", found["random"][seed]), ("bds", bds), ("online", refined)):
            compare.keep(source, share, kept[name])
        rewritten = without(other, "--lower", "--lower-limit", "--lower-columns", "--lower-split")
        budget = budget_of(found[plain][seed].parent)
        for name, flags in (
                ("random k", [*raw, "--keep", str(kept["random"])]),
                ("top k by BDS", [*raw, "--keep", str(kept["bds"])]),
                ("top k by the online run", [*raw, "--keep", str(kept["online"])]),
                ("... with its rewrites",
                 [*rewritten, "--lower", str(refined / "curated.prompt-completion.jsonl")])):
            out = folder / "curated" / slug(name) / f"seed-{seed}"
            plan[out / "result.json"] = shlex.join(
                [OFF, "--method", "sft", *flags, "--token-budget", str(budget), "--seed", str(seed),
                 "--out", str(out)])
            files.setdefault(name, []).append(out / "result.json")
    run_all(plan, args.workers)
    results = results_of(files)
    for name in ("raw set", "random k", "top k by BDS", "top k by the online run"):
        for run, file in zip(results[name], files[name], strict=True):
            rows = utils.read_jsonl(file.with_name("weights.jsonl"))
            if "bad" in rows[0]:
                run["bad_share"] = sum(row["bad"] for row in rows) / len(rows)
    if args.scale == "toy":
        for run, file in zip(results["... with its rewrites"], found[online], strict=True):
            rows = utils.read_jsonl(file.with_name("curated.prompt-completion.jsonl"))
            run["bad_share"] = sum(toy.kind_of(row["prompt"], row["completion"]) != "clean"
                                   for row in rows) / len(rows)
    columns = present({"upper_heldout": "held-out upper", "upper_exact": "exact answers",
                       "lower_heldout": "lower, clean", "rows": "rows", "bad_share": "bad rows"},
                      results)
    print("\na fresh base fine-tuned on each set, equal tokens")
    print(table(["trained on", *columns.values()], summarise(with_base(results), columns)))
    claims = claims_of([
        ("the top k are better than the raw set", "top k by BDS", "raw set", UPPER),
        ("the top k are better than a random k", "top k by BDS", "random k", UPPER),
        ("rewrites add to the top k", "... with its rewrites", "top k by the online run", UPPER)],
        results)
    print(table(["claim", "here", "difference in loss"], claims))
    store(args, results, columns, claims=claims)


# --- ablations of the toy -------------------------------------------------------------------------

ON40, ON20 = f"{ON} --ratio-masked 0.4", f"{ON} --ratio-masked 0.2 --num-answers 4"
LATE = f"{ON40} --mask dynamic --first-refresh 150 --center"
EVEN = "--toy-noise 0.6 --toy-contrary 0.6666667"
ABLATIONS = {  # question: {label: method or (name, command)}
    "omega's optimiser": {
        "frozen": "mixing, rho schedule",
        "Adam 1e-4 (published)": ("BDS, published rate", f"{OFF} {ADAM}"),
        "Adam 5e-3 (SEAL)": ("omega Adam 5e-3",
                             f"{OFF} --omega-optimizer adam --omega-lr 5e-3"),
        "SGD 10": ("omega SGD 10", f"{OFF} --omega-lr 10"), "SGD 30": "BDS",
        "SGD 100": ("omega SGD 100", f"{OFF} --omega-lr 100"),
        "SGD 300": ("omega SGD 300", f"{OFF} --omega-lr 300")},
    "omega's loss": {
        "at theta^{k+1}": "BDS", "at theta^k": ("omega at theta^k", f"{OFF} --omega-loss current"),
        "centred": ("omega centred", f"{OFF} --center"),
        "without gamma": ("omega without gamma", f"{OFF} --no-omega-gamma"),
        "corrected": ("BDS corrected", CORRECTED)},
    "ratio (R = 20 %, G = 4)": {
        name: (f"ratio {name}", f"{ON20} --ratio {name}")
        for name in ("sequence", "token-mean", "lambda", "none")},
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
        "generate": ("online R=40%", ON40), "drop": ("drop R=40%", f"{ON40} --masked drop"),
        "original": "BDS"},
    "mask (R = 40 %)": {
        "static": ("online R=40%", ON40),
        "dynamic": ("dynamic R=40%", f"{ON40} --mask dynamic{SHORT_DYNAMIC}"),
        "dynamic, sticky": ("sticky R=40%", f"{ON40} --mask dynamic --sticky-mask{SHORT_DYNAMIC}"),
        "dynamic from step 150": ("dynamic late R=40%", LATE),
        "dynamic from step 150, dropped": ("dynamic late drop R=40%", f"{LATE} --masked drop"),
        "dynamic, dropped": ("dynamic drop R=40%",
                             f"{ON40} --mask dynamic --masked drop{SHORT_DYNAMIC}")},
    "answers ahead": {
        "those read next": ("online R=40%", ON40),
        "all": ("generate all", f"{ON40} --generate all")},
    **{level: {
        method: method if share == 0.4 else (  # the toy as it is
            f"{level}: {method}", f"{METHODS[method]} --toy-noise {share}")
        for method in ("BDS", "mixing rho=0.5", "online R=10% G=1", "control: drop")}
       for level, share in {"no bad rows": 0, "20 % bad": 0.2, "40 % bad": 0.4, "60 % bad": 0.6,
                            "80 % bad": 0.8}.items()},
}
# New answers against leaving the same rows out: does generation do more?
AGAINST_DROP = (("generate", "drop"), ("dynamic", "dynamic, dropped"),
                ("dynamic from step 150", "dynamic from step 150, dropped"),
                ("online R=10% G=1", "control: drop"))
MEASURES = {"upper_heldout": "held-out upper", "lower_heldout": "lower, clean",
            "weight/auroc/contrary": "AUROC contrary", "omega/ess_share": "ess share",
            "answers_generated": "answers", "right": "answers right, mean over kinds"}


def ablations(args):
    """One change at a time, on the toy; a figure and a table for each question."""
    if args.scale != "toy":
        raise UserError("ablations: of the toy only; --list shows the flags to try elsewhere")
    named = {question: {label: (entry if isinstance(entry, tuple) else (entry, METHODS[entry]))
                        for label, entry in ABLATIONS[question].items()}
             for question in chosen(args, ABLATIONS)}
    methods = {name: command for values in named.values() for name, command in values.values()}
    found = execute(args, methods, Path("runs") / args.name)
    if args.list:
        return
    results, claims = {}, []
    for question, values in named.items():
        rows = {}
        for label, (name, _) in values.items():
            rows[label] = [prefer_unmasked(read_result(file.parent)) | last_metrics(file)
                           for file in found[name]]
        results[question] = rows
        columns = present(MEASURES, rows)
        print("\n" + table([question, *columns.values()], summarise(rows, columns)))
        first, *others = rows
        pairs = [(label, first) for label in others] + [
            pair for pair in AGAINST_DROP if first not in pair and set(pair) <= set(rows)]
        claims += [[f"{question}: {label} below {than}", *verdict(
            [run["upper_heldout"] for run in rows[label]],
            [run["upper_heldout"] for run in rows[than]])] for label, than in pairs]
    print("\n" + table(["upper loss", "here", "difference in loss"], claims))
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
    for key, values in shares.items():  # of every refresh, in order
        found[key] = values
    right = [sum(parts) / len(parts) for parts in zip(*shares.values(), strict=False)]
    return found | ({"right": sum(right) / len(right)} if right else {})


def controls(args):
    """Null controls of the toy: permuted labels, no bad rows, an upper set about something else.

    By default clean rows outnumber contrary ones three to one, and any training on the lower set
    learns the majority's convention; the pair with even conventions shows what the trusted set
    alone adds.
    """
    if args.scale != "toy":
        raise UserError("controls: of the toy only")
    folder, frozen = Path("runs") / args.name, METHODS["mixing, rho schedule"]
    methods = {"as it is: BDS": OFF, "as it is: BDS corrected": CORRECTED,
               "no bad rows: rho schedule": f"{frozen} --toy-noise 0",
               "no bad rows: BDS": f"{OFF} --toy-noise 0",
               "unrelated upper: BDS": f"{OFF} --toy-upper unrelated",
               "even conventions: BDS": f"{OFF} {EVEN}",
               "even, unrelated upper: BDS": f"{OFF} {EVEN} --toy-upper unrelated"}
    shared = {"as it is: BDS": "BDS", "as it is: BDS corrected": "BDS corrected"}
    found = execute(args, {shared.get(name, name): command for name, command in methods.items()},
                    folder)
    if args.list:
        return
    results = results_of({name: found[shared.get(name, name)] for name in methods})
    for name in list(shared):
        results[name.replace("as it is", "labels permuted")] = [
            permuted_labels(file.parent, seed) for seed, file in enumerate(found[shared[name]])]
    keys = {"upper_heldout": "held-out upper"} | {
        key: heading for key, heading in RANKS.items() if "length" not in key}
    print(table(["control", *keys.values()], summarise(results, keys)))
    store(args, results, keys)


def permuted_labels(folder, seed):
    """AUROCs of a run's own weights against its labels in random order: one half, or a bug."""
    import torch

    rows = utils.read_jsonl(folder / "weights.jsonl")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    metrics = ranking_metrics(torch.tensor([-float(row["rank"]) for row in rows]),
                              torch.tensor([rows[i]["bad"] for i in order]),
                              [rows[i]["kind"] for i in order])
    return {f"weight/{key}": value for key, value in metrics.items()}


TARGETS = {"selectors": selectors, "curated": curated, "ablations": ablations,
           "controls": controls}


def main(argv=None):
    args = parse_args(argv, TARGETS, "experiments.py", "Questions beside the paper's tables.")
    TARGETS[args.target](args)


if __name__ == "__main__":
    utils.run(main)
