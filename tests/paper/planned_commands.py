"""Reading the commands that a plan prints."""

import importlib
import shlex


def parse_command(line):
    """(script or module, its parsed arguments) of a line that --list prints."""
    python, *words = shlex.split(line.replace("TOKENS", "1000"))
    assert python == "python"
    if words[0] == "-m":
        return words[1], importlib.import_module(f"{words[1]}.__main__").parse_args(
            words[2:]
        )
    name = words[0].removesuffix(".py")
    return name, importlib.import_module(name).parse_args(words[1:])
