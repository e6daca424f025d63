"""The head of a page: rows that look bad, with the worst examples, before any curve."""

import json

import pytest
from fabricated import HOSTILE, fabricate

from evaluation.flagged import flagged_section, opening_line
from evaluation.report import page, row_card
from evaluation.runs import Run
from utils import UserError

LOOK = {"line": "3 of 40 rows look bad: 2 cut short, 1 copying the question.",
        "notes": ["ends are judged"], "groups": [["short", 8, 3], ["code", 0, 0]],
        "worst": [{"row_id": 7, "reason": "end", "prompt": "why?", "response": "because of",
                   "surprise": 9.5},
                  {"row_id": 8, "reason": "echo", "prompt": HOSTILE, "response": HOSTILE,
                   "surprise": 9.0}]}


@pytest.fixture
def run(tmp_path):
    folder = fabricate(tmp_path / "run")
    (folder / "tests.json").write_text(json.dumps(LOOK))
    return Run(folder)


def test_a_page_opens_with_the_rows_that_look_bad(run):
    html = page([run])
    assert html.index(LOOK["line"]) < html.index('class="verdict') < html.index("Rows that look")
    assert html.index("because of") < html.index("<h2>Curves")
    assert "cut short: the worst 1" in html and "37.5" not in html and "0.3750" in html
    assert "<script>" not in html and "surprise 9.500" in html


def test_a_run_without_row_tests_has_no_such_part(tmp_path):
    run = Run(fabricate(tmp_path / "run"))
    assert opening_line(run) == flagged_section(run, row_card) == ""
    assert "look bad" not in page([run])


@pytest.mark.parametrize("look, what", [
    ("[]", "must be an object"), ("{}", "no 'line'"), ('{"line": "a", "notes": 3}', "is no list"),
    (json.dumps(LOOK | {"groups": [["a", "b", 1]]}), "rows"),
    (json.dumps(LOOK | {"worst": [{"row_id": 1}]}), "reason"),
    (json.dumps(LOOK | {"notes": [1]}), "note"), ("{", "not valid JSON")])
def test_a_damaged_file_is_named(run, look, what):
    (run.folder / "tests.json").write_text(look)
    with pytest.raises(UserError, match=what) as error:
        opening_line(run)
    assert "tests.json" in str(error.value)
