"""The page and its limits: what it says, what hostile rows cannot do, short and bare runs."""

import itertools
import json
import math
import re
import shutil
import subprocess
import time

import pytest
import torch
from conftest import read_rows, write_rows
from fabricated import HOSTILE, fabricate, make_page

import eval as front
from evaluation import health, plots, report
from evaluation.runs import Run


def show_rows(run, source):
    """shown.jsonl of a finished run, with the texts of every lower row."""
    rows = read_rows(source)
    write_rows(run.out / "shown.jsonl", [
        {"row_id": w["row_id"], "hash": w["hash"], "prompt": rows[w["row_id"]]["prompt"],
         "response": rows[w["row_id"]]["response"]} for w in run.weights])


def test_report_of_a_real_offline_and_online_run(files, train, online, tmp_path):
    paths = files(lower=24, upper=24, heldout=6)
    first, second = train(paths, epochs=2), online(paths, out="online", epochs=2, k_gen=2)
    show_rows(first, paths["lower"])
    text, words = make_page(tmp_path, first.out)
    row = first.weights[0]
    assert f"rank 1 · row {row['row_id']}" in words
    source = read_rows(paths["lower"])[row["row_id"]]
    assert source["prompt"] in words and source["response"] in words
    assert text.count("<figure>") >= 6 and "prefers-color-scheme" in text
    text, words = make_page(tmp_path, second.out)
    assert "time spent generating" in words and "Importance ratios" in words
    assert "Refined answers beside the originals" in words
    assert "epoch 1, top, unmasked" in words and "epoch 2, bottom, masked" in words
    both, words = make_page(tmp_path, first.out, second.out)
    assert "Side by side" in words and both.count("<details>") > 2


def test_first_screen_says_whether_it_worked(tmp_path):
    def headline(**options):
        folder = fabricate(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **options)
        found = health.run_checks(Run(folder))
        return health.health(found)[0], " ".join(text for _, text in found)

    kind, text = headline()
    assert kind == "good" and "0.3000 at the end" in text and "AUROC 0.900" in text
    assert "0.700" in text  # beside the best of base loss and length
    kind, text = headline(upper=(0.3, 0.5))
    assert kind == "warn" and "lowest after epoch 1 (0.3000)" in text
    assert headline(upper=(1.2, 1.1))[0] == "warn"  # it began at 1
    kind, text = headline(upper=(0.3, 0.31))  # of 0.7 gained
    assert kind == "good" and "has risen since, by little" in text
    kind, text = headline(finished=False)
    assert kind == "bad" and "Not finished: 6 steps" in text and "No labels" not in text
    kind, text = headline(labels=False)
    assert kind == "good" and "No labels" in text
    folder = fabricate(tmp_path / "masked")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"weight_unmasked/auroc": None}))
    found = str(health.run_checks(Run(folder)))
    assert "that the weights have judged are all good or all bad" in found
    kept = str(health.run_checks(Run(fabricate(tmp_path / "of kept rows", args={"keep": "k"}))))
    assert "AUROCs of kept rows alone are not compared" in kept and "No labels" not in kept
    folder = fabricate(tmp_path / "flags")
    rows = read_rows(folder / "metrics.jsonl")
    for flag, expected in (("omega/uniform", "warn"), ("omega/collapsed", "bad")):
        write_rows(folder / "metrics.jsonl", [*rows[:-1], rows[-1] | {flag: True}])
        assert health.health(health.run_checks(Run(folder)))[0] == expected
    result = json.loads((folder / "result.json").read_text())
    write_rows(folder / "metrics.jsonl", rows)
    (folder / "result.json").write_text(json.dumps(result | {"weight/auroc": 0.7}))
    found = health.run_checks(Run(folder))
    assert ("warn" in [k for k, _ in found]) and "adds nothing" in str(found)
    (folder / "result.json").write_text(json.dumps(result | {"length/auroc": 0.05}))
    assert "length, reversed with 0.950: the selection adds nothing" in str(
        health.run_checks(Run(folder)))


def test_what_an_online_run_says_of_its_answers(tmp_path):
    """Four of 96 were clamped; a fifth of half a minute was spent on them."""
    folder = fabricate(tmp_path / "run", method="online", steps=60, args={"num_answers": 2})
    rows = read_rows(folder / "metrics.jsonl")
    write_rows(folder / "metrics.jsonl", [
        row | {"ratio_clamped": 2 * (row["step"] in (3, 7))} for row in rows])
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {
        "refined/answers": 9, "refined/refined": 3, "refined/undecided": 4,
        "refined/false_replacement": 0.05}))
    run = Run(folder)
    checks = dict(map(reversed, health.run_checks(run)))
    assert checks["9 rows answered anew: 3 recommended, 4 undecided; on trusted prompts the rule "
                  "would replace 5.0% of the right answers."] == "info"
    assert checks["4% of the importance ratios were clamped: the answers are older than the model; "
                  "a smaller --k-gen."] == "warn"
    assert dict(health.headline_figures(run))["time spent generating"] == "20%"
    assert report.subtitle(run).endswith("60 steps · 2 epochs · m · seed 0 · 0.5 min of training")


