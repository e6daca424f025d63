"""Bad input: one clear line on stderr, exit code 2, no traceback, and nothing half-written.

Every case goes through `main`, as the command line does. Errors that can be known before training
must leave no run folder at all; the ones that appear later leave a run that can be resumed.
"""

import json
import math
import re
import resource
import subprocess

import huggingface_hub
import pytest
from conftest import (
    ROOT,
    copy_tree,
    flags,
    listing,
    make_rows,
    make_tokenizer,
    python,
    read_rows,
    write_rows,
)
from safetensors.torch import load_file, save_file

import models
import train_offline
import utils
from runtime import command


def leftovers(folder):
    """Files that are neither whole nor wanted: partial and temporary ones."""
    return [
        name for name in listing(folder) if re.search(r"(^|/)\.|partial|incomplete/", name)
    ]


@pytest.fixture
def bad(tmp_path, files, folders, refused):
    """bad(message, **flags): the run is refused with that message and leaves no trace."""
    paths = files()
    defaults = {
        "lower": paths["lower"],
        "upper": paths["upper"],
        "upper_heldout": paths["heldout"],
        "model": folders["llama"],
        "out": tmp_path / "run",
        "cache_dir": tmp_path / "cache",
        "batch": 4,
        "epochs": 1,
    }

    def check(message, trace=False, **options):
        before = set(listing(tmp_path))
        line = refused(lambda: train_offline.main(flags(**defaults | options)))
        assert re.search(message, line), line
        assert 20 < len(line) < 700
        assert not leftovers(tmp_path)
        if not trace:
            new = set(listing(tmp_path)) - before
            assert not [name for name in new if not name.startswith("cache/")]
            assert not (tmp_path / "run").exists()
        return line

    check.paths = paths
    return check


# --- rows -----------------------------------------------------------------------------------------

BAD_LINES = {
    '{"prompt": "a", "response": ': "not valid JSON",
    "[1, 2]": "the row is not an object (list)",
    '{"prompt": "a"}': 'no column "response"',
    '{"prompt": "a", "response": " "}': "an empty answer",
    json.dumps({"prompt": "long " * 200, "response": "b"}): "the prompt is too long",
}


def test_bad_rows_stop_nothing(train, bad, tmp_path):
    """The other rows train, and the plan counts the bad ones; a file of bad ones is refused."""
    paths = bad.paths
    for level in ("lower", "upper"):
        lines = [json.dumps(row) for row in read_rows(paths[level])[:6]]
        paths[level] = tmp_path / f"{level} and more.jsonl"
        paths[level].write_text("\n".join([*lines, *BAD_LINES]))
    run = train(paths, out="noisy", batch=4, epochs=1)
    said = re.findall(r"(\w+: 6 rows), .* 5 rows set aside \((.*)\)", run.text)
    wanted = sorted(f"{reason}: 1" for reason in BAD_LINES.values())
    assert [level for level, _ in said] == ["lower: 6 rows", "upper: 6 rows"]
    assert all(sorted(reasons.split(", ")) == wanted for _, reasons in said)
    assert sorted(row["row_id"] for row in run.weights) == list(range(6))
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([*lines[:4], *BAD_LINES]))
    examples = r"line 5: not valid JSON; line 6: .*; line 7: [^;]*"
    bad(rf"bad\.jsonl: 5 of 9 rows cannot be used \({examples}\)", lower=path)


