"""The tables: one row of each on a tiny budget."""

import json
from pathlib import Path

import pytest
from conftest import make_rows, read_rows, write_rows

from paper import reproduce, statistics
from paper.__main__ import main
from paper.running import slug
from toy import corpus

TINY = "--epochs 1 --batch 8 --lora-rank 2 --micro-batch 8"


def test_orders_are_of_the_upper_loss_and_of_the_published_figures():
    results = {"BDS": [{"upper_heldout": 3.0}], "DSIR": [{"upper_heldout": 1.0}],
               "LESS": [{"upper_heldout": 2.0}], "not published": [{"upper_heldout": 0.0}]}
    orders = reproduce.orders_of(results, reproduce.PUBLISHED["table1"],
                                 reproduce.PUBLISHED_NAMES["table1"])
    assert orders == {"here": ["DSIR", "LESS", "BDS"], "Pythia-1b": ["BDS", "DSIR", "LESS"],
                      "Llama-8b": ["BDS", "LESS", "DSIR"]}


def tiny(here, folders, pairs=False):
    write_rows(here / "lower.jsonl", make_rows(24, 1))
    rows = make_rows(16, 2)
    if pairs:
        rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "no " + str(n)}
                for n, row in enumerate(rows)]
    write_rows(here / "upper.jsonl", rows[:12])
    write_rows(here / "heldout.jsonl", rows[12:])
    return (f"--model {folders['llama']} --lower lower.jsonl --upper upper.jsonl "
            "--upper-heldout heldout.jsonl --cache-dir cache")


