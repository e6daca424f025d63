"""The command line of `python -m paper`: what it refuses, and the command that it stores."""

import shlex

import pytest

from paper.__main__ import main, parse_args


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("table3 --scale small", "name the rows"),
        ("table1 --data '--lower x'", "the toy has rows of its own"),
        ("table1 --only 'BDS; nonsense'", "has the name 'nonsense'"),
        ("table1 --seeds 0", "--seeds must be 1 or more"),
        ("qa", "list puzzles only"),
        ("winrate --scale small --prompts p.json", "--judge"),
        ("winrate --judge '--judge m'", "neither on the toy"),
        ("examples --scale small", "name --prompts FILE"),
        ("selectors --faults 0.3", "the toy has faults of its own"),
        ("selectors --scale small --faults 1", "above 0 and below 1"),
        ("curated --keep-fraction 1", "must lie between 0 and 1"),
    ],
)
def test_what_would_be_something_else_is_refused(words, what, here, refused):
    assert what in refused(lambda: main(shlex.split(words)))
    assert not (here / "runs").exists()


def test_the_stored_command_gives_the_same_arguments_again():
    words = ["winrate", "--scale", "small", "--data", "--model 'my model' --lower x"]
    args = parse_args([*words, "--name", "mine", "--tokens", "16"])
    python, flag, module, *again = shlex.split(args.command)
    assert (python, flag, module) == ("python", "-m", "paper")
    assert parse_args(again) == args
    assert args.data == ["--model", "my model", "--lower", "x"]
