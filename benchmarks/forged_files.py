"""Forged files with right checksums through each door by which files come in: no untyped error, nothing executed.

    python benchmarks/forged_files.py [--count 1000] [--seed 0] [--door profile …]

Doors: `Profile.load`; `ipu.load` with its `.profile` and a call; an entry of the cache; a plan file of the cache. Each
file is that of a small program with one change: a value of the JSON of any field replaced, dropped, added, nested or
made huge, fields twice, other sizes, other kinds and versions, sections that decompress to very much, StableHLO with
other characters or words, compressed bytes changed. Sizes and the checksum are made right afterwards.

Files go through the doors in child processes. A case fails if it raises another error than an `IpuError` (of the cache:
any error, or other numbers than before), ends its process, starts a process or imports a module, takes more than 200 MB
beyond what it had, or more than a minute. Prints a row for each door, and the failures by their seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.runtime.errors import IpuError

MAX_MORE_BYTES = 200 << 20
MAX_SECONDS = 60
EXECUTING = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "subprocess.Popen", "pty.spawn")
MARKER = "forged_marker_module"  # a module that is there to be imported, and must not be
DELETED = object()
BATCH = 100  # cases of a child process


class State(NamedTuple):
    """Arguments of the program: pytrees of files have named tuples."""

    scale: jax.Array
    weights: dict[str, list[jax.Array]]


ARGS = (State(jnp.float32(2), {"w": [jnp.eye(8), jnp.ones(8)]}), jnp.arange(32.0).reshape(4, 8))


def step(state: State, x: jax.Array) -> tuple[State, jax.Array]:
    w, b = state.weights["w"]
    y = jnp.tanh(x @ w + b)
    z = jax.lax.fori_loop(0, 3, lambda _, y: jnp.sort(y @ w, 0), y)
    return state._replace(scale=state.scale + 1), z + jax.random.normal(jax.random.key(0), (4, 8)) * state.scale


def compiled(folder: Path) -> Any:
    """Compile the program as a new process would, with a cache."""
    ipu.clear_caches()
    options = ipu.Options(cache_dir=folder, exact_splits=True)
    return ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=4), options=options).lower(*ARGS).compile()


def numbers(results: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


# --- files in parts ---------------------------------------------------------------------------------------------------


def taken_apart(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    line, _, body = content.partition(b"\n")
    head = json.loads(line)
    sections = {}
    for name, size in head["sections"].items():
        sections[name] = body[:size]
        body = body[size:]
    return head, sections


def put_together(head: dict[str, Any], sections: dict[str, bytes], sizes: Any = None) -> bytes:
    """A file with the right checksum, and the right sizes if no others are asked for."""
    fields = {name: value for name, value in head.items() if name != "sha256"}
    fields["sections"] = {name: len(x) for name, x in sections.items()} if sizes is None else sizes
    body = b"".join(sections.values())
    line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    digest = hashlib.sha256(line + body).hexdigest()
    return json.dumps(fields | {"sha256": digest}, separators=(",", ":")).encode() + b"\n" + body


# --- changes ----------------------------------------------------------------------------------------------------------


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def replacements(value: Any, chance: random.Random) -> list[Any]:
    """Values in the place of another."""
    values: list[Any] = [DELETED, None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400]
    values += [0.5, 1e300, -0.0, 1e-320, "", "x", "\ud800", "\0", "0*999999999", "1*4 2", "9" * 18, "nan", "0x1p1023"]
    values += [[], {}, [value], {"other": value}, [value] * 1000, "a" * 100_000]
    values += [nested(value, chance.choice((50, 500, 5000))), ["subprocess", "call"], {"function": ["os", "system"]}]
    values += [{"type": [MARKER, "f"], "fields": []}, MARKER, {"dict": {"a": 0}}, {"list": [0, 1]}, {"tuple": 3}]
    for name in ([MARKER, "T"], ["subprocess", "Popen"], ["os", "stat_result"], ["__main__", "State"]):
        values.append({"namedtuple": name, "children": [0]})
    if isinstance(value, bool):
        return [*values, not value]
    if isinstance(value, int):
        values += [value + 1, value - 1, -value, 2 * value, value * 10**6, float(value), str(value)]
    if isinstance(value, float):
        values += [-value, value * 1e12, str(value)]
    if isinstance(value, str):
        values += [value + "x", value[:-1], value.upper(), list(value), [value], 3]
    if isinstance(value, list) and value:
        values += [value[:-1], [*value, value[-1]], value[::-1], value * 300, chance.sample(value, len(value))]
    if isinstance(value, dict):
        values += [{**value, "other": 1}, list(value.values()), dict(list(value.items())[:-1])]
    return values


def changed_json(data: Any, chance: random.Random) -> str:
    """The text of data with one change."""
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in places(data):
        kinds.setdefault(tuple("[]" if isinstance(key, int) else key for key in path), []).append(path)
    path = chance.choice(kinds[chance.choice(sorted(kinds, key=str))]) if kinds else ()
    style = chance.random()
    if style < 0.08:  # a field twice, or a number that JSON lacks, which no dict has
        text = json.dumps(data)
        spots = [match.end() for match in re.finditer(r"[{:\[]", text)]
        spot = chance.choice(spots or [0])
        inserted = ('"a":1,"a":2,', "NaN,", "-Infinity,", "1e999,", "1" * 6000 + ",", "[" * 5000, "{}", '"')
        return text[:spot] + chance.choice(inserted) + text[spot:]
    if not path:
        return json.dumps(chance.choice([x for x in replacements(data, chance) if x is not DELETED]))
    data = json.loads(json.dumps(data))
    value = at(data, path)
    other = json.loads(json.dumps(at(data, chance.choice(chance.choice(list(kinds.values()))))))
    choice = chance.choice([*replacements(value, chance), other, other, other])
    if choice is DELETED:
        del at(data, path[:-1])[path[-1]]
    else:
        at(data, path[:-1])[path[-1]] = choice
    return json.dumps(data)


def changed_text(text: str, chance: random.Random) -> str:
    """StableHLO with other characters, words or numbers."""
    style = chance.randrange(6)
    words = list(re.finditer(r"[\w.%@]+", text))
    if not words:
        return text + "x"
    first = chance.choice(words)
    second = chance.choice(words)
    if style == 0:
        return text[: first.start()] + second.group() + text[first.end() :]
    if style == 1:
        spot = chance.randrange(len(text))
        return text[:spot] + chr(chance.randrange(1, 0x250)) + text[spot + 1 :]
    if style == 2:
        return text[: chance.randrange(len(text))]
    if style == 3:
        digits = chance.choice(list(re.finditer(r"\d+", text)) or [first])
        number = chance.choice((0, 1, -1, 2**31, 2**32, 2**63, 10**30, chance.randrange(100)))
        return f"{text[: digits.start()]}{number}{text[digits.end() :]}"
    if style == 4:
        spot = chance.randrange(len(text))
        return text[:spot] + chance.choice('<([{"') * chance.choice((1, 100, 10_000, 300_000)) + text[spot:]
    call = "%9 = stablehlo.custom_call @xla_python_cpu_callback() {api_version = 2 : i32} : () -> tensor<f32>\n    "
    spot = chance.choice([match.start() for match in re.finditer("%", text)] or [0])
    return text[:spot] + call + text[spot:]


def bomb(chance: random.Random) -> bytes:
    """A section that is small, and takes very much memory when it is read without bounds."""
    units = (b"[],", b"{},", b'{"a":1},', b"0,", b'"ab",', b"257,", b" ", b"a", b"\0", b'"a":1,', b"[", b"[[],")
    unit = chance.choice(units)
    size = chance.choice((1 << 20, 1 << 24, 1 << 28))
    return zlib.compress(b"[" + unit * (size // len(unit)) + b"0]", 9)


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(content or b"0")
    for _ in range(chance.randint(1, 4)):
        style = chance.randrange(4)
        spot = chance.randrange(len(damaged))
        if style == 0:
            damaged[spot] ^= chance.randint(1, 255)
        elif style == 1:
            damaged[spot:spot] = chance.randbytes(chance.randint(1, 20))
        elif style == 2:
            del damaged[spot : spot + chance.randint(1, 20)]
            damaged = damaged or bytearray(b"0")
        else:
            damaged[spot : spot + 4] = chance.choice((bytes(4), b"\xff" * 4, b"\xff\xff\xff\x7f"))
    return bytes(damaged)


def forged(content: bytes, chance: random.Random) -> bytes:
    """A file with one change and the right checksum."""
    while True:
        with contextlib.suppress(RecursionError):  # of the writer of JSON: no such file
            return once_forged(content, chance)


def once_forged(content: bytes, chance: random.Random) -> bytes:
    head, sections = taken_apart(content)
    style = chance.random()
    name = chance.choice(list(sections)) if sections else ""
    if style < 0.2 or not sections:
        fields = {key: value for key, value in head.items() if key not in ("sections", "sha256")}
        changed = _json(changed_json(fields, chance).encode())
        return put_together(changed if isinstance(changed, dict) else {"format": "ipujax"}, sections)
    if style < 0.25:
        wrong = (0, -1, 5, 1 << 40, 1.5, None, "3")
        sizes = {key: chance.choice((*wrong, len(x), len(x) + 1)) for key, x in sections.items()}
        return put_together(head, sections, chance.choice((sizes, list(sizes), None, {**sizes, "other": 0}, 3)))
    if style < 0.3:
        return put_together(head, {key: x for key, x in sections.items() if key != name})
    if style < 0.36:
        return put_together(head, sections | {name: bomb(chance)})
    plain = _decompressed(sections[name])
    if style < 0.46 or plain is None:
        return put_together(head, sections | {name: changed_bytes(sections[name], chance)})
    data = _json(plain)
    if data is None:
        changed = changed_bytes(plain, chance)
    elif isinstance(data, dict) and "module" in data and chance.random() < 0.8:
        changed = json.dumps(data | {"module": changed_text(data["module"], chance)}).encode()
    else:
        changed = changed_json(data, chance).encode()
    return put_together(head, sections | {name: zlib.compress(changed, 1)})


def _decompressed(section: bytes) -> bytes | None:
    with contextlib.suppress(zlib.error):
        return zlib.decompress(section)
    return None


def _json(text: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


# --- doors: what is done with a forged file; each returns whether it was refused --------------------------------------


def through_profile(folder: Path, content: bytes) -> bool:
    path = folder / "forged.profile"
    path.write_bytes(content)
    try:
        ipu.Profile.load(path)
    except IpuError:
        return True
    return False


def through_program(folder: Path, content: bytes) -> bool:
    path = folder / "forged.program"
    path.write_bytes(content)
    is_refused = False
    try:
        program = ipu.load(path)
    except IpuError:
        return True
    for use in (lambda: program.profile, lambda: program(*ARGS)):
        try:
            use()
        except IpuError:
            is_refused = True
    return is_refused


def through_cache(folder: Path, path: Path, content: bytes, original: bytes, expected: list[np.ndarray]) -> bool:
    """True if the file was found to be damaged, or another one was written in its place."""
    path.write_bytes(content)
    try:
        program = compiled(folder)
        assert program.profile.cycles > 0
        results = numbers(program(*ARGS))
        was_read = path.exists() and path.read_bytes() == content
        if not (was_read and "-program" in path.name):  # a forged computation has numbers of its own
            # Another plan may add in another order.
            assert all(map(partial(np.allclose, rtol=1e-4, atol=1e-5), results, expected)), "other numbers"
    finally:
        path.write_bytes(original)
    return not was_read


def plans_alone(folder: Path) -> None:
    """Remove programs and profiles: plans are read when a program is compiled."""
    for path in folder.glob("*-pro*.ipujax"):
        path.unlink()


# --- child processes --------------------------------------------------------------------------------------------------


def resident(field: str) -> int:
    """Bytes of a field of the process's status: VmRSS now, VmHWM at most since `forget_most`."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(match[1]) << 10 if match else 0


