"""Training on what each ranking keeps: the rankings, the commands, the table."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from conftest import make_rows, write_rows
from test_plans import SPACES

import ranking
import train_offline
import utils
from paper import kept
from paper.__main__ import main

ROWS = [{"row_id": n, "hash": f"h{n}", "surprise": float(n % 7 - 9), "loss": 2.0 - n / 20,
         "reason": "end" if n % 7 == 6 else None, "score": -float(n % 7), "length": 5 + n * n % 30,
         "bad": n % 7 in (5, 6), "kind": "cut"} for n in range(40)]


def test_rankings_are_what_they_say():
    found = kept.rankings_of(["labels"], ROWS, 0.5, 3)
    assert set(found) == {*kept.RANKINGS, *kept.AS_MANY, "good rows"}
    order = {name: values.argsort(descending=True).tolist() for name, values in found.items()}
    assert [ROWS[n]["bad"] for n in order["labels"]] == [False] * 30 + [True] * 10
    assert order["loss"] == list(range(39, -1, -1))
    bad = [n for n in range(40) if ROWS[n]["reason"]]
    last = order["bad last"]
    assert sorted(last[-len(bad):]) == bad
    assert last[:-len(bad)] == sorted(last[:-len(bad)], reverse=True)
    assert [ROWS[n]["surprise"] for n in last[-len(bad):]] == sorted(
        ROWS[n]["surprise"] for n in bad)
    share = [sum(other["loss"] >= row["loss"] for other in ROWS) / 40 for row in ROWS]
    assert torch.allclose(found["joined"], torch.tensor([
        -row["surprise"] for row in ROWS]).double() + torch.tensor(share).double().log())
    chosen = ranking.rank_rows(found["joined"]) <= 20
    matched = ranking.rank_rows(found["length-matched"]) <= 20
    lengths = torch.tensor([row["length"] for row in ROWS])
    for part in lengths.argsort(stable=True).tensor_split(10):
        assert matched[part].sum() == chosen[part].sum()
    assert (matched != chosen).any()
    unlabelled = [{key: value for key, value in row.items() if key != "bad"} for row in ROWS]
    assert "labels" not in kept.rankings_of([], unlabelled, 0.5, 3)


def test_what_is_kept_is_a_share_or_the_rows_that_do_not_look_bad(tmp_path):
    utils.write_jsonl(tmp_path / "tests.jsonl", ROWS)
    names = [*kept.AS_MANY, "good rows", "joined", "loss"]
    kept.write_kept(names, tmp_path / "tests.jsonl", 0.5, 3, tmp_path)
    chosen = {name: {row["row_id"] for row in utils.read_jsonl(
        kept.kept_file(tmp_path, name, 3)) if row["kept"]} for name in names}
    assert chosen["unflagged"] == {n for n in range(40) if n % 7 != 6}
    assert chosen["good rows"] == {n for n in range(40) if n % 7 < 5}
    assert chosen["loss, as many"] == set(range(5, 40)) and chosen["loss"] == set(range(20, 40))
    assert len(chosen["joined"]) == 20


def test_the_commands_parse_and_name_the_rankings(tmp_path, monkeypatch, capfd, refused,
                                                  folders):
    monkeypatch.chdir(tmp_path)
    words = ["kept", "--scale", "small", "--seeds", "2", "--name", "my runs", "--data", SPACES]
    main([*words, "--list"])
    note, *lines = sorted(capfd.readouterr().out.splitlines())
    assert note.startswith("# TOKENS and the --keep files")
    lines = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert len(lines) == 2 * (2 + len(kept.RANKINGS))
    for line in lines:
        line[:] = [word.replace("TOKENS", "9") for word in line]
        if line[1] == "train_offline.py":
            args = train_offline.parse_args(line[2:])
            assert args.method == "sft" and args.skip_scores
    assert sum("--keep" in line for line in lines) == 2 * len(kept.RANKINGS)
    main([*words, "--list", "--only", "unflagged; labels"])
    assert capfd.readouterr().out.count("--keep 'runs/my") == 4
    plain = write_rows(tmp_path / "plain.jsonl", make_rows(20, 1))
    assert "no column `bad`, so there are no labels" in refused(lambda: main([
        "kept", "--scale", "small", "--data",
        f"--model {folders['llama']} --lower {plain} --upper {plain} --allow-overlap"]))
    assert not list(tmp_path.glob("runs/*"))
    assert "between 0 and 1" in refused(lambda: main([*words, "--keep-fraction", "1"]))


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """All runs are done: the held-out loss is 2, less 0.1 a good row in ten that is kept."""
    monkeypatch.chdir(tmp_path)

    def execute(args, methods, also_rank):
        folder = Path("runs") / args.name
        run_all({folder / name / f"seed-{seed}" / "result.json": "--method sft"
                 for name in methods for seed in range(args.seeds)}, 1)
        files = {name: [folder / name / f"seed-{seed}" / "result.json"
                        for seed in range(args.seeds)] for name in methods}
        return files | {"tests": [write_rows(folder / f"tests-{seed}.jsonl", ROWS)
                                  for seed in range(args.seeds)]}

    def run_all(plan, workers):
        for file, command in plan.items():
            rows, words = ROWS, shlex.split(command)
            if "--keep" in words:
                assert words[words.index("--token-budget") + 1] == "3000"
                rows = [ROWS[row["row_id"]] for row in utils.read_jsonl(
                    words[words.index("--keep") + 1]) if row["kept"]]
            file.parent.mkdir(parents=True, exist_ok=True)
            good = sum(not row["bad"] for row in rows) / len(rows)
            file.write_text(json.dumps({"upper_heldout": 2 - good, "rows": len(rows),
                                        "lower_tokens": 1000}))
            (file.parent / "config.json").write_text(json.dumps({"args": {"epochs": 3}}))
            write_rows(file.with_name("metrics.jsonl"), [{"step": 0}, {"step": 4}])

    for name, function in (("execute", execute), ("run_all", run_all)):
        monkeypatch.setattr(kept, name, function)
    monkeypatch.setattr(kept, "print_runs", lambda *_: None)
    return tmp_path


def test_the_table_of_finished_runs(finished, capfd):
    main(["kept", "--seeds", "3", "--keep-fraction", "0.5"])
    stored = json.loads((finished / "results/toy_kept.json").read_text())
    assert set(stored["results"]) == {kept.ALL, *kept.RANKINGS}
    labels, every = stored["results"]["labels"][1], stored["results"][kept.ALL][1]
    assert (labels["bad_share"], labels["rows"], labels["steps"]) == (0, 20, 5)
    assert (every["bad_share"], every["upper_heldout"]) == (0.25, 1.25)
    claims = {claim: seeds for claim, seeds, *_ in stored["claims"]}
    assert claims["joined is better than all rows"] == "3 of 3"
    assert len(claims) == 10 and "held-out loss" in capfd.readouterr().out
    half = {path: path.read_bytes() for path in finished.glob("runs/toy/kept-0.5/*.jsonl")}
    main(["kept", "--seeds", "3"])  # another share has rankings and runs of its own
    assert half and all(path.read_bytes() == content for path, content in half.items())
    assert (finished / "runs/toy/kept-0.7/labels/seed-2/result.json").exists()


def test_minutes_are_printed_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def stop(*_, **__):
        raise utils.UserError("enough")

    monkeypatch.setattr(kept, "execute", stop)
    with pytest.raises(utils.UserError, match="enough"):
        main(["kept", "--seeds", "2", "--workers", "1"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("2 seeds x 8 runs x ") and "tokens/s" in printed[-2]
