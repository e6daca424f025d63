"""The curated set: every row ranked and weighted, bad answers rewritten, and what to do with them.

A model likes its own words best, so its likelihood cannot choose between the original and the
refined answer. The original is the default. The refined one is recommended only when it is
complete, not empty and not repetitive, and when its margin

    s(refined) - s(original),    s(y) = ( log p(y | x) - log p(y) ) / |y|

under the frozen base exceeds what the same margin reaches on trusted prompts, where the trusted
answer is right by definition: the 95th percentile of s(generated) - s(trusted) on held-out rows.
That bounds how often a good answer would be replaced (the false-replacement rate, reported).
log p(y) is the answer's log-prob behind the empty prompt: the tokens all prompts share.
"""

import models
from batches import answer_row, each_row, prompt_of, response_of, row_losses
from data.layouts import conversation
from data.sets import first_places
from data.tokens import LABELS, response_text
from detect import repetition
from generate import generate
from ranking import behind_blank, blank_prompt, counted_weights
from runtime.processes import rank, share_list
from utils import UserError, write_jsonl

# ruff: isort: split
import torch

MIN_CALIBRATION = 20  # held-out rows; with fewer a 95th percentile says nothing
QUANTILE = 0.95


def end_tokens(rows, tokenizer):
    """Tokens that end an answer: EOS, and the last token of a complete row (a chat's turn end)."""
    for place, (complete,) in enumerate(each_row(rows, "complete")):
        if complete:  # one is enough: all rows have the same template
            return {tokenizer.eos_token_id, rows[place]["input_ids"][-1]}
    return {tokenizer.eos_token_id}


def check_room(lower, max_new_tokens, context):
    """`UserError` when an answer of `max_new_tokens` does not fit behind the longest prompt."""
    longest = max(trained.index(1) for (trained,) in each_row(lower, "trained"))
    if longest + max_new_tokens > context:
        raise UserError(f"--max-new-tokens {max_new_tokens}: behind the longest prompt, {longest} "
                        f"tokens, it exceeds the context of {context}; lower it or --max-length")


def scores(model, prompts, responses, blank):
    """s(y) of every pair under the frozen base, the adapter switched off -> (n,) nats a token."""
    with model.disable_adapter():
        given, _ = row_losses(model, [answer_row(*pair) for pair in zip(
            prompts, responses, strict=True)], label="scoring answers")
        alone, _ = row_losses(model, [behind_blank(model, blank, y) for y in responses],
                              label="scoring answers alone")
    return alone - given


def well_formed(tokens, complete):
    """Complete, not empty, and of more than eight 4-grams no more than half occurred before."""
    return complete and len(tokens) > 1 and (len(tokens) <= 11 or repetition(tokens) <= 0.5)


def recommend(margin, threshold, fine):
    """"refined", "original" or "undecided" for one row.

    margin: s(refined) - s(original); threshold: of `calibrate`, or None; fine: `well_formed`.
    """
    if not fine or not margin > 0:  # NaN is no margin
        return "original"
    if threshold is None or margin <= threshold:
        return "undecided"
    return "refined"


def greedy(model, prompts, sampling, label):
    """The likeliest answer to each prompt, [(tokens, complete)]; all processes share the work.

    sampling: options of `generate`, of which the temperature is not used.
    """
    return share_list(lambda own: generate(model, own, [""] * len(own), label=label, **sampling | {
        "temperature": 0.0}), prompts)


def calibrate(model, held_out, sampling, blank):
    """(threshold, false-replacement rate) from trusted held-out prompts; (None, None) for too few.

    One half of the prompts sets the threshold, the other half measures how often it would replace
    a trusted answer: on the rows that set it the rate is 5 % by construction.
    """
    context = models.context_length(model.config)
    places = sorted(first_places(held_out["prompt_hash"][:]).values())  # each question once
    rows = [row for row in held_out.select(places[:400])
            if len(prompt_of(row)) + sampling["max_new_tokens"] <= context]
    if len(rows) < 2 * MIN_CALIBRATION:
        return None, None
    prompts = [prompt_of(row) for row in rows]
    written = greedy(model, prompts, sampling, "trusted prompts")
    margins = (scores(model, prompts, [tokens for tokens, _ in written], blank)
               - scores(model, prompts, [response_of(row) for row in rows], blank))
    fine = torch.tensor([well_formed(*answer) for answer in written])
    half = torch.arange(len(rows)) % 2 == 0
    threshold = max(0.0, torch.quantile(margins[half], QUANTILE).item())
    replaced = fine & (margins > threshold)
    return threshold, replaced[~half].double().mean().item()


