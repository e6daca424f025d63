"""From scores to ranks, ranking files, and how well a ranking finds rows that are known to be bad.

A ranking file has one line a row, best first: row_id, hash, rank (1 is the best), kept, and more.
"""

import collections
import functools
import math
import re

import detect
from batches import answer_row, own_groups, row_losses, take, tokens_only
from data.sets import each_row
from logprobs import pack
from data.text_reasons import text_reasons
from data.tokens import empty_prompt
from logprobs import token_logps
from models import context_length
from runtime.processes import all_sum, rank
from selector import mean_ranks
from utils import UserError, each_jsonl, table, write_jsonl

# ruff: isort: split
import torch

CODE = re.compile(r"```|^[^\S\n]*(def|class|import|#include|public|SELECT|function) |"
                  r"[;{][^\S\n]*$|</\w+>", re.MULTILINE)
GROUPS = ("short", "medium", "long", "mostly ASCII", "less than 90 % ASCII", "code", "no code")
WORST = 3  # examples of each reason
TRUSTED, FAULTS = 500, 200  # trusted rows that are read; rows with a fault made on purpose
# What a reason says about an answer, after a number of rows. Older rankings have "slip".
REASONS = {"end": "cut short", "relevance": "of another question", "fluency": "garbled",
           "slip": "odd in a number, name or negation", "repetition": "repeating themselves",
           "echo": "copying the question", "guidance": "against the trusted rows",
           "duplicate": "repeating another row", "conflict": "in conflict with another answer",
           "unclear": "for no clear reason", "turn": "going on with another turn",
           "placeholder": "left without an answer", "debris": "with markup or broken encoding"}
EVIDENCE = ("end", "relevance", "fluency", "slip", "peak", "repetition", "copied", "news", "length",
            "loss")
ROWS_AT_ONCE = 100_000  # lines of a ranking held in memory: 10^7 would take 5 GB


# --- scores to ranks, files -----------------------------------------------------------------------

def rank_rows(scores):
    """Ranks 1 (best) to N of (N,) scores, ties in row order."""
    ranks = torch.empty(len(scores), dtype=torch.long)
    ranks[scores.argsort(descending=True, stable=True)] = torch.arange(1, len(scores) + 1)
    return ranks


def original_scores(omega, masked, implicit, mask_is_ranked):
    """How good each row's original answer is, (N,): omega, where omega has judged it.

    implicit (N,): the implicit weight at the final model. omega has judged a masked row's *new*
    answers, which any model finds likely; its original is judged by the implicit weight. Both
    become rank shares in the row's own group. Rows of a static mask are a random sample, as good as
    the others; those of a mask by weights or a file (mask_is_ranked) were the worst, and come last.
    """
    scores = torch.where(masked, implicit.to(omega), omega)
    shares = torch.empty(len(scores), dtype=torch.float64)
    for group in (masked, ~masked):
        ranks = rank_rows(scores[group])
        shares[group] = 1 - ranks.double() / (len(ranks) + 1)
    if mask_is_ranked:
        shares[masked] -= 1.0
    return shares


def counted_weights(selector, masked=None):
    """N softmax(omega), (N,); 0 for a masked (N,) bool row in whose place omega read nothing."""
    weights = selector.weights().cpu()
    unread = selector.last_losses.isnan().cpu()
    return weights if masked is None else weights.masked_fill(masked & unread, 0.0)


def write_ranking(path, lower, scores, keep_fraction, columns, tests=None):
    """A ranking, best row first: row_id, hash, rank, kept, the columns, and bad and kind if known.

    scores (N,) higher is better; columns: {name: (N,) tensor}; tests: `row_tests`, or {}. Returns
    ranks (N,), kept (N,) bool.
    """
    ranks = rank_rows(scores)
    kept = ranks <= round(keep_fraction * len(ranks))
    columns = {"rank": ranks, "kept": kept, **columns}
    known = [name for name in ("bad", "kind") if name in lower.column_names]

    def lines():
        for block in ranks.argsort().split(ROWS_AT_ONCE):
            part = lower.select(block.tolist())
            found = {"row_id": part["row_id"][:], "hash": part["hash"][:],
                     **{name: values[block].tolist() for name, values in columns.items()},
                     **columns_of_tests(tests or {}, block),
                     **{name: part[name][:] for name in known}}
            yield from (dict(zip(found, row, strict=True))
                        for row in zip(*found.values(), strict=True))

    if rank() == 0:
        write_jsonl(path, lines())
    return ranks, kept


