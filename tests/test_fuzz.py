"""Malformed inputs by the hundred: one `error:` line and exit code 2, or a run that is none the
worse; and changes behind a run's back: noticed, or without any effect."""

import argparse
import csv
import io
import json
import random
from pathlib import Path

import pytest
import torch
from conftest import caller, copy_tree, flags, listing, make_rows, read_rows, write_rows
from safetensors.torch import load_file, save_file

import train_offline
import train_online
from runtime.command import run as run_command

NUMBERS = ("-1", "0", "-0.5", "nan", "inf", "-inf", "1e400", "1e30", "x", "", " ", "1e-400", "0x10",
           "99999999999999999999", "1,5", "\u0661", "1_000")
VALUES = (None, True, -1, 10**30, 1.5, "", " ", "\u0000", "\ud800", [], {}, [[]], ["a"], {"a": {}},
          "x" * 100_000, [{"role": "user"}], [{"role": 3, "content": "a"}], "\x1b[2J")


def attempt(main, words, capfd):
    """(exit code, error line) of a command in this process; a traceback fails the test."""
    capfd.readouterr()
    try:
        run_command(lambda: main(words))
        code = 0
    except SystemExit as stop:
        code = stop.code
    stderr = capfd.readouterr().err
    lines = [line for line in stderr.replace("\r", "\n").splitlines() if "error: " in line]
    assert code in (0, 2), (words, stderr)
    assert "Traceback" not in stderr, (words, stderr)
    assert len(lines) == (code == 2), (words, stderr)
    return code, lines[0] if lines else None


def damaged_rows(rng, rows):
    """Bytes of a jsonl file with one thing wrong, often."""
    rows = [dict(row) for row in rows]
    way = rng.randrange(9)
    row = rng.choice(rows)
    if way == 0:
        row[rng.choice(list(row))] = rng.choice(VALUES)
    elif way == 1:
        del row[rng.choice(list(row))]
    elif way == 2:
        rows[rng.randrange(len(rows))] = rng.choice(VALUES)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    place = rng.randrange(len(text))
    if way == 3:
        text = text[:place]
    elif way == 4:
        text = text[:place] + bytes([rng.randrange(256)]) + text[place + 1:]
    elif way == 5:
        wrong = rng.choice((b"\0", b"\xff\xfe", b"{", b"]", b'"', b"\n\n"))
        text = text[:place] + wrong + text[place:]
    elif way == 6:
        text = rng.choice((b"", b"\n", b"[]", b"null", b"{}", b"[" * 5000, b"\x1f\x8b", b"PK\3\4"))
    elif way == 7:
        text = text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    elif way == 8:
        text = text.replace(b'"prompt"', b'"prompt": "twice", "prompt"', 1)
    return text


def damaged_csv(rng, rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    text = out.getvalue().encode()
    place = rng.randrange(len(text))
    return rng.choice((text[:place], text[:place] + b'"' + text[place:], text.replace(b",", b";"),
                       text[:place] + bytes([rng.randrange(256)]) + text[place + 1:],
                       b"prompt,prompt\na,b\n", b"prompt\n", text + b"a,b,c,d\n"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_damaged_sources(seed, files, folders, tmp_path, capfd):
    """60 files a seed, as noisy or trusted rows: refused in one line, or the rest is planned."""
    rng, paths, codes = random.Random(seed), files(lower=8, upper=12), []
    for number in range(60):
        level = rng.choice(("lower", "upper", "upper_heldout"))
        kind = rng.choice(("jsonl", "jsonl", "jsonl", "json", "csv"))
        file = tmp_path / f"{number}.{kind}"
        rows = make_rows(6, seed=100 + number)
        file.write_bytes(damaged_csv(rng, rows) if kind == "csv" else damaged_rows(rng, rows))
        options = {"lower": paths["lower"], "upper": paths["upper"]} | {level: file}
        before = listing(tmp_path / "cache") if (tmp_path / "cache").exists() else []
        code, line = attempt(train_offline.main, flags(
            **options, model=folders["llama"], out=tmp_path / "run", dry_run=True,
            cache_dir=tmp_path / "cache"), capfd)
        codes.append(code)
        assert not (tmp_path / "run").exists()
        left = set(listing(tmp_path / "cache")) - set(before)
        assert not [name for name in left if "partial" in name]
        if code == 2:
            assert len(line) < 1000 and "\x1b" not in line
    print(f"\nseed {seed}: {codes.count(2)} of {len(codes)} refused")
    assert 15 < codes.count(2) < 60


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_offline, train_online])
def test_values_of_every_flag(script, files, folders, tmp_path, capfd, monkeypatch):
    """Every flag with a number, every number that is none or too large: one line, or a plan."""
    made, parse_args = [], argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args",
                        lambda self, *words: made.append(self) or parse_args(self, *words))
    script.parse_args([])
    monkeypatch.undo()
    paths, codes = files(lower=8, upper=12), []
    common = flags(lower=paths["lower"], upper=paths["upper"], model=folders["llama"],
                   out=tmp_path / "run", dry_run=True, cache_dir=tmp_path / "cache",
                   max_length=64) + (["--max-new-tokens", "6", "--ratio-masked", "0.5"]
                                     if script is train_online else [])
    for action in made[0]._actions:
        for value in NUMBERS if action.type in (int, float) else ():
            codes.append(attempt(script.main, [*common, f"{action.option_strings[0]}={value}"],
                                 capfd)[0])
    assert not (tmp_path / "run").exists()
    print(f"\n{script.__name__}: {codes.count(2)} of {len(codes)} refused")
    assert len(codes) > 250 and codes.count(2) > len(codes) / 2


