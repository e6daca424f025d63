"""Selectors, the curated set, ablations and controls."""

import json
import shlex
from pathlib import Path

import pytest
from conftest import write_rows
from test_plans import SPACES

import train_offline
import utils
from paper import experiments, results
from paper.__main__ import main
from paper.running import slug
from toy import corpus


def test_flags_are_dropped_by_word():
    words = shlex.split(SPACES + " --lower-heldout h.jsonl --keep --lower")
    assert results.without_flags(
        words, "--lower", "--lower-limit", "--lower-columns") == shlex.split(
        "--model m --upper up.jsonl --lower-heldout h.jsonl --keep")


@pytest.fixture
def curated_commands(here, monkeypatch):
    """curated_commands(*flags): the commands on curated sets, their online runs not made."""
    monkeypatch.setattr(experiments, "execute", lambda args, methods, also_rank: {
        name: [Path("runs") / args.name / name / "result.json"] for name in (*methods, *also_rank)})
    monkeypatch.setattr(experiments, "budget_of", lambda folder: 100)
    monkeypatch.setattr(experiments, "rethreshold", lambda *_: None)
    monkeypatch.setattr(experiments, "export", lambda *_: None)

    def commands(*words):
        plans = []

        def stop(plan, workers):
            plans.append(plan)
            raise utils.UserError("enough")

        monkeypatch.setattr(experiments, "run_all", stop)
        with pytest.raises(utils.UserError, match="enough"):
            main(["curated", "--seeds", "1", *words])
        return [shlex.split(command) for command in plans[0].values()]
    return commands


def test_the_curated_sets_commands_parse(curated_commands):
    """The rewrites are a file of their own: none of the raw rows' flags is left."""
    *raw, rewritten = [train_offline.parse_args(words[1:]) for words in curated_commands(
        "--scale", "small", "--name", "my runs", "--data", SPACES)]
    assert len(raw) == 3 and all(
        (args.lower, args.lower_limit, args.lower_columns, args.token_budget) ==
        ("my  rows.jsonl", 20, "prompt=a question,response=b", 100) for args in raw)
    assert all("my runs" in args.keep for args in raw)
    assert rewritten.lower.endswith("/curated.prompt-completion.jsonl")
    assert (rewritten.lower_limit, rewritten.lower_columns, rewritten.keep) == (None, None, None)
    assert rewritten.upper == "up.jsonl"


def test_the_toys_curated_sets_are_held_to_its_own_rows(curated_commands, here):
    *raw, rewritten = curated_commands("--train", "--epochs 2")
    for words in (*raw, rewritten):
        assert words[words.index("--preset") + 1] == "toy"
        assert words[words.index("--epochs") + 1] == "2"
        for flag, name in (("--upper-heldout", "heldout"), ("--lower-heldout", "lower_heldout")):
            assert utils.read_jsonl(words[words.index(flag) + 1]) == corpus.make_rows(seed=0)[name]
    for words in raw:
        assert utils.read_jsonl(words[words.index("--lower") + 1]) == corpus.make_rows(seed=0)[
            "lower"]
    assert rewritten.count("--lower") == 1 and "--keep" not in rewritten
    assert rewritten[rewritten.index("--lower") + 1].endswith("curated.prompt-completion.jsonl")


def test_ranking_scores_without_kinds(tmp_path):
    rows = [{"row_id": n, "score": float(n), "bad": n < 2} for n in range(5)]
    assert experiments.ranking_scores(write_rows(tmp_path / "kept.jsonl", rows)) == {
        "auroc": 1.0, "precision": 1.0, "auroc/bad": 1.0, "recall/bad": 1.0}


