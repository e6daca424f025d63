"""The results of one step of `python -m benchmarks gpu`, kept from call to call."""

import gc
import json
import time
import traceback
from pathlib import Path

import utils
from utils import UserError

TRIES = 2  # of a part that its step's limit has cut off


class NotMeasured(Exception):
    """A part lacks something that the next call may bring: a package, a file, another part."""


class Record:
    """A step's results: a file, in place at once or not at all after every part."""

    def __init__(self, folder, step, rehearsal):
        self.path = Path(folder) / f"{step}.json"
        self.content = {"step": step, "rehearsal": rehearsal, "finished": False, "running": None,
                        "cut_off": {}, "seconds": 0.0, "parts": {}}
        if self.path.exists():
            try:
                self.content |= json.loads(self.path.read_text())
            except (ValueError, TypeError):
                raise UserError(f"{self.path}: not the file of a step; remove it") from None
            if self.content["rehearsal"] != rehearsal:
                held = "GPU figures" if rehearsal else "a rehearsal"
                raise UserError(f"{self.path}: holds {held}; choose another --out")

    def save(self):
        utils.write_atomic(self.path, json.dumps(self.content, indent=1) + "\n")

    def part(self, name, measure, *values):
        """Keep what `measure(*values)` returns under `name`, unless it is there already."""
        parts, tries = self.content["parts"], self.content["cut_off"].get(name, 0)
        if name in parts and "not measured" not in parts[name]:
            return
        if tries >= TRIES:
            parts[name] = {"failed": f"cut off {tries} times by the step's limit"}
            self.save()
            return
        self.content["running"] = name
        self.save()
        started = time.perf_counter()
        try:
            result = measure(*values)
        except NotMeasured as reason:
            result = {"not measured": str(reason)}
        except Exception as error:
            traceback.print_exc()
            result = {"failed": utils.first_line(error)}
        parts[name] = {"part_seconds": round(time.perf_counter() - started, 2)} | result
        self.content["running"] = None
        self.save()
        gc.collect()

    def ended(self, finished):
        """The step's function has returned, or its process is gone."""
        lacking = any("not measured" in part for part in self.content["parts"].values())
        self.content["finished"] = finished and not lacking
        self.save()