def test_sources(bad, tmp_path):
    bad(r"nowhere\.jsonl: no such file or folder", lower=tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.docx").write_text("x")
    bad(r"rows\.docx: no data file", lower=tmp_path / "rows.docx")
    (tmp_path / "empty").mkdir()
    bad("empty: no .*file", lower=tmp_path / "empty")
    bad("'promt=question' is no name=column pair", lower_columns="promt=question")
    bad(
        "cannot hold out 1 of 1 rows",
        upper=write_rows(tmp_path / "one.jsonl", make_rows(1, 33)),
        upper_heldout=None,
    )


def test_a_prompt_that_is_held_out_is_not_trained_on(train, files, tmp_path):
    """Its row is set aside, and the plan says how many: it would flatter the run."""
    paths = files()
    rows = [*make_rows(5, seed=32), *read_rows(paths["heldout"])[:2]]
    paths["lower"] = write_rows(tmp_path / "shared.jsonl", rows)
    run = train(paths, batch=4, epochs=1)
    assert "lower: 5 rows" in run.text
    assert "2 rows set aside (its prompt is held out: 2)" in run.text
    assert sorted(row["row_id"] for row in run.weights) == [0, 1, 2, 3, 4]


ENTRY = {"row_id": 3, "hash": "0" * 16, "rank": 1, "kept": True}


@pytest.mark.parametrize(
    "ranking",
    [
        [ENTRY],
        [ENTRY | {"row_id": 99, "kept": False}],
        [ENTRY | {"kept": False}],
        [ENTRY, {"row_id": 1}],
        [ENTRY | {"kept": "false"}],
        [],
    ],
)
def test_rankings_that_do_not_belong(bad, tmp_path, ranking):
    """--keep of another data set, of nothing, or no ranking at all."""
    bad("ranking", keep=write_rows(tmp_path / "ranking.jsonl", ranking))


@pytest.mark.parametrize(
    "content", ['{"row_id": 1,\n', "3\n", b'{"row_id": 0}\n{"\xff": 1}\n']
)
def test_rankings_that_are_no_json_lines(bad, tmp_path, content):
    keep = tmp_path / "ranking.jsonl"
    keep.write_bytes(content if isinstance(content, bytes) else content.encode())
    bad(r"ranking\.jsonl", keep=keep)
    bad("none", keep=tmp_path / "none.jsonl")
    bad(str(tmp_path), keep=tmp_path)


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 10),
        ("epochs", 0),
        ("rho_start", 1.2),
        ("batch", -4),
        ("micro_batch", 0),
        ("lora_rank", 0),
        ("lora_alpha", 0),
        ("max_length", 0),
        ("save_every", 0),
        ("lower_limit", -1),
        ("keep_fraction", 2),
        ("keep_fraction", 0.01),
        ("keep_fraction", "nan"),
        ("lr", "nan"),
        ("lr", -1),
        ("omega_lr", "inf"),
        ("clip", 0),
        ("clip", "nan"),
        ("seed", -1),
        ("seed", 2**63),
        ("model", None),
        ("upper", None),
        ("template", "Q: {question}"),
    ],
)
def test_values_that_no_run_can_have(bad, name, value):
    line = bad("", **{name: value})
    assert name.split("_")[-1] in line or "rho" in line


@pytest.mark.parametrize(
    "options",
    [
        {"method": "mix", "rho": 1.2},
        {"method": "mix", "rho": 0},
        {"method": "bds", "rho": 0.5},
        {"method": "sft", "upper": None, "upper_heldout": None, "upper_loss": "dpo"},
    ],
)
def test_flags_that_contradict_each_other(bad, options):
    bad("--rho|--upper-loss", **options)


