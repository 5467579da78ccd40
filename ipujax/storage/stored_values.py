"""Plans and costs in the directory of a cache, for every program that needs them.

Input: the key of a value, and a function that computes it. Output: the value. A program of which a part was compiled
before, in this process or another, takes plans and costs of that part from there; two programs need not be equal.
A stored value equals the computed one: its key is a digest of all that it depends on, and of the compiler's state.
What is read is of the type of the value, and possible for its key; anything else is computed.
Limits: values whose key has no digest, or whose type has no form as data, are computed. Files are written when the
compilation ends or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from ipujax.lowering.digests import NoDigestError, value_digests
from ipujax.runtime.cache import drop_values, values_stored_in
from ipujax.runtime.files import DamagedError, FileError, FileKind, Sealed, Section, compress, decompress
from ipujax.runtime.files.sealed import section_of
from ipujax.runtime.logs import Log
from ipujax.storage.cache_directory import PLAN, CacheDirectory, NewFile, requested_directory
from ipujax.storage.value_data import NoDataError, value_data, value_of_data
from ipujax.storage.versions import compiler_state

Value = TypeVar("Value")

_DATA, _ARRAYS = "data", "arrays"
_LEVEL = 1  # of compression: most arrays repeat few numbers
# The fields of a plan are those of its type, which is part of its key.
PLAN_FILE = FileKind(PLAN, {_DATA: Section("a value by its type"), _ARRAYS: Section()})
_LOG = Log("cache")


class StoredValues:
    """Values of one compilation in the directory of a cache.

    Args:
        directory: the directory.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._digests = value_digests(compiler_state())
        self._computed: list[NewFile] = []
        self._read: list[str] = []  # digests of the values that were taken from the directory

    def recall(
        self, key: Hashable, compute: Callable[[], Value], kind: Any, is_valid: Callable[[Value], bool]
    ) -> Value:
        """Return the value of a key, from `compute` if the directory has no valid one of type `kind`."""
        try:
            digest = self._digests.of(key)
        except NoDigestError as error:
            _LOG.debug("a plan is not stored: %s", error)
            return compute()
        file = self._directory.read(digest, PLAN_FILE)
        if file is not None:
            try:
                stored = _value_of(file, kind, is_valid)
                self._read.append(digest)
                return stored
            except FileError as error:
                self._directory.discard(digest, PLAN_FILE, error)
        value = compute()
        self._add(digest, value, kind)
        return value

    def _add(self, digest: str, value: Any, kind: Any) -> None:
        try:
            data, arrays = value_data(value, kind)
        except NoDataError as error:
            _LOG.debug("a plan is not stored: %s", error)
            return
        self._computed.append(
            NewFile(PLAN_FILE, digest, {_DATA: section_of(data, _LEVEL), _ARRAYS: compress(arrays, _LEVEL)})
        )

    @property
    def are_used(self) -> bool:
        """Whether values were taken from the directory."""
        return bool(self._read)

    def discard(self, problem: str) -> None:
        """Remove the values that were taken from the directory."""
        for digest in self._read:
            self._directory.discard(digest, PLAN_FILE, DamagedError(problem))

    def write(self) -> None:
        """Write the values that were computed."""
        if self._computed:
            self._directory.write(*self._computed)


def _value_of(file: Sealed, kind: Any, is_valid: Callable[[Value], bool]) -> Value:
    value: Value = value_of_data(file.data(_DATA), decompress(file.sections[_ARRAYS]), kind)
    if not is_valid(value):
        raise DamagedError("it has a value of another key")
    return value


def with_stored_values(cache_dir: str | None, compute: Callable[[], Value]) -> Value:
    """Return a result whose plans and costs are taken from the directory of a cache, and new ones stored there.

    Where stored plans lead to an error, they are computed again: a file may have the right form and other numbers.

    Args:
        cache_dir: see `requested_directory`.
        compute: computes the result.
    """
    directory = requested_directory(cache_dir)
    if directory is None:
        return compute()
    try:
        values = StoredValues(directory)
    except NoDigestError as error:
        _LOG.info("plans are not stored: %s", error)
        return compute()
    try:
        with values_stored_in(values):
            return compute()
    except Exception:
        if not values.are_used:
            raise
        drop_values()
        result = compute()  # raises the same error, if not for the plans
        values.discard("it has other numbers than the compiler computes")
        return result
    finally:  # also of a program that does not fit, of which the next one may have parts
        values.write()
