"""Exports of a curated set, read back: the same turns, the same tokens, in every trainer's eyes."""

import itertools
import math

import datasets
import pytest
import torch
from conftest import listing, make_rows, make_tokenizer, read_rows, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import curate
import eval as front
import utils
from data import layouts, tokens
from evaluation.export import FORMATS, export

TURNS = ("messages", "prompt-completion")  # formats that keep them
COLUMNS = ("input_ids", "trained", "hash", "prompt", "response", "messages")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def talks(count=12):
    """Conversations: one turn, a system prompt, several turns, a greeting in front."""
    rows = []
    for number, row in enumerate(make_rows(count, 1)):
        fronts = (
            [],
            [{"role": "system", "content": "Be brief."}],
            [user(f"first {number}?"), assistant("6")],
            [assistant("Hello")],
        )
        exchange = [user(row["prompt"]), assistant(row["response"])]
        rows.append({"messages": [*fronts[number % 4], *exchange]})
    return rows


@pytest.fixture
def curated(online, files, tmp_path):
    """curated(...): an online run on `talks` that keeps every row."""

    def call(**options):
        paths = files(lower=1, upper=6)
        paths["lower"] = write_rows(tmp_path / "talks.jsonl", talks())
        return online(paths, batch=6, epochs=1, keep_fraction=1.0, **options)

    return call


@pytest.fixture
def bent(monkeypatch):
    """bent(*choices): the rule recommends these in turn, so that every kind of row occurs."""

    def bend(*choices):
        cycle = itertools.cycle(choices)
        monkeypatch.setattr(curate, "recommend", lambda *_: next(cycle))

    return bend


def exported(run, layout):
    """The file that an export of a run makes."""
    export(run.out, layout)
    return run.out / f"curated.{layout}.jsonl"


def as_trainer(file, tmp_path):
    """The rows as `datasets` reads them for a trainer."""
    return datasets.load_dataset(
        "json",
        data_files=str(file),
        split="train",
        cache_dir=str(tmp_path / "hf"),
    )


@pytest.mark.parametrize("layout", TURNS)
@pytest.mark.parametrize("model", ["llama", "neox"])
def test_unchanged_answers_have_the_tokens_of_the_original_rows(
    curated, tmp_path, folders, layout, model
):
    """Read with `datasets`, as a trainer does, and by our own reader: token by token."""
    run = curated(model=model)
    tokenizer = AutoTokenizer.from_pretrained(folders[model])
    before, _ = tokens.load_rows(
        tmp_path / "talks.jsonl", tokenizer, cache_dir=tmp_path / "c"
    )
    assert {entry["recommended"] for entry in run.curated} <= {"original", "undecided"}
    places = {row_id: place for place, row_id in enumerate(before["row_id"])}
    expected = before.select([places[entry["row_id"]] for entry in run.curated])
    file = exported(run, layout)
    again = write_rows(tmp_path / "again.jsonl", list(as_trainer(file, tmp_path)))
    for source in (file, again):
        rows, report = tokens.load_rows(source, tokenizer, cache_dir=tmp_path / "c")
        assert report["layout"] == layout.replace("-", "/")
        for column in COLUMNS:
            assert list(rows[column]) == list(expected[column]), column


EXCHANGE = [user("p"), assistant("r")]
TALK = [
    {"role": "system", "content": "s"},
    user("2*3?"),
    assistant("6"),
    user("minus 1?"),
]
BY_HAND = {
    "alpaca": [
        {"instruction": "p", "input": "", "output": "r"},
        {"instruction": "transcript", "input": "", "output": "5"},
    ],
    "prompt-completion": [
        {"prompt": EXCHANGE[:1], "completion": EXCHANGE[1:]},
        {"prompt": TALK, "completion": [assistant("5")]},
    ],
    "messages": [{"messages": EXCHANGE}, {"messages": [*TALK, assistant("5")]}],
    "pairs": [{"prompt": TALK, "chosen": [assistant("5")], "rejected": [assistant("4")]}],
}


@pytest.mark.parametrize("layout", FORMATS)
def test_formats_by_hand(tmp_path, capfd, layout):
    """A kept row, a rewritten conversation that is not kept, and two rows that are left out."""
    entries = [
        {
            "kept": True,
            "recommended": "original",
            "prompt": "p",
            "response": "r",
            "refined": "x",
        },
        {
            "kept": False,
            "recommended": "refined",
            "prompt": "transcript",
            "response": "4",
            "refined": "5",
            "messages": [*TALK, assistant("4")],
        },
        {
            "kept": False,
            "recommended": "undecided",
            "prompt": "q",
            "response": "r",
            "refined": "x",
        },
        {
            "kept": False,
            "recommended": "original",
            "prompt": "q",
            "response": "r",
            "refined": None,
        },
    ]
    source = write_rows(tmp_path / "set.jsonl", entries)
    front.main(["export", source, "--format", layout])
    line = capfd.readouterr().out
    file = tmp_path / f"set.{layout}.jsonl"
    assert read_rows(file) == BY_HAND[layout]
    assert line.startswith(f"{len(BY_HAND[layout])} rows: {file}")
    assert ("1 rows are conversations" in line) == (layout == "alpaca")