@pytest.mark.parametrize(
    "words",
    [
        ["--method", "magic"],
        ["--preset", "none"],
        ["--lr", "fast"],
        ["--no-such-flag"],
        ["--dtype", "int8"],
    ],
)
def test_what_argparse_refuses_itself(capsys, tmp_path, words):
    """Unknown choices, words for numbers, unknown flags: usage and a line, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        command.run(lambda: train_offline.main([*words, *flags(out=tmp_path / "run")]))
    stderr = capsys.readouterr().err
    assert stop.value.code == 2
    assert "Traceback" not in stderr
    assert "error: " in stderr.splitlines()[-1]
    assert not listing(tmp_path)


# --- models and adapters --------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, folders):
    """broken(edit): a copy of the tiny Llama after `edit(folder)`."""

    def make(edit, name="model"):
        folder = copy_tree(folders["llama"], tmp_path / name)
        edit(folder)
        return folder

    return make


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def configure(**changes):
    def edit(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def weigh(change):
    """An edit of the weights {name: tensor}."""

    def edit(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def poison(weights):
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.inf


def smaller(folder):
    """Ids beyond the embedding: an index error deep in a forward, or said at once."""

    def halve(weights):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:100].clone()

    weigh(halve)(folder)
    configure(vocab_size=100)(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: truncate(f / "model.safetensors"), "model"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model"),
        (lambda f: (f / "model.safetensors").unlink(), "model"),
        (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "model"),
        (configure(model_type="no_such_thing"), "model"),
        (configure(model_type="t5"), "encoder-decoder"),
        (configure(hidden_size=64), "model"),
        (weigh(lambda w: w.pop("model.layers.0.self_attn.q_proj.weight")), "q_proj"),
        (weigh(poison), "nan|finite"),
        (smaller, "(?i)tokenizer.*(vocabulary|embedding|100)"),
        (lambda f: truncate(f / "tokenizer.json"), "tokenizer"),
        (
            lambda f: make_tokenizer(eos=False).save_pretrained(f),
            "lower: .*end-of-sequence",
        ),
    ],
    ids=[
        "truncated weights",
        "empty weights",
        "no weights",
        "broken config",
        "unknown architecture",
        "encoder and decoder",
        "other size",
        "a weight less",
        "infinite weight",
        "vocabulary",
        "truncated tokenizer",
        "no EOS",
    ],
)
def test_broken_models(bad, broken, edit, message):
    bad(message, model=broken(edit))


def test_missing_models(bad, tmp_path):
    bad("no/such/folder", model="no/such/folder")
    (tmp_path / "hollow").mkdir()
    bad("hollow", model=tmp_path / "hollow")


def test_hub_names_without_a_network(bad, monkeypatch):
    """In seconds, whether the name has an owner or not."""

    def unreachable(*args, **kwargs):
        raise OSError("[Errno -3] Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    for name in ("nobody/no-such-model", "no-such-model-either"):
        bad(name, model=name)


def test_broken_adapters(bad, tmp_path, adapters):
    bad("none", adapter=tmp_path / "none")
    short = copy_tree(adapters["llama"], tmp_path / "short")
    truncate(short / "adapter_model.safetensors")
    bad("short", adapter=short)
    bad("adapter", adapter=adapters["neox"])


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"trainable_token_indices": [3, 4]},
        None,
    ],
    ids=["DoRA", "bias", "modules_to_save", "PiSSA", "tokens", "IA3"],
)
def test_adapters_that_are_not_plain_lora(bad, tmp_path, folders, options):
    """Checkpoints and generation know A and B alone."""
    import peft
    from transformers import AutoModelForCausalLM

    if options is None:
        config = peft.IA3Config(task_type="CAUSAL_LM")
    else:
        config = peft.LoraConfig(
            r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options
        )
    base = AutoModelForCausalLM.from_pretrained(folders["llama"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "other")
    bad("other", adapter=tmp_path / "other")


# --- folders and disks ----------------------------------------------------------------------------


def test_unwritable_folders(bad, tmp_path):
    """Below a regular file and below /proc: even root cannot write there."""
    (tmp_path / "file").write_text("x")
    bad("file/run", out=tmp_path / "file" / "run")
    bad("file", out=tmp_path / "file")
    bad("/proc", out="/proc/nowhere/run")
    bad("file/cache", cache_dir=tmp_path / "file" / "cache")
    bad("/proc/nowhere", cache_dir="/proc/nowhere")
    assert (tmp_path / "file").read_text() == "x"


@pytest.fixture
def file_size_limit():
    """limit(bytes): no file of this process may grow beyond, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("stage", "size"),
    [
        ("cache", 2_000),
        ("checkpoint's adapter", 30_000),
        ("checkpoint's state", 120_000),
        ("adapter", 10_000),
    ],
)
def test_full_disk(
    train, refused, files, tmp_path, monkeypatch, file_size_limit, stage, size
):
    """While rows are cached, a checkpoint or the adapter is written: nothing half-written is left,
    and with space again the same command goes on to the same result."""
    paths = files(lower=30 if stage == "cache" else 8, upper=6, longest=4)
    options = {"batch": 4, "epochs": 2, "save_every": 2}
    whole = train(paths, out="whole", cache_dir=tmp_path / "whole cache", **options)
    save = models.save_adapter

    def full(*args, **more):
        file_size_limit(size)
        save(*args, **more)

    if stage == "adapter":
        monkeypatch.setattr(models, "save_adapter", full)
    else:
        file_size_limit(size)
    line = refused(lambda: train(paths, **options))
    file_size_limit(resource.RLIM_INFINITY)
    monkeypatch.undo()
    assert re.search(r"(?i)file too large", line)
    assert not leftovers(tmp_path)
    new = [name for name in listing(tmp_path) if name.startswith("run/")]
    assert not [name for name in new if name.startswith("run/adapter/") or "result" in name]
    if stage == "cache":
        assert not new
    if "checkpoint" in stage:
        assert not [name for name in new if name.startswith("run/checkpoints")]
        # The file that stopped the run is the one this case is about.
        checkpoint = whole.out / "checkpoints" / "step_00000002"
        adapter = (checkpoint / "adapter.safetensors").stat().st_size
        assert (size < adapter) == ("adapter" in stage)
        assert size < (checkpoint / "state.pt").stat().st_size
    resumed = train(paths, **options, resume=True)
    assert resumed.result == whole.result
    assert listing(resumed.out) == listing(whole.out)
    for name in ("weights.jsonl", "adapter/adapter_model.safetensors"):
        assert (resumed.out / name).read_bytes() == (whole.out / name).read_bytes()


