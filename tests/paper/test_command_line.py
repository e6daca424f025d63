"""The command line of `python -m paper`: what it refuses, and the command that it stores."""

import shlex

from paper.__main__ import main, parse_args


def test_bad_input(here, refused):
    for words, what in (
            (["table3", "--scale", "small"], "name the rows"),
            (["qa"], "list puzzles only"),
            (["winrate", "--scale", "small"], "--judge"),
            (["table1", "--only", "BDS; nonsense"], "has the name 'nonsense'"),
            (["demo", "--only", "BDS"], "nothing to choose from"),
            (["table1", "--seeds", "0"], "--seeds must be 1 or more"),
            (["table1", "--judge", "--local m"], "--judge: table1 does not read it; winrate would"),
            (["noise", "--seeds", "2"], "--seeds: noise does not read it; "),
            (["pairs", "--seeds", "3"], "--seeds: pairs does not read it; "),
            (["small", "--online", "--k-gen 3"], "--online: small does not read it; "),
            (["refine", "--select", "--epochs 1"], "--select: refine does not read it; "),
            (["readme", "--list"], "--list: readme does not read it"),
            (["demo", "--keep-fraction", "0.5"], "--keep-fraction: demo does not read it"),
            (["curated", "--keep-fraction", "1"], "must lie between 0 and 1"),
            (["ablations", "--only", "nonsense"], "nonsense"),
            (["demo", "--data", "--model m"], "demo: it is of the toy"),
            (["winrate", "--judge", "--local m"], "--judge need --scale small or paper"),
            (["examples", "--scale", "small", "--data", "--model m"], "name --prompts FILE"),
            (["refine", "--scale", "small", "--data", "--model m --lower l --upper u "
              "--upper-heldout h --lower-columns a=b"], "does not read --lower-columns here"),
            (["controls", "--scale", "small"], "of the toy only"),
            (["ablations", "--scale", "small"], "of the toy only")):
        assert what in refused(lambda words=words: main(words))
    assert not (here / "runs").exists()


def test_the_stored_command_gives_the_same_arguments_again():
    words = ["winrate", "--scale", "small", "--data", "--model 'my model' --lower x", "--name",
             "mine", "--prompts", "my prompts.json", "--tokens", "16", "--only", "BDS"]
    args = parse_args(words)
    python, flag, module, *again = shlex.split(args.command)
    assert (python, flag, module) == ("python", "-m", "paper")
    assert parse_args(again) == args
    assert parse_args(["demo"]).command == (
        "python -m paper demo --scale toy --seeds 1 --name demo")


def test_listing_is_no_part_of_the_command_that_made_a_table():
    """--add compares that command with the stored one."""
    words = ["table1", "--only", "BDS", "--add"]
    assert parse_args([*words, "--list"]).command == parse_args(words).command