def test_ablations_compare_with_the_first_label_and_with_dropping(here, monkeypatch, capsys):
    losses = {"80 % bad: BDS": 0.4, "80 % bad: mixing rho=0.5": 0.5,
              "80 % bad: online R=10% G=1": 0.2, "80 % bad: control: drop": 0.3}

    def finished(args, methods, toy_rows):
        assert set(methods) == set(losses) and set(toy_rows.values()) == {"--noise 0.8"}
        for method in methods:
            for seed in range(args.seeds):
                run = here / slug(method) / str(seed)
                run.mkdir(parents=True)
                (run / "result.json").write_text(json.dumps(
                    {"seed": seed, "upper_heldout": losses[method] + seed}))
                (run / "metrics.jsonl").write_text(json.dumps(
                    {"omega/ess_share": 0.5, "answers_right/clean": 0.75}) + "\n")
        return {method: [here / slug(method) / str(seed) / "result.json"
                         for seed in range(args.seeds)] for method in methods}

    monkeypatch.setattr(experiments, "execute", finished)
    main(["ablations", "--only", "80 % bad"])
    stored = json.loads((here / "results/toy_ablations.json").read_text())
    assert [claim[:2] for claim in stored["claims"]] == [
        ["80 % bad: mixing rho=0.5 below BDS", "0 of 4"],
        ["80 % bad: online R=10% G=1 below BDS", "4 of 4"],
        ["80 % bad: control: drop below BDS", "4 of 4"],
        ["80 % bad: online R=10% G=1 below control: drop", "4 of 4"]]
    assert stored["claims"][-1][1:] == ["4 of 4", "-0.1000", "0.125"]
    assert "0.5 of these 4 claims" in capsys.readouterr().out
    assert stored["results"]["80 % bad: BDS"][1]["right"] == 0.75
    assert (here / "results/toy_ablations.png").exists()


def test_controls_use_the_finished_runs_and_rows_of_their_own(here, monkeypatch):
    asked = {}

    def stop(args, methods, toy_rows):
        asked.update({name: (command, toy_rows[name]) for name, command in methods.items()})
        raise utils.UserError("enough")

    monkeypatch.setattr(experiments, "execute", stop)
    with pytest.raises(utils.UserError, match="enough"):
        main(["controls"])
    assert asked["BDS"] == ("train_offline.py --omega-start zero", "")
    assert asked["BDS corrected"] == ("train_offline.py --omega-start zero --correction 0.7", "")
    assert asked["even, unrelated upper: BDS"][1].split() == [
        "--noise", "0.6", "--contrary", "0.6666667", "--upper", "unrelated"]


def test_selectors_are_runs_and_baselines_that_only_names(here, capsys):
    main(["selectors", "--list", "--seeds", "1", "--only", "BDS corrected; CoLoR; RDS+; loss"])
    lines = [line.split()[1:4] for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["train_offline.py", "train_offline.py", "-m", "-m"]
    assert [line[1:] for line in lines[2:]] == [["baselines", "rds"], ["baselines", "loss"]]


def test_another_share_has_runs_of_its_own(curated_commands):
    """The commands are alike but for the files that say what is kept."""
    outs = [{words[words.index("--out") + 1] for words in curated_commands(
        "--keep-fraction", share)} for share in ("0.5", "0.7")]
    assert len(outs[0]) == len(outs[1]) == 4 and not outs[0] & outs[1]


def test_rows_without_truth_have_no_ranking_metrics(tmp_path):
    file = write_rows(tmp_path / "loss.jsonl", [{"score": 1.0, "bad": True}, {"score": 2.0}])
    with pytest.raises(utils.UserError, match="the lower rows have no column `bad`"):
        experiments.ranking_scores(file)


def test_color_is_what_the_trusted_rows_take_off_a_loss(tmp_path):
    """The bad row is the one whose loss falls least, whatever it was."""
    rows = [{"base_loss": 3.0, "final_loss": 2.0, "bad": False},
            {"base_loss": 1.0, "final_loss": 0.9, "bad": True},
            {"base_loss": 1.5, "final_loss": 1.2, "bad": False}]
    file = write_rows(tmp_path / "weights.jsonl", rows)
    assert experiments.ranking_scores(file, experiments.color)["auroc"] == 1.0


# --- last: minutes --------------------------------------------------------------------------------

@pytest.mark.slow
def test_selectors_and_the_curated_set_on_the_toy(here, capsys):
    """One epoch of one seed: tables are there, rows that should be bad are, budgets are equal."""
    common = ["--seeds", "1", "--train", "--epochs 1"]
    main(["selectors", *common])
    stored = json.loads((here / "results/toy_selectors.json").read_text())["results"]
    assert stored["loss"][0]["auroc/plain"] > 0.95 and stored["omega"][0]["auroc"] > 0.7
    assert abs(stored["random"][0]["auroc"] - 0.5) < 0.05
    assert all(run[0]["seconds"] > 0 for run in stored.values())
    main(["curated", *common])
    stored = json.loads((here / "results/toy_curated.json").read_text())["results"]
    assert stored["raw set"][0]["bad_share"] == pytest.approx(0.4)
    assert stored["top k by BDS"][0]["bad_share"] < stored["random k"][0]["bad_share"]
    assert stored["... with its rewrites"][0]["rows"] >= stored["top k by BDS"][0]["rows"]
