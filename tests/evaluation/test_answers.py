"""Bases and runs answer the same prompts, one below the other."""

import json
import shutil

import eval as front
from evaluation.answers import answer_prompts


def test_answer_prompts_runs_and_their_base(files, train, online, tmp_path, capfd, refused):
    paths = files()
    first = train(paths, epochs=1, lr=0.3)
    second = online(paths, out="online", epochs=1)
    (tmp_path / "p.json").write_text(json.dumps([{"instruction": "green"}]))
    capfd.readouterr()
    front.main(
        [
            "answers",
            str(first.out),
            str(second.out),
            "--prompt",
            "red\x1b[2J",
            "--prompts",
            str(tmp_path / "p.json"),
            "--max-new-tokens",
            "5",
        ]
    )
    text = capfd.readouterr().out
    assert "\x1b" not in text
    titles = [line for line in text.splitlines() if line.startswith(("=== ", "--- "))]
    columns = [f"--- base {base_of(first)}", "--- run", "--- online"]
    assert titles == ["=== red\ufffd[2J", *columns, "=== green", *columns]
    line = refused(lambda: front.main(["answers", str(first.out)]))
    assert "give --prompt TEXT or --prompts FILE" in line


def base_of(run):
    return json.loads((run.out / "config.json").read_text())["args"]["model"]


def test_every_base_and_every_run_has_its_own_column(files, train, folders, tmp_path):
    """A base stands before the first run that began with it; a namesake gets its path."""
    paths = files()
    runs = []
    for model, seed in (("llama", 0), ("neox", 0), ("llama", 1)):
        run = train(paths, out=f"{model}-{seed}", model=model, epochs=1, seed=seed, lr=0.3)
        runs.append(str(run.out))
    namesake = shutil.copytree(runs[0], tmp_path / "other" / "llama-0")
    answers = answer_prompts([*runs, str(namesake), str(folders["neox"])], ["red blue"], 6)
    llama, neox = f"base {folders['llama']}", f"base {folders['neox']}"
    assert list(answers) == [
        llama,
        "llama-0",
        neox,
        "neox-0",
        "llama-1",
        str(namesake),
        str(folders["neox"]),
    ]
    assert answers["llama-0"] == answers[str(namesake)] != answers[llama]
    assert answers[neox] == answers[str(folders["neox"])] != answers[llama]
