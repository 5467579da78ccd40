"""Public values can be copied and pickled, with equal results; what cannot says so in one error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentTypeError
from ipujax.runtime.host import HostData
from tests.ipujax import copied_values
from tests.ipujax.copied_values import COPIED, DEVICE, MODULES, OF_TENSORS, REFUSED, SHARED, WITHOUT_VALUES, X, square
from tests.ipujax.copy_checks import COPIES, PICKLES, WAYS, check_copy, check_errors, check_refused, classes_not_in


def test_table_has_all_public_classes() -> None:
    tables = {**COPIED, **SHARED, **REFUSED, **OF_TENSORS}
    assert not classes_not_in(MODULES, set(tables) | WITHOUT_VALUES)
    assert not [name for name in WITHOUT_VALUES if name in tables]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COPIED)
def test_copies_are_equal(name: str, way: str) -> None:
    check_copy(COPIED[name](), way)


@pytest.mark.parametrize("name", SHARED)
def test_objects_that_never_change_are_their_copies(name: str) -> None:
    value = SHARED[name]()
    assert all(way({"value": value})["value"] is value for way in COPIES.values())
    for way in PICKLES.values():
        with pytest.raises(ArgumentTypeError, match=f"{type(value).__name__} objects cannot be pickled\n.*\n  try: "):
            way(value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_copies_name_the_remedy(name: str) -> None:
    check_refused(REFUSED[name]())


@pytest.mark.parametrize("name", OF_TENSORS)
def test_values_of_tensors_are_refused_by_these(name: str) -> None:
    for way in (copy.deepcopy, *PICKLES.values()):
        with pytest.raises(ArgumentTypeError, match="Tensor objects cannot be copied or pickled"):
            way(OF_TENSORS[name]())


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_all_errors_keep_their_facts(way: str) -> None:
    check_errors("ipujax", way)


def test_errors_leave_a_process_whatever_they_name() -> None:
    graph = REFUSED["poplar.Graph"]()
    ways = {"batch": "a smaller one"}
    error = ipu.TileMemoryError("too large", got=graph, expected=[X, 1], ways=ways, needed_bytes=7)
    duplicate = pickle.loads(pickle.dumps(error))
    assert str(duplicate) == str(error) and duplicate.got == str(graph) and duplicate.expected == [str(X), 1]
    assert duplicate.ways == ways and duplicate.needed_bytes == 7
    assert pickle.loads(pickle.dumps(ipu.TileMemoryError("too large"))).ways == {}


# --- values -----------------------------------------------------------------------------------------------------------


def test_options_are_values() -> None:
    options = ipu.Options(trip_counts={"while[0]": 3})
    same = ipu.Options(trip_counts={"while[0]": 3})
    other = ipu.Options(trip_counts={"while[0]": 4})
    assert options == same and hash(options) == hash(same) and options != other
    assert ipu.Options(**dataclasses.asdict(options)) == options
    assert len({options, same, other}) == 2
    with pytest.raises(TypeError, match="item assignment"):
        options.trip_counts["while[0]"] = 1  # type: ignore[index]


def test_profiles_keep_label_and_host() -> None:
    profile = copied_values.compiled().profile.labelled("mine").with_host(HostData(1, 2.0, 3.0))
    for way in WAYS.values():
        duplicate = way(profile)
        assert duplicate.identity.label == "mine" and duplicate.host == profile.host
        assert duplicate.to_html is not None and duplicate.summary() == profile.summary()
    assert copied_values.compiled().profile.identity.label == ""


def test_variables_of_models_stay_their_own() -> None:
    model, x, solution = copied_values._solved()
    other = pickle.loads(pickle.dumps(model))
    assert pickle.loads(pickle.dumps(solution))[x] == 2 and other.minimize(x)[x] == 2
    y = other.add_variable(1, 4, "y")
    z = model.add_variable(3, 4, "y")
    assert y != z and model.minimize(z)[z] == 3
    with pytest.raises(ArgumentTypeError, match="y"):
        model.minimize(y)


def test_stages_can_be_entered_again() -> None:
    stage = copy.deepcopy(ipu.stage(0))

    def staged(x: Any) -> Any:
        with stage:
            y = jnp.sin(x)
        with stage, pickle.loads(pickle.dumps(ipu.stage(1))):
            return jnp.cos(y)

    names = [str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(staged)(1.0).jaxpr.eqns]
    assert names == ["ipu_stage_0", "ipu_stage_0/ipu_stage_1"]
    with pytest.raises(ipu.ArgumentError, match="number of a stage"):
        ipu.stage(-1)


# --- functions --------------------------------------------------------------------------------------------------------


@ipu.jit(device=DEVICE, static_argnums=1, options=ipu.Options(label="decorated"))
def decorated(x: Any, power: int = 2) -> Any:
    """Return a power."""
    return x**power


@ipu.jit(device=DEVICE)
def factorial(n: Any, count: Any = 3) -> Any:
    return n if count == 0 else n * factorial.__wrapped__(n, count - 1)


class Trainer:
    def __init__(self) -> None:
        self.weight = 2.0
        self.step = ipu.jit(self._step, device=DEVICE)

    def _step(self, x: Any) -> Any:
        return self.weight * x

    @ipu.jit(device=DEVICE, static_argnums=0)
    def twice(self, x: Any) -> Any:
        return 2 * x


@pytest.mark.parametrize("way", WAYS)
def test_copied_functions_compute_the_same(way: str) -> None:
    for name in ("jit", "jit of replicas"):
        fun = COPIED[name]()
        duplicate = WAYS[way](fun)
        np.testing.assert_array_equal(duplicate(X), fun(X))
        assert duplicate.options == fun.options and duplicate.device == fun.device
        assert duplicate.profile(X).cycles == fun.profile(X).cycles
        assert duplicate.__name__ == fun.__name__ and repr(duplicate) == repr(fun)


@pytest.mark.parametrize("way", WAYS)
def test_functions_with_a_name_are_that_of_the_module(way: str) -> None:
    assert pickle.loads(pickle.dumps([decorated, Trainer.twice], 2)) == [decorated, Trainer.twice]
    assert WAYS[way](decorated) is decorated and WAYS[way](Trainer.twice) is Trainer.twice
    assert WAYS[way](Trainer().twice)(X)[0, 0] == 2


def test_pickled_functions_compile_again_after_clear_cache() -> None:
    fun = ipu.jit(square, device=DEVICE)
    expected = fun(X)
    duplicate = pickle.loads(pickle.dumps(fun))
    assert duplicate is not fun
    duplicate.clear_cache()
    with ThreadPoolExecutor(2) as threads:
        for result in threads.map(duplicate, [X, X]):
            np.testing.assert_array_equal(result, expected)
    duplicate.clear_cache()
    np.testing.assert_array_equal(fun(X), expected)


def test_functions_of_objects_follow_the_copied_object() -> None:
    trainer = Trainer()
    for way in (copy.deepcopy, *PICKLES.values()):
        other = way(trainer)
        other.weight = 3.0
        assert other.step(X)[0, 0] == 3.0 and trainer.step(X)[0, 0] == 2.0


def test_cloudpickle_takes_closures() -> None:
    factor = 3.0
    fun = ipu.jit(lambda x: factor * x, device=DEVICE)
    np.testing.assert_array_equal(pickle.loads(cloudpickle.dumps(fun))(X), 3 * X)
    pipelined = ipu.jit(ipu.pipeline(lambda x: factor * x, micro_batches=2, reduce="stack"), device=DEVICE)
    np.testing.assert_array_equal(pickle.loads(cloudpickle.dumps(pipelined))(X), pipelined(X))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(fun)  # as a function of jax.jit: Python's own error


def test_functions_by_value_keep_themselves_and_their_wrappers() -> None:
    """As functions of `__main__`, which cloudpickle takes apart; one of them calls itself."""
    space: dict[str, Any] = {
        "ipu": ipu,
        "DEVICE": DEVICE,
        "functools": __import__("functools"),
        "__name__": "elsewhere",
    }
    exec(
        "def doubled(fun):\n"
        "    @functools.wraps(fun)\n"
        "    def wrapper(*args): return 2 * fun(*args)\n"
        "    return wrapper\n"
        "@ipu.jit(device=DEVICE, static_argnums=1)\n"
        "@doubled\n"
        "def power(x, n): return x if n == 0 else x * power(x, n - 1)\n",
        space,
    )
    duplicate = pickle.loads(cloudpickle.dumps(space["power"]))
    np.testing.assert_array_equal(duplicate(X, 2), space["power"](X, 2))
    assert duplicate(X, 2)[0, 0] == 8


# --- processes --------------------------------------------------------------------------------------------------------

_SCRIPT = """
import multiprocessing, pathlib, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import ipujax as ipu

@ipu.jit
def step(x):
    return 2 * x

@ipu.jit
def wrong(x):
    return ipu.IPUModel(num_ipus=3)

def plain(x):
    return x + 1

jitted = ipu.jit(plain)

if __name__ == "__main__":
    import cloudpickle
    x = np.ones(2, np.float32)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for fun, right in ((step, 2), (jitted, 2), (step, 2)):
            assert pool.submit(fun, x).result()[0] == right
        assert pool.submit(step.profile, x).result().cycles == step.profile(x).cycles
        for fun, kind, text in ((wrong, ipu.TargetError, "no system has 3 IPUs"), (step.lower, TypeError, "save")):
            try:
                pool.submit(fun, x).result()
            except kind as error:
                assert isinstance(error, ipu.IpuError) and text in str(error), error
            else:
                raise AssertionError(kind)
    pathlib.Path("functions").write_bytes(cloudpickle.dumps((step, jitted)))
    code = "import pickle; f, g = pickle.load(open('functions', 'rb')); print(int(f(1)), int(g(4)))"
    print(subprocess.check_output([sys.executable, "-c", code], text=True))
"""


def test_functions_profiles_and_errors_pass_between_processes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "script.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0 and run.stdout.split() == ["2", "5"], run.stderr