def forget_most() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def originals(folder: Path) -> None:
    """Write the files that are forged."""
    program = compiled(folder / "cache")
    program.profile.save(folder / "good.profile")
    program.save(folder / "good.program")
    (folder / f"{MARKER}.py").write_text("raise SystemExit('a file was executed')\n", encoding="utf-8")


class Case(NamedTuple):
    """A forged file, and what is done with it."""

    content: bytes
    use: Callable[[], bool]


def cases(door: str, folder: Path) -> Callable[[random.Random], Case]:
    """The function that forges a file of a door by some random numbers."""
    if door in ("profile", "program"):
        content = (folder / f"good.{door}").read_bytes()
        through_door = through_profile if door == "profile" else through_program

        def case(chance: random.Random) -> Case:
            file = forged(content, chance)
            return Case(file, lambda: through_door(folder, file))

        return case
    cache = folder / "cache"
    kinds = ("program", "profile") if door == "entry" else ("plan",)
    paths = [path for path in sorted(cache.iterdir()) if path.stem.partition("-")[2] in kinds]
    contents = {path: path.read_bytes() for path in paths}
    expected = numbers(compiled(cache)(*ARGS))

    def case_of_cache(chance: random.Random) -> Case:
        path = chance.choice(paths)
        file = forged(contents[path], chance)
        if door == "plan":
            plans_alone(cache)
        return Case(file, lambda: through_cache(cache, path, file, contents[path], expected))

    return case_of_cache


