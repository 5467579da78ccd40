"""A script or module run in this process as `python` runs it.

Input: a Python command line without the interpreter. Output: the exit code.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from ipujax.jax_scripts import hide_frames


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
        _execute(command)
        return 0
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:
        failure = error
    # Outside of the handler, so that an error of the hook has no context.
    hide_frames(failure)
    code = _show(failure)
    if isinstance(failure, KeyboardInterrupt):
        raise _shown(KeyboardInterrupt()) from None
    return code


def _execute(command: Sequence[str]) -> None:
    """Run a module, a folder or an archive with a `__main__.py`, or a file, as Python does with this command line."""
    name = command[0]
    if name == "-m":
        sys.argv = ["-m", *command[2:]]
        sys.path.insert(0, str(Path.cwd()))
        _run_as_main(command[1], alter_argv=True)
        return
    sys.argv = [*command]
    if not Path(name).is_file() or zipfile.is_zipfile(name):
        sys.path.insert(0, str(Path(name).absolute()))
        _run_as_main("__main__", alter_argv=False)
        return
    sys.path.insert(0, str(Path(name).resolve().parent))
    _run_file(str(Path(name).absolute()))


def _run_as_main(module: str, alter_argv: bool) -> None:
    # Python's own way, with its frames and its words; the public functions of `runpy` have others.
    sys.modules["__main__"] = ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = builtins
    runpy._run_module_as_main(module, alter_argv=alter_argv)  # type: ignore[attr-defined]


def _show(error: BaseException) -> int:
    """Show an exception as Python does, by the script's hook, and return the exit code."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as failure:
        failed = failure
    hide_frames(failed)
    print("Error in sys.excepthook:", file=sys.stderr)
    sys.__excepthook__(type(failed), failed, failed.__traceback__)
    print("\nOriginal exception was:", file=sys.stderr)
    sys.__excepthook__(type(error), error, error.__traceback__)
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
    exec(_code_of(path), module.__dict__)


def _code_of(path: str) -> CodeType:
    """Return the code of a file with a source, or with what Python has compiled from one."""
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
    if code is not None:
        return code
    with io.open_code(path) as file:
        source = file.read()
    try:
        return compile(source, path, "exec")
    except SyntaxError:
        if _is_text(source):
            raise
    # Python has words of its own for files that are no text, and runs nothing of them.
    raise SystemExit(subprocess.run([sys.executable, path], check=False).returncode)


def _is_text(source: bytes) -> bool:
    try:
        return "\0" not in importlib.util.decode_source(source)
    except (SyntaxError, UnicodeDecodeError):
        return False


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
