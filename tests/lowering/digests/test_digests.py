"""Digests of values: different ones for values that differ anywhere, equal ones in every process."""

from __future__ import annotations

import copyreg
import pickle
import subprocess
import sys
import threading
from types import FunctionType
from typing import Any

import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.digests import NoDigestError, digest_of
from ipujax.lowering.poplin.vertex_kinds import KINDS
from ipujax.runtime.graph import Codelet
from ipujax.runtime.target import PRESETS
from ipujax.runtime.tensor import flat_mapping


def lambdas_of(module: str, *sources: str) -> list[FunctionType]:
    namespace = {"__name__": module}
    exec("\n".join(f"f{n} = {source}" for n, source in enumerate(sources)), namespace)
    return [value for key, value in namespace.items() if key[:1] == "f"]


def test_every_element_of_a_long_mapping_counts():
    starts = np.arange(3_000)
    tiles = np.arange(3_000, dtype=np.int32)
    changed = tiles.copy()
    changed[1_500] = 7
    assert digest_of(flat_mapping(3_000, starts, tiles)) != digest_of(flat_mapping(3_000, starts, changed))


def test_codelets_of_one_name_differ_by_their_code():
    def codelet(factor: int) -> Codelet:
        return Codelet("same", (), lambda: factor, lambda shapes, target: np.int64(factor))

    assert digest_of(codelet(1)) == digest_of(codelet(1)) != digest_of(codelet(2))


@pytest.mark.parametrize("module", ["ipujax.table", "models"])
def test_lambdas_of_one_module_differ_by_their_code(module):
    first, second, same_line = lambdas_of(module, "lambda x: x + 1", "lambda x: x * 2", "lambda x: x + 1")
    assert len({digest_of(first), digest_of(second), digest_of(same_line)}) == 3


@pytest.mark.parametrize("jit", [jax.jit, ipu.jit])
def test_compiled_functions_differ_by_their_code(jit):
    def shifted(amount: float) -> Any:
        return jit(lambda x: x + amount)

    assert digest_of(shifted(1.0)) == digest_of(shifted(1.0)) != digest_of(shifted(2.0))


def test_functions_of_ipujax_are_known_by_name():
    assert digest_of(KINDS) == digest_of(KINDS)
    assert len({digest_of(kind) for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("value", [threading.Lock(), (x for x in ()), sys.stdout, memoryview(b"")])
def test_values_whose_content_python_does_not_show_have_none(value):
    with pytest.raises(NoDigestError, match=f"a value of type .*{type(value).__name__} cannot be read"):
        digest_of(value)


class Row:
    """A value that pickle reads by its own means."""

    def __init__(self, value: int) -> None:
        self.value = value


class RowWithSetter(Row):
    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (0,), self.value, None, None, setattr


class RegisteredRow(Row):
    pass


class UnreadableRow(Row):
    def __reduce__(self) -> tuple[Any, ...]:
        raise pickle.PicklingError("of this process alone")


class RowWithBrokenItems(Row):
    def __reduce__(self) -> tuple[Any, ...]:
        return Row, (0,), None, map(int, ["of this process alone"])


class RowWithoutReduction(Row):
    def __reduce__(self) -> Any:
        return None


copyreg.pickle(RegisteredRow, lambda row: (list, (), None, iter([row.value]), None))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [RowWithSetter, RegisteredRow])
def test_values_with_a_reduction_of_their_own_differ_by_it(kind):
    assert digest_of(kind(1)) == digest_of(kind(1)) != digest_of(kind(2))


@pytest.mark.parametrize("kind", [UnreadableRow, RowWithBrokenItems, RowWithoutReduction])
def test_value_whose_reduction_cannot_be_read_has_none(kind):
    with pytest.raises(NoDigestError, match=f"{kind.__name__} cannot be read: .*(of this process alone|NoneType)"):
        digest_of(kind(1))


def test_equal_in_another_process():
    program = (
        "from ipujax.lowering.digests import digest_of; from ipujax.lowering.poplin.vertex_kinds import KINDS;"
        "from ipujax.runtime.target import PRESETS; print(digest_of(PRESETS['mk2'], KINDS))"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == digest_of(PRESETS["mk2"], KINDS)
