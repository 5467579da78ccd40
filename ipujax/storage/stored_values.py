"""Plans and costs in the directory of a cache, for every program that needs them.

Input: the key of a value, and a function that computes it. Output: the value. A program of which a part was compiled
before, in this process or another, takes plans and costs of that part from there; two programs need not be equal.
A stored value equals the computed one: its key is a digest of all that it depends on, and of the compiler's state.
Limits: values whose key has no digest, or whose type has no form as data, are computed. Files are written when the
compilation ends or fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from ipujax.lowering.digests import NoDigestError, value_digests
from ipujax.runtime.cache import values_stored_in
from ipujax.runtime.logs import Log
from ipujax.storage.cache_directory import PLAN, CacheDirectory, requested_directory
from ipujax.storage.sealed import Head
from ipujax.storage.value_data import NoDataError, value_data, value_of_data
from ipujax.storage.versions import compiler_state

Value = TypeVar("Value")

_DATA, _ARRAYS = "data", "arrays"
_LOG = Log("cache")


class StoredValues:
    """Values of one compilation in the directory of a cache.

    Args:
        directory: the directory.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self._digests = value_digests(compiler_state())
        self._computed: list[tuple[Head, Mapping[str, bytes]]] = []

    def recall(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, from `compute` if it is not in the directory."""
        try:
            digest = self._digests.of(key)
        except NoDigestError as error:
            _LOG.debug("a plan is not stored: %s", error)
            return compute()
        stored = self._directory.read(digest, PLAN)
        if stored is not None:
            sections = stored[1]
            try:
                value: Value = value_of_data(json.loads(sections[_DATA]), sections[_ARRAYS])
            except (ValueError, KeyError) as error:  # no JSON, no value, or another section
                self._directory.discard(digest, PLAN, str(error))
            else:
                return value
        value = compute()
        self._add(digest, value)
        return value

    def _add(self, digest: str, value: Any) -> None:
        try:
            data, arrays = value_data(value)
        except NoDataError as error:
            _LOG.debug("a plan is not stored, it has a value of type %s", error)
            return
        self._computed.append((Head(PLAN, digest), {_DATA: json.dumps(data).encode(), _ARRAYS: arrays}))

    def write(self) -> None:
        """Write the values that were computed."""
        if self._computed:
            self._directory.write(*self._computed)


@contextmanager
def storing_values(cache_dir: str | None) -> Iterator[None]:
    """Take plans and costs that are computed inside the `with` from the directory of a cache, and store new ones.

    Args:
        cache_dir: see `requested_directory`.
    """
    directory = requested_directory(cache_dir)
    if directory is None:
        yield
        return
    try:
        values = StoredValues(directory)
    except NoDigestError as error:
        _LOG.info("plans are not stored: %s", error)
        yield
        return
    try:
        with values_stored_in(values):
            yield
    finally:  # also of a program that does not fit, of which the next one may have parts
        values.write()
