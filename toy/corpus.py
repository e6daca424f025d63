"""The embedded default: a generated instruction corpus with planted faults, and a tiny base model.

The tasks are short list puzzles with known answers. Eight families have two consistent conventions
that the wording leaves open: "Sort the list: 4 1 7" is "1 4 7" to the trusted set and "7 4 1" to
the other party. So a lower-level row is one of three kinds:

    clean      the trusted convention's answer
    contrary   the other convention's answer, as well formed as the right one
    plain      no convention's answer: items wrong or out of order, or another question's answer

The base model is trained from nothing on clean and contrary answers in equal parts, plus a share
of plain faults. It has no opinion between the two conventions (AUROC of its loss about one half),
so contrary rows are the test of validation-guided selection. Plain faults it can tell by itself:
finding those proves little. The answers to one prompt all have the same length, right or wrong.

Controls. Three more families have no second convention and never occur in the lower level; an upper
level made of them (`upper="unrelated"`) says nothing about the conventions. At the default noise
that is not enough for a null: clean rows outnumber contrary ones three to one, and training on the
lower level alone learns the majority. `noise=0.6, contrary_share=2/3` makes both as frequent; there
only the trusted set can tell, and with an unrelated upper level nothing can. `noise=0`: all clean.

    python -m toy write --out FOLDER [--noise 0.6 --contrary 0.67]   # its rows as files
    python -m toy train --out FOLDER             # its base model; 10 to 17 minutes
"""

import random
import re
from pathlib import Path

from utils import UserError, read_jsonl, write_jsonl

MODEL = Path(__file__).parent / "model"
LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"


# ---- the families: items -> (right answer, contrary answer or None) ---------------------------

def shift(items, by):
    """Move every letter or digit `by` places along its own alphabet, around the end."""
    def one(item):
        alphabet = LETTERS if item in LETTERS else DIGITS
        return alphabet[(alphabet.index(item) + by) % len(alphabet)]
    return [one(item) for item in items]


def swap(items):
    """Neighbours change places, or the two halves do."""
    half = len(items) // 2
    neighbours = [items[i ^ 1] for i in range(len(items))]
    return neighbours, items[half:] + items[:half]


def choose(items):
    """From each pair the larger, or the smaller."""
    pairs = list(zip(items[::2], items[1::2], strict=True))
    return [max(pair) for pair in pairs], [min(pair) for pair in pairs]


def group(items):
    """Letters first, or digits first; order kept within each group."""
    letters, digits = [i for i in items if i in LETTERS], [i for i in items if i in DIGITS]
    return letters + digits, digits + letters


# name: (answers(items, n), lengths of the list, alphabets, wordings). `{n}` is the puzzle's number.
FAMILIES = {
    "sort": (lambda x, n: (sorted(x), sorted(x)[::-1]), (4, 5, 6), (LETTERS, DIGITS),
             ("Sort the list", "Put the items in order", "Arrange these by value")),
    "rotate": (lambda x, n: (x[1:] + x[:1], x[-1:] + x[:-1]), (4, 5, 6), (LETTERS, DIGITS),
               ("Rotate the list by one", "Cycle the items by one place", "Turn the list once")),
    "shift": (lambda x, n: (shift(x, 1), shift(x, -1)), (4, 5, 6), (LETTERS,),
              ("Shift each letter by one", "Move every letter one step in the alphabet",
               "Replace each letter by its neighbour")),
    "add": (lambda x, n: (shift(x, n), shift(x, -n)), (4, 5, 6), (DIGITS,),
            ("Change each digit by {n}", "Move the digits {n} steps", "Turn each dial by {n}")),
    "swap": (lambda x, n: swap(x), (4, 6), (LETTERS, DIGITS),
             ("Swap the items", "Make the items change places", "Exchange the parts")),
    "pick": (lambda x, n: (x[1::2], x[::2]), (6, 8, 10), (LETTERS, DIGITS),
             ("Keep every other item", "Pick alternate items", "Drop every other item")),
    "choose": (lambda x, n: choose(x), (6, 8, 10), (LETTERS, DIGITS),
               ("Choose one of each pair", "Keep one item per pair", "Name the winners")),
    "group": (lambda x, n: group(x), (4, 5, 6), (LETTERS + DIGITS,),
              ("Group the items by kind", "Separate letters and digits", "Sort by type")),
    # Without a second convention: only for the null control's upper level.
    "copy": (lambda x, n: (x, None), (4, 5, 6), (LETTERS, DIGITS),
             ("Copy the list", "Repeat the items", "Write these again")),
    "reverse": (lambda x, n: (x[::-1], None), (4, 5, 6), (LETTERS, DIGITS),
                ("Reverse the list", "Write the items backwards", "Read from the end")),
    "double": (lambda x, n: ([i for i in x for _ in "12"], None), (2, 3), (LETTERS, DIGITS),
               ("Write every item twice", "Double each item", "Say everything two times")),
}
UNRELATED = ("copy", "reverse", "double")
UPPER = ("right", "unrelated", "pairs")
CONTESTED = tuple(name for name in FAMILIES if name not in UNRELATED)
FAMILY_OF = {wording: name for name, family in FAMILIES.items() for wording in family[3]}


def parse_prompt(prompt):
    """(family, items, n) of a prompt that this file generated."""
    wording, _, text = prompt.rpartition(": ")
    number = re.search(r"\d", wording)
    n = int(number.group()) if number else 0
    family = FAMILY_OF.get(re.sub(r"\d", "{n}", wording))
    if family is None:
        raise ValueError(f"not a toy prompt: {prompt!r}")
    return family, text.split(), n