def kept_by(rows, file, others="do not train"):
    """[True, False, or None where the file does not list it: whether a ranking keeps a row].

    rows: the lower rows; file: a weights.jsonl, curated.jsonl or other ranking, whose lines belong
    to rows by row_id and hash; others: what is said of the rows that it does not list.
    """
    listed = {}
    for number, entry in enumerate(each_jsonl(file), 1):
        for key in ("row_id", "hash", "rank", "kept"):
            if key not in entry:
                raise UserError(f"{file} row {number}: no {key!r}; a ranking has row_id, hash, "
                                "rank and kept in every row")
        if not isinstance(entry["row_id"], int) or not isinstance(entry["kept"], bool):
            raise UserError(f"{file} row {number}: row_id must be a whole number, and kept true "
                            "or false")
        known = listed.setdefault(entry["row_id"], (entry["hash"], entry["kept"]))
        if known[1] != entry["kept"]:
            raise UserError(f"{file} row {number}: row_id {entry['row_id']} is kept in one line "
                            "and not in another; leave one of them")
    kept = []
    for row_id, own in zip(rows["row_id"][:], rows["hash"][:], strict=True):
        named, verdict = listed.pop(row_id, (own, None))
        if named != own:
            raise UserError(f"{file}: row_id {row_id} has hash {named}, the lower rows have {own}: "
                            "the ranking belongs to other data")
        kept.append(verdict)
    if missing := sum(verdict for _, verdict in listed.values()):
        print(f"warning: {missing} of the {missing + kept.count(True)} rows that {file} keeps are "
              "not among the lower rows")
    if None in kept:
        print(f"warning: {kept.count(None)} of the {len(rows)} lower rows are not in {file} and "
              f"{others}")
    return kept


def rows_not_kept(rows, file):
    """(N,) bool: the rows that a ranking lists and does not keep, one at least; see `kept_by`."""
    kept = kept_by(rows, file, "train as they are")
    if set(kept) == {False}:
        raise UserError(f"{file}: keeps none of the {len(rows)} lower rows")
    if False not in kept:
        raise UserError(f"{file}: there is no row that it lists and does not keep")
    return torch.tensor([verdict is False for verdict in kept])


# --- rankings against known labels ----------------------------------------------------------------

def auroc(scores, bad):
    """P(score of a good row > score of a bad row), ties one half; None without both sorts of rows.

    scores (n,) higher is better, bad (n,) bool. Mann-Whitney U by mean ranks.
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    num_bad, num_good = int(bad.sum()), int((~bad).sum())
    if not num_bad or not num_good:
        return None
    wins = mean_ranks(scores)[~bad].sum() - num_good * (num_good + 1) / 2
    return float(wins / (num_good * num_bad))


def ranking_metrics(scores, bad, kinds):
    """How well low scores find bad rows, in all and by kind of fault.

    scores (n,) higher is better; bad (n,) bool; kinds: n strings. As many rows are flagged as are
    bad (the bottom of the ranking), so precision equals recall over all kinds. Rows that tie at the
    border are flagged in part, each as much: the order of the file says nothing.
    Keys: auroc, precision, and of each kind of bad row recall/KIND, auroc/KIND (against good rows).
    """
    scores, bad = torch.as_tensor(scores).double(), torch.as_tensor(bad).bool()
    metrics = {"auroc": auroc(scores, bad), "precision": None}
    if bad.any():
        border = scores.sort().values[int(bad.sum()) - 1]
        below, tied = (scores < border).double(), (scores == border).double()
        flagged = below + tied * ((bad.sum() - below.sum()) / tied.sum())  # (n,) in [0, 1]
        metrics["precision"] = float(flagged[bad].double().mean())
    for kind in sorted({k for k, b in zip(kinds, bad.tolist(), strict=True) if b}):
        own = torch.tensor([k == kind for k in kinds]) & bad
        metrics[f"auroc/{kind}"] = auroc(scores[own | ~bad], own[own | ~bad])
        metrics[f"recall/{kind}"] = float(flagged[own].double().mean())
    return metrics


def label_metrics(lower, scores):
    """Ranking metrics against known bad rows, {"weight/auroc": ...}; {} when labels are unknown."""
    if "bad" not in lower.column_names:
        return {}
    bad = torch.tensor(lower["bad"][:], dtype=torch.bool)
    kinds = ([kind or "bad" for kind in lower["kind"][:]] if "kind" in lower.column_names
             else ["bad"] * len(lower))
    return {f"{name}/{key}": value for name, values in scores.items()
            for key, value in ranking_metrics(values, bad, kinds).items()}


def print_label_table(metrics, scores):
    """AUROC, precision and recall by kind of fault, one line a ranking."""
    keys = sorted({k.split("/", 1)[1] for k in metrics if k.split("/")[0] in scores},
                  key=lambda k: (k.count("/"), k))
    rows = [[name, *(metrics.get(f"{name}/{key}") for key in keys)] for name in scores]
    # A kind comes from the rows: it must not steer the terminal, nor fill the screen.
    shown = ["".join(c if c.isprintable() else "?" for c in key)[:40] for key in keys]
    print(table(["ranking by", *shown], rows))


# --- row tests ------------------------------------------------------------------------------------

def blank_prompt(rows, sample=500):
    """The template around an empty question: the tokens that all prompts share.

    Taken from some `sample` rows all over the file, because neighbours may ask alike.
    """
    places = range(0, len(rows), max(1, len(rows) // sample))
    return empty_prompt([row["input_ids"][:row["trained"].index(1)]
                         for row in take(tokens_only(rows), places)])


def behind_blank(model, blank, answer):
    """The row of an answer behind the blank prompt, whose front gives way to the context's end."""
    return answer_row(blank[-max(1, context_length(model.config) - len(answer)):], answer)


