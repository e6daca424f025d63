"""recipes.py: every data set built from small local copies of its sources, and bad sources."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from conftest import listing, read_rows, write_rows

import models
import options
from data import tokens
from paper import plans, recipes
from utils import UserError


@pytest.fixture
def copies(tmp_path):
    """Small copies of the source files in the hub's layout: 60 SlimOrca rows, 30 attempts ..."""
    root = tmp_path / "copies"
    hubs = {name: root / name for name in (
        "yahma/alpaca-cleaned", "Open-Orca/OpenOrca", "Open-Orca/SlimOrca",
        "Anthropic/hh-rlhf/red-team-attempts", "Dahoas/rm-hh-rlhf/data")}
    for folder in hubs.values():
        folder.mkdir(parents=True)
    (hubs["yahma/alpaca-cleaned"] / "alpaca_data_cleaned.json").write_text(json.dumps(
        [{"instruction": f"do {n}", "input": "", "output": f"done {n}"} for n in range(5)]))
    for name, count in (("1M-GPT4-Augmented", 20), ("3_5M-GPT3_5-Augmented", 9)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
            [{"id": f"{name}.{n}", "system_prompt": "be good", "question": f"q {name} {n}",
              "response": f"r {n}"} for n in range(count)]),
            hubs["Open-Orca/OpenOrca"] / f"{name}.parquet")
    write_rows(hubs["Open-Orca/SlimOrca"] / recipes.SLIMORCA[1], [{"conversations": [
        {"from": "system", "value": "you are", "weight": 0.0},
        {"from": "human", "value": f"slim {n}", "weight": 0.0},
        {"from": "gpt", "value": f"orca {n}", "weight": 1.0}]} for n in range(60)])
    attempts = [{"transcript": f"\n\nHuman: red {n}?\n\nAssistant: bad {n}.\nMore.\n\nHuman: and?"
                               "\n\nAssistant: no", "rating": 4.0, "tags": None} for n in range(30)]
    with gzip.open(root / recipes.RED_TEAM[0] / recipes.RED_TEAM[1], "wt") as file:
        json.dump(attempts, file)
    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(
            [{"prompt": f"\n\nHuman: {split} {n}\n\nAssistant:", "chosen": " yes",
              "rejected": " no"} for n in range(4)]),
            hubs["Dahoas/rm-hh-rlhf/data"] / f"{split}-00000-of-00001-ab.parquet")
    return root


def built(name, copies, tmp_path):
    return read_rows(recipes.build(name, copies, tmp_path))


def test_recipes_build_from_local_copies(copies, tmp_path, monkeypatch):
    def pairs(name):
        return [(row["prompt"], row["response"]) for row in built(name, copies, tmp_path)]

    assert built("alpaca-cleaned", copies, tmp_path)[4] == {
        "instruction": "do 4", "input": "", "output": "done 4"}
    assert pairs("openorca") == [(f"q 1M-GPT4-Augmented {n}", f"r {n}") for n in range(20)]
    assert pairs("slimorca") == [(f"slim {n}", f"orca {n}") for n in range(60)]
    assert pairs("red-team") == [(f"red {n}?", f"bad {n}.\nMore.") for n in range(30)]
    hh = built("rm-hh-rlhf", copies, tmp_path)
    assert len(hh) == 4 and hh[0] == {
        "prompt": "\n\nHuman: train 0\n\nAssistant:", "chosen": " yes", "rejected": " no"}
    for name, value in (("RED_ROWS", 12), ("REDORCA_ROWS", 32), ("BLUEORCA_ROWS", 25)):
        monkeypatch.setattr(recipes, name, value)
    red, blue = built("redorca", copies, tmp_path), pairs("blueorca")
    assert [row["kind"] for row in red] == ["red-team"] * 12 + ["clean"] * 20
    assert [row["bad"] for row in red] == [True] * 12 + [False] * 20
    assert [row["prompt"] for row in red[:12]] == [f"red {n}?" for n in range(12)]
    slim = {row["prompt"] for row in red[12:]}
    assert len(slim) == 20 and len(blue) == 25 and not slim & {prompt for prompt, _ in blue}
    assert slim != {f"slim {n}" for n in range(20)}  # a sample, not the first rows


