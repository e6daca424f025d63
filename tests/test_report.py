"""compare.py, report.py, plots.py: finished runs side by side, ranking, the page and its limits."""

import html.parser
import json
import math
import re
import shutil
import subprocess
import time

import pytest
import torch
from conftest import make_rows, read_rows, write_rows
from safetensors.torch import load_file, save_file

import compare
import eval as evaluation
import report
import utils

HOSTILE = ("</div></article><script>alert(1)</script><img src=x onerror=alert(2)>"
           "<svg onload=alert(3)><a href='javascript:x'>&lt;b&gt; \" ' ]]> --> </style> "
           "$\\frac{1}{2}$ مرحبا \u202e reversed \u2066 \U0001f469\u200d\U0001f4bb \x00\x1b[31m "
           "e\u0301\u0323") * 2


def fabricate(folder, steps=6, epochs=2, rows=40, method="bds", seed=0, labels=True, text=None,
              finished=True, scores=True, args=None, upper=(0.5, 0.3), kinds=("clean", "cut")):
    """A run folder as the training scripts write it, without training."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    (folder / "config.json").write_text(json.dumps({
        "args": {"method": method, "seed": seed, "epochs": epochs, "batch": 8, "num_answers": 1,
                 "lower": "lower.jsonl", "upper": "upper.jsonl", "upper_heldout": "held.jsonl",
                 "lower_split": None, "lower_columns": None, "toy": False, "model": "m",
                 "cache_dir": str(folder / "no-cache"), "keep_fraction": 0.8} | (args or {}),
        "environment": {"torch": "2"}, "data": {"lower": "a", "upper_heldout": "b"}}))
    (folder / "weights").mkdir()
    omega, lines = torch.zeros(rows), []
    for step in range(steps):
        epoch = step * epochs // steps
        line = {"step": step, "epoch": epoch, "rho": 0.1 * (epoch + 1),
                "upper_loss": 1 / (1 + step), "lower_loss": 1.0, "time/step": 0.5}
        if method == "online":
            line |= {"ratio_mean": 1.0, "ratio_max": 1.5, "ratio_ess": 2.0, "ratio_clamped": 0,
                     "masked_share": 0.1, "answers": 5, "answer_length": 4.0, "time/generate": 0.1}
        if step == steps - 1 or (step + 1) * epochs // steps > epoch:
            omega = omega + torch.randn(rows, generator=generator)
            save_file({"omega": omega}, folder / "weights" / f"epoch_{epoch + 1}.safetensors")
            share = epoch / max(1, epochs - 1)
            line |= {"upper_heldout": upper[0] + share * (upper[1] - upper[0]), "omega/ess": rows,
                     "omega/ess_share": 1.0, "omega/uniform": False, "omega/collapsed": False}
        lines.append(line)
    write_rows(folder / "metrics.jsonl", lines)
    if not finished:
        return folder
    order = omega.argsort(descending=True).tolist()
    entries = []
    for rank, row in enumerate(order, 1):
        entry = {"row_id": row, "hash": f"{row:016x}", "rank": rank, "kept": rank <= 0.8 * rows,
                 "weight": 1.0} | ({"base_loss": 1.0, "final_loss": 0.5, "length": row % 7 + 1}
                                   if scores else {})
        if labels:
            entry |= {"bad": rank % 3 == 0, "kind": kinds[rank % 3 == 0]}
        entries.append(entry)
    write_rows(folder / "weights.jsonl", entries)
    if text is not None:
        write_rows(folder / "curated.jsonl", [entry | {
            "prompt": text, "response": text, "refined": text if n % 2 else None, "margin": 1.0,
            "recommended": "refined" if n % 2 else "original"} for n, entry in enumerate(entries)])
    result = {"method": method, "seed": seed, "rows": rows, "upper_heldout": upper[1],
              "upper_heldout_per_token": upper[1] + 0.01, "lower_original": 1.0, "lower_kept": 0.9}
    if labels:
        result |= {f"{name}/{key}": value for name, value in (
            ("weight", 0.9), ("base", 0.7), ("length", 0.5)) for key in ("auroc", "precision")}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page, and whether every tag that was opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = set(), [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def make_page(tmp_path, *folders):
    """(HTML, parsed page) of a report; whatever its rows hold, it can do nothing."""
    out = tmp_path / "out" / "page.html"
    evaluation.main(["report", *map(str, folders), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.tags & {"script", "img", "iframe", "a", "object", "form", "base"}
    assert not any(name.startswith("on") or name in ("src", "action") for name, _ in
                   page.attributes)
    links = {value for name, value in page.attributes if name in ("href", "xlink:href")}
    assert all(link.startswith(("#", "data:,")) for link in links)
    assert set(re.findall(r"https?://[^\s\"<]*", text)) <= {
        "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, never fetched
    assert "default-src 'none'" in text and "url(http" not in text
    assert out.with_suffix(".md").read_text(encoding="utf-8")
    assert not list(out.parent.glob(".*partial"))
    return text, " ".join(page.text)


# --- side by side ---------------------------------------------------------------------------------

@pytest.mark.parametrize("freedom, value", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764),
                                            (5, 2.5706), (7, 2.3646), (9, 2.2622), (29, 2.0452)])
def test_student_t_quantiles(freedom, value):
    assert compare.student_t(freedom) == pytest.approx(value, abs=1e-3)


def test_compare_groups_seeds_by_hand(tmp_path, capfd):
    """Losses 0.1, 0.2, 0.6: mean 0.3, std 0.2646, half width 4.3027 std / sqrt(3)."""
    runs = [fabricate(tmp_path / "bds" / f"seed-{seed}", seed=seed, upper=(1, loss))
            for seed, loss in enumerate((0.1, 0.2, 0.6))]
    runs.append(fabricate(tmp_path / "mix", method="mix", upper=(1, 0.4)))
    evaluation.main(["compare", *map(str, runs), "--json", str(tmp_path / "c.json")])
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [(r["name"], r["n"]) for r in rows] == [("bds", 3), ("mix", 1)]
    std = math.sqrt((0.04 + 0.01 + 0.09) / 2)
    half = 4.3027 * std / math.sqrt(3)
    assert rows[0]["upper_heldout"] == pytest.approx(
        {"mean": 0.3, "std": std, "low": 0.3 - half, "high": 0.3 + half})
    assert rows[1]["upper_heldout"] == {"mean": 0.4, "std": None, "low": None, "high": None}
    assert rows[0]["upper_heldout_per_token"]["mean"] == pytest.approx(0.31)
    text = capfd.readouterr().out
    assert "0.3000 ± 0.2646" in text and f"[{0.3 - half:.4f}, {0.3 + half:.4f}]" in text
    assert "sequence mean" in text and "token mean" in text


def test_bad_input_is_one_line(tmp_path, refused):
    good, other = fabricate(tmp_path / "good"), fabricate(
        tmp_path / "other", args={"upper_heldout": "elsewhere.jsonl"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"data": {"upper_heldout": "c"}}))
    empty, unfinished = tmp_path / "empty", fabricate(tmp_path / "half", finished=False)
    empty.mkdir()
    for command in ("compare", "report"):
        line = refused(lambda c=command: evaluation.main([c, str(good), str(other)]))
        assert "different data" in line and "held.jsonl" in line and "elsewhere.jsonl" in line
        assert "no config.json" in refused(lambda c=command: evaluation.main([c, str(empty)]))
    assert "has not finished" in refused(lambda: evaluation.main(["compare", str(unfinished)]))
    (unfinished / "metrics.jsonl").unlink()
    assert "no metrics.jsonl" in refused(lambda: evaluation.main(["report", str(unfinished)]))
    assert "is a folder" in refused(lambda: evaluation.main(
        ["report", str(good), "--out", str(tmp_path)]))
    for file in (unfinished / "weights").iterdir():
        file.unlink()
    assert "no weights/epoch" in refused(lambda: evaluation.main(["ranking", str(unfinished)]))
    (good / "config.json").write_text("{")
    assert "not a run's configuration" in refused(lambda: evaluation.main(["report", str(good)]))


def test_rows_edited_in_place_are_other_data(tmp_path, refused):
    """Equal arguments do not do: the rows' own hashes tell, but for seeds and a --keep."""
    def run(name, seed=0, data=(), **args):
        folder = fabricate(tmp_path / name, seed=seed, args=args)
        config = json.loads((folder / "config.json").read_text())
        config["data"] |= dict(data)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    first, again = run("first"), run("again")
    edited, kept = run("edited", data={"upper_heldout": "x"}), run("kept", data={"lower": "x"},
                                                                  keep="k")
    evaluation.main(["compare", first, again, run("seed", 1, {"upper_heldout": "y", "lower": "y"}),
                     kept])
    other_seed = run("other", 1, {"upper_heldout": "z"})
    for runs in ((first, edited), (other_seed, first, edited)):
        line = refused(lambda r=runs: evaluation.main(["compare", *r]))
        assert "different data (the rows of upper_heldout changed between them)" in line
    assert "of lower changed" in refused(lambda: evaluation.main(
        ["compare", first, run("changed", data={"lower": "x"})]))


