"""Does a found or new answer do more than leaving the row out? `python -m paper refine`.

    python -m paper refine                          # the toy at 40, 60 and 80 % bad rows
    python -m paper refine --scale small --data "--model M --lower good.jsonl --upper trusted.jsonl"

Every arm but the last masks the same rows. What stands in for them differs:

    drop            nothing
    generate        the model's own answers, weighted by the ratio: Algorithm 1; up to the first
                    refresh the bad ones train
    accept          answers found in the file that trusted rows vouch for: accept.py
    random          as many found answers, accepted at random
    right answers   the ceiling: all bad rows had their right answers from the start

Masked are the bad rows and no others, from step 0 on. Text: of --rows good rows half or 80 % are
bad, three in four with the answers of one another, one in four cut in the middle; TRUSTED trusted
rows. Settings were chosen on seeds 0 to 2; of the seeds of results/smollm2_repair_refine.json 3 to
5 were run before the objective was chosen.
"""

import json
import random
import shlex
from pathlib import Path

import torch

import batches
import models
import utils
from accept import same
from data import sets
from data.tokens import load_rows
from evaluation.losses import load_trained
from evaluation.runs import read_result
from logprobs import packed_forward
from paper import faults
from paper.noise import check_maker, write_maker
from paper.plans import ON, chosen, setting, toy_words, words_of, write_toy_rows
from paper.results import store
from paper.running import run_all, slug
from paper.statistics import claims_of, measured, print_claims, summary_rows
from toy import corpus
from utils import UserError, table

NOISES = {"toy": (0.4, 0.6, 0.8), "small": (0.5, 0.8)}  # shares of bad rows
# From step 50 on the toy's guided model is right more often than not, which generate needs.
TOY = "--first-refresh 50 --k-gen 25 --center --max-new-tokens 16"
# The lower rows have nine tenths of the objective: at one half the trusted rows alone teach nearly
# all, and even the right answers were 0.03 ahead at most. omega's rate times gamma is about one.
TEXT = ("--epochs 1 --rho-start 0.9 --omega-lr 0.1 --lr 5e-4 --correction 0 --batch 16 "
        "--micro-batch 16 --max-new-tokens 64")
CUT = 1 / 4  # share of cut rows among the bad ones
TRUSTED, HELD_OUT, CLEAN_OUT = 400, 500, 150  # trusted rows, held-out ones, held-out lower ones
TEMPERATURES = torch.arange(10, 41, dtype=torch.float64) / 20  # 0.5 to 2
MEASURES = {"upper_heldout": "held-out upper", "tempered": "one temperature fitted",
            "upper_exact": "exact answers", "lower_heldout": "lower, clean"}
OWN = {"answers_generated": "answers", "precision": "of the rewritten right",
       "coverage": "rewritten of the repairable"}


# --- rows -----------------------------------------------------------------------------------------

def write_mask(folder, tokenizer, max_length):
    """mask.jsonl: a ranking of lower.jsonl that keeps its good rows."""
    rows, _ = load_rows(str(folder / "lower.jsonl"), tokenizer, max_length=max_length)
    bad, ids, hashes = (rows[name][:] for name in ("bad", "row_id", "hash"))
    utils.write_jsonl(folder / "mask.jsonl", (
        {"row_id": ids[n], "hash": hashes[n], "rank": rank, "kept": not bad[n]}
        for rank, n in enumerate(sorted(range(len(bad)), key=lambda n: bad[n]), 1)))


def toy_rows(folder, seed, noise):
    """Writes the rows of a toy setting."""
    write_toy_rows(folder, seed, f"--noise {noise}")
    tokenizer = models.load_tokenizer(str(corpus.MODEL))
    write_mask(folder, tokenizer, 128)
    utils.write_jsonl(folder / "right.jsonl", (
        row | {"response": row["answer"]} for row in utils.read_jsonl(folder / "lower.jsonl")))


def spoil(rows, seed, share):
    """Some rows with one another's answers or cut ones: {"prompt", "response", "answer", "bad",
    "kind"}; `answer` is the right one."""
    rng = random.Random(f"refine {seed}")
    rows = [{**row, "answer": row["response"], "bad": False, "kind": "clean"} for row in rows]
    rng.shuffle(rows)
    bad = rows[:round(share * len(rows))]
    cut, swapped = bad[:round(CUT * len(bad))], bad[round(CUT * len(bad)):]
    for row in cut:
        if text := faults.cut_middle(row, None, rng):
            row |= {"response": text, "bad": True, "kind": "cut"}
    for row, other in zip(swapped, swapped[1:] + swapped[:1], strict=True):
        row |= {"response": other["answer"], "bad": True, "kind": "swapped"}
    rng.shuffle(rows)
    return rows


