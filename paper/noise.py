"""What row tests find: faults made on purpose in good rows, found by each ranking.

    python -m paper noise --name 6m --data "--model MODEL --lower good.jsonl --upper trusted.jsonl"

Every good row is scored once as it is and once with each fault that a file needs (faults.py); a
row's numbers do not depend on the file around it, so files of any mixture are put together from
them. Donors of exchanged answers are in no file. The rows are cut into two halves by prompt:
thresholds and scales were chosen on "develop", figures are quoted from "report" (--only report
makes no other). Intervals: 95 %, rows of a file drawn anew. Every number is kept in the run folder,
so that a killed command goes on where it stopped.

Row tests without and with trusted rows, these joined with the loss; loss, length, IFD (of the
answer's tokens), random and, with trusted rows, DSIR (its weights, no noise) and RDS+, as `python
-m baselines` has them. The mixed files lie in the run folder, for what has to be trained:

    python -m paper selectors --scale small --data "--lower runs/noise_6m/report-all-kinds-30.jsonl
        --model MODEL --upper trusted.jsonl"
"""

import collections
import contextlib
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

import batches
import models
import ranking
import utils
from baselines.__main__ import open_levels
from baselines.__main__ import parse_args as parse_baseline
from baselines.dsir import dsir_log_weights, row_texts
from baselines.rds import first_turns, pooled
from baselines.scores import joined_scores
from batches import each_row, row_losses
from data import sets
from data.text_reasons import text_reasons
from data.tokens import end_ids, fact_reader, load_rows
from evaluation.runs import make_parent
from paper import faults
from paper.figures import panels_figure
from paper.plans import chosen, words_of
from paper.results import save_results
from paper.running import slug
from runtime import processes
from utils import UserError, table

SHARES = (0.05, 0.3, 0.6)
MIXED = {"swapped, shuffled, cut": ("swapped", "shuffled", "cut middle"),
         "all kinds": tuple(faults.KINDS)}
HALVES = ("develop", "report")
RESAMPLES = 200
FEWEST = 10  # rows of a half that can have every fault


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


def saved_rows(folder, name, rows, scorer):
    """Tokenised rows of the run folder's NAME.jsonl, which is written once.

    scorer: a namespace of model, tokenizer, ends, blank and options of `load_rows`.
    """
    source = folder / f"{name}.jsonl"
    if not source.exists():
        make_parent(source)
        utils.write_jsonl(source, rows)
    elif utils.read_jsonl(source) != rows:
        raise UserError(f"{source}: made of other rows than those of now; choose another --name")
    return load_rows(str(source), scorer.tokenizer, **scorer.options)[0]


@contextlib.contextmanager
def vectors_seen(model):
    """{tokens of a row: its RDS+ vector} of every row that the model reads meanwhile."""
    seen = {}

    def keep(module, args, batch, output):
        lengths = batch["cu_seqlens"].diff().tolist()
        seen.update(zip((tuple(ids.tolist()) for ids in batch["input_ids"][0].split(lengths)),
                        pooled(output[0][0], batch), strict=True))

    handle = model.base_model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def evidence_of(folder, name, tokens, scorer):
    """{number: (n,)} of `ranking.row_evidence`, from the run folder if it is there already.

    Also "characters", and "vector" (n, hidden size), what RDS+ compares.
    """
    file, found = folder / f"{name}.safetensors", {}
    if file.exists():
        found = load_file(file)
    if not {*ranking.EVIDENCE, "vector"} <= set(found):
        with vectors_seen(scorer.model) as seen:
            found = {key: values.contiguous() for key, values in ranking.row_evidence(
                scorer.model, tokens, scorer.ends, scorer.facts, scorer.blank, label=name).items()}
        found["vector"] = torch.stack([seen[tuple(ids)] for ids in tokens["input_ids"][:]])
        utils.write_atomic(file, save(found))
    return found | {"characters": torch.tensor(
        [float(len(text)) for text in tokens["response"][:]], dtype=torch.float64)}


