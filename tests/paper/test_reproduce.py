"""The tables: commands that parse, statistics by hand, one row of each table on a tiny budget."""

import importlib
import itertools
import json
import re
import shlex
import statistics
import subprocess

import pytest
from conftest import make_rows, read_rows, write_rows

import eval as evaluation
import train_offline
import train_online
import utils
from paper import experiments, reproduce
from paper import running as runs

TINY = "--epochs 1 --batch 8 --lora-rank 2 --micro-batch 8"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- statistics -----------------------------------------------------------------------------------

def test_paired_is_the_sign_flip_test_by_enumeration():
    first, second = [3.0, 1.0, 4.0, 1.5], [2.0, 1.5, 2.0, 1.0]
    d = [a - b for a, b in zip(first, second, strict=True)]  # 1, -0.5, 2, 0.5: sum 3
    extreme = sum(abs(sum(s * x for s, x in zip(signs, d, strict=True))) >= 3
                  for signs in itertools.product((1, -1), repeat=4))
    assert extreme == 6  # +3 twice, +4 once, and their mirror images
    assert runs.paired(first, second) == (0.75, extreme / 16)
    assert runs.paired([1, 1, 1, 1], [2, 2, 2, 2]) == (-1.0, 0.125)  # the least of 4


@pytest.mark.parametrize(("first", "word"), [
    ([0.1, 0.2, 0.3, 0.4], "holds"), ([1.1, 1.2, 1.3, 1.4], "does not hold"),
    ([0.1, 0.2, 0.3, 1.4], "not resolved"), ([1.0] * 4, "not resolved")])
def test_verdict_asks_for_every_seed(first, word):
    assert runs.verdict(first, [1.0] * 4)[0] == word
    assert runs.verdict(first[:3], [1.0] * 3)[0] == "not resolved"  # too few to say


def test_cells_are_mean_and_sample_deviation_of_what_was_measured():
    values = [1.0, 2.0, 4.0]
    assert runs.cell([*values, None]) == f"{7 / 3:.3f} ± {statistics.stdev(values):.3f}"
    assert (runs.cell([2.0]), runs.cell([None])) == ("2.000", "-")
    assert (runs.cell([99.0, 101.0]), runs.cell([136.91])) == ("100 ± 1", "137")


def test_masked_rows_and_faults_that_they_alone_have_are_left_out():
    run = {"base/upper_heldout": 1.0, "weight/auroc": 0.5, "weight/auroc/plain": 0.6,
           "base/auroc/contrary": 0.7, "weight/recall/plain": 0.8}
    assert runs.prefer_unmasked(run) == run  # an offline run
    assert runs.prefer_unmasked(run | {"weight_unmasked/auroc": 0.9, "base_unmasked/auroc": None}
                                ) == {"base/upper_heldout": 1.0, "weight/auroc": 0.9,
                                      "base/auroc": None}


def test_orders_are_of_the_upper_loss_and_of_the_published_figures():
    results = {"BDS": [{"upper_heldout": 3.0}], "DSIR": [{"upper_heldout": 1.0}],
               "LESS": [{"upper_heldout": 2.0}], "not published": [{"upper_heldout": 0.0}]}
    orders = reproduce.orders_of(results, reproduce.PUBLISHED["table1"],
                                 reproduce.PUBLISHED_NAMES["table1"])
    assert orders == {"here": ["DSIR", "LESS", "BDS"], "Pythia-1b": ["BDS", "DSIR", "LESS"],
                      "Llama-8b": ["BDS", "LESS", "DSIR"]}


# --- plans ----------------------------------------------------------------------------------------

TARGETS = [("reproduce", target, scale) for target in ("table1", "table3", "table3-dpo")
           for scale in ("toy", "paper")] + [
    ("reproduce", "table1", "small"), ("reproduce", "demo", "toy"), ("reproduce", "ranking", "toy"),
    ("experiments", "selectors", "toy"), ("experiments", "ablations", "toy"),
    ("experiments", "controls", "toy")]


