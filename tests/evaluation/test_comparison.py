"""Seeds in one row, runs of different data, and where the tables are written."""

import json
import math
import re

import pytest
from fabricated import fabricate

import eval as front
from evaluation import answers, losses, report
from evaluation.comparison import comparison_rows, student_t
from evaluation.runs import Run


@pytest.mark.parametrize("freedom, value", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764),
                                            (5, 2.5706), (7, 2.3646), (9, 2.2622), (29, 2.0452)])
def test_student_t_quantiles(freedom, value):
    assert student_t(freedom) == pytest.approx(value, abs=1e-3)


def test_compare_groups_seeds_by_hand(tmp_path, capfd):
    """Losses 0.1, 0.2, 0.6: mean 0.3, std 0.2646, half width 4.3027 std / sqrt(3)."""
    runs = [fabricate(tmp_path / "bds" / f"seed-{seed}", seed=seed, upper=(1, loss))
            for seed, loss in enumerate((0.1, 0.2, 0.6))]
    runs.append(fabricate(tmp_path / "mix", method="mix", upper=(1, 0.4)))
    front.main(["compare", *map(str, runs), "--json", str(tmp_path / "c.json")])
    rows = json.loads((tmp_path / "c.json").read_text())
    assert [(r["name"], r["n"]) for r in rows] == [("bds", 3), ("mix", 1)]
    std = math.sqrt((0.04 + 0.01 + 0.09) / 2)
    half = 4.3027 * std / math.sqrt(3)
    assert rows[0]["upper_heldout"] == pytest.approx(
        {"mean": 0.3, "std": std, "low": 0.3 - half, "high": 0.3 + half, "n": 3})
    assert rows[1]["upper_heldout"] == {"mean": 0.4, "std": None, "low": None, "high": None, "n": 1}
    assert rows[0]["upper_heldout_per_token"]["mean"] == pytest.approx(0.31)
    text = capfd.readouterr().out
    assert "0.3000 ± 0.2646" in text and f"[{0.3 - half:.4f}, {0.3 + half:.4f}]" in text
    assert "sequence mean" in text and "token mean" in text


def test_a_value_that_some_seeds_lack_says_how_many_have_it(tmp_path, capfd):
    """Of three seeds one was not ranked by labels."""
    runs = [str(fabricate(tmp_path / "bds" / f"seed-{seed}", seed=seed, labels=seed != 2))
            for seed in range(3)]
    front.main(["compare", *runs])
    line = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("bds"))
    assert line.split()[1] == "3" and line.count("(of 2)") >= 1
    front.main(["compare", *runs[:2]])
    assert "(of" not in capfd.readouterr().out


def test_seeds_of_two_digits_and_no_clipping(tmp_path):
    runs = [Run(fabricate(tmp_path / "bds" / f"seed-{seed}", seed=seed, upper=(1, 0.1),
                          args={"clip": math.inf})) for seed in (10, 11, 12)]
    assert [(row["name"], row["n"]) for row in comparison_rows(runs)] == [("bds", 3)]


def test_seeds_under_a_mask_file_are_one_experiment(tmp_path):
    """What a run makes of the file and of its seed's rows is no other setting."""
    runs = [Run(fabricate(tmp_path / "x" / f"seed-{seed}", seed=seed, args={
        "mask": "ranking.jsonl", "masked_rows": f"hash {seed}", "keep_fraction": 0.8 - seed / 20}))
        for seed in (0, 1)]
    assert [(row["name"], row["n"]) for row in comparison_rows(runs)] == [("x", 2)]
    for run in runs:
        del run.args.masked_rows
    assert [row["n"] for row in comparison_rows(runs)] == [1, 1]


def test_two_rows_of_one_name_are_told_apart(tmp_path):
    runs = [Run(fabricate(tmp_path / "x" / f"seed-{seed}", seed=seed, args={"lr": lr}))
            for seed, lr in ((0, 0.1), (1, 0.1), (2, 0.2), (3, 0.2))]
    assert [row["name"] for row in comparison_rows(runs)] == [
        str(tmp_path / "x" / f"seed-{seed}") for seed in (0, 2)]
    runs = [Run(fabricate(tmp_path / name / "0", args={"lr": lr})) for name, lr in (
        ("a", 0.1), ("b", 0.2))]
    assert [row["name"] for row in comparison_rows(runs)] == [
        str(tmp_path / "a" / "0"), str(tmp_path / "b" / "0")]


def test_a_run_counts_once(tmp_path, refused):
    run = str(fabricate(tmp_path / "one" / "seed-0"))
    line = refused(lambda: front.main(["compare", run, f"{tmp_path}/one/../one/seed-0"]))
    assert "seed-0: named twice" in line
    again, other = (Run(fabricate(tmp_path / "one" / name, seed=seed)) for name, seed in (
        ("again", 0), ("seed-1", 1)))
    rows = comparison_rows([Run(run), again, other])
    assert [(row["name"], row["n"]) for row in rows] == [("one", 2), ("again", 1)]


