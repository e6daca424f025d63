"""The page and its limits: what it says, what hostile rows cannot do, short and bare runs."""

import re
import shutil
import subprocess

import pytest
from conftest import read_rows, write_rows
from fabricated import HOSTILE, add_texts, change_json, fabricate, make_page

from evaluation import report


def test_report_of_a_real_offline_and_online_run(files, train, online, tmp_path):
    paths = files(lower=24, upper=24, heldout=6)
    first = train(paths, epochs=2)
    second = online(paths, out="online", epochs=2, k_gen=2)
    text, words = make_page(tmp_path, first.out)
    best = first.weights[0]
    assert f"rank 1 · row_id {best['row_id']} · weight {best['weight']:.3f}" in words
    source = read_rows(paths["lower"])[best["row_id"]]
    assert source["prompt"] in words
    assert source["response"] in words
    assert text.count("<figure>") == 5  # no labels, no held-out lower rows
    _, words = make_page(tmp_path, second.out)
    assert "Importance ratios" in words
    text, words = make_page(tmp_path, first.out, second.out)
    assert "run, online" in words
    assert text.count("<details>") > 2


def test_what_a_page_says_of_a_run(tmp_path):
    """Before and after of a held-out figure, whether the run has ended, both ends of the rows."""
    run = fabricate(tmp_path / "run")
    text, words = make_page(tmp_path, run)
    assert "<tr><td>upper_heldout</td><td>0.7500</td><td>0.3000</td></tr>" in text
    assert "bds · m · seed 0 · 6 steps · epoch 2 of 2 · 0.0 min of training" in words
    assert "not finished" not in words
    ordered = read_rows(run / "weights.jsonl")
    shown = [int(row_id) for row_id in re.findall(r"· row_id (\d+) ·", words)]
    ends = [*ordered[:6], *ordered[:-7:-1]]
    assert shown == [row["row_id"] for row in ends]
    _, words = make_page(tmp_path, fabricate(tmp_path / "running", finished=False))
    assert "not finished: continue it with --resume" in words
    assert "No ranking yet" in words


def test_recommended_answers_stand_beside_the_originals(tmp_path):
    """Those of the largest margin: rows 39, 37 and so on are rewritten."""
    run = fabricate(tmp_path / "run", method="online")
    entries = read_rows(run / "weights.jsonl")
    add_texts(run, "x", entries)
    _, words = make_page(tmp_path, run)
    section = words.split("Recommended new answers")[1]
    margins = [float(margin) for margin in re.findall(r"margin (\d+)", section)]
    assert margins == [39, 37, 35, 33, 31, 29]
    assert section.count("new x") == 6


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 1},
        {"epochs": 1, "rows": 2},
        {"rows": 1},
        {"method": "mix"},
        {"finished": False},
        {"method": "online", "finished": False, "epochs": 1},
    ],
    ids=str,
)
def test_report_of_short_and_bare_runs(tmp_path, options):
    folder = fabricate(tmp_path / "run", **options)
    if options.get("method") == "mix":
        for file in (folder / "weights").iterdir():
            file.unlink()
    text, _ = make_page(tmp_path, folder)
    assert not re.search(r"\bnan\b", text, re.I)


def test_hostile_text_cannot_break_the_page(tmp_path):
    """HTML, RTL overrides, emoji, control characters, and 100,000 characters, everywhere."""
    long = HOSTILE + "z" * 100_000
    folder = fabricate(tmp_path / "<b>a & $b$")
    entries = read_rows(folder / "weights.jsonl")
    for entry in entries:
        entry["kind"] = f"<i>\x1b{long}"
    write_rows(folder / "weights.jsonl", entries)
    add_texts(folder, long, entries)
    change_json(folder / "result.json", **{f"weight/recall/{long}": 0.5})
    text, words = make_page(tmp_path, folder)
    assert "alert(1)" in words  # as text
    assert f"{len(long) - report.TEXT:,} more characters" in words
    assert "مرحبا" in words
    assert "\U0001f469\u200d\U0001f4bb" in words
    assert not {"\x00", "\x1b"} & set(text)
    assert "z" * 1000 not in text
    assert text.count('dir="auto"') >= 10
    write_rows(
        folder / "shown.jsonl",
        [
            {
                "row_id": entry["row_id"],
                "hash": entry["hash"],
                "prompt": "lone \ud800 surrogate",  # legal JSON, but not UTF-8
                "response": "x",
            }
            for entry in entries
        ],
    )
    assert "lone ? surrogate" in make_page(tmp_path, folder)[1]


