"""Refinement beyond the paper (`--refine accept`): which new answer may stand in for a bad one?

Weighted by a ratio of about one, the model's own answers have no gradient in expectation, and
regenerating a row does no more than dropping it (docs/claims.md). So something else decides here:
trusted rows, and other rows of the file. Three ways to an answer, and a margin of each:

    search     its own answer may stand behind another question. Of the answers of all suspect rows
               (of another question, unclear, or masked by a file and not cut) the SHORTLIST that
               share most words with the question, then the largest
               s(y) = sum_t (log p(y_t | x) - log p(y_t | blank)) / sqrt(T) under the frozen base.
               margin: s(found) - max(s(original), s(runner-up))
    continue   a cut answer goes on, greedily.      margin: mean log-prob of the new tokens
    generate   the question is answered, greedily.  margin: the same (others are in docs/tried.md)

Trusted rows say which margins to believe, because their right answers are known. The model that
gives the margins must not have trained on them. `search` asks the frozen base, which trained on
none: its trials are trusted rows that train like all others. The other two ask the trained model:
theirs are held-out rows, which no step reads. Trusted and held-out rows are each cut into two
disjoint parts of at most FOUND and WRITTEN questions:
    calibrate  tries each way where the right answer is known: search with the answer of another
               row as the bad original, continue with the row's own cut short. The threshold is the
               smallest margin from which on PRECISION of the new answers are right and at most
               FALSE of the good originals would be replaced.
    gate       measures with other rows what that threshold is worth. A way whose precision misses
               PRECISION by more than SLACK, or surely replaces more than FALSE, is closed.
Both count (right + 1) / (accepted + 2), never quite 0 or 1. A found answer trains with that of the
gate as its weight, a cut answer as far as it goes, without an end token. Any other row is dropped;
what the model wrote itself teaches it nothing. It is written at the end, for the curated set.

Right means: word for word. So `continue` and `generate` write answers of at most CLOSED tokens:
longer ones cannot be checked. A question with a longer answer is asked, too; a short one is wrong.
"""

import collections
import json
import math
import time

from batches import answer_row, prompt_of, row_losses, seeded
from curate import greedy
from data.sets import first_places, prompt_overlap
from data.text_reasons import WORD
from data.tokens import end_ids, response_text
from generate import generate
from ranking import behind_blank, blank_prompt, last_turn
from runtime import folder
from runtime.processes import share_list
from utils import UserError, table

# ruff: isort: split
import torch

RULES = ("accept", "random")  # values of --refine: this file's, and its control
WAYS = ("search", "continue", "generate")
PRECISION, SLACK, FALSE = 0.9, 0.1, 0.05
SHORTLIST, QUESTIONS_AT_ONCE = 5, 64
# Questions to calibrate with, and as many for the gate: of 0 errors in 60 at most 5 % are left.
FOUND, WRITTEN = 150, 60  # a trial of writing generates, one of the search reads short rows
CLOSED = 32  # tokens, the end included
ENOUGH = 16  # rows on which a way must have been tried
SAMPLED = 8  # answers of which one may be right: what choosing among several could gain
NEVER = -1e30  # the margin of what is no answer at all; below every threshold
# The ways of a row by the reason why it looks bad (detect.py); of any other reason: generate.
REPAIRS = {"end": ("continue",), "relevance": ("search", "generate"),
           "unclear": ("search", "generate")}


