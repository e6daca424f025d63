"""DSIR (Xie et al. 2023): rows whose n-grams are likelier among the upper rows than the lower ones.

    log w = sum over hashed n-grams of log p_upper - log p_lower,  then Gumbel top-k

A row contributes its prompt, a newline and its response, no template. The log weights are those of
the authors' package (data-selection 1.0.3). Deviations:

 1. No short row is dropped; the package drops rows under 100 words, which is most of an instruction
    set (`--dsir-min-words`).
 2. The noise is seeded.
"""

import hashlib
import re
import tempfile

import numpy as np
import torch
from tqdm import tqdm

from utils import UserError

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


def dsir_scores(lower, upper, *, num_buckets, min_words, num_kept, noise, seed, folder):
    """(scores (N,), log weights (N,)), float64 both, of the lower rows.

    scores: log weights plus Gumbel noise, or without it (`noise`); rows under `min_words` words
    come last. folder: of the temporary file.
    """
    weights, words = dsir_log_weights(row_texts(lower), row_texts(upper), len(lower), num_buckets,
                                      folder=folder)
    long_enough = words >= min_words
    if num_kept > long_enough.sum():
        raise UserError(f"only {long_enough.sum()} of {len(lower)} lower rows have "
                        f"--dsir-min-words {min_words} words, fewer than the {num_kept} that "
                        "--keep-fraction asks for")
    scores = weights + gumbel(len(lower), seed) if noise else weights
    return torch.from_numpy(np.where(long_enough, scores, scores - 1e9)), weights
