"""Programs in the cache: a hit has the numbers and the profile of a compilation, whatever the directory holds."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.shared_programs import forget_shared_programs

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
X = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
TABLE = np.arange(4, dtype=np.float32)


def dense(x: jax.Array) -> jax.Array:
    with jax.named_scope("dense"):
        return jnp.tanh(x @ x.T + TABLE.sum())


def compiled(fun: Callable[..., Any], folder: Path | str, *args: Any, **settings: Any) -> Any:
    """Compile anew, as another process does."""
    forget_shared_programs()
    options = ipu.Options(cache_dir=folder, **settings.pop("options", {}))
    return ipu.jit(fun, device=settings.pop("device", DEVICE), options=options, **settings).lower(*args).compile()


def called_anew(function: Callable[..., Any], *args: Any) -> Any:
    forget_shared_programs()
    return function(*args)


def is_hit(program: Any) -> bool:
    return program.lowered.call_program.is_stored


def test_hit_has_numbers_and_profile_of_compilation(tmp_path):
    """Nothing is lowered for numbers, profile and its texts; the graph is there when it is asked for."""
    first = compiled(dense, tmp_path, X)
    text = first.profile.summary(show_var_storage=True)
    second = compiled(dense, tmp_path, X)
    assert not is_hit(first) and is_hit(second)
    assert second.profile.data is not None and second.lowered.call_program.is_stored
    np.testing.assert_array_equal(second(X), first(X))
    np.testing.assert_array_equal(second(X), jax.jit(dense)(X))
    assert second.profile.summary(show_var_storage=True) == text
    assert second.profile.scalars() == first.profile.scalars()
    assert second.profile.title == first.profile.title
    assert "lowered_again" not in second.lowered.__dict__
    assert second.as_text() == first.as_text()
    assert second.profile.timeline.cycles == first.profile.cycles
    assert second.executable.memory.max_tile_bytes == first.executable.memory.max_tile_bytes
    outs, run = second.profile_call(X)
    assert run.cycles == first.profile.cycles and outs.shape == (8, 8)


def test_calls_hit(tmp_path, caplog):
    """A call and a profile of another function object use the files of the first."""
    caplog.set_level(logging.INFO, "ipujax.cache")
    functions = [ipu.jit(dense, device=DEVICE, options=ipu.Options(cache_dir=tmp_path)) for _ in range(2)]
    first, second = (np.asarray(called_anew(function, X)) for function in functions)
    assert first.tobytes() == second.tobytes()
    assert functions[1].profile(X).cycles == functions[0].profile(X).cycles
    assert sum("is in the cache" in line for line in caplog.messages) == 1


def test_environment_names_directory(tmp_path, monkeypatch):
    """IPUJAX_CACHE_DIR is used where the options name none; "" of the options switches it off."""
    monkeypatch.setenv("IPUJAX_CACHE_DIR", str(tmp_path))

    def make(folder: str | None) -> Any:
        return compiled(dense, folder, X)

    make("")
    assert not list(tmp_path.iterdir())
    make(None)
    assert len(list(tmp_path.iterdir())) == 1
    assert is_hit(make(None)) and not is_hit(make(""))
    monkeypatch.setenv("IPUJAX_CACHE_BYTES", "many")
    with pytest.raises(ipu.ArgumentError, match="IPUJAX_CACHE_BYTES must be a number"):
        make(None)


@pytest.mark.parametrize("path", [3, b"folder", "a\0b"])
def test_cache_dir_is_a_path(path):
    with pytest.raises(ipu.ArgumentError, match=r"Options.cache_dir must be the path"):
        ipu.Options(cache_dir=path)


def test_engine_program_is_stored(tmp_path):
    """Programs that XLA computes in place of the function are read as StableHLO: splits, replicas, random numbers."""

    def step(key: jax.Array, w: jax.Array, x: jax.Array) -> Any:
        noise = jax.random.uniform(key, w.shape)
        return {"w": jax.lax.pmean(w + noise, "replica"), "loss": jax.lax.psum((x @ w).sum(), "replica")}

    specs = {"in_specs": (P(), P(), P("replica")), "out_specs": P(), "replicas": 2}
    settings = {**specs, "device": ipu.IPUModel(2, tiles_per_ipu=16), "options": {"exact_splits": True}}
    args = jax.random.key(1), jnp.ones((4, 3)), X
    first, second = (compiled(step, tmp_path, *args, **settings) for _ in range(2))
    assert is_hit(second) and second.lowered.stored_computation is not None
    expected = first(*args)
    got = second(*args)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()) and a.aval == b.aval, expected, got))
    assert "lowered_again" not in second.lowered.__dict__


def test_donation_and_static_arguments(tmp_path):
    """Donated buffers are reused on a hit; each static value has a program of its own."""

    def update(power: int, w: jax.Array) -> jax.Array:
        return w**power

    programs = [compiled(update, tmp_path, power, X, static_argnums=0, donate_argnums=1) for power in (2, 3, 3)]
    assert [is_hit(program) for program in programs] == [False, False, True]
    w = X + 0
    np.testing.assert_array_equal(programs[2](w), X**3)
    assert w.is_deleted()


SCALE = 2.0


def scaled(x: jax.Array) -> jax.Array:
    return x * SCALE + TABLE


def test_key_depends_on_constants_target_and_options(tmp_path, monkeypatch):
    """Another constant, target, label or option is another program; progress is none of them."""
    compiled(scaled, tmp_path, X)
    assert is_hit(compiled(scaled, tmp_path, X, options={"progress": False}))
    assert not is_hit(compiled(scaled, tmp_path, X, options={"label": "wide"}))
    assert not is_hit(compiled(scaled, tmp_path, X, device=ipu.IPUModel(tiles_per_ipu=8)))
    assert not is_hit(compiled(scaled, tmp_path, X, donate_argnums=0))
    assert not is_hit(compiled(scaled, tmp_path, X[:4]))
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert not is_hit(compiled(scaled, tmp_path, X))
    monkeypatch.setitem(globals(), "TABLE", TABLE + 1)
    assert not is_hit(compiled(scaled, tmp_path, X))
    np.testing.assert_array_equal(compiled(scaled, tmp_path, X)(X), X * 3 + TABLE)


def calls_python(x: jax.Array) -> Any:
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


ROWS = jax.NamedSharding(ipu.make_mesh((2,), ("i",)), P("i"))


@pytest.mark.parametrize(
    ("fun", "settings", "reason"),
    [
        (calls_python, {}, "calls a Python function"),
        (scaled, {"in_shardings": (ROWS,), "device": ipu.IPUModel(2, tiles_per_ipu=16)}, "shardings partition it"),
    ],
    ids=["callback", "partitioned"],
)
def test_no_stable_key_is_not_cached(tmp_path, caplog, fun, settings, reason):
    """A log line says why; no program is written, only plans that took long, and the program runs."""
    caplog.set_level(logging.INFO, "ipujax.cache")
    for _ in range(2):
        assert not is_hit(compiled(fun, tmp_path, X, **settings))
    assert all(path.name.endswith("-plan.ipujax") for path in tmp_path.iterdir())
    assert sum("is not cached" in line and reason in line for line in caplog.messages) == 2


# --- directories and files that cannot be used ---


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_damaged_files(tmp_path, caplog):
    """Any byte changed, files cut off or of another program: right numbers, no hit, one warning of a directory."""
    compiled(dense, tmp_path, X).profile.summary()
    expected = np.asarray(jax.jit(dense)(X))
    contents = {path: path.read_bytes() for path in tmp_path.iterdir()}
    chance = random.Random(0)
    (program,) = tmp_path.glob("*-program.ipujax")
    (profile,) = tmp_path.glob("*-profile.ipujax")
    damages = [b"", b"\n", b"{}\n", contents[profile], contents[program][:-1], contents[program] + b" "]
    for _ in range(4):
        place = chance.randrange(len(contents[program]))
        damaged = bytearray(contents[program])
        damaged[place] ^= 1 << chance.randrange(8)
        damages.append(bytes(damaged))
    for damage in damages:
        program.write_bytes(damage)
        repeated = compiled(dense, tmp_path, X)
        assert not is_hit(repeated)
        np.testing.assert_array_equal(repeated(X), expected)
        assert is_hit(compiled(dense, tmp_path, X))  # written anew
    assert len(warnings_of(caplog)) == 1 and "is damaged" in warnings_of(caplog)[0]
    profile.write_bytes(contents[profile][:-9])
    assert compiled(dense, tmp_path, X).profile.cycles > 0


def test_unusable_directory(tmp_path, caplog):
    """A path through a file, as a full or read-only disk: the program is compiled, and there is one warning."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        program = compiled(dense, tmp_path / "file" / "folder", X)
        assert program.profile.cycles > 0
    assert len(warnings_of(caplog)) == 1 and "cannot be" in warnings_of(caplog)[0]