def last_turn(row, ends):
    """Tokens (before the last trained run, of that run, of its end): the end's are in `ends`."""
    ids, trained = row["input_ids"], row["trained"]
    stop = len(trained) - trained[::-1].index(1)
    start = stop - next((n for n, t in enumerate(trained[stop - 1::-1]) if not t), stop)
    last = next((n for n in range(stop, start, -1) if ids[n - 1] not in ends), start)
    return ids[:start], ids[start:last], ids[last:stop]


def last_turns(model, rows, ends):
    """One forward: (prompt, answer, logps, end logps, row loss) of the last turn of every row.

    prompt, answer: of `last_turn`. logps, end logps: of answer and end tokens, nats, on the CPU.
    row loss: the mean over all trained tokens, as `batches.row_losses` computes it.
    """
    batch = pack(rows, model.device)
    logps, owner = token_logps(model, batch)
    counts = torch.bincount(owner, minlength=len(rows))
    sums = torch.zeros(len(rows), dtype=logps.dtype, device=logps.device).index_add(0, owner, logps)
    turns = []
    for row, own, loss in zip(rows, logps.double().cpu().split(counts.tolist()),
                              (-sums / counts).tolist(), strict=True):
        prompt, answer, end = last_turn(row, ends)
        body = len(own) - len(end)
        turns.append((prompt, answer, own[max(0, body - len(answer)):body], own[body:], loss))
    return turns


@torch.no_grad()
def row_evidence(model, rows, ends, facts, blank, label=None):
    """What the row tests read, {name: (N,) float64}: two forwards of every row, no gradient.

    ends: token ids that end a turn; facts(token): its `detect.fact`; blank: tokens of the blank
    prompt. The names are EVIDENCE, see detect.py: of the row's last turn (end, slip and peak are
    NaN where it has none; length in tokens), but loss is the mean over all trained tokens. All
    processes share the work; each returns all rows.
    """
    found = torch.zeros(len(rows), len(EVIDENCE), dtype=torch.float64)
    for places, group in own_groups(model, rows, label):
        turns = last_turns(model, group, ends)
        # An empty answer, an end token alone, still needs a token to be a row.
        behind = last_turns(model, [behind_blank(model, blank, answer or prompt[:1])
                                    for prompt, answer, *_ in turns], ())
        for place, (prompt, answer, c, end, loss), (_, _, u, _, _) in zip(
                places.tolist(), turns, behind, strict=False):  # a spare group has no place
            found[place] = torch.tensor([
                detect.end(end), detect.relevance(c, u[:len(c)]), detect.fluency(c),
                detect.slip(c, detect.told([*map(facts, answer)])), detect.slip(c, range(len(c))),
                detect.repetition(answer), *detect.copied(answer, prompt), len(answer), loss],
                dtype=torch.float64)
    return dict(zip(EVIDENCE, all_sum(found).T, strict=True))


