"""Names that stand in `benchmarks/` now, for the files that still read them here."""

import utils
from benchmarks.__main__ import main
from benchmarks.shapes import SHAPES
from benchmarks.table2 import PUBLISHED_HOURS, PUBLISHED_ROWS

__all__ = ["PUBLISHED_HOURS", "PUBLISHED_ROWS", "SHAPES", "main"]

if __name__ == "__main__":
    utils.run(main)
