"""Names that bench.py reads here."""

from paper.results import cpu_name, save_results  # noqa: F401
