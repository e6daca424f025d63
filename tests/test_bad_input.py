"""Bad input: one clear line on stderr, exit code 2, no traceback, and nothing half-written.

Every case goes through `main`, as the command line does. Errors that can be known before training
must leave no run folder at all; the three that appear later leave a run that can be resumed.
"""

import json
import math
import re
import resource
import shutil
import subprocess

import huggingface_hub
import pytest
import torch
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
import options
import train_offline
import utils
from evaluation.runs import make_parent
from runtime import command, processes


def leftovers(folder):
    """Files that are neither whole nor wanted: partial and temporary ones."""
    return [name for name in listing(folder)
            if re.search(r"(^|/)\.|partial|\.tmp", name.replace(".cache", "cache"))]


@pytest.fixture
def bad(tmp_path, files, folders, refused):
    """bad(message, **flags): the run is refused with that message and leaves no trace."""
    paths = files()

    def check(message, lower=paths["lower"], upper=paths["upper"], out=tmp_path / "run",
              model=folders["llama"], trace=False, **options):
        before = listing(tmp_path)
        options = {"lower": lower, "upper": upper, "upper_heldout": paths["heldout"],
                   "model": model, "out": out, "cache_dir": tmp_path / "cache", "batch": 4,
                   "epochs": 1} | options
        line = refused(lambda: train_offline.main(flags(**options)))
        assert re.search(message, line), line
        assert 20 < len(line) < 700
        assert not leftovers(tmp_path)
        if not trace:
            new = set(listing(tmp_path)) - set(before)
            assert not [name for name in new if not name.startswith("cache/")]
            assert not (tmp_path / "run").exists()
        return line
    check.paths = paths
    return check


def rewrite(tmp_path, rows):
    """A rows file from dictionaries, or from lines as they are."""
    path = tmp_path / "bad.jsonl"
    if rows and isinstance(rows[0], str):
        path.write_text("".join(line + "\n" for line in rows))
        return path
    return write_rows(path, rows)


GOOD = [json.dumps(row) for row in make_rows(6, seed=31)]


# --- rows -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("lines", "message"), [
    ([*GOOD[:4], '{"prompt": "a", "response": ', GOOD[5]], r"bad\.jsonl line 5: not valid JSON"),
    ([*GOOD[:2], "[1, 2]"], r"bad\.jsonl line 3: a row must be an object, not list"),
    (['{"text": "a", "label": 1}'], "columns 'text', 'label'.*--lower-columns"),
    ([*GOOD[:3], '{"prompt": "a"}'], r'line 4: no column "response"; found prompt'),
    ([*GOOD[:3], '{"prompt": "a", "response": 7}'], r'line 4: "response" must be text, not int'),
    ([*GOOD[:3], '{"prompt": ["a"], "response": "b"}'], r"line 4.*message 0 must be an object"),
    ([], "lower: the source holds no rows"),
    (["", "  "], "lower: the source holds no rows"),
    (['{"prompt": "a", "response": ""}', '{"prompt": "", "response": "b"}'],
     r"lower: no row is left to train on \(1 empty_response, 1 empty_prompt\)"),
    (['{"prompt": "a", "response": "b", "bad": "FALSE"}', '{"prompt": "a", "response": 7}'],
     "line 2"),
    (['{"prompt": "a", "response": "b", "bad": "maybe"}'], '"bad" must be true or false'),
    ([json.dumps({"prompt": "long " * 200, "response": "b"})],
     r"lower: \d rows are longer than the model's context of 128 tokens.*--max-length 128"),
], ids=["broken JSON", "not an object", "unknown layout", "missing column", "wrong type",
        "wrong message", "empty file", "blank file", "nothing left", "a flag in capitals",
        "bad flag", "too long"])
@pytest.mark.parametrize("level", ["lower", "upper"])
def test_rows(bad, tmp_path, level, lines, message):
    path = rewrite(tmp_path, lines)
    bad(message.replace("lower:", f"{level}:"), **{level: path})


