"""Texts of data: whole on the page, harmless on a terminal, in Markdown and in HTML."""

from fabricated import HOSTILE

from evaluation.texts import escaped_markdown, html_table, markdown_table, one_line, printable


def test_a_terminal_gets_no_escape_sequence():
    assert printable("red\x1b[2J\x9b\x07 blue\tgreen\n") == "red\ufffd[2J\ufffd\ufffd blue\tgreen\n"
    assert printable("a\u202eb\u2066c") == "a\ufffdb\ufffdc" and printable("\ud800") == "?"
    assert printable("ثلاثة é \U0001f469\u200d\U0001f4bb") == "ثلاثة é \U0001f469\u200d\U0001f4bb"
    assert one_line("a\r\n  b\x1bc\u2028d") == "a b\ufffdc d"
    assert one_line("z" * 50_000) == "z" * 79 + "…" and one_line("z" * 80) == "z" * 80


def test_markdown_shows_what_was_written():
    assert escaped_markdown("[a](javascript:b) ![c](d)") == r"\[a\](javascript:b) !\[c\](d)"
    assert escaped_markdown("**a** `b` ~~c~~ $d$ <e> &amp; \\*") == (
        r"\*\*a\*\* \`b\` \~\~c\~\~ \$d\$ &lt;e> &amp;amp; \\\*")
    assert escaped_markdown("_a_ snake_case __b__") == r"\_a\_ snake_case \_\_b\_\_"
    assert escaped_markdown("# title") == r"\# title"


def test_tables_keep_their_shape():
    table = markdown_table([HOSTILE, "b"], [[HOSTILE, 1.5], ["x\r\ny", None]])
    lines = table.splitlines()
    assert len(lines) == 4 and lines[1] == "|---|---|"
    assert lines[2].endswith("| 1.5000 |") and lines[3] == "| x<br>y | - |"
    assert "<script" not in table and "\x1b" not in table
    page = html_table(["a"], [[HOSTILE], ["z" * 50_000], [True]])
    assert "<script" not in page and "\x1b" not in page and len(page) < 1_500
