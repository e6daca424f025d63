"""Losses before and after training, against what the run itself measured."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_rows, read_rows, write_rows
from fabricated import make_page
from safetensors.torch import load_file, save_file

import eval as front
from batches import row_losses
from data import tokens
from evaluation import losses
from evaluation.comparison import comparison_rows
from evaluation.runs import Run


def test_losses_are_those_of_the_run_and_of_its_base(files, train, tmp_path, capfd, refused):
    """After: result.json's numbers. Before: those saved before the first step. Row by row too."""
    run = train(files(lower_heldout=5), epochs=1, lr=0.01)
    out = tmp_path / "rows.jsonl"
    front.main(["losses", str(run.out), "--out", str(out)])
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

    front.main(["losses", str(run.out), "--rows", write_rows(
        tmp_path / "other.jsonl", make_rows(6, seed=77))])
    assert re.search(r"^rows +6 ", capfd.readouterr().out, re.M)
    front.main(["losses", str(run.out), "--lower-columns", "prompt=q,response=a", "--rows",
                write_rows(tmp_path / "named.jsonl", [
                    {"q": row["prompt"], "a": row["response"]} for row in make_rows(7, seed=78)])])
    assert re.search(r"^rows +7 ", capfd.readouterr().out, re.M)
    assert "names the columns of --rows; give both" in refused(lambda: front.main(
        ["losses", str(run.out), "--lower-columns", "prompt=q,response=a"]))
    nowhere = str(tmp_path / "nowhere")
    assert "nowhere: not a run folder" in refused(
        lambda: front.main(["losses", nowhere, "--out", nowhere + "/x.jsonl"]))
    assert not Path(nowhere).exists()

    broken = tmp_path / "broken"
    shutil.copytree(run.out, broken)
    save_file({"losses": torch.zeros(12)}, broken / "weights" / "base_losses.safetensors")
    (broken / "losses.json").unlink()
    assert "would compare two models" in refused(lambda: front.main(["losses", str(broken)]))
    assert not (broken / "losses.json").exists()

    held = tmp_path / "heldout.jsonl"
    other = train(files(lower_heldout=5) | {"heldout": write_rows(
        held, make_rows(4, seed=5))}, out="held", epochs=1)
    write_rows(held, make_rows(4, seed=6))
    assert "the rows of upper_heldout have changed since the run" in refused(
        lambda: front.main(["losses", str(other.out)]))



def test_lower_refined_is_the_loss_of_the_recommended_answers(files, online, tmp_path):
    """The kept rows and those with a recommended answer, which counts instead, scored by hand."""
    from transformers import AutoTokenizer

    run = online(files(lower=20, upper=20), epochs=1)
    write_rows(run.out / "curated.jsonl", [e | {
        "refined": "red", "recommended": ("refined", "undecided", "original")[n % 3]}
        for n, e in enumerate(run.curated)])
    front.main(["losses", str(run.out)])
    found = json.loads((run.out / "losses.json").read_text())["lower_refined"]
    model, _, made = losses.load_trained(str(run.out))
    rows = [{"prompt": e["prompt"], "response": "red" if n % 3 == 0 else e["response"]}
            for n, e in enumerate(run.curated) if e["kept"] or n % 3 == 0]
    assert len(rows) > sum(e["kept"] for e in run.curated)
    rows, _ = tokens.load_rows(write_rows(tmp_path / "hand.jsonl", rows),
                             AutoTokenizer.from_pretrained(made.args.model),
                             cache_dir=tmp_path / "hand")
    assert found == pytest.approx(row_losses(model, rows)[0].mean().item(), abs=1e-6)
    assert comparison_rows([Run(run.out)])[0]["lower_refined"]["mean"] == found


