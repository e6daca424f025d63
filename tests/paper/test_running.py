"""Commands side by side: scripts and modules, finished ones, failing ones."""

import os
import signal
import threading
import time

import pytest

from paper import running
from utils import UserError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module `shout` that a process finds: `python -m shout FILE WORD` writes WORD."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shout").mkdir()
    (tmp_path / "shout" / "__init__.py").write_text("")
    (tmp_path / "shout" / "__main__.py").write_text(
        "import sys\nfrom pathlib import Path\n\nfile, *words = sys.argv[1:]\n"
        "if __name__ == '__main__':\n    Path(file).write_text(' '.join(words))\n"
        "    print('heard', *words)\n    sys.exit(words == ['quiet'])\n")
    return tmp_path


def test_modules_run_like_scripts_and_once(module):
    runs = {module / f"{word}.txt": f"-m shout {module / word}.txt '{word} twice'"
            for word in ("one", "two")}
    running.run_all(runs, 2)
    for word, (file, command) in zip(("one", "two"), runs.items(), strict=True):
        assert file.read_text() == f"{word} twice"
        assert file.with_suffix(".log").read_text() == f"$ {command}\nheard {word} twice\n"
        file.write_text("kept")
    running.run_all(runs, 2)
    assert all(file.read_text() == "kept" for file in runs)
    other = {file: command + " more" for file, command in runs.items()}
    with pytest.raises(UserError, match="made by another command"):
        running.run_all(other, 2)


def test_a_failing_module_is_named_with_its_last_line(module):
    with pytest.raises(UserError, match=r"-m shout .*quiet: exit code 1: heard quiet"):
        running.run_all({module / "x.txt": f"-m shout {module / 'y.txt'} quiet"}, 1)


def test_an_interrupt_ends_what_runs(module):
    """A SIGTERM of one process does not reach those that it has started."""
    (module / "wait").mkdir()
    (module / "wait" / "__main__.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n\nif __name__ == '__main__':\n"
        "    Path(sys.argv[1]).write_text(str(os.getpid()))\n    time.sleep(60)\n"
        "    Path(sys.argv[1]).write_text('')\n")
    noted = module / "started.txt"

    def interrupt():
        while not (noted.exists() and noted.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        running.run_all({module / "a.txt": f"-m wait {noted}", module / "b.txt": "-m wait b"}, 1)
    signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
    assert not (module / "b.log").exists()
