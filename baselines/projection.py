"""Random projections of vectors that are too long to keep: signs made where they are needed."""

import torch

SIGNS = 1.0 - 2.0 * (torch.arange(256)[:, None] >> torch.arange(8) & 1)  # a byte -> its eight signs
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
