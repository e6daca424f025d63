"""The paper's runtime table: published hours, and hours extrapolated from steps measured here."""

import math

import batches
import generate
from benchmarks.measure import spread, store_and_print, time_variants
from benchmarks.shapes import SHAPES, load_shape
from benchmarks.step import step_variants
from runtime import processes
from utils import UserError

PUBLISHED_HOURS = {  # H100 96 GB, Pythia-1b and Llama-3-8b (the paper's runtime table)
    "mixing": (0.24, 10.53), "DSIR": (0.27, 11.23), "BDS": (0.31, 11.75), "LESS": (0.84, 28.75),
    "online R=5% G=1": (0.43, 13.28), "online R=10% G=1": (0.47, 13.78),
    "online R=10% G=5": (0.86, 30.46)}
PUBLISHED_RUN = {"batch": 32, "epochs": 3, "k_gen": 500, "max_new_tokens": 512}
PUBLISHED_ROWS = {"pythia-1b": 9600, "llama3-8b": 56000}
MEASURED = {"mixing": "plain SFT", "BDS": "BDS, loss at theta^{k+1}",
            "online": "online, R=10%, G=1"}  # by their names in step.py
ASSUMED = ("extrapolated: seconds of a measured step x steps of three epochs, plus the answers "
           "of every refresh at the measured tokens a second, rows of the assumed mean lengths; "
           "evaluation and loading are left out")


def hours_of(step, seconds_per_answer, num_rows, lower_share):
    """{method: hours} of the published run over `num_rows` rows.

    step: seconds of a step by the keys of MEASURED. lower_share: of a step's tokens, those of the
    lower level.
    """
    steps = math.ceil(num_rows / PUBLISHED_RUN["batch"]) * PUBLISHED_RUN["epochs"]
    refreshes = math.ceil(steps / PUBLISHED_RUN["k_gen"])
    window = min(num_rows, PUBLISHED_RUN["k_gen"] * PUBLISHED_RUN["batch"])  # what will be read
    hours = {name: step[name] * steps / 3600 for name in ("mixing", "BDS")}
    for share, group in ((0.05, 1), (0.1, 1), (0.1, 5)):
        # G answers to a masked row: G - 1 more rows in that share of the lower level.
        training = step["online"] * (1 + (group - 1) * share * lower_share) * steps
        answering = refreshes * window * share * group * seconds_per_answer
        hours[f"online R={round(100 * share)}% G={group}"] = (training + answering) / 3600
    return hours


def extrapolate(args, device, shape):
    """{method: hours} for one of SHAPES."""
    batch = PUBLISHED_RUN["batch"]
    count = batch * args.rounds
    model, lower, upper = load_shape(shape, device, count, args.lower_tokens, args.upper_tokens,
                                     args.gradient_checkpointing)
    rounds = [list(range(i, i + batch)) for i in range(0, count, batch)]
    variants = step_variants(model, lower, upper, rounds, args.micro_batch)
    seconds = time_variants({key: variants[name] for key, name in MEASURED.items()}, args.rounds,
                            device, f"steps, {shape}")
    answering = time_variants({"answers": lambda _: generate.generate(
        model, [batches.prompt_of(row) for row in lower], [str(i) for i in range(count)],
        max_new_tokens=args.max_new_tokens, temperature=0.8, end_ids=[0],
        batch_size=args.generation_batch)}, 1, device, f"answers, {shape}")["answers"][0]
    return hours_of({key: spread(values)["median"] for key, values in seconds.items()},
                    answering / count, PUBLISHED_ROWS.get(shape, count),
                    args.lower_tokens / (args.lower_tokens + args.upper_tokens))


def beside_published(measured):
    """(results, table rows): the published hours, those of {shape: {method: hours}} and ratios."""
    results, rows = {}, []
    for name, published in PUBLISHED_HOURS.items():
        hours = dict(zip(PUBLISHED_ROWS, published, strict=True))
        results[name] = {
            "published_hours": hours,
            "extrapolated_hours": {shape: found.get(name) for shape, found in measured.items()},
            "published_over_here": {shape: hours[shape] / found[name]
                                    for shape, found in measured.items()
                                    if shape in hours and name in found}}
        here = [measured.get(shape, {}).get(name) for shape in hours]
        rows.append([name] + [cell for shape, found in zip(hours, here, strict=True) for cell in
                              (hours[shape], "not measured" if found is None else round(found, 2))])
    return results, rows


def bench_table2(args):
    if args.model and args.model not in SHAPES:
        raise UserError(f"--model {args.model}: table2 knows " + ", ".join(SHAPES))
    device = processes.pick_device(args.device)
    measured = {}
    if device.type == "cuda" or args.model:
        measured = {shape: extrapolate(args, device, shape)
                    for shape in ([args.model] if args.model else PUBLISHED_ROWS)}
    else:
        print("no CUDA device: the published hours stand alone; a CPU's step says nothing about "
              "them")
    results, rows = beside_published(measured)
    store_and_print(args, device, {
        "lower tokens a row": args.lower_tokens, "upper tokens a row": args.upper_tokens,
        **PUBLISHED_RUN, "max_new_tokens": args.max_new_tokens}, results,
           ["hours", "Pythia-1b, published", "extrapolated here", "Llama-8b, published",
            "extrapolated here"], rows)
    if measured:
        print(ASSUMED)
