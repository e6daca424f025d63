"""`python -m benchmarks gpu`: calls that go on where the last one ended; a hung step is ended.

The rehearsals run in processes of their own: Triton asks for its interpreter when it is imported.
"""

import json
import subprocess
from types import SimpleNamespace

import pytest
from conftest import ROOT, python

from benchmarks import gpu, gpu_steps
from benchmarks.__main__ import main
from benchmarks.gpu_record import NotMeasured, Record

STEPS = ("tests", "logprob", "steps", "generation", "table2", "text")
# In the first call generation hangs, deaf to all signals but SIGKILL, a process of table2 dies, and
# Table 1 on text is left out. In the second call nothing is wrong.
TWO_CALLS = """
import os, signal, sys, time
from benchmarks import gpu
from benchmarks.__main__ import main

def hang(settings, shape, static):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(1000)

def die(settings, shape):
    return os._exit(9) if shape == "tiny" else hours(settings, shape)

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # as the command does before it imports the steps
    from benchmarks import gpu_steps

    answers, hours = gpu_steps.answers_of, gpu_steps.published_hours
    words = ["gpu", "--rehearse", "--out", sys.argv[1], "--minutes", "10"]
    limits = gpu.LIMITS.copy()
    del gpu.LIMITS["text"]
    gpu.LIMITS["generation"] = 5
    gpu_steps.answers_of, gpu_steps.published_hours = hang, die
    main(words)
    print("FIRST CALL ENDED")
    gpu_steps.answers_of, gpu_steps.published_hours = answers, hours
    gpu.LIMITS |= limits
    main(words)
"""


def contents(folder):
    return {step: json.loads((folder / f"{step}.json").read_text()) for step in STEPS
            if (folder / f"{step}.json").exists()}


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_was_cut_off(tmp_path):
    (tmp_path / "calls.py").write_text(TWO_CALLS)
    command, environment = python(tmp_path / "calls.py", tmp_path / "out")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("FIRST CALL ENDED")
    assert "generation: stopped after 5 s, in tiny, dynamic cache" in first
    assert "tiny: failed: its process ended with code 9" in first
    assert "tiny-neox: not measured: its steps or answers are not measured yet" in first
    for step in ("tests", "logprob", "steps"):
        assert f"{step}: finished by an earlier call" in second
        assert f"{step}: at most" in first and f"{step}: at most" not in second
    assert "generation: finished by an earlier call" not in second

    found = contents(tmp_path / "out")
    assert found.keys() == set(STEPS) and all(step["finished"] for step in found.values())
    parts = {step: content["parts"] for step, content in found.items()}
    assert parts["generation"].keys() == {f"{shape}, {cache}" for shape in ("tiny", "tiny-neox")
                                          for cache in ("compiled", "dynamic cache")}
    assert found["generation"]["cut_off"] == {"tiny, dynamic cache": 1}
    assert all(part["tokens_per_second"] > 0 for part in parts["generation"].values())
    assert parts["table2"]["tiny"]["failed"] and parts["table2"]["tiny-neox"]["hours"]["BDS"] > 0
    assert parts["text"]["model, mixing rho=1"]["result"]["upper_heldout"] > 0
    assert parts["tests"]["tests/test_cuda.py"]["exit_code"] == 0
    for part in parts["logprob"].values():
        for kernel in ("here, torch", "here, triton"):  # the kernel through the interpreter
            assert part["variants"][kernel]["gradient_error"] < 1e-5
        assert part["variants"]["no gradient"]["logps_error"] < 1e-5
    for part in parts["steps"].values():
        variants = part.get("variants", {})
        assert "not measured" in part or variants.keys() >= {"plain SFT", "online, R=10%, G=5"}
        assert all(entry["loss_difference"] < 1e-6 for entry in variants.values())

    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted([*(f"{step}.json" for step in STEPS), "summary.md"])
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert summary in second and "GPU: not measured" in summary


