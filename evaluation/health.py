"""Did a run work? The checks, figures and tables that head its report."""

from evaluation.comparison import final_metrics
from evaluation.plots import over_epochs

# What rows are ranked by. With known labels: NAME/auroc, NAME/precision, NAME/recall/KIND.
RANKINGS = ("weight", "corrected", "tests", "final", "base", "length")
FIRST_BATCH = "on the first upper batch, before any update"


# --- what a reader wants to know first ------------------------------------------------------------

def upper_loss_course(run):
    """[(when, held-out upper loss)] from before training to the end.

    Before training is the base model where the run has measured it, else the first step's batch
    of upper rows, whose losses are those before any update.
    """
    epochs, held_out = over_epochs(run, "upper_heldout")
    course = [("before training" if epoch == 0 else f"after epoch {epoch}", loss)
              for epoch, loss in zip(epochs, held_out, strict=True)]
    first = run.metrics[0]
    if epochs[:1] != [0] and first["step"] == 0 and "upper_loss" in first:
        course.insert(0, (FIRST_BATCH, first["upper_loss"]))
    return course


def upper_check(run):
    """The checks of the held-out upper loss."""
    course = upper_loss_course(run)
    if len(course) < 2:
        return [("info", "No held-out upper loss: the run has no trusted rows." if run.result else
                 "No held-out upper loss yet: it is measured at the end of an epoch.")]
    first, last = course[0][1], course[-1][1]
    when, best = min(course[1:], key=lambda pair: pair[1])
    sentence = f"Held-out upper loss {last:.4f} at the end; {first:.4f} {course[0][0]}."
    if last > 1.01 * best:
        sentence += f" It was lowest {when} ({best:.4f}) and has risen since"
        # A tenth of what was gained is noise on a few hundred rows; more is overfitting.
        if last - best > 0.1 * (first - best):
            return [("warn", f"{sentence}: fewer epochs or a smaller --lr.")]
        sentence += ", by little."
    return [("good" if last < first else "warn", sentence)]


def label_check(run, values):
    """Whether the weights tell known bad rows better than what costs one pass of the base model."""
    if run.result is None:
        return []
    if values.get("weight/auroc") is None:
        why = ("The rows that the weights have judged are all good or all bad"
               if "weight/auroc" in values else "AUROCs of kept rows alone are not compared"
               if "weight/auroc" in run.result else "No labels in the lower rows")
        return [("info", f"{why}: look at both ends of the ranking below to judge it.")
                ] if run.omegas else []
    names = {"the base model's loss": "base/auroc", "length": "length/auroc"}
    rivals = {name + ", reversed" * (values[key] < 0.5): max(values[key], 1 - values[key])
              for name, key in names.items() if values.get(key) is not None}
    sentence = f"The weights tell bad rows with AUROC {values['weight/auroc']:.3f}"
    if not rivals:
        return [("info", sentence + "; no pass of the base model to compare with.")]
    rival = max(rivals, key=rivals.get)
    better = values["weight/auroc"] > rivals[rival] + 0.01
    return [("good" if better else "warn", f"{sentence}, {rival} with {rivals[rival]:.3f}"
             + ("." if better else ": the selection adds nothing to it."))]


def selector_check(run):
    """Whether the weights have spread, and not onto a few rows."""
    measured = [row for row in run.metrics if "omega/ess" in row and "omega/ess_share" in row]
    if not measured:
        return []
    last = measured[-1]
    if last.get("omega/collapsed"):
        return [("bad", f"The selector has collapsed onto {last['omega/ess']:.1f} rows: a smaller "
                 "--omega-lr.")]
    if last.get("omega/uniform"):
        return [("warn", "The weights are still nearly uniform: only their order informs. A larger "
                 "--omega-lr or more epochs spread them.")]
    return [("good", "The selector is neither uniform nor collapsed: effective sample size "
             f"{last['omega/ess_share']:.0%} of the rows.")]


