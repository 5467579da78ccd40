"""PopART's names for programs that are not edited: `import popart`, and libraries of C++ operators.

    serve_names({"custom_ops.so": Path("operators.py")})
    import popart, gcprofile, horovod.popart   # those of this package, as modules of the names that programs have

A program with operators in C++ builds a library and loads it, `ctypes.cdll.LoadLibrary("build/custom_ops.so")`. Here
operators are JAX functions, so the name of the library stands for a Python file that registers them
(`ipujax.onnx.register`): the file runs when the program loads the library, which need not exist.

Input: Python files by file name of the library. Output: none; the import system and `ctypes` of this process change.
Source: `ctypes`, and the examples of github:graphcore/examples, which load libraries so.
Limits: functions of a library cannot be called.
"""

from __future__ import annotations

import ctypes
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ipujax.popart.exceptions import popart_attribute_error, popart_exception

# Module that programs import → the one of this package. Modules inside of it follow.
MODULES: Mapping[str, str] = {
    "popart": "ipujax.popart",
    "gcprofile": "ipujax.popart.gcprofile",
    "horovod.popart": "ipujax.popart.horovod",
}
_COMMAND = "python -m ipujax.popart --library NAME=FILE.py SCRIPT"


class popart_library_error(popart_exception, OSError):
    """A library of operators that cannot be loaded."""


class _Alias(Loader):
    """Loads a module of this package under another name: the same object, whatever imported it first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which the import has replaced: the module stays that of this package


class _Finder(MetaPathFinder):
    """Finds the modules of `MODULES`, and those inside of them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        for name, ours in MODULES.items():
            # Not by prefix alone: `popart_extras` is another package.
            if fullname == name or fullname.startswith(f"{name}."):
                module = ours + fullname.removeprefix(name)
                return ModuleSpec(fullname, _Alias(module)) if find_spec(module) else None
        return None


def serve_names(libraries: Mapping[str, Path] | None = None) -> None:
    """Let programs import PopART by its own name, and load libraries of operators that are written in Python.

    Args:
        libraries: Python file that registers the operators, by file name of the library.

    Raises:
        popart_exception: a file that does not exist.
    """
    for name, path in (libraries or {}).items():
        if not Path(path).is_file():
            raise popart_exception(f"no operators for the library {name!r}", expected="a Python file", got=str(path))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Horovod itself may be there for other frameworks; else it is a package with nothing but PopART's module.
        if find_spec("horovod") is None:
            parent = ModuleType("horovod")
            parent.__path__ = []
            sys.modules["horovod"] = parent
        sys.meta_path.insert(0, _Finder())
    library = _library_class(dict(libraries or {}))
    ctypes.CDLL = library  # type: ignore[misc]
    ctypes.cdll = ctypes.LibraryLoader(library)


_LOADED_BY_SYSTEM = ctypes.CDLL  # however often the class is replaced


def _library_class(files: Mapping[str, Path]) -> type[ctypes.CDLL]:
    """Return a class in the place of `ctypes.CDLL`, whose libraries of these names register operators."""

    class Library(_LOADED_BY_SYSTEM):
        """A library of the system, or operators in Python of the same name."""

        def __init__(self, name: Any, *arguments: Any, **keywords: Any) -> None:
            file_name = Path(str(name)).name
            self._has_functions = file_name not in files
            if not self._has_functions:
                self._name = str(name)
                # Registered when it is loaded, as a library of C++ does by its static objects.
                runpy.run_path(str(files[file_name]))
                return
            try:
                super().__init__(name, *arguments, **keywords)
            except OSError as error:
                message = f"the library cannot be loaded: {error}"
                hint = f"operators in Python in its place: {_COMMAND}"
                raise popart_library_error(message, got=str(name), hint=hint) from error

        def __getattr__(self, name: str) -> Any:
            # Python looks up special names for itself.
            if self._has_functions or name.startswith("__"):
                return super().__getattr__(name)
            message = f"{self._name} has no functions: its operators are written in Python"
            raise popart_attribute_error(message, got=name, hint="a function of the file that registers them")

    return Library
