"""What runs over several seeds say: means, paired differences, claims, and what chance would do.

`runs` is a list with one result (a dictionary of metrics) a seed; `results` is {method: runs}.
"""

import re
import statistics

from evaluation.runs import read_result
from utils import table

CLAIM_COLUMNS = ("claim", "seeds as claimed", "difference", "p")


def mean_std(values):
    """(mean, standard deviation over runs, n) of the values that are numbers."""
    values = [v for v in values if isinstance(v, (int, float))]
    if not values:
        return None, None, 0
    return (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0,
            len(values))


def cell(values):
    """"mean ± std" of a table, three decimals below 100, none above; "-" without a number."""
    mean, std, n = mean_std(values)
    if not n:
        return "-"
    digits = 3 if abs(mean) < 100 else 0
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if n > 1 else "")


# --- paired differences and claims ----------------------------------------------------------------

def paired(first, second):
    """Mean difference of two methods over common seeds, and the two-sided sign-flip p-value.

    Exact: over all 2^n signs, the share whose mean difference is at least as large. With 4 seeds
    the smallest possible value is 0.125, so 4 of 4 is all that 4 seeds can say.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    observed, extreme = abs(sum(differences)), 0
    for signs in range(2 ** len(differences)):
        total = sum(d if signs >> i & 1 else -d for i, d in enumerate(differences))
        extreme += abs(total) >= observed - 1e-15
    return sum(differences) / len(differences), extreme / 2 ** len(differences)


def seed_verdict(first, second):
    """Is `first` below `second`? ["3 of 4" seeds on which it is, mean difference, p], as text."""
    difference, p = paired(first, second)
    below = sum(a < b for a, b in zip(first, second, strict=True))
    return [f"{below} of {len(first)}", f"{difference:+.4f}", f"{p:.3g}"]


def claims_of(claims, results):
    """Rows under CLAIM_COLUMNS for the claims whose two methods were run.

    claims: [(what is claimed, the method that should be lower, than which, in which metric)].
    """
    return [[text, *seed_verdict([run[key] for run in results[lower]],
                                 [run[key] for run in results[than]])]
            for text, lower, than, key in claims
            if {lower, than} <= set(results) and all(
                run.get(key) is not None for run in results[lower] + results[than])]


def by_chance(verdicts):
    """One line: how many of these "k of n" would be n of n or 0 of n if nothing were there.

    Under the null hypothesis every sign is a fair coin: 2 / 2^n for a claim over n seeds.
    """
    chances = [2.0 ** (1 - int(text.split(" of ")[1])) for text in verdicts]
    each = " or ".join(f"{p:.3g}" for p in sorted(set(chances)))
    return (f"Chance alone would give {sum(chances):.1f} of these {len(chances)} claims one sign "
            f"on every seed (p = {each} each).")


def print_claims(claims, what):
    """The claims as a table, and what chance would do; what: the unit of the difference."""
    if not claims:
        return
    header = ["difference in " + what if name == "difference" else name for name in CLAIM_COLUMNS]
    print("\n" + table(header, claims))
    print(by_chance([row[1] for row in claims]))


# --- results of many runs -------------------------------------------------------------------------

def results_of(files_of):
    """{method: [result file or ranking, ...]} -> results, of the methods that were trained."""
    return {method: [prefer_unmasked(read_result(file.parent)) for file in files]
            for method, files in files_of.items() if files[0].name == "result.json"}


def prefer_unmasked(run):
    """A result with the ranking metrics of unmasked rows in place of all rows'.

    Masked rows are judged by generated answers, so labels fit the unmasked rows alone. A kind of
    fault that no unmasked row has is left out.
    """
    unmasked = {key.replace("_unmasked/", "/"): value for key, value in run.items()
                if "_unmasked/" in key}
    if not unmasked:
        return run
    return {key: value for key, value in run.items()
            if not re.match(r"\w+/(auroc|precision|recall)\b", key)} | unmasked


def with_base(results):
    """The base model's own figures in front."""
    first = next(iter(results.values()))
    return {"base model": [{key.removeprefix("base/"): value for key, value in run.items()
                            if key.startswith("base/")
                            and not re.match(r"base/(auroc|precision|recall)\b", key)}
                           for run in first]} | results


def measured(columns, results):
    """Those columns of {key: heading} that some result has."""
    return {key: heading for key, heading in columns.items()
            if any(run.get(key) is not None for runs in results.values() for run in runs)}


def summary_rows(results, columns):
    """Rows of a table: the method, then "mean ± std" of each key of {key: heading}."""
    return [[method, *(cell([run.get(key) for run in runs]) for key in columns)]
            for method, runs in results.items()]