def test_files_that_are_not_there_or_not_readable(bad, tmp_path):
    bad(r"nowhere\.jsonl: no such file or folder", lower=tmp_path / "nowhere.jsonl")
    (tmp_path / "rows.docx").write_text("x")
    bad(r"rows\.docx: unknown file type; known: \.jsonl", lower=tmp_path / "rows.docx")
    (tmp_path / "empty folder").mkdir()
    bad("empty folder: no .*file in this folder", lower=tmp_path / "empty folder")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and then nothing")
    bad(r"rows\.parquet: not a valid parquet file", lower=tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "\xff\xfe", "response": "b"}\n')
    bad(r"rows\.jsonl line 1: not valid JSON", lower=tmp_path / "rows.jsonl")
    bad("unknown name 'promt'", lower_columns="promt=question")
    bad("lower: the name of the source is empty", lower="")


def test_held_out_rows_that_are_trained_on(bad, tmp_path):
    """A prompt on both sides flatters the run."""
    shared = read_rows(bad.paths["heldout"])[:2]
    path = rewrite(tmp_path, [*make_rows(5, seed=32), *shared])
    bad(r"2 lower rows have prompts that are held out in upper_heldout \(first row_id 5\)",
        lower=path)
    bad(r"2 upper rows have prompts that are held out.*--allow-overlap", upper=path)


def test_too_few_rows_to_hold_any_out(bad, tmp_path):
    path = rewrite(tmp_path, make_rows(1, seed=33))
    bad("cannot hold out 1 of 1 rows", upper=path, upper_heldout=None)


def test_rankings_that_do_not_belong(bad, tmp_path):
    """--keep of another data set, of nothing, or no ranking at all."""
    keep = tmp_path / "ranking.jsonl"
    entry = {"row_id": 3, "hash": "0" * 16, "rank": 1, "kept": True}
    write_rows(keep, [entry])
    bad("row_id 3 has hash 0+, the lower rows have [0-9a-f]{16}: the ranking belongs to other data",
        keep=keep)
    write_rows(keep, [entry | {"row_id": 99, "kept": False}])
    bad("keeps none of the 12 lower rows", keep=keep)
    write_rows(keep, [entry | {"kept": False}])
    bad("the ranking belongs to other data", keep=keep)
    write_rows(keep, [entry, {"row_id": 1}])
    bad(r"ranking\.jsonl row 2: no 'hash'", keep=keep)
    write_rows(keep, [entry | {"kept": "false"}])
    bad(r"ranking\.jsonl row 1: row_id must be a whole number, and kept true or false", keep=keep)
    keep.write_text('{"row_id": 1,\n')
    bad(r"ranking\.jsonl line 1: not valid JSON", keep=keep)
    keep.write_text("3\n")
    bad(r"ranking\.jsonl line 1: not valid JSON \(not an object\)", keep=keep)
    keep.write_bytes(b'{"row_id": 0}\n' * 40 + b'{"\xff": 1}\n')
    with pytest.raises(utils.UserError, match=r"ranking\.jsonl line 41: not valid JSON \('utf-8'"):
        utils.read_jsonl(keep)
    keep.write_text("\ufeff" + json.dumps(entry | {"row_id": 99}))  # a byte-order mark is no error
    bad("keeps none of the 12 lower rows", keep=keep)
    keep.write_text("")
    bad("keeps none", keep=keep)
    bad(r"none\.jsonl: no such file", keep=tmp_path / "none.jsonl")
    bad("error: ", keep=tmp_path)


