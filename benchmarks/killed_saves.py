"""Saves that are killed at random moments: the older file or the new one is there, whole, each time.

    python benchmarks/killed_saves.py [--count 200] [--seed 0] [--save profile …]

A child process saves again and again over a good file: `profile.save`, `compiled.save`, `profile.to_html`, or programs
with their plans into one cache. It is killed (SIGKILL) at a random moment of both saves, and what is under the name is
read: a profile and a program must load, and the program compute its numbers; a page must be whole, and so must every
file of a cache. Prints a row for each kind of save.

Files that were being written may stay beside the good file, under names that begin with a dot; a cache removes them.
Limits: children are forks of a process that has compiled, so they may not compile: computations are exported before.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.caching import PROGRAM_FILE
from ipujax.runtime.files import read_sealed
from ipujax.runtime.schema import PROFILE_FILE
from ipujax.storage import CacheDirectory, NewFile, saved_program
from ipujax.storage.stored_values import PLAN_FILE

X = jnp.ones((8, 8))
KINDS = {kind.name: kind for kind in (PROGRAM_FILE, PROFILE_FILE, PLAN_FILE)}


def compiled(depth: int, folder: str | Path = "") -> Any:
    def chain(x: Any) -> Any:
        for n in range(depth):
            x = jnp.sin(x @ x) + n
        return x

    options = ipu.Options(cache_dir=str(folder), exact_splits=bool(folder))
    return ipu.jit(chain, device=ipu.IPUModel(tiles_per_ipu=4), options=options).lower(X).compile()


# --- saves: each returns functions that save one of two files ---------------------------------------------------------


def profile_saves(folder: Path) -> list[Callable[[], Any]]:
    profiles = [compiled(depth).profile for depth in (1, 8)]
    return [partial(profile.save, folder / "good") for profile in profiles]


def program_saves(folder: Path) -> list[Callable[[], Any]]:
    programs = [compiled(depth) for depth in (1, 8)]
    export = saved_program.exported_computation
    known: dict[int, bytes] = {}

    def exported(function: Any, name: str, avals: Any) -> bytes:
        owner = id(inspect.getclosurevars(function).nonlocals["program"])
        if owner not in known:
            known[owner] = export(function, name, avals)
        return known[owner]

    saved_program.exported_computation = exported
    return [partial(program.save, folder / "good") for program in programs]


def page_saves(folder: Path) -> list[Callable[[], Any]]:
    profile = compiled(1).profile
    return [partial(each.to_html, folder / "good") for each in (profile, profile.labelled("x" * 100))]


def cache_saves(folder: Path) -> list[Callable[[], Any]]:
    other = folder.parent / f"{folder.name} of others"
    for depth in (1, 2):
        compiled(depth, other).profile.summary()
    files = [new_file(path) for path in sorted(other.glob("*.ipujax"))]
    shutil.rmtree(other)
    directory = CacheDirectory(str(folder))
    return [partial(directory.write, *files), partial(directory.write, *files[::-1])]


def new_file(path: Path) -> NewFile:
    key, _, kind = path.stem.partition("-")
    sealed = read_sealed(path, KINDS[kind], key)
    return NewFile(sealed.kind, key, sealed.sections, sealed.figures)


# --- checks of what is there: each raises an error if it is not whole -------------------------------------------------


def check_profile(folder: Path) -> None:
    ipu.Profile.load(folder / "good").summary()


def check_program(folder: Path) -> None:
    program = ipu.load(folder / "good")
    assert program.profile.cycles > 0
    results = np.asarray(program(X))
    assert any(np.array_equal(results, each) for each in expected_results()), "other numbers"


@cache
def expected_results() -> list[np.ndarray]:
    return [np.asarray(compiled(depth)(X)) for depth in (1, 8)]


def check_page(folder: Path) -> None:
    content = (folder / "good").read_text(encoding="utf-8").strip()
    assert content.startswith("<!DOCTYPE html>") and content.endswith("</html>")


def check_cache(folder: Path) -> None:
    for path in folder.glob("*.ipujax"):
        key, _, kind = path.stem.partition("-")
        read_sealed(path, KINDS[kind], key)


SAVES: dict[str, tuple[Callable[[Path], list[Callable[[], Any]]], Callable[[Path], None]]] = {
    "profile": (profile_saves, check_profile),
    "program": (program_saves, check_program),
    "page": (page_saves, check_page),
    "cache": (cache_saves, check_cache),
}


def killed(kind: str, saves: list[Callable[[], Any]], folder: Path, seconds: float) -> str:
    """Kill a child that saves after some seconds, and return what is wrong with the file; "" if nothing is."""
    child = os.fork()
    if child == 0:
        try:
            while True:
                for save in saves:
                    save()
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return "the child ended by itself"
    try:
        SAVES[kind][1](folder)
    except Exception as error:  # any is a file that is lost
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def main() -> int:
    """Kill saves, and print what was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="kills of each kind of save")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--save", choices=list(SAVES), action="append", help="kinds, by default all")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    num_lost = 0
    for kind in arguments.save or SAVES:
        chance = random.Random(f"{kind} {arguments.seed}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            saves = SAVES[kind][0](folder)
            start = time.monotonic()
            for save in saves:
                save()
            seconds = time.monotonic() - start
            problems = [killed(kind, saves, folder, chance.random() * seconds) for _ in range(arguments.count)]
            unfinished = sum(path.name.startswith(".") for path in folder.iterdir())
        lost = [problem for problem in problems if problem]
        counts = f"{len(problems):5,} kills  {len(lost):3,} lost"
        print(f"{kind:8} {counts}  {unfinished:4,} unfinished files beside", flush=True)
        for problem in sorted(set(lost))[:5]:
            print(f"    {problem}")
        num_lost += len(lost)
    return 1 if num_lost else 0


if __name__ == "__main__":
    sys.exit(main())