def run_cases(door: str, folder: Path, seeds: range) -> None:
    """Take forged files through a door, and print a line of JSON for each."""
    executed: list[str] = []
    logging.disable(logging.CRITICAL)
    case_of = cases(door, folder)
    for number in range(3):
        case_of(random.Random(-1 - number)).use()  # what it imports and compiles once is no part of a case
    sys.path.insert(0, str(folder))
    before = set(sys.modules)

    def watch(event: str, args: Any) -> None:
        if event in EXECUTING or (event == "import" and args[0] == MARKER):
            executed.append(event)

    sys.addaudithook(watch)
    for seed in seeds:
        case = case_of(random.Random(f"{door} {seed}"))
        forget_most()
        had = resident("VmRSS")
        start = time.monotonic()
        problem = ""
        is_refused = False
        try:
            is_refused = case.use()
        except BaseException as error:
            problem = f"{type(error).__name__}: {str(error)[:200]}"
        more = resident("VmHWM") - had
        if executed:
            problem = f"executed: {', '.join(executed)}"
            executed.clear()
        if MARKER in sys.modules:
            problem = "imported a module that a file names"
        if more > MAX_MORE_BYTES:
            problem = problem or f"took {more >> 20:,} MB more"
        if time.monotonic() - start > MAX_SECONDS:
            problem = problem or f"took {time.monotonic() - start:.0f} s"
        print(json.dumps({"seed": seed, "problem": problem, "refused": is_refused, "more": more}), flush=True)
    assert not {name for name in set(sys.modules) - before if MARKER in name}