def made_faults(losses_of, rows, ends, found, seed=0, room=math.inf):
    """`detect.scaled` values of faults made on purpose, {"end": (m,), "relevance": (m,)}.

    Of FAULTS rows, two forwards of each: losses_of(rows) is `row_losses` of a model. end: cut at
    random in the middle half, the row's end tokens appended. relevance: with the answer of another
    of these rows, where both have at most `room` tokens; what that answer has behind the blank
    prompt is known from `found`. All processes do the same.
    """
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(rows), generator=generator)[:FAULTS].tolist()
    shares = (0.25 + 0.5 * torch.rand(len(places), generator=generator)).tolist()
    cut, parts, blanks = [], [], []
    for place, share, row in zip(places, shares, take(tokens_only(rows), places), strict=True):
        prompt, answer, end = last_turn(row, ends)
        if end and len(answer) >= 4:
            cut.append(answer_row(prompt + answer[:int(share * len(answer))], end))
        if answer:
            parts.append((prompt, answer))
            blanks.append(found["relevance"][place] - found["fluency"][place] * len(answer))
    made = {"relevance": torch.zeros(0, dtype=torch.float64)}
    pairs = [(prompt, parts[n - 1][1], blanks[n - 1]) for n, (prompt, _) in enumerate(parts)
             if len(parts) > 1 and len(prompt) + len(parts[n - 1][1]) <= room]
    if pairs:
        losses, lengths = losses_of([answer_row(prompt, answer) for prompt, answer, _ in pairs])
        made["relevance"] = detect.scaled("relevance", {
            "relevance": torch.stack([blank for *_, blank in pairs]) + losses.double() * lengths,
            "length": lengths.double()})
    if cut:
        losses, lengths = losses_of(cut)
        made["end"] = losses.double() * lengths
    return made


def row_tests(model, lower, upper, ends, facts, seed=0, evidence=row_evidence):
    """Every lower row tested by two forwards of the model, and by its text.

    upper: trusted rows or None, of which TRUSTED are the null; preference pairs are none. ends:
    token ids that end a turn. evidence: `row_evidence`, or what remembers it. Returns ({name:
    (N,)}: EVIDENCE, echo, surprise (log odds of a fault, nats) and reason, the place in REASONS or
    -1; sentences on what was left out).
    """
    found = evidence(model, lower, ends, facts, blank_prompt(lower), label="row tests")
    losses, trusted = functools.partial(row_losses, model), None
    made = made_faults(losses, lower, ends, found, seed, context_length(model.config))
    if upper is not None and "rejected_input_ids" not in upper.column_names:
        places = range(0, len(upper), math.ceil(len(upper) / TRUSTED))
        trusted = evidence(model, upper.select(places), ends, facts, blank_prompt(upper),
                           label="row tests, trusted rows")
    pairs = each_row(lower, "prompt", "response")
    surprise, reason, notes = verdicts(found, trusted, made, text_reasons(pairs))
    if upper is not None and trusted is None:
        notes.append("preference pairs do not say what good rows look like")
    return found | {"echo": detect.scaled("echo", found), "surprise": surprise,
                    "reason": torch.tensor([-1 if name is None else list(REASONS).index(name)
                                            for name in reason])}, notes


def verdicts(found, trusted, made, by_text=()):
    """(surprise (N,), reason [N of REASONS or None], notes) from what `row_evidence` found.

    Flagged rows are the most surprising ones: no other row has a larger surprise than the smallest
    of theirs, which a row takes that its text alone flags.
    """
    names, notes = [name for name in detect.DETECTORS if name in found or name == "echo"], []
    ends, cut = (x[~x.isnan()] for x in (found["end"], made.get("end", found["end"][:0])))
    known = auroc(-torch.cat([ends, cut]), torch.arange(len(ends) + len(cut)) >= len(ends))
    if known is None or known < detect.KNOWS_ENDS:
        names.remove("end")
        notes.append("ends are not judged: " + (
            "no row has an end, or no answer is long enough to cut on trial" if known is None else
            f"the model does not know where answers end (AUROC of rows cut at random {known:.2f})"))
    for level, rows in (("lower", found), ("trusted", trusted)):
        if rows is not None and len(rows["length"]) < detect.LEAST:
            notes.append(f"{len(rows['length'])} {level} rows are too few to say what good rows "
                         f"look like; {detect.LEAST} or more do")
    surprising = detect.surprises(found, trusted, made, names)
    surprise, flagged, reason = detect.judge(surprising, found, made)
    surprise, least = flagged_last(surprise, flagged)
    for place, text in enumerate(by_text):
        # What a detector says of a duplicate or a conflict is worse; the others are no guess.
        if text and (text not in ("duplicate", "conflict") or reason[place] in (None, "unclear")):
            reason[place], surprise[place] = text, torch.maximum(surprise[place], least)
    return surprise, reason, notes


