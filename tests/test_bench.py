"""bench.py at tiny sizes: what must hold whatever the clock says. No time is asserted."""

import json

import pytest
import torch
from conftest import read_rows, write_rows

import bench
import logprobs


@pytest.fixture
def run(tmp_path, capfd):
    """run("logprob", "--rounds", 2, ...) -> the saved JSON; `run.text` is what was printed."""
    def call(*words):
        file = tmp_path / "bench.json"
        bench.main([*map(str, words), "--json", str(file)])
        call.text = capfd.readouterr().out
        report = json.loads(file.read_text())
        assert report["benchmark"] == words[0]
        assert report["command"].startswith(f"python bench.py {words[0]}")
        assert report["torch"] == torch.__version__ and report["hardware"] and report["date"]
        return report["results"]
    return call


def is_spread(found):
    assert 0 < found["min"] <= found["median"] <= found["max"]


def test_the_median_and_the_ratio():
    assert bench.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert bench.spread([4.0, 1.0, 2.0, 3.0])["median"] == 2.5
    assert bench.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_variants_take_turns_and_the_first_call_is_not_timed():
    called = []
    variants = {name: lambda turn, name=name: called.append((name, turn)) for name in "abc"}
    seconds = bench.measure(variants, 4, torch.device("cpu"), "test")
    assert [len(s) for s in seconds.values()] == [4, 4, 4]
    names = "".join(name for name, _ in called)
    assert names == "abc" + "abc" + "bca" + "cab" + "abc"
    assert [turn for _, turn in called[3::3]] == [0, 1, 2, 3]


def test_peak_memory_sees_what_a_call_holds():
    """64 MB of float32, freed before the call returns."""
    found = bench.peak_memory(lambda: torch.ones(16 * 2**20).sum(), torch.device("cpu"))
    if found is None:
        pytest.skip("the system lets no process reset its own high-water mark")
    assert 60 * 2**20 < found < 90 * 2**20


def test_logprob(run):
    results = run("logprob", "--rounds", 3, "--sizes", 33, 16, 1003)
    for name in ("here, torch", "full logits"):
        assert results[name]["gradient_error"] < 1e-5
        is_spread(results[name]["seconds"])
        assert results[name]["floor"] == "floor: two products"
    assert results["floor: two products"]["ratio_to_floor"]["median"] == 1.0
    assert results["no gradient"]["floor"] == "floor: one product"
    assert "of the floor" in run.text
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        for name in ("torch linear_cross_entropy", "torch linear_cross_entropy, chunked"):
            assert results[name]["gradient_error"] < 1e-4


STEPS = {"plain SFT", "BDS, loss at theta^k", "BDS, loss at theta^{k+1}", "online, R=10%, G=1",
         "two padded forwards"}