def test_runs_are_compared_on_the_sets_that_both_have(tmp_path, capfd, refused):
    def run(name, held_out=None):
        folder = fabricate(tmp_path / name, args={"lower_heldout": held_out, "method": name})
        config = json.loads((folder / "config.json").read_text())
        config["data"] |= {"lower_heldout": held_out} if held_out else {}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    without, clean, other = run("without"), run("clean", "c.jsonl"), run("other", "d.jsonl")
    evaluation.main(["compare", without, clean])
    assert re.search(r"^clean +1 +0\.3000", capfd.readouterr().out, re.M)
    assert "lower_heldout: c.jsonl and d.jsonl" in refused(
        lambda: evaluation.main(["compare", without, clean, other]))


def test_a_place_to_write_is_made_before_the_work(tmp_path, monkeypatch, refused):
    run, file = str(fabricate(tmp_path / "run")), tmp_path / "file"
    file.write_text("")
    for number, words in enumerate((
            ["compare", run, "--json"], ["report", run, "--out"],
            ["keep", run, "--keep-fraction", "0.5", "--out"])):
        evaluation.main([*words, str(tmp_path / f"new{number}" / "deep" / "out.html")])
        assert (tmp_path / f"new{number}" / "deep" / "out.html").exists()

    def work(*_):
        raise AssertionError("too late")

    monkeypatch.setattr(evaluation, "load_trained", work)
    monkeypatch.setattr(evaluation, "side_by_side", work)
    monkeypatch.setattr(compare, "summarise", work)
    monkeypatch.setattr(report, "page", work)
    for words in (["losses", run, "--out"], ["answers", run, "--prompt", "x", "--out"],
                  ["compare", run, "--json"], ["report", run, "--out"],
                  ["keep", run, "--keep-fraction", "0.5", "--out"]):
        line = refused(lambda w=words: evaluation.main([*w, str(file / "out.html")]))
        assert f"{file / 'out.html'}: its folder cannot be made" in line
        assert re.search("is (the ranking itself or )?a folder", refused(
            lambda w=words: evaluation.main([*w, str(tmp_path)])))


