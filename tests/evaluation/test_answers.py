"""Bases and runs side by side."""

import shutil

import eval_front as front


def test_answers_side_by_side(files, train, online, tmp_path, capfd, refused):
    paths = files()
    first, second = train(paths, epochs=1, lr=0.3), online(paths, out="online", epochs=1)
    capfd.readouterr()
    front.main(["answers", str(first.out), str(second.out), "--prompt", "red | blue",
                     "--prompt", "green", "--max-new-tokens", "5"])
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "| prompt | base | run | online |" and len(lines) == 4
    assert lines[2].startswith("| red \\| blue |")
    assert "--prompt" in refused(lambda: front.main(["answers", str(first.out)]))

    named_base = shutil.copytree(second.out, tmp_path / "base")  # neither loses a column
    namesake = shutil.copytree(second.out, tmp_path / "other" / "run")
    front.main(["answers", str(first.out), str(namesake), str(named_base), "--prompt", "red",
                     "--max-new-tokens", "2", "--out", str(tmp_path / "new" / "answers.md")])
    header = (tmp_path / "new" / "answers.md").read_text().splitlines()[0]
    assert header == f"| prompt | base | run | {namesake} | {named_base} |"
