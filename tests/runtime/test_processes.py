"""Several processes: two of them, started by torchrun and joined by gloo, give what one gives.

Runs in float64, where sums in another order differ by 1e-15: any row, gradient or answer that is
lost, doubled or weighed differently shows. One start of torchrun costs seconds of imports, so one
pair of processes does several runs.
"""

import json
import re
import socket
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, flags, make_rows, python, read_rows, write_rows
from safetensors.torch import load_file

import batches
from runtime import log, processes

TOLERANCE = 1e-9  # 1e-5 would do

# Reads [[script, arguments], ...] from a file; runs them one after another in the same processes.
# `kill` is "rank step": that process gets SIGKILL once it has logged that step of the last run.
WORKER = """
import importlib, json, os, pathlib, signal, sys
import models
from data import sets
from runtime import command, log, processes

runs, facts, kill = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
log_metrics, shard = log.log_metrics, models.shard

def log_or_die(file, values):
    log_metrics(file, values)
    if last and kill and (processes.rank(), values["step"]) == (int(kill[0]), int(kill[1])):
        os.kill(os.getpid(), signal.SIGKILL)

def shard_and_tell(model, device):
    shard(model, device)
    split = [p for p in model.parameters() if hasattr(p, "to_local")]
    facts.with_suffix(f".{processes.rank()}").write_text(json.dumps({
        "here": sum(p.to_local().numel() for p in split), "all": sum(p.numel() for p in split),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "whole": sum(p.numel() for p in model.parameters() if not hasattr(p, "to_local"))}))

log.log_metrics, models.shard = log_or_die, shard_and_tell

def main():
    global last
    if "OTHER_ROWS" in os.environ and os.environ["RANK"] == "1":
        sets.rows_hash = lambda rows: "other"
    jobs = json.loads(pathlib.Path(runs).read_text())
    for number, (script, arguments) in enumerate(jobs, 1):
        last = number == len(jobs)
        importlib.import_module(script).main(arguments)

command.run(main)
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(folder, runs, kill=(), processes=2, **more):
    """torchrun on [(script, out, flags), ...] below `folder` -> exit code, stdout and stderr.

    more: environment variables.
    """
    jobs = [[script, flags(**options, out=folder / out)] for script, out, options in runs]
    (folder / "runs.json").write_text(json.dumps(jobs))
    (folder / "worker.py").write_text(WORKER)
    command, environment = python(
        "-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", free_port(),
        folder / "worker.py", folder / "runs.json", folder / "facts", *kill)
    with subprocess.Popen(command, cwd=ROOT, env=environment | more, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=280)
        finally:
            process.terminate()  # of one that hangs: torchrun ends its processes
    return SimpleNamespace(code=process.returncode, out=out, folder=folder,
                           err=err.replace("\r", "\n"))


@pytest.fixture
def torchrun(tmp_path):
    """torchrun((script, out, flags), ..., kill=None, processes=2), see `start`."""
    return lambda *runs, **how: start(tmp_path, runs, **how)


def own_errors(text):
    """The lines that the scripts print; torchrun adds a report with a traceback of its own."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


def small(folder, folders, adapters):
    """Flags of a small run with every gradient non-zero; the counts divide by nothing."""
    rows = {"lower": (11, 1), "upper": (7, 2), "upper_heldout": (45, 3)}
    return {name: write_rows(folder / f"{name}.jsonl", make_rows(*made))
            for name, made in rows.items()} | {
        "model": folders["llama"], "adapter": adapters["llama"], "dtype": "float64",
        "cache_dir": folder / "cache", "batch": 5, "micro_batch": 2, "epochs": 2, "save_every": 2,
        "lr": 1e-2, "omega_lr": 5}


@pytest.fixture
def options(tmp_path, folders, adapters):
    return small(tmp_path, folders, adapters)


ONLINE = {"num_answers": 2, "max_new_tokens": 5, "ratio_masked": 0.4, "k_gen": 2, "mask": "dynamic"}