# --- another threshold ----------------------------------------------------------------------------

def test_keep_rethresholds_by_rank(tmp_path, capfd, refused):
    run = fabricate(tmp_path / "run")
    evaluation.main(["keep", str(run), "--keep-fraction", "0.25"])
    kept = read_rows(run / "kept.jsonl")
    assert [k.keys() for k in kept] == [{"row_id", "hash", "rank", "kept"}] * 40
    assert {k["row_id"] for k in kept if k["kept"]} == {
        r["row_id"] for r in read_rows(run / "weights.jsonl") if r["rank"] <= 10}
    assert "kept 10 of 40 rows" in capfd.readouterr().out
    for flags, words in ((["0"], "(0, 1]"), (["1.5"], "(0, 1]"), (["0.001"], "none"),
                         (["0.5", "--out", str(run)], "is the ranking itself or a folder"),
                         (["0.5", "--out", str(run / "weights.jsonl")], "is the ranking itself")):
        assert words in refused(lambda f=flags: evaluation.main(
            ["keep", str(run), "--keep-fraction", *f]))
    assert "no such file" in refused(lambda: evaluation.main(
        ["keep", str(tmp_path), "--keep-fraction", "0.5"]))


def test_keep_counts_what_is_kept_and_checks_ranks(tmp_path, capfd, refused):
    path = tmp_path / "ranking.jsonl"
    rows = [{"row_id": n, "hash": "h", "rank": rank} for n, rank in enumerate(
        (1, 2, 3, 9, 10, 11, 12, 13))]
    write_rows(path, rows)
    evaluation.main(["keep", str(path), "--keep-fraction", "0.9"])
    assert "kept 3 of 8 rows" in capfd.readouterr().out
    for rank in ("2", None, True):
        write_rows(path, [*rows[:4], rows[4] | {"rank": rank}])
        line = refused(lambda: evaluation.main(["keep", str(path), "--keep-fraction", "0.5"]))
        assert f"ranking.jsonl line 5: the rank {json.dumps(rank)} is not a number" in line