@pytest.mark.parametrize(("script", "target", "scale"), TARGETS)
def test_every_planned_command_parses(script, target, scale, here, capsys):
    """Also those of the paper's scale, which no test can run."""
    importlib.import_module(f"paper.{script}").main(
        [target, "--scale", scale, "--list", "--seeds", "1"])
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines)) > 2
    outs = []
    for line in lines:
        python, name, *words = shlex.split(line.replace("TOKENS", "1000"))
        args = importlib.import_module(name.removesuffix(".py")).parse_args(words)
        assert python == "python" and args.seed == 0
        outs.append(args.out)
    assert len(outs) == len(set(outs))  # no two runs share a folder


def test_a_methods_own_flags_win_over_the_scales(here, capsys):
    experiments.main(["ablations", "--list", "--seeds", "1", "--only", "K_gen (R = 40 %)"])
    words = [shlex.split(line)[2:] for line in capsys.readouterr().out.splitlines()]
    assert sorted(train_online.parse_args(w).k_gen for w in words) == [5, 25, 75, 225]


SPACES = ("--model m --lower 'my  rows.jsonl' --lower-limit=20 --lower-columns "
          "'prompt=a question,response=b' --upper up.jsonl")


def test_names_and_files_with_spaces_stay_one_word(here, capsys, monkeypatch):
    common = ["--name", "my runs", "--scale", "small", "--list", "--seeds", "1", "--data", SPACES]
    reproduce.main(["table1", "--only", "LESS; BDS", *common])
    for line in capsys.readouterr().out.splitlines():
        _, name, *words = shlex.split(line.replace("TOKENS", "1000"))
        args = importlib.import_module(name.removesuffix(".py")).parse_args(words)
        assert args.lower == "my  rows.jsonl" and args.lower_limit == 20
        assert args.lower_columns == "prompt=a question,response=b"
        assert args.out.startswith("runs/my runs/")
    monkeypatch.setattr(reproduce, "execute", lambda args, methods, folder: {
        name: [folder / runs.slug(name) / "seed-0" / "result.json"] for name in methods})
    reproduce.main(["qa", "--only", "BDS", "--qa", "--local 'my questions'", *common])
    reproduce.main(["examples", "--only", "BDS", "--prompts", "my prompts.json", *common])
    reproduce.main(["winrate", "--only", "BDS", "--prompts", "my prompts.json", "--judge",
                    "--local 'my judge'", *common])
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    by_name = [evaluation.parse_args(line[2:]) for line in words if line[1] == "eval.py"]
    assert [args.command for args in by_name] == ["qa", "qa", "answers"]
    assert by_name[0].runs == "runs/my runs/bds/seed-0" and by_name[0].local == "my questions"
    assert by_name[2].prompts == "my prompts.json"
    assert [line[3] for line in words if line[1] == "winrate.py"] == [
        "runs/my runs/bds/seed-0", "runs/my runs/bds/seed-0",
        "runs/my runs/bds/answers-seed-0.json"]
    assert "my judge" in words[-1]


def test_flags_are_dropped_by_word():
    words = shlex.split(SPACES + " --lower-heldout h.jsonl --keep --lower")
    assert experiments.without(words, "--lower", "--lower-limit", "--lower-columns") == shlex.split(
        "--model m --upper up.jsonl --lower-heldout h.jsonl --keep")