class Losses:
    """`row_losses` of a model that remembers, in a file too, every row that it has seen.

    The faults that `ranking.made_faults` makes of a row do not depend on the rows around it, but
    for the answer that it is given, so that files of the same prompts share most of them.
    """

    def __init__(self, model, file):
        self.model, self.file = model, file
        self.known = {row["hash"]: (row["loss"], row["length"]) for row in (
            utils.read_jsonl(file) if file.exists() else ())}

    def __call__(self, rows):
        hashes = [utils.content_hash(str(row["input_ids"]), str(row["trained"])) for row in rows]
        new = list({key: n for n, key in enumerate(hashes) if key not in self.known}.values())
        if new:
            losses, lengths = row_losses(self.model, [rows[n] for n in new])
            self.known |= {hashes[n]: pair for n, *pair in zip(
                new, losses.tolist(), lengths.tolist(), strict=True)}
            utils.write_jsonl(self.file, [{"hash": key, "loss": loss, "length": length}
                                          for key, (loss, length) in self.known.items()])
        losses, lengths = zip(*(self.known[key] for key in hashes), strict=True)
        return torch.tensor(losses, dtype=torch.float64), torch.tensor(lengths)


def print_forwards(folder, tokens, files, made, scorer):
    """What is left to do: forwards of rows, tokens, and minutes by a forward timed here.

    tokens: {name: tokenised rows}; files: how many are judged; made: how many faults `Losses`
    knows. Of every file FAULTS rows are cut and as many exchanged, some of them in other files too.
    """
    lengths = {name: sets.row_lengths(rows) for name, rows in tokens.items()}
    answers = {name: torch.tensor([sum(trained) for trained in rows["trained"][:]])
               for name, rows in tokens.items()}
    left = [name for name in tokens if not (folder / f"{name}.safetensors").exists()]
    forwards = 2 * sum(len(lengths[name]) for name in left)
    count = sum(int((lengths[name] + answers[name]).sum()) + len(scorer.blank) * len(lengths[name])
                for name in left)
    faults_left = max(0, 2 * files * min(ranking.FAULTS, len(lengths["clean"])) - made)
    count += round(faults_left * float(torch.cat(list(lengths.values())).double().mean()))
    clean = batches.tokens_only(tokens["clean"])
    sample = batches.take(clean, range(min(16, len(clean))))
    row_losses(scorer.model, sample)  # warms up
    started = time.perf_counter()
    row_losses(scorer.model, sample)
    rate = batches.count_tokens(sample) / (time.perf_counter() - started)
    print(f"at most {forwards + faults_left} forwards of rows, {count} tokens, at {rate:.0f} "
          f"tokens/s measured here: {count / rate / 60:.1f} minutes", flush=True)


def labels_of(places, kinds, share, half, seed):
    """{place: what its row is, a kind or "clean"} of one file, in its order; `share` are faulty.

    places: {kind or "clean": places of the rows that can be it}. Each kind takes an equal part of
    the faulty rows. Only rows that can have all kinds are in the file: else whether a row can have
    the fault would tell good rows from bad ones (an answer of one sentence cannot be cut behind the
    first).
    """
    able = set.intersection(*(set(places[kind]) for kind in ("clean", *kinds)))
    rows = sorted(place for place in able if place % 2 == half)
    random.Random(seed).shuffle(rows)
    wanted, labels = round(share * len(rows)), {}
    for number, kind in enumerate(kinds):
        count = wanted // len(kinds) + (number < wanted % len(kinds))
        free = [place for place in rows if place not in labels]
        labels |= dict.fromkeys(free[:count], kind)
    return {place: labels.get(place, "clean") for place in rows}


def file_of(parts, labels):
    """The rows of one file: tokens and numbers (found) of those that `labels_of` names."""
    import datasets  # not on every machine

    at = {kind: {place: n for n, place in enumerate(part.places)} for kind, part in parts.items()}
    picked = [(parts[kind], at[kind][place]) for place, kind in labels.items()]
    return SimpleNamespace(
        labels=list(labels.values()),
        found={name: torch.stack([part.found[name][n] for part, n in picked])
               for name in parts["clean"].found},
        tokens=datasets.Dataset.from_list([
            {name: part.tokens[n][name] for name in ("input_ids", "trained", "prompt", "response")}
            for part, n in picked]))


