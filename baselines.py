"""Which rows to keep, without bilevel training: random, DSIR, LESS, loss, length, IFD.

    python baselines.py less --lower noisy.jsonl --upper trusted.jsonl --model NAME
    python baselines.py dsir                                      # the embedded toy
    python train_offline.py --method sft --keep kept.jsonl ...    # train on the kept rows

Every line of --out is a row: row_id, hash, rank (1 = best), kept, score (higher is better).
random, DSIR and LESS are the paper's baselines (section 5); loss, length and IFD are controls.

    random   a seeded permutation
    dsir     Xie et al. 2023: log w = sum over hashed n-grams of log p_upper - log p_lower, then
             Gumbel top-k. A row contributes its prompt, a newline and its response, no template.
    less     Xia et al. 2024: how far an Adam step on this row lowers the upper loss, see `less`
    loss     minus the base model's mean response loss: what the model finds odd comes last
    length   characters of the response, longer is better (Zhao et al. 2024); no tokenizer enters
    ifd      Li et al. 2024: mean loss given the prompt / mean loss of the response alone

Deviations, each with its reason:
 1. DSIR drops no short rows; the package drops rows under 100 words, which is most of an
    instruction set (`--dsir-min-words`). Its noise is seeded here.
 2. LESS: LoRA on every linear layer and no dropout, as in training here, where the authors adapt
    attention alone with dropout 0.1. `--lora-rank 128 --lora-alpha 512` are theirs.
 3. LESS: the warm-up is plain Adam without weight decay, gradients clipped at norm 1.
 4. LESS picks the top 5 %; here --keep-fraction decides, as for every method.
 5. IFD: low is best. Li et al. keep the *highest* ratios below 1, the hard rows of a set whose
    answers are right; rows at 1 and above, where the prompt does not help, are misaligned. In a
    noisy set wrong answers have high ratios on both sides of 1, so keeping the hard rows keeps the
    faults. `--ifd-order hard` is theirs: highest below 1 first, then the others.
 6. IFD: the response alone follows the start (or end) token, so its first token counts too.
 7. The upper rows that training would hold out are held out here, by the same flags and seed. Of
    preference pairs (`--upper-loss dpo`, as in training) DSIR and LESS see the chosen responses.
"""

import argparse
import hashlib
import json
import math
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from tqdm import tqdm

import common
import data
import loading
import toy
import utils
from eval import row_losses, token_groups
from logprobs import sequence_logprobs
from utils import UserError

METHODS = ("random", "dsir", "less", "loss", "length", "ifd")
NEEDS_UPPER, NEEDS_MODEL = ("dsir", "less"), ("less", "loss", "ifd")


# --- DSIR -----------------------------------------------------------------------------------------

WORDS = re.compile(r"\w+|[^\w\s]+")  # NLTK's WordPunctTokenizer
TEXTS_AT_ONCE = 10_000
FIT_NGRAMS_PER_BUCKET = 100_000      # the lower distribution is fitted on so many, then no more


