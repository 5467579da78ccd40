"""Runs the user's script inside an instance, and reports its exit code to the launcher.

    python instance.py train.py [argument…]        python instance.py -m package.module [argument…]

The script runs as Python itself would run it. Around it: the instance ends with its launcher, prints its stack when the
launcher asks for it (SIGUSR1), and reports its exit code before any exit handler could wait for other instances.

Limits: ending at once with the launcher needs Linux; elsewhere only the guardian ends instances.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
from types import TracebackType

CONTROL_FD = "IPUJAX_CONTROL_FD"  # the number of the file through which the instance talks with its launcher
LAUNCHER_PID = "IPUJAX_LAUNCHER_PID"
EXIT_CODE = "IPUJAX_EXIT_CODE"  # of the script, for exit handlers
# The process that these variables are for: programs that the script starts inherit them.
INSTANCE_PID = "IPUJAX_INSTANCE_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Runs the script named on the command line."""
    _die_with_launcher(int(os.environ[LAUNCHER_PID]))
    faulthandler.register(signal.SIGUSR1)
    os.set_inheritable(int(os.environ[CONTROL_FD]), False)
    os.environ[INSTANCE_PID] = str(os.getpid())
    code = 1
    try:
        _run(sys.argv[1:])
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        raise
    except BaseException as error:
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        error = error.with_traceback(_of_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(code) from None
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed by the script, or nobody reads it any more
                stream.flush()
        with contextlib.suppress(OSError):  # the launcher is gone: so is this process soon
            os.environ[EXIT_CODE] = str(code & 0xFF)
            os.write(int(os.environ[CONTROL_FD]), json.dumps({"ended": code & 0xFF}).encode() + b"\n")


def _run(arguments: list[str]) -> None:
    """Runs a script or, after `-m`, a module as `__main__`."""
    is_module = arguments[0] == "-m"
    sys.argv[:] = arguments[is_module:]
    if not sys.flags.safe_path:  # otherwise the first is not that of the script
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(arguments[0]))
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def _of_script(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without what runs the script; in full if it failed before its first line."""
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        inner = inner.tb_next
    return inner or traceback


def _die_with_launcher(launcher: int) -> None:
    """Asks the kernel to kill this process when its launcher dies; exits if that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    main()