def test_training_keeps_what_keep_kept(files, train, tmp_path):
    paths = files(lower=12)
    run = train(paths, epochs=1)
    out = tmp_path / "kept.jsonl"
    evaluation.main(["keep", str(run.out), "--keep-fraction", "0.5", "--out", str(out)])
    again = train(paths, out="kept", method="sft", keep=out, epochs=1)
    assert {w["row_id"] for w in again.weights} == {
        w["row_id"] for w in run.weights if w["rank"] <= 6}


# --- the ranking over the epochs ------------------------------------------------------------------

def test_eq_ranking_over_epochs_by_hand(tmp_path):
    """20 rows: the top and bottom 10 % are two rows each. Lengths are row % 7 + 1."""
    run = fabricate(tmp_path / "run", rows=20)
    for epoch, top, bottom in ((1, (3, 5), (0, 19)), (2, (3, 6), (19, 18))):
        omega = torch.zeros(20)
        omega[list(top)], omega[list(bottom)] = torch.tensor([2.0, 1.0]), torch.tensor([-1.0, -2.0])
        save_file({"omega": omega}, run / "weights" / f"epoch_{epoch}.safetensors")
    first, second = compare.ranking_over_epochs(compare.Run(run))
    assert (first["epoch"], first["group"], first["rows"]) == (1, "all", 2)
    assert first["top_length"] == (4 + 6) / 2 and first["bottom_length"] == (1 + 6) / 2
    assert first["top_previous"] is None and first["top_last"] == 0.5
    assert second["top_length"] == (4 + 7) / 2 and second["bottom_length"] == (6 + 5) / 2
    assert (second["top_previous"], second["bottom_previous"], second["top_last"]) == (0.5, 0.5, 1)


def test_masked_rows_are_ranked_apart(tmp_path):
    """Ten of 40 rows are masked, with lengths of their own: neither group's ends mix."""
    run = fabricate(tmp_path / "run", method="online")
    entries = read_rows(run / "weights.jsonl")
    write_rows(run / "weights.jsonl", [e | {
        "masked": e["row_id"] < 10, "length": 100 if e["row_id"] < 10 else 1} for e in entries])
    found = compare.ranking_over_epochs(compare.Run(run))
    assert [(r["group"], r["rows"], r["top_length"], r["bottom_length"]) for r in found] == [
        ("unmasked", 3, 1, 1)] * 2 + [("masked", 1, 100, 100)] * 2


def test_positions_of_omega_are_row_ids_in_order(files, train, tmp_path):
    """The assumption behind every figure of omega and labels: on a real run with dropped rows."""
    paths = files(lower=14)
    rows = read_rows(paths["lower"])
    rows[3]["response"] = ""  # dropped: row_ids have a gap
    write_rows(paths["lower"], rows)
    run = compare.Run(train(paths, epochs=2).out)
    omega = run.omegas[2]
    assert len(run.rows) == len(omega) == 13 and 3 not in {r["row_id"] for r in run.rows}
    weights = torch.tensor([r["weight"] for r in run.rows]).double()
    torch.testing.assert_close(len(omega) * omega.softmax(0), weights, atol=1e-6, rtol=1e-6)
    base = load_file(run.folder / "weights" / "base_losses.safetensors")["losses"]
    assert base.tolist() == [r["base_loss"] for r in run.rows]


# --- losses before and after ----------------------------------------------------------------------

