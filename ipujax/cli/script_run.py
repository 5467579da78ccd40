"""A script or module run in this process as `python` runs it.

Input: a Python command line without the interpreter. Output: the exit code.

JAX reads variables of the environment when it is imported, and a script may set them before. The command has imported
JAX already, so their values are given to `jax.config` when the script imports JAX first; the names of variables that
came too late, as under `python` too, or that have no setting, are shown.
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
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import jax

from ipujax.jax_scripts import hide_frames

_TRUE = frozenset(("y", "yes", "t", "true", "on", "1"))  # as JAX reads them
_FALSE = frozenset(("n", "no", "f", "false", "off", "0"))


@contextmanager
def applied_environment() -> Iterator[set[str]]:
    """Apply variables that code sets before its first import of JAX; yield the names of those without effect."""
    before = _variables()
    old_settings: dict[str, Any] = {}
    without_effect: set[str] = set()

    def apply() -> None:
        for variable in sorted(dict(_variables() ^ before)):
            setting = variable.lower()
            old = getattr(jax.config, setting, None)
            if _apply(variable, setting):
                old_settings[setting] = old
            else:
                without_effect.add(variable)
        before.clear()
        before.update(_variables())

    hidden = _HiddenJax(apply)
    try:
        yield without_effect
    finally:
        hidden.restore()
        without_effect.update(dict(_variables() ^ before))
        for setting, value in old_settings.items():
            jax.config.update(setting, value)


class _HiddenJax(MetaPathFinder, Loader):
    """Modules of JAX as if they were not imported, until code imports one of them.

    A replaced `__import__` would see that too, but stand in the traceback of every import that fails.

    Args:
        at_import: called once, when JAX is imported.
    """

    def __init__(self, at_import: Callable[[], None]) -> None:
        self._at_import = at_import
        self._spec = jax.__spec__
        self._modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "jax"}
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def restore(self) -> None:
        """Make the modules visible again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.update(self._modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Restore JAX where it is imported: each import of a part of it begins with the package."""
        if name != "jax":
            return None
        self.restore()
        del sys.modules[name]  # else Python would take its own specification, and import JAX once more
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return JAX as it is."""
        return jax

    def exec_module(self, module: ModuleType) -> None:
        """Restore the specification, which Python has replaced, and apply the environment."""
        module.__spec__ = self._spec
        self._at_import()


def _variables() -> set[tuple[str, str]]:
    return {(name, value) for name, value in os.environ.items() if name.startswith("JAX_")}


def _apply(variable: str, setting: str) -> bool:
    """Give the value of a variable to a setting of JAX; return whether JAX has such a setting and value."""
    text = os.environ.get(variable)
    if text is None or not hasattr(jax.config, setting):
        return False
    current = getattr(jax.config, setting)
    value: Any = text
    if isinstance(current, bool):
        if text.lower() not in _TRUE | _FALSE:
            return False
        value = text.lower() in _TRUE
    elif isinstance(current, int):
        if not text.lstrip("-").isdecimal():
            return False
        value = int(text)
    jax.config.update(setting, value)
    return True


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
