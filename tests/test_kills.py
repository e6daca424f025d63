"""Killed at random instants, set-up and end included, both scripts go on bit for bit."""

import json
import random
import signal
import time

import pytest
from conftest import flags, listing, make_rows, write_rows
from forking import Forks
from test_resume import fingerprint

COMMON = {"batch": 4, "micro_batch": 2, "lr": 1e-2, "save_every": 3, "epochs": 4}
SCRIPTS = {
    "train_offline": COMMON | {"omega_lr": 5, "correction": 0.5, "schedule": "cosine"},
    "train_online": COMMON | {"omega_lr": 10, "correction": 0, "k_gen": 4, "num_answers": 2,
                              "mask": "dynamic", "ratio_masked": 0.4, "max_new_tokens": 6,
                              "save_every": 5},
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    made = Forks(tmp_path_factory.mktemp("forks") / "log")
    yield made
    made.end()


def killed_often(forks, script, folder, model, kills, seed):
    """Runs of `script`, each killed and resumed until done, `kills` kills in all; asserts."""
    rows = {"lower": (14, 1), "upper": (7, 2), "upper_heldout": (4, 3)}
    options = SCRIPTS[script] | {"model": model} | {
        name: write_rows(folder / f"{name}.jsonl", make_rows(*made)) for name, made in rows.items()}

    def words(number, *more):  # every run tokenises anew: kills may fall into the cache's making
        return [*flags(**options, out=folder / f"run {number}",
                       cache_dir=folder / f"cache {number}"), *more]

    begun = time.perf_counter()
    assert forks.run(script, words("whole")) == 0, forks.log.read_text()
    whole, seconds = fingerprint(folder / "run whole"), forks.seconds
    rng, done, number, instants = random.Random(seed), 0, 0, []
    while done < kills:
        number, more = number + 1, []
        while True:
            forks.start(script, words(number, *more))
            instant = rng.uniform(0, seconds) if done < kills else 1e9
            code = forks.killed_after(instant) if done < kills else forks.wait()
            if code == 0:
                break
            assert code == -signal.SIGKILL, (seed, instants, forks.log.read_text())
            done, more = done + 1, ["--resume"]
            instants.append(round(instant / seconds, 2))
        run = folder / f"run {number}"
        found = fingerprint(run)
        assert found.keys() == whole.keys(), (seed, instants)
        assert [name for name in found if found[name] != whole[name]] == [], (seed, instants)
        assert not [name for name in listing(run) if "partial" in name], (seed, instants)
    steps = len(json.loads(whole["metrics.jsonl"]))
    print(f"\n{script}: {done} kills in {number} runs of {steps} steps ({seconds:.1f} s left "
          f"alone), at {min(instants):.0%} to {max(instants):.0%} of it, "
          f"seed {seed}: all equal bit for bit; {time.perf_counter() - begun:.0f} s")


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_three_times(forks, script, folders, tmp_path):
    killed_often(forks, script, tmp_path, folders["llama"], kills=3, seed=time.time_ns() % 10**6)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_fifty_times(forks, script, folders, tmp_path):
    killed_often(forks, script, tmp_path, folders["llama"], kills=50, seed=0)