def through(door: str, folder: Path, seeds: range) -> Iterator[dict[str, Any]]:
    """Take files through a door in child processes; a seed that ends its process is a problem too."""
    next_seed = seeds.start
    while next_seed < seeds.stop:
        last = min(next_seed + BATCH, seeds.stop)
        command = [sys.executable, __file__, "--child", door, str(folder), str(next_seed), str(last)]
        child = subprocess.run(command, capture_output=True, check=False)
        lines = [json.loads(line) for line in child.stdout.decode().splitlines() if line.startswith("{")]
        rows = [line for line in lines if "seed" in line]
        yield from rows
        next_seed += len(rows)
        if child.returncode:
            problem = f"ended its process with {child.returncode}: {child.stderr.decode(errors='replace')[-300:]}"
            yield {"seed": next_seed, "problem": problem, "refused": False, "more": 0}
            next_seed += 1


DOORS = ("profile", "program", "entry", "plan")


def main() -> int:
    """Forge files, take them through the doors, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="files of each door")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--door", choices=DOORS, action="append", help="doors, by default all")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        door, folder, first, last = arguments.child
        run_cases(door, Path(folder), range(int(first), int(last)))
        return 0
    failures = 0
    for door in arguments.door or DOORS:
        with tempfile.TemporaryDirectory() as folder:
            originals(Path(folder))
            rows = list(through(door, Path(folder), range(arguments.seed, arguments.seed + arguments.count)))
        problems = [row for row in rows if row["problem"]]
        refused = sum(row["refused"] for row in rows)
        most = max(row["more"] for row in rows) >> 20
        counts = f"{len(rows):6,} files  {refused:6,} refused  {len(problems):4,} failures"
        print(f"{door:8} {counts}  at most {most:,} MB more")
        for kind, count in Counter(row["problem"] for row in problems).most_common(20):
            first = next(row["seed"] for row in problems if row["problem"] == kind)
            print(f"    {count:4} × {kind} (seed {first})")
        sys.stdout.flush()
        failures += len(problems)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