def refine(run, positions, sampling):
    """A greedy answer to the rows at these positions, and what to do with it.

    Returns {position: {refined, recommended, margin, refined_logp}}, and what `calibrate` found.
    """
    model, lower = run.model, run.levels.lower
    rows = [lower[p] for p in positions]
    prompts = [prompt_of(row) for row in rows]
    written = greedy(model, prompts, sampling, "refining")
    new = [tokens for tokens, _ in written]
    blank = blank_prompt(lower)
    threshold, false_rate = calibrate(model, run.levels.upper_heldout, sampling, blank)
    margins = (scores(model, prompts, new, blank)
               - scores(model, prompts, [response_of(row) for row in rows], blank)).tolist()
    losses, lengths = row_losses(model, [answer_row(p, y)
                                         for p, y in zip(prompts, new, strict=True)])
    refined = {}
    for i, position in enumerate(positions):
        text = response_text(run.tokenizer, new[i], run.args.template)
        fine = well_formed(*written[i]) and bool(text)
        refined[position] = {"refined": text, "recommended": recommend(margins[i], threshold, fine),
                             "margin": margins[i], "refined_logp": -(losses[i] * lengths[i]).item()}
    return refined, {"refined/threshold": threshold, "refined/false_replacement": false_rate}


def current_logps(model, buffer):
    """{position: (G,) log-probs of its training answers under the model of now}."""
    positions = sorted(p for p in buffer if buffer[p].old_logps is not None)
    if not positions:
        return {}
    losses, lengths = row_losses(model, [row for p in positions for row in buffer[p].rows],
                                 label="ratios")
    logps = (-losses.double() * lengths).view(len(positions), -1)
    return dict(zip(positions, logps, strict=True))


def curated_set(run, mask, buffer, sampling, ranks, kept, rewrite):
    """Answer the bottom-R rows once more, greedily, and write `curated.jsonl`, best row first.

    ranks (N,), kept (N,) bool: of weights.jsonl. mask (N,) bool, buffer {position: `Answers`}.
    A mask that was given is answered, not the bottom R. rewrite: `refine`, or that of accept.py.
    One line a row, its columns are those of docs/glossary.md. Returns metrics for the result.
    """
    lower, weights = run.levels.lower, counted_weights(run.selector, mask)
    bottom = ranks > len(lower) - round(run.args.ratio_masked * len(lower))
    bottom = (bottom if run.given_mask is None else mask).nonzero().flatten().tolist()
    refined, metrics = rewrite(run, bottom, sampling)
    current = current_logps(run.model, buffer)

    def entry(p):
        row = lower[p]
        line = {"row_id": row["row_id"], "hash": row["hash"], "rank": int(ranks[p]),
                "kept": bool(kept[p]), "prompt": row["prompt"], "response": row["response"],
                "refined": None, "recommended": "original", "margin": None, "refined_logp": None,
                "weight": weights[p].item(), "masked": bool(mask[p]),
                "generated_at": buffer[p].step if p in buffer else None,
                **dict.fromkeys(("ratio", "logps", "old_logps", "way", "source", "why")),
                **{name: value for name, (value,) in run.tested([p]).items()}}
        if p in current:
            old = buffer[p].old_logps
            line |= {"logps": current[p].tolist(), "old_logps": old.tolist(),
                     "ratio": (current[p] - old).clamp(-700, 700).exp().tolist()}
        return line | refined.get(p, {}) | {name: row[name] for name in LABELS if name in row} | (
            {"messages": conversation(row)} if row.get("messages") else {})

    if rank() == 0:
        write_jsonl(run.out / "curated.jsonl", map(entry, ranks.argsort().tolist()))
    choices = [answer["recommended"] for answer in refined.values()
               if answer["refined"] is not None]
    return metrics | {"refined/answers": len(choices)} | {
        f"refined/{c}": choices.count(c) for c in ("refined", "original", "undecided")}