def test_the_curated_sets_commands_parse(here, monkeypatch):
    """The rewrites are a file of their own: none of the raw rows' flags is left."""
    monkeypatch.setattr(experiments, "execute", lambda args, methods, folder, also_score: {
        name: [folder / name / "result.json"] for name in (*methods, *also_score)})
    monkeypatch.setattr(experiments, "budget_of", lambda folder: 100)
    monkeypatch.setattr(experiments.compare, "keep", lambda *_: None)
    plans = []

    def stop(plan, workers):
        plans.append(plan)
        raise utils.UserError("enough")

    monkeypatch.setattr(experiments, "run_all", stop)
    with pytest.raises(utils.UserError, match="enough"):
        experiments.main(["curated", "--scale", "small", "--name", "my runs", "--seeds", "1",
                          "--data", SPACES])
    *raw, rewritten = [train_offline.parse_args(shlex.split(command)[1:])
                       for command in plans[0].values()]
    assert len(raw) == 3 and all(
        (args.lower, args.lower_limit, args.lower_columns, args.token_budget) ==
        ("my  rows.jsonl", 20, "prompt=a question,response=b", 100) for args in raw)
    assert all("my runs" in args.keep for args in raw)
    assert rewritten.lower.endswith("/curated.prompt-completion.jsonl")
    assert (rewritten.lower_limit, rewritten.lower_columns, rewritten.keep) == (None, None, None)
    assert rewritten.upper == "up.jsonl"


def test_published_settings_of_the_paper_scale(here, capsys):
    """What it needs comes first: by hand, for Llama-3-8B in bfloat16 and the published hours."""
    reproduce.main(["table1", "--scale", "paper", "--list", "--seeds", "2", "--only",
                    "mixing rho=1; LESS; BDS; online dynamic"])
    needs, *lines = re.split(r"(?m)^python ", capsys.readouterr().out)
    base = 128256 * 4096 * 2 + 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
                                     + 2 * 4096) + 4096  # embeddings and head, layers, last norm
    adapter = 16 * 32 * (2 * 8192 + 2 * 5120 + 3 * (4096 + 14336))
    live = 2 * 8 * 2048 * 4096 * (2 * 32 + 34)
    memory = (2 * base + 16 * adapter + live + 12 * 56000) / 2**30
    assert f"at most {memory:.0f} GiB" in needs and f"model ({2 * base / 1e9:.0f} GB)" in needs
    assert f"{2 * (10.53 + 28.75 + 11.75):.0f} hours on the paper's H100" in needs
    assert "those of online dynamic, which it does not give" in needs and "each of 8 runs" in needs
    lines = {line.split()[0]: f"python {line}" for line in lines if "/bds/seed-0" in line}
    args = train_offline.parse_args(shlex.split(lines["train_offline.py"])[2:])
    assert (args.lr, args.omega_lr, args.omega_optimizer, args.batch, args.epochs,
            args.lower_limit) == (5e-6, 1e-4, "adam", 32, 3, 56000)


# --- running --------------------------------------------------------------------------------------

def tiny(here, folders, pairs=False):
    write_rows(here / "lower.jsonl", make_rows(24, 1))
    rows = make_rows(16, 2)
    if pairs:
        rows = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "no " + str(n)}
                for n, row in enumerate(rows)]
    write_rows(here / "upper.jsonl", rows)
    return (f"--model {folders['llama']} --lower lower.jsonl --upper upper.jsonl "
            "--heldout-rows 4 --cache-dir cache")


