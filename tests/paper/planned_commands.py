"""Reading the commands that a plan prints."""

import importlib
import shlex
from types import SimpleNamespace

TOY_PRESET = {"model": "toy_model", "lr": 1e-3, "omega_lr": 30.0, "micro_batch": 32,
              "max_length": 128, "correction": 0.0}


def parse_command(line):
    """(script or module, its parsed arguments) of a line that --list prints."""
    python, *words = shlex.split(line.replace("TOKENS", "1000"))
    assert python == "python"
    if words[:3] == ["-m", "toy", "write"]:
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert {"--out", "--seed"} <= set(flags) <= {"--out", "--seed", "--noise", "--contrary",
                                                     "--upper"}
        assert 0 <= float(flags.get("--noise", 0.4)) <= 1
        assert 0 <= float(flags.get("--contrary", 0.5)) <= 1
        assert flags.get("--upper", "right") in ("right", "unrelated", "pairs")
        return "toy", SimpleNamespace(out=flags["--out"], seed=int(flags["--seed"]))
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
    rest = words[2:] if words[0] == "-m" else words[1:]
    return name, importlib.import_module(name).parse_args(rest)
