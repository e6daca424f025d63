"""What `python -m benchmarks gpu` measures, step by step; gpu.py runs them.

Models are built from configurations with random weights: nothing is downloaded. Each step takes a
`Record`, whose `part(name, measure, ...)` skips what an earlier call has done, and the settings.
"""

import importlib.util
import os
import shlex
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch

import batches
from benchmarks import generation, logprob, step, table2
from benchmarks.gpu_record import NotMeasured, Record
from benchmarks.measure import hardware, time_variants
from benchmarks.shapes import load_shape
from toy import corpus

ROOT = Path(__file__).resolve().parent.parent
FULL = {"device": "cuda", "rounds": 9, "step_rounds": 3, "batch": 32, "micro_batch": 8,
        "sizes": ((16384, 4096, 128256), (4096, 4096, 128256), (4096, 2048, 50304)),  # T, d, V
        "shapes": ("llama3-8b", "pythia-1b"), "prompts": 256, "new_tokens": 512,
        "lower_tokens": 160, "upper_tokens": 400}
TINY = {"device": "cpu", "rounds": 1, "step_rounds": 1, "batch": 2, "micro_batch": 2,
        "sizes": ((33, 16, 1003), (16, 16, 300)),
        "shapes": ("tiny", "tiny-neox"), "prompts": 2, "new_tokens": 2,
        "lower_tokens": 16, "upper_tokens": 20}
GROUPS = (1, 5)  # G of the online steps
CACHES = {"compiled": True, "dynamic cache": False}


def settings_of(args):
    """The sizes of every step, and where the files of the command line are."""
    files = {name: getattr(args, name) and str(Path(getattr(args, name)).resolve())
             for name in ("model", "lower", "upper")}
    return SimpleNamespace(rehearse=args.rehearse, folder=Path(args.out).resolve(), **files,
                           **(TINY if args.rehearse else FULL))


def machine_of(settings):
    """What a record says about where it was made."""
    import transformers

    return {"hardware": hardware(torch.device(settings.device)), "torch": torch.__version__,
            "transformers": transformers.__version__}


# --- the CUDA tests -------------------------------------------------------------------------------

