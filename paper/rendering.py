"""Stored results as Markdown, between markers in README.md and docs/*.md.

    <!-- begin toy_table1 upper_heldout "lower_heldout=clean rows" published claims -->
    <!-- end toy_table1 -->

The first word is a file of results/ without its .json, or `seen`: the paper's claims with their
intervals at each scale (claims.py). Behind it, in any order, words as a shell splits them:

    KEY, "KEY=HEADING"   a column, in this order, under another heading; without one: all columns
    "only=A; B"          the rows, and claims, that begin with A or with B
    published            the paper's figures as further columns
    claims               what is claimed about these results, and on how many seeds it was seen

Of noise_NAME one of the words rankings, others, shares, flags and reasons, of pairs_NAME none: what
`python -m paper noise` and `pairs` found on the reporting half.

The line that says what a result was made by is always there. A table has at most five columns,
the first included, and rows of at most 100 characters.
"""

import re
import shlex
from pathlib import Path

import utils
from paper.claims import claims_by_scale
from paper.faults import REASONS
from paper.results import LOSSES, RANKS, read_stored
from paper.statistics import CLAIM_COLUMNS, by_chance, summary_rows
from utils import UserError

MOST_COLUMNS, MOST_CHARACTERS = 5, 100
OPTIONAL = ("noise_", "pairs_", "smollm2_")  # hours of a model that is not in every machine's reach
MARKED = re.compile(r"<!-- begin (?P<words>(?P<name>\S+).*?) -->\n(?P<body>.*?)"
                    r"<!-- end (?P=name) -->", re.DOTALL)


def render(args):
    """Put the stored results between their markers in README.md and docs/*.md."""
    for path in [Path("README.md"), *sorted(Path("docs").glob("*.md"))]:
        if path.exists():
            utils.write_atomic(path, filled(path.read_text(), path))
            print(f"{path}: rendered")


def filled(text, path):
    """The text of the file `path` with the stored results between its markers."""
    def between(match):
        place = f"{path}: <!-- begin {match['words']} -->"
        if "<!-- begin " in match["body"]:
            raise UserError(f"{place}: its <!-- end {match['name']} --> is missing")
        try:
            name, *words = shlex.split(match["words"])
        except ValueError as error:
            raise UserError(f"{place}: not words of a command line ({error})") from None
        if name == "seen":
            body = "\n".join(markdown_lines(*claims_by_scale(), place))
        elif name.startswith(OPTIONAL) and not Path("results", f"{name}.json").exists():
            body = "Not stored yet."
        elif name.startswith(("noise_", "pairs_")):
            result = read_stored(name, path)
            body = "\n".join([*(noise_lines if name.startswith("noise_") else pairs_lines)(
                result, words, place), "", made_by(result)])
        else:
            body = rendered(read_stored(name, path), words, place)
        return f"<!-- begin {match['words']} -->\n{body}\n<!-- end {name} -->"

    if unclosed := re.search(r"<!-- begin (\S+)[^\n]*", MARKED.sub("", text)):
        raise UserError(f"{path}: {unclosed[0]}: its <!-- end {unclosed[1]} --> is missing")
    return MARKED.sub(between, text)