class NgramHasher:
    """Texts -> buckets of their unigrams and bigrams: int(sha256(n-gram), 16) mod num_buckets.

    The hash of the reference package (data-selection 1.0.3), made once per distinct word and, but
    for collisions in a table of fixed size, once per distinct pair of words.
    """

    def __init__(self, num_buckets=10_000, table_bits=22, max_words=2**22):
        self.num_buckets, self.shift, self.max_words = num_buckets, 64 - table_bits, max_words
        self.dtype = np.min_scalar_type(num_buckets - 1)
        self._reset()

    def _reset(self):
        self.ids, self.words, self.word_buckets = {}, [], np.zeros(0, self.dtype)
        self.keys = np.full(2 ** (64 - self.shift), 2**64 - 1, np.uint64)
        self.values = np.zeros(len(self.keys), self.dtype)

    def __call__(self, texts):
        """-> (buckets: unigrams of all texts and then bigrams; words of each text, int64)."""
        if len(self.ids) > self.max_words:  # memory stays bounded on sets of any size
            self._reset()
        split = [WORDS.findall(text.lower()) for text in texts]
        lengths = np.array([len(words) for words in split], np.int64)
        known, ids = len(self.ids), self.ids
        flat = np.fromiter((ids.setdefault(word, len(ids)) for words in split for word in words),
                           np.uint64, lengths.sum())
        new = [word.encode() for word in list(ids)[known:]] if len(ids) > known else []
        self.words += new
        self.word_buckets = np.concatenate([self.word_buckets, self._hash(new)])
        inside = np.ones(len(flat), bool)  # pairs do not cross from one text to the next
        inside[np.cumsum(lengths)[lengths > 0] - 1] = False
        first = flat[inside]
        second = flat[np.flatnonzero(inside) + 1]
        return np.concatenate([self.word_buckets[flat], self._pairs(first, second)]), lengths

    def _pairs(self, first, second):
        keys = first << np.uint64(32) | second
        slots = (keys * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(self.shift)
        buckets, missing = self.values[slots], self.keys[slots] != keys
        new, where = np.unique(keys[missing], return_inverse=True)
        words = self.words
        hashed = self._hash([words[a] + b" " + words[b] for a, b in zip(
            (new >> np.uint64(32)).tolist(), (new & np.uint64(2**32 - 1)).tolist(), strict=True)])
        buckets[missing] = hashed[where]
        slots = (new * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(self.shift)
        self.keys[slots], self.values[slots] = new, hashed
        return buckets

    def _hash(self, ngrams):
        """sha256 as a 256-bit number mod num_buckets, from its four 64-bit words (Horner)."""
        sha256, modulus = hashlib.sha256, np.uint64(self.num_buckets)
        digests = b"".join([sha256(ngram).digest() for ngram in ngrams])
        remainder = np.zeros(len(ngrams), np.uint64)
        for word in np.frombuffer(digests, ">u8").reshape(-1, 4).T.astype(np.uint64):
            remainder = (remainder * np.uint64(2**64 % self.num_buckets) + word % modulus) % modulus
        return remainder.astype(self.dtype)


def dsir_log_weights(lower, upper, total=None, num_buckets=10_000, fit_ngrams=None, folder=None):
    """log importance weight of every lower text, log p_upper(text) - log p_lower(text), in nats.

    lower, upper: iterables of lists of texts, each read once. Returns (log weights (N,) float64,
    words (N,) int64). p = n-gram counts / their total, plus 1e-8 inside the log; not divided by
    length. The buckets of the lower texts wait on disk for p_lower, 2 bytes an n-gram.
    total: number of lower texts, for the progress bar. folder: of the temporary file.
    fit_ngrams: p_lower is fitted up to the text that exceeds so many n-grams (default: the
    package's 100,000 a bucket).
    """
    hasher = NgramHasher(num_buckets)
    upper_counts, lower_counts = np.zeros(num_buckets), np.zeros(num_buckets)
    for texts in upper:
        upper_counts += np.bincount(hasher(texts)[0], minlength=num_buckets)
    limit = fit_ngrams or FIT_NGRAMS_PER_BUCKET * num_buckets
    chunks, weights = [], []
    with tempfile.TemporaryFile(dir=folder) as spool:
        with tqdm(total=total, desc="dsir: n-grams", unit=" rows", mininterval=1) as bar:
            for texts in lower:
                buckets, lengths = hasher(texts)
                buckets.tofile(spool)
                chunks.append(lengths)
                if (before := lower_counts.sum()) <= limit:
                    ngrams = lengths + np.maximum(lengths - 1, 0)
                    fitted = np.cumsum(ngrams) - ngrams + before <= limit
                    lower_counts += np.bincount(buckets[fitted[_row_of(lengths)]],
                                                minlength=num_buckets)
                bar.update(len(texts))
        difference = (np.log(upper_counts / upper_counts.sum() + 1e-8)
                      - np.log(lower_counts / lower_counts.sum() + 1e-8))
        spool.seek(0)
        for lengths in chunks:
            row = _row_of(lengths)
            buckets = np.fromfile(spool, hasher.dtype, len(row))
            weights.append(np.bincount(row, difference[buckets], minlength=len(lengths)))
    return np.concatenate(weights), np.concatenate(chunks)


def _row_of(lengths):
    """The text that each bucket of `NgramHasher` belongs to."""
    row = np.arange(len(lengths))
    return np.concatenate([np.repeat(row, lengths), np.repeat(row, np.maximum(lengths - 1, 0))])


def row_texts(rows):
    """Lists of TEXTS_AT_ONCE texts: prompt, newline, response."""
    for batch in rows.select_columns(["prompt", "response"]).iter(batch_size=TEXTS_AT_ONCE):
        yield [prompt + "\n" + response
               for prompt, response in zip(batch["prompt"], batch["response"], strict=True)]


def gumbel(num_rows, seed):
    """(num_rows,) of Gumbel(0, 1): the top k of log w + noise is a sample without replacement."""
    return np.random.default_rng(seed).gumbel(size=num_rows)


# --- LESS -----------------------------------------------------------------------------------------

def adam_direction(gradient, m, v):
    """Gamma = m' / sqrt(v' + 1e-8) after one more Adam step on `gradient`; (..., P), m and v (P,).

    As LESS has it: the epsilon inside the root, no bias correction, betas (0.9, 0.999).
    """
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient.square()
    return m / (v + 1e-8).sqrt()


def row_gradients(model, theta, rows):
    """Gradient of every row's mean response loss over the adapter, (n, P), by one backward.

    Rows are packed. With X_i the inputs of a LoRA layer s B A that belong to row i, and G_i the
    gradients of its outputs: dL_i/dB = s G_i^T (X_i A^T), dL_i/dA = s (G_i B)^T X_i.
    """
    inputs, outputs = {}, {}

    def watch(layer, arguments, output):
        if layer not in outputs:  # not again when a checkpointed forward is repeated
            inputs[layer], outputs[layer] = arguments[0].detach()[0], output

    hooks = [layer.register_forward_hook(watch) for layer in model.modules()
             if hasattr(layer, "lora_A")]
    batch = data.pack(rows, model.device)
    try:
        logps, lengths = sequence_logprobs(model, batch)
        gradients = torch.autograd.grad((-logps / lengths).sum(), list(outputs.values()))
    finally:
        for hook in hooks:
            hook.remove()
    starts = batch["cu_seqlens"].long()
    place = torch.arange(starts.diff().max(), device=starts.device)
    inside = place < starts.diff()[:, None]                                  # (n, longest)
    index = torch.where(inside, starts[:-1, None] + place, 0)
    found = {}
    for layer, gradient in zip(outputs, gradients, strict=True):
        a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
        x = inputs[layer][index].to(a.dtype)
        g = (gradient[0][index] * inside[:, :, None]).to(a.dtype) * layer.scaling["default"]
        found[a] = (g @ b).transpose(1, 2) @ x
        found[b] = g.transpose(1, 2) @ (x @ a.T)
    return torch.cat([found[p].detach().flatten(1) for p in theta], dim=1)


SIGNS = 1.0 - 2.0 * (torch.arange(256)[:, None] >> torch.arange(8) & 1)  # a byte -> its eight signs
ROWS_AT_ONCE = 256  # gradients projected together and then written
SIGNS_AT_ONCE = {"cpu": 2**22, "cuda": 2**28}  # four bytes each: in cache, or few kernel launches


def _shift_right(x, places):
    return x >> places & ((1 << (64 - places)) - 1)  # torch's own shift copies the sign bit


def random_signs(start, count, dim, seed, device="cpu"):
    """Rows start .. start + count - 1 of the (P, dim) Rademacher matrix of `seed`, float32.

    Bits of splitmix64 of a counter: any block at any time on any device, the same everywhere.
    """
    words = -(-dim // 64)
    x = torch.arange(start * words, (start + count) * words, device=device)
    x = (x + (seed % 2**23 << 40)) * -0x61C8864680B583EB  # all products modulo 2^64
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    x = (x ^ _shift_right(x, 31)).view(torch.uint8).view(count, words * 8)
    return torch.nn.functional.embedding(x.int(), SIGNS.to(device)).view(count, -1)[:, :dim]


def project(vectors, dim, seed):
    """(n, P) -> (n, dim), times a Rademacher matrix that never exists as a whole."""
    projected = torch.zeros(len(vectors), dim, dtype=vectors.dtype, device=vectors.device)
    size = max(1, SIGNS_AT_ONCE.get(vectors.device.type, 2**22) // dim)
    for start in range(0, vectors.shape[1], size):
        block = vectors[:, start:start + size]
        signs = random_signs(start, block.shape[1], dim, seed, vectors.device)
        projected.addmm_(block, signs.to(block.dtype))
    return projected


def warm_up(model, theta, rows, args, work):
    """Train the adapter on a random share of the rows; one checkpoint an epoch, in `work`.

    A checkpoint is theta, m, v, each (P,), and lr, the epoch's mean learning rate. Existing ones
    are taken as they are: the caller has checked that they come from the same arguments.
    """
    files = [work / f"warmup_{epoch}.safetensors" for epoch in range(args.epochs)]
    if all(file.exists() for file in files):
        return files
    count = max(1, round(args.warmup_fraction * len(rows)))
    chosen = data.permutation(len(rows), args.seed, 0, stream=4)[:count]
    steps = math.ceil(count / args.batch)
    total, rising = steps * args.epochs, math.ceil(0.03 * steps * args.epochs)
    print(f"warm-up: {count} of {len(rows)} rows, {steps} steps of {args.batch} rows an epoch, "
          f"x {args.epochs} epochs = {total}")
    optimizer = torch.optim.Adam(theta, lr=args.lr)
    progress = tqdm(total=total, desc="less: warm-up", unit="step")
    for epoch, file in enumerate(files):
        order, rates = chosen[data.permutation(count, args.seed, epoch, stream=5)], []
        for k in range(steps):
            step, batch = epoch * steps + k, data.take(rows, order[k * args.batch:][:args.batch])
            for start in range(0, len(batch), args.micro_batch):
                part = data.pack(batch[start:start + args.micro_batch], model.device)
                logps, lengths = sequence_logprobs(model, part)
                ((-logps / lengths).sum() / len(batch)).backward()
            norm = torch.nn.utils.clip_grad_norm_(theta, 1.0)
            if not torch.isfinite(norm):
                raise UserError(f"warm-up step {step}: the gradient is not finite; lower --lr")
            falling = (total - step) / max(1, total - rising)
            rates.append(args.lr * min((step + 1) / (rising + 1), falling))
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.step()
            optimizer.zero_grad()
            progress.update()
        state = [optimizer.state[p] for p in theta]
        utils.write_atomic(file, save({
            "theta": torch.cat([p.detach().flatten() for p in theta]).cpu(),
            "m": torch.cat([s["exp_avg"].flatten() for s in state]).cpu(),
            "v": torch.cat([s["exp_avg_sq"].flatten() for s in state]).cpu(),
            "lr": torch.tensor([sum(rates) / len(rates)], dtype=torch.float64)}))
    progress.close()
    return files


def write_features(model, theta, rows, work, name, dim, seed, adam=None):
    """Projected unit gradients of all rows, (N, dim), in `work/name.npy`; continues after a kill.

    adam: (m, v) for training rows, whose gradient becomes Adam's step; None for validation rows.
    dim == P: no projection. float16 on disk, float64 for a float64 adapter.
    """
    file, progress = work / f"{name}.npy", work / f"{name}.done"
    shape = (len(rows), dim)
    dtype = np.float64 if theta[0].dtype == torch.float64 else np.float16
    done = int(progress.read_text()) if progress.exists() else 0
    features = np.lib.format.open_memmap(file, "r+" if done else "w+", dtype, shape)
    if not done and hasattr(os, "posix_fallocate"):  # a full disk fails here, not later
        with open(file, "r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    size = sum(p.numel() for p in theta)
    at_once = max(1, min(ROWS_AT_ONCE, 2**28 // size))  # a gigabyte of gradients
    bar = tqdm(total=len(rows), initial=done, desc=f"less: {name}", unit="row", mininterval=1)
    for start in range(done, len(rows), at_once):
        vectors, block = [], data.take(rows, range(start, min(start + at_once, len(rows))))
        for part in token_groups(block, range(len(block))):
            vectors.append(row_gradients(model, theta, part))
            if adam is not None:
                vectors[-1] = adam_direction(vectors[-1], *adam)
        vectors = torch.cat(vectors)
        vectors = vectors if dim == size else project(vectors, dim, seed)
        norms = vectors.norm(dim=1, keepdim=True)
        if not torch.isfinite(norms).all():
            position = start + int((~torch.isfinite(norms)).nonzero()[0, 0])
            raise UserError(f"{name}: the gradient of row {position} is not finite")
        features[start:start + len(vectors)] = (vectors / norms.clamp_min(1e-30)).cpu().numpy()
        features.flush()
        utils.write_atomic(progress, str(start + len(vectors)))
        bar.update(len(vectors))
    bar.close()
    return features


def read_features(features):
    """(slice of rows, their features in float64), a quarter of a gigabyte at a time."""
    size = max(1, 2**25 // features.shape[1])
    for start in range(0, len(features), size):
        part = slice(start, start + size)
        yield part, torch.from_numpy(features[part].astype(np.float64))


def less_scores(model, theta, lower, upper, groups, args, work):
    """LESS: s(z) = max over groups j of mean over upper rows z' in j of sum_i w_i cos_i(z, z').

    cos_i(z, z') = <Gamma_i(z), g_i(z')> of the projected unit vectors at checkpoint i: Adam's step
    on the lower row z against the plain gradient of the upper row z'. w_i is the epoch's mean
    learning rate, normalised to sum one. groups: a name for each upper row. Returns (N,) float64.
    """
    size = sum(p.numel() for p in theta)
    dim = size if not args.project or size <= args.project else args.project
    width = 8 if theta[0].dtype == torch.float64 else 2
    print(f"less: the gradient has {size} numbers, "
          + ("projection skipped: " + ("switched off" if not args.project else
             f"no longer than --project {args.project}") if dim == size else f"projected to {dim}")
          + f"; features in {work}: {len(lower) + len(upper)} rows x {dim} x {width} bytes x "
          f"{args.epochs} checkpoints = "
          f"{(len(lower) + len(upper)) * dim * width * args.epochs / 2**20:.0f} MiB")
    names = sorted(set(groups))
    member = torch.tensor([[group == name for group in groups] for name in names]).double()
    member /= member.sum(dim=1, keepdim=True)
    files = warm_up(model, theta, lower, args, work)
    checkpoints = [load_file(file) for file in files]
    rates = torch.cat([checkpoint["lr"] for checkpoint in checkpoints])
    scores = torch.zeros(len(lower), len(names), dtype=torch.float64)
    for i, (weight, state) in enumerate(zip(rates / rates.sum(), checkpoints, strict=True)):
        torch.nn.utils.vector_to_parameters(state["theta"].to(model.device), theta)
        adam = state["m"].to(model.device), state["v"].to(model.device)
        features = write_features(model, theta, upper, work, f"upper_{i}", dim, args.seed)
        target = sum(member[:, part] @ block for part, block in read_features(features))
        features = write_features(model, theta, lower, work, f"lower_{i}", dim, args.seed, adam)
        for part, block in read_features(features):
            scores[part] += weight * (block @ target.T)
    return scores.max(dim=1).values


def rows_fingerprint(rows):
    """Changes with the content of the rows, their order or how they were tokenised."""
    return utils.content_hash(*rows["hash"][:], *map(str, data.row_lengths(rows).tolist()))


def model_fingerprint(model):
    """Changes with the weights: some of every parameter."""
    return utils.content_hash(*(
        f"{name} {tuple(p.shape)} {p.flatten()[::max(1, p.numel() // 64)][:64].double().tolist()}"
        for name, p in model.named_parameters()))


def less(args, levels):
    """Open or continue the work folder, then `less_scores`."""
    utils.seed_everything(args.seed)
    device = utils.pick_device(args.device)
    base = loading.load_model(args.model, device, args.dtype, args.four_bit)
    work = Path(args.work or f"{args.out}.less")
    settings = ("seed", "epochs", "lr", "batch", "micro_batch", "warmup_fraction", "lora_rank",
                "lora_alpha", "project", "dtype", "four_bit")
    config = {"args": {name: getattr(args, name) for name in settings},
              "data": {"model": model_fingerprint(base),
                       "lower rows": rows_fingerprint(levels.lower),
                       "upper rows": rows_fingerprint(levels.upper)}}
    model = loading.add_lora(base, args.lora_rank, args.lora_alpha,
                             checkpointing=args.gradient_checkpointing)
    utils.open_run(work, config, resume=True)
    groups = ["all"] * len(levels.upper)
    if args.upper_groups:
        if "kind" not in levels.upper.column_names:
            raise UserError("--upper-groups: the upper rows have no column kind; name it with "
                            "--upper-columns kind=...")
        groups = levels.upper["kind"][:]
    theta = [p for p in model.parameters() if p.requires_grad]
    return less_scores(model, theta, data.tokens_only(levels.lower),
                       data.tokens_only(levels.upper), groups, args, work)


# --- loss, length, IFD, random --------------------------------------------------------------------

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


def length_scores(rows):
    """Characters of every response."""
    return torch.tensor([float(len(response)) for batch in
                         rows.select_columns(["response"]).iter(batch_size=TEXTS_AT_ONCE)
                         for response in batch["response"]], dtype=torch.float64)


# --- command line ---------------------------------------------------------------------------------

# Flags of the training scripts that mean the same here, with their one home there: the whole data
# group but beta, and these.
SHARED = ("model", "dtype", "four_bit", "gradient_checkpointing", "device", "micro_batch", "seed",
          "keep_fraction")
NOT_SHARED = ("dpo_beta",)
# The embedded default: a tiny model on rows of a few tokens.
TOY = {"lora_rank": 8, "lora_alpha": 8, "lr": 1e-3, "batch": 8, "max_length": 128, "project": 1024}


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Rank rows without bilevel training. LESS's published values in brackets.")
    parser.add_argument("method", choices=METHODS)
    training = argparse.ArgumentParser(add_help=False)
    common.add_arguments(training)
    shared = parser.add_argument_group("as in the training scripts (no --lower: the embedded toy)")
    for group in training._action_groups:
        for action in group._group_actions:
            if action.dest in SHARED or (
                    (group.title or "").startswith("data") and action.dest not in NOT_SHARED):
                shared._add_action(action)
            else:  # what reads these rows for training may ask for it
                parser.set_defaults(**{action.dest: action.default})
    parser.add_argument("--out", default="kept.jsonl", help="the ranking, one line a row")
    add = parser.add_argument_group("dsir").add_argument
    add("--dsir-buckets", type=int, default=10_000, help="hash buckets of the n-grams")
    add("--dsir-min-words", type=int, default=0, help="shorter rows come last (the package: 100)")
    add("--dsir-no-noise", action="store_true", help="the k largest weights, not a sample")
    add = parser.add_argument_group("less").add_argument
    add("--warmup-fraction", type=float, default=0.05, help="share of lower rows (5 %%)")
    add("--epochs", type=int, default=4, help="of the warm-up, a checkpoint each (4)")
    add("--lr", type=float, default=2e-5, help="of the warm-up, linear, 3 %% rising (2e-5)")
    add("--batch", type=int, default=32, help="rows a warm-up step (32)")
    add("--lora-rank", type=int, default=128, help="(128)")
    add("--lora-alpha", type=int, default=512, help="(512)")
    add("--project", type=int, default=8192, help="D, numbers a row; 0: no projection (8192)")
    add("--upper-groups", action="store_true",
        help="best over groups of upper rows: each value of their column kind is a group")
    add("--work", help="folder of features, kept and continued (default: OUT.less)")
    add = parser.add_argument_group("ifd").add_argument
    add("--ifd-order", choices=("aligned", "hard"), default="aligned",
        help="low is best, or the published order: highest below 1 first")
    first, _ = parser.parse_known_args(argv)
    toy_run = (first.lower, first.upper, first.model) == (None,) * 3
    if toy_run:
        parser.set_defaults(**TOY)
    args = parser.parse_args(argv)
    args.toy = toy_run
    utils.check_seed(args.seed)
    for name in ("epochs", "batch", "micro_batch", "lora_rank", "dsir_buckets", "max_length"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more")
    for name in ("keep_fraction", "warmup_fraction"):
        if not 0 < getattr(args, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must lie in (0, 1]")
    if not 0 < args.lr < math.inf or args.project < 0:
        raise UserError("--lr must be a finite number above 0, --project 0 or more")
    if not args.toy:
        for name, needed in (("lower", METHODS), ("upper", NEEDS_UPPER), ("model", NEEDS_MODEL)):
            if getattr(args, name) is None and args.method in needed:
                raise UserError(f"--{name} is missing; {args.method} needs it (none of --lower, "
                                "--upper and --model: the embedded toy)")
    if args.upper_loss == "dpo" and args.toy_upper == "unrelated":
        raise UserError("--toy-upper unrelated: has no preference pairs; leave out --upper-loss "
                        "dpo")
    check_out(args)
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    return args


def check_out(args):
    """`UserError` when --out is a folder or one of the files that are read."""
    out = Path(args.out)
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder; give the name of a file")
    for name in ("lower", "upper", "upper_heldout", "lower_heldout"):
        source, split = getattr(args, name), getattr(args, f"{name.split('_')[0]}_split")
        if not source or not Path(source).exists() or not out.exists():
            continue
        if any(out.samefile(part) for part in data.find_parts(source, split)
               if isinstance(part, Path)):
            raise UserError(f"--out {out}: holds the rows of --{name.replace('_', '-')}, which the "
                            "ranking would replace; give the name of another file")


def load_levels(args):
    """The rows as training reads them, and the tokenizer."""
    context = 2**31
    if args.model is None and not args.toy:  # no model is named, so no row is too long for it
        args.model, args.max_length, args.max_prompt = str(toy.MODEL), 2**30, 2**30
    else:
        args.model = args.model or str(toy.MODEL)
        config = loading.load_config(args.model).get_text_config()
        context = getattr(config, "max_position_embeddings", None) or context
    tokenizer = loading.load_tokenizer(args.model)
    return common.load_levels(args, tokenizer, context), tokenizer


def score_rows(args, levels, tokenizer):
    """Scores of the lower rows, (N,), higher is better, and further columns of the output."""
    lower = levels.lower
    if args.method == "random":
        return data.permutation(len(lower), args.seed, 0, stream=3).double(), {}
    if args.method == "length":
        return length_scores(lower), {}
    if args.method == "dsir":
        weights, words = dsir_log_weights(
            row_texts(lower), row_texts(levels.upper), len(lower), args.dsir_buckets,
            folder=Path(args.out).parent)
        long_enough = words >= args.dsir_min_words
        if (wanted := round(args.keep_fraction * len(lower))) > long_enough.sum():
            raise UserError(f"only {long_enough.sum()} of {len(lower)} lower rows have "
                            f"--dsir-min-words {args.dsir_min_words} words, fewer than the "
                            f"{wanted} that --keep-fraction {args.keep_fraction} asks for")
        scores = weights if args.dsir_no_noise else weights + gumbel(len(lower), args.seed)
        scores = np.where(long_enough, scores, scores - 1e9)
        return torch.from_numpy(scores), {"log_weight": weights}
    if args.method == "less":
        return less(args, levels), {}
    model = loading.load_model(args.model, utils.pick_device(args.device), args.dtype,
                               args.four_bit)
    if args.method == "loss":
        return -row_losses(model, lower, label="loss")[0].double(), {}
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ratios = ifd(model, lower, start).double()
    return ifd_scores(ratios, args.ifd_order), {"ifd": ratios}


def main(argv=None):
    args = parse_args(argv)
    started = time.perf_counter()
    levels, tokenizer = load_levels(args)
    lower = levels.lower
    if not round(args.keep_fraction * len(lower)):
        raise UserError(f"--keep-fraction {args.keep_fraction} of {len(lower)} rows keeps none")
    print(f"{args.method}: {len(lower)} lower rows" + (
        f", {len(levels.upper)} upper rows" if args.method in NEEDS_UPPER else ""), flush=True)
    scores, extra = score_rows(args, levels, tokenizer)
    if not torch.isfinite(scores).all():
        bad = lower[int((~torch.isfinite(scores)).nonzero()[0])]["row_id"]
        raise UserError(f"the {args.method} score of row_id {bad} is not finite; is the model "
                        "sound in this --dtype?")
    _, kept = common.write_ranking(args.out, lower, scores, args.keep_fraction,
                                   {"score": scores, **extra})
    labels = common.label_metrics(lower, {args.method: scores})
    if labels:
        common.print_label_table(labels, {args.method: scores})
    print("RESULT " + json.dumps({
        "method": args.method, "seed": args.seed, "rows": len(lower), "kept": int(kept.sum()),
        "out": str(args.out), **labels, "time/seconds": round(time.perf_counter() - started, 2)}),
        flush=True)


if __name__ == "__main__":
    utils.run(main)
