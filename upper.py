"""The upper level: L_val of trusted rows, or of preference pairs against a frozen reference."""

from runtime.folder import read_once, write_once

# ruff: isort: split
import torch
from safetensors.torch import load_file, save

from batches import row_losses, sequences, tokens_only


def upper_losses(logps, lengths, reference=None, beta=0.1):
    """L_val of the upper examples, (n,) nats.

    Without a reference: the mean over response tokens of every row (Eq. SFT_def). With one, DPO
    (Rafailov et al. 2023): -log sigmoid(`dpo_margins`), rows come as chosen, rejected, chosen ...
    logps, lengths: (n,) or (2n,); reference: (n,) the reference's log ref(y_c) - log ref(y_r).
    """
    if reference is None:
        return -logps / lengths
    return -torch.nn.functional.logsigmoid(dpo_margins(logps, reference, beta))


def dpo_margins(logps, reference, beta=0.1):
    """beta ((log pi(y_c) - log pi(y_r)) - (log ref(y_c) - log ref(y_r))), (n,) from (2n,) sums."""
    chosen, rejected = logps.view(-1, 2).unbind(1)
    return beta * (chosen - rejected - reference.to(logps))


def reference_margins(model, sets, out):
    """{name: (n,) log ref(y_c) - log ref(y_r)} of sets of pairs under the frozen base.

    sets: {name: pairs}. The adapter is switched off; computed once, the run folder keeps them.
    """
    file = out / "weights" / "reference_margins.safetensors"
    margins = read_once(file, lambda f: {name: load_file(f)[name].view(len(pairs))
                                         for name, pairs in sets.items()})
    if margins is None:
        margins = {}
        with model.disable_adapter():
            for name, pairs in sets.items():
                chosen, rejected = pair_logps(model, pairs, f"reference, {name}").view(-1, 2).T
                margins[name] = chosen - rejected
        write_once(file, save(margins))
    return margins


def pair_logps(model, pairs, label=None):
    """log pi(y_c), log pi(y_r), pair after pair: (2n,) sums over tokens, no gradient, CPU."""
    losses, lengths = row_losses(model, sequences(list(tokens_only(pairs))), label=label)
    return -losses * lengths