def test_texts_come_from_the_run_folder_alone(tmp_path):
    """Those of shown.jsonl, where id and hash agree: whatever the source was called or is now."""
    folder = fabricate(tmp_path / "run", lower="alpaca-cleaned")
    ordered = read_rows(folder / "weights.jsonl")
    texts = []
    for row in ordered[:8] + ordered[-8:]:
        texts.append(
            {
                "row_id": row["row_id"],
                "hash": row["hash"] if row["rank"] != 2 else "another",
                "prompt": f"question {row['rank']}.",
                "response": f"answer {row['rank']}.",
            }
        )
    write_rows(folder / "shown.jsonl", texts)
    _, words = make_page(tmp_path, folder)
    for rank in (1, 3, 6, 35, 40):
        assert f"question {rank}." in words
        assert f"answer {rank}." in words
    for rank in (2, 7, 34):  # of another hash; not among the best and worst six
        assert f"answer {rank}." not in words


# --- row tests ------------------------------------------------------------------------------------


@pytest.fixture
def tested(tmp_path):
    """A run with texts, and the rows of a row tests' ranking of its rows: 0 to 9 look bad."""
    run = fabricate(tmp_path / "run", rows=20)
    entries = read_rows(run / "weights.jsonl")
    texts = []
    for entry in entries:
        if entry["row_id"] not in (3, 4):
            pair = {"prompt": f"question {entry['row_id']}.", "response": "x"}
            texts.append({"row_id": entry["row_id"], "hash": entry["hash"], **pair})
    write_rows(run / "shown.jsonl", texts)
    ranking = []
    for number in range(20):
        reason = None
        if number < 10:
            reason = "end" if number < 7 else "relevance"
        ranking.append(
            {
                "row_id": number,
                "hash": f"{number:016x}",
                "rank": 20 - number,
                "kept": reason is None,
                "reason": reason,
                "surprise": 10.0 - number,
            }
        )
    return run, ranking


def test_reasons_are_joined_by_row_id_and_hash(tested, tmp_path):
    """Counts, how many of these rows the run keeps, and the most surprising with a text."""
    run, ranking = tested
    # A part of a file may have trained: the ranking then has more rows than the run.
    file = write_rows(tmp_path / "r.jsonl", [*ranking, {**ranking[0], "row_id": 99}])
    text, words = make_page(tmp_path, run, row_tests=file)
    assert "10 of 20 rows look bad." in words
    kept = {row["row_id"] for row in read_rows(run / "weights.jsonl") if row["kept"]}
    for reason, rows in (
        ("cut short", range(7)),
        ("of another question", range(7, 10)),
    ):
        count = len(kept & set(rows))
        assert f"<tr><td>{reason}</td><td>{len(rows)}</td><td>{count}</td></tr>" in text
    section = words.split("Rows that look bad")[1].split("Curves")[0]
    asked = [int(number) for number in re.findall(r"question (\d+)\.", section)]
    assert asked == [0, 1, 2, 5, 6, 7]
    assert "surprise 10.000 · end" in section


def test_without_row_tests_a_page_says_nothing_of_them(tested, tmp_path):
    run, _ = tested
    text, words = make_page(tmp_path, run)
    assert "look bad" not in words
    assert "surprise" not in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hash": "another"}, "belongs to other data"),
        ({"row_id": 77}, "belongs to other data"),
        ({"row_id": 3}, "stands in the file twice"),
        ({"reason": "gone"}, "has no column reason"),
    ],
)
def test_a_ranking_of_other_data_is_refused(tested, tmp_path, refused, change, words):
    run, ranking = tested
    if change == {"reason": "gone"}:
        del ranking[5]["reason"]
    else:
        ranking[5] |= change
    file = write_rows(tmp_path / "r.jsonl", ranking)
    line = refused(lambda: make_page(tmp_path, run, row_tests=file))
    assert f"{file}: " in line
    assert words in line
    assert not (tmp_path / "out" / "page.html").exists()


# --- at full size ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_in_a_browser(tmp_path, width):
    """No console message, and nothing wider than the screen."""
    folder = fabricate(tmp_path / "run", method="online")
    add_texts(folder, HOSTILE + "w" * 5000, read_rows(folder / "weights.jsonl"))
    text, _ = make_page(tmp_path, folder, fabricate(tmp_path / "other"))
    # The page itself forbids scripts, so a copy without that line reports the layout's width.
    script = (
        "<script>document.title = document.documentElement.scrollWidth + ' of ' "
        "+ innerWidth</script></body>"
    )
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    text = text.replace("<details>", "<details open>").replace("</body>", script)
    (tmp_path / "probe.html").write_text(text)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--dump-dom",
        f"file://{tmp_path / 'probe.html'}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert "CONSOLE" not in ended.stderr
    wide, screen = re.search(r"<title>(\d+) of (\d+)</title>", ended.stdout).groups()
    assert int(wide) <= int(screen)