def test_the_refined_answers_that_are_shown(tmp_path):
    """Those of the largest margins: six recommended ones, two undecided, two of no use."""
    rows = [{"row_id": n, "hash": "h", "rank": n + 1, "kept": True, "prompt": "p", "response": "r",
             "refined": "x", "margin": n * 7 % 30, "recommended": choice} for n, choice in
            enumerate(["refined", "undecided", "original"] * 10)]
    best, worst, refined, texts = report.curated_rows(
        write_rows(tmp_path / "curated.jsonl", rows), {(12, "h")})
    assert (best, worst) == (rows[:6], rows[-6:]) and texts.keys() == {
        (n, "h") for n in (*range(6), 12, *range(24, 30))}
    assert refined == [row for start, count in enumerate((6, 2, 2)) for row in sorted(
        rows[start::3], key=lambda row: -row["margin"])[:count]]


def test_curves_by_hand(monkeypatch):
    """Means over stretches of as many finite values, over neighbours; shares of rows in bins."""
    monkeypatch.setattr(plots, "POINTS", 2)
    assert plots.thin([1, 2, 3, 4, 5], [1.0, 3.0, None, 5.0, math.nan]) == [[1.5, 4], [2, 5]]
    assert plots.smooth([0.0] * 10 + [3.0] * 10) == [0.0] * 9 + [1.0, 2.0] + [3.0] * 9
    assert plots.histogram(torch.tensor([0.5, 1.5, 1.6, 9.0]), torch.arange(4.0)) == (
        [0, 0, 1, 1, 2, 2, 3, 3], [0, 0.25, 0.25, 0.5, 0.5, 0.25, 0.25, 0])


@pytest.mark.parametrize("options", [
    {"steps": 3, "epochs": 1}, {"steps": 1, "epochs": 1, "rows": 2}, {"labels": False},
    {"labels": False, "scores": False}, {"method": "mix"}, {"finished": False},
    {"method": "online", "text": "x"}, {"steps": 2, "epochs": 2, "rows": 1},
    {"steps": 3, "epochs": 1, "labels": False, "method": "online", "finished": False}],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()))
def test_report_of_short_and_bare_runs(tmp_path, options):
    folder = fabricate(tmp_path / "run", **options)
    if options.get("method") == "mix":
        for file in (folder / "weights").iterdir():
            file.unlink()
    text, words = make_page(tmp_path, folder)
    assert not re.search(r"\bnan\b", text, re.I)
    if options.get("labels") is False:
        assert "Known bad rows" not in words
    if options.get("text") is None and options.get("finished", True):
        assert "Texts are not shown" in words  # no cache and no source: said, not guessed


def test_a_page_does_not_replace_the_notes_beside_it(tmp_path, refused):
    """README.md is no table of README.html; the page's own tables are written anew."""
    folder = fabricate(tmp_path / "run")
    for text in ("mine", "## Mine\n", "| m |\n"):
        (tmp_path / "notes.md").write_text(text)
        assert "would replace" in refused(lambda: front.main(
            ["report", str(folder), "--out", str(tmp_path / "notes.html")]))
        assert (tmp_path / "notes.md").read_text() == text
    running = fabricate(tmp_path / "running", finished=False)
    for run, _ in itertools.product((folder, running), range(2)):
        front.main(["report", str(run), "--out", str(tmp_path / f"{run.name}.html")])


def test_report_without_an_epoch_yet(tmp_path):
    folder = fabricate(tmp_path / "run", finished=False)
    for file in (folder / "weights").iterdir():
        file.unlink()
    rows = read_rows(folder / "metrics.jsonl")[:2]
    (folder / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:30])
    _, words = make_page(tmp_path, folder)  # killed or still writing: half a line
    assert "Not finished: 1 steps so far" in words