# --- flags ----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("options", "message"), [
    ({"method": "mix", "rho": 1.2}, r"--rho 1\.2: direct mixing needs a rho in \(0, 1\]"),
    ({"method": "mix", "rho": 0}, r"--rho 0\.0"),
    ({"method": "mix", "rho": "nan"}, "--rho nan"),
    ({"epochs": 10}, r"--epochs 10: rho must lie inside \(0, 1\).* = 1\.0; use fewer"),
    ({"rho_start": 1.2}, "rho must lie inside"),
    ({"epochs": 3, "rho_step": -0.1}, "rho must lie inside"),
    ({"batch": -4}, "--batch -4: must be 1 or more"),
    ({"micro_batch": 0}, "--micro-batch 0: must be 1 or more"),
    ({"epochs": 0}, "--epochs 0: must be 1 or more"),
    ({"lora_rank": 0}, "--lora-rank 0: must be 1 or more"),
    ({"lora_alpha": 0}, "--lora-alpha 0: must be 1 or more"),
    ({"max_length": 0}, "--max-length 0"),
    ({"save_every": 0}, "--save-every 0"),
    ({"lower_limit": -1}, "limit -1"),
    ({"keep_fraction": 2}, r"--keep-fraction 2\.0: must lie in \(0, 1\]"),
    ({"keep_fraction": 0.01}, r"--keep-fraction 0\.01: keeps none of the 12 lower rows"),
    ({"dpo_beta": -1}, r"--dpo-beta -1\.0: must be a finite number above 0"),
    ({"dpo_beta": "nan"}, "--dpo-beta nan"),
    ({"method": "sft", "upper": None, "upper_heldout": None, "upper_loss": "dpo"},
     "--upper-loss dpo: needs preference pairs as --upper"),
    ({"keep_fraction": "nan"}, "--keep-fraction nan"),
    ({"lr": "nan"}, "--lr nan: must be a finite number"),
    ({"lr": -1}, r"--lr -1\.0: must be a finite number, 0 or more"),
    ({"omega_lr": "inf"}, "--omega-lr inf: must be a finite number"),
    ({"clip": -1}, r"--clip -1\.0: must be above 0"),
    ({"clip": 0}, r"--clip 0\.0: must be above 0, or nothing is trained; inf is no clipping"),
    ({"clip": "nan"}, "--clip nan: must be above 0"),
    ({"method": "bds", "rho": 0.5}, r"--rho 0\.5: of --method mix; .* --rho-start"),
    ({"model": None}, "--model is missing"),
    ({"upper": None}, "--upper is missing"),
    ({"template": "Q: {question}"}, r"--template.*must hold \{prompt\} once"),
    ({"device": "cuda:0"}, "--device cuda:0: no CUDA device here"),
    ({"device": "abacus"}, "--device abacus"),
    ({"device": "mps"}, "--device mps: no such device; use auto, cpu or cuda"),
], ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "")
def test_flags(bad, options, message):
    if options.get("device") == "cuda:0" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    bad(message, **options)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert processes.pick_device("cuda").index is None
    assert processes.pick_device("cuda:1").index == 1
    with pytest.raises(utils.UserError, match=r"--device cuda:2: there are 2 CUDA devices"):
        processes.pick_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("no GPU"))
    assert processes.join_processes("cpu:1").type == "cpu"


@pytest.mark.parametrize("seed", [-1, 2**63, 99999999999999999999])
def test_seeds_that_no_generator_takes(seed):
    options.check_seed(0), options.check_seed(2**63 - 1)
    with pytest.raises(utils.UserError, match=f"--seed {seed}: must lie between 0 and 2"):
        options.check_seed(seed)


@pytest.mark.parametrize("words", [["--method", "magic"], ["--preset", "none"], ["--lr", "fast"],
                                   ["--no-such-flag"], ["--dtype", "int8"]])
def test_what_argparse_refuses_itself(capsys, tmp_path, words):
    """Unknown choices, words for numbers, unknown flags: usage and a line, exit code 2."""
    with pytest.raises(SystemExit) as stop:
        command.run(lambda: train_offline.main([*words, *flags(out=tmp_path / "run")]))
    stderr = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in stderr
    assert "error: " in stderr.splitlines()[-1] and not listing(tmp_path)


# --- models and adapters --------------------------------------------------------------------------

@pytest.fixture
def broken(tmp_path, folders):
    """broken(edit): a copy of the tiny Llama after `edit(folder)`."""
    def make(edit, name="model"):
        folder = copy_tree(folders["llama"], tmp_path / name)
        edit(folder)
        return folder
    return make


def truncate(path, share=0.5):
    path.write_bytes(path.read_bytes()[:int(share * path.stat().st_size)])


def test_missing_models(bad, tmp_path):
    bad("no/such/folder: no such folder for the model", model="no/such/folder")
    (tmp_path / "hollow").mkdir()
    bad("hollow: the (model|tokenizer) cannot be loaded", model=tmp_path / "hollow")
    bad(r"bad\.jsonl: no such folder", model=rewrite(tmp_path, GOOD))


