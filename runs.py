"""Names that bench.py reads here."""

from paper.running import cpu_name, save_results  # noqa: F401
