"""The figures of `python -m benchmarks gpu` as tables: what was measured, and beside what."""

import re

from benchmarks.measure import mebibytes, milliseconds, shown
from benchmarks.table2 import PUBLISHED_HOURS, PUBLISHED_ROWS

# Milliseconds and GB beyond what was held before, at T 16384, d 4096, V 128256.
GOALS_AT = "T 16384, d 4096, V 128256"
GOALS = {"here, triton": (45.0, 2.0), "no gradient": (24.0, 2.0)}


def summary(contents):
    """Markdown of {step: content of its `Record`}."""
    made_on = {content["hardware"]: f"{content['hardware']}, torch {content['torch']}, "
               f"transformers {content['transformers']}"
               for content in contents.values() if "hardware" in content}
    lines = ["# Measured on " + ("; ".join(made_on.values()) or "nothing yet")]
    if any(content["rehearsal"] for content in contents.values()):
        lines += ["", "A rehearsal: tiny sizes on a CPU, which say nothing about a GPU. GPU: not "
                      "measured."]
    for step, content in contents.items():
        state = "finished" if content["finished"] else "not finished"
        lines += ["", f"## {step}: {state}, {content['seconds']:.0f} s", ""]
        for name, part in content["parts"].items():
            lines += PARTS[step](name, part) if not {"failed", "not measured"} & part.keys() else [
                f"- {name}: " + next(f"{word}: {part[word]}" for word in ("failed", "not measured")
                                     if word in part)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def markdown(header, rows):
    """A table; None is a dash."""
    lines = ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return [*lines, *("| " + " | ".join("-" if cell is None else str(cell) for cell in row) + " |"
                      for row in rows), ""]


def of_tests(name, part):
    counts = ", ".join(f"{part.get(outcome, 0)} {outcome}"
                       for outcome in ("passed", "failed", "skipped"))
    return [f"- {name}: {counts}", *(f"  - {test}" for test in part["failures"])]


def of_log_probs(name, part):
    rows = []
    for variant, entry in part["variants"].items():
        if "failed" in entry:
            rows.append([variant, "failed", entry["failed"][:60], None, None])
            continue
        error = entry.get("gradient_error", entry.get("logps_error"))
        rows.append([variant, milliseconds(entry["seconds"]), shown(entry["ratio_to_floor"]),
                     mebibytes(entry.get("peak_bytes")), error and f"{error:.1e}"])
    lines = markdown([name, "ms", "of the products", "peak MiB", "error"], rows)
    for variant, (goal_ms, goal_gb) in GOALS.items() if name.startswith(GOALS_AT) else ():
        entry = part["variants"].get(variant, {})
        if "seconds" in entry:
            took, held = 1e3 * entry["seconds"]["median"], entry["peak_bytes"] / 1e9
            met = "met" if took <= goal_ms and held <= goal_gb else "missed"
            lines.append(f"- goal for `{variant}`, {goal_ms:g} ms and {goal_gb:g} GB: {met} "
                         f"({took:.1f} ms, {held:.2f} GB)")
    return lines


def of_steps(name, part):
    rows = []
    for variant, entry in part["variants"].items():
        if "failed" in entry:
            rows.append([variant, "failed", entry["failed"][:60], None, None])
            continue
        padded = entry.get("padded_over_this")
        rows.append([variant, f"{entry['tokens_per_second']['median']:.0f}",
                     shown(entry["ratio_to_sft"]), padded and shown(padded),
                     mebibytes(entry["peak_bytes"])])
    held = mebibytes(part["held_bytes"])
    return markdown([name, "tokens/s", "of plain SFT", "padded takes",
                     f"MiB beyond the model's {held}" if held else "peak MiB"], rows)


def of_generation(name, part):
    return [f"- {name}: {part['tokens_per_second']:.0f} tokens/s, {part['answers']} answers at a "
            f"time, {part['seconds_per_answer']:.3f} s an answer"]


def of_runtime(name, part):
    column = list(PUBLISHED_ROWS).index(name) if name in PUBLISHED_ROWS else None
    rows = [[method, None if column is None else hours[column],
             f"{part['hours'][method]:.3g}" if method in part["hours"] else None]
            for method, hours in PUBLISHED_HOURS.items()]
    lines = markdown([f"{name}, hours", "published, H100", "extrapolated"], rows)
    lines += [f"- {step}: {found['tokens_per_second']:.0f} tokens/s"
              for step, found in part["steps_with_generation"].items()]
    return [*lines, f"- {part['assumed']}"]


def of_text(name, part):
    found = part["result"]
    losses = ", ".join(f"{key} {found[key]:.3f}" for key in ("upper_heldout", "lower_heldout")
                       if key in found)
    return [f"- {name}: {losses}, {part['part_seconds']:.0f} s"]


PARTS = {"tests": of_tests, "logprob": of_log_probs, "steps": of_steps,
         "generation": of_generation, "table2": of_runtime, "text": of_text}