def test_step_on_the_toy(run):
    """Every way of writing the step gives the same loss; floors lie where their formula says."""
    results = run("step", "--rounds", 2, "--batch", 4, "--micro-batch", 3)
    assert results.keys() == STEPS
    for entry in results.values():
        assert entry["loss_difference"] < 1e-6
        assert entry["loss"] == pytest.approx(results["plain SFT"]["loss"], rel=1e-6)
        is_spread(entry["tokens_per_second"])
    assert results["plain SFT"]["ratio_to_sft"]["median"] == 1.0
    assert results["BDS, loss at theta^k"]["floor"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert results["BDS, loss at theta^{k+1}"]["floor"]["min"] > 1.0
    assert results["BDS, loss at theta^{k+1}"]["floor"]["max"] < 1.5
    assert "padded takes" in run.text


def test_step_on_files_with_a_larger_vocabulary(run, files, folders):
    made = files(lower=6, upper=5)
    words = ["--lower", made["lower"], "--upper", made["upper"], "--model", folders["llama"]]
    results = run("step", "--rounds", 1, "--batch", 3, *words, "--vocabulary", 500)
    assert all(entry["loss_difference"] < 1e-6 for entry in results.values())
    assert results["plain SFT"]["loss"] < 12  # random weights: about log 500 and a bit
    assert "V 500" in run.text


def test_step_flops_counts_products():
    """Against torch's counter of a whole packed step: linear layers and the head; attention is
    causal in ours and torch counts only what the CPU's kernel reports."""
    from types import SimpleNamespace

    from torch.utils.flop_counter import FlopCounterMode

    from data import pack

    args = SimpleNamespace(model="tiny", lower_tokens=40, upper_tokens=50,
                           gradient_checkpointing=False)
    model, lower, upper = bench.load(args, torch.device("cpu"), 4)
    with FlopCounterMode(display=False) as counter:
        logps, lengths = logprobs.sequence_logprobs(model, pack(lower + upper))
        (-logps / lengths).mean().backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(v for k, v in counts.items() if "mm" in str(k))
    estimate = bench.step_flops(model, lower + upper)
    # LoRA's own products (rank 16 beside a width of 64) are not counted, nor the first layer's
    # missing gradient: an estimate that flatters nobody.
    assert 0.4 * products < estimate < 1.5 * products


def test_generate(run):
    results = run("generate", "--rounds", 1, "--prompts", 6, "--max-new-tokens", 5,
                  "--generation-batch", 4)
    assert results.keys() == {"as it is", "adapter not folded", "prompts not sorted",
                              "batch of 8", "one by one"}
    for name, entry in results.items():
        assert entry["equal_answers"] > 0.7 if name == "adapter not folded" else (
            entry["equal_answers"] == 1.0)  # folding rounds otherwise
        assert 6 <= entry["tokens"] <= 30
        assert entry["tokens_per_second"]["median"] == pytest.approx(
            entry["tokens"] / entry["seconds"]["median"])


def test_selector(run):
    results = run("selector", "--rounds", 3, "--sizes", 1000, 5)
    assert results.keys() == {"1000 adam", "1000 sgd", "5 adam", "5 sgd"}
    for entry in results.values():
        for found in (*entry["seconds"].values(), entry["ratio_to_floor"],
                      entry["ratio_to_optimizer"]):
            is_spread(found)


@pytest.mark.slow
def test_data(run, tmp_path):
    results = run("data", "--rounds", 1, "--sizes", 300, "--folder", tmp_path)
    entry = results["300"]
    assert entry["rows_per_second"] == pytest.approx(300 / entry["tokenise_seconds"])
    assert 20 * 300 < entry["tokens"] < 100 * 300
    assert entry["cache_bytes"] > 10_000
    if bench.memory("RssAnon"):
        assert 0 < entry["anonymous_bytes"] < entry["resident_bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json"]


def test_generated_rows_differ(tmp_path):
    bench.write_generated(tmp_path / "rows.jsonl", 50)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len({row["prompt"] for row in rows}) == 50
    assert all(row["response"] for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what a machine without CUDA prints")
def test_table2_without_a_gpu_estimates_nothing(run):
    results = run("table2")
    assert results["BDS"] == {"published_hours": {"pythia-1b": 0.31, "llama3-8b": 11.75},
                              "extrapolated_hours": {}, "published_over_here": {}}
    assert len(results) == 7
    lines = [line for line in run.text.splitlines() if line.startswith(("BDS", "online", "mix"))]
    assert len(lines) == 5 and all(line.count("not measured") == 2 for line in lines)


def test_table2_extrapolates_measured_steps(run):
    """A tiny shape: every method has hours, and they stand in the order of their work."""
    results = run("table2", "--model", "tiny", "--rounds", 1, "--max-new-tokens", 4,
                  "--lower-tokens", 20, "--upper-tokens", 20)
    hours = {name: entry["extrapolated_hours"]["tiny"] for name, entry in results.items()}
    assert hours["DSIR"] is None and hours["LESS"] is None
    assert hours["online R=5% G=1"] < hours["online R=10% G=1"] < hours["online R=10% G=5"]
    assert "extrapolated: seconds of a measured step" in run.text


@pytest.mark.parametrize(("words", "message"), [
    (["step", "--lower", "rows.jsonl"], "--lower, --upper and --model belong together"),
    (["step", "--rounds", "0"], "--rounds 0: must be 1 or more"),
    (["selector", "--sizes", "0"], "must be 1 or more"),
    (["selector", "--sizes", "5", "--json", "nowhere/x.json"], "no such folder"),
    (["table2", "--model", "gpt2"], "table2 knows pythia-1b, llama3-8b, tiny")])
def test_bad_input(refused, words, message):
    assert message in refused(lambda: bench.main(words))


def test_a_vocabulary_smaller_than_the_tokenizers(refused, tmp_path, folders):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "red", "response": "blue"}] * 3)
    assert "--vocabulary 10" in refused(lambda: bench.main(
        ["step", "--lower", rows, "--upper", rows, "--model", str(folders["llama"]),
         "--vocabulary", "10"]))
