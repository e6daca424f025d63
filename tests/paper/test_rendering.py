"""Stored results as Markdown between markers."""

import json

import pytest

from paper import rendering
from paper.__main__ import main

HEADING = ["published, Pythia-1b", "published, Llama-8b"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with results/t.json: three methods, two seeds, five columns, one constant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    keys = {"a": "loss a", "b": "loss b", "same": "never changes", "c": "loss c", "d": "loss d"}
    results = {name: [dict.fromkeys(keys, value + seed) | {"same": 1.0, "hidden": value}
                      for seed in (0, 2)] for name, value in (("x", 1.0), ("y", 2.0), ("xx", 4.0))}
    write(tmp_path, "t", columns=keys, results=results,
          published={"heading": HEADING, "x": ["1.5 / 1.6", "2.5 / 2.6"]},
          claims=[["x below y", "2 of 2", "-1.0000", "0.5"], ["y below x", "0 of 2", "+1.0000",
                                                              "0.5"]])
    return tmp_path


def write(folder, name, **entries):
    (folder / "results" / f"{name}.json").write_text(json.dumps({
        "command": "python -m paper table1", "date": "2026-01-02", "commit": "abc",
        "hardware": "here", "torch": "9"} | entries))


def rendered(words, path="README.md"):
    """The lines between the markers."""
    name = words.split()[0]
    text = rendering.filled(f"<!-- begin {words} -->\nold\n<!-- end {name} -->\n", path)
    lines = text.splitlines()
    assert (lines[0], lines[-1]) == (f"<!-- begin {words} -->", f"<!-- end {name} -->")
    return lines[1:-1]


MADE_BY = "`python -m paper table1`, 2026-01-02, commit abc, here, torch 9."


def test_columns_are_picked_in_order_and_renamed(here):
    assert rendered('t c "a=first loss"') == [
        "| | loss c | first loss |", "|---|---|---|",
        "| x | 2.000 ± 1.414 | 2.000 ± 1.414 |", "| y | 3.000 ± 1.414 | 3.000 ± 1.414 |",
        "| xx | 5.000 ± 1.414 | 5.000 ± 1.414 |", "", MADE_BY]
    assert rendered("t hidden")[0] == "| | hidden |"  # measured, in no stored column


def test_rows_are_picked_by_what_they_begin_with(here):
    assert [line[:4] for line in rendered('t a only=x')[2:4]] == ["| x ", "| xx"]
    assert rendered('t a "only=xx; y"')[2:4] == ["| y | 3.000 ± 1.414 |", "| xx | 5.000 ± 1.414 |"]
    assert [line[:9] for line in rendered('t a only=x claims')[6:8]] == ["|---|---|", "| x below"]


def test_published_figures_come_on_request_only(here):
    assert not any("1.5 / 1.6" in line or "published" in line for line in rendered("t a claims"))
    lines = rendered("t a published")
    assert lines[0] == "| | loss a | published, Pythia-1b | published, Llama-8b |"
    assert lines[2] == "| x | 2.000 ± 1.414 | 1.5 / 1.6 | 2.5 / 2.6 |"
    assert lines[3] == "| y | 3.000 ± 1.414 | - | - |"


def test_claims_come_on_request_only_with_what_chance_would_do(here):
    assert not any("below" in line or "claim" in line for line in rendered("t a published"))
    assert rendered("t a claims")[6:] == [
        "| claim | seeds as claimed | difference | p |", "|---|---|---|---|",
        "| x below y | 2 of 2 | -1.0000 | 0.5 |", "| y below x | 0 of 2 | +1.0000 | 0.5 |", "",
        "Chance alone would give 1.0 of these 2 claims one sign on every seed (p = 0.5 each).", "",
        MADE_BY]


def test_what_a_table_was_made_by_is_always_there(here):
    for words in ("t a", "t a claims", "t a published", "t"):
        assert rendered(words)[-1] == MADE_BY


def test_constant_columns_are_left_out_with_a_warning(here, capsys):
    assert rendered("t")[0] == "| | loss a | loss b | loss c | loss d |"
    warning = capsys.readouterr().out
    assert warning == ("warning: README.md: <!-- begin t -->: 'never changes' is 1.000 ± 0.000 in "
                       "every row and left out\n")
    assert rendered("t same only=y")[2] == "| y | 1.000 ± 0.000 |"  # of one row nothing is constant


def test_too_many_columns_name_the_file_and_the_marker(here, refused):
    (here / "docs").mkdir()
    (here / "docs" / "speed.md").write_text("<!-- begin t published -->\n<!-- end t -->\n")
    line = refused(lambda: main(["readme"]))
    assert "docs/speed.md: <!-- begin t published -->: 7 columns, 5 fit" in line
    assert line.endswith("name those wanted: a; b; same; c; d")


def test_too_long_rows_name_the_file_and_the_marker(here, refused):
    line = refused(lambda: rendered(f"t a 'b={'long ' * 20}'", "docs/x.md"))
    assert "docs/x.md: <!-- begin t a" in line and "a row of 11" in line and "100 fit" in line


@pytest.mark.parametrize(("words", "what"), [
    ("t e", "no column 'e'; there are a; b; same; c; d; hidden"),
    ("t 'a", "No closing quotation"), ("t a only=z", "no row begins so"),
    ("bare a claims", "no such claims are stored"), ("bare a published", "no published figures"),
    ("odd", "no table of runs"), ("gone", "results/gone.json: missing; docs/x.md has a place")])
def test_other_errors_are_one_line(words, what, here, refused):
    write(here, "bare", columns={"a": "a"}, results={"x": [{"a": 1.0}]})
    write(here, "odd", results=[])
    line = refused(lambda: rendered(words, "docs/x.md"))
    assert what in line and "docs/x.md" in line


@pytest.mark.parametrize("text", [
    "<!-- begin t a -->\nold\n", "<!-- begin t a -->\n<!-- begin t b -->\n<!-- end t -->\n",
    "<!-- begin t a -->\n<!-- end t -->\n<!-- begin t b -->\n<!-- end other -->\n"])
def test_a_marker_without_its_end_is_named(text, here, refused):
    line = refused(lambda: rendering.filled(text, "README.md"))
    assert "README.md: <!-- begin t" in line and "its <!-- end t --> is missing" in line


def test_every_page_is_rendered_and_twice_is_once(here, capsys):
    """README.md and each file of docs/; the same results may stand in several places of a page."""
    (here / "docs").mkdir()
    page = ("text\n<!-- begin t a -->\n<!-- end t -->\nbetween\n"
            "<!-- begin t b claims -->\nold\n<!-- end t -->\nafter\n")
    for path in ("README.md", "docs/one.md", "docs/two.md"):
        (here / path).write_text(page)
    main(["readme"])
    first = {path: (here / path).read_text() for path in ("README.md", "docs/two.md")}
    main(["readme"])
    assert capsys.readouterr().out.splitlines()[:3] == [
        "README.md: rendered", "docs/one.md: rendered", "docs/two.md: rendered"]
    for path, text in first.items():
        assert (here / path).read_text() == text
        assert text.count("| x | 2.000") == 2 and "old" not in text
        assert text.startswith("text\n") and text.endswith("after\n") and "\nbetween\n" in text


def test_the_stored_results_fit(monkeypatch):
    """Every stored table has a rendering of at most five columns, its claims included."""
    from conftest import ROOT

    monkeypatch.chdir(ROOT)
    stored = {file.stem: json.loads(file.read_text())
              for file in (ROOT / "results").glob("*.json") if not file.stem.startswith("bench_")}
    tables = {name: entries for name, entries in stored.items() if "columns" in entries}
    assert len(tables) > 10
    for name, entries in tables.items():
        assert entries["command"].startswith("python -m paper ")
        words = [name, f"'{next(iter(entries['columns']))}'"]
        rendered(" ".join(words + ["claims"] * bool(entries.get("claims"))))


def noise_results():
    """What `python -m paper noise` stores, cut to what is rendered."""
    def figures(value, reasons):
        own = {"auroc": value, "interval": [value - 0.1, value + 0.05], "found": 0.5,
               "clean_flagged": 0.012, "reasons": reasons}
        return {"tests": own, "tests, trusted": own | {"auroc": value + 0.01},
                "joined": {"auroc": 0.7}, "loss": {"auroc": 0.6}, "IFD": {"auroc": 0.4},
                "length": {"auroc": 0.3}, "DSIR": {"auroc": 0.2}, "RDS+": {"auroc": 0.1},
                "random": {"auroc": 0.5}}

    report = {"clean, 0%": figures(0, {})}
    for fault, reasons in rendering.REASONS.items():
        for share in ("5%", "30%", "60%"):
            report[f"{fault}, {share}"] = figures(0.8, {
                fault: {reasons[0]: 6, "unclear": 1, "not flagged": 3},
                "clean": {"end": 2, "not flagged": 18}})
    return {"develop": {}, "report": report}


def test_row_tests_are_rendered(here):
    write(here, "noise_t", results=noise_results())
    header, _, *rows, _, source = rendered("noise_t rankings")
    assert header == (
        "| faults, 30 % of the rows | tests; with trusted rows | joined | loss | IFD |")
    assert rows[0] == "| swapped | 0.800; 0.810 (0.70-0.85) | 0.700 | 0.600 | 0.400 |"
    assert len(rows) == len(rendering.REASONS) and source.startswith("`python -m paper table1`")
    header, _, *rows, _, _ = rendered("noise_t others")
    assert header == "| faults, 30 % of the rows | length | DSIR | RDS+ | random |"
    assert rows[0] == "| swapped | 0.300 | 0.200 | 0.100 | 0.500 |"
    header, _, *rows, _, _ = rendered("noise_t shares")
    assert header == "| faults | 5% | 30% | 60% |"
    assert rows[0] == "| swapped | 0.810 | 0.810 | 0.810 |"
    header, _, *rows, _, _ = rendered("noise_t flags")
    assert header == "| flagged; of these good | 5% | 30% | 60% |"
    assert rows[0] == "| swapped | 50%; 22% | 50%; 22% | 50%; 22% |"
    assert rows[-1] == "| none: a clean file | 1.2% of all | - | - |"
    _, _, *rows, _, _ = rendered("noise_t reasons")
    assert rows[3] == "| cut middle | 10 | end 6, not flagged 3, unclear 1 |"
    named, right = len(rendering.REASONS) * 8, len(rendering.REASONS) * 6
    assert rows[-1] == f"| right, of those with a name | {named} | {right} (75%) |"
    for words in ("noise_t", "noise_t other", "noise_t shares flags"):
        with pytest.raises(rendering.UserError, match="wanted one of rankings, others, shares, f"):
            rendered(words)


def test_pairs_are_rendered(here):
    assert rendered("pairs_t") == ["Not stored yet."]
    own = {name: {"share": 0.5, "interval": [0.4, 0.61], "pairs": 7}
           for name in ("tests", "loss", "IFD", "length")}
    write(here, "pairs_t", results={"all": own, "b": own | {"tests, trusted": {
        "share": 0.7, "interval": [0.6, 0.8], "pairs": 7}}})
    assert rendered("pairs_t")[2:4] == [
        "| all, 7 pairs | 0.500 (0.40-0.61) | - | 0.500 | 0.500 |",
        "| b, 7 pairs | 0.500 (0.40-0.61) | 0.700 (0.60-0.80) | 0.500 | 0.500 |"]
