"""Compilers of functions, shared by all `ipu.jit` functions of one Python function with equal settings.

Programs are looked up as by `jax.jit`: `ipu.jit(f)(x)` in a loop compiles once. Functions are compared by equality, so
closures that are made anew are new functions; references to them are weak, so a function that dies frees its programs.
Functions and settings without a hash share nothing.

Input: a function and settings. Output: the compiler for both.
Limits: of each function the programs of the last `MOST_SETTINGS` settings are kept, apart from those of functions of
`ipu.jit` that are alive. After names of ipujax were replaced all compilers are new. The names are compared after each
lowering, but in a loop that only finds compilers at most a twentieth of its time.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary, ref

from ipujax.functions.function_compiler import FunctionCompiler
from ipujax.functions.function_settings import FunctionSettings
from ipujax.lowering.dumps import ENVIRONMENT
from ipujax.runtime.cache import clear_with_caches, set_basis
from ipujax.runtime.names_at_import import replaced_values
from ipujax.storage import CACHE_BYTES, CACHE_DIR

MOST_SETTINGS = 8  # a study of one function on many devices must not keep all of its programs
_LOOPS_A_LOOK = 20  # seconds between two looks at the names, by those of a look: 2 ms; `jax.jit(f)(x)` takes 0.05 ms
_ENVIRONMENT = (CACHE_DIR, CACHE_BYTES, *ENVIRONMENT)  # variables that compilations read

Function = Callable[..., Any]


class SharedCompilers:
    """Compilers by function and settings."""

    def __init__(self) -> None:
        self._by_function: WeakKeyDictionary[Function, OrderedDict[Hashable, FunctionCompiler]] = WeakKeyDictionary()
        self._next_look_seconds = 0.0
        self._lock = RLock()  # comparing functions may run code of the user, which may come here

    def find(self, fun: Function, settings: FunctionSettings) -> tuple[FunctionCompiler, Function]:
        """Return the compiler of a function, and the equal function that it refers to, to be kept with it."""
        key = settings.key, tuple(map(os.environ.get, _ENVIRONMENT))
        if not _can_be_found(fun, key):
            return FunctionCompiler(fun, settings), fun
        with self._lock:
            self._drop_programs_of_replaced_names()
            compilers = self._by_function.setdefault(fun, OrderedDict())
            compiler = compilers.get(key)
            function = None if compiler is None else compiler.live_function
            if compiler is None or function is None:
                compiler = compilers[key] = FunctionCompiler(fun, settings)
                function = fun
                self._next_look_seconds = 0.0  # names may be replaced after it has lowered
            compilers.move_to_end(key)
            while len(compilers) > MOST_SETTINGS:
                compilers.popitem(last=False)
            return compiler, function

    def clear(self) -> None:
        """Drop all compilers but those that functions of `ipu.jit` hold."""
        with self._lock:
            self._by_function.clear()

    def _drop_programs_of_replaced_names(self) -> None:
        start_seconds = time.monotonic()
        if start_seconds >= self._next_look_seconds:
            set_basis(replaced_values())
            self._next_look_seconds = start_seconds + _LOOPS_A_LOOK * (time.monotonic() - start_seconds)


def _can_be_found(fun: Function, key: Hashable) -> bool:
    try:
        hash((ref(fun), key))
    except TypeError:  # no hash, or no weak references
        return False
    return True


SHARED_COMPILERS = SharedCompilers()
clear_with_caches(SHARED_COMPILERS.clear)
