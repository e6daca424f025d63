"""Another threshold, and the ends of the ranking over the epochs."""

import json

import pytest
import torch
from conftest import make_rows, read_rows, write_rows
from fabricated import fabricate
from safetensors.torch import load_file, save_file

import eval as front
from evaluation.rankings import ranking_over_epochs, rethreshold
from evaluation.runs import Run
from ranking import auroc
from utils import UserError


def test_keep_rethresholds_by_rank(tmp_path, capfd, refused):
    run = fabricate(tmp_path / "run")
    front.main(["keep", str(run), "--keep-fraction", "0.25"])
    kept = read_rows(run / "kept.jsonl")
    assert [k.keys() for k in kept] == [{"row_id", "hash", "rank", "kept"}] * 40
    assert {k["row_id"] for k in kept if k["kept"]} == {
        r["row_id"] for r in read_rows(run / "weights.jsonl") if r["rank"] <= 10}
    text = capfd.readouterr().out
    assert "kept 10 of 40 rows" in text and "cut: 77% of 13 dropped" in text  # ranks 3, 6, 9 stay
    for flags, words in ((["0"], "(0, 1]"), (["1.5"], "(0, 1]"), (["0.001"], "none"),
                         (["0.5", "--out", str(run)], "is the ranking itself or a folder"),
                         (["0.5", "--out", str(run / "weights.jsonl")], "is the ranking itself")):
        assert words in refused(lambda f=flags: front.main(
            ["keep", str(run), "--keep-fraction", *f]))
    assert "no such file" in refused(lambda: front.main(
        ["keep", str(tmp_path), "--keep-fraction", "0.5"]))


def test_keep_counts_what_is_kept_and_checks_ranks(tmp_path, capfd, refused):
    path = tmp_path / "ranking.jsonl"
    rows = [{"row_id": n, "hash": "h", "rank": rank} for n, rank in enumerate(
        (1, 2, 3, 9, 10, 11, 12, 13))]
    write_rows(path, rows)
    front.main(["keep", str(path), "--keep-fraction", "0.85"])
    assert "kept 7 of 8 rows" in capfd.readouterr().out
    assert [row["rank"] for row in read_rows(tmp_path / "ranking.kept.jsonl")] == [
        *range(1, 9)]
    for rank in ("2", None, True):
        write_rows(path, [*rows[:4], rows[4] | {"rank": rank}])
        line = refused(lambda: front.main(["keep", str(path), "--keep-fraction", "0.5"]))
        assert f"ranking.jsonl line 5: the rank {json.dumps(rank)} is not a number" in line
    write_rows(path, [*rows, rows[2]])
    line = refused(lambda: front.main(["keep", str(path), "--keep-fraction", "0.5"]))
    assert "ranking.jsonl line 9: row_id 2 stands in the file twice" in line


def test_training_keeps_what_keep_kept(files, train, tmp_path):
    paths = files(lower=12)
    run = train(paths, epochs=1)
    out = tmp_path / "kept.jsonl"
    front.main(["keep", str(run.out), "--keep-fraction", "0.5", "--out", str(out)])
    again = train(paths, out="kept", method="sft", keep=out, epochs=1)
    assert {w["row_id"] for w in again.weights} == {
        w["row_id"] for w in run.weights if w["rank"] <= 6}
    write_rows(paths["lower"], read_rows(paths["lower"]) + make_rows(5, seed=9))  # it has grown
    grown = train(paths, out="grown", method="sft", keep=out, epochs=1)
    assert f"warning: 5 of the 17 lower rows are not in {out} and do not train" in grown.text