def test_losses_are_those_of_the_run_and_of_its_base(files, train, tmp_path, capfd, refused):
    """After: result.json's numbers. Before: those saved before the first step. Row by row too."""
    run = train(files(lower_heldout=5), epochs=1, lr=0.01)
    out = tmp_path / "rows.jsonl"
    evaluation.main(["losses", str(run.out), "--out", str(out)])
    found = json.loads((run.out / "losses.json").read_text())
    for key in ("upper_heldout", "upper_heldout_per_token", "lower_heldout", "lower_original"):
        assert found[key] == pytest.approx(run.result[key], abs=1e-6)
    base = torch.tensor([w["base_loss"] for w in run.weights]).mean().item()
    assert found["base/lower_original"] == pytest.approx(base, abs=1e-6)
    rows = [r for r in read_rows(out) if r["set"] == "lower_original"]
    assert {r["row_id"]: (r["hash"], r["length"]) for r in rows} == {
        w["row_id"]: (w["hash"], w["length"]) for w in run.weights}
    by_id = {w["row_id"]: w for w in run.weights}
    for row in rows:
        assert row["base_loss"] == pytest.approx(by_id[row["row_id"]]["base_loss"], abs=1e-5)
        assert row["loss"] == pytest.approx(by_id[row["row_id"]]["final_loss"], abs=1e-5)
    assert "sequence mean" in capfd.readouterr().out

    _, text = make_page(tmp_path, run.out)  # the first screen now knows the loss before
    assert f"{found['base/upper_heldout']:.4f} before training" in text

    evaluation.main(["losses", str(run.out), "--rows", write_rows(
        tmp_path / "other.jsonl", make_rows(6, seed=77))])
    assert re.search(r"^rows +6 ", capfd.readouterr().out, re.M)

    broken = tmp_path / "broken"
    shutil.copytree(run.out, broken)
    save_file({"losses": torch.zeros(12)}, broken / "weights" / "base_losses.safetensors")
    (broken / "losses.json").unlink()
    assert "have changed since the run" in refused(lambda: evaluation.main(["losses", str(broken)]))
    assert not (broken / "losses.json").exists()


def test_lower_refined_is_the_loss_of_the_recommended_answers(files, online, tmp_path):
    """The kept rows with the refined answer where it was recommended, scored by hand."""
    from transformers import AutoTokenizer

    import data

    run = online(files(lower=20, upper=20), epochs=1)
    write_rows(run.out / "curated.jsonl", [e | {
        "refined": "red", "recommended": ("refined", "undecided", "original")[n % 3]}
        for n, e in enumerate(run.curated)])
    evaluation.main(["losses", str(run.out)])
    found = json.loads((run.out / "losses.json").read_text())["lower_refined"]
    model, _, made = evaluation.load_trained(str(run.out))
    rows = [{"prompt": e["prompt"], "response": "red" if n % 3 == 0 else e["response"]}
            for n, e in enumerate(run.curated) if e["kept"]]
    rows, _ = data.load_rows(write_rows(tmp_path / "hand.jsonl", rows),
                             AutoTokenizer.from_pretrained(made.args.model),
                             cache_dir=tmp_path / "hand")
    assert found == pytest.approx(evaluation.row_losses(model, rows)[0].mean().item(), abs=1e-6)
    assert compare.summarise([compare.Run(run.out)])[0]["lower_refined"]["mean"] == found


def test_answers_side_by_side(files, train, online, tmp_path, capfd, refused):
    paths = files()
    first, second = train(paths, epochs=1, lr=0.3), online(paths, out="online", epochs=1)
    capfd.readouterr()
    evaluation.main(["answers", str(first.out), str(second.out), "--prompt", "red | blue",
                     "--prompt", "green", "--max-new-tokens", "5"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "| prompt | base | run | online |" and len(lines) == 4
    assert lines[2].startswith("| red \\| blue |")
    assert "--prompt" in refused(lambda: evaluation.main(["answers", str(first.out)]))

    named_base = shutil.copytree(second.out, tmp_path / "base")  # neither loses a column
    namesake = shutil.copytree(second.out, tmp_path / "other" / "run")
    evaluation.main(["answers", str(first.out), str(namesake), str(named_base), "--prompt", "red",
                     "--max-new-tokens", "2", "--out", str(tmp_path / "new" / "answers.md")])
    header = (tmp_path / "new" / "answers.md").read_text().splitlines()[0]
    assert header == f"| prompt | base | run | {namesake} | {named_base} |"


# --- the page -------------------------------------------------------------------------------------

def test_report_of_a_real_offline_and_online_run(files, train, online, tmp_path):
    paths = files(lower=24, upper=24, heldout=6)
    first, second = train(paths, epochs=2), online(paths, out="online", epochs=2, k_gen=2)
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
        found = report.checks(compare.Run(folder))
        return report.verdict(found)[0], " ".join(text for _, text in found)

    kind, text = headline()
    assert kind == "good" and "0.3000 at the end" in text and "AUROC 0.900" in text
    assert "0.700" in text  # beside the best of base loss and length
    kind, text = headline(upper=(0.3, 0.5))
    assert kind == "warn" and "lowest after epoch 1 (0.3000)" in text
    kind, text = headline(finished=False)
    assert kind == "bad" and "Not finished: 6 steps" in text
    kind, text = headline(labels=False)
    assert kind == "good" and "No labels" in text
    folder = fabricate(tmp_path / "flags")
    rows = read_rows(folder / "metrics.jsonl")
    for flag, expected in (("omega/uniform", "warn"), ("omega/collapsed", "bad")):
        write_rows(folder / "metrics.jsonl", [*rows[:-1], rows[-1] | {flag: True}])
        assert report.verdict(report.checks(compare.Run(folder)))[0] == expected
    result = json.loads((folder / "result.json").read_text())
    write_rows(folder / "metrics.jsonl", rows)
    (folder / "result.json").write_text(json.dumps(result | {"weight/auroc": 0.7}))
    found = report.checks(compare.Run(folder))
    assert ("warn" in [k for k, _ in found]) and "adds nothing" in str(found)


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


def test_report_without_an_epoch_yet(tmp_path):
    folder = fabricate(tmp_path / "run", finished=False)
    for file in (folder / "weights").iterdir():
        file.unlink()
    rows = read_rows(folder / "metrics.jsonl")[:2]
    (folder / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1])[:30])
    _, words = make_page(tmp_path, folder)  # killed or still writing: half a line
    assert "Not finished: 1 steps so far" in words


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