def answer_check(run, values):
    """What became of the answers that an online run wrote, and how fresh they were."""
    checks = []
    if values.get("refined/answers") is not None:
        rate = values.get("refined/false_replacement")
        said = (f"on trusted prompts the rule would replace {rate:.1%} of the right answers."
                if rate is not None else "too few trusted rows to calibrate the recommendation.")
        refine = getattr(run.args, "refine", None)
        if refine == "random":
            said = "drawn at random among the tried, the control of --refine accept."
        if refine == "accept":
            shares = [f"{values[f'gate/{way}_precision']:.0%} ({way})" for way in (
                "search", "continue", "generate") if values.get(f"accepted/{way}")
                and values.get(f"gate/{way}_precision") is not None]
            said = ("of trusted questions answered so are right: " + ", ".join(shares) + "."
                    if shares else "no answer reached a threshold that trusted rows set.")
        checks.append((
            "info", f"{values['refined/answers']} rows answered anew: "
            f"{values.get('refined/refined', 0)} recommended, "
            f"{values.get('refined/undecided', 0)} undecided; {said}"))
    clamped = sum(row.get("ratio_clamped", 0) for row in run.metrics)
    answers = getattr(run.args, "num_answers", None) or 1
    used = sum(row.get("masked_share", 0) for row in run.metrics) * run.args.batch * answers
    if clamped and used and clamped > 0.01 * used:
        checks.append(("warn", f"{clamped / used:.0%} of the importance ratios were clamped: the "
                       "answers are older than the model; a smaller --k-gen."))
    return checks


def run_checks(run):
    """[("good" | "warn" | "bad" | "info", sentence)]: what a reader wants to know first."""
    checks, last = [], run.metrics[-1]
    values = final_metrics(run) if run.result else {}
    if run.result is None:
        checks.append(("bad", f"Not finished: {last['step'] + 1} steps so far, epoch "
                       f"{last['epoch'] + 1} of {run.args.epochs}. Continue with --resume."))
    return (checks + upper_check(run) + label_check(run, values) + selector_check(run)
            + answer_check(run, values))


def health(checks):
    """(class, headline) of a list of checks."""
    bad, warn = (sum(kind == k for kind, _ in checks) for k in ("bad", "warn"))
    if bad:
        return "bad", "This run needs attention."
    if warn:
        return "warn", f"The run finished; {warn} point{'s' * (warn > 1)} to look at."
    return "good", "The run worked."


# --- figures and tables ---------------------------------------------------------------------------

def headline_figures(run):
    """[(label, text)]: the few numbers of the first screen."""
    values = final_metrics(run) if run.result else {}
    course, figures = upper_loss_course(run), []
    if len(course) > 1:
        figures.append(("upper loss: first batch → held out" if course[0][0] == FIRST_BATCH else
                        "held-out upper loss, before → after",
                        f"{course[0][1]:.3f} → {course[-1][1]:.3f}"))
    for key, label in (("upper_exact", "held-out answered exactly"),
                       ("upper_accuracy", "held-out pairs ranked right"),
                       ("lower_heldout", "held-out lower loss"),
                       ("weight/auroc", "AUROC of the weights"),
                       ("base/auroc", "AUROC of the base loss"),
                       ("length/auroc", "AUROC of the length")):
        if values.get(key) is not None:
            digits = ".0%" if key in ("upper_exact", "upper_accuracy") else ".3f"
            figures.append((label, f"{values[key]:{digits}}"))
    sizes = [row["omega/ess_share"] for row in run.metrics if "omega/ess_share" in row]
    if sizes:
        figures.append(("effective sample size", f"{sizes[-1]:.0%} of rows"))
    if run.args.method == "online":
        total, spent = (sum(row.get(f"time/{key}", 0.0) for row in run.metrics)
                        for key in ("step", "generate"))
        figures.append(("time spent generating", f"{spent / total:.0%}" if total else "-"))
    return figures


def label_metric(key):
    """("weight", "auroc/KIND") of a ranking's metric with known labels, (None, None) of another."""
    name, _, metric = key.partition("/")
    known = name.removesuffix("_unmasked") in RANKINGS and (
        metric.split("/")[0] in ("auroc", "precision", "recall"))
    return (name, metric) if known else (None, None)


def label_table(run):
    """(header, rows) of AUROC and recall by kind for every ranking, None without labels."""
    values = {key: value for key, value in (run.result or {}).items() if label_metric(key)[0]}
    present = {label_metric(key)[0] for key in values}
    names = [name for name in (*RANKINGS, *(f"{n}_unmasked" for n in RANKINGS)) if name in present]
    if not names:
        return None
    metrics = sorted({label_metric(key)[1] for key in values}, key=lambda m: (m.count("/"), m))
    return ["ranking by", *metrics], [[name.replace("_", ", "),
                                       *(values.get(f"{name}/{metric}") for metric in metrics)]
                                      for name in names]
