"""The files of `python -m benchmarks gpu`: one a part, in place at once or not at all."""

import json
import re

import utils

TRIES = 2  # of a part that fails


class Missing(Exception):
    """A part lacks something that the next call may bring: a package, another part's result."""


def part_file(folder, name):
    """Where what is known of the part of this name is kept."""
    return folder / (re.sub(r"\W+", "-", name) + ".json")


def known_of(file):
    """What is known of a part: its "result" or how it "failed", and how often."""
    if not file.exists():
        return {"tries": 0}
    return json.loads(file.read_text())


def write_part(file, **entries):
    utils.write_atomic(file, json.dumps(entries, indent=1) + "\n")


def note_failure(file, reason):
    write_part(file, tries=known_of(file)["tries"] + 1, failed=reason)


def is_settled(file):
    content = known_of(file)
    return "result" in content or content["tries"] >= TRIES