def test_write_atomic_leaves_the_old_file_when_the_disk_is_full(tmp_path, file_size_limit):
    file = tmp_path / "weights.jsonl"
    utils.write_jsonl(file, [{"row_id": 1}])
    file_size_limit(1000)
    with pytest.raises(OSError, match="File too large"):
        utils.write_jsonl(file, [{"row_id": n} for n in range(1000)])
    file_size_limit(resource.RLIM_INFINITY)
    with pytest.raises(ValueError, match="Out of range"):
        utils.write_jsonl(file, [{"row_id": 2, "weight": math.nan}])
    assert read_rows(file) == [{"row_id": 1}]
    assert listing(tmp_path) == ["weights.jsonl"]


# --- training that goes wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"omega_loss": "next"}, {"omega_loss": "current"}, {"method": "mix", "batch": 12}],
)
def test_a_loss_that_is_not_finite(bad, tmp_path, options):
    """A rate of 1e30: theta explodes at the first step, and the run says so at once. With one step
    it is the last: no ranking, adapter or result is written from it."""
    line = bad("finite|nan", lr=1e30, trace=True, **options)
    assert "lower --lr" in line
    run = tmp_path / "run"
    assert not {"adapter", "weights.jsonl", "result.json"} & {
        path.name for path in run.iterdir()
    }
    for row in read_rows(run / "metrics.jsonl"):
        assert all(
            not isinstance(value, float) or math.isfinite(value) for value in row.values()
        )


# --- as a real process ----------------------------------------------------------------------------


def test_a_real_process(files, tmp_path, folders):
    """Through the shell, on a full disk: exit code 2, one line, no trace."""
    paths = files()
    words, environment = python(
        "train_offline.py",
        *flags(
            lower=paths["lower"],
            upper=paths["upper"],
            model=folders["llama"],
            out=tmp_path / "run",
            cache_dir=tmp_path / "cache",
        ),
    )
    done = subprocess.run(
        words,
        env=environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500)),
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(
        r"error: .*(?i:file too large); free space, .*", done.stderr.strip()
    )
    assert not (tmp_path / "run").exists()
    assert not leftovers(tmp_path)