def test_one_row_of_each_kind_of_table1(here, folders, capfd, refused):
    """Values come from the runs, budgets are equal, and the README gets the stored figures.

    Mixing is not asked for: it is run for the budget alone.
    """
    arguments = ["table1", "--scale", "small", "--data", tiny(here, folders), "--train", TINY,
                 "--seeds", "1", "--workers", "1", "--only", "random; BDS"]
    reproduce.main(arguments)
    text = capfd.readouterr().out
    stored = json.loads((here / "results" / "small_table1.json").read_text())
    assert set(stored["results"]) == {"base model", "random", "BDS"}
    for method, folder in (("BDS", "bds"), ("random", "random")):
        run = json.loads((here / "runs/small" / folder / "seed-0" / "result.json").read_text())
        assert stored["results"][method][0]["upper_heldout"] == run["upper_heldout"]
        assert f"{run['upper_heldout']:.3f}" in text
    assert stored["results"]["base model"][0]["upper_heldout"] == run["base/upper_heldout"]
    assert "0.80 / 0.893" in text  # the paper's BDS beside ours

    mixing = json.loads((here / "runs/small/mixing-rho-1/seed-0/result.json").read_text())
    read = [row["tokens"] for row in read_rows(here / "runs/small/random/seed-0/metrics.jsonl")]
    assert sum(read[:-1]) < mixing["lower_tokens"] <= sum(read)

    (here / "README.md").write_text("before\n<!-- begin small_table1 -->\nold\n"
                                    "<!-- end small_table1 -->\nafter\n")
    reproduce.main(["readme"])
    page = (here / "README.md").read_text()
    assert page.startswith("before\n") and page.endswith("after\n") and "old" not in page
    assert f"| BDS | {stored['results']['BDS'][0]['upper_heldout']:.3f} |" in page
    assert stored["command"] in page and "--only" in stored["command"]

    made = (here / "runs/small/bds/seed-0/result.json").stat().st_mtime_ns
    reproduce.main(arguments)  # finished runs are not run again
    assert (here / "runs/small/bds/seed-0/result.json").stat().st_mtime_ns == made

    stored = (here / "results" / "small_table1.json").read_text()
    logs = {log: log.read_text() for log in (here / "runs/small").rglob("*.log")}
    assert len(logs) == 4 and all(text.startswith("$ ") for text in logs.values())
    other = [*arguments[:-1], "BDS", "--train", TINY + " --lr 5"]
    line = refused(lambda: reproduce.main(other))
    assert "runs/small/bds/seed-0: made by another command" in line and "--lr 5" in line
    assert "another --name" in line
    assert (here / "results" / "small_table1.json").read_text() == stored
    log = here / "runs/small/bds/seed-0.log"
    log.write_text(logs[log].split("\n", 1)[1])  # of a version that did not write the command
    reproduce.main(other)


@pytest.mark.parametrize("target", ["table3", "table3-dpo"])
def test_one_row_of_each_safety_table(target, here, folders, capsys):
    dpo = target == "table3-dpo"
    reproduce.main([target, "--scale", "small", "--data", tiny(here, folders, pairs=dpo),
                    "--train", TINY + (" --upper-loss dpo" if dpo else ""),
                    "--online", "--first-refresh 1 --k-gen 2 --max-new-tokens 4", "--seeds", "1",
                    "--workers", "1",
                    "--only", "online dynamic"])
    stored = json.loads((here / f"results/small_{target.replace('-', '_')}.json").read_text())
    run = stored["results"]["online dynamic"][0]
    folder = here / "runs/small" / target / "online-dynamic/seed-0"
    saved = json.loads((folder / "result.json").read_text())
    assert run["upper_heldout"] == saved["upper_heldout"] > 0
    assert ("upper_accuracy" in run) == dpo
    assert ("0.43 / 1.37" if dpo else "0.82 / 1.02") in capsys.readouterr().out


def test_bad_input(here, refused):
    for words, what in (
            (["table3", "--scale", "small"], "name the rows"),
            (["qa"], "list puzzles only"),
            (["winrate", "--scale", "small"], "--judge"),
            (["table1", "--only", "BDS; nonsense"], "has the name 'nonsense'"),
            (["demo", "--only", "BDS"], "nothing to choose from"),
            (["table1", "--seeds", "0"], "--seeds must be 1 or more")):
        assert what in refused(lambda words=words: reproduce.main(words))
    assert "nonsense" in refused(lambda: experiments.main(["ablations", "--only", "nonsense"]))
    assert "of the toy only" in refused(lambda: experiments.main(["controls", "--scale", "small"]))
    assert not (here / "runs").exists()


