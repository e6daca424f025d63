"""Bases and runs side by side."""

import shutil

import eval as front
from evaluation.answers import base_columns, side_by_side


def test_answers_side_by_side(files, train, online, tmp_path, capfd, refused):
    paths = files()
    first, second = train(paths, epochs=1, lr=0.3), online(paths, out="online", epochs=1)
    capfd.readouterr()
    front.main(["answers", str(first.out), str(second.out), "--prompt", "red | blue",
                     "--prompt", "green", "--max-new-tokens", "5"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "| prompt | base | run | online |" and len(lines) == 4
    assert lines[2].startswith("| red \\| blue |")
    for words, what in (([], "--prompt"), (["--prompt", " "], "not empty"),
                        (["--prompt", "x", "--max-new-tokens", "0"], "must be 1 or more")):
        assert what in refused(lambda w=words: front.main(["answers", str(first.out), *w]))

    named_base = shutil.copytree(second.out, tmp_path / "base")  # neither loses a column
    namesake = shutil.copytree(second.out, tmp_path / "other" / "run")
    front.main(["answers", str(first.out), str(namesake), str(named_base), "--prompt", "red",
                     "--max-new-tokens", "2", "--out", str(tmp_path / "new" / "answers.md")])
    header = (tmp_path / "new" / "answers.md").read_text().splitlines()[0]
    assert header == f"| prompt | base | run | {namesake} | {named_base} |"


def test_every_base_model_has_its_own_column(files, train, tmp_path, capfd):
    """One column for each base, before the first run that began with it."""
    paths = files()
    made = [train(paths, out=f"{model}-{seed}", model=model, epochs=1, seed=seed, lr=0.3)
            for model, seed in (("llama", 0), ("neox", 0), ("llama", 1))]
    capfd.readouterr()
    front.main(["answers", *(str(run.out) for run in made), "--prompt", "red blue",
                "--max-new-tokens", "6"])
    header, _, answers = capfd.readouterr().out.splitlines()
    assert header == "| prompt | base llama | llama-0 | base neox | neox-0 | llama-1 |"
    both = [side_by_side([str(run.out)], ["red blue"], 6, "cpu").splitlines()[2].split(" | ")[1]
            for run in made[:2]]
    assert [answers.split(" | ")[i] for i in (1, 3)] == both and both[0] != both[1]
    assert base_columns(["/a/x", None, "/b/x", "y", "/a/x"]) == {
        "/a/x": "base /a/x", "/b/x": "base /b/x", "y": "base y"}
