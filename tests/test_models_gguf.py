"""GGUF files as --model: what is read, runs on them, files that are broken or not supported."""

import random
import shutil
import struct

import pytest
import torch
from conftest import CHATML, copy_tree, flags, make_tokenizer

import eval
import models
import train_offline
from evaluation.losses import load_trained
from runtime import gguf_files
from utils import UserError

gguf = pytest.importorskip(
    "gguf", reason="needs the gguf package: pip install -r requirements-dev.txt")
from gguf_model import Types, write_gguf  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A float32 GGUF file, and the same model, tokenizer and chat template as a folder."""
    root = tmp_path_factory.mktemp("gguf")
    (root / "alone").mkdir()
    path, model, tokenizer = write_gguf(root / "alone" / "tiny.gguf")
    model.save_pretrained(root / "folder")
    tokenizer.save_pretrained(root / "folder")
    return {"file": path, "folder": root / "folder", "model": model}


# --- what is read ---------------------------------------------------------------------------------

def test_a_file_is_the_model_it_was_made_from(made):
    """Every weight bit for bit, in the file's own float32; sizes, tokens and the chat template."""
    for name in (made["file"], made["file"].parent):  # the folder that holds it, too
        model = models.load_model(str(name), CPU)
        expected = made["model"].state_dict()
        assert list(model.state_dict()) == list(expected)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
        config = models.load_config(str(name))
        assert (config.hidden_size, config.num_key_value_heads) == (32, 2)
        assert models.context_length(config) == 128
        assert not getattr(model.config, "quantization_config", None)
    read, expected = models.load_tokenizer(str(made["file"])), make_tokenizer(CHATML)
    text = "red seven <|im_start|>eleven, ete 12\n"
    assert read(text)["input_ids"] == expected(text)["input_ids"]
    assert read.chat_template == CHATML
    assert (read.eos_token_id, read.pad_token_id) == (0, 1)


@pytest.mark.parametrize(("kind", "worst"), [
    (Types.F16, 1e-3), (Types.BF16, 1e-2), (Types.Q8_0, 1e-2), (Types.Q4_1, 0.1),
    (Types.Q4_0, 0.15)], ids=lambda value: getattr(value, "name", ""))
