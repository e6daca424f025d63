"""The Triton row kernel under Triton's interpreter, against float64 on the same float32 logits.

The interpreter is chosen when a kernel is defined, by an environment variable: the checks run in a
process of their own, so that nothing else in the test run sees it. test_cuda.py runs the same
checks, compiled, where there is a GPU.
"""

import importlib.util
import json
import subprocess

import pytest
from conftest import ROOT, python
from kernel_checks import CASES, MODES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None,
                                reason="Triton is not installed (requirements-dev.txt has it)")


@pytest.fixture(scope="module")
def report():
    """The results of every check, by name."""
    command, environment = python(ROOT / "tests" / "kernel_checks.py", TRITON_INTERPRET="1")
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_eq_row_kernel_against_float64(report, case, mode):
    """log p to 1e-5 and one-hot minus softmax to 3e-3 in bf16 (2e-6 in float32)."""
    errors = report[f"{case} {mode}"]
    assert errors["logps"] < 1e-5
    assert errors["gradient"] < {"bfloat16": 3e-3, "float32": 2e-6}[mode]
    assert errors["padding_untouched"]


def test_eq_token_logprobs_through_the_kernel(report):
    """The whole function in bf16 and float32, chunks that end ragged: value and gradient."""
    for name in ("bfloat16", "float32"):
        errors = report[f"token_logprobs {name}"]
        assert errors["logps"] < 1e-5
        assert errors["gradient"] < {"bfloat16": 3e-3, "float32": 1e-5}[name]


def test_no_rows_and_no_gradient(report):
    assert report["no rows"] == {"logps": [0], "gradient": [0, 24]}
    assert report["no grad"]["logps"] < 1e-5 and report["no grad"]["logits_untouched"]


def test_the_kernel_is_refused_where_it_cannot_run(report):
    assert "not for torch.float64" in report["float64"]
    assert "only kernel='reference'" in report["trained head"]
