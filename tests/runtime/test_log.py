"""runtime/log.py: metrics.jsonl is cut back at a resume, or refused."""

import json
import math

import pytest

from runtime import log
from utils import UserError

LINES = ['{"step": 0}', '{"step": 1}', '{"step": 2}']


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(LINES) + '\n{"st')  # as a kill leaves it
    return path


def test_lines_after_the_checkpoint_are_cut_off(tmp_path, file):
    with log.open_metrics(tmp_path, 2) as metrics:
        log.log_metrics(metrics, {"step": 2, "loss": 0.5})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [{"step": 0}, {"step": 1}, {"step": 2, "loss": 0.5}]
    log.open_metrics(tmp_path, 0).close()
    assert file.read_text() == ""


@pytest.mark.parametrize(
    "content",
    [None, b"", b'{"step": 1}\n', b"\0" * 30, b'\xff{"step": 0}\n', b"3\n", b"[3]\n"],
)
def test_missing_lines_are_one_line(tmp_path, file, content):
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(
        UserError, match=r"metrics.jsonl: the line of step 0 is missing"
    ):
        log.open_metrics(tmp_path, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(tmp_path, value):
    metrics = log.open_metrics(tmp_path, 0)
    with metrics, pytest.raises(UserError, match=r"step 3: loss is .*lower --lr"):
        log.log_metrics(metrics, {"step": 3, "loss": value})