def trusted_parts(prompts, most):
    """(calibrate, gate): places of trusted rows, from a hash of each one's prompt.

    Half of the prompts each, at most `most`, and one row of each: two would count one answer twice.
    The hashes decide, so the order of the file does not.
    """
    place = first_places(prompts)
    order = sorted(place)
    size = min(most, len(order) // 2)
    return [sorted(place[prompt] for prompt in order[start:start + size]) for start in (0, size)]


# --- search ---------------------------------------------------------------------------------------

def shortlists(questions, answers, size=SHORTLIST):
    """For each question the places of the `size` answers that share most words with it.

    Cosine of word counts times log inverse frequency among the answers; ties by place.
    """
    column = {}
    for text in answers:
        for word in WORD.findall(text.lower()):
            column.setdefault(word, len(column))

    def counts(texts):  # (texts, words), sparse
        found = [(n, column[word]) for n, text in enumerate(texts)
                 for word in WORD.findall(text.lower()) if word in column]
        return torch.sparse_coo_tensor(
            torch.tensor(found, dtype=torch.long).view(-1, 2).T, torch.ones(len(found)).double(),
            (len(texts), len(column)), check_invariants=True).coalesce()

    index, chosen = counts(answers), []
    places, words = index.indices()
    rarity = (1 + len(answers) / (1 + words.bincount(minlength=len(column)))).log()
    squares = (index.values() * rarity[words]) ** 2
    norms = torch.zeros(len(answers)).double().index_add(0, places, squares).sqrt().clamp_min(1e-9)
    for start in range(0, len(questions), QUESTIONS_AT_ONCE):
        asked = counts(questions[start:start + QUESTIONS_AT_ONCE]).to_dense() * rarity ** 2
        cosine = torch.sparse.mm(index, asked.T) / norms[:, None]
        chosen += cosine.T.sort(dim=1, descending=True, stable=True).indices[:, :size].tolist()
    return chosen


def pair_scores(model, pairs, blank):
    """s of each pair (prompt, answer), token lists, answers without end tokens: [s].

    blank: the blank prompt's tokens. Under the frozen base, the adapter switched off.
    """
    answers = list({tuple(answer): answer for _, answer in pairs}.values())
    with model.disable_adapter():
        alone, lengths = row_losses(model, [behind_blank(model, blank, y) for y in answers],
                                    label="search: answers alone")
        given, _ = row_losses(model, [answer_row(*pair) for pair in pairs], label="search: pairs")
    alone = {tuple(answer): (loss, math.sqrt(count)) for answer, loss, count in zip(
        answers, alone.tolist(), lengths.tolist(), strict=True)}
    return [(alone[tuple(answer)][0] - loss) * alone[tuple(answer)][1]
            for (_, answer), loss in zip(pairs, given.tolist(), strict=True)]


def best_of(scores, original):
    """(place, margin) of the largest of {place: s}, ties by place; (None, NEVER) for none.

    original: s of the row's own answer, which must be beaten.
    """
    ordered = sorted(scores, key=lambda p: (-scores[p], p))
    if not ordered:
        return None, NEVER
    return ordered[0], scores[ordered[0]] - max([original] + [scores[p] for p in ordered[1:2]])


def scored(model, rows, beaten, pool, blank, context):
    """[({place in pool: s}, best overlap of words first, [s of each row of `beaten`])], one a row.

    rows, pool: of `as_rows`, the pool's answers all different; beaten: for each row those whose
    answers a found one must beat. context: of the model; what has no room there is not found.
    """
    lists = shortlists([row["question"] for row in rows], [row["answer"] for row in pool],
                       SHORTLIST + 1)  # the row's own text may be among them
    lists = [[place for place in places if has_room(row, pool[place], context)]
             for row, places in zip(rows, lists, strict=True)]
    s = iter(pair_scores(model, [
        (row["prompt"], other["body"]) for row, places, others in zip(
            rows, lists, beaten, strict=True)
        for other in [*(pool[place] for place in places), *others]], blank))
    return [({place: next(s) for place in places}, [next(s) for _ in others])
            for places, others in zip(lists, beaten, strict=True)]


def search(model, rows, pool, blank, context):
    """[(place in pool or None, margin)], one a row; see `scored`. Its own text is not found."""
    return [best_of(unlike(scores, pool, row), own) for row, (scores, (own,)) in zip(
        rows, scored(model, rows, [[row] for row in rows], pool, blank, context), strict=True)]


def unlike(scores, pool, row):
    """Of {place in pool: s} the first SHORTLIST whose answer is not the row's."""
    others = [p for p in scores if not same(pool[p]["answer"], row["answer"])]
    return {p: scores[p] for p in others[:SHORTLIST]}


def has_room(row, other, context):
    """Whether the answer of another row fits behind the prompt of this one."""
    return len(row["prompt"]) + len(other["body"]) + len(other["end"]) <= context


def different(rows):
    """The rows, one of each answer: the last."""
    return list({compared(row["answer"]): row for row in rows}.values())


def trial_search(model, trusted, pool, blank, context):
    """`search` of n trusted rows: margins, right (2 n,), spared (n,), as `threshold_of` has them.

    A row's bad original is the next answer that differs and fits. All answers of the pool and of
    trusted rows are offered, then the same without the row's own: nothing found is right there.
    """
    offered, bad = different([*pool, *trusted]), []
    for n, row in enumerate(trusted):
        bad.append(next((other for other in (*trusted[n + 1:], *trusted[:n]) if has_room(
            row, other, context) and not same(other["answer"], row["answer"])), row))
    margins, right, spared = [], [], []
    for row, wrong, (scores, (s_wrong, s_own)) in zip(trusted, bad, scored(
            model, trusted, [[*pair] for pair in zip(bad, trusted, strict=True)], offered, blank,
            context), strict=True):
        without = unlike(scores, offered, row)
        for answers in (scores, without):
            place, margin = best_of(unlike(answers, offered, wrong), s_wrong)
            margins.append(margin)
            right.append(place is not None and same(offered[place]["answer"], row["answer"]))
        spared.append(best_of(without, s_own)[1])
    return margins, right, spared


# --- continue and generate ------------------------------------------------------------------------

def written(model, prompts, sampling, text_of, label):
    """[(tokens, margin)] greedy answers of at most CLOSED tokens behind the prompts.

    margin: the mean log-prob of the new tokens under the model of now; NEVER where an answer has no
    text or does not end. text_of: tokens to text.
    """
    options = sampling | {"max_new_tokens": min(CLOSED, sampling["max_new_tokens"])}
    made = greedy(model, prompts, options, label)
    losses, _ = row_losses(model, [answer_row(p, tokens)
                                   for p, (tokens, _) in zip(prompts, made, strict=True)])
    return [(tokens, -loss if done and text_of(tokens[:-1]) else NEVER)
            for (tokens, done), loss in zip(made, losses.tolist(), strict=True)]


def same(one, other):
    """Whether two answers are equal word for word; case, spacing and a last full stop aside."""
    return compared(one) == compared(other)


def compared(text):
    """What `same` compares."""
    return " ".join(text.casefold().split()).removesuffix(".")


def trial_written(model, trusted, way, sampling, text_of, seed):
    """What `continue` or `generate` does with trusted rows: margins, right (n,), spared (m,).

    None for fewer than ENOUGH rows whose right answer has at most CLOSED tokens. continue: the
    answer is cut somewhere in its middle half; a good original is continued where it ends.
    """
    rows = [row for row in trusted if way == "generate" or len(row["body"]) >= 4]
    closed = [row for row in rows if len(row["body"]) < CLOSED]
    if len(closed) < ENOUGH:
        return None
    draws = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    asked = [(row, row["body"][:int(len(row["body"]) * (0.25 + 0.5 * u))]
              if way == "continue" else []) for row, u in zip(rows, draws, strict=True)]
    asked = [(row, start) for row, start in asked if len(start) < CLOSED]
    made = written(model, [row["prompt"] + start for row, start in asked], sampling, text_of,
                   f"trusted prompts: {way}")
    right = [same(text_of(start + tokens), row["answer"])
             for (row, start), (tokens, _) in zip(asked, made, strict=True)]
    margins = [margin for _, margin in made]
    if way == "continue":
        whole = written(model, [row["prompt"] + row["body"] for row in closed], sampling, text_of,
                        "trusted answers, continued")
        return margins, right, [margin for _, margin in whole]
    return margins, right, [NEVER if ok else m for ok, m in zip(right, margins, strict=True)]


# --- thresholds -----------------------------------------------------------------------------------

def share_present(found, offered, missing):
    """The share of rows whose own answer the file holds, from 0 to 1, less one standard error.

    found (n,): margins of the file's suspect rows; offered, missing (m,): of trials in which the
    own answer was there, and was not. Adjusted count (Forman 2008): how much more of `found` than
    of `missing` lies beyond the margin that tells the two best apart, over the same of `offered`.
    """
    def beyond(values, t):
        return sum(value >= t for value in values) / len(values)

    best = max(offered, key=lambda t: beyond(offered, t) - beyond(missing, t))
    all_of, hit, miss = (beyond(values, best) for values in (found, offered, missing))
    if hit <= miss:
        return 0.0
    share = min(1.0, max(0.0, (all_of - miss) / (hit - miss)))
    variance = all_of * (1 - all_of) / len(found) + (
        share**2 * hit * (1 - hit) + (1 - share)**2 * miss * (1 - miss)) / len(offered)
    return max(0.0, share - math.sqrt(variance) / (hit - miss))


def tally(margins, right, threshold, present=None):
    """(right, all) of the new answers with a margin of the threshold or more.

    present: of `share_present`, where every second trial is one without the own answer: the two of
    a row then count as one, each as often as the file has such rows.
    """
    weights = (1, 1) if present is None else (present, 1 - present)
    taken = [(weights[n % 2], ok) for n, (m, ok) in enumerate(zip(margins, right, strict=True))
             if m >= threshold]
    return sum(weight for weight, ok in taken if ok), sum(weight for weight, _ in taken)


def threshold_of(margins, right, spared, present=None):
    """The smallest margin t from which on the accepted are right and good originals are safe; None.

    margins, right (n,): of new answers for rows with a bad original; spared (m,): the margin with
    which another answer would replace a good original, NEVER for none. present: see `tally`.
    """
    def holds(t):
        good, accepted = tally(margins, right, t, present)
        return ((good + 1) / (accepted + 2) >= PRECISION
                and sum(m >= t for m in spared) <= FALSE * len(spared))

    return min((t for t in margins if t > NEVER and holds(t)), default=None)


def upper_bound(count, total, level=0.95):
    """The upper end of the one-sided interval of a share (Clopper and Pearson), by bisection.

    The p at which `count` or fewer of `total` have probability 1 - level.
    """
    if count >= total:
        return 1.0
    low, high = count / total, 1.0
    for _ in range(60):
        p = (low + high) / 2
        below = sum(math.exp(math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(
            total - k + 1) + k * math.log(p) + (total - k) * math.log1p(-p))
            for k in range(count + 1))
        low, high = (p, high) if below > 1 - level else (low, p)
    return high


def gate(calibrate, check, present=None):
    """{"threshold", "weight", "why", ...} of one way, from two trials (margins, right, spared).

    A trial is None for too few rows; present: see `tally`. threshold and weight are None when the
    way is closed. Of the gate's rows: precision, coverage of what is accepted; right: the share if
    all were taken; false, false_bound: of good originals replaced, its 95 % bound; rows: trials.
    """
    closed = {"threshold": None, "weight": None}
    if calibrate is None or check is None:
        return closed | {"rows": 0, "why": "too few rows to try it on (held-out trusted answers of "
                         f"at most {CLOSED - 1} tokens, to continue 4 or more; suspect rows)"}
    (margins, right, spared), threshold = check, threshold_of(*calibrate, present)
    all_right, tried = tally(margins, right, -math.inf, present)
    report = {"rows": len(right), "right": all_right / tried}
    if threshold is None:
        return closed | report | {"why": f"no margin makes {PRECISION:.0%} of new answers right"}
    good, accepted = tally(margins, right, threshold, present)
    false = sum(m >= threshold for m in spared)
    report |= {"precision": good / accepted if accepted else None, "coverage": accepted / tried,
               "false": false / len(spared), "false_bound": upper_bound(false, len(spared))}
    weight = (good + 1) / (accepted + 2)
    if weight < PRECISION - SLACK:
        return closed | report | {"why": f"{good:.3g} of {accepted:.3g} accepted answers of the "
                                         "gate's rows are right"
                                  + (": too few to believe" if good == accepted else "")}
    if 1 - upper_bound(len(spared) - false, len(spared)) > FALSE:  # its lower bound
        return closed | report | {"why": f"it would replace {false} of the gate's {len(spared)} "
                                         "good originals"}
    return report | {"threshold": threshold, "weight": weight, "why": "open"}


# --- rows -----------------------------------------------------------------------------------------

def as_rows(rows, ends, reasons=None):
    """What the functions above read of tokenised rows: a list of dictionaries.

    prompt, body, end: tokens, of the answer without and only its end tokens (`ends`); question,
    answer: texts; row_id; reason: of detect.py, None for none.
    """
    return [dict(zip(("prompt", "body", "end"), last_turn(row, ends), strict=True), reason=why,
                 question=row["prompt"], answer=row["response"], row_id=row["row_id"])
            for row, why in zip(rows, reasons or [None] * len(rows), strict=True)]


def attempts(model, rows, gates, found, sampling, text_of, context):
    """{way: {"tokens", "source", "margin"}} of every row, in the order of its ways.

    rows: of `as_rows`; gates: {way: `gate`}, of which closed ones are not asked; found: {row_id:
    {"tokens", "source", "margin"}} of `search`. source: row_id that the answer stood behind.
    """
    tried = [{"search": found[row["row_id"]]} if row["row_id"] in found else {} for row in rows]
    for way in ("continue", "generate"):
        if gates[way]["threshold"] is None:
            continue
        starts = [row["body"] if way == "continue" else [] for row in rows]
        places = [n for n, row in enumerate(rows)
                  if way in REPAIRS.get(row["reason"], ("generate",)) and len(starts[n]) < CLOSED
                  and len(row["prompt"]) + len(starts[n]) + CLOSED <= context]
        made = written(model, [rows[n]["prompt"] + starts[n] for n in places], sampling, text_of,
                       way)
        for n, (tokens, margin) in zip(places, made, strict=True):
            tried[n][way] = {"tokens": starts[n] + tokens, "source": None, "margin": margin}
    return tried


def accept_or_drop(rows, tried, gates, generator=None):
    """What is done with each row: {"way", "tokens", "source", "margin", "weight", "why"}.

    way: of WAYS; "prefix", the answer as it is without an end token; None, dropped. The first way
    whose margin reaches its threshold wins. generator: the control of this rule, which changes
    places between the rows that have answers of the same ways; so as many of each way are accepted.
    """
    chosen = [next((way for way, own in ways.items() if gates[way]["threshold"] is not None
                    and own["margin"] >= gates[way]["threshold"]), None) for ways in tried]
    if generator is not None:
        groups = collections.defaultdict(list)
        for n, ways in enumerate(tried):
            groups[tuple(way for way, own in ways.items() if own["margin"] > NEVER)].append(n)
        for places in groups.values():
            order = torch.randperm(len(places), generator=generator).tolist()
            for n, way in zip(places, [chosen[places[i]] for i in order], strict=True):
                chosen[n] = way
    return [decision(row, ways, way, gates)
            for row, ways, way in zip(rows, tried, chosen, strict=True)]


def decision(row, ways, way, gates):
    """One row of `accept_or_drop`."""
    why = "; ".join(f"{name}: " + (
        "no whole answer" if own["margin"] == NEVER else f"margin {own['margin']:.3g}, " + (
            f"closed, {gates[name]['why']}" if gates[name]["threshold"] is None
            else f"threshold {gates[name]['threshold']:.3g}")) for name, own in ways.items())
    made = {"way": way, "tokens": None, "source": None, "margin": None, "weight": None,
            "why": why or "no way is open"}
    if way is not None:
        return made | ways[way] | {"weight": gates[way]["weight"]}
    if row["reason"] == "end" and row["body"]:
        return made | {"way": "prefix", "tokens": row["body"], "weight": 1.0,
                       "why": f"cut, trains without an end; {made['why']}"}
    return made


# --- a run ----------------------------------------------------------------------------------------

def split_trusted(run):
    """(calibrate, gate) of a planned run: run.trusted for search, run.fresh for what is written."""
    name, rows = f"--refine {run.args.refine}", run.levels.upper
    if run.args.upper_loss == "dpo":
        raise UserError(f"{name}: trusted answers say which new ones are right; with preference "
                        "pairs use generate or drop")
    if run.args.num_answers > 1:
        raise UserError(f"--num-answers {run.args.num_answers}: {name} writes one answer, the "
                        "likeliest")
    held = run.levels.upper_heldout  # without questions that train, too: under --allow-overlap
    trained = {*prompt_overlap(held, rows), *prompt_overlap(held, run.levels.lower)}
    held = held.select([p for p, own in enumerate(held["row_id"][:]) if own not in trained])
    run.trusted, run.fresh = ([own.select(places) for places in trusted_parts(
        own["prompt_hash"][:], most)] for own, most in ((rows, FOUND), (held, WRITTEN)))
    count, fresh = len(run.trusted[0]), len(run.fresh[0])
    if count < ENOUGH:
        raise UserError(f"{name}: {len(rows)} trusted rows of {len(set(rows['prompt_hash'][:]))} "
                        f"different questions train; {2 * ENOUGH} are needed: give more, hold out "
                        "others (--upper-heldout), or use --refine drop")
    print(f"trusted rows: all {len(rows)} train; {count} calibrate what is found, {count} are its "
          f"gate; held out: {fresh} calibrate what is written, {fresh} are its gate")


def prepare(run, sampling):
    """What is searched for once a run; at its first step also the gate before training, printed."""
    run.ends = end_ids(run.tokenizer) | sampling["end_ids"]
    run.text_of = lambda tokens: response_text(run.tokenizer, tokens, run.args.template)
    reasons = run.tested(torch.arange(run.num_rows))["reason"]
    masked = [False] * run.num_rows if run.given_mask is None else run.given_mask.tolist()
    run.searched = search_once(run, [
        p for p, (reason, given) in enumerate(zip(reasons, masked, strict=True))
        if (given and reason != "end") or "search" in REPAIRS.get(reason, ())])
    if run.step == 0:
        print_gates(open_gates(run, sampling, WAYS), run.searched["present"])
        print_pass(run, sampling)


def search_once(run, suspects):
    """`search` for the suspect rows, and its two trials: the frozen base decides, so once a run.

    suspects: places of lower rows. The run folder keeps what it returns: {"found": {row_id:
    {"tokens", "source", "margin"}}, "trials": of calibrate and gate, "present": `share_present`}.
    """
    def read(file):
        saved = json.loads(file.read_text())
        return {"trials": [*saved["trials"]], "present": saved["present"],
                "found": {int(row_id): own for row_id, own in saved["found"].items()}}

    saved = folder.read_once(run.out / "search.json", read)
    if saved is not None:
        return saved
    rows, *trusted = ([row for row in as_rows(part, run.ends) if row["body"]] for part in (
        [run.levels.lower[p] for p in suspects], *run.trusted))
    pool, blank = different(rows), blank_prompt(run.levels.lower)
    found = {}
    for row, (place, margin) in zip(rows, search(run.model, rows, pool, blank, run.context),
                                    strict=True):
        if place is not None:
            found[row["row_id"]] = {"tokens": pool[place]["body"] + pool[place]["end"],
                                    "source": pool[place]["row_id"], "margin": margin}
    trials = [trial_search(run.model, part, pool, blank, run.context)
              if len(part) >= ENOUGH and pool else None for part in trusted]
    margins = [own["margin"] for own in found.values()] + [NEVER] * (len(rows) - len(found))
    first = trials[0]
    saved = {"found": found, "trials": trials, "present": first and share_present(
        margins, first[0][::2], first[0][1::2])}
    folder.write_once(run.out / "search.json", json.dumps(saved) + "\n")
    return saved


def open_gates(run, sampling, wanted=()):
    """{way: `gate`} under the model of now; a way to write that is not wanted is closed."""
    gates = {"search": gate(*run.searched["trials"], run.searched["present"])}
    parts = [[row for row in as_rows(part, run.ends)
              if len(row["prompt"]) + 2 * CLOSED <= run.context] for part in run.fresh]
    for way in ("continue", "generate"):
        gates[way] = gate(*(trial_written(run.model, part, way, sampling, run.text_of,
                                          run.args.seed) if way in wanted else None
                            for part in parts))
    return gates


def print_pass(run, sampling):
    """pass@SAMPLED of the held-out questions with a short answer, printed."""
    rows = [row for part in run.fresh for row in as_rows(part, run.ends)
            if len(row["body"]) < CLOSED and len(row["prompt"]) + CLOSED <= run.context]
    options = sampling | {"max_new_tokens": min(CLOSED, sampling["max_new_tokens"])}
    asked = [(n, g) for n in range(len(rows)) for g in range(SAMPLED)]
    drawn = share_list(
        lambda prompts, seeds: generate(run.model, prompts, seeds, label="sampled", **options),
        [rows[n]["prompt"] for n, _ in asked], [f"{run.args.seed} {n} {g}" for n, g in asked])
    hit = {n for (n, _), (tokens, _) in zip(asked, drawn, strict=True)
           if same(run.text_of(tokens), rows[n]["answer"])}
    print(f"generate: one of {SAMPLED} sampled answers is right for {len(hit)} of {len(rows)} "
          "held-out questions with a short answer")


def repair(run, places, sampling, number, write):
    """(what `accept_or_drop` says of the lower rows at these places, metrics).

    number: of the refresh, the seed of `random`; write: whether answers are written, too.
    """
    rows = as_rows([run.levels.lower[p] for p in places], run.ends,
                   run.tested(torch.tensor(places))["reason"])
    gates = open_gates(run, sampling, {way for row in rows for way in REPAIRS.get(
        row["reason"], ("generate",))} if write else ())
    tried = attempts(run.model, rows, gates, run.searched["found"], sampling, run.text_of,
                     run.context)
    by_chance = seeded(run.args.seed, "accept", number) if run.args.refine == "random" else None
    decisions = accept_or_drop(rows, tried, gates, by_chance)
    if by_chance is not None:
        decisions = [made | {"why": f"drawn at random; {made['why']}"} for made in decisions]
    ways = [made["way"] for made in decisions]
    return decisions, {f"accepted/{way}": ways.count(way) for way in (*WAYS, "prefix")} | {
        "dropped": ways.count(None)} | {
        f"gate/{way}_{key}": report[key] for way, report in gates.items()
        for key in ("precision", "coverage") if report.get(key) is not None}


def accepted_answers(run, places, sampling, number):
    """{place: (tokenised row, weight)} of the lower rows at these places that train on; metrics."""
    started = time.perf_counter()
    decisions, metrics = repair(run, places, sampling, number, write=False)
    accepted = {place: (answer_row(prompt_of(run.lower[place]), made["tokens"]), made["weight"])
                for place, made in zip(places, decisions, strict=True) if made["way"] is not None}
    return accepted, metrics | {"answers": len(accepted),
                                "time/generate": time.perf_counter() - started}


def print_gates(gates, present):
    """The gate as a table, and what it advises; present: of `share_present`, or None."""
    print(table(["way", "trials", "right if all taken", "accepted", "of these right",
                 "good answers replaced", "at most"], [
        [way, own["rows"], *("-" if own.get(key) is None else f"{own[key]:.0%}" for key in (
            "right", "coverage", "precision", "false", "false_bound"))]
        for way, own in gates.items()]))
    if present is not None:
        print(f"search: at least about {present:.0%} of the suspect rows have their answer here")
    for way, own in gates.items():
        if own["threshold"] is None:
            print(f"{way}: closed, {own['why']}")
    if all(own["threshold"] is None for own in gates.values()):
        print("advice: no new answer can be trusted here before training; --refine drop costs less")
    elif gates["search"]["threshold"] is None:
        print("advice: no found answer can be trusted; the others are for the curated set alone")


def rewrite(run, places, sampling):
    """What `curate.refine` returns, for the answers that this file would accept now.

    An answer that was found is given as its row has it, whole where --max-length cut its tokens.
    """
    decisions, metrics = repair(run, places, sampling, "curated", write=True)
    place_of = {row_id: place for place, row_id in enumerate(run.levels.lower["row_id"][:])}
    refined = {}
    for place, made in zip(places, decisions, strict=True):
        text = run.text_of(made["tokens"]) if made["way"] in WAYS else None
        if made["source"] is not None:
            text = run.levels.lower[place_of[made["source"]]]["response"]
        refined[place] = {"refined": text, "recommended": "refined" if text else "original",
                          **{key: made[key] for key in ("margin", "way", "source", "why")}}
    return refined, metrics
