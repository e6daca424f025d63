"""Judging flagged rows by hand: exact intervals, scripted verdicts, the page."""

import csv
import decimal
import io
import json
import math
from pathlib import Path

import pytest
from conftest import read_rows, write_rows
from fabricated import HOSTILE

import eval as front
from accept import upper_bound
from evaluation import audit
from utils import content_hash


@pytest.mark.parametrize("count, total, low, high", [
    (0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (1, 30, 0.0008, 0.1722)])
def test_intervals_are_those_of_the_tables(count, total, low, high):
    assert audit.clopper_pearson(count, total) == pytest.approx((low, high), abs=1e-4)


def test_eq_upper_bound():
    """0 of n in closed form; 2 of 50: its table value; the binomial tail is 5 % there."""
    for n in (10, 59, 100, 400):
        assert upper_bound(0, n) == pytest.approx(1 - 0.05 ** (1 / n), abs=1e-12)
    assert upper_bound(2, 50) == pytest.approx(0.1206, abs=1e-4)
    assert upper_bound(1, 2) == pytest.approx(math.sqrt(0.95), abs=1e-12)
    assert upper_bound(7, 7) == upper_bound(0, 0) == 1.0


def test_eq_upper_bound_of_many_rows():
    """Its binomial tail is 5 %, with numbers of 60 digits; as floats the factors overflow."""
    with decimal.localcontext(prec=60):
        p = decimal.Decimal(upper_bound(515, 1030))
        tail = sum(math.comb(1030, k) * p**k * (1 - p) ** (1030 - k) for k in range(516))
    assert float(tail) == pytest.approx(0.05, abs=1e-9)


def test_intervals_cover():
    """Over all outcomes, the interval holds the true share with at least 95 % probability."""
    for p in (0.03, 0.2, 0.5, 0.77):
        covered = sum(math.comb(25, k) * p**k * (1 - p) ** (25 - k) for k in range(26)
                      if audit.clopper_pearson(k, 25)[0] <= p <= audit.clopper_pearson(k, 25)[1])
        assert covered >= 0.95
    assert audit.clopper_pearson(0, 0) == (0.0, 1.0)


def test_both_ends_of_a_long_text_are_shown(tmp_path):
    """On the page too, and line ends of Windows are no broken signs."""
    text = "THE START\r\n" + "x" * 3000 + "THE END"
    assert audit.both_ends("y" * audit.SHOWN) == "y" * audit.SHOWN
    audit.write_page(tmp_path / "page.html", [{"row_id": 3}], {3: ("q", text)})
    page = (tmp_path / "page.html").read_text()
    left_out = len(text) - audit.SHOWN
    assert "THE START" in page and "THE END" in page and "\ufffd" not in page
    assert f"[... {left_out:,} characters left out ...]" in page
    assert len(audit.both_ends(text)) < audit.SHOWN + 50


@pytest.fixture
def files(tmp_path):
    """A data set of 50 rows whose last 10 are flagged, and its ranking."""
    rows = write_rows(tmp_path / "rows.jsonl", [
        {"prompt": f"question {n}", "response": HOSTILE if n == 45 else f"answer {n}"}
        for n in range(50)])
    ranking = write_rows(tmp_path / "ranking.jsonl", [
        {"row_id": n, "hash": content_hash(row["prompt"], row["response"]), "rank": n + 1,
         "kept": n < 30, "reason": "end" if n >= 40 else None}
        for n, row in enumerate(read_rows(rows))])
    return ranking, rows


def audited(files, capsys, *words):
    ranking, rows = files
    front.main(["audit", str(ranking), "--rows", str(rows), "--count", "8", *map(str, words)])
    text = capsys.readouterr().out
    return json.loads(text.splitlines()[-1].removeprefix("RESULT ")), text


def test_scripted_verdicts(files, capsys, monkeypatch, tmp_path):
    rows, flagged, total = audit.drawn_rows(files[0], 8, 0)
    assert (len(rows), flagged, total) == (16, 10, 50)
    order = [row["flagged"] for row in rows]
    assert sorted(order) not in (order, order[::-1])
    lines = []
    for number, row in enumerate(r for r in rows if True):
        lines.append("y" if row["flagged"] and number % 2 else "n")
    bad = sum(line == "y" for line in lines)
    lines[rows.index(next(row for row in rows if not row["flagged"]))] = "s"
    monkeypatch.setattr("sys.stdin", io.StringIO("what?\n" + "\n".join(lines) + "\n"))
    result, text = audited(files, capsys, "--out", tmp_path / "mine.jsonl")
    assert result["precision"]["bad"] == bad and result["precision"]["judged"] == 8
    assert result["missed"] == {"share": 0.0, "low": 0.0, "bad": 0, "judged": 7,
                                "high": pytest.approx(audit.clopper_pearson(0, 7)[1])}
    assert "flagged" not in text.split("precision:")[0] and "\x1b" not in text
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    again, _ = audited(files, capsys, "--verdicts", tmp_path / "mine.jsonl")
    assert again == result


def test_an_interrupted_judge_goes_on(files, capfd, monkeypatch, refused, tmp_path):
    ranking, rows = map(str, files)
    words = ["audit", ranking, "--rows", rows, "--count", "8", "--out", f"{tmp_path}/mine.jsonl"]
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 5))
    assert "no verdict for row 6 of 16" in refused(lambda: front.main(words))
    assert [row["verdict"] for row in read_rows(tmp_path / "mine.jsonl")] == ["y"] * 5
    assert "is not drawn" in refused(lambda: front.main([*words, "--seed", "1"]))
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n" * 11))
    front.main(words)
    text = capfd.readouterr().out
    assert "mine.jsonl: 5 of 16 rows are judged already\n\n--- 6 of 16 ---" in text
    assert "--- 5 of 16" not in text
    found = read_rows(tmp_path / "mine.jsonl")
    assert [row["row_id"] for row in found] == [
        row["row_id"] for row in audit.drawn_rows(ranking, 8, 0)[0]]
    assert [row["verdict"] for row in found] == ["y"] * 5 + ["n"] * 11