def text_rows(folder, seed, share, args, given):
    """Writes the rows of a text setting: of rows that --data names a share spoilt, others not.

    given: {flag: value} of --data.
    """
    tokenizer, length = models.load_tokenizer(given["--model"]), int(given["--max-length"])
    folder.mkdir(parents=True, exist_ok=True)

    def read(source, limit):
        rows, _ = load_rows(source, tokenizer, seed=seed, limit=limit, max_length=length)
        return [{"prompt": prompt, "response": response} for prompt, response in
                zip(rows["prompt"][:], rows["response"][:], strict=True)]

    good = read(given["--lower"], args.rows + CLEAN_OUT)
    if len(good) < args.rows + CLEAN_OUT:
        raise UserError(f"{given['--lower']}: {len(good)} usable rows; --rows {args.rows} takes "
                        f"{args.rows + CLEAN_OUT}, of which {CLEAN_OUT} are held out")
    spoilt = spoil(good[CLEAN_OUT:], seed, share)
    for name, rows in (("lower", spoilt), ("lower_heldout", good[:CLEAN_OUT]),
                       ("upper", read(given["--upper"], TRUSTED)),
                       ("upper_heldout", read(given["--upper-heldout"], HELD_OUT)),
                       ("right", [row | {"response": row["answer"]} for row in spoilt])):
        utils.write_jsonl(folder / f"{name}.jsonl", rows)
    write_mask(folder, tokenizer, length)


def flags_of(words):
    """{flag: value} of the words of --data for text."""
    given = {"--max-length": "2048"} | dict(zip(words[::2], words[1::2], strict=False))
    if (not {"--lower", "--upper", "--upper-heldout", "--model"} <= set(given) or len(words) % 2
            or not given["--max-length"].isdecimal()):
        raise UserError("refine --scale small: --data must name --model, --lower (good rows), "
                        "--upper and --upper-heldout, flags with one value each")
    if odd := sorted(given.keys() - {"--lower", "--upper", "--upper-heldout", "--model",
                                     "--max-length"}):
        raise UserError(f"refine --scale small: --data does not read {odd[0]} here")
    return given


# --- arms -----------------------------------------------------------------------------------------

SHORT = "--max-new-tokens 1"  # where no new answer is read, the last pass need not write long ones
ARMS = {"drop": f"--refine drop {SHORT}", "generate": "--refine generate",
        "accept": "--refine accept", "random": "--refine random",
        "right answers": f"--refine original --mask static {SHORT}"}


def arms_of(args, name, seed):
    """{arm: (result file, command)} of one setting and seed; writes its rows unless --list."""
    folder = Path("runs") / args.name / "refine" / slug(name)
    rows = folder / "rows" / f"seed-{seed}"
    noise = float(name.removesuffix("% bad")) / 100
    if args.scale == "toy":
        if not args.list:
            toy_rows(rows, seed, noise)
        common = [*toy_words(rows), *words_of(TOY)]
    else:
        given = flags_of(words_of(setting(args)["data"]))
        if not args.list:
            text_rows(rows, seed, noise, args, given)
        given |= {f"--{part.replace('_', '-')}": str(rows / f"{part}.jsonl")
                  for part in ("lower", "upper", "upper_heldout", "lower_heldout")}
        common = [*(word for pair in given.items() for word in pair), *words_of(TEXT)]
    other = {"right answers": ["--lower", str(rows / "right.jsonl")]}
    runs = {}
    for arm, flags in ARMS.items():
        out = folder / slug(arm) / f"seed-{seed}"
        runs[arm] = out / "result.json", shlex.join(
            [ON, *common, "--mask", str(rows / "mask.jsonl"), *words_of(args.train or ""),
             *words_of(flags), *other.get(arm, []), "--seed", str(seed), "--out", str(out)])
    return runs


