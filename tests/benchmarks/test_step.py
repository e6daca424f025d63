"""The benchmark of a training step at tiny sizes."""

import pytest
import torch
from conftest import is_spread, write_rows
from torch.utils.flop_counter import FlopCounterMode

from batches import pack
from benchmarks.__main__ import main
from benchmarks.shapes import load_shape
from benchmarks.step import batches_of, compare_steps, step_flops, tokens_of
from logprobs import sequence_logprobs

STEPS = {"plain SFT", "BDS, loss at theta^k", "BDS, loss at theta^{k+1}", "online, R=10%, G=1",
         "two padded forwards"}


def test_step_on_the_toy(measured):
    """Every way of writing the step gives the same loss; floors lie where their formula says."""
    results = measured("step", "--rounds", 2, "--batch", 4, "--micro-batch", 3)
    assert results.keys() == STEPS
    for entry in results.values():
        assert entry["loss_difference"] < 1e-6
        assert entry["loss"] == pytest.approx(results["plain SFT"]["loss"], rel=1e-6)
        is_spread(entry["tokens_per_second"])
    assert results["plain SFT"]["ratio_to_sft"]["median"] == 1.0
    assert results["BDS, loss at theta^k"]["floor"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert results["BDS, loss at theta^{k+1}"]["floor"]["min"] > 1.0
    assert results["BDS, loss at theta^{k+1}"]["floor"]["max"] < 1.5
    assert "padded takes" in measured.text


def test_step_on_files_with_a_larger_vocabulary(measured, files, folders):
    made = files(lower=6, upper=5)
    words = ["--lower", made["lower"], "--upper", made["upper"], "--model", folders["llama"]]
    results = measured("step", "--rounds", 1, "--batch", 3, *words, "--vocabulary", 500)
    assert all(entry["loss_difference"] < 1e-6 for entry in results.values())
    assert results["plain SFT"]["loss"] < 12  # random weights: about log 500 and a bit
    assert "V 500" in measured.text


def test_step_flops_counts_products():
    """Against torch's counter of a whole packed step: linear layers and the head; attention is
    causal in ours and torch counts only what the CPU's kernel reports."""
    model, lower, upper = load_shape("tiny", torch.device("cpu"), 4, 40, 50)
    with FlopCounterMode(display=False) as counter:
        logps, lengths = sequence_logprobs(model, pack(lower + upper))
        (-logps / lengths).mean().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(v for k, v in counts.items() if "mm" in str(k))
    estimate = step_flops(model, lower + upper)
    # LoRA's own products (rank 16 beside a width of 64) are not counted, nor the first layer's
    # missing gradient: an estimate that flatters nobody.
    assert 0.4 * products < estimate < 1.5 * products


def test_step_on_a_model_without_a_head_width_in_its_configuration(measured, files, folders):
    """GPT-NeoX: hidden size 32 over 4 heads."""
    made = files(lower=4, upper=4)
    results = measured("step", "--rounds", 1, "--batch", 2, "--lower", made["lower"], "--upper",
                       made["upper"], "--model", folders["neox"])
    assert results.keys() == STEPS
    assert results["plain SFT"]["product_share"] > 0


@pytest.mark.parametrize("shape", ["tiny", "tiny-neox"])
def test_step_flops_of_attention(shape):
    """Rows of 40 tokens against two of 20: equal products, half the attention. Width 64."""
    model, _, _ = load_shape(shape, torch.device("cpu"), 1, 40, 40)

    def row(size):
        return {"input_ids": [5] * size, "trained": [0] * size}

    difference = step_flops(model, [row(40)]) - step_flops(model, [row(20)] * 2)
    assert difference == 3.5 * 2 * 2 * 64 * (40**2 - 2 * 20**2)


def test_five_answers_to_a_masked_row():
    """The same loss as one answer, more tokens, a higher floor: equal answers have equal loss."""
    model, lower, upper = load_shape("tiny", torch.device("cpu"), 4, 20, 20)
    batches = batches_of(4, 4)
    results, _, _ = compare_steps(model, lower, upper, batches, 4, 1, torch.device("cpu"), (1, 5))
    one, five = results["online, R=10%, G=1"], results["online, R=10%, G=5"]
    assert five["loss"] == pytest.approx(one["loss"], rel=1e-6)
    masked = len(lower[batches[0][0]]["input_ids"])
    before, _ = tokens_of("online, R=10%, G=1", batches[0], lower, upper)
    after, _ = tokens_of("online, R=10%, G=5", batches[0], lower, upper)
    assert after == before + 4 * masked
    assert five["floor"]["median"] == pytest.approx(
        one["floor"]["median"] + 1.5 * 4 * masked / before)


def test_a_step_without_enough_memory_is_recorded(monkeypatch):
    """The others are measured; gradients of the step that broke off are gone."""
    def broken(model, theta, *_):
        theta[0].grad = torch.ones_like(theta[0])
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr("benchmarks.step.padded_step", broken)
    model, lower, upper = load_shape("tiny", torch.device("cpu"), 2, 20, 20)
    results, _, _ = compare_steps(model, lower, upper, [[0, 1]], 2, 1, torch.device("cpu"))
    assert results["two padded forwards"] == {
        "failed": "CUDA out of memory. Tried to allocate 9 GiB"}
    assert results["BDS, loss at theta^k"]["loss_difference"] < 1e-6
    assert "padded_over_this" not in results["plain SFT"]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_vocabulary_smaller_than_the_tokenizers(refused, tmp_path, folders):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "red", "response": "blue"}] * 3)
    assert "--vocabulary 10" in refused(lambda: main(
        ["step", "--lower", rows, "--upper", rows, "--model", str(folders["llama"]),
         "--vocabulary", "10"]))
