"""Errors that leave ipujax show the user's frames, as JAX shows its own, and as `jax_traceback_filtering` asks."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.tracebacks import UnfilteredTraceback, show_user_frames

X = np.ones((4, 3), np.float32)


@ipu.jit
def reading_json(x: jax.Array) -> jax.Array:
    json.loads("{")
    return x


@ipu.jit
def square(x: jax.Array) -> jax.Array:
    return x @ x


@ipu.jit
def nested(x: jax.Array) -> jax.Array:
    return ipu.pipeline(ipu.pipeline(jnp.sum, micro_batches=2), micro_batches=2)(x)


def loss(fun: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: fun(x).sum()


# What is called, the type of its error, and the innermost function of the user's.
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "call": (lambda: reading_json(X), json.JSONDecodeError, "raw_decode"),
    "lower": (lambda: reading_json.lower(X), json.JSONDecodeError, "raw_decode"),
    "trace": (lambda: reading_json.trace(X), json.JSONDecodeError, "raw_decode"),
    "profile": (lambda: reading_json.profile(X), json.JSONDecodeError, "raw_decode"),
    "gradient": (lambda: jax.grad(loss(reading_json))(X), json.JSONDecodeError, "raw_decode"),
    "jit of it": (lambda: jax.jit(reading_json)(X), json.JSONDecodeError, "raw_decode"),
    "inner function": (lambda: ipu.jit(loss(reading_json))(X), json.JSONDecodeError, "raw_decode"),
    "pipelines": (lambda: nested(X), ipu.ArgumentError, "nested"),
    "pipelines, lowered": (lambda: nested.lower(X), ipu.ArgumentError, "nested"),
    "pipelines without ipu.jit": (lambda: ipu.pipeline(nested, micro_batches=2)(X), ipu.ArgumentError, "nested"),
    "argument": (lambda: square("x"), TypeError, "<lambda>"),
    "settings": (lambda: ipu.jit(3), ipu.ArgumentError, "<lambda>"),
    "keyword": (lambda: ipu.Options(recomputed="all"), ipu.ArgumentError, "<lambda>"),
    "device": (lambda: ipu.IPUModel(3), ipu.IpuError, "<lambda>"),
}


def error_of(call: Callable[[], Any], kind: type[Exception] = Exception) -> Exception:
    with pytest.raises(kind) as raised:
        call()
    return raised.value


def files(error: BaseException | None) -> list[str]:
    return [] if error is None else [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def of_ipujax(error: BaseException | None) -> list[str]:
    return [file for file in files(error) if file.startswith(f"{ipu.__path__[0]}/")]


@pytest.fixture
def filtering(request: pytest.FixtureRequest) -> Iterator[str]:
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", request.param)
    yield request.param
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.parametrize("label", CALLS)
def test_frames_are_those_of_the_user(label: str) -> None:
    call, kind, function = CALLS[label]
    error = error_of(call, kind)
    assert traceback.extract_tb(error.__traceback__)[-1].name == function
    printed = "".join(traceback.format_exception(error))
    assert f"{ipu.__path__[0]}/" not in printed and "/jax/" not in printed
    assert printed.count("JAX_TRACEBACK_FILTERING") == 1


def test_frames_of_jax_that_the_user_called_are_left_to_jax() -> None:
    with_ipujax, plain = (error_of(lambda fun=fun: fun(X), TypeError) for fun in (square, jax.jit(lambda x: x @ x)))
    assert files(with_ipujax)[-3:] == files(plain)[-3:] and not of_ipujax(with_ipujax)


@pytest.mark.parametrize("filtering", ["off"], indirect=True)
@pytest.mark.parametrize("label", ["call", "pipelines", "argument"])
def test_all_frames_are_shown_when_asked_for(filtering: str, label: str) -> None:
    error = error_of(*CALLS[label][:2])
    assert of_ipujax(error) and not hasattr(error, "__notes__")


@pytest.mark.parametrize("filtering", ["remove_frames"], indirect=True)
def test_removed_frames_are_in_the_cause(filtering: str) -> None:
    error = error_of(*CALLS["settings"][:2])
    assert not of_ipujax(error) and isinstance(error.__cause__, UnfilteredTraceback) and of_ipujax(error.__cause__)


@pytest.mark.parametrize("filtering", ["tracebackhide"], indirect=True)
def test_frames_are_marked_for_ipython(filtering: str) -> None:
    error = error_of(*CALLS["settings"][:2])
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    hidden = [frame.f_code.co_filename for frame in frames if "__tracebackhide__" in frame.f_locals]
    assert hidden == of_ipujax(error) != []


@pytest.mark.parametrize(("kind", "is_shown"), [("AssertionError", True), ("ValueError", True), ("IpuError", False)])
def test_a_fault_of_ipujax_keeps_its_frames(kind: str, is_shown: bool) -> None:
    code = compile(f"raise {kind}('fault')", ipu.__file__, "exec")
    error = error_of(lambda: exec(code, {"IpuError": ipu.IpuError}))
    boundary = error.__traceback__.tb_next.tb_next if error.__traceback__ else None  # as where ipujax catches it
    error.__traceback__ = boundary
    show_user_frames(error)
    assert bool(of_ipujax(error)) == is_shown