def test_bad_input_is_one_line(tmp_path, refused):
    good, other = fabricate(tmp_path / "good"), fabricate(
        tmp_path / "other", args={"upper_heldout": "elsewhere.jsonl"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"data": {"upper_heldout": "c"}}))
    empty, unfinished = tmp_path / "empty", fabricate(tmp_path / "half", finished=False)
    empty.mkdir()
    for command in ("compare", "report"):
        line = refused(lambda c=command: front.main([c, str(good), str(other)]))
        assert "different data" in line and "held.jsonl" in line and "elsewhere.jsonl" in line
        assert "no config.json" in refused(lambda c=command: front.main([c, str(empty)]))
    assert "has not finished" in refused(lambda: front.main(["compare", str(unfinished)]))
    (unfinished / "metrics.jsonl").unlink()
    assert "no metrics.jsonl" in refused(lambda: front.main(["report", str(unfinished)]))
    assert "is a folder" in refused(lambda: front.main(
        ["report", str(good), "--out", str(tmp_path)]))
    for file in (unfinished / "weights").iterdir():
        file.unlink()
    assert "no weights/epoch" in refused(lambda: front.main(["ranking", str(unfinished)]))
    (good / "config.json").write_text("{")
    assert "not a run's configuration" in refused(lambda: front.main(["report", str(good)]))


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
    front.main(["compare", first, again, kept])
    front.main(["compare", first, run("seed", 1)])
    drawn = {"upper_heldout": None, "lower_limit": 40}  # a seed's own: what the seed draws
    front.main(["compare", run("drawn", **drawn), run(
        "drawn-1", 1, {"upper_heldout": "y", "lower": "y"}, **drawn)])
    toy = {"toy": True, "lower": None, "upper": None, "upper_heldout": None}
    front.main(["compare", run("toy", **toy), run(
        "toy-1", 1, {"upper_heldout": "y", "lower": "y", "lower_heldout": "y"}, **toy)])
    for name in ("upper_heldout", "lower"):
        assert f"of {name} changed" in refused(lambda n=name: front.main(
            ["compare", first, run(f"seed of {n}", 1, {n: "y"})]))
    other_seed = run("other", 1, {"upper_heldout": "z"})
    both = run("both", data={"lower": "x", "upper_heldout": "x"}, keep="k")
    for runs in ((first, edited), (other_seed, first, edited), (first, both)):
        line = refused(lambda r=runs: front.main(["compare", *r]))
        assert "different data (the rows of upper_heldout changed between them)" in line
    assert "of lower changed" in refused(lambda: front.main(
        ["compare", first, run("changed", data={"lower": "x"})]))


def test_runs_are_compared_on_the_sets_that_both_have(tmp_path, capfd, refused):
    def run(name, held_out=None):
        folder = fabricate(tmp_path / name, args={"lower_heldout": held_out, "method": name})
        config = json.loads((folder / "config.json").read_text())
        config["data"] |= {"lower_heldout": held_out} if held_out else {}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    without, clean, other = run("without"), run("clean", "c.jsonl"), run("other", "d.jsonl")
    front.main(["compare", without, clean])
    assert re.search(r"^clean +1 +0\.3000", capfd.readouterr().out, re.M)
    assert "lower_heldout: c.jsonl and d.jsonl" in refused(
        lambda: front.main(["compare", without, clean, other]))


def test_a_place_to_write_is_made_before_the_work(tmp_path, monkeypatch, refused):
    run, file = str(fabricate(tmp_path / "run")), tmp_path / "file"
    file.write_text("")
    for number, words in enumerate((
            ["compare", run, "--json"], ["report", run, "--out"],
            ["keep", run, "--keep-fraction", "0.5", "--out"])):
        front.main([*words, str(tmp_path / f"new{number}" / "deep" / "out.html")])
        assert (tmp_path / f"new{number}" / "deep" / "out.html").exists()

    def work(*_):
        raise AssertionError("too late")

    monkeypatch.setattr(losses, "load_trained", work)
    monkeypatch.setattr(answers, "side_by_side", work)
    monkeypatch.setattr(front, "comparison_rows", work)
    monkeypatch.setattr(report, "page", work)
    for words in (["losses", run, "--out"], ["answers", run, "--prompt", "x", "--out"],
                  ["compare", run, "--json"], ["report", run, "--out"],
                  ["keep", run, "--keep-fraction", "0.5", "--out"]):
        line = refused(lambda w=words: front.main([*w, str(file / "out.html")]))
        assert f"{file / 'out.html'}: its folder cannot be made" in line
        assert re.search("is (the ranking itself or )?a folder", refused(
            lambda w=words: front.main([*w, str(tmp_path)])))


def test_every_figure_of_losses_is_compared(tmp_path, capfd):
    """`eval.py losses` adds lower_refined, as a mean over sequences and over tokens."""
    run = fabricate(tmp_path / "run")
    (run / "losses.json").write_text(json.dumps({
        "lower_refined": 0.25, "lower_refined_per_token": 0.75, "base/lower_refined": 9.0}))
    row = comparison_rows([Run(run)])[0]
    assert (row["lower_refined"]["mean"], row["lower_refined_per_token"]["mean"]) == (0.25, 0.75)
    front.main(["compare", str(run)])
    assert "0.7500" in capfd.readouterr().out.split("token mean")[1]


def test_names_cannot_steer_a_terminal_or_pad_a_table(tmp_path, capfd):
    """Folders and kinds of faults are named by others."""
    run = fabricate(tmp_path / "run\x1b[2J\u202e*x*", kinds=("clean", "\x1b]0;cut" + "z" * 50_000))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(
        result | {"weight/auroc/" + "z" * 50_000: 0.5, "weight/recall/\x1b[2J**bold**": 0.5}))
    capfd.readouterr()
    for words in (["compare", str(run)], ["ranking", str(run)],
                  ["keep", str(run), "--keep-fraction", "0.5", "--out", str(tmp_path / "kept")]):
        front.main(words)
        out = capfd.readouterr().out
        assert "\x1b" not in out and "\u202e" not in out and len(out) < 3_000
    front.main(["report", str(run), "--out", str(tmp_path / "out.html")])
    table = (tmp_path / "out.md").read_text()
    assert "\x1b" not in table and "\u202e" not in table and len(table) < 3_000
    assert "\\*x\\*" in table and "\\*\\*bold\\*\\*" in table
    assert "z" * 100 not in (tmp_path / "out.html").read_text()