def test_unclosed_quotes_are_named(here, refused):
    line = refused(lambda: reproduce.main(["table1", "--only", "BDS", "--train", "--lr '5"]))
    assert "--lr '5" in line and "No closing quotation" in line


def test_results_are_stored_without_git(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    runs.save_results(tmp_path / "r.json", "python x.py", {}, hardware="here")
    assert json.loads((tmp_path / "r.json").read_text())["commit"] is None


def test_ranking_scores_without_kinds(tmp_path):
    rows = [{"row_id": n, "score": float(n), "bad": n < 2} for n in range(5)]
    assert experiments.ranking_scores(write_rows(tmp_path / "kept.jsonl", rows)) == {
        "auroc": 1.0, "precision": 1.0, "auroc/bad": 1.0, "recall/bad": 1.0}


def test_a_failing_run_is_named_with_its_last_line(here, refused):
    line = refused(lambda: reproduce.main(
        ["table1", "--scale", "small", "--only", "BDS", "--seeds", "1", "--data",
         "--lower gone.jsonl --upper gone.jsonl --model gone"]))
    assert "train_offline.py" in line and "exit code 2" in line and "gone" in line


def test_ablations_compare_with_the_first_label_and_with_dropping(here, monkeypatch, capsys):
    losses = {"80 % bad: BDS": 0.4, "80 % bad: mixing rho=0.5": 0.5,
              "80 % bad: online R=10% G=1": 0.2, "80 % bad: control: drop": 0.3}

    def finished(args, methods, folder):
        assert set(methods) == set(losses)
        for method in methods:
            for seed in range(args.seeds):
                run = here / runs.slug(method) / str(seed)
                run.mkdir(parents=True)
                (run / "result.json").write_text(json.dumps(
                    {"seed": seed, "upper_heldout": losses[method] + seed}))
                (run / "metrics.jsonl").write_text(json.dumps(
                    {"omega/ess_share": 0.5, "answers_right/clean": 0.75}) + "\n")
        return {method: [here / runs.slug(method) / str(seed) / "result.json"
                         for seed in range(args.seeds)] for method in methods}

    monkeypatch.setattr(experiments, "execute", finished)
    experiments.main(["ablations", "--only", "80 % bad"])
    stored = json.loads((here / "results/toy_ablations.json").read_text())
    assert [claim[:2] for claim in stored["claims"]] == [
        ["80 % bad: mixing rho=0.5 below BDS", "does not hold"],
        ["80 % bad: online R=10% G=1 below BDS", "holds"],
        ["80 % bad: control: drop below BDS", "holds"],
        ["80 % bad: online R=10% G=1 below control: drop", "holds"]]
    assert "-0.1000, lower on 4 of 4" in stored["claims"][-1][2]
    assert stored["results"]["80 % bad: BDS"][1]["right"] == 0.75
    assert (here / "results/toy_ablations.png").exists()


# --- last: minutes --------------------------------------------------------------------------------

@pytest.mark.slow
def test_selectors_and_the_curated_set_on_the_toy(here, capsys):
    """One epoch of one seed: tables are there, rows that should be bad are, budgets are equal."""
    common = ["--seeds", "1", "--train", "--epochs 1"]
    experiments.main(["selectors", *common])
    stored = json.loads((here / "results/toy_selectors.json").read_text())["results"]
    assert stored["loss"][0]["auroc/plain"] > 0.95 and stored["omega"][0]["auroc"] > 0.7
    assert abs(stored["random"][0]["auroc"] - 0.5) < 0.05
    assert all(run[0]["seconds"] > 0 for run in stored.values())
    experiments.main(["curated", *common])
    stored = json.loads((here / "results/toy_curated.json").read_text())["results"]
    assert stored["raw set"][0]["bad_share"] == pytest.approx(0.4)
    assert stored["top k by BDS"][0]["bad_share"] < stored["random k"][0]["bad_share"]
    assert stored["... with its rewrites"][0]["rows"] >= stored["top k by BDS"][0]["rows"]