def refine_table(args):
    """Every arm of every setting over fresh seeds; results/NAME_refine.json."""
    if args.scale == "paper":
        raise UserError("refine: --scale toy or small")
    settings = [f"{noise:.0%} bad" for noise in NOISES[args.scale]]
    wanted = chosen(args, [*settings, *ARMS])
    names = [name for name in settings if name in wanted] or settings
    arms = [arm for arm in ARMS if arm in wanted] or list(ARMS)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    # The commands below name row files, and not what was written into them.
    maker = Path("runs") / args.name / "refine" / "command.json"
    made_by = shlex.join(["refine", args.scale, str(args.rows), args.data or "", args.train or ""])
    check_maker(maker, made_by)
    plans = {(name, seed): arms_of(args, name, seed) for name in names for seed in seeds}
    if not args.list:
        write_maker(maker, made_by)
    commands = dict(plan[arm] for plan in plans.values() for arm in arms)
    if args.list:
        print("\n".join(f"python {command}" for command in commands.values()))
        return
    print(f"{sum(not file.exists() for file in commands)} runs to go, {args.workers} at a time",
          flush=True)
    run_all(commands, args.workers)
    results = {}
    for name in names:
        own = {arm: [measured_run(plans[name, seed][arm][0].parent) for seed in seeds]
               for arm in arms}
        columns = measured(MEASURES | OWN, own)
        print(f"\n{name}")
        print(table(["masked rows", *columns.values()], summary_rows(own, columns)))
        results |= {f"{name}: {arm}": runs for arm, runs in own.items()}
    claims = claims_of([
        (f"{name}: {first} is better than {than} ({MEASURES[key]})", f"{name}: {first}",
         f"{name}: {than}", key)
        for name in names for key in ("upper_heldout", "lower_heldout", "tempered")
        for first, than in (
            ("right answers", "drop"), ("accept", "drop"),
            ("accept", "random"), ("accept", "generate"), ("generate", "drop"))], results)
    if claims:
        print_claims(claims, "loss")
    store(args, results, MEASURES | OWN, claims=claims, seeds=list(seeds))


# --- what a run is worth --------------------------------------------------------------------------

def measured_run(folder):
    """The run's result with `tempered`, and of rewritten rows precision and coverage."""
    file = folder / "tempered.json"
    if not file.exists():
        utils.write_atomic(file, json.dumps(tempered_loss(folder)) + "\n")
    return read_result(folder) | {"tempered": json.loads(file.read_text())} | rewritten(folder)


def rewritten(folder):
    """Of the rows whose new answer is recommended, the share right; of all masked bad rows the
    share so repaired. {} where no answer is recommended, or the right ones are not known."""
    args = json.loads((folder / "config.json").read_text())["args"]
    truth = {row["prompt"]: row.get("answer") for row in utils.read_jsonl(args["lower"])}
    rows = utils.read_jsonl(folder / "curated.jsonl")
    picked = [row for row in rows if row["recommended"] == "refined"]
    if not picked or None in truth.values():
        return {}
    right = sum(same(row["refined"], truth[row["prompt"]]) for row in picked)
    repairable = sum(row["bad"] and row["masked"] for row in rows)
    return {"precision": right / len(picked), "coverage": right / max(1, repairable)}


def losses_at(logits, targets):
    """-log p of each token, its logits divided by each temperature, (tokens, temperatures)."""
    logits = logits.float()
    right = logits.gather(1, targets[:, None]).squeeze(1)
    return torch.stack([(logits / t).logsumexp(dim=1) - right / t
                        for t in TEMPERATURES.tolist()], dim=1).double()


@torch.no_grad()
def tempered_loss(folder):
    """The held-out trusted loss with logits divided by one temperature, nats a token, row mean.

    Fitted on one half of the rows and measured on the other, both ways: what sharper or flatter
    answers alone would gain is taken out.
    """
    model, tokenizer, run = load_trained(folder, "cpu")
    levels = sets.load_levels(run.args, tokenizer, models.context_length(model.config))
    causal_lm, sums = models.bare(model), []
    for group in batches.token_groups(levels.upper_heldout, range(len(levels.upper_heldout))):
        batch = batches.pack(group)
        where = batch["response_mask"].nonzero().squeeze(1)
        owner = torch.searchsorted(batch["cu_seqlens"].long()[1:], where, right=True)
        hidden, count = packed_forward(causal_lm.base_model, batch)[where], torch.bincount(owner)
        for_each = torch.cat([losses_at(causal_lm.get_output_embeddings()(part), targets)
                              for part, targets in zip(hidden.split(64), batch["targets"][
                                  where].split(64), strict=True)])
        sums.append(torch.zeros(len(count), len(TEMPERATURES), dtype=torch.float64).index_add(
            0, owner, for_each) / count[:, None])
    losses = torch.cat(sums)  # (rows, temperatures)
    halves = losses[::2], losses[1::2]
    best = [half.mean(0).argmin() for half in halves]
    return float(torch.cat([halves[0][:, best[1]], halves[1][:, best[0]]]).mean())
