"""data/cache.py and the one pass over the source: damage shows, content decides, no leftovers."""

import itertools
import json
import os
import random
import signal
import subprocess
import time

import pytest
from conftest import ROOT, make_rows, make_tokenizer, python, write_rows

from data import cache, sources, tokens
from utils import UserError, write_atomic


@pytest.fixture
def load(tmp_path):
    """load(rows or None for the file as it is, ...) -> (rows, report); all share one cache."""
    def call(rows=None, name="source.jsonl", **options):
        if rows is not None:
            write_rows(tmp_path / name, rows)
        return tokens.load_rows(tmp_path / name, make_tokenizer(), cache_dir=tmp_path / "cache",
                                **options)
    return call


@pytest.fixture
def builds(monkeypatch):
    """A list that grows by one whenever rows are tokenised."""
    made, build = [], tokens._build
    monkeypatch.setattr(tokens, "_build", lambda *a, **k: made.append(1) or build(*a, **k))
    return made


def overwrite(path, content, place):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(content)


# --- damage ---------------------------------------------------------------------------------------

def test_zeroed_pages_of_the_cached_rows_are_noticed(load, tmp_path, builds):
    """8 KB that a disk has lost: rows.arrow still opens and has as many rows as before."""
    rows, report = load(make_rows(500, 1))
    expected = rows.to_dict()
    arrow = tmp_path / "cache" / report["fingerprint"] / "rows.arrow"
    overwrite(arrow, bytes(8192), arrow.stat().st_size // 2)
    assert load()[0].to_dict() == expected and len(builds) == 2
    load()
    assert len(builds) == 2


def test_a_report_whose_numbers_have_changed_is_noticed(load, tmp_path, builds):
    _, report = load(make_rows(20, 1))
    path = tmp_path / "cache" / report["fingerprint"] / "report.json"
    path.write_text(path.read_text().replace('"rows_in_source": 20', '"rows_in_source": 21'))
    assert load()[1] == report and len(builds) == 2


def test_rows_that_cannot_be_read_back_are_an_error(load, monkeypatch):
    monkeypatch.setattr(cache, "open_rows", lambda folder: None)
    with pytest.raises(UserError, match="cannot be read back; check the disk"):
        load(make_rows(3, 1))


def test_files_reach_the_disk_before_the_folder_has_its_name(load, monkeypatch):
    """fsync of rows, report and folder, then the rename, then the folder of the name."""
    done, sync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(
        os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))) or sync(handle))
    monkeypatch.setattr(os, "rename", lambda a, b: done.append("rename") or rename(a, b))
    load(make_rows(3, 1))
    place = done.index("rename")
    assert "rows.arrow" in done[:place] and done[place + 1:] == ["cache"]
    assert any("report.json" in name for name in done[:place])
    assert any(name.startswith(".partial-") for name in done[:place])


# --- the key --------------------------------------------------------------------------------------

def test_what_a_faster_process_has_made_is_not_taken_away(load, tmp_path, monkeypatch):
    """It comes after the last look before the rename, and finds its rows there all the time."""
    look, rename, looks, made = cache.open_rows, os.rename, [], []

    def other():
        if not made:
            made.append(None)
            load(make_rows(6, seed=1))
            (folder,) = (path for path in (tmp_path / "cache").iterdir()
                         if path.is_dir() and not path.name.startswith("."))
            made[0] = folder, folder.stat().st_ino

    def looked(folder):
        found = look(folder)
        looks.append(folder)
        if len(looks) == 2:
            other()
        return found

    def late(source, target):
        other()
        rename(source, target)

    monkeypatch.setattr(cache, "open_rows", looked)
    monkeypatch.setattr(cache.os, "rename", late)
    rows, _ = load(make_rows(6, seed=1))
    ((folder, inode),) = made
    assert len(rows) == 6 and folder.stat().st_ino == inode


def test_the_key_is_the_content_and_not_the_name_or_the_time(load, tmp_path, builds):
    """Another answer of the same length, written back with the old time stamps, is another file."""
    first, _ = load([{"prompt": "a", "response": "yes"}])
    path = tmp_path / "source.jsonl"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    write_rows(path, [{"prompt": "a", "response": "not"}])
    os.utime(path, ns=times)
    second, _ = load()
    assert (first[0]["response"], second[0]["response"]) == ("yes", "not") and len(builds) == 2
    os.utime(path)  # touched, and a copy elsewhere: the same rows
    load()
    (tmp_path / "copy.jsonl").write_bytes(path.read_bytes())
    assert load(name="copy.jsonl")[1]["source"].endswith("copy.jsonl") and len(builds) == 2