def pairs(options, folder):
    """The same with preference pairs above."""
    return options | {"upper_loss": "dpo"} | {name: write_rows(folder / f"pairs_{name}.jsonl", [
        {"prompt": row["prompt"], "chosen": row["response"], "rejected": f"no {n} cold"}
        for n, row in enumerate(read_rows(options[name]))]) for name in ("upper", "upper_heldout")}


def assert_close(mine, theirs, where, tolerance):
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            if not key.startswith("time/"):
                assert_close(mine[key], theirs[key], f"{where} {key}", tolerance)
    elif isinstance(mine, list):
        assert len(mine) == len(theirs), where
        for n, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_close(a, b, f"{where} {n}", tolerance)
    elif isinstance(mine, float):
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance), where
    else:
        assert mine == theirs, where


def assert_same_run(run, whole, tolerance=TOLERANCE):
    """Adapter, omega after every epoch, ranking, curated rows, every logged number."""
    for name in ("adapter/adapter_model.safetensors",
                 *(f"weights/{path.name}" for path in (whole / "weights").iterdir())):
        mine, theirs = load_file(run / name), load_file(whole / name)
        assert mine.keys() == theirs.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], theirs[key], rtol=tolerance, atol=tolerance,
                                       equal_nan=True)
    for name in ("weights.jsonl", "curated.jsonl", "metrics.jsonl"):
        assert (run / name).exists() == (whole / name).exists()
        if (whole / name).exists():
            assert_close(read_rows(run / name), read_rows(whole / name), name, tolerance)
    assert_close(*(json.loads((folder / "result.json").read_text()) for folder in (run, whole)),
                 "result.json", tolerance)


def alone(script, options, out):
    """The same run by this one process."""
    __import__(script).main(flags(**options, out=out))
    return out


# --- two processes and one ------------------------------------------------------------------------

def cases(options, folder):
    """What the pair below runs, in order: {name: (script, flags)}; the last is killed."""
    return {
        "offline": ("train_offline", pairs(options, folder) | {"correction": 0.6, "epochs": 1}),
        "sharded": ("train_online", options | ONLINE | {"fsdp": True, "k_gen": 3,
                                                        "epochs": 1}),
        "killed": ("train_online", options | ONLINE)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, folders, adapters):
    """Two processes that do three runs; the second gets SIGKILL after step 3 of the last one."""
    folder = tmp_path_factory.mktemp("pair")
    options = small(folder, folders, adapters)
    made = cases(options, folder)
    done = start(folder, [(script, name, given) for name, (script, given) in made.items()],
                 kill=(1, 3))
    assert (folder / "killed").exists(), done.err[-3000:]
    done.cases = made
    return done


def one_process(case, out):
    """The same run by this one process."""
    script, given = case
    return alone(script, {key: value for key, value in given.items() if key != "fsdp"}, out)


def test_two_processes_equal_one_offline(pair, tmp_path):
    """BDS with a corrected penalty, theta_hat, and pairs above: theta, omega, the ranking, every
    logged number. One process speaks."""
    assert_same_run(pair.folder / "offline", one_process(pair.cases["offline"], tmp_path / "one"))
    assert pair.out.count("RESULT ") == 2 and pair.out.count("\nsteps: ") == 3
    assert "2 forwards a step (batch 5 / 2 processes / micro batch 2)" in pair.out


def test_two_processes_with_fsdp_equal_one_online(pair, tmp_path):
    """Generation with G = 2 split over them, the weights of the layers too: the curated
    rows as well. Each holds about half of the layers, and all that is trained."""
    assert_same_run(pair.folder / "sharded", one_process(pair.cases["sharded"], tmp_path / "one"))
    facts = [json.loads((pair.folder / f"facts.{rank}").read_text()) for rank in (0, 1)]
    assert sum(f["here"] for f in facts) == facts[0]["all"] > 10_000
    for f in facts:
        assert abs(f["here"] / f["all"] - 0.5) < 0.01 and f["trained"] < f["whole"]


