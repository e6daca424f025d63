"""Which rows a step reads: every row once an epoch, two levels apart, however cut."""

import math
import random

import pytest
import torch

import batches

SIZES = [(1, 1), (5, 2), (6, 3), (7, 10), (10, 4), (13, 1)]


# --- order ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("num_rows", "batch"), SIZES)
def test_an_epoch_reads_every_row_once(num_rows, batch):
    for epoch in range(3):
        parts = [batches.epoch_batch(num_rows, batch, 7, epoch, k)
                 for k in range(math.ceil(num_rows / batch))]
        assert [len(part) for part in parts[:-1]] == [batch] * (len(parts) - 1)
        assert len(parts[-1]) == num_rows - batch * (len(parts) - 1) > 0
        assert sorted(torch.cat(parts).tolist()) == list(range(num_rows))
        assert torch.cat(parts).equal(batches.permutation(num_rows, 7, epoch, stream=0))


def test_epochs_seeds_and_levels_have_orders_of_their_own():
    """Of 40 rows two permutations are equal once in 10^47."""
    orders = [batches.permutation(40, seed, epoch, stream).tolist()
              for seed in range(3) for epoch in range(3) for stream in range(2)]
    assert len({tuple(order) for order in orders}) == 18
    assert orders[0] == batches.permutation(40, 0, 0, 0).tolist()


def test_upper_and_lower_do_not_share_a_permutation():
    """With equally many rows a shared one would pair the same rows for ever."""
    for epoch in range(4):
        lower = batches.epoch_batch(40, 40, 3, epoch, 0)
        upper = batches.cycle(40, 40 * epoch, 40, 3)
        assert sorted(lower.tolist()) == sorted(upper.tolist()) == list(range(40))
        assert lower.tolist() != upper.tolist()
        assert upper.tolist() == batches.permutation(40, 3, epoch, stream=1).tolist()
        assert (lower == upper).sum() < 10  # one by chance, on average


@pytest.mark.parametrize(("num_rows", "batch"), SIZES)
def test_a_cycle_is_one_endless_row_of_permutations(num_rows, batch):
    whole = batches.cycle(num_rows, 0, 5 * num_rows + 3, 11).tolist()
    assert len(whole) == 5 * num_rows + 3
    for turn in range(5):
        assert sorted(whole[turn * num_rows:(turn + 1) * num_rows]) == list(range(num_rows))
    for start in range(0, len(whole) - batch + 1):
        assert batches.cycle(num_rows, start, batch, 11).tolist() == whole[start:start + batch]


@pytest.mark.parametrize(("num_rows", "batch"), SIZES)
def test_the_coming_rows_are_those_that_the_steps_read(num_rows, batch):
    per_epoch = math.ceil(num_rows / batch)
    for step, last in ((0, 1), (0, per_epoch), (1, 1), (per_epoch - 1, per_epoch + 1),
                       (per_epoch, 3 * per_epoch)):
        read = {int(p) for s in range(step, last)
                for p in batches.epoch_batch(num_rows, batch, 5, s // per_epoch, s % per_epoch)}
        assert batches.coming_rows(num_rows, batch, 5, step, last) == sorted(read)


# --- micro batches --------------------------------------------------------------------------------

def level(prefix, counts):
    """The sequences of rows, each a name: a pair has two, a question G, a dropped one none."""
    return [[f"{prefix}{row}.{s}" for s in range(count)] for row, count in enumerate(counts)]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 30])
def test_every_sequence_of_a_step_is_read_once(monkeypatch, processes, micro_batch):
    """By one process, in one forward, behind the places of its rows; upper before lower."""
    monkeypatch.setattr(batches, "world_size", lambda: processes)
    rng = random.Random(micro_batch)
    for _ in range(20):
        upper = level("u", [2] * rng.randint(0, 7))
        lower = level("l", [rng.choice((0, 1, 3)) for _ in range(rng.randint(1, 9))])
        seen = {"u": [], "l": [], "sequences": []}
        for number in range(processes):
            monkeypatch.setattr(batches, "rank", lambda number=number: number)
            for up, low, found in batches.micro_batches(upper, lower, micro_batch):
                assert len(up) <= micro_batch and len(low) <= micro_batch and found
                assert found == [s for rows, mine in ((upper, up), (lower, low))
                                 for i in mine for s in rows[i]]
                assert all(i % processes == number for i in up + low)
                seen["u"] += up
                seen["l"] += low
                seen["sequences"] += found
        assert sorted(seen["u"]) == list(range(len(upper)))
        assert {i for i, rows in enumerate(lower) if rows} <= set(seen["l"])
        assert len(seen["l"]) == len(set(seen["l"]))
        assert sorted(seen["sequences"]) == sorted(s for rows in upper + lower for s in rows)


def test_a_step_without_any_sequence_has_no_forward():
    assert list(batches.micro_batches([], level("l", [0, 0, 0]), 2)) == []


# --- packing --------------------------------------------------------------------------------------


def test_groups_hold_every_row_in_order(monkeypatch):
    monkeypatch.setattr(batches, "TOKENS_AT_ONCE", 10)
    rows = [{"input_ids": [n] * length} for n, length in enumerate((4, 6, 1, 12, 3, 3, 4, 1))]
    groups = list(batches.token_groups(rows, range(len(rows))))
    assert [row["input_ids"][0] for group in groups for row in group] == list(range(8))
    lengths = [[len(row["input_ids"]) for row in group] for group in groups]
    assert lengths == [[4, 6], [1], [12], [3, 3, 4], [1]]
    assert not list(batches.token_groups(rows, []))