def test_known_bad_rows_are_told_by_ranking_metrics_alone(tmp_path):
    """base/upper_heldout is a loss before training, not a metric of the ranking called base."""
    folder = fabricate(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {
        "base/upper_heldout": 0.7, "base/recall/cut": 0.25, "weight_unmasked/auroc": 0.8}))
    header, cells = health.label_table(Run(folder))
    assert header == ["ranking by", "auroc", "precision", "recall/cut"]
    assert cells == [["weight", 0.9, 0.9, None], ["base", 0.7, 0.7, 0.25],
                     ["length", 0.5, 0.5, None], ["weight, unmasked", 0.8, None, None]]
    text = make_page(tmp_path, folder)[0]
    assert "base/upper_heldout" in text.split("Final metrics")[1]
    assert "upper_heldout</th>" not in text


def test_hostile_text_cannot_break_the_page(tmp_path):
    """HTML, RTL overrides, emoji, control characters, and 100,000 characters, everywhere."""
    long = HOSTILE + "z" * 100_000
    folder = fabricate(tmp_path / "<b>a & $b$", text=long, kinds=("<i>good", "<script>bad"))
    lines = (folder / "curated.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    lines[0] = json.dumps(first | {"response": "lone \ud800 surrogate"})  # legal JSON, not UTF-8
    (folder / "curated.jsonl").write_text("\n".join(lines))
    text, words = make_page(tmp_path, folder)
    assert "alert(1)" in words  # as text
    assert f"{len(long) - report.TEXT:,} more characters" in words
    assert "z" * 1000 not in text and "\x00" not in text and "\x1b" not in text
    assert "lone ? surrogate" in words
    assert "مرحبا" in words and "\U0001f469\u200d\U0001f4bb" in words
    assert text.count('dir="auto"') >= 10 and len(text) < 1_500_000
    table = (tmp_path / "out" / "page.md").read_text()
    assert "<script>" not in table and "<b>" not in table


@pytest.mark.slow
def test_report_of_a_hundred_thousand_rows(tmp_path):
    folder = fabricate(tmp_path / "run", steps=9000, epochs=3, rows=100_000, text="word " * 30)
    started = time.time()
    text, _ = make_page(tmp_path, folder)
    assert len(text.encode()) < 5 * 2**20 and time.time() - started < 120


def test_texts_come_from_the_run_folder_alone(tmp_path):
    """Those of shown.jsonl, where id and hash agree: whatever the source was called or is now."""
    folder = fabricate(tmp_path / "run", args={"lower": "alpaca-cleaned"})
    assert "Texts are not shown" in make_page(tmp_path, folder)[1]
    rows = sorted(read_rows(folder / "weights.jsonl"), key=lambda row: row["rank"])
    write_rows(folder / "shown.jsonl", [
        {"row_id": row["row_id"], "hash": row["hash"] if row["rank"] != 2 else "another",
         "prompt": f"question {row['rank']}.", "response": f"answer {row['rank']}."}
        for row in rows[:8] + rows[-8:]])
    words = make_page(tmp_path, folder)[1]
    assert "not shown" not in words and "Questions at both ends" in words
    for rank in (1, 3, 6, 35, 40):
        assert f"question {rank}." in words and f"answer {rank}." in words
    for rank in (2, 7, 34):  # of another hash; not among the best and worst six
        assert f"answer {rank}." not in words


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_page_in_a_browser(tmp_path, width):
    """No console message, no request beyond the file itself, nothing wider than the screen."""
    folder = fabricate(tmp_path / "run", method="online", text=HOSTILE + "w" * 5000)
    make_page(tmp_path, folder, fabricate(tmp_path / "other"))
    page = tmp_path / "out" / "page.html"
    # The page itself forbids scripts, so a copy without that line reports the layout's width.
    probe = tmp_path / "out" / "probe.html"
    probe.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "",
                            page.read_text()).replace("<details>", "<details open>").replace(
        "</body>", "<script>document.title = document.documentElement.scrollWidth + ' of ' "
        "+ innerWidth</script></body>"))

    def browse(file, *flags):
        return subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
             "--no-first-run", "--disable-background-networking", "--disable-component-update",
             "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr",
             f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
             "--virtual-time-budget=2000", f"--log-net-log={tmp_path / 'net.json'}", *flags,
             f"file://{file}"], capture_output=True, text=True, timeout=240)

    shot = tmp_path / "shot.png"
    done = browse(page, f"--screenshot={shot}")
    assert shot.stat().st_size > 10_000, done.stderr
    assert "CONSOLE" not in done.stderr
    requests = set(re.findall(r'"url":"(https?://[^"]*)"', (tmp_path / "net.json").read_text()))
    assert not {r for r in requests if "google" not in r}, requests  # the browser's own start page
    done = browse(probe, "--dump-dom")
    wide, screen = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout).groups()
    assert int(wide) <= int(screen)
