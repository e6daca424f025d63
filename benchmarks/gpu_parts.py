"""What `python -m benchmarks gpu` measures, part by part; gpu.py runs them.

Models are built from configurations with random weights: nothing is downloaded. A part that lacks a
package, or the result of another part, fails; the next call tries it again.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import logprob, table2
from benchmarks.gpu_results import known_of, part_file
from benchmarks.shapes import load_shape, work_of
from benchmarks.step import Steps, compare_steps, step_table
from utils import UserError

GROUPS = (1, 5)  # G of the online steps


@dataclass(frozen=True)
class Part:
    """A measurement in a process of its own.

    limit: seconds. measure: a function without arguments that returns what json can hold.
    table: (header, rows) of that.
    """

    name: str
    limit: int
    measure: Callable
    table: Callable


@dataclass(frozen=True)
class Sizes:
    """What is measured: log-probs at (T, d, V), shapes of models, rounds of each."""

    heads: tuple
    shapes: tuple
    head_rounds: int
    step_rounds: int


FULL = Sizes(
    heads=(logprob.CUDA_SIZES, (4096, 4096, 128256), (4096, 2048, 50304)),
    shapes=("llama3-8b", "pythia-1b"),
    head_rounds=9,
    step_rounds=3,
)
TINY = Sizes(
    heads=((33, 16, 1003), (16, 16, 300)),
    shapes=("tiny",),
    head_rounds=1,
    step_rounds=1,
)


# --- measured -------------------------------------------------------------------------------------


def run_heads(sizes, rounds, peers=False):
    if peers and not logprob.usable(logprob.PEERS):
        raise UserError("none of the other libraries is installed")
    return logprob.compare_heads(sizes, rounds, peers)


def run_steps(shape, rounds, checkpointing):
    work = work_of(shape)
    model, lower, upper = load_shape(shape, work.batch * rounds, checkpointing)
    return compare_steps(Steps(model, lower, upper, work.batch, work.micro_batch), GROUPS)


def time_answers(shape):
    work = work_of(shape)
    model, rows, _ = load_shape(shape, work.answers)
    return table2.answer_speed(model, rows, work)


def run_hours(folder, shape):
    """The runtime table, from the results of other parts: nothing is measured here."""

    def stored(name):
        content = known_of(part_file(folder, name))
        if "result" not in content:
            raise UserError(f"{name} is not measured yet")
        return content["result"]

    speed = stored(answers_name(shape))
    hours = table2.hours_of(shape, stored(steps_name(shape)), speed["seconds_per_answer"])
    return table2.beside_published({shape: hours})


# --- the parts ------------------------------------------------------------------------------------


def heads_name(sizes):
    length, width, vocabulary = sizes
    return f"log-probs, T {length}, d {width}, V {vocabulary}"


def steps_name(shape):
    return f"steps, {shape}"


def answers_name(shape):
    return f"answers, {shape}"


def answers_table(result):
    speed = f"{result['tokens_per_second']:.0f}"
    row = [result["answers"], speed, result["seconds_per_answer"]]
    return ["answers", "tokens/s", "seconds an answer"], [row]


def parts_of(sizes, folder):
    """The parts in the order of their value. folder: of the results."""
    call = functools.partial

    def heads(size, peers=False):
        name = heads_name(size)
        if peers:
            name += ", with other libraries"
        measure = call(run_heads, size, sizes.head_rounds, peers)
        return Part(name, 120, measure, logprob.head_table)

    def steps(name, *arguments):
        measure = call(run_steps, *arguments)
        return Part(name, 300, measure, step_table)

    shapes, rounds = sizes.shapes, sizes.step_rounds
    planned = [heads(sizes.heads[0])]
    for shape in shapes:
        planned.append(steps(steps_name(shape), shape, rounds, False))
    for shape in shapes:
        measure = call(time_answers, shape)
        planned.append(Part(answers_name(shape), 240, measure, answers_table))
    for shape in shapes:
        measure = call(run_hours, folder, shape)
        planned.append(Part(f"table2, {shape}", 20, measure, table2.hours_table))
    for shape in shapes:
        name = f"{steps_name(shape)}, gradient checkpointing"
        planned.append(steps(name, shape, rounds, True))
    planned += [heads(size) for size in sizes.heads[1:]]
    planned += [heads(size, peers=True) for size in sizes.heads]
    return planned
