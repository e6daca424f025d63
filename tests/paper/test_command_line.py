"""The command line of `python -m paper`: what it refuses, and the command that it stores."""

import shlex

import pytest

from paper.__main__ import TARGETS, main, parse_args


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


@pytest.mark.parametrize("words", ["table1 --judge x", "demo --seeds 2", "readme --list"])
def test_flags_that_a_target_does_not_read_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(words.split())
    assert stop.value.code == 2


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_explains_itself(target, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args([target, "--help"])
    assert stop.value.code == 0
    assert f"python -m paper {target}" in capsys.readouterr().out


def test_the_stored_command_gives_the_same_arguments_again():
    words = ["winrate", "--scale", "small", "--data", "--model 'my model' --lower x"]
    args = parse_args([*words, "--name", "mine", "--tokens", "16"])
    python, flag, module, *again = shlex.split(args.command)
    assert (python, flag, module) == ("python", "-m", "paper")
    assert parse_args(again) == args
    assert args.data == ["--model", "my model", "--lower", "x"]