def flip(path, rng):
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_changes_behind_a_runs_back(seed, files, folders, tmp_path, capfd):
    """A bit of the token cache, of a base weight, of a row or of a checkpoint: a resumed run ends
    as the uninterrupted one did, or says in one line why it does not."""
    rng, paths, told = random.Random(seed), files(lower=10, upper=12), 0
    whole = copy_tree(folders["llama"], tmp_path / "model")
    train = caller(train_offline.main, tmp_path, capfd, {"llama": whole}, batch=5, epochs=2,
                   save_every=1, lr=1e-2, omega_lr=2.0)
    train(paths, out="whole")
    expected = [(tmp_path / "whole" / name).read_bytes() for name in (
        "weights.jsonl", "adapter/adapter_model.safetensors")]
    for number in range(20):
        out, model = tmp_path / f"run{number}", copy_tree(whole, tmp_path / f"model{number}")
        for path in model.iterdir():
            (whole / path.name).write_bytes(path.read_bytes())
        cache = copy_tree(tmp_path / "cache", tmp_path / f"cache{number}")
        run = copy_tree(tmp_path / "whole", out)
        config = run / "config.json"
        config.write_text(config.read_text().replace(str(tmp_path / "whole"), str(out)))
        for name in ("result.json", "weights.jsonl"):
            (run / name).unlink()
        lower = tmp_path / f"lower{number}.jsonl"
        lower.write_bytes(Path(paths["lower"]).read_bytes())
        what = ("cache", "weight", "row", "checkpoint")[number % 4]
        if what == "cache":
            flip(rng.choice(sorted(cache.rglob("rows.arrow"))), rng)
        elif what == "weight":
            tensors = load_file(whole / "model.safetensors")
            name = rng.choice(sorted(tensors))
            bits = tensors[name].view(torch.int32).flatten()
            bits[rng.randrange(len(bits))] ^= 1 << rng.randrange(23)
            save_file(tensors, whole / "model.safetensors", {"format": "pt"})
        elif what == "row":
            rows = read_rows(paths["lower"])
            rng.choice(rows)["response"] += " stone"
            write_rows(paths["lower"], rows)
        else:
            flip(rng.choice(sorted((run / "checkpoints").rglob("*.*"))), rng)
        words = flags(lower=paths["lower"], upper=paths["upper"], upper_heldout=paths["heldout"],
                      model=whole, out=out, cache_dir=cache, correction=0, batch=5, epochs=2,
                      save_every=1, lr=1e-2, omega_lr=2.0, resume=True)
        code, line = attempt(train_offline.main, words, capfd)
        told += code == 2
        if code == 0:
            assert [(out / name).read_bytes() for name in (
                "weights.jsonl", "adapter/adapter_model.safetensors")] == expected, what
        assert code == 2 or what in ("cache", "checkpoint"), (what, line)
        Path(paths["lower"]).write_bytes(lower.read_bytes())
        for path in model.iterdir():
            (whole / path.name).write_bytes(path.read_bytes())
    print(f"\nseed {seed}: {told} of 20 changes refused, the others without effect")