def test_blocks_are_dequantised(tmp_path, kind, worst):
    """Weights of the dtype asked for, within the rounding of the file's type; no packed layer."""
    path, model, _ = write_gguf(tmp_path / "tiny.gguf", kind)
    read = models.load_model(str(path), CPU, "bfloat16")
    assert {p.dtype for p in read.parameters()} == {torch.bfloat16}
    read = models.load_model(str(path), CPU)
    for (key, found), expected in zip(read.state_dict().items(), model.state_dict().values(),
                                      strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= worst * expected.abs().max(), key
    assert type(read.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_which_file_a_name_means(made, tmp_path):
    assert gguf_files.find(str(made["file"])) == made["file"]
    assert gguf_files.find(str(made["file"].parent)) == made["file"]
    for name in (made["folder"], tmp_path, "owner/name", "x" * 300):
        assert gguf_files.find(str(name)) is None
    with pytest.raises(UserError, match=r"no/such\.gguf: no such GGUF file"):
        gguf_files.find("no/such.gguf")
    both = copy_tree(made["folder"], tmp_path / "both")
    shutil.copy(made["file"], both)
    assert gguf_files.find(str(both)) is None  # safetensors come first
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(made["file"], tmp_path / name)
    with pytest.raises(UserError, match=r"holds 2 GGUF files \(a\.gguf, b\.gguf\); give one"):
        gguf_files.find(str(tmp_path))


# --- runs -----------------------------------------------------------------------------------------

def test_a_run_on_a_file_is_the_run_on_its_folder(train, files, made, tmp_path):
    """Losses and ranking bit for bit; the merged model, resume; the config keeps the path."""
    paths = files(lower=12, upper=8)
    options = {"epochs": 2, "batch": 4, "lr": 1e-2, "correction": 0.7}
    plain = train(paths, model=str(made["folder"]), out=tmp_path / "plain", **options)
    run = train(paths, model=str(made["file"]), out=tmp_path / "run", merge=True, **options)
    times = {"model", "out"}
    assert {k: v for k, v in run.result.items() if k not in times} == {
        k: v for k, v in plain.result.items() if k not in times}
    assert run.weights == plain.weights
    model, tokenizer, loaded = load_trained(run.out, "cpu")
    assert loaded.args.model == str(made["file"]) and tokenizer.chat_template == CHATML
    merged = models.load_model(str(run.out / "merged"), CPU)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert models.load_tokenizer(str(run.out / "merged")).chat_template == CHATML
    again = train(paths, model=str(made["file"]), out=tmp_path / "run", resume=True, merge=True,
                  **options)
    assert again.result == run.result


def test_an_online_run_writes_answers_with_a_file(online, files, made):
    run = online(files(), model=str(made["file"]), batch=4, epochs=1, ratio_masked=1)
    assert any(row.get("refined") for row in run.curated)


def test_the_report_of_a_run_on_a_file(train, files, made, tmp_path):
    run = train(files(), model=str(made["file"]), batch=4, epochs=1)
    eval.main(["report", str(run.out), "--out", str(tmp_path / "page.html")])
    assert "tiny.gguf" in (tmp_path / "page.html").read_text()


# --- what is refused ------------------------------------------------------------------------------

@pytest.fixture
def bad(files, tmp_path, refused):
    """bad(path): the one line of a run on that file, which leaves no folder."""
    paths = files()

    def check(path, **options):
        line = refused(lambda: train_offline.main(flags(
            lower=paths["lower"], upper=paths["upper"], model=path, out=tmp_path / "bad",
            cache_dir=tmp_path / "cache", batch=4, epochs=1, **options)))
        assert not (tmp_path / "bad").exists()
        assert 20 < len(line) < 700
        return line
    return check


def test_broken_files(bad, made, tmp_path):
    """Not a GGUF file, cut in its header, cut in its weights, of another version."""
    whole, path = made["file"].read_bytes(), tmp_path / "bad.gguf"
    for content in (b"", b"<html>not found</html>", whole[:20], whole[:3000], whole[:-40],
                    whole[:4] + struct.pack("<I", 1) + whole[8:],
                    whole[:8] + struct.pack("<Q", 2**60) + whole[16:]):
        path.write_bytes(content)
        line = bad(path)
        assert "bad.gguf: a broken" in line and "GGUF file (" in line and "copy it again" in line


def test_files_that_transformers_would_not_read_right(bad, tmp_path):
    def path(name, **options):
        return write_gguf(tmp_path / f"{name}.gguf", **options)[0]

    assert "an unsupported GGUF file (GGUF model with architecture rwkv6" in bad(
        path("rwkv", architecture="rwkv6"))
    assert "one part of a GGUF model in 2 files; merge them first" in bad(
        path("part", more=lambda writer: writer.add_uint16("split.count", 2)))
    assert "scales its rotary positions" in bad(
        path("scaled", more=lambda writer: writer.add_string("llama.rope.scaling.type", "yarn")))
    assert "lacks 1 of the model's tensors (such as model.layers.1.mlp.up_proj.weight)" in bad(
        path("lacks", leave_out=("model.layers.1.mlp.up_proj.weight",)))
    whole = path("whole")
    assert "--four-bit quantises safetensors" in bad(whole, four_bit=True)
    other = tmp_path / "model.bin"
    other.write_bytes(whole.read_bytes())
    assert "model.bin: no such folder for the model, and no .gguf file" in bad(other)


def test_without_the_package_one_line_says_what_to_install(bad, made, monkeypatch):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    assert bad(made["file"]).endswith("which is missing: pip install gguf")


def test_any_changed_byte_is_read_or_refused(made, tmp_path):
    """40 files with a few bytes changed in the header: a model, or a `UserError`; nothing hangs."""
    whole, rng, read = made["file"].read_bytes(), random.Random(0), 0
    end = whole.index(b"token_embd") + 2000
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 3))):
            data[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        (tmp_path / "changed.gguf").write_bytes(data)
        try:
            models.load_tokenizer(str(tmp_path / "changed.gguf"))
            models.load_config(str(tmp_path / "changed.gguf"))
            models.load_model(str(tmp_path / "changed.gguf"), CPU)
            read += 1
        except UserError as error:
            assert "changed.gguf" in str(error) and "\n" not in str(error)
    assert 0 < read < 40
