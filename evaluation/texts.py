"""Texts of data made safe to show on a terminal, in Markdown and in HTML, and tables of them.

Names of runs and models, kinds of faults, prompts and answers come from files that others wrote.
Escape sequences must not reach a terminal, Markdown and HTML must stay text, and one long name must
not pad a whole table.
"""

import html
import re

from utils import table

CELL = 80  # characters of a text in a table

# A terminal's escape sequences begin with a control character.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Marks that turn the direction of what follows; the page isolates them, nothing else does.
DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# What Markdown reads inside a line. An underscore inside a word is an ordinary letter.
MARKS = re.compile(r"[\\`*\[\]~|$#]|(?<![^\W_])_|_(?![^\W_])")


def plain(text):
    """`text` without lone surrogates and without control characters but newline and tab.

    The line ends of Windows are newlines.
    """
    text = str(text).encode("utf-8", "replace").decode().replace("\r\n", "\n")
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def printable(text, limit=None):
    """`text` as a terminal may show it, lines and tabs kept, cut to `limit` characters."""
    text = plain(text)
    if limit is not None and len(text) > limit:
        text = text[:limit - 1] + "…"
    return DIRECTIONS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(text, limit=CELL):
    """`printable` without line breaks."""
    return printable(" ".join(str(text).split()), limit)


def formatted(value):
    """Four digits for a float, - for nothing, a text as it is."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
    return str(value)


def show_table(header, rows):
    """`utils.table` on the terminal; texts in one line of at most CELL characters."""
    def line(row):
        return [one_line(cell) if isinstance(cell, str) else cell for cell in row]

    print(table(line(header), [line(row) for row in rows]))


def escaped_markdown(text):
    """`text` as Markdown that shows it and does nothing else."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return MARKS.sub(r"\\\g<0>", text)


def markdown_table(header, rows, limit=None):
    """A Markdown table whose cells may hold any text, of at most `limit` characters."""
    def line(cells):
        texts = [formatted(cell).replace("\r", "") for cell in cells]
        if limit is not None:
            texts = [one_line(text, limit) for text in texts]
        return "| " + " | ".join(escaped_markdown(text).replace("\n", "<br>")
                                 for text in texts) + " |\n"
    return line(header) + "|" + "---|" * len(header) + "\n" + "".join(map(line, rows))


def escaped_html(text):
    return html.escape(str(text))


def html_table(header, rows, kind="", limit=CELL):
    """An HTML table of the class `kind`; texts of at most `limit` characters."""
    def cells(tag, row):
        return "".join(f"<{tag}>{escaped_html(one_line(formatted(cell), limit))}</{tag}>"
                       for cell in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (f'<div class="scroll"><table class="{kind}"><tr>{cells("th", header)}</tr>{body}'
            "</table></div>")
