"""A script or module run in this process as `python` runs it.

Input: a Python command line without the interpreter. Output: the exit code.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ipujax.jax_scripts import PROFILED_FILES

_HIDDEN = (__file__, runpy.__file__, "<frozen runpy>", *PROFILED_FILES)


def run_script(command: Sequence[str], at_immediate_exit: Callable[[], None] = lambda: None) -> int:
    """Run a script, then wait for its threads, as `python` does, and return its exit code.

    Args:
        command: a Python command line without the interpreter.
        at_immediate_exit: called if the script ends by `os._exit`, which nothing else of this process survives.

    Raises:
        KeyboardInterrupt: an interrupt ended the script, which is shown already; unhandled, it ends the process by the
            signal, as that of `python`.
    """
    with _restored(), _seeing_immediate_exit(at_immediate_exit):
        try:
            return _run(command)
        finally:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()


def _run(command: Sequence[str]) -> int:
    try:
        if command[0] == "-m":
            sys.argv = [*command[1:]]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
            return 0
        sys.argv = [*command]
        if not Path(command[0]).is_file():
            runpy.run_path(command[0], run_name="__main__")  # a folder with a __main__.py, which it adds to the path
            return 0
        path = Path(command[0]).resolve()
        sys.path.insert(0, str(path.parent))
        _run_file(str(Path(command[0]).absolute()))
        return 0
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:  # of the script: shown as Python shows it
        _remove_own_frames(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            raise _shown(KeyboardInterrupt()) from None
        return 1


def _shown(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """Return an interrupt that Python does not show when it ends the process."""
    show = sys.excepthook

    def show_others(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if error is not interrupt:
            show(kind, error, traceback)

    sys.excepthook = show_others
    return interrupt


def _run_file(path: str) -> None:
    # Not `runpy.run_path`: it would replace `sys.argv[0]` by the path, and copy the globals of the module at the end.
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module  # for pickles, and for processes that import the script again
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


@contextmanager
def _seeing_immediate_exit(at_exit: Callable[[], None]) -> Iterator[None]:
    """Call a function where this process, and no child of it, calls `os._exit`."""
    original = os._exit
    process = os.getpid()

    @functools.wraps(original)
    def immediate_exit(status: int) -> NoReturn:
        os._exit = original
        if os.getpid() == process:
            at_exit()
        original(status)

    os._exit = immediate_exit
    try:
        yield
    finally:
        os._exit = original


@contextmanager
def _restored() -> Iterator[None]:
    """Restore the arguments, the path and the main module of the process."""
    arguments = sys.argv
    path = sys.path
    main = sys.modules["__main__"]
    sys.path = [*path]
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path = path
        sys.modules["__main__"] = main


def _exit_code(status: object) -> int:
    """Return the exit code of `sys.exit(status)`, which prints a status that is not a number."""
    if status is None or isinstance(status, int):
        return status or 0
    print(status, file=sys.stderr)
    return 1


def _remove_own_frames(error: BaseException) -> None:
    """Remove the frames of this file and of profiled functions from the traceback of an exception and of its causes."""
    chained: BaseException | None = error
    seen: set[int] = set()
    while chained is not None and id(chained) not in seen:
        seen.add(id(chained))
        chained.__traceback__ = _filtered(chained.__traceback__)
        chained = chained.__cause__ or chained.__context__


def _filtered(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest = _filtered(traceback.tb_next)
    if traceback.tb_frame.f_code.co_filename in _HIDDEN:
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)