def test_one_row_of_each_kind_of_table1(here, folders, capfd, refused):
    """Values come from the runs, budgets are equal, and the README gets the stored figures.

    Mixing is not asked for: it is run for the budget alone.
    """
    arguments = ["table1", "--scale", "small", "--data", tiny(here, folders), "--train", TINY,
                 "--seeds", "1", "--workers", "1", "--only", "random; BDS"]
    main(arguments)
    text = capfd.readouterr().out
    stored = json.loads((here / "results" / "small_table1.json").read_text())
    assert set(stored["results"]) == {"base model", "random", "BDS"}
    for method, folder in (("BDS", "bds"), ("random", "random")):
        run = json.loads((here / "runs/small" / folder / "seed-0" / "result.json").read_text())
        assert stored["results"][method][0]["upper_heldout"] == run["upper_heldout"]
        assert f"{run['upper_heldout']:.3f}" in text
    assert stored["results"]["base model"][0]["upper_heldout"] == run["base/upper_heldout"]
    assert "0.80 / 0.893" in text  # the paper's BDS beside ours
    assert "1.0 of these 1 claims" in text  # one seed says nothing

    mixing = json.loads((here / "runs/small/mixing-rho-1/seed-0/result.json").read_text())
    read = [row["tokens"] for row in read_rows(here / "runs/small/random/seed-0/metrics.jsonl")]
    assert sum(read[:-1]) < mixing["lower_tokens"] <= sum(read)

    (here / "README.md").write_text("before\n<!-- begin small_table1 upper_heldout -->\nold\n"
                                    "<!-- end small_table1 -->\nafter\n")
    main(["readme"])
    page = (here / "README.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert f"| BDS | {stored['results']['BDS'][0]['upper_heldout']:.3f} |" in page
    assert stored["command"] in page and "--only" in stored["command"]

    made = (here / "runs/small/bds/seed-0/result.json").stat().st_mtime_ns
    main(arguments)  # finished runs are not run again
    assert (here / "runs/small/bds/seed-0/result.json").stat().st_mtime_ns == made

    stored = (here / "results" / "small_table1.json").read_text()
    logs = {log: log.read_text() for log in (here / "runs/small").rglob("*.log")}
    assert len(logs) == 4 and all(text.startswith("$ ") for text in logs.values())
    other = [*arguments[:-1], "BDS", "--train", TINY + " --lr 5"]
    line = refused(lambda: main(other))
    assert "runs/small/bds/seed-0: made by another command" in line and "--lr 5" in line
    assert "another --name" in line
    assert (here / "results" / "small_table1.json").read_text() == stored
    log = here / "runs/small/bds/seed-0.log"
    log.write_text(logs[log].split("\n", 1)[1])  # of a version that did not write the command
    main(other)


def test_a_table_is_made_in_pieces(here, monkeypatch, capfd, refused):
    """Other methods of the same setting stay, what made each is said; a made one is made anew."""
    monkeypatch.setattr(reproduce, "execute", lambda args, methods, *_, **__: {
        name: [Path(name) / str(seed) / "result.json" for seed in range(args.seeds)]
        for name in methods})
    monkeypatch.setattr(statistics, "read_result", lambda folder: {
        "upper_heldout": level[0] + int(folder.name), "base/upper_heldout": 9.0})
    words, level = ["table1", "--scale", "small", "--seeds", "2", "--name", "own"], [1.0]
    main([*words, "--only", "online R=10% G=1", "--add"])  # nothing is there yet
    first = json.loads((here / "results/own_table1.json").read_text())
    assert "pieces" not in first and "--add" not in first["command"]
    (here / "results/own_table1.json").write_text(json.dumps(first | {"commit": "first"}))
    level[0] = 2.0
    main([*words, "--only", "DSIR; BDS", "--add"])
    assert "online is better than offline" in capfd.readouterr().out
    second = json.loads((here / "results/own_table1.json").read_text())
    assert list(second["results"]) == ["base model", "DSIR", "BDS", "online R=10% G=1"]
    assert [run["upper_heldout"] for run in second["results"]["BDS"]] == [2.0, 3.0]
    assert second["results"]["online R=10% G=1"] == first["results"]["online R=10% G=1"]
    assert "--only 'DSIR; BDS; online R=10% G=1'" in second["command"]
    assert [(piece["methods"], piece["commit"]) for piece in second["pieces"]] == [
        (["online R=10% G=1"], "first")]
    (here / "results/own_table1.json").write_text(json.dumps(second | {"commit": "second"}))
    level[0] = 3.0
    main([*words, "--only", "online R=10% G=1; BDS", "--add"])
    third = json.loads((here / "results/own_table1.json").read_text())
    assert [(piece["methods"], piece["commit"]) for piece in third["pieces"]] == [
        (["DSIR"], "second")]
    assert third["results"]["online R=10% G=1"][0]["upper_heldout"] == 3.0
    (here / "README.md").write_text("<!-- begin own_table1 -->\n<!-- end own_table1 -->\n")
    main(["readme"])
    assert "DSIR: " in (page := (here / "README.md").read_text()) and "commit second" in page
    monkeypatch.setattr(reproduce, "execute", None)  # refused before anything runs
    line = refused(lambda: main([*words, "--train", "--lr 5", "--only", "BDS", "--add"]))
    assert "own_table1.json was made by" in line and "another --name" in line


@pytest.mark.parametrize("target", ["table3", "table3-dpo"])
def test_one_row_of_each_safety_table(target, here, folders, capsys):
    dpo = target == "table3-dpo"
    main([target, "--scale", "small", "--data", tiny(here, folders, pairs=dpo),
          "--train", TINY + (" --upper-loss dpo" if dpo else ""),
          "--online", "--first-refresh 1 --k-gen 2 --max-new-tokens 4", "--seeds", "1",
          "--workers", "1", "--only", "online dynamic"])
    stored = json.loads((here / f"results/small_{target.replace('-', '_')}.json").read_text())
    run = stored["results"]["online dynamic"][0]
    folder = here / "runs/small" / target / "online-dynamic/seed-0"
    saved = json.loads((folder / "result.json").read_text())
    assert run["upper_heldout"] == saved["upper_heldout"] > 0
    assert ("upper_accuracy" in run) == dpo
    assert ("0.43 / 1.37" if dpo else "0.82 / 1.02") in capsys.readouterr().out


def test_a_failing_run_is_named_with_its_last_line(here, refused):
    line = refused(lambda: main(
        ["table1", "--scale", "small", "--only", "BDS", "--seeds", "1", "--data",
         "--lower gone.jsonl --upper gone.jsonl --model gone"]))
    assert "train_offline.py" in line and "exit code 2" in line and "gone" in line


def test_epochs_are_in_order_and_the_last_is_compared_with_the_first(here, monkeypatch, capsys):
    """Twelve epochs: the twelfth is behind the second, not between the first and the second."""

    monkeypatch.setattr(reproduce, "execute", lambda args, methods: {
        name: [here / slug(name) / str(seed) / "result.json" for seed in range(args.seeds)]
        for name in methods})
    monkeypatch.setattr(reproduce, "Run", lambda folder: folder)
    monkeypatch.setattr(reproduce, "ranking_over_epochs", lambda folder: [
        {"epoch": epoch, "group": "all", "top_length": 20.0 - epoch} for epoch in range(1, 13)])
    main(["ranking", "--only", "BDS"])
    stored = json.loads((here / "results/toy_ranking.json").read_text())
    assert list(stored["columns"]) == [f"epoch {n}" for n in range(1, 13)]
    assert stored["claims"] == [["(control) BDS: short answers come first", "0 of 4", "+11.0000",
                                 "0.125"]]
    assert (here / "results/toy_ranking.png").exists()


def test_on_the_toy_the_judge_is_the_truth(here, monkeypatch, capsys):
    """Right against wrong 2, the other way round 1, alike 1.5; no judge's command is printed."""
    from evaluation import winrate

    rows = corpus.make_rows(seed=0)["heldout"][:3]
    folder = here / "runs/toy/bds"
    folder.mkdir(parents=True)
    ours, theirs = [True, False, True], [False, True, True]
    for name, right in (("answers-seed-0", ours), ("answers-base", theirs)):
        winrate.write_list(folder / f"{name}.json", [
            {"instruction": row["prompt"], "output": row["answer"] if good else "no"}
            for row, good in zip(rows, right, strict=True)])
    file = folder / "seed-0" / "result.json"
    monkeypatch.setattr(reproduce, "execute", lambda *_: {"BDS": [file]})
    main(["winrate", "--seeds", "1", "--list"])
    assert " judge " not in capsys.readouterr().out
    monkeypatch.setattr(reproduce, "run_all", lambda *_: None)
    main(["winrate", "--seeds", "1"])
    stored = json.loads((here / "results/toy_winrate.json").read_text())["results"]
    assert stored == {"BDS": [{"win_rate": 50.0, "n_draws": 1, "n_missing": 0}]}


def test_verdicts_that_are_missing_are_asked_for_again_and_counted(here, monkeypatch, capsys):
    from evaluation import winrate

    folder = here / "runs/small/bds"
    folder.mkdir(parents=True)
    verdicts = folder / "answers-seed-0.judged.json"
    winrate.write_list(verdicts, [{"instruction": "a?", "preference": 2},
                                  {"instruction": "b?", "preference": None}])
    answer, asked = verdicts.read_bytes(), []

    def judge(commands, workers):
        asked.append([file for file in commands if file == verdicts and not file.exists()])
        verdicts.write_bytes(answer)

    monkeypatch.setattr(reproduce, "execute", lambda *_: {"BDS": [folder / "seed-0/result.json"]})
    monkeypatch.setattr(reproduce, "run_all", judge)
    main(["winrate", "--scale", "small", "--seeds", "1", "--data", "--model m", "--judge",
          "--local m", "--prompts", "p.json"])
    assert asked == [[], [verdicts]]
    stored = json.loads((here / "results/small_winrate.json").read_text())["results"]
    assert stored == {"BDS": [{"win_rate": 100.0, "n_draws": 0, "n_missing": 1}]}
    assert "stored: results/small_winrate.json\n" in capsys.readouterr().out
    main(["winrate", "--scale", "small", "--seeds", "1", "--data", "--model n", "--judge",
          "--local m", "--prompts", "p.json"])
    assert "in place of what was made by: python -m paper winrate" in capsys.readouterr().out


def test_eq_right_answers_of_the_toy(tmp_path):
    """Precision of the recommendation against always and never replacing, by counting."""
    prompt = "Sort the list: 4 1 7 3"
    right, contrary = corpus.answers(prompt)
    rows = [{"prompt": prompt, "response": old, "refined": new, "recommended": choice}
            for old, new, choice in (
                (right, right, "refined"), (right, contrary, "refined"),
                (contrary, right, "refined"), (contrary, right, "original"),
                (contrary, "1 1 1 1", "undecided"), (right, None, "original"))]

    def found(rows):
        write_rows(tmp_path / "curated.jsonl", rows)
        return reproduce.right_answers(tmp_path)

    assert found(rows) == {
        "refined/right_recommended": 2 / 5, "refined/right_always": 3 / 5,
        "refined/right_never": 2 / 5, "refined/precision": 2 / 3, "refined/repaired": 2 / 3,
        "refined/broken": 1 / 2}
    sure = found(rows[:2])  # no original was wrong: none can be repaired
    assert sure["refined/repaired"] is None and sure["refined/broken"] == 1 / 2
    assert found(rows[3:])["refined/precision"] is None
