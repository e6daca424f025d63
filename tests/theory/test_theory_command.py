"""The command line: python -m theory."""

import json

import pytest
from conftest import result_of

from theory import __main__ as command


def test_a_part_prints_its_table_and_saves_its_figure(tmp_path, capsys):
    part = "equivalence"
    command.main([part, "--out", str(tmp_path / "new" / "folder")])
    printed = capsys.readouterr().out
    result = result_of(printed)
    numbers, _ = command.PARTS[part].measure()
    assert list(result) == [part]
    assert result[part] == json.loads(json.dumps(numbers))
    assert command.PARTS[part].TITLE in printed.splitlines()
    figure = tmp_path / "new" / "folder" / f"{part}.png"
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_all_parts(tmp_path, capsys):
    command.main(["--out", str(tmp_path)])
    result = result_of(capsys.readouterr().out)
    assert list(result) == list(command.PARTS)
    assert {path.stem for path in tmp_path.iterdir()} == set(command.PARTS)
