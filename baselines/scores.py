"""Scores that need no upper rows: a plain function each, higher is better.

    random   a seeded permutation
    length   characters of the response, longer is better (Zhao et al. 2024); no tokenizer enters
    loss     minus the base model's mean response loss: what the model finds odd comes last
    ifd      instruction-following difficulty, mean loss given the prompt / mean loss behind the
             blank prompt: Li et al. 2024, s(A|Q) / s(A), as data_by_IFD.py of tianyi-lab/Cherry_LLM
             computes it
    joined   the tests' score and the loss: surprise plus -ln of the share of rows with as high a
             loss. The tests find faults, the loss what they were not made for, and rows of low loss
             train best (docs/row_tests.md)

Deviations:
 1. IFD: low is best. Li et al. keep the *highest* ratios below 1, the hard rows of a set whose
    answers are right; rows at 1 and above, where the prompt does not help, are misaligned. In a
    noisy set wrong answers have high ratios on both sides of 1, so keeping the hard rows keeps the
    faults. `--ifd-order hard` is theirs: highest below 1 first, then the others.
 2. IFD: s(A) stands behind the blank prompt, the whole template around an empty question; in
    Cherry_LLM behind the template's last line, "### Response:". A bare start token ranks planted
    faults worse: AUROC 0.593 against 0.674, on 4,000 Alpaca rows and a model of 6M parameters.
"""

import torch
from tqdm import tqdm

import batches
from batches import response_of, row_losses
from ranking import behind_blank, blank_prompt

TEXTS_AT_ONCE = 10_000
ROWS_AT_ONCE = 1000  # tokenised rows in memory while answers stand alone


def random_scores(num_rows, seed):
    """A seeded permutation, (N,) float64."""
    return batches.permutation(num_rows, seed, 0, stream=3).double()


def length_scores(rows):
    """Characters of every response, (N,) float64."""
    return torch.tensor([float(len(response)) for batch in
                         rows.select_columns(["response"]).iter(batch_size=TEXTS_AT_ONCE)
                         for response in batch["response"]], dtype=torch.float64)


def loss_scores(model, rows):
    """Minus the mean loss over response tokens of every row, (N,) float64, nats."""
    return -row_losses(model, rows, label="loss")[0].double()


def joined_scores(losses, surprise):
    """Minus the surprise of the tests and of the loss, (N,) float64; both (N,)."""
    return -surprise - rank_surprise(losses)


def rank_surprise(values):
    """-ln of the share of the rows at or above a value, (N,): comparable with a row's surprise."""
    above = len(values) - torch.searchsorted(values.sort().values, values.contiguous())
    return -(above / len(values)).double().log()


def length_matched_scores(lengths, kept, seed, bins=10):
    """Random scores (N,) of which the best sum(kept) have as many of each length as `kept` has.

    lengths, kept (N,). Lengths are alike within one of `bins` bins of equally many rows.
    """
    order, scores = random_scores(len(lengths), seed), torch.zeros(len(lengths)).double()
    for part in lengths.argsort(stable=True).tensor_split(bins):
        place = order[part].argsort(descending=True).argsort()
        scores[part] = order[part] + len(lengths) * (place < kept[part].sum())
    return scores


def ifd_ratios(model, rows):
    """Instruction-following difficulty, (N,) float64: loss given the prompt / loss without it.

    Both are means over response tokens, the end token included as in training. Without the prompt
    means behind the blank one, so the template says "an answer begins here" in both.
    """
    given, _ = row_losses(model, rows, label="ifd: given the prompt")
    tokens, blank, alone = batches.tokens_only(rows), blank_prompt(rows), []
    for start in tqdm(range(0, len(rows), ROWS_AT_ONCE), desc="ifd: behind the blank prompt",
                      unit="block"):
        block = batches.take(tokens, range(start, min(start + ROWS_AT_ONCE, len(rows))))
        alone.append(row_losses(model, [behind_blank(model, blank, response_of(row))
                                       for row in block])[0])
    return given.double() / torch.cat(alone).double().clamp_min(1e-6)


def ifd_scores(ratios, order):
    """"aligned": low is best. "hard": highest below 1 first, then the others, lowest first."""
    if order == "aligned":
        return -ratios
    return torch.where(ratios < 1, ratios, -ratios)
