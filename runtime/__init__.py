"""Around a run: processes, the command line's end, the run folder, its metrics, the hub.

`command.run` ends a command that Ctrl-C interrupts. Before it is called libraries are imported,
some of which turn an interrupt into an error of their own: from here on that is one line, too.
"""

import os
import signal
import sys


def _uncaught(kind, error, trace):
    """Python's hook for an error that nobody caught: one line where an interrupt is its cause."""
    chain = [error]  # which may go round in a circle
    while chain[-1] not in (None, *chain[:-1]):
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    if not any(isinstance(cause, KeyboardInterrupt) for cause in chain):
        sys.__excepthook__(kind, error, trace)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would cut the line off
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = _uncaught