def write_file(path, file):
    """The rows of `file_of` with the columns bad and kind, which labelled rows have elsewhere."""
    utils.write_jsonl(path, [
        {"prompt": row["prompt"], "response": row["response"], "bad": label != "clean",
         "kind": label} for row, label in zip(file.tokens, file.labels, strict=True)])


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


def scores_and_verdicts(file, made, trusted, seed, by_text=()):
    """({ranking: scores (n,), higher is better}, {row tests: verdicts}) of the rows of a file.

    file, trusted (or None): tokens and found of their rows. by_text: reasons that need no model.
    """
    found = file.found
    tests = {"tests": ranking.verdicts(found, None, made, by_text)}
    if trusted is not None:
        tests["tests, trusted"] = ranking.verdicts(found, trusted.found, made, by_text)
    blank = found["fluency"] - found["relevance"] / found["length"].clamp_min(1)
    scores = {name: -verdict[0] for name, verdict in tests.items()} | {
        "joined": joined_scores(found["loss"], tests.get("tests, trusted", tests["tests"])[0]),
        "loss": -found["loss"], "length": found["characters"],
        "IFD": -found["fluency"] / blank.clamp_min(1e-6),
        "random": torch.rand(len(blank), generator=torch.Generator().manual_seed(seed))}
    if trusted is not None:
        weights, _ = dsir_log_weights(row_texts(file.tokens), row_texts(trusted.tokens))
        scores["DSIR"] = torch.from_numpy(weights)
        scores["RDS+"] = -first_turns(found["vector"], trusted.found["vector"])[0]
    return scores, tests


def judged(file, made, trusted, seed):
    """{ranking: figures} of one file: AUROC with interval, by kind; what the tests flagged."""
    labels = file.labels
    bad = torch.tensor([label != "clean" for label in labels])
    scores, tests = scores_and_verdicts(
        file, made, trusted, seed, text_reasons(each_row(file.tokens, "prompt", "response")))
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
    """Faults of every kind in files of every share, found by each ranking: results/noise_NAME.json.

    A killed command goes on; a finished table is printed and not made again.
    """
    if not args.data:
        raise UserError("noise: name the rows: --data '--model MODEL --lower good.jsonl [--upper "
                        "trusted.jsonl]'")
    folder = Path("runs") / f"noise_{args.name}"
    stored = Path("results") / f"{folder.name}.json"
    given = parse_baseline(["tests", *words_of(args.data), "--out", str(folder / "unused")])
    plan = [("clean", 0.0, ()), *((name, share, kinds) for name, kinds in (
        MIXED | {kind: (kind,) for kind in faults.KINDS}).items() for share in SHARES)]
    halves = chosen(args, HALVES)
    if args.list:
        print("\n".join(f"{half}: {name}, {share:.0%} bad"
                        for half in halves for name, share, _ in plan))
        return
    for file in (stored, folder / "command.json"):
        check_maker(file, args.command)
    if stored.exists():
        print(f"{stored}: finished; remove it to make the table again")
        show_noise(stored, list(json.loads(stored.read_text())["results"].values())[-1])
        return
    parts, labels, trusted, losses, scorer = measure(args, given, folder, plan, halves)
    results = {half: {} for half in halves}
    for (half, name, share), own in tqdm(labels.items()):
        file = file_of(parts, own)
        if name in MIXED:
            write_file(folder / f"{half}-{slug(name)}-{round(100 * share)}.jsonl", file)
        made = ranking.made_faults(losses, file.tokens, scorer.ends, file.found, given.seed)
        results[half][f"{name}, {share:.0%}"] = judged(file, made, trusted, given.seed)
    save_results(stored, args.command, results, rows=args.rows,
                 trusted=0 if trusted is None else len(trusted.tokens))
    show_noise(stored, results[halves[-1]])


def check_maker(file, command):
    """`UserError` when the file was made by another command, as its own entry says."""
    made = json.loads(file.read_text())["command"] if file.exists() else command
    if made != command:
        raise UserError(f"{file}: made by another command ({made}) than the one wanted now "
                        f"({command}); choose another --name, or remove it and what it made")