def test_one_of_two_is_killed_and_one_process_goes_on(pair, tmp_path, capfd):
    """The other ends at once with one line; the checkpoint of two processes is continued by one,
    to what a run that was left alone gives."""
    (line,) = own_errors(pair.err)
    assert re.search("another process of this run has stopped.* --resume$", line)
    assert pair.code != 0 and "exitcode  : 1" in pair.err and "SIGKILL" in pair.err
    run, (script, given) = pair.folder / "killed", pair.cases["killed"]
    assert (run / "checkpoints" / "step_00000002").is_dir()
    assert not (run / "result.json").exists() and len(read_rows(run / "metrics.jsonl")) in (3, 4)
    capfd.readouterr()
    alone(script, given | {"resume": True}, run)
    assert "begun with 2 processes, continued with 1" in capfd.readouterr().out
    assert_same_run(run, alone(script, given, tmp_path / "whole"))


def compare_runs(torchrun, tmp_path, cases):
    """Every case {name: (script, flags)} by two processes and by one."""
    done = torchrun(*((script, f"two-{name}", given) for name, (script, given) in cases.items()))
    assert done.code == 0 and not own_errors(done.err), done.err[-3000:]
    for name, case in cases.items():
        assert_same_run(tmp_path / f"two-{name}", one_process(case, tmp_path / f"one-{name}"))


@pytest.mark.slow
def test_more_runs_of_two_processes_equal_one(torchrun, options, tmp_path):
    """Another architecture, gradient checkpointing, FSDP of every method, a batch of one row (a
    process without any), dropped answers, mixing and SFT."""
    dpo, neox = pairs(options, tmp_path), {"model": str(options["model"]).replace("llama", "neox")}
    neox["adapter"] = str(options["adapter"]).replace("llama", "neox")
    sft = {key: value for key, value in options.items() if not key.startswith("upper")}
    compare_runs(torchrun, tmp_path, {
        "plain": ("train_offline", options),
        "uneven": ("train_offline", options | {"batch": 3, "micro_batch": 1, "fsdp": True}),
        "single": ("train_offline", options | {"batch": 1, "epochs": 1, "fsdp": True}),
        "sharded dpo": ("train_offline", dpo | {"correction": 1.0, "fsdp": True,
                                                "gradient_checkpointing": True}),
        "mix": ("train_offline", options | {"method": "mix", "rho": 0.4}),
        "sft": ("train_offline", sft | {"method": "sft", "fsdp": True}),
        "neox": ("train_online", options | neox | ONLINE | {"fsdp": True}),
        "online dpo": ("train_online", dpo | ONLINE | {"correction": 0.5, "num_answers": 1}),
        "drop": ("train_online", options | ONLINE | {"refine": "drop", "ratio_masked": 0.9,
                                                     "correction": 1.0, "fsdp": True})})