def test_a_source_that_changes_while_it_is_read_is_refused(load, tmp_path, monkeypatch):
    read = sources._read_json

    def changing(path):
        for number, row in enumerate(read(path)):
            if number == 3:
                with open(path, "a") as file:
                    file.write(json.dumps({"prompt": "late", "response": "late"}) + "\n")
            yield row
    monkeypatch.setattr(sources, "_read_json", changing)
    with pytest.raises(UserError, match="has changed while it was read"):
        load(make_rows(5, 1))
    assert not list((tmp_path / "cache").iterdir())


def test_a_source_that_is_written_again_while_it_is_read(load, tmp_path, monkeypatch):
    """Two runs that start together write the toy's rows both: the same ones."""
    read = sources._read_json

    def replaced(path):
        for number, row in enumerate(read(path)):
            if number == 3:
                write_atomic(path, path.read_bytes())
            yield row
    monkeypatch.setattr(sources, "_read_json", replaced)
    assert len(load(make_rows(5, 1))[0]) == 5


# --- what killed runs leave -----------------------------------------------------------------------

SLOW = """
import sys, time
from data import tokens
from conftest import make_tokenizer
build = tokens._build
def slow(*args, **options):
    report = build(*args, **options)
    print("built", flush=True)
    time.sleep(60)
    return report
tokens._build = slow
tokens.load_rows(sys.argv[1], make_tokenizer(), cache_dir=sys.argv[2])
"""


def test_the_next_run_clears_what_a_killed_one_left_and_nothing_else(load, tmp_path):
    """A run killed in the middle leaves its half-made folder; one at work keeps its own."""
    write_rows(tmp_path / "other.jsonl", make_rows(5, 2))
    words, environment = python("-c", SLOW, tmp_path / "other.jsonl", tmp_path / "cache",
                                PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "built\n"

        def half_made():
            return [path.name for path in (tmp_path / "cache").glob(".partial-*")]
        before = half_made()
        assert len(before) == 1
        load(make_rows(5, 1))
        assert half_made() == before, "a live process keeps its folder"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert half_made() == before
        load(make_rows(6, 1))
        assert not half_made()


# --- one pass -------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, {"limit": 10}])
def test_the_source_is_parsed_once(load, monkeypatch, options):
    parsed, parse = [], sources.parse_json
    monkeypatch.setattr(sources, "parse_json", lambda *a: parsed.append(1) or parse(*a))
    assert load(make_rows(300, 1), **options)[1]["rows_in_source"] == 300
    assert len(parsed) == 300


def test_a_sample_is_uniform_and_depends_on_the_seed_alone(load):
    """Every row of 20 is among 5 as often as any other, within 5 standard deviations."""
    def drawn(seed):
        return [row_id for row_id, *_ in tokens._sample(
            ((str(n), n) for n in range(20)), 5, seed, {"rows_in_source": 0})]
    counts = dict.fromkeys(range(20), 0)
    for seed in range(2000):
        kept = drawn(seed)
        assert kept == sorted(set(kept)) and len(kept) == 5
        for number in kept:
            counts[number] += 1
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in counts.values())
    random.seed(1)
    first = drawn(7)
    random.seed(2)
    assert first == drawn(7)
    loaded, report = load(make_rows(40, 3), limit=6)
    assert (report["rows_in_source"], report["rows_kept"]) == (40, 6)
    assert all(row["prompt"].startswith(f"3-{row['row_id']} ") for row in loaded)


def test_columns_that_no_row_has_are_not_there(load):
    """Labels may start late, and outside the rows that are kept or drawn."""
    plain, _ = load(make_rows(30, 1))
    assert plain.column_names == ["row_id", "hash", "prompt_hash", "prompt", "response",
                                  "complete", "input_ids", "trained"]
    late = make_rows(30, 1)
    late[29] |= {"bad": True, "kind": "cut", "response": ""}
    found, report = load(late)
    assert report["dropped"] == {"empty_response": [29]}
    assert list(found["bad"]) == [False] * 29 and list(found["kind"]) == [""] * 29
    for seed in range(9):  # of the rows that are drawn
        drawn, report = load(limit=6, seed=seed)
        assert ("bad" in drawn.column_names) == ("empty_response" in report["dropped"])
    assert plain.to_dict().items() <= load(make_rows(30, 1))[0].to_dict().items()


@pytest.mark.slow
def test_start_up_of_a_hundred_thousand_rows(tmp_path, load):
    """Hashing and checking what is there already costs little beside tokenising it."""
    lines = [json.dumps(row) + "\n" for row in make_rows(1000, 1)]
    (tmp_path / "source.jsonl").write_text("".join(itertools.islice(itertools.cycle(lines), 10**5)))
    times = []
    for _ in range(2):
        start = time.process_time()
        load()
        times.append(time.process_time() - start)
    assert times[1] < 0.03 * times[0], times