def test_recipes_too_small_copies_are_shared(copies, tmp_path, capsys):
    red, blue = (built(name, copies, tmp_path) for name in ("redorca", "blueorca"))
    assert "SlimOrca has 60 rows here" in capsys.readouterr().out
    assert len(red) == 30 + 26 and len(blue) == 34
    assert not {row["prompt"] for row in red} & {row["prompt"] for row in blue}


def test_recipes_are_read_by_training(copies, tmp_path, folders):
    tokenizer = models.load_tokenizer(folders["llama"])
    for name, count in (("redorca", 56), ("rm-hh-rlhf", 4), ("alpaca-cleaned", 5)):
        path = recipes.build(name, copies, tmp_path)
        rows, _ = tokens.load_rows(path, tokenizer, cache_dir=str(tmp_path / "cache"))
        assert len(rows) == count
        if name == "redorca":
            assert sum(rows["bad"]) == 30 and rows[0]["kind"] == "red-team"


def test_a_recipe_is_built_from_the_source_of_now(copies, tmp_path):
    built("red-team", copies, tmp_path)
    red = copies / recipes.RED_TEAM[0] / recipes.RED_TEAM[1]
    with gzip.open(red, "wt", encoding="utf-8") as file:  # one object a line; U+2028 ends none
        file.write('{"transcript": "\\n\\nHuman: one\\n\\nAssistant: li\u2028ne"}\n')
    assert [row["response"] for row in built("red-team", copies, tmp_path)] == ["li\u2028ne"]


def test_the_command_writes_what_the_presets_and_tables_read(copies, tmp_path, monkeypatch,
                                                             capfd, refused):
    monkeypatch.chdir(tmp_path)
    recipes.main([f"redorca:{copies}", f"blueorca:{copies}"])
    assert "redorca: 56 rows built from Anthropic/hh-rlhf" in capfd.readouterr().out
    preset = options.PRESETS["llama3-8b-safety"]
    assert len(read_rows(preset["lower"])) == 56 and len(read_rows(preset["upper"])) == 34
    asked = []
    monkeypatch.setattr(recipes, "build", asked.append)
    paper = [*plans.words_of(plans.SAFETY["table3-dpo"]["paper"]["data"]), "other/x.jsonl",
             ".cache/recipes/mine.jsonl", preset["upper"]]
    recipes.build_missing(paper)  # two of them are there
    assert asked == ["rm-hh-rlhf"]
    assert "orca: no such recipe; there are alpaca-cleaned" in refused(
        lambda: recipes.main(["orca"]))


def test_recipes_from_the_hub(copies, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(hub, repo_type, allow_patterns, etag_timeout):
        asked.append((hub, repo_type, allow_patterns))
        return str(copies / hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = recipes.build("redorca", out=tmp_path)
    assert asked == [(hub, "dataset", [file]) for hub, file in (recipes.RED_TEAM, recipes.SLIMORCA)]
    assert len(read_rows(path)) == 56

    def offline(*_, **__):
        raise OSError("no route\nto host")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"cannot be loaded from the hub \(no route\)"):
        recipes.build("slimorca", out=tmp_path)


def test_recipes_bad_sources(copies, tmp_path):
    cache = tmp_path / "made"
    with pytest.raises(UserError, match=r"alpaca_data_cleaned\.json: no such file"):
        recipes.build("alpaca-cleaned", tmp_path, cache)
    red = copies / recipes.RED_TEAM[0] / recipes.RED_TEAM[1]
    red.write_bytes(red.read_bytes()[:40])
    with pytest.raises(UserError, match=r"Compressed file ended"):
        recipes.build("red-team", copies, cache)
    write_rows(copies / "Open-Orca/SlimOrca" / recipes.SLIMORCA[1], [{"conversation": []}])
    with pytest.raises(UserError, match=r"row 0: not a row of this data set.*conversations"):
        recipes.build("slimorca", copies, cache)
    assert not listing(cache)
