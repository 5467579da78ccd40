"""Fields of a saved target, by the annotations of its constants.

Input: none. Output: the kind of `Target.to_data`. `Target` itself checks the range of each constant.
"""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from ipujax.runtime.files.figure_kinds import Real, Row
from ipujax.runtime.files.kinds import Integer, Kind, List, Map, Record, Text
from ipujax.runtime.target.target import GlobalExchange, SyncPattern, Target

_SMALLEST = 1e-30  # of constants of a machine that are above 0: quotients by them stay finite


def _constant(kind: str, zero_ok: bool) -> Kind:
    """Return the kind of a constant of `Target` by its annotation; `Target` checks the rest itself."""
    kinds: dict[str, Kind] = {"int": Integer(0 if zero_ok else 1), "float": Real(0 if zero_ok else _SMALLEST)}
    kinds |= {"GlobalExchange": Text(get_args(GlobalExchange)), "SyncPattern": Text(get_args(SyncPattern))}
    return (kinds | {"str": Text(), "frozenset[str]": List(Text())})[kind]


TARGET = Record(
    {item.name: _constant(str(item.type), item.metadata["zero_ok"]) for item in fields(Target) if item.metadata}
    | {"sources": Map(Row((Text(), Text(), Real(_SMALLEST, 1), Real(1))))}
)