def test_report_of_a_hundred_thousand_rows(tmp_path):
    folder = fabricate(tmp_path / "run", steps=9000, epochs=3, rows=100_000, text="word " * 30)
    started = time.time()
    text, _ = make_page(tmp_path, folder)
    assert len(text.encode()) < 5 * 2**20 and time.time() - started < 120


def test_texts_come_from_the_source_when_the_cache_is_gone(files, train, tmp_path):
    """And only where the hash still agrees: a changed source shows no wrong text."""
    paths = files()
    run = compare.Run(train(paths, epochs=1).out)
    wanted = {r["row_id"]: r["hash"] for r in run.rows}
    cached, why = report.source_texts(run, wanted)
    assert len(cached) == 12 and why == ""
    shutil.rmtree(tmp_path / "cache")
    assert report.source_texts(run, wanted) == (cached, "")
    rows = read_rows(paths["lower"])
    rows[4]["response"] += " changed"
    write_rows(paths["lower"], rows)
    assert report.source_texts(run, wanted)[0] == {k: v for k, v in cached.items() if k != 4}
    (tmp_path / "lower.jsonl").unlink()
    assert report.source_texts(run, wanted)[0] == {}


def test_a_column_that_is_gone_is_said_in_the_report(files, train, tmp_path):
    paths = files()
    rows = [{"question": r["prompt"], "answer": r["response"]} for r in read_rows(paths["lower"])]
    write_rows(paths["lower"], rows)
    run = train(paths, epochs=1, lower_columns="prompt=question,response=answer")
    assert "not shown" not in make_page(tmp_path, run.out)[1]
    write_rows(paths["lower"], [*rows[:3], *({"question": r["question"]} for r in rows[3:])])
    words = make_page(tmp_path, run.out)[1]
    assert 'Some texts are not shown: ' in words
    assert 'line 4: the column "answer" of --lower-columns is gone' in words


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


# --- TensorBoard ----------------------------------------------------------------------------------

def test_tensorboard_without_the_library_is_one_line(tmp_path, monkeypatch, refused):
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    run = fabricate(tmp_path / "run")
    line = refused(lambda: evaluation.main(["tensorboard", str(run)]))
    assert "pip install tensorboard" in line and not (run / "tensorboard").exists()


def test_tensorboard_holds_every_metric(tmp_path, refused):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = fabricate(tmp_path / "run")
    evaluation.main(["tensorboard", str(run)])
    events = EventAccumulator(str(run / "tensorboard"), {"histograms": 0})
    events.Reload()
    rows = read_rows(run / "metrics.jsonl")
    found = [(e.step, e.value) for e in events.Scalars("upper_loss")]
    assert found == [(r["step"], pytest.approx(r["upper_loss"])) for r in rows]
    assert len(events.Histograms("weights")) == 2
    times = [e.wall_time for e in events.Scalars("upper_loss")]
    assert times[-1] - times[0] == pytest.approx(0.5 * (len(rows) - 1), abs=1e-3)
    assert "holds files already" in refused(lambda: evaluation.main(["tensorboard", str(run)]))
    assert utils.read_jsonl(run / "metrics.jsonl") == rows
