"""Scores that need no upper rows: a plain function each, higher is better.

    random   a seeded permutation
    length   characters of the response, longer is better (Zhao et al. 2024); no tokenizer enters
    loss     minus the base model's mean response loss: what the model finds odd comes last
    ifd      Li et al. 2024: mean loss given the prompt / mean loss of the response alone

Deviations:
 1. IFD: low is best. Li et al. keep the *highest* ratios below 1, the hard rows of a set whose
    answers are right; rows at 1 and above, where the prompt does not help, are misaligned. In a
    noisy set wrong answers have high ratios on both sides of 1, so keeping the hard rows keeps the
    faults. `--ifd-order hard` is theirs: highest below 1 first, then the others.
 2. IFD: the response alone follows the start (or end) token, so its first token counts too.
"""

import torch

import data
from eval import row_losses, token_groups
from logprobs import sequence_logprobs

TEXTS_AT_ONCE = 10_000


def random_scores(num_rows, seed):
    """A seeded permutation, (N,) float64."""
    return data.permutation(num_rows, seed, 0, stream=3).double()


def length_scores(rows):
    """Characters of every response, (N,) float64."""
    return torch.tensor([float(len(response)) for batch in
                         rows.select_columns(["response"]).iter(batch_size=TEXTS_AT_ONCE)
                         for response in batch["response"]], dtype=torch.float64)


def loss_scores(model, rows):
    """Minus the mean loss over response tokens of every row, (N,) float64, nats."""
    return -row_losses(model, rows, label="loss")[0].double()


class ResponsesAlone:
    """Tokenised rows without their prompts: a start token, then the trained tokens."""

    def __init__(self, rows, start):
        self.rows, self.start = rows, start

    def __getitem__(self, index):
        row = self.rows[index]
        response = [t for t, loss in zip(row["input_ids"], row["trained"], strict=True) if loss]
        return {"input_ids": [self.start, *response], "trained": [0] + [1] * len(response)}


@torch.no_grad()
def ifd(model, rows, start):
    """Instruction-following difficulty, (N,): mean loss given the prompt / mean loss without it.

    start: id of the token in front of a response that stands alone.
    """
    losses, _ = row_losses(model, rows, label="ifd: given the prompt")
    alone = ResponsesAlone(data.tokens_only(rows), start)
    without = []
    for group in token_groups(alone, range(len(rows)), "ifd: response alone"):
        logps, lengths = sequence_logprobs(model, data.pack(group, model.device))
        without.append((-logps / lengths).cpu())
    return losses / torch.cat(without).clamp_min(1e-6)


def ifd_scores(ratios, order):
    """"aligned": low is best. "hard": highest below 1 first, then the others, lowest first."""
    if order == "aligned":
        return -ratios
    return torch.where(ratios < 1, ratios, -ratios)