HIDDEN = """
import sys
from importlib.machinery import PathFinder

hidden = {"datasets", "bitsandbytes", "gguf", "quack", "liger_kernel", "cut_cross_entropy",
          "cutlass", "dill", "xxhash", "matplotlib", "lm_eval"}
found = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: (
    None if name.split(".")[0] in hidden else found(name, *rest)))
from types import SimpleNamespace
from benchmarks import gpu, gpu_steps, gpu_summary
from benchmarks.gpu_record import Record

assert not hidden & {name.split(".")[0] for name in sys.modules}
settings = gpu_steps.settings_of(SimpleNamespace(
    rehearse=True, out=sys.argv[1], model="model", lower="a.jsonl", upper="b.jsonl"))
record = Record(sys.argv[1], "steps", True)
record.part("4-bit", lambda: gpu_steps.steps_of(settings, "tiny", True, True))
record.part("bf16", lambda: gpu_steps.steps_of(settings, "tiny", True))
record.part("text", lambda: gpu_steps.table1_of(settings, "BDS"))
assert record.content["parts"]["4-bit"]["not measured"] == "bitsandbytes is not installed"
assert record.content["parts"]["text"]["not measured"] == "datasets is not installed"
assert record.content["parts"]["bf16"]["variants"], record.content
assert gpu_steps.logprob.peers("cuda")[1][-4:] == ["cut_cross_entropy", "liger_kernel", "cutlass",
                                                   "quack"]
"""


def test_it_imports_and_measures_steps_without_the_packages_a_gpu_machine_may_lack(tmp_path):
    command, environment = python("-c", HIDDEN, tmp_path)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_part_is_measured_once(tmp_path):
    """Kept in the file; what lacked something is tried again; what failed is not."""
    calls = []

    def measure(name, result):
        def call():
            calls.append(name)
            if isinstance(result, Exception):
                raise result
            return result
        return call

    for _ in range(2):
        record = Record(tmp_path, "steps", False)
        record.part("fast", measure("fast", {"seconds": 1.0}))
        record.part("broken", measure("broken", RuntimeError("no kernel\nmore")))
        record.part("lacking", measure("lacking", NotMeasured("quack is not installed")))
        record.ended(True)
    assert calls == ["fast", "broken", "lacking", "lacking"]
    parts = json.loads((tmp_path / "steps.json").read_text())["parts"]
    assert parts["fast"]["seconds"] == 1.0
    assert "no kernel" in parts["broken"]["failed"]
    assert not record.content["finished"]
    record.part("lacking", measure("lacking", {"seconds": 2.0}))
    record.ended(True)
    assert Record(tmp_path, "steps", False).content["finished"]


def test_a_part_that_hangs_twice_is_given_up(tmp_path):
    record = Record(tmp_path, "steps", False)
    record.content["cut_off"]["slow"] = 2
    record.part("slow", lambda: pytest.fail("tried again"))
    assert record.content["parts"]["slow"] == {"failed": "cut off 2 times by the step's limit"}


def test_figures_and_rehearsals_do_not_mix(tmp_path, refused):
    Record(tmp_path, "steps", False).save()
    line = refused(lambda: main(["gpu", "--rehearse", "--out", str(tmp_path)]))
    assert "holds GPU figures; choose another --out" in line
    (tmp_path / "steps.json").write_text("[1]")
    assert "not the file of a step" in refused(
        lambda: main(["gpu", "--rehearse", "--out", str(tmp_path)]))


def test_figures_of_two_machines_do_not_mix(tmp_path, capfd):
    settings = gpu_steps.settings_of(SimpleNamespace(
        rehearse=True, out=tmp_path, model=None, lower=None, upper=None))
    record = Record(tmp_path, "table2", True)
    record.content["hardware"] = "NVIDIA A100"
    assert gpu.run_process("fork", gpu.child, ("table2", record, settings), 60) == 1
    assert "measured on NVIDIA A100, this is" in capfd.readouterr().err


def test_bad_minutes(refused):
    assert "--minutes 0" in refused(lambda: main(["gpu", "--minutes", "0"]))