def flagged_last(surprise, flagged):
    """(surprise (N,), the least of a flagged row); no other row's is larger."""
    least = surprise[flagged].min() if flagged.any() else surprise.max()
    return surprise.where(flagged, surprise.clamp_max(least)), least


def with_guidance(tests, own, held_out):
    """`row_tests` with the guidance of detect.py, once a model is trained; an old reason stays.

    own, held_out: (guidance, trained tokens) of the lower rows, (N,) each, and of trusted rows that
    were not trained on. Lower rows were, so theirs is rather too low.
    """
    found, null = (dict(zip(("guidance", "length"), (x.double() for x in values), strict=True))
                   for values in (own, held_out))
    score, flagged, _ = detect.judge(detect.surprises(found, null, names=["guidance"]), found)
    new = flagged & (tests["reason"] < 0) & (found["guidance"] > 0)  # made less likely
    tests = tests | {"guidance": found["guidance"]}
    tests["reason"] = tests["reason"].where(~new, list(REASONS).index("guidance"))
    tests["surprise"], _ = flagged_last(torch.logaddexp(tests["surprise"].double(), score),
                                        tests["reason"] >= 0)
    return tests


def first_logits(tests):
    """omega to begin with, (N,) float64: 0, and less for the rows that look bad; of `row_tests`.

    Of the flagged rows a share of about detect.FDR is good, so the least surprising of them begins
    at its logarithm. The log odds by which another one is more surprising are taken off.
    """
    flagged, surprise = tests["reason"] >= 0, tests["surprise"].double()
    least = surprise[flagged].min() if flagged.any() else 0.0
    return torch.where(flagged, math.log(detect.FDR) + least - surprise, 0.0)


def columns_of_tests(tests, places):
    """Columns of a ranking for the rows at `places`: reason and numbers, None where there is none.

    tests: {name: (N,)} of `row_tests`; {} where no row was tested gives no columns.
    """
    if "reason" not in tests:
        return {}
    reasons = [*REASONS, None]  # which -1 is the place of
    return {"reason": [reasons[place] for place in tests["reason"][places].tolist()], **{
        name: [None if math.isnan(value) else value for value in tests[name][places].tolist()]
        for name in ("surprise", *detect.DETECTORS) if name in tests}}


def groups_of(prompt, answer, length):
    """Which of GROUPS a row is in: tests by likelihood also flag what is merely rare."""
    text = prompt + answer
    plain = sum(c.isascii() for c in text) / max(1, len(text))
    return ("short" if length < 20 else "long" if length >= 200 else "medium",
            "mostly ASCII" if plain >= 0.9 else "less than 90 % ASCII",
            "code" if CODE.search(answer) else "no code")


def first_look(tests, notes, rows):
    """What a person wants to see first of `row_tests`, ready for JSON: line, notes, groups, worst.

    groups: [[group, rows, flagged]] by length (tokens), language and code. worst: of each reason
    the WORST most surprising rows, {row_id, reason, surprise, prompt, response}.
    """
    reasons = columns_of_tests(tests, torch.arange(len(rows)))["reason"]
    counts, worst = {}, collections.defaultdict(list)
    for place, pair in enumerate(each_row(rows, "prompt", "response")):
        for group in groups_of(*pair, float(tests["length"][place])):
            own = counts.setdefault(group, [group, 0, 0])
            own[1] += 1
            own[2] += reasons[place] is not None
    for place in tests["surprise"].argsort(descending=True).tolist():
        if reasons[place] and len(worst[reasons[place]]) < WORST:
            row = rows[place]
            worst[reasons[place]].append({
                "row_id": row["row_id"], "reason": reasons[place], "prompt": row["prompt"],
                "response": row["response"], "surprise": float(tests["surprise"][place])})
    return {"line": bad_rows_line(reasons), "notes": notes,
            "groups": [counts[group] for group in GROUPS if group in counts],
            "worst": [row for own in worst.values() for row in own]}


def bad_rows_line(reasons):
    """"12 of 90 rows look bad: 7 cut short, 5 of another question."; reasons: one a row or None."""
    counts = collections.Counter(reason for reason in reasons if reason)
    if not counts:
        return f"None of {len(reasons)} rows looks bad."
    return (f"{sum(counts.values())} of {len(reasons)} rows look bad: " + ", ".join(
        f"{count} {REASONS.get(reason, reason)}" for reason, count in counts.most_common()) + ".")