def test_full_disk(tmp_path, caplog, monkeypatch):
    def full(path: Path, content: bytes, is_synced: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(import_module("ipujax.storage.cache_directory"), "write_file", full)
    np.testing.assert_array_equal(compiled(dense, tmp_path, X)(X), jax.jit(dense)(X))
    assert len(warnings_of(caplog)) == 1 and "No space left" in warnings_of(caplog)[0]
    assert not list(tmp_path.iterdir())


def test_bound_removes_longest_unused(tmp_path, monkeypatch):
    def same(x: jax.Array) -> jax.Array:  # without compute sets, whose costs are files too
        return x

    paths: list[Path] = []
    for number, size in enumerate((2, 3, 4)):
        compiled(same, tmp_path, X[:size])
        if not paths:
            bytes_of_one = next(tmp_path.iterdir()).stat().st_size
            monkeypatch.setenv("IPUJAX_CACHE_BYTES", str(int(2.5 * bytes_of_one)))
        new = [path for path in tmp_path.iterdir() if path not in paths]
        paths += new
        os.utime(new[0], (number, number))
    assert [path.exists() for path in paths] == [False, True, True]
    assert is_hit(compiled(same, tmp_path, X[:4])) and not is_hit(compiled(same, tmp_path, X[:2]))


def test_a_second_process_imports_no_compiler(tmp_path: Path) -> None:
    """A call of a program in the cache needs neither rules nor planners, costs, memory, profiles or pages."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import jax.numpy as jnp
        import ipujax as ipu

        step = ipu.jit(lambda x: jnp.tanh(x @ x).sum(), device=ipu.IPUModel(tiles_per_ipu=16))
        print(step(jnp.ones((8, 8))))
        print(*(name for name in sys.modules if name.startswith("ipujax.")))
        """)
    )
    environment = {**os.environ, "IPUJAX_CACHE_DIR": str(tmp_path / "cache")}
    outputs = [
        subprocess.run([sys.executable, script], env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        for _ in range(2)
    ]
    (first, of_first), (second, of_second) = (output.splitlines() for output in outputs)
    assert first == second
    rules = {"ipujax.lowering.rules", "ipujax.lowering.passes", "ipujax.runtime.graph", "ipujax.runtime.compile"}
    assert rules <= set(of_first.split())
    others = {"ipujax.fit", *(f"ipujax.runtime.{room}" for room in ("cost", "engine", "memory", "page", "report"))}
    assert not (rules | others) & set(of_second.split())