@pytest.mark.slow
def test_two_machines_equal_one_process(options, tmp_path):
    """Two starts of torchrun that meet at an address, each with a cache of its own: the first
    writes the run and speaks, the second is silent."""
    given, port, machines = options | ONLINE, free_port(), []
    for number in (0, 1):
        command, environment = python(
            "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1, "--node-rank",
            number, "--master-addr", "127.0.0.1", "--master-port", port, "train_online.py",
            *flags(**given | {"cache_dir": tmp_path / f"cache{number}"}, out=tmp_path / "two"))
        machines.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        texts = [machine.communicate(timeout=200) for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
    assert [machine.returncode for machine in machines] == [0, 0], texts[0][1][-3000:]
    assert texts[0][0].count("RESULT ") == 1 and texts[1][0] == ""
    assert_same_run(tmp_path / "two", alone("train_online", given, tmp_path / "one"))


# --- killed, and continued by another number ------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_killed_first_process_and_changing_numbers(torchrun, options, tmp_path, fsdp):
    """SIGKILL to the first after step 3, two again, killed after step 4, then three."""
    given = options | ONLINE | {"epochs": 3, "fsdp": fsdp}
    for number, kill in enumerate(((0, 3), (1, 4))):
        done = torchrun(("train_online", "run", given | {"resume": number > 0}), kill=kill)
        assert done.code != 0 and len(own_errors(done.err)) == 1, done.err[-3000:]
    done = torchrun(("train_online", "run", given | {"resume": True}), processes=3)
    assert done.code == 0, done.err[-3000:]
    assert "begun with 2 processes, continued with 3" in done.out
    given.pop("fsdp")
    assert_same_run(tmp_path / "run", alone("train_online", given, tmp_path / "whole"))


@pytest.mark.slow
def test_two_killed_and_two_again_go_on_bit_for_bit(torchrun, options, tmp_path):
    """With the number unchanged nothing differs at all, in the float32 of the CPU."""
    given = options | ONLINE | {"dtype": "float32"}
    torchrun(("train_online", "whole", given), ("train_online", "run", given), kill=(1, 3))
    assert (tmp_path / "whole" / "result.json").exists()
    assert not (tmp_path / "run" / "result.json").exists()
    done = torchrun(("train_online", "run", given | {"resume": True}))
    assert done.code == 0 and "begun with" not in done.out, done.err[-3000:]
    assert_same_run(tmp_path / "run", tmp_path / "whole", tolerance=0)


@pytest.mark.slow
def test_begun_by_one_process_and_continued_by_two(torchrun, options, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    log_metrics = log.log_metrics

    def die(file, values):
        if values["step"] == 3:
            raise Killed
        log_metrics(file, values)

    monkeypatch.setattr(log, "log_metrics", die)
    with pytest.raises(Killed):
        alone("train_offline", options, tmp_path / "run")
    monkeypatch.undo()
    whole = alone("train_offline", options, tmp_path / "whole")  # this process's lock goes there
    done = torchrun(("train_offline", "run", options | {"resume": True}))
    assert done.code == 0, done.err[-3000:]
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"epochs": 30}, {"keep": "missing.jsonl"}, {"lower": "missing.jsonl"}, {"out_file": True}], ids=lambda changes: next(iter(changes)))
def test_bad_input_is_said_once(torchrun, options, tmp_path, changes):
    """Before and after the processes have joined, on the first alone or on both: one line."""
    if changes.pop("out_file", None):
        (tmp_path / "file").write_text("")
        done = torchrun(("train_offline", "file/run", options))
    else:
        done = torchrun(("train_offline", "run", options | changes))
    assert done.code != 0 and len(own_errors(done.err)) == 1
    assert "exitcode  : 2" in done.err and 'main.py", line' not in done.err
    assert "command.py" not in done.err and "train_offline.py" not in done.err


@pytest.mark.slow
def test_another_file_on_another_machine_is_refused(torchrun, options):
    """As if the second process read other rows: said before anything is trained or written."""
    done = torchrun(("train_offline", "run", options), OTHER_ROWS="1")
    (line,) = own_errors(done.err)
    assert "process 1 has the data lower 'other' and process 0 has" in line
    assert done.code != 0 and not (done.folder / "run").exists()


