"""Faults made on purpose, so that a test of rows can be tested: one answer in, a bad one out.

Every kind is a function of the row, a donor row that is in no file, and a seeded generator. It
returns the bad answer, or None where this row cannot have the fault (one word cannot be shuffled).
Tests are developed on these kinds, so a good figure here promises little for kinds not listed.
"""

import re

from accept import shortlists

ENDS = re.compile(r"(?<=[.!?])\s+")
OPENINGS = ("I'm sorry, but", "I apologize, but", "Unfortunately,", "As an AI language model,",
            "Sorry,")
REFUSALS = ("I cannot help with that request.", "I am not able to answer this question.",
            "I can't assist with that.", "I do not have enough information to respond.",
            "I must decline to answer this.", "that is not something I can provide.",
            "I'm unable to comply with this request.")


def sentences(text):
    return [part for part in ENDS.split(text.strip()) if part]


def swapped(row, donor, rng):
    """The answer to another question."""
    return donor["response"]


def shuffle_words(row, donor, rng):
    """The same words in a random order."""
    words = row["response"].split()
    mixed = rng.sample(words, len(words))
    return " ".join(mixed) if len(words) > 3 and mixed != words else None


def cut_middle(row, donor, rng):
    """Broken off inside a sentence."""
    words = row["response"].split()
    if len(words) < 6:
        return None
    places = [n for n in range(2, len(words) - 1) if words[n - 1][-1].isalnum()
              and 0.2 <= n / len(words) <= 0.85]
    return " ".join(words[:rng.choice(places)]) if places else None


def cut_sentence(row, donor, rng):
    """Broken off behind a sentence that is not the last."""
    parts = sentences(row["response"])
    return " ".join(parts[:rng.randrange(1, len(parts))]) if len(parts) > 1 else None


def repeated(row, donor, rng):
    """The last sentence again and again."""
    parts = sentences(row["response"])
    return " ".join(parts + parts[-1:] * rng.randint(2, 5)) if len(parts[-1].split()) > 2 else None


def echo_prompt(row, donor, rng):
    """The question in place of an answer."""
    return row["prompt"]


def refusal(row, donor, rng):
    """A refusal of a harmless question."""
    return f"{rng.choice(OPENINGS)} {rng.choice(REFUSALS)}"


def changed(row, donor, rng):
    """Another number, another name, or a negation put in or taken out."""
    text = row["response"]
    edits = []
    if numbers := list(re.finditer(r"\d{1,18}", text)):
        place = rng.choice(numbers)
        other = str(int(place[0]) + rng.choice((-3, -2, -1, 1, 2, 3, 7, 10)) or 5).lstrip("-")
        edits.append(text[:place.start()] + other + text[place.end():])
    names = list(re.finditer(r"(?<=[a-z,] )[A-Z][a-z]+", text))
    others = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", donor["response"])
    if names and others:
        place, other = rng.choice(names), rng.choice(others)
        edits.append(text[:place.start()] + other + text[place.end():])
    if places := list(re.finditer(r"\b(is|are|was|were|can|should|will|does)( not)?\b", text)):
        place = rng.choice(places)
        edits.append(text[:place.start()] + place[1] + ("" if place[2] else " not")
                     + text[place.end():])
    edits = [edit for edit in edits if edit != text]
    return rng.choice(edits) if edits else None


KINDS = {"swapped": swapped, "swapped near": swapped, "shuffled": shuffle_words,
         "cut middle": cut_middle, "cut sentence": cut_sentence, "repeated": repeated,
         "echo": echo_prompt, "refusal": refusal, "changed": changed}

# What a row test should say of a fault; elsewhere it is wrong.
REASONS = {"swapped": ("relevance",), "swapped near": ("relevance",), "shuffled": ("fluency",),
           "cut middle": ("end",), "cut sentence": ("end",), "repeated": ("repetition",),
           "echo": ("echo",), "refusal": ("relevance",), "changed": ("fluency",)}


def nearest(rows, donors):
    """Of every row the donor whose prompt shares the most words with its own, rare ones most."""
    lists = shortlists([row["prompt"] for row in rows], [row["prompt"] for row in donors], 1)
    return [donors[place] for place, in lists]