class Outcomes:
    """A pytest plugin: how many tests passed, failed, were skipped; the end of each failure."""

    def __init__(self):
        self.counts, self.failures = Counter(), {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self.failures[report.nodeid] = str(report.longrepr)[-500:]


def tests(record, settings):
    def run():
        if importlib.util.find_spec("pytest") is None:
            raise NotMeasured("pytest is not installed")
        import pytest

        outcomes = Outcomes()
        code = pytest.main(["-p", "no:cacheprovider", str(ROOT / "tests" / "test_cuda.py")],
                           plugins=[outcomes])
        return {"exit_code": int(code), **outcomes.counts, "failures": outcomes.failures}

    record.part("tests/test_cuda.py", run)


# --- log-probs ------------------------------------------------------------------------------------

def log_probs(record, settings):
    """Each size first without the other libraries: one that hangs must not take ours with it.

    The part's name tells which libraries there are: with more of them it is measured again.
    """
    here, lacking = logprob.peers(settings.device)
    for peers in ([], here) if here else ([],):
        for sizes in settings.sizes:
            name = ", ".join(f"{key} {size}" for key, size in zip("TdV", sizes, strict=True))
            record.part(name + (f", with {', '.join(peers)}" if peers else ""), log_probs_of,
                        settings, sizes, peers)
    record.content["parts"].pop("other libraries", None)
    if lacking:
        record.content["parts"]["other libraries"] = {
            "not measured": f"{', '.join(lacking)}: not installed"}


def log_probs_of(settings, sizes, peers):
    torch.cuda.empty_cache()
    return {"variants": logprob.compare_heads(sizes, torch.device(settings.device), settings.rounds,
                                        bool(peers))}


# --- steps ----------------------------------------------------------------------------------------

def steps(record, settings):
    """SFT, BDS and online against padded forwards, without and with gradient checkpointing."""
    for shape in settings.shapes:
        for checkpointing in (False, True):
            record.part(shape + (", gradient checkpointing" if checkpointing else ""), steps_of,
                        settings, shape, checkpointing)
    largest = settings.shapes[0]
    record.part(f"{largest}, 4-bit, gradient checkpointing", steps_of, settings, largest, True,
                True)


def steps_of(settings, shape, checkpointing, four_bit=False):
    if four_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise NotMeasured("bitsandbytes is not installed")
    torch.cuda.empty_cache()
    device, count = torch.device(settings.device), settings.batch * settings.step_rounds
    model, lower, upper = load_shape(shape, device, count, settings.lower_tokens,
                                     settings.upper_tokens, checkpointing, four_bit)
    held = torch.cuda.memory_allocated() if device.type == "cuda" else None
    results, tokens, rate = step.compare_steps(
        model, lower, upper, step.batches_of(count, settings.batch), settings.micro_batch,
        settings.step_rounds, device, GROUPS)
    return {"variants": results, "held_bytes": held, "tokens_a_step": tokens,
            "product_flops_per_second": rate}


# --- generation -----------------------------------------------------------------------------------

def answering(record, settings):
    """Seconds an answer of full length: random weights never end one."""
    for name, static in reversed(CACHES.items()):
        for shape in settings.shapes:
            record.part(f"{shape}, {name}", answers_of, settings, shape, static)


def answers_of(settings, shape, static):
    torch.cuda.empty_cache()
    device = torch.device(settings.device)
    model, rows, _ = load_shape(shape, device, settings.prompts, settings.lower_tokens, 16)
    generation.used_adapter(model)
    prompts, made = [batches.prompt_of(row) for row in rows], []

    def run(_):
        made[:] = generation.answer_in_order(model, prompts, settings.new_tokens, settings.prompts,
                                             static_cache=static)

    seconds = time_variants({"answers": run}, 1, device, f"answers, {shape}")["answers"][0]
    tokens = sum(len(answer) for answer, _ in made)
    return {"seconds": seconds, "answers": len(made), "tokens": tokens,
            "tokens_per_second": tokens / seconds, "seconds_per_answer": seconds / len(made)}


# --- the runtime table ----------------------------------------------------------------------------

def runtime(record, settings):
    """From the steps and answers of the files beside this one: nothing is measured here."""
    for shape in settings.shapes:
        record.part(shape, published_hours, settings, shape)


def published_hours(settings, shape):
    def parts(name):
        return Record(settings.folder, name, settings.rehearse).content["parts"]

    variants = parts("steps").get(shape, {}).get("variants")
    answers = [found["seconds_per_answer"] for name in CACHES
               if "seconds" in (found := parts("generation").get(f"{shape}, {name}", {}))]
    if variants is None or not answers:
        raise NotMeasured("its steps or answers are not measured yet")
    seconds = {name: entry["seconds"]["median"] for name, entry in variants.items()
               if "seconds" in entry}
    online = [step.online_name(group) for group in GROUPS]
    if lacking := {*table2.MEASURED.values(), *online} - seconds.keys():
        raise NotMeasured(f"no figure of {', '.join(sorted(lacking))}")
    # A step of B rows reads R B masked ones, each answered G times at the last refresh.
    masked = len(step.masked_rows(range(settings.batch)))
    whole = {}
    for group, name in zip(GROUPS, online, strict=True):
        alone = seconds[name]
        both = alone + masked * group * min(answers)
        trained = variants[name]["tokens_per_second"]["median"] * alone
        whole[f"{name}, with generation"] = {"seconds": both, "tokens_per_second": trained / both}
    return {"hours": table2.hours_of(
        {key: seconds[name] for key, name in table2.MEASURED.items()}, min(answers),
        table2.PUBLISHED_ROWS.get(shape, settings.batch),
        settings.lower_tokens / (settings.lower_tokens + settings.upper_tokens)),
        "steps_with_generation": whole, "assumed": table2.ASSUMED}


# --- Table 1 on text ------------------------------------------------------------------------------

def text(record, settings):
    """The methods of Table 1, one seed, on the rows and model of the command line."""
    from paper.reproduce import PUBLISHED

    methods = ["mixing rho=1"] if settings.rehearse else list(PUBLISHED["table1"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if settings.rehearse else ROOT / "runs" / "gpu"
        folder.mkdir(parents=True, exist_ok=True)
        if settings.rehearse:
            made = corpus.write(folder, num_lower=8, num_upper=4, num_heldout=2)
            settings.model, settings.lower, settings.upper = (
                str(corpus.MODEL), str(made["lower"]), str(made["upper"]))
        os.chdir(folder)  # the runs and the stored tables go here
        for method in methods:
            record.part(f"{settings.model and Path(settings.model).name}, {method}", table1_of,
                        settings, method)


def table1_of(settings, method):
    from evaluation.runs import read_result
    from paper.__main__ import main as run_paper
    from paper.running import slug

    if not (settings.model and settings.lower and settings.upper):
        raise NotMeasured("--model, --lower and --upper name no model and rows")
    if importlib.util.find_spec("datasets") is None:
        raise NotMeasured("datasets is not installed")
    data = shlex.join(["--model", settings.model, "--lower", settings.lower, "--upper",
                       settings.upper])
    run_paper(["table1", "--scale", "small", "--seeds", "1", "--workers", "1", "--name", "gpu",
               "--only", method, "--data", data])
    found = read_result(Path("runs") / "gpu" / slug(method) / "seed-0")
    return {"result": {key: value for key, value in found.items()
                       if isinstance(value, (int, float, str))}}


STEPS = {"tests": tests, "logprob": log_probs, "steps": steps, "generation": answering,
         "table2": runtime, "text": text}