def text_of(row, layout):
    """(prompt, response) of an exported row of one turn."""
    if layout == "alpaca":
        return row["instruction"], row["output"]
    messages = row.get("messages") or row["prompt"] + row["completion"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    return tuple(message["content"] for message in messages)


@pytest.mark.parametrize("layout", ["alpaca", *TURNS])
def test_our_reader_reads_what_a_run_exports(online, files, tmp_path, bent, layout):
    """Kept or rewritten rows in rank order with the recommended response."""
    bent("refined", "original")
    run = online(
        files(lower=14, upper=6),
        batch=7,
        epochs=2,
        omega_lr=30,
        keep_fraction=0.7,
        ratio_masked=0.5,
        lr=1e-2,
        max_new_tokens=12,
    )
    expected = []
    for entry in run.curated:
        if entry["recommended"] == "refined":
            expected.append((entry["prompt"], entry["refined"]))
        elif entry["kept"]:
            expected.append((entry["prompt"], entry["response"]))
    assert len({(entry["kept"], entry["recommended"]) for entry in run.curated}) == 4
    file = exported(run, layout)
    assert [text_of(row, layout) for row in read_rows(file)] == expected
    loaded, _ = tokens.load_rows(file, make_tokenizer(), cache_dir=tmp_path / "cache")
    hashes = [utils.content_hash(*texts) for texts in expected if texts[1].strip()]
    assert list(loaded["hash"]) == hashes


def test_pairs_train_dpo(train, online, files, tmp_path, bent):
    """The new answer over the original of every rewritten row, kept or not; our loader reads both
    sides, conversations too."""
    bent("refined", "original", "undecided")
    paths = files(upper=6)
    paths["lower"] = write_rows(tmp_path / "talks.jsonl", talks(24))
    run = online(
        paths,
        batch=8,
        epochs=2,
        omega_lr=30,
        keep_fraction=0.7,
        ratio_masked=0.8,
        lr=1e-2,
        max_new_tokens=12,
    )
    rewritten = [entry for entry in run.curated if entry["recommended"] == "refined"]
    file = exported(run, "pairs")
    pairs = read_rows(file)
    assert len(pairs) == len(rewritten) > 4
    for pair, entry in zip(pairs, rewritten, strict=True):
        assert pair["prompt"] == layouts.conversation(entry)[:-1]
        assert pair["chosen"] == [assistant(entry["refined"])]
        assert pair["rejected"] == [assistant(entry["response"])]
    for side in ("chosen", "rejected"):
        options = {"name": "upper", "side": side, "cache_dir": tmp_path / "cache"}
        loaded, _ = tokens.load_rows(file, make_tokenizer(), **options)
        assert set(loaded["response"]) <= {pair[side][0]["content"] for pair in pairs}
        assert len(loaded) > 3
    rows = {
        "lower": write_rows(tmp_path / "new.jsonl", make_rows(8, seed=9)),
        "upper": str(file),
    }
    dpo = train(rows, out="dpo", upper_loss="dpo", batch=4, epochs=1)
    assert math.isfinite(dpo.result["upper_heldout"])


def test_what_holds_no_row_leaves_no_file(tmp_path, refused):
    """An answer over itself is no pair; a row that is neither kept nor rewritten is left out."""
    entry = {"prompt": "p", "response": "r", "refined": "r", "recommended": "refined"}
    file = write_rows(tmp_path / "set.jsonl", [entry | {"kept": False}])
    assert "holds no row for --format pairs" in refused(lambda: export(file, "pairs"))
    write_rows(file, [entry | {"kept": False, "recommended": "original"}])
    assert "holds no row for --format messages" in refused(lambda: export(file, "messages"))
    assert "No such file" in refused(lambda: export(tmp_path / "nowhere", "pairs"))
    assert "'kept'" in refused(lambda: export(write_rows(file, [{"row_id": 1}]), "alpaca"))
    assert listing(tmp_path) == ["set.jsonl"]


# --- TRL ------------------------------------------------------------------------------------------


def trl_trainer(file, tmp_path, folder, **options):
    """TRL's SFTTrainer on the file as it is."""
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        **options,
    )
    return trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        train_dataset=as_trainer(file, tmp_path),
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=config,
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", TURNS)
def test_trl_sees_the_turns_that_were_trained_on(curated, tmp_path, folders, layout):
    """The rows of TRL's own data set, decoded: every turn, and a separator before the answer."""
    run = curated(model="neox")
    trainer = trl_trainer(exported(run, layout), tmp_path, folders["neox"], max_steps=1)
    tokenizer = AutoTokenizer.from_pretrained(folders["neox"])
    for row, entry in zip(trainer.train_dataset, run.curated, strict=True):
        text = tokenizer.apply_chat_template(layouts.conversation(entry), tokenize=False)
        assert tokenizer.decode(row["input_ids"]).strip().startswith(text.strip())
        mask = row.get("completion_mask")
        if mask:
            pairs = zip(row["input_ids"], mask, strict=True)
            trained = [token for token, is_trained in pairs if is_trained]
            assert tokenizer.decode(trained).startswith(entry["response"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", TURNS)
def test_trl_trains_on_an_export(online, files, tmp_path, layout, folders):
    """Three steps: finite losses, weights that move."""
    run = online(files(lower=12, upper=6), batch=6, epochs=1, keep_fraction=1.0)
    trainer = trl_trainer(
        exported(run, layout),
        tmp_path,
        folders["neox"],
        max_steps=3,
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
    )
    assert len(trainer.train_dataset) == 12
    weight = trainer.model.get_input_embeddings().weight
    before = weight.detach().clone()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)
    assert not torch.equal(weight, before)