def test_a_world_without_torchrun_is_refused(train, files, refused, monkeypatch):
    """Schedulers set WORLD_SIZE as well."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "start several processes with torchrun" in refused(lambda: train(files()))


def test_fsdp_needs_several_processes(train, files, refused, monkeypatch):
    line = refused(lambda: train(files(), fsdp=True))
    assert "--fsdp" in line and "torchrun" in line
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(lambda: train(files(), fsdp=True, four_bit=True))
    assert "--fsdp" in line and "--four-bit" in line


# --- shares and micro batches, without processes --------------------------------------------------

@pytest.fixture
def as_process(monkeypatch):
    """as_process(rank, count): this process takes itself for one of several."""
    def become(rank, count):
        for module in (processes, batches):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "world_size", lambda: count)
    return become


def rows_of(lengths):
    return [[{"input_ids": [0] * length}] if length else [] for length in lengths]


def cut(upper, lower, micro_batch, sharded=False):
    return list(batches.micro_batches(rows_of(upper), rows_of(lower), micro_batch, sharded))


@pytest.mark.parametrize(("num_upper", "num_lower", "size"), [
    (7, 7, 3), (7, 3, 2), (0, 5, 2), (5, 0, 8), (4, 6, 1)])
def test_micro_batches_are_slices_of_rows(num_upper, num_lower, size):
    """Upper and lower rows side by side, in order."""
    found = cut([3] * num_upper, [4] * num_lower, size)
    starts = range(0, max(num_upper, num_lower), size)
    assert [(up, low) for up, low, _ in found] == [
        (list(range(num_upper))[s:s + size], list(range(num_lower))[s:s + size]) for s in starts]


def test_processes_of_a_sharded_base_run_equally_many_forwards(as_process, monkeypatch):
    """The third of three has one row less than the others: it runs a forward that counts for
    nothing, as does one whose questions have no answers."""
    lower = [3] * 8
    for rank, expected in ((0, [[0], [3], [6]]), (1, [[1], [4], [7]]), (2, [[2], [5], []])):
        as_process(rank, 3)
        left = iter([1, 1, 1, 0])  # what all together still have
        monkeypatch.setattr(processes, "all_sum", lambda values, left=left: values.fill_(
            next(left)))
        found = cut([], lower, 1, sharded=True)
        assert [low for _, low, _ in found] == expected
        assert all(rows == ([batches.SPARE_ROW] if not low else rows_of([3])[0])
                   for _, low, rows in found)
    as_process(0, 1)
    monkeypatch.undo()
    assert cut([], [0, 2], 1) == [([], [1], rows_of([2])[0])]
    assert cut([], [0, 2], 1, sharded=True) == [([], [0], [batches.SPARE_ROW]),
                                                ([], [1], rows_of([2])[0])]


def test_online_gradient_does_not_depend_on_the_micro_batch(online, files, adapters):
    """Questions of several answers are not torn apart: the same run, in float64."""
    paths, runs = files(lower=9, upper=7), []
    for size in (5, 2, 1):
        runs.append(online(paths, adapter=adapters["llama"], dtype="float64", batch=5, epochs=2,
                           num_answers=3, k_gen=2, lr=1e-2, omega_lr=5, micro_batch=size,
                           out=f"run{size}").out)
    for run in runs[1:]:
        assert_same_run(run, runs[0])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [1, 2, 5, 8])
def test_split_work_comes_back_in_order(as_process, monkeypatch, count, total):
    """Each process gets as many items as any other; all get all results."""
    items, names, given = list(range(total)), [f"n{i}" for i in range(total)], []

    def work(numbers, labels):
        given.append(len(numbers))
        return [f"{label}={number}" for number, label in zip(numbers, labels, strict=True)]

    def shares(rank):
        as_process(rank, count)
        parts = []
        monkeypatch.setattr(processes.dist, "all_gather_object",
                            lambda into, mine: parts.append(mine) or into.clear())
        with pytest.raises((IndexError, TypeError)):
            processes.share_list(work, items, names)
        return parts[0]

    if count == 1:
        assert processes.share_list(work, items, names) == [f"n{i}={i}" for i in items]
        return
    everybody = [shares(rank) for rank in range(count)]
    assert len(set(given)) == 1

    def gather(into, mine):
        into[:] = everybody

    monkeypatch.setattr(processes.dist, "all_gather_object", gather)
    assert processes.share_list(work, items, names) == [f"n{i}={i}" for i in items]


def test_missing_gradients_are_sent_as_zeros(as_process, monkeypatch):
    """A process whose share did not touch a parameter must not leave the others waiting."""
    sent = []
    as_process(0, 2)
    monkeypatch.setattr(processes.dist, "all_reduce", lambda tensor: sent.append(tensor.clone())
                        or tensor.mul_(2))
    touched, untouched = (torch.nn.Parameter(torch.ones(size)) for size in ((2, 3), 4))
    touched.grad = torch.arange(6.0).view(2, 3)
    processes.sum_gradients([touched, untouched])
    (flat,) = sent
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert touched.grad.tolist() == [[0, 2, 4], [6, 8, 10]] and not untouched.grad.any()
