"""The README claims only what is there: its commands parse, its functions and tests exist."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

import reproduce

HERE = Path(__file__).parent.parent
README = (HERE / "README.md").read_text()


def commands():
    """Every `python SCRIPT.py ...` line of the README's blocks, tables and text, and torchrun's."""
    text = README.replace("\\\n", " ")
    found = re.findall(r"python ([a-z_]+\.py[^`\n#]*)", text)
    found += re.findall(r"torchrun [^`\n]*?([a-z_]+\.py[^`\n#]*)", text)
    return sorted({" ".join(command.split()) for command in found})


def help_of(script, capsys, monkeypatch, *words):
    """The --help text of a script or its subcommand; None when the words are no subcommand."""
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(sys, "argv", [script, *words, "--help"])
    with pytest.raises(SystemExit) as stop:
        module.main([*words, "--help"])
    captured = capsys.readouterr()
    return captured.out if stop.value.code == 0 else None


@pytest.mark.parametrize("command", commands())
def test_commands_have_only_flags_that_exist(command, capsys, monkeypatch):
    script, *words = shlex.split(command.replace("...", " ").replace("[", " ").replace("]", " "))
    assert (HERE / script).is_file()
    flags = {word.split("=")[0] for word in words if word.startswith("--") and " " not in word}
    if script == "toy.py":
        assert flags <= {"--out", "--seed", "--steps"}
        return
    text = help_of(script, capsys, monkeypatch)
    if script in ("eval.py", "winrate.py", "bench.py"):
        text = help_of(script, capsys, monkeypatch, words[0])
        assert text is not None, f"{script} has no command {words[0]}"
    missing = {flag for flag in flags if not re.search(re.escape(flag) + r"\b", text)}
    assert not missing


def test_the_map_names_functions_and_tests_that_exist():
    tests = "\n".join(path.read_text() for path in (HERE / "tests").glob("test_*.py"))
    section = README.split("## From equation to code")[1].split("\n## ")[0]
    names = re.findall(r"`([^`]+)`", section)
    assert sum(name.startswith("test_") for name in names) > 12
    for name in names:
        if name.startswith("test_"):
            assert f"def {name}(" in tests, name
        elif match := re.fullmatch(r"([a-z_]+)\.([A-Za-z_.]+)", name):
            if match[2] == "py":
                assert (HERE / name).is_file(), name
                continue
            value = importlib.import_module(match[1])
            for part in match[2].split("."):
                value = getattr(value, part)


def test_figures_are_the_stored_ones(monkeypatch):
    monkeypatch.chdir(HERE)
    assert README.count("<!-- begin ") > 10
    assert reproduce.filled(README) == README  # else: python reproduce.py readme
    assert README.count("| Table 1 | BDS is better than mixing at rho = 1 | holds (") == 1


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (HERE / target).exists(), target


def test_nothing_is_left_to_fill_in():
    assert not re.findall(r"<[A-Z_]{3,}>", README)
