"""What the paper claims and what is seen, one row a claim: the toy and real text at two sizes.

A cell is the mean difference over seeds with its 95 % interval (Student's t of the paired
differences). Negative is as claimed: of a loss, of 1 - AUROC, of the length of an answer.
"""

import json
import statistics
from pathlib import Path

from evaluation.comparison import student_t
from paper.results import UPPER

# By scale, the stored files of each table; the first that holds both methods counts.
SCALES = {
    "toy": {"table1": ["toy_table1"], "table3": ["toy_table3"], "pairs": ["toy_table3_dpo"],
            "ranking": ["toy_ranking"], "selectors": ["toy_selectors"], "kept": ["toy_curated"]},
    "text, 5.9M": {"table1": ["planted_table1"], "table3": ["redorca_table3"],
                   "pairs": ["redorca_table3_dpo"], "ranking": ["planted_ranking"],
                   "selectors": ["planted_selectors"], "kept": ["planted_default_curated"]},
    "text, 135M": {"table1": ["smollm2_table1", "smollm2_dynamic_table1"],
                   "table3": ["smollm2_table3"],
                   "pairs": ["smollm2_table3_dpo"], "ranking": ["smollm2_ranking"],
                   "selectors": ["smollm2_selectors"],
                   "kept": ["smollm2_curated"]}}
ONLINE, DYNAMIC, AUROC = "online R=10% G=1", "online dynamic", "auroc"
OMEGA = ("weight/auroc", "base/auroc")  # of one run


def safety(name, table):
    """The paper's claims of Table 3, by trusted rows or by preference pairs."""
    return [(f"{name}: BDS beats mixing", table, "BDS", "mixing rho=0.5", UPPER),
            ("... and mixing with its rho", table, "BDS", "mixing, rho schedule", UPPER),
            (f"{name}: online dynamic beats BDS", table, DYNAMIC, "BDS", UPPER),
            ("... and leaving those rows out", table, DYNAMIC, "control: dynamic, drop", UPPER)]


# (the claim, table, the method with the lower metric, than which, metric or one of
# each; None: rises by epoch).
CLAIMS = (
    ("BDS beats plain fine-tuning", "table1", "BDS", "mixing rho=1", UPPER),
    ("BDS beats mixing, rho = 0.5", "table1", "BDS", "mixing rho=0.5", UPPER),
    ("... and mixing with BDS's rho", "table1", "BDS", "mixing, rho schedule", UPPER),
    ("BDS beats random rows", "table1", "BDS", "random", UPPER),
    ("BDS beats LESS", "table1", "BDS", "LESS", UPPER),
    ("BDS beats DSIR", "table1", "BDS", "DSIR", UPPER),
    ("online beats BDS", "table1", ONLINE, "BDS", UPPER),
    ("... and leaving those rows out", "table1", ONLINE, "control: drop", UPPER),
    ("a dynamic mask beats leaving its rows out", "table1", DYNAMIC, "control: dynamic, drop",
     UPPER),
    ("masking 10 % beats 5 %", "table1", ONLINE, "online R=5% G=1", UPPER),
    ("five answers beat one", "table1", "online R=10% G=5", ONLINE, UPPER),
    *safety("safety", "table3"),
    *safety("by pairs", "pairs"),
    ("online: short answers come first", "ranking", ONLINE, ONLINE, None),
    ("omega beats the base loss", "table1", "BDS", "BDS", OMEGA),
    ("corrected omega beats it", "selectors", "omega, corrected", "loss", AUROC),
    ("a fresh model: best rows beat all", "kept", "top k by BDS", "raw set", UPPER),
    ("... and with rewrites the best rows", "kept", "... with its rewrites",
     "top k by the online run", UPPER))


def claims_by_scale():
    """(header, rows) of claims and scales that were run, once at least; "not run" elsewhere."""
    columns = {scale: [cell_of(files[table], first, than, metric)
                       for _, table, first, than, metric in CLAIMS]
               for scale, files in SCALES.items()}
    columns = {scale: cells for scale, cells in columns.items() if set(cells) != {"not run"}}
    rows = [[claim[0], *cells] for claim, *cells in zip(CLAIMS, *columns.values(), strict=True)]
    return ["the paper's claim", *columns], [row for row in rows if {*row[1:]} != {"not run"}]


def cell_of(files, first, than, metric):
    """A cell of the table, from the first of results/FILE.json with both methods and the metric."""
    for name in files:
        file = Path("results") / f"{name}.json"
        results = json.loads(file.read_text())["results"] if file.exists() else {}
        own = metric[0] if isinstance(metric, tuple) else metric
        if {first, than} <= set(results) and (own is None or own in results[first][0]):
            return t_interval(differences(results[first], results[than], metric))
    return "not run"


def differences(first, than, metric):
    """first - than over their common seeds: of a loss, of 1 - AUROC, of the first and last epoch.
    """
    if metric is None:
        return [run["epoch 1"] - list(run.values())[-1] for run in first]
    own, other = metric if isinstance(metric, tuple) else (metric, metric)
    sign = -1 if own.endswith(AUROC) else 1
    return [sign * (a[own] - b[other]) for a, b in zip(first, than, strict=False)]


def t_interval(values):
    """"mean ± half of the 95 % interval", bold when all of it is as claimed, in italics when
    none of it is."""
    mean = statistics.fmean(values)
    digits = 3 if abs(mean) < 1 else 1
    if len(values) < 2:
        return f"{mean:+.{digits}f}, one seed"
    half = student_t(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if mean < -half else f"*{text}*" if mean > half else text
