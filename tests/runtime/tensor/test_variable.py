"""Origins: layers seen from calls, parts, and equality."""

from __future__ import annotations

import pytest

from ipujax.runtime.profile.step_costs import origin_of_row
from ipujax.runtime.tensor import OF_CALLER, Origin, caller_name, compose, visible_layer


@pytest.mark.parametrize(
    ("call", "inner", "expected"),
    [
        ("net/block[3]", f"{OF_CALLER}/attention/dense", "net/block[3]/attention/dense"),
        ("net/block[3]", OF_CALLER, "net/block[3]"),
        ("", f"{OF_CALLER}/dense", "dense"),
        ("net", "net/head", "net/head"),
        ("net", "", "net"),
        (f"{OF_CALLER}/mlp", f"{OF_CALLER}/dense", f"{OF_CALLER}/mlp/dense"),
    ],
)
def test_a_layer_as_seen_from_a_call(call: str, inner: str, expected: str) -> None:
    assert compose(Origin(layer=call), Origin(layer=inner)).layer == expected


def test_calls_in_calls_compose_in_any_order() -> None:
    outer = Origin(layer="net")
    call = Origin(layer=f"{OF_CALLER}/mlp")
    inner = Origin(layer=f"{OF_CALLER}/dense")
    assert compose(compose(outer, call), inner).layer == "net/mlp/dense"
    assert compose(outer, compose(call, inner)).layer == "net/mlp/dense"


def test_part_of_the_equation_overrides_that_of_the_call() -> None:
    call = Origin(part="backward")
    assert compose(call, Origin(part="recomputed")).part == "recomputed"
    assert compose(call, Origin()).part == "backward"


def test_line_and_callers_stay() -> None:
    inner = Origin("a.py:1 (f)", "scope", callers=("a.py:2 (g)",))
    recorded = compose(Origin("a.py:9 (h)"), inner)
    assert (recorded.line, recorded.path, recorded.callers) == (inner.line, inner.path, inner.callers)


def test_a_layer_without_its_caller() -> None:
    assert visible_layer(f"{OF_CALLER}/attention/dense") == "attention/dense"
    assert visible_layer(OF_CALLER) == ""
    assert visible_layer("net/dense") == "net/dense"


def test_parts_are_of_programs_with_gradients_alone_and_have_no_default() -> None:
    assert origin_of_row(Origin("a.py:1 (f)"), has_backward=True).part == ""
    assert origin_of_row(Origin(part="update"), has_backward=True).part == "update"
    assert origin_of_row(Origin(part="forward"), has_backward=False).part == ""


def test_layer_part_and_callers_are_no_part_of_equality() -> None:
    plain = Origin("a.py:1 (f)")
    told = Origin("a.py:1 (f)", layer="f", part="forward", callers=("a.py:2 (g)",))
    assert plain == told and hash(plain) == hash(told) and str(plain) == str(told) and repr(plain) == repr(told)


def test_names_that_differ_between_calls_are_those_of_the_call():
    first, second = (Origin(layer="net", names=(f"dense_{n}", "add")) for n in (3, 7))
    inner = Origin(layer=f"{OF_CALLER}/{caller_name(0)}")
    assert [compose(call, inner).layer for call in (first, second)] == ["net/dense_3", "net/dense_7"]
    nested = Origin(layer=OF_CALLER, names=(caller_name(0), "relu"))
    deep = Origin(layer=f"{OF_CALLER}/{caller_name(0)}/{caller_name(1)}")
    assert compose(compose(first, nested), deep).layer == "net/dense_3/relu"
    assert visible_layer(inner.layer) == ""
