"""Damage to the data of a saved profile, by a fixed seed, and all that is done with a profile.

A place is a way through objects and lists; places that differ in numbers of elements alone are of one kind, so that
the thousand rows of a list do not drown the fields that are there once.
"""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator

import ipujax as ipu
from ipujax.cli import main
from ipujax.runtime.errors import IpuError
from tests import sealed_parts

MARKUP = "</script><b onclick='x()'>&\n\u2028 %s {} \\ \0"
DELETED = object()


def places(data, path=()) -> Iterator[tuple]:
    """All places of data, the root left out."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def by_kind(data) -> dict[tuple, list[tuple]]:
    """Places by kind."""
    actual = defaultdict(list)
    for path in places(data):
        kind = tuple("[]" if isinstance(key, int) else key for key in path)
        actual[(*kind[:-1], "*") if set(kind[-2:-1]) & {"vertex_type_cycles", "sources"} else kind].append(path)
    return dict(actual)


def at(data, path):
    for key in path:
        data = data[key]
    return data


def replacements(value, number: random.Random, other) -> dict[str, object]:
    """Replacements of a value, by the name of the damage; `other` is a value of another place."""
    changes = {"deleted": DELETED, "null": None, "NaN": float("nan"), "infinite": float("inf"), "empty list": []}
    changes |= {"another place": copy.deepcopy(other), "true": True, "object": {}, "text": "x", "markup": MARKUP}
    changes |= {"surrogate": "\ud800", "negative": -1, "huge": 1 << 62, "long": 10**4000, "large": 10**308, "one": 1}
    changes |= {"tiny": 1e-300, "huge float": 1e300, "half": 0.5, "zero": 0, "64 bits": 1 << 64, "53 bits": 1 << 53}
    if isinstance(value, list) and value:
        changes |= {"shortened": value[:-1], "longer": [*value, value[-1]], "reversed": value[::-1]}
        changes |= {"mixed": number.sample(value, len(value)), "in a list": [value], "deep": nested(value, 2_000)}
    if isinstance(value, dict):
        changes |= {
            "no fields": {},
            "another field": {**value, "other": 1},
            "in a list": [value],
            "values": [*value.values()],
        }
    if type(value) is int:
        changes |= {
            "more": value + 1,
            "less": value - 1,
            "text of it": str(value),
            "float": float(value),
            "twice": 2 * value,
        }
    return changes


def nested(value, depth: int):
    for _ in range(depth):
        value = [value]
    return value


def damaged(data, seed: int) -> tuple[str, object]:
    """The name of some damage, and data that have it."""
    number = random.Random(seed)
    data = copy.deepcopy(data)
    kinds = by_kind(data)
    path = number.choice(kinds[number.choice(sorted(kinds, key=str))])
    beside = [key for key in (at(data, path[:-1]) if isinstance(at(data, path[:-1]), dict) else {}) if key != path[-1]]
    other = at(data, (*path[:-1], number.choice(beside)) if beside else number.choice(number.choice([*kinds.values()])))
    changes = replacements(at(data, path), number, other)
    name = number.choice(sorted(changes))
    holder = at(data, path[:-1])
    if changes[name] is DELETED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = changes[name]
    return f"{'.'.join(map(str, path))}: {name}", data


def read(path):
    """Data of a saved profile."""
    return sealed_parts.data(sealed_parts.taken_apart(path)[1]["profile"])


def write(path, data, like) -> None:
    """Saves data with the head of another profile, and their checksum."""
    head, _ = sealed_parts.taken_apart(like)
    path.write_bytes(sealed_parts.put_together(head, {"profile": sealed_parts.section(data)}))


def views(path, folder, original) -> dict[str, object]:
    """All that is done with a profile, by name; each a function."""
    profile = ipu.Profile.load(path)
    everything = dict.fromkeys(
        (
            "show_execution_steps",
            "show_var_storage",
            "show_optimizations",
            "show_per_ipu_memory_usage",
            "show_memory_breakdown",
        ),
        True,
    )
    return {
        "summary": lambda: profile.summary(operations=100, colours=True, **everything),
        "library": lambda: profile.summary(lines="library"),
        "to_html": lambda: profile.to_html(folder / "page.html"),
        "notebook": lambda: (profile._repr_html_(), repr(profile), profile.brief),
        "to_perfetto": lambda: profile.to_perfetto(folder / "trace.json"),
        "to_json": lambda: profile.to_json(folder / "profile.json"),
        "to_cbor": lambda: profile.to_cbor(folder / "profile.cbor"),
        "graph": lambda: (profile.graph(), profile.execution()),
        "save": lambda: profile.save(folder / "again.profile"),
        "compare": lambda: ipu.compare(profile, original).to_html(folder / "compared.html"),
        "compared": lambda: str(ipu.compare(original, profile)),
        "memory": lambda: (
            profile.memory.largest,
            profile.memory.breakdown.by("role", "line"),
            profile.memory.contents,
            profile.memory.lacking(),
            profile.region_bytes,
        ),
        "report": lambda: cli("report", str(path)),
        "report --html": lambda: cli("report", str(path), "--perfetto", str(folder / "t.json"), "--summary"),
    }


def cli(*arguments: str) -> None:
    """Runs the command."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as told:
        if main(list(arguments)):
            raise IpuError(told.getvalue())


def failures(path, folder, original, known: set[str]) -> tuple[bool, list[str]]:
    """True if a file loads, and the failures after it: all but typed errors of loading, and of `known` views."""
    try:
        asked = views(path, folder, original)
    except IpuError as error:
        is_clear = str(path) in error.what and re.search(": its field |: it is (no |not valid )?JSON", error.what)
        return False, [] if is_clear else [f"load: {error}"]
    except Exception as error:  # which is what is looked for
        return False, [f"load: {type(error).__name__}: {error}"]
    actual = []
    for name, ask in asked.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                ask()
        except Exception as error:  # which is what is looked for
            if not (isinstance(error, IpuError) and name in known):
                actual.append(f"{name}: {type(error).__name__}: {error}")
    return True, actual