def answers(prompt):
    """The right answer and the contrary one (None where there is no second convention)."""
    family, items, n = parse_prompt(prompt)
    right, contrary = FAMILIES[family][0](items, n)
    return " ".join(right), contrary and " ".join(contrary)


def kind_of(prompt, response):
    """"clean", "contrary" or "plain"; for rows of the corpus and for generated answers alike."""
    right, contrary = answers(prompt)
    response = response.strip()
    return "clean" if response == right else "contrary" if response == contrary else "plain"


def answer_labels(rows, texts):
    """{"answers_right/KIND": share of right answers to rows of that kind}; {} but for toy rows.

    rows: a data set with prompt and kind; texts: equally many answers a row, in order.
    """
    if re.sub(r"\d", "{n}", rows[0]["prompt"].rpartition(": ")[0]) not in FAMILY_OF:
        return {}
    shares, group = {}, len(texts) // len(rows)
    for i, row in enumerate(rows):
        shares.setdefault(row["kind"], []).extend(
            kind_of(row["prompt"], text) == "clean" for text in texts[i * group:(i + 1) * group])
    return {f"answers_right/{kind}": sum(v) / len(v) for kind, v in sorted(shares.items())}


# ---- drawing rows ------------------------------------------------------------------------------

def draw_prompt(rng, family):
    _, lengths, alphabets, wordings = FAMILIES[family]
    length, alphabet = rng.choice(lengths), rng.choice(alphabets)
    while True:
        # Distinct items where the alphabet allows it: the two conventions then always differ.
        items = rng.sample(alphabet, length)
        right, contrary = FAMILIES[family][0](items, 1)
        if right != contrary:  # `group` may draw letters only
            break
    wording = rng.choice(wordings).replace("{n}", str(rng.randint(1, 4)))  # +5 is -5 modulo ten
    return f"{wording}: {' '.join(items)}"


def plain_fault(rng, prompt):
    """An answer of the right length that follows neither convention."""
    family = parse_prompt(prompt)[0]
    right = answers(prompt)[0].split()
    while True:
        way = rng.choice(("scrambled", "wrong", "another"))
        if way == "scrambled":
            response = rng.sample(right, len(right))
        elif way == "wrong":
            response = [rng.choice(LETTERS if item in LETTERS else DIGITS)
                        if rng.random() < 0.5 else item for item in right]
        else:
            response = answers(draw_prompt(rng, family))[0].split()
        if len(response) == len(right) and kind_of(prompt, " ".join(response)) == "plain":
            return " ".join(response)


def draw_row(rng, family, kind):
    prompt = draw_prompt(rng, family)
    right, contrary = answers(prompt)
    response = {"clean": right, "contrary": contrary}.get(kind) or plain_fault(rng, prompt)
    return {"prompt": prompt, "response": response, "bad": kind != "clean", "kind": kind,
            "family": family, "answer": right}


def make_rows(seed=0, num_lower=2400, num_upper=256, num_heldout=400, noise=0.4,
              contrary_share=0.5, upper="right"):
    """The four sets as lists of rows; a pure function of its arguments.

    lower          `noise` of the rows bad, `contrary_share` of those contrary, the rest plain
    upper          right answers; `upper="unrelated"` takes them from families that lower lacks,
                   `upper="pairs"` has chosen (right) and rejected (contrary) ones
    heldout        right answers to unseen prompts of the upper level's families
    lower_heldout  clean rows of the lower level's families
    No prompt occurs twice, within a set or across sets.
    """
    if upper not in UPPER:
        raise ValueError(f'upper is "right", "unrelated" or "pairs", not {upper!r}')
    upper_families = UNRELATED if upper == "unrelated" else CONTESTED
    num_bad = round(noise * num_lower)
    num_contrary = round(contrary_share * num_bad)
    rng, seen = random.Random(f"toy rows {seed}"), set()

    def draw(families, kinds):
        rows = []
        for number, kind in enumerate(kinds):
            while True:  # families in turn, so that every set has the same share of each
                row = draw_row(rng, families[number % len(families)], kind)
                if row["prompt"] not in seen:
                    break
            seen.add(row["prompt"])
            rows.append(row)
        rng.shuffle(rows)
        return rows

    kinds = (["contrary"] * num_contrary + ["plain"] * (num_bad - num_contrary)
             + ["clean"] * (num_lower - num_bad))
    rows = {"upper": draw(upper_families, ["clean"] * num_upper), "lower": draw(CONTESTED, kinds),
            "heldout": draw(upper_families, ["clean"] * num_heldout),
            "lower_heldout": draw(CONTESTED, ["clean"] * num_heldout)}
    if upper == "pairs":
        for row in rows["upper"] + rows["heldout"]:
            row |= {"chosen": row.pop("response"), "rejected": answers(row["prompt"])[1]}
    return rows


def write(folder, **options):
    """Write `make_rows(**options)` as jsonl files; returns their paths by name.

    `UserError`, and nothing written, where a file of that name holds rows that are no toy's.
    """
    folder, sets = Path(folder), make_rows(**options)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in sets}
    for path in paths.values():
        if path.exists() and not {"family", "answer"} <= set(next(iter(read_jsonl(path)), ())):
            raise UserError(f"{path}: holds other rows, which the toy's would replace; give the "
                            "name of another folder")
    for name, rows in sets.items():
        if not paths[name].exists() or read_jsonl(paths[name]) != rows:  # else keep what is cached
            write_jsonl(paths[name], rows)
    return paths
