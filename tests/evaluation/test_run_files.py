"""Every file of a run, damaged in every way: one line that names it."""

import json

import pytest

from evaluation.runs import read_result
from utils import UserError


def test_read_result(tmp_path):
    with pytest.raises(UserError, match=r"no result\.json"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text('{"a": ')
    with pytest.raises(UserError, match="not valid JSON"):
        read_result(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps({"a": 1.5}))
    assert read_result(tmp_path) == {"a": 1.5}
