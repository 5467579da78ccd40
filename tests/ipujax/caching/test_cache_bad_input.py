"""Directories of a cache as they go wrong: many damaged files, several writers, folders that are read-only."""

from __future__ import annotations

import multiprocessing
import os
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.caching import PROGRAM_FILE
from ipujax.runtime.schema import PROFILE_FILE
from ipujax.storage import CacheDirectory, computation
from ipujax.storage.stored_values import PLAN_FILE

X = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
FILES = 1000
KINDS = {kind.name: kind for kind in (PLAN_FILE, PROGRAM_FILE, PROFILE_FILE)}
COMPILED = 5


def dense(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x.T)


def compiled(folder: Path, scale: int = 1, exact_splits: bool = False) -> ipu.Compiled:
    options = ipu.Options(cache_dir=folder, exact_splits=exact_splits)
    function = ipu.jit(lambda x: scale * dense(x), device=ipu.IPUModel(tiles_per_ipu=4), options=options)
    return function.lower(X).compile()


def test_files_with_random_bytes_changed(tmp_path, monkeypatch):
    """None of 1,000 is read, so that nothing of it runs; some are compiled over, with right numbers."""
    program = compiled(tmp_path, exact_splits=True)
    program.profile.summary()
    expected = np.asarray(program(X))
    contents = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    assert {path.stem.partition("-")[2] for path in contents} == {"plan", "profile", "program"}
    chance = random.Random(0)

    def refuse(content: bytes) -> None:
        raise AssertionError("the computation of a damaged file is read")

    monkeypatch.setattr(computation, "read_computation", refuse)
    monkeypatch.setattr("ipujax.caching.read_computation", refuse)
    for number in range(FILES):
        path = chance.choice(list(contents))
        damaged = bytearray(contents[path])
        for place in chance.sample(range(len(damaged)), chance.randint(1, 8)):
            damaged[place] ^= chance.randint(1, 255)
        path.write_bytes(damaged)
        key, _, kind = path.stem.partition("-")
        assert CacheDirectory(str(tmp_path)).read(key, KINDS[kind]) is None and not path.exists()
        if number % (FILES // COMPILED) == 0:
            for each in contents:
                each.write_bytes(damaged)
            repeated = compiled(tmp_path, exact_splits=True)
            assert not repeated.lowered.call_program.is_stored
            np.testing.assert_array_equal(repeated(X), expected)


def _use(folder: Path, order: tuple[int, ...]) -> list[tuple[int, bool]]:
    programs = {scale: compiled(folder, scale) for scale in order}
    return [(scale, bool(np.array_equal(p(X), scale * dense(X)))) for scale, p in programs.items() if p.profile]


def test_writers_share_a_directory(tmp_path):
    """Processes that store the same programs at once have right numbers; every file is whole behind them."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(_use, [(tmp_path, (1, 2, 3, 4)), (tmp_path, (4, 3, 2, 1))])
    assert all(right for uses in results for _, right in uses)
    assert not list(tmp_path.glob(".*")) and len(list(tmp_path.glob("*-program.ipujax"))) == 4
    for path in tmp_path.iterdir():
        key, _, kind = path.stem.partition("-")
        assert CacheDirectory(str(tmp_path)).read(key, KINDS[kind]) is not None


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_read_only_directory_is_read(tmp_path, caplog):
    """Stored programs are found; others are compiled, with one warning."""
    compiled(tmp_path).profile.summary()
    tmp_path.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert compiled(tmp_path).lowered.call_program.is_stored
        np.testing.assert_array_equal(compiled(tmp_path, 3)(X), 3 * dense(X))
        assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1
    finally:
        tmp_path.chmod(0o700)