def test_the_page_holds_every_row_and_no_script(files, capsys, tmp_path):
    page = tmp_path / "audit.html"
    front.main(["audit", str(files[0]), "--rows", str(files[1]), "--page", str(page)])
    html = page.read_text()
    assert html.count("<section>") == 40 and "<script" not in html and "onerror=alert(2)>" not in (
        html.replace("&gt;", ""))
    assert "reason" not in html and "flagged" not in html


def test_kept_stands_in_for_a_reason_and_texts_may_be_in_the_ranking(tmp_path):
    path = write_rows(tmp_path / "curated.jsonl", [
        {"row_id": n, "hash": "h", "rank": n + 1, "kept": n < 4, "prompt": "p", "response": "r"}
        for n in range(6)])
    rows, flagged, _ = audit.drawn_rows(path, 30, 0)
    assert flagged == 2 and len(rows) == 6
    assert audit.texts_of(rows, None, Path(path))[5] == ("p", "r")
    # An online run's ranking has none, and its curated set beside it has.
    weights = write_rows(tmp_path / "weights.jsonl", [
        {"row_id": n, "hash": "h", "rank": n + 1, "kept": n < 4} for n in range(6)])
    assert audit.texts_of(rows, None, Path(weights))[5] == ("p", "r")


def test_any_source_that_was_ranked_is_read(files, refused, tmp_path):
    """Files of other kinds, with columns of other names; a folder."""
    table, frame = read_rows(files[1]), tmp_path / "parts" / "train.csv"
    frame.parent.mkdir()
    with open(frame, "w", newline="") as file:
        csv.writer(file).writerows(
            [["q", "id", "a"], *([row["prompt"], 7, row["response"]] for row in table)])
    rows, *_ = audit.drawn_rows(files[0], 8, 0)
    expected = audit.texts_of(rows, files[1], "ranking")
    for source in (frame, frame.parent):
        assert audit.texts_of(rows, str(source), "ranking", "prompt=q,response=a") == expected
    (tmp_path / "run").mkdir()  # a run folder stands for its ranking
    write_rows(tmp_path / "run" / "weights.jsonl", read_rows(files[0]))
    page = tmp_path / "page.html"
    front.main(["audit", str(tmp_path / "run"), "--rows", str(frame), "--lower-columns",
                "prompt=q,response=a", "--page", str(page)])
    assert page.read_text().count("<section>") == 40
    mixed = write_rows(tmp_path / "mixed.jsonl", [  # as the first row is read, so are the others
        row | ({"messages": []} if n else {}) for n, row in enumerate(table)])
    assert audit.texts_of(rows, str(mixed), "ranking") == expected
    words = ["audit", str(files[0]), "--rows", str(frame)]
    assert "unknown layout" in refused(lambda: front.main(words))
    assert 'no column "x"' in refused(lambda: front.main(
        [*words, "--lower-columns", "prompt=x,response=a"]))


def test_bad_input(files, refused, tmp_path, monkeypatch):
    ranking, rows = files
    short = write_rows(tmp_path / "short.jsonl", read_rows(rows)[:30])
    other = write_rows(tmp_path / "other.jsonl", read_rows(rows)[1:] * 2)
    mute = write_rows(tmp_path / "mute.jsonl", [{"messages": [
        {"role": "user", "content": "a"}]}] * 50)
    few = write_rows(tmp_path / "few.jsonl", [{"row_id": 44, "verdict": "y"}])
    odd = write_rows(tmp_path / "odd.jsonl", [{"row_id": 44, "verdict": "maybe"}])
    both = write_rows(tmp_path / "both.jsonl", [{"row_id": 44, "verdict": v} for v in "yn"])
    before = write_rows(tmp_path / "before.jsonl", [{"row_id": 44, "hash": "x", "verdict": "y"}])
    clean = write_rows(tmp_path / "clean.jsonl", [
        {"row_id": 0, "hash": "h", "rank": 1, "reason": None}])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for words, what in (
            ([ranking], "holds no texts"), ([ranking, "--rows", short], "no row_id"),
            ([ranking, "--rows", other], "other.jsonl line 1: another text than row_id 0"),
            ([ranking, "--rows", mute], "mute.jsonl line 1: another text than row_id 0"),
            ([ranking, "--rows", rows, "--verdicts", few], "no verdict for row_id"),
            ([ranking, "--rows", rows, "--verdicts", odd], "must be y, n or s"),
            ([ranking, "--rows", rows, "--verdicts", both], "line 2: another verdict for row_id"),
            ([ranking, "--rows", rows, "--verdicts", before], "line 1: the verdict is on another "),
            ([ranking, "--rows", rows, "--page", rows], "overwrite"),
            ([clean, "--rows", rows], "none of its 1 rows"),
            ([ranking, "--rows", rows, "--count", 0], "--count 0: must be 1 or more"),
            ([ranking, "--rows", rows, "--page", tmp_path / "p", "--out", tmp_path / "v"],
             "--out: with --page alone nothing is asked"),
            ([ranking, "--lower-columns", "prompt=q"], "--lower-columns: names the columns of"),
            ([ranking, "--rows", rows, "--out", tmp_path / "config.json"], "overwrite"),
            ([ranking, "--rows", rows], "the input ended")):
        assert what in refused(lambda words=words: front.main(["audit", *map(str, words)])), what
