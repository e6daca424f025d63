"""Commands that parse, on every scale; which of several flags wins; rows that the toy is given."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import read_rows
from planned_commands import parse_command

import eval as evaluation
import train_offline
import train_online
from paper import plans, reproduce
from paper.__main__ import main
from paper.running import slug
from toy import corpus

TARGETS = [(target, scale) for target in ("table1", "table3", "table3-dpo")
           for scale in ("toy", "paper")] + [
    ("table1", "small"), ("demo", "toy"), ("ranking", "toy"), ("selectors", "toy"),
    ("ablations", "toy"), ("controls", "toy")]


@pytest.mark.parametrize(("target", "scale"), TARGETS)
def test_every_planned_command_parses(target, scale, here, capsys):
    """Also those of the paper's scale, which no test can run."""
    main([target, "--scale", scale, "--list", "--seeds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) > 2
    outs, written, read = [], set(), set()
    for line in lines:
        name, args = parse_command(line)
        assert args.seed == 0
        outs.append(str(args.out))
        if name == "toy":
            written.add(str(args.out))
        elif scale == "toy" and args.lower:  # every set of rows that is read is written first
            files = (args.lower, args.upper, args.upper_heldout, args.lower_heldout)
            assert [file.rpartition("/")[2] for file in files] == [
                "lower.jsonl", "upper.jsonl", "heldout.jsonl", "lower_heldout.jsonl"]
            read |= {file.rpartition("/")[0] for file in files}
    assert len(outs) == len(set(outs))  # no two runs share a folder
    assert written == read
    assert bool(written) == (scale == "toy" and target in ("table3", "table3-dpo", "ablations",
                                                           "controls"))


def test_a_methods_own_flags_win_over_the_scales(here, capsys):
    main(["ablations", "--list", "--seeds", "1", "--only", "K_gen (R = 40 %)"])
    words = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    assert sorted(train_online.parse_args(w).k_gen for w in words) == [5, 25, 75, 225]


@pytest.mark.parametrize(("target", "options"), [
    ("table3", {"noise": 0.2, "contrary_share": 1.0}),
    ("table3-dpo", {"noise": 0.2, "contrary_share": 1.0, "upper": "pairs"})])
def test_the_safety_tables_rows_are_written_before_they_are_read(target, options, here,
                                                                 monkeypatch):
    """As the toy draws them, a seed each; the preset's model and step sizes go with them."""
    plans_run = []
    monkeypatch.setattr(plans, "run_all", lambda commands, workers: plans_run.append(commands))
    monkeypatch.setattr(plans, "budget_of", lambda folder: 7)
    args = reproduce_args(target)
    plans.execute(args, {name: plans.METHODS[name] for name in ("BDS", "LESS")}, target)
    commands = [parse_command(f"python {command}") for plan in plans_run
                for command in plan.values()]
    assert [name for name, _ in commands] == [
        "train_offline", "train_offline", "baselines", "baselines", "train_offline",
        "train_offline", "train_offline", "train_offline"]
    for name, args in commands:
        rows = corpus.make_rows(seed=args.seed, **options)
        for level in ("lower", "upper", "upper_heldout", "lower_heldout"):
            assert read_rows(getattr(args, level)) == rows[level.replace("upper_h", "h")]
        assert args.upper_loss == ("dpo" if target == "table3-dpo" else "sft")
        assert (args.lr, args.max_length) == (1e-3, 128)
        assert args.lora_rank == (8 if name == "baselines" else 16)
    assert [args.token_budget for _, args in commands[-2:]] == [7, 7]


def reproduce_args(target):
    from paper.__main__ import parse_args

    return parse_args([target, "--seeds", "2"])


def test_data_given_takes_the_place_of_the_safety_tables_rows(here, capsys):
    main(["table3", "--list", "--seeds", "1", "--only", "BDS", "--data", "--max-length 64"])
    (line,) = capsys.readouterr().out.splitlines()
    _, args = parse_command(line)
    assert (args.max_length, args.lower, args.preset) == (64, None, None)


SPACES = ("--model m --lower 'my  rows.jsonl' --lower-limit=20 --lower-columns "
          "'prompt=a question,response=b' --upper up.jsonl")


def test_names_and_files_with_spaces_stay_one_word(here, capsys, monkeypatch):
    common = ["--name", "my runs", "--scale", "small", "--list", "--seeds", "1", "--data", SPACES]
    main(["table1", "--only", "LESS; BDS", *common])
    first, *lines = sorted(capsys.readouterr().out.splitlines())
    assert first.startswith("# TOKENS: ")
    for line in lines:
        _, args = parse_command(line)
        assert args.lower == "my  rows.jsonl" and args.lower_limit == 20
        assert args.lower_columns == "prompt=a question,response=b"
        assert args.out.startswith("runs/my runs/")
    monkeypatch.setattr(reproduce, "execute", lambda args, methods: {
        name: [Path("runs/my runs") / slug(name) / "seed-0" / "result.json"] for name in methods})
    main(["qa", "--only", "BDS", "--qa", "--local 'my questions'", *common])
    main(["examples", "--only", "BDS", "--prompts", "my prompts.json", *common])
    main(["winrate", "--only", "BDS", "--prompts", "my prompts.json", "--judge",
          "--local 'my judge'", *common])
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    by_name = [evaluation.parse_args(line[2:]) for line in words
               if line[1] == "eval.py" and line[2] != "winrate"]
    assert [args.command for args in by_name] == ["qa", "qa", "answers"]
    assert by_name[0].runs == "runs/my runs/bds/seed-0" and by_name[0].local == "my questions"
    assert by_name[2].prompts == "my prompts.json"
    behind = [line[1 + len(reproduce.WIN_RATE):] for line in words
              if line[1:1 + len(reproduce.WIN_RATE)] == reproduce.WIN_RATE]
    assert [line[1] for line in behind] == [
        "runs/my runs/bds/seed-0", "runs/my runs/bds/seed-0",
        "runs/my runs/bds/answers-seed-0.json"]
    assert "my judge" in words[-1]


def test_published_settings_of_the_paper_scale(here, capsys):
    """What it needs comes first: by hand, for Llama-3-8B in bfloat16 and the published hours."""
    main(["table1", "--scale", "paper", "--list", "--seeds", "2", "--only",
          "mixing rho=1; LESS; BDS; online dynamic"])
    needs, *lines = re.split(r"(?m)^python ", capsys.readouterr().out)
    base = 128256 * 4096 * 2 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
                                     + 2 * 4096) + 4096  # embeddings and head, layers, last norm
    adapter = 16 * 32 * (2 * 8192 + 2 * 5120 + 3 * (4096 + 14336))
    live = 2 * 8 * 2048 * (2 * 32 * 4096 + 2 * 4 * 14336 + 30 * 4096)  # inputs, one layer
    memory = (2 * base + 16 * adapter + live + 12 * 56000) / 2**30
    assert f"at most {memory:.0f} GiB" in needs and f"model ({2 * base / 1e9:.0f} GB)" in needs
    assert f"{2 * (10.53 + 28.75 + 11.75):.0f} hours on the paper's H100" in needs
    assert "those of online dynamic, which it does not give" in needs and "each of 8 runs" in needs
    lines = {line.split()[0]: f"python {line}" for line in lines if "/bds/seed-0" in line}
    args = train_offline.parse_args(shlex.split(lines["train_offline.py"])[2:])
    assert (args.lr, args.omega_lr, args.omega_optimizer, args.batch, args.epochs,
            args.lower_limit) == (5e-6, 1e-4, "adam", 32, 3, 56000)


def test_unclosed_quotes_are_named(here, refused):
    line = refused(lambda: main(["table1", "--only", "BDS", "--train", "--lr '5"]))
    assert "--lr '5" in line and "No closing quotation" in line
