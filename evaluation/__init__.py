"""Looking at finished runs: read, compare, report, ask, judge. `python eval.py` is the front."""