def markdown_lines(header, rows, place):
    """The lines of a Markdown table; `UserError`, naming the place, when a row is too long."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, *rows]]
    for line in lines:
        if len(line) > MOST_CHARACTERS:
            raise UserError(f"{place}: a row of {len(line)} characters, {MOST_CHARACTERS} fit; "
                            f"leave out columns or shorten headings: {line}")
    return [lines[0].replace("|  |", "| |"), "|" + "---|" * len(header), *lines[1:]]


def rendered(result, words, place):
    """A stored result as Markdown: the columns asked for, its claims, what it was made by."""
    keys, starts, options = [], ("",), set()
    for word in words:
        if word in ("published", "claims"):
            options.add(word)
        elif word.startswith("only="):
            starts = tuple(word.removeprefix("only=").split("; "))
        else:
            keys.append(word)
    if not isinstance(result.get("columns"), dict):
        raise UserError(f"{place}: its results are no table of runs")
    results = {name: runs for name, runs in result["results"].items() if name.startswith(starts)}
    header, rows = table_of(results, columns_of(result, keys, place), place)
    if "published" in options:
        published = result.get("published")
        if not published:
            raise UserError(f"{place}: no published figures are stored with these results")
        header += published["heading"]
        rows = [row + published.get(row[0], ["-"] * len(published["heading"])) for row in rows]
    if len(header) > MOST_COLUMNS:
        raise UserError(f"{place}: {len(header)} columns, {MOST_COLUMNS} fit; name those wanted: "
                        + "; ".join(result["columns"]))
    lines = markdown_lines(header, rows, place)
    if "claims" in options:
        claims = [claim for claim in result.get("claims", ()) if claim[0].startswith(starts)]
        if not claims:
            raise UserError(f"{place}: no such claims are stored with these results")
        lines += ["", *markdown_lines(CLAIM_COLUMNS, claims, place), "",
                  by_chance([claim[1] for claim in claims])]
    return "\n".join([*lines, "", made_by(result)])


def made_by(result):
    before = "".join(f"; {', '.join(piece['methods'])}: {piece['date']}, commit {piece['commit']}, "
                     f"{piece['hardware']}" for piece in result.get("pieces", ()))
    return (f"`{result['command']}`, {result['date']}, commit {result['commit']}, "
            f"{result['hardware']}, torch {result['torch']}{before}.")


def columns_of(result, keys, place):
    """{metric: heading} of the words KEY and KEY=HEADING; the stored columns without any."""
    known = result["columns"] | {key: (LOSSES | RANKS).get(key, key) for runs in
                                 result["results"].values() for run in runs for key in run
                                 if key not in result["columns"]}
    columns = {}
    for word in keys:
        key, _, heading = word.partition("=")
        if key not in known:
            raise UserError(f"{place}: no column {key!r}; there are {'; '.join(known)}")
        columns[key] = heading or known[key]
    return columns or result["columns"]


def table_of(results, columns, place):
    """(header, rows) without the columns that are the same in every row, of which it warns."""
    rows = summary_rows(results, columns)
    if not rows:
        raise UserError(f"{place}: no row begins so")
    changing = [0]
    for number, heading in enumerate(columns.values(), 1):
        if len(rows) > 1 and len({row[number] for row in rows}) == 1:
            print(f"warning: {place}: {heading!r} is {rows[0][number]} in every row and left out")
        else:
            changing.append(number)
    header = ["", *columns.values()]
    return [header[i] for i in changing], [[row[i] for i in changing] for row in rows]


# --- row tests ------------------------------------------------------------------------------------

TESTS, WITH_TRUSTED, SHARES = "tests", "tests, trusted", ("5%", "30%", "60%")


def noise_lines(result, words, place):
    """Lines of a Markdown table of one of these kinds."""
    report, kinds = result["results"]["report"], {
        "rankings": ranking_rows, "others": other_rows, "shares": share_rows, "flags": flag_rows,
        "reasons": reason_rows}
    if len(words) != 1 or words[0] not in kinds:
        raise UserError(f"{place}: wanted one of {', '.join(kinds)}")
    return markdown_lines(*kinds[words[0]](report), place)


def files_with(report, share):
    """{what is wrong with the bad rows: figures by ranking} of the files of one share."""
    return {file.removesuffix(f", {share}"): figures for file, figures in report.items()
            if file.endswith(f", {share}")}


def ranking_rows(report):
    """AUROC of each ranking where 30 % of the rows are bad, of the tests with an interval."""
    rows = []
    for fault, figures in files_with(report, "30%").items():
        low, high = figures[WITH_TRUSTED]["interval"]
        rows.append([fault, f"{figures[TESTS]['auroc']:.3f}; {figures[WITH_TRUSTED]['auroc']:.3f} "
                     f"({low:.2f}-{high:.2f})",
                     *(f"{figures[name]['auroc']:.3f}" for name in ("joined", "loss", "IFD"))])
    return ["faults, 30 % of the rows", "tests; with trusted rows", "joined", "loss", "IFD"], rows


def other_rows(report):
    """AUROC of the other rankings where 30 % of the rows are bad."""
    names = ("length", "DSIR", "RDS+", "random")
    return ["faults, 30 % of the rows", *names], [
        [fault, *(f"{figures[name]['auroc']:.3f}" for name in names)]
        for fault, figures in files_with(report, "30%").items()]


def share_rows(report):
    """AUROC of the tests with trusted rows by share of bad rows."""
    return ["faults", *SHARES], [
        [fault, *(f"{files_with(report, share)[fault][WITH_TRUSTED]['auroc']:.3f}"
                  for share in SHARES)] for fault in files_with(report, SHARES[0])]


def flag_rows(report):
    """By share of bad rows how many of them are flagged, and how many of the flagged are good."""
    def cell(figures):
        flagged = {label: sum(n for reason, n in own.items() if reason != "not flagged")
                   for label, own in figures["reasons"].items()}
        good = flagged["clean"] / max(1, sum(flagged.values()))
        return f"{figures['found']:.0%}; {good:.0%}"

    rows = [[fault, *(cell(files_with(report, share)[fault][WITH_TRUSTED]) for share in SHARES)]
            for fault in files_with(report, SHARES[0])]
    clean = report["clean, 0%"][WITH_TRUSTED]["clean_flagged"]
    rows.append(["none: a clean file", f"{clean:.1%} of all", *["-"] * (len(SHARES) - 1)])
    return ["flagged; of these good", *SHARES], rows


def reason_rows(report):
    """What the tests with trusted rows call each fault, in the file where 30 % of the rows have it.

    The last row: of all rows that get a named reason, good ones included, how many get the right
    one.
    """
    rows, named, right = [], 0, 0
    for fault, wanted in REASONS.items():
        counts = dict(report[f"{fault}, 30%"][WITH_TRUSTED]["reasons"])
        for label, own in counts.items():
            own = {reason: n for reason, n in own.items() if reason != "not flagged"}
            named += sum(n for reason, n in own.items() if reason != "unclear")
            right += sum(own.get(reason, 0) for reason in wanted if label == fault)
        own = counts[fault]
        rows.append([fault, str(sum(own.values())), ", ".join(
            f"{reason} {n}" for reason, n in sorted(own.items(), key=lambda item: -item[1]))])
    rows.append(["right, of those with a name", str(named),
                 f"{right} ({right / max(1, named):.0%})"])
    return ["fault", "rows", "reasons given"], rows


def pairs_lines(result, words, place):
    """The share of pairs whose worse answer has the worse score, by set."""
    def cell(figures):
        low, high = figures["interval"]
        return f"{figures['share']:.3f} ({low:.2f}-{high:.2f})"

    rows = [[f"{name}, {own[TESTS]['pairs']} pairs", *(cell(own[score]) if score in own else "-"
                                                       for score in (TESTS, WITH_TRUSTED)),
             *(f"{own[score]['share']:.3f}" for score in ("loss", "IFD"))]
            for name, own in result["results"].items()]
    return markdown_lines(["set", "tests", "with trusted rows", "loss", "IFD"], rows, place)