def test_eq_ranking_over_epochs_by_hand(tmp_path):
    """20 rows: the top and bottom 10 % are two rows each. Lengths are row % 7 + 1."""
    run = fabricate(tmp_path / "run", rows=20)
    for epoch, top, bottom in ((1, (3, 5), (0, 19)), (2, (3, 6), (19, 18))):
        omega = torch.zeros(20)
        omega[list(top)], omega[list(bottom)] = torch.tensor([2.0, 1.0]), torch.tensor([-1.0, -2.0])
        save_file({"omega": omega}, run / "weights" / f"epoch_{epoch}.safetensors")
    first, second = ranking_over_epochs(Run(run))
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
        "masked": e["row_id"] < 10, "length": 100 if e["row_id"] < 10 else 1,
        "bad": e["row_id"] % 2 == 0} for e in entries])
    found, omega = ranking_over_epochs(Run(run)), Run(run).omegas[2]
    for row, members in ((found[1], range(10, 40)), (found[3], range(10))):
        assert row["auroc"] == auroc(omega[[*members]], [n % 2 == 0 for n in members])
    assert [(r["group"], r["rows"], r["top_length"], r["bottom_length"]) for r in found] == [
        ("unmasked", 3, 1, 1)] * 2 + [("masked", 1, 100, 100)] * 2


def test_positions_of_omega_are_row_ids_in_order(files, train, tmp_path):
    """The assumption behind every figure of omega and labels: on a real run with dropped rows."""
    paths = files(lower=14)
    rows = read_rows(paths["lower"])
    rows[3]["response"] = ""  # dropped: row_ids have a gap
    write_rows(paths["lower"], rows)
    run = Run(train(paths, epochs=2).out)
    omega = run.omegas[2]
    assert len(run.rows) == len(omega) == 13 and 3 not in {r["row_id"] for r in run.rows}
    weights = torch.tensor([r["weight"] for r in run.rows]).double()
    torch.testing.assert_close(len(omega) * omega.softmax(0), weights, atol=1e-6, rtol=1e-6)
    base = load_file(run.folder / "weights" / "base_losses.safetensors")["losses"]
    assert base.tolist() == [r["base_loss"] for r in run.rows]


def test_keep_by_a_loss_of_the_final_model(files, train, refused):
    """The order of the losses that the ranking holds; the correction's A is the run's own."""
    run = train(files(lower=10), epochs=1, lr=1e-2, omega_lr=0.5, correction=0.4)
    rows = {row["row_id"]: row for row in run.weights}
    losses = {"final": {i: row["final_loss"] for i, row in rows.items()},
              "corrected": {i: row["final_loss"] - 0.4 * row["attainable_loss"]
                            for i, row in rows.items()}}
    orders = []
    for by, values in losses.items():
        front.main(["keep", str(run.out), "--keep-fraction", "0.4", "--by", by])
        kept = read_rows(run.out / "kept.jsonl")
        orders.append([row["row_id"] for row in kept])
        assert orders[-1] == sorted(values, key=values.get)
        assert [row["kept"] for row in kept] == [True] * 4 + [False] * 6
    assert orders[0] != [row["row_id"] for row in run.weights]
    for value in (None, "x"):
        run.weights[3]["attainable_loss"] = value
        write_rows(run.out / "weights.jsonl", run.weights)
        assert "line 4: the attainable_loss" in refused(lambda: front.main(
            ["keep", str(run.out), "--keep-fraction", "0.4", "--by", "corrected"]))
    config = json.loads((run.out / "config.json").read_text())
    config["args"]["correction"] = None
    (run.out / "config.json").write_text(json.dumps(config))
    write_rows(run.out / "weights.jsonl", run.weights[:3])
    assert "names no correction" in refused(lambda: front.main(
        ["keep", str(run.out), "--keep-fraction", "0.4", "--by", "corrected"]))
    plain = train(files(lower=10), out="plain", epochs=1)
    assert "has no attainable_loss" in refused(lambda: front.main(
        ["keep", str(plain.out), "--keep-fraction", "0.4", "--by", "corrected"]))


def test_the_rows_of_a_run_are_not_written_over(tmp_path):
    """They are no file of its folder; its config.json names them."""
    source = tmp_path / "noisy.jsonl"
    write_rows(source, [{"prompt": "a", "response": "b"}])
    before = source.read_text()
    for name in ("lower", "upper", "upper_heldout", "lower_heldout"):
        run = fabricate(tmp_path / name, args={name: str(source)})
        with pytest.raises(UserError, match=f"would overwrite {source}"):
            rethreshold(run, 0.5, source)
        (run / "config.json").write_text("[]")
        rethreshold(run, 0.5, tmp_path / f"{name}.jsonl")
    assert source.read_text() == before
