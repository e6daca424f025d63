"""What row tests find: faults made on purpose in good rows, found by each ranking.

    python -m paper noise --name 6m --data "--model MODEL --lower good.jsonl --upper trusted.jsonl"

Every good row is scored once as it is and once with each fault (faults.py); a row's numbers do not
depend on the file around it, so files of any mixture are put together from them. Donors of
exchanged answers are in no file. The rows are cut into two halves by prompt: thresholds and scales
were chosen on "develop", figures are quoted from "report". Intervals: 95 %, rows of a file drawn
anew. Row tests without and with trusted rows; loss, length, IFD (of the answer's tokens) and random
as `python -m baselines` has them.
"""

import collections
import random
import shlex
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import models
import ranking
import utils
from baselines.__main__ import open_levels
from baselines.__main__ import parse_args as parse_baseline
from data.tokens import load_rows
from paper import faults
from paper.results import save_results
from runtime import processes
from utils import UserError, table

SHARES = (0.05, 0.3, 0.6)
MIXED = {"swapped, shuffled, cut": ("swapped", "shuffled", "cut middle"),
         "all kinds": tuple(faults.KINDS)}
HALVES = ("develop", "report")
RESAMPLES = 200


# --- rows and their numbers -----------------------------------------------------------------------

def good_and_donors(lower, count, seed):
    """(count good rows, donors), {"prompt", "response"} each, every prompt once, seeded."""
    pairs = dict(zip(lower["prompt"][:], lower["response"][:], strict=True))
    rows = [{"prompt": prompt, "response": response} for prompt, response in pairs.items()]
    random.Random(seed).shuffle(rows)
    if len(rows) < 2 * count:
        raise UserError(f"noise: {count} good rows and as many donors need {2 * count} different "
                        f"prompts; --lower has {len(rows)}; a smaller --rows")
    return rows[:count], rows[count:3 * count]


def faulty_rows(kind, good, donors, seed):
    """[(place, row)] of the good rows that can have this fault."""
    rng = random.Random(f"{seed}-{kind}")
    given = faults.nearest(good, donors) if kind == "swapped near" else [
        donors[n % len(donors)] for n in range(len(good))]
    made = ((place, faults.KINDS[kind](row, donor, rng))
            for place, (row, donor) in enumerate(zip(good, given, strict=True)))
    return [(place, {"prompt": good[place]["prompt"], "response": answer})
            for place, answer in made if answer]


