"""Calls of functions, shared by all `ipu.jit` functions of one Python function with equal settings.

Programs are looked up as by `jax.jit`: `ipu.jit(f)(x)` in a loop compiles once. Functions are compared by equality, so
closures that are made anew are new functions; references to them are weak, so a function that dies frees its programs.
Functions and settings without a hash share nothing.

Input: a function and settings. Output: the calls of both.
Limits: of each function the programs of the last `MOST_SETTINGS` settings are kept, apart from those of functions of
`ipu.jit` that are alive. After names of ipujax were replaced all programs are new. The names are compared before each
lowering, and after it where a function is found again, but in a loop that only finds functions at most a twentieth of
its time.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Hashable
from threading import RLock
from weakref import WeakKeyDictionary, ref

from ipujax.functions.function_calls import FunctionCalls
from ipujax.functions.function_compiler import FunctionCompiler
from ipujax.functions.function_settings import FunctionSettings
from ipujax.functions.user_function import Function, UserFunction
from ipujax.lowering.dumps import ENVIRONMENT
from ipujax.runtime.cache import clear_with_caches, set_basis
from ipujax.runtime.names_at_import import replaced_values
from ipujax.storage import CACHE_BYTES, CACHE_DIR

MOST_SETTINGS = 8  # a study of one function on many devices must not keep all of its programs
_LOOPS_A_LOOK = 20  # seconds between two looks at the names, by those of a look: 2 ms; `jax.jit(f)(x)` takes 0.05 ms
_ENVIRONMENT = (CACHE_DIR, CACHE_BYTES, *ENVIRONMENT)  # variables that compilations read


class SharedCalls:
    """Calls by function and settings."""

    def __init__(self) -> None:
        self._by_function: WeakKeyDictionary[Function, OrderedDict[Hashable, FunctionCalls]] = WeakKeyDictionary()
        self._next_look_seconds = 0.0
        self._lock = RLock()  # comparing functions may run code of the user, which may come here

    def find(self, fun: Function, settings: FunctionSettings) -> tuple[FunctionCalls, Function]:
        """Return the calls of a function, and the equal function that they refer to, to be kept with them."""
        key = settings.key, tuple(map(os.environ.get, _ENVIRONMENT))
        if not _can_be_found(fun, key):
            return _new_calls(fun, settings), fun
        with self._lock:
            if fun in self._by_function:  # names are compared before a new one is lowered
                self._drop_programs_of_replaced_names()
            by_settings = self._by_function.setdefault(fun, OrderedDict())
            calls = by_settings.get(key)
            function = None if calls is None else calls.compiler.user.reference()
            if calls is None or function is None:
                calls = by_settings[key] = _new_calls(fun, settings)
                function = fun
                self._next_look_seconds = 0.0  # names may be replaced after it has lowered
            by_settings.move_to_end(key)
            while len(by_settings) > MOST_SETTINGS:
                by_settings.popitem(last=False)
            return calls, function

    def clear(self) -> None:
        """Drop all calls but those that functions of `ipu.jit` hold."""
        with self._lock:
            self._by_function.clear()

    def drop_programs(self) -> None:
        """Drop the calls that have programs, but not those of which the first is being lowered."""
        with self._lock:
            for by_settings in self._by_function.values():
                for key in [key for key, calls in by_settings.items() if calls.compiler.has_lowered]:
                    del by_settings[key]

    def _drop_programs_of_replaced_names(self) -> None:
        start_seconds = time.monotonic()
        if start_seconds >= self._next_look_seconds:
            set_basis(replaced_values())
            self._next_look_seconds = start_seconds + _LOOPS_A_LOOK * (time.monotonic() - start_seconds)


def _new_calls(fun: Function, settings: FunctionSettings) -> FunctionCalls:
    return FunctionCalls(FunctionCompiler(UserFunction.of(fun, settings)))


def _can_be_found(fun: Function, key: Hashable) -> bool:
    try:
        hash((ref(fun), key))
    except TypeError:  # no hash, or no weak references
        return False
    return True


SHARED_CALLS = SharedCalls()
clear_with_caches(SHARED_CALLS.drop_programs)