def write_maker(file, command):
    """What `check_maker` reads."""
    make_parent(file)
    utils.write_atomic(file, json.dumps({"command": command}) + "\n")


def open_scorer(given):
    """(levels, scorer) of the words that --data has; no blank prompt yet."""
    levels, tokenizer = open_levels(given), models.load_tokenizer(given.model)
    return levels, SimpleNamespace(
        model=models.load_model(given.model, processes.pick_device(given.device), given.dtype,
                                given.four_bit),
        tokenizer=tokenizer, ends=end_ids(tokenizer), facts=fact_reader(tokenizer), blank=None,
        options={"template": given.template, "max_length": given.max_length,
                 "cache_dir": given.cache_dir})


def trusted_rows(levels):
    """[row] of the trusted rows that are read; none without --upper."""
    count = 0 if levels.upper is None else min(ranking.TRUSTED, len(levels.upper))
    return [{"prompt": row["prompt"], "response": row["response"]}
            for row in (levels.upper.select(range(count)) if count else ())]


def measure(args, given, folder, plan, halves):
    """All that files are put together from: (parts, labels, trusted, losses, scorer).

    parts: {kind or "clean": tokens, numbers (found) and places of the rows that a file reads};
    labels: {(half, name, share): `labels_of` of a file}; trusted: tokens and numbers, or None;
    losses: of made faults.
    """
    levels, scorer = open_scorer(given)
    good, donors = good_and_donors(levels.lower, args.rows, given.seed)
    rows = {"clean": list(enumerate(good))} | {
        kind: faulty_rows(kind, good, donors, given.seed) for kind in faults.KINDS}
    every = set.intersection(*({place for place, _ in own} for own in rows.values()))
    few = min(sum(place % 2 == half for place in every) for half in range(len(HALVES)))
    if few < FEWEST:
        rarest = min(rows, key=lambda kind: len(rows[kind]))
        raise UserError(f"noise: {few} rows of one half can have every fault, fewer than {FEWEST}; "
                        f"{len(rows[rarest])} of {len(good)} rows can be {rarest}: give others, or "
                        "more --rows")
    write_maker(folder / "command.json", args.command)
    names = {kind: kind.replace(" ", "_") for kind in rows}
    tokens = {kind: saved_rows(folder, names[kind], [row for _, row in own], scorer)
              for kind, own in rows.items()}
    able = {kind: [rows[kind][n][0] for n in own["row_id"][:]] for kind, own in tokens.items()}
    labels = {(half, name, share): labels_of(able, kinds, share, HALVES.index(half), given.seed)
              for half in halves for name, share, kinds in plan}
    wanted = {pair for own in labels.values() for pair in own.items()}
    parts = {kind: SimpleNamespace(tokens=own.select(
        [n for n, place in enumerate(able[kind]) if (place, kind) in wanted]),
        places=[place for place in able[kind] if (place, kind) in wanted])
        for kind, own in tokens.items()}
    read = {names[kind]: part for kind, part in parts.items()}
    if trusted := trusted_rows(levels):
        read["trusted"] = SimpleNamespace(tokens=saved_rows(folder, "trusted", trusted, scorer))
    scorer.blank = ranking.blank_prompt(tokens["clean"])
    losses = Losses(scorer.model, folder / "made.jsonl")
    print_forwards(folder, {name: part.tokens for name, part in read.items()},
                   len(labels), len(losses.known), scorer)
    for name, part in read.items():
        part.found = evidence_of(folder, name, part.tokens, scorer)
    return parts, labels, read.get("trusted"), losses, scorer


def show_noise(stored, results):
    """AUROC of every file by every ranking, and the reasons given in the file of all kinds.

    Drawn beside the `stored` file, too: a panel a kind, of each ranking a dot a share of bad rows.
    """
    names = list(next(iter(results.values())))
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for file, figures in results.items():
        for name in names:
            if "auroc" in figures[name]:
                panels[file.rpartition(",")[0]][name].append(figures[name]["auroc"])
    panels_figure(stored.with_suffix(".png"), "AUROC", panels, chance=0.5)
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