def measure_rankings(folder, name, places, rows, scorer):
    """(tokenised rows, their places, {number: (n,)}) of some rows; kept in `folder`.

    scorer: a namespace of model, tokenizer, ends, blank and options of `load_rows`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source, file = folder / f"{name}.jsonl", folder / f"{name}.safetensors"
    if not source.exists():
        utils.write_jsonl(source, rows)
    tokens, _ = load_rows(str(source), scorer["tokenizer"], **scorer["options"])
    if not file.exists():
        blank = scorer["blank"] or ranking.blank_prompt(tokens)
        save_file({key: values.contiguous() for key, values in ranking.row_evidence(
            scorer["model"], tokens, scorer["ends"], blank, label=name).items()}, file)
    scorer["blank"] = scorer["blank"] or ranking.blank_prompt(tokens)
    found = load_file(file) | {"characters": torch.tensor(
        [float(len(text)) for text in tokens["response"][:]], dtype=torch.float64)}
    return tokens, [places[n] for n in tokens["row_id"][:]], found


def file_of(parts, kinds, share, half, seed):
    """One file: (tokenised rows, {number: (n,)}, labels), `share` of the half's rows faulty.

    parts: {kind or "clean": `measured`}. Each kind takes an equal part of the faulty rows.
    """
    import datasets  # not on every machine

    at = {kind: {place: n for n, place in enumerate(parts[kind][1])} for kind in ("clean", *kinds)}
    rows = [place for place in at["clean"] if place % 2 == half]
    random.Random(seed).shuffle(rows)
    wanted, chosen = round(share * len(rows)), {}
    for number, kind in enumerate(kinds):
        count = wanted // len(kinds) + (number < wanted % len(kinds))
        free = [place for place in rows if place not in chosen and place in at[kind]]
        chosen |= dict.fromkeys(free[:count], kind)
    labels = [chosen.get(place, "clean") for place in rows]
    picked = [(parts[kind], at[kind][place]) for place, kind in zip(rows, labels, strict=True)]
    found = {name: torch.stack([part[2][name][n] for part, n in picked])
             for name in parts["clean"][2]}
    tokens = datasets.Dataset.from_list([
        {name: part[0][n][name] for name in ("input_ids", "trained")} for part, n in picked])
    return tokens, found, labels


# --- what the rankings make of a file -------------------------------------------------------------

def interval(scores, bad, seed):
    """The 95 % interval of the AUROC, rows drawn anew."""
    generator, values = torch.Generator().manual_seed(seed), []
    for _ in range(RESAMPLES):
        drawn = torch.randint(len(bad), (len(bad),), generator=generator)
        value = ranking.auroc(scores[drawn], bad[drawn])
        if value is not None:
            values.append(value)
    return torch.quantile(torch.tensor(values), torch.tensor([0.025, 0.975])).tolist()


def judged(found, made, trusted, labels, seed):
    """{ranking: figures} of one file: AUROC with interval, by kind; what the tests flagged."""
    bad = torch.tensor([label != "clean" for label in labels])
    tests = {"tests": ranking.verdicts(found, None, made)}
    if trusted is not None:
        tests["tests, trusted"] = ranking.verdicts(found, trusted, made)
    blank = found["fluency"] - found["relevance"] / found["length"].clamp_min(1)
    scores = {name: -verdict[0] for name, verdict in tests.items()} | {
        "loss": -found["loss"], "length": found["characters"],
        "IFD": -found["fluency"] / blank.clamp_min(1e-6),
        "random": torch.rand(len(bad), generator=torch.Generator().manual_seed(seed))}
    figures = {}
    for name, values in scores.items():
        own = figures[name] = {}
        if bad.any():
            own |= ranking.ranking_metrics(values, bad, labels)
            own["interval"] = interval(values, bad, seed)
        if name in tests:
            reasons = tests[name][1]
            table_of = collections.defaultdict(collections.Counter)
            for label, reason in zip(labels, reasons, strict=True):
                table_of[label][reason or "not flagged"] += 1
            own["reasons"] = {label: dict(counts) for label, counts in table_of.items()}
            flagged = torch.tensor([reason is not None for reason in reasons])
            own["clean_flagged"] = float(flagged[~bad].double().mean())
            own["found"] = float(flagged[bad].double().mean()) if bad.any() else None
    return figures


def noise_table(args):
    """Faults of every kind in files of every share, found by each ranking; results/noise_NAME.json.
    """
    if not args.data:
        raise UserError("noise: name the rows: --data '--model MODEL --lower good.jsonl [--upper "
                        "trusted.jsonl]'")
    folder = Path("runs") / f"noise_{args.name}"
    given = parse_baseline(["tests", *shlex.split(args.data), "--out", str(folder / "unused")])
    plan = {(name, share): kinds for name, kinds in (
        MIXED | {kind: (kind,) for kind in faults.KINDS}).items() for share in SHARES}
    if args.list:
        print("\n".join(f"{name}, {share:.0%} bad" for name, share in plan))
        return
    levels, tokenizer = open_levels(given), models.load_tokenizer(given.model)
    good, donors = good_and_donors(levels.lower, args.rows, given.seed)
    scorer = {"model": models.load_model(given.model, processes.pick_device(given.device),
                                         given.dtype, given.four_bit),
              "tokenizer": tokenizer, "ends": ranking.end_ids(tokenizer), "blank": None,
              "options": {"template": given.template, "max_length": given.max_length,
                          "cache_dir": given.cache_dir}}
    parts = {"clean": measure_rankings(folder, "clean", range(len(good)), good, scorer)}
    for kind in faults.KINDS:
        places, rows = zip(*faulty_rows(kind, good, donors, given.seed), strict=True)
        parts[kind] = measure_rankings(folder, kind.replace(" ", "_"), places, rows, scorer)
    trusted = None
    if levels.upper is not None:
        rows = [{"prompt": row["prompt"], "response": row["response"]} for row in
                levels.upper.select(range(min(ranking.TRUSTED, len(levels.upper))))]
        trusted = measure_rankings(folder, "trusted", range(len(rows)), rows, scorer)[2]
    results = {half: {} for half in HALVES}
    files = [("clean", 0.0, ()), *((name, share, kinds) for (name, share), kinds in plan.items())]
    for number, half in enumerate(HALVES):
        for name, share, kinds in tqdm(files, desc=half):
            tokens, found, labels = file_of(parts, kinds, share, number, given.seed)
            made = ranking.made_faults(scorer["model"], tokens, scorer["ends"], found, given.seed)
            results[half][f"{name}, {share:.0%}"] = judged(found, made, trusted, labels, given.seed)
    save_results(Path("results") / f"noise_{args.name}.json", args.command, results,
                 rows=len(good), trusted=0 if trusted is None else len(trusted["end"]))
    print_noise(results["report"])


def print_noise(results):
    """AUROC of every file by every ranking, and the reasons given in the file of all kinds."""
    names = list(next(iter(results.values())))
    print(table(["AUROC", *names, "clean rows flagged", "bad rows flagged"], [
        [file, *(figures[name].get("auroc") for name in names),
         *(figures["tests"][key] for key in ("clean_flagged", "found"))]
        for file, figures in results.items()]))
    for name in [name for name in names if name.startswith("tests")]:
        reasons = results["all kinds, 30%"][name]["reasons"]
        columns = sorted({reason for counts in reasons.values() for reason in counts})
        print(f"\n{name}: reasons in the file of all kinds, 30 % bad\n" + table(
            ["fault", *columns], [[label, *(counts.get(reason, 0) for reason in columns)]
                                  for label, counts in sorted(reasons.items())]))