def test_lower_rows_that_have_changed_are_refused(files, train, tmp_path, refused):
    """More rows at the end of the file are other rows, too, also of a run on kept ones."""
    paths = files(lower=20)
    run = train(paths, epochs=1, lr=0.01)
    front.main(["keep", str(run.out), "--keep-fraction", "0.5"])
    kept = train(paths, out="kept", method="sft", keep=run.out / "kept.jsonl", epochs=1, lr=0.01)
    write_rows(paths["lower"], [*read_rows(paths["lower"]), *make_rows(30, seed=9, longest=3)])
    for own in (run, kept):
        words = refused(lambda out=own.out: front.main(["losses", str(out)]))
        assert "have changed since the run" in words and not (own.out / "losses.json").exists()
    assert "weight/auroc" not in comparison_rows([Run(kept.out)])[0]


def test_a_base_that_has_changed_is_refused(files, train, folders, tmp_path, refused):
    """The adapter belongs to the weights of then."""
    base = shutil.copytree(folders["llama"], tmp_path / "base")
    run = train(files(), base, epochs=1)
    ask = ["answers", str(run.out), "--prompt", "red", "--max-new-tokens", "2"]
    front.main(ask)
    weights = load_file(base / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1}, base / "model.safetensors", {"format": "pt"})
    assert "has changed since the run" in refused(lambda: front.main(ask))


def test_losses_of_a_file_say_which_rows_are_not_measured(files, train, tmp_path, capfd):
    """One row of four has no answer."""
    run = train(files(), epochs=1)
    rows = write_rows(tmp_path / "four.jsonl", [*make_rows(3, seed=5), {"prompt": "a?",
                                                                       "response": ""}])
    capfd.readouterr()
    front.main(["losses", str(run.out), "--rows", rows])
    assert "four.jsonl: 3 of 4 rows, dropped {'empty_response': 1}" in capfd.readouterr().out


def test_losses_of_another_selection_do_not_stay(files, train):
    """A finished run that is resumed with another --keep-fraction keeps other rows; an unchanged
    one keeps what was measured."""
    paths = files(lower=20)
    file = train(paths, epochs=1).out / "losses.json"
    file.write_text('{"lower_refined": 0.5}')
    train(paths, epochs=1, resume=True)
    assert file.exists()
    train(paths, epochs=1, resume=True, keep_fraction=0.3)
    assert not file.exists()


def test_losses_of_a_model_without_a_stated_context(files, train, monkeypatch, capfd):
    """Its configuration may lack max_position_embeddings: then any length will do."""
    run, load = train(files(), epochs=1), losses.load_trained

    def unstated(*arguments):
        model, tokenizer, made = load(*arguments)
        vars(model.config)["max_position_embeddings"] = None
        return model, tokenizer, made

    monkeypatch.setattr(losses, "load_trained", unstated)
    front.main(["losses", str(run.out)])
    front.main(["losses", str(run.out), "--rows", write_rows(
        run.out / "other.jsonl", make_rows(3, seed=5))])
    assert "lower_original" in capfd.readouterr().out


def test_losses_of_a_run_that_began_with_an_adapter(files, train, adapters, tmp_path, refused):
    """Before is with that adapter on, as the run itself measured it."""
    from conftest import copy_tree

    start = copy_tree(adapters["llama"], tmp_path / "start")
    run = train(files(lower_heldout=5), epochs=1, lr=0.01, adapter=start)
    front.main(["losses", str(run.out)])
    found = json.loads((run.out / "losses.json").read_text())
    for key in ("base/upper_heldout", "base/lower_heldout", "upper_heldout", "lower_heldout"):
        assert found[key] == pytest.approx(run.result[key], abs=1e-6)
    base = torch.tensor([w["base_loss"] for w in run.weights]).mean().item()
    assert found["base/lower_original"] == pytest.approx(base, abs=1e-6)
    start.rename(tmp_path / "elsewhere")
    line = refused(lambda: front.main(["losses", str(run.out)]))
    assert "start: the adapter that the run began with cannot be loaded" in line