def test_hub_names_without_a_network(bad, monkeypatch):
    """In seconds, whether the name has an owner or not, for models and for data."""
    def unreachable(*args, **kwargs):
        raise OSError("[Errno -3] Temporary failure in name resolution")

    import datasets

    for name in ("model_info", "dataset_info"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # put back afterwards
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    for name in ("nobody/no-such-model", "no-such-model-either"):
        bad(f"{name}: the (model|tokenizer) cannot be loaded", model=name)
    bad("nobody/no-such-rows: no such file or folder, the hub cannot be reached",
        lower="nobody/no-such-rows")


def test_a_name_that_the_hub_cannot_have(bad, monkeypatch):
    """It is refused before any request: the hub is not taken for silent."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    bad("my model: no such model on the hub", model="my model")
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(("edit", "message"), [
    (lambda f: truncate(f / "model.safetensors"), r"(broken weights|cannot be loaded)"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), r"(broken weights|cannot be loaded)"),
    (lambda f: (f / "model.safetensors").unlink(), "cannot be loaded"),
    (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "cannot be loaded"),
    (lambda f: (f / "config.json").write_text('{"model_type": "no_such_thing"}'),
     "cannot be loaded"),
    (lambda f: truncate(f / "tokenizer.json"), "the tokenizer cannot be loaded"),
    (lambda f: make_tokenizer(eos=False).save_pretrained(f),
     'lower: the tokenizer has no end-of-sequence token.*"eos_token"'),
], ids=["truncated weights", "empty weights", "no weights", "broken config", "unknown architecture",
        "truncated tokenizer", "no EOS"])
def test_broken_models(bad, broken, edit, message):
    bad(message, model=broken(edit))


def test_an_encoder_decoder_model(bad, broken):
    def t5(folder):
        (folder / "config.json").write_text('{"model_type": "t5"}')

    bad("model: an encoder-decoder model; these scripts train decoders", model=broken(t5))


def test_weights_that_do_not_fit_the_config(bad, broken):
    def wider(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))

    bad("model: the model cannot be loaded", model=broken(wider))

    def missing(folder):
        weights = load_file(folder / "model.safetensors")
        weights.pop("model.layers.0.self_attn.q_proj.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    bad("q_proj", model=broken(missing, "without"))


def test_a_tokenizer_larger_than_the_model(bad, broken):
    """Ids beyond the embedding: an index error deep in a forward, or said at once."""
    def smaller(folder):
        config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:100].clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))

    bad("(?i)tokenizer.*(vocabulary|embedding|100)", model=broken(smaller))


def test_weights_that_are_not_finite(bad, broken):
    def poison(folder):
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] = math.inf
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    bad("packed log-probs differ from the model's own by nan|not finite", model=broken(poison))


def test_broken_adapters(bad, tmp_path, adapters):
    for dry_run in (False, True):
        bad("none: no LoRA adapter", adapter=tmp_path / "none", dry_run=dry_run)
    short = copy_tree(adapters["llama"], tmp_path / "short")
    truncate(short / "adapter_model.safetensors")
    bad("short: not a LoRA adapter for this model", adapter=short)
    bad("not a LoRA adapter for this model", adapter=adapters["neox"])


@pytest.mark.parametrize("options", [{"use_dora": True}, {"bias": "all"},
                                     {"modules_to_save": ["lm_head"]},
                                     {"init_lora_weights": "pissa"},
                                     {"trainable_token_indices": [3, 4]}, None],
                         ids=["DoRA", "bias", "modules_to_save", "PiSSA", "tokens", "IA3"])
def test_adapters_that_are_not_plain_lora(bad, tmp_path, folders, options):
    """Checkpoints and generation know A and B alone."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.IA3Config(task_type="CAUSAL_LM") if options is None else peft.LoraConfig(
        r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    base = AutoModelForCausalLM.from_pretrained(folders["llama"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "other")
    bad("other: only plain LoRA adapters are trained further", adapter=tmp_path / "other")


# --- folders and disks ----------------------------------------------------------------------------

def test_unwritable_folders(bad, tmp_path):
    """Below a regular file and below /proc: even root cannot write there."""
    (tmp_path / "file").write_text("x")
    bad("file/run", out=tmp_path / "file" / "run")
    bad("file", out=tmp_path / "file")
    bad("/proc", out="/proc/nowhere/run")
    bad("--cache-dir .*file/cache: .*cannot be made", cache_dir=tmp_path / "file" / "cache")
    bad("--cache-dir /proc/nowhere: .*cannot be made", cache_dir="/proc/nowhere")
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_with_other_files(bad, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("x")
    bad("taken: the folder holds other files and no run; choose another --out",
        out=tmp_path / "taken")
    bad("taken", out=tmp_path / "taken", resume=True)
    assert listing(tmp_path / "taken") == ["thesis.tex"]


def test_a_folder_with_a_run(train, refused, files, tmp_path):
    """A finished run is not overwritten, and not continued with other settings."""
    paths = files()
    options = {"batch": 4, "epochs": 2, "save_every": 3}
    run = train(paths, **options)
    before = {name: (run.out / name).read_bytes() for name in listing(run.out)}

    def again(**changes):
        return refused(lambda: train(paths, **options | changes))

    assert "run: already holds a run; continue it with --resume" in again()
    line = again(resume=True, lr=1e-5)
    assert "cannot resume: args lr was 0.0002 and is now 1e-05" in line
    line = again(resume=True, lora_rank=8)
    assert "cannot resume: args lora_rank was 16 and is now 8" in line
    assert before == {name: (run.out / name).read_bytes() for name in listing(run.out)}

    shutil.rmtree(run.out / "checkpoints" / "step_00000006")
    assert train(paths, **options, resume=True).result == run.result  # from the one before

    (run.out / "config.json").write_text('{"args": {')
    assert "config.json: not valid JSON" in again(resume=True)


@pytest.fixture
def file_size_limit():
    """limit(bytes): no file of this process may grow beyond, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("stage", "size"), [
    ("cache", 2_000), ("checkpoint's adapter", 30_000), ("checkpoint's state", 120_000),
    ("adapter", 10_000), ("merged model", 100_000)])
def test_full_disk(train, refused, files, tmp_path, monkeypatch, file_size_limit, stage, size):
    """While rows are cached, a checkpoint, the adapter or the merged model is written: nothing
    half-written is left, and with space again the same command goes on to the same result."""
    paths = files(lower=30 if stage == "cache" else 8, upper=6, longest=4)
    options = {"batch": 4, "epochs": 2, "save_every": 2, "merge": True}
    whole = train(paths, out="whole", cache_dir=tmp_path / "cache of whole", **options)
    for part in ("adapter", "merged"):  # for other readers, as all files beside it
        assert len({path.stat().st_mode for path in (whole.out / part).iterdir()}) == 1
    save = models.save_pretrained

    def full(model, folder, **more):
        if folder.name == {"adapter": "adapter", "merged model": "merged"}.get(stage):
            file_size_limit(size)
        save(model, folder, **more)

    if "checkpoint" in stage or stage == "cache":
        file_size_limit(size)
    monkeypatch.setattr(models, "save_pretrained", full)
    line = refused(lambda: train(paths, **options))
    file_size_limit(resource.RLIM_INFINITY)
    monkeypatch.setattr(models, "save_pretrained", save)
    assert re.search("(?i)file too large", line) and "free space" in line
    assert not leftovers(tmp_path)
    new = [name for name in listing(tmp_path) if name.startswith("run/")]
    if stage == "cache":
        assert not (tmp_path / "run").exists() and not listing(tmp_path / "cache")
    elif "checkpoint" in stage:
        assert not [name for name in new if name.startswith("run/checkpoints")]
        # The file that stopped the run is the one this case is about.
        sizes = {name: (whole.out / "checkpoints" / "step_00000002" / name).stat().st_size
                 for name in ("adapter.safetensors", "state.pt")}
        assert (size < sizes["adapter.safetensors"]) == ("adapter" in stage)
        assert size < sizes["state.pt"]
    else:
        assert ("run/adapter/adapter_model.safetensors" in new) == (stage != "adapter")
        assert not [name for name in new if "merged" in name or name == "run/result.json"]
    resumed = train(paths, **options, resume=True)
    assert resumed.result == whole.result
    assert listing(resumed.out) == listing(whole.out)
    assert ((resumed.out / "weights.jsonl").read_bytes()
            == (whole.out / "weights.jsonl").read_bytes())


def test_a_folder_instead_of_a_ranking(bad, tmp_path):
    bad(f"{tmp_path}: no such file, but a folder", method="sft", keep=tmp_path)


def test_a_folder_that_may_not_be_written_to_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(utils.UserError, match="its folder may not be written to"):
        make_parent(tmp_path / "report.html")


def test_no_link_is_written_over(tmp_path):
    (tmp_path / "target").write_text("old")
    for name in ("target", "gone", "link"):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(name)
        with pytest.raises(utils.UserError, match="link: is not a regular file, but a link"):
            make_parent(tmp_path / "link")
    assert (tmp_path / "target").read_text() == "old"


def test_write_atomic_leaves_the_old_file_when_the_disk_is_full(tmp_path, file_size_limit):
    file = tmp_path / "weights.jsonl"
    utils.write_jsonl(file, [{"row_id": 1}])
    file_size_limit(1000)
    with pytest.raises(OSError, match="File too large"):
        utils.write_jsonl(file, [{"row_id": n} for n in range(1000)])
    file_size_limit(resource.RLIM_INFINITY)
    with pytest.raises(ValueError, match="Out of range"):
        utils.write_jsonl(file, [{"row_id": 2, "weight": math.nan}])
    assert read_rows(file) == [{"row_id": 1}] and listing(tmp_path) == ["weights.jsonl"]


# --- training that goes wrong ---------------------------------------------------------------------

@pytest.mark.parametrize("omega_loss", ["next", "current"])
def test_a_loss_that_is_not_finite(bad, tmp_path, omega_loss):
    """A rate of 1e30: theta explodes at the first step, and the run says so at once."""
    line = bad("step [01]: .*not finite", lr=1e30, omega_loss=omega_loss, trace=True)
    assert "lower --lr" in line
    run = tmp_path / "run"
    assert not (run / "adapter").exists() and not (run / "weights.jsonl").exists()
    for row in read_rows(run / "metrics.jsonl"):
        assert all(not isinstance(value, float) or math.isfinite(value) for value in row.values())


def test_a_final_model_that_is_not_finite(bad, tmp_path):
    """The last step is the bad one: no ranking, adapter or result is written from it."""
    bad("upper_heldout is nan; lower --lr", method="mix", batch=12, lr=1e30,
        trace=True)
    assert not {"adapter", "weights.jsonl", "result.json"} & {
        path.name for path in (tmp_path / "run").iterdir()}


def test_a_collapsed_or_exploding_selector_is_no_traceback(train, files):
    """An absurd rate for omega: a warning, and a ranking all the same."""
    run = train(files(), batch=4, epochs=2, omega_lr=1e6)
    assert len(run.weights) == 12 and run.metrics[-1]["omega/collapsed"]
    assert sum(entry["weight"] for entry in run.weights) == pytest.approx(12)


# --- as a real process ----------------------------------------------------------------------------

def test_real_processes(files, tmp_path, folders):
    """Three of the above through the shell, started together: exit code 2, one line, no trace."""
    paths = files()
    common = {"lower": paths["lower"], "upper": paths["upper"], "upper_heldout": paths["heldout"],
              "model": folders["llama"], "batch": 4, "epochs": 1}
    given = {
        "json": ({"lower": rewrite(tmp_path, [*GOOD[:2], "{"])},
                 r"error: .*bad\.jsonl line 3: not valid JSON.*"),
        "model": ({"model": tmp_path / "absent"},
                  r"error: .*absent: no such folder for the model, .*"),
        "disk": ({}, r"error: .*(?i:file too large); free space, .*"),
    }
    started = {}
    for name, (more, _) in given.items():
        command, environment = python("train_offline.py", *flags(
            **common | more | {"out": tmp_path / f"run {name}", "cache_dir": tmp_path / name}))
        limit = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))) if (
            name == "disk") else None
        started[name] = subprocess.Popen(command, env=environment, cwd=ROOT, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         preexec_fn=limit)
    for name, process in started.items():
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 2, stderr
        assert re.fullmatch(given[name][1], stderr.strip()), stderr
        assert not (tmp_path / f"run {name}").exists()
    assert not leftovers(tmp_path)
