"""The end of a command: bad input and a failing disk become one line and an exit code."""

import errno
import itertools
import os
import re
import shlex
import signal
import sys
from pathlib import Path

from runtime.processes import ProcessLost, first_to_fail, rank, world_size
from utils import UserError, first_line

# ruff: isort: split
import torch
import torch.distributed as dist
from tqdm import tqdm

ADVICE = {  # an operating system's error that a person can mend -> what to do
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "choose a folder you may write to"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
                    "choose another path"),
}


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception: what is half-written is cleared away on the way out."""


def run(main, resumes=False):
    """Call `main()`; bad input, a failing disk or no memory is one line and exit code 2.

    Ctrl-C and SIGTERM end with one line and the exit codes 130 and 143; with `resumes` the line
    holds the command that continues the run. Of several processes the first that fails prints. One
    whose partner is gone ends with exit code 1 and one line. A closed pipe (`| head`) ends quietly.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, the caller closed it
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that a row has
    before = None
    if os.environ.get("WORLD_SIZE", "1") == "1":  # torchrun's processes have a handler of their own
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        home = os.path.expanduser("~")  # a shell leaves it alone between quotes and behind a =
        sys.argv[1:] = [re.sub(r"^(--[\w-]+=)?~(?=/|$)", rf"\g<1>{home}", w) for w in sys.argv[1:]]
        for flag, word in itertools.pairwise(sys.argv):
            if not word.strip() or re.fullmatch(r"--[\w-]+=\s*", word):
                raise UserError(f"{word.strip() or flag}: its value is empty, as a shell variable "
                                "that is not set leaves it; give one or leave the flag out")
        main()
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        _interrupted(error, resumes)
    except UserError as error:
        sys.exit(_print_error(str(error)))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at the end
        sys.exit(0)
    except OSError as error:
        advice = ADVICE.get(error.errno)
        if error.errno == errno.ENOENT and error.filename and not Path(
                error.filename).absolute().parent.exists():
            advice = "its folder has disappeared, choose another"
        if advice is None:  # such as a file of ours that is missing: not the user's doing
            sys.stderr = sys.__stderr__
            raise
        name = error.filename or "a file of --out, --cache-dir or the temporary folder"
        sys.exit(_print_error(f"{name}: {error.strerror}; {advice}, then run the same command again"
                              + " with --resume" * resumes))
    except (Exception, ProcessLost) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # of Python 3.11, in __set_name__
            _interrupted(error.__cause__, resumes)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
                "can't allocate memory" in str(error)):  # of the CPU: a plain RuntimeError
            sys.exit(_print_error(f"out of memory ({first_line(error)}): a smaller --micro-batch "
                                  "or --max-length, --gradient-checkpointing, or --four-bit"))
        if world_size() > 1:
            _end_without_partner(error)
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
    if world_size() > 1:
        dist.destroy_process_group()


def _terminate(*_):
    raise Terminated


def _interrupted(error, resumes):
    """One line, and the exit code of a signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would cut the line off
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = ["torchrun", "--nproc-per-node", count] if world_size() > 1 else ["python"]
    command = shlex.join([*launcher, *sys.argv, *["--resume"] * ("--resume" not in sys.argv)])
    _print_error("interrupted" + (f"; continue with: {command}" if resumes else ""))
    sys.stdout.flush()
    os._exit(143 if isinstance(error, Terminated) else 130)  # waits for no thread


def _end_without_partner(error):
    """Exit code 1 and one line when another process is the cause; else returns."""
    sys.stderr = sys.__stderr__  # a traceback is shown, whichever process it comes from
    # gloo's errors are plain RuntimeErrors.
    if not isinstance(error, (ProcessLost, dist.DistError)) and not (
            isinstance(error, RuntimeError) and "gloo" in str(error)):
        return
    _print_error("another process of this run has stopped or cannot be reached; start all of them "
                 "again with --resume")
    sys.stdout.flush()
    os._exit(1)  # the usual end would wait for the partner


def _print_error(message):
    """The line on stderr; always 2, the exit code."""
    if world_size() > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, from here to the end
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()  # the message gets a line of its own
    if first_to_fail():
        # The first process's bar may stand in the way of another's line.
        print(("\n" if rank() else "") + "error: " + " ".join(message.split()), flush=True,
              file=sys.__stderr__ if rank() else sys.stderr)
    return 2
