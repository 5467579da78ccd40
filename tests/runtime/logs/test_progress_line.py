"""The line of progress: on a terminal only, after a while, rewritten in place and cleared."""

from __future__ import annotations

import importlib
import io
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.lowering.passes import PASSES
from ipujax.runtime.compile import STEPS
from ipujax.runtime.logs import log
from ipujax.runtime.logs.log import LEVEL, Log
from ipujax.runtime.logs.step import attempt, count_part, step, watch_compilation

compile_module = importlib.import_module("ipujax.runtime.compile")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(written: str) -> str:
    """The last line that a terminal shows of written text."""
    cells: list[str] = []
    for part in written.rpartition("\n")[2].split("\r"):
        cells[: len(part)] = part
    return "".join(cells).rstrip()


def give_stderr(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a stream the standard error; pytest sets that of the process before each phase."""
    monkeypatch.setattr(log, "sys", SimpleNamespace(stderr=stream))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    give_stderr(stream, monkeypatch)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(log, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(log, "_EVERY_SECONDS", 0.01)
    return stream


def wait_for(terminal: Terminal, text: str) -> None:
    for _ in range(500):
        if text in terminal.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} is not in {terminal.getvalue()!r}")


def test_the_line_says_which_pass_how_far_and_how_long(terminal: Terminal) -> None:
    with watch_compilation("train", lambda: ("fuse", "lower", "cost")):
        with attempt(Log("fit"), 2, 4.0), step(Log("passes"), "lower"):
            wait_for(terminal, "% past attempts), attempt 2 at 4 cycles/byte, lower, pass 2 of 3")
        with step(Log("compile"), "cost"):
            wait_for(terminal, "% past attempts), cost, pass 3 of 3")
            assert "attempt 2" not in shown(terminal.getvalue())
    assert shown(terminal.getvalue()) == "" and "\n" not in terminal.getvalue()


def test_a_long_pass_counts_its_finished_parts(terminal: Terminal) -> None:
    with watch_compilation("train", lambda: ("fuse", "lower")), step(Log("passes"), "lower"):
        for _ in range(1_200):
            count_part("equations")
        wait_for(terminal, "ipujax: train: 0 s, lower, pass 2 of 2, 1,200 equations")
        with step(Log("passes"), "stages"):
            wait_for(terminal, "ipujax: train: 0 s, stages, pass 2 of 2")


def test_the_clock_goes_on_from_attempt_to_attempt_and_from_lowering_to_compiling(terminal: Terminal) -> None:
    with watch_compilation("train", lambda: ("lower",), spent_seconds=30.0):
        with attempt(Log("fit"), 1, 0.5):
            wait_for(terminal, "ipujax: train: 30 s, attempt 1 at 0.5 cycles/byte")
            assert "past attempts" not in terminal.getvalue()
        with attempt(Log("fit"), 2, 1.0), step(Log("passes"), "lower"):
            wait_for(terminal, "train: 30 s (100% past attempts), attempt 2 at 1 cycles/byte, lower, pass 1 of 1")


def test_time_of_lowering_is_time_of_the_compilation(terminal: Terminal) -> None:
    """Compiled apart from `lower`, a program has been in work for as long as both take."""
    lowered = ipu.jit(lambda x: jnp.tanh(x @ x.T), device=ipu.IPUModel(tiles_per_ipu=4)).lower(jnp.ones((8, 8)))
    slow = replace(lowered.planned, timings={**lowered.timings, "lower": 41.0})
    lowered.__dict__["planned"] = slow
    memory = compile_module.memory_report

    def slow(*args: object) -> object:
        wait_for(terminal, " s, attempt 1 at 0.5 cycles/byte, memory, ")
        return memory(*args)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "memory_report", slow)
        lowered.compile()
    assert any(f": {seconds} s, " in terminal.getvalue() for seconds in (41, 42, 43))


def test_the_line_is_cleared_when_a_step_fails(terminal: Terminal) -> None:
    with pytest.raises(ZeroDivisionError), watch_compilation("train", lambda: ("fuse",)), step(Log("passes"), "fuse"):
        wait_for(terminal, "fuse")
        raise ZeroDivisionError
    assert shown(terminal.getvalue()) == ""


def test_log_lines_hide_it(terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    monkeypatch.setattr(log, "_EVERY_SECONDS", 60)
    with watch_compilation("train", lambda: ("fuse",)):
        wait_for(terminal, "ipujax: train")
        Log("passes").info("a line")
        written = terminal.getvalue()
    before, _, _ = written.partition("[20")
    assert shown(before) == "" and written.endswith("a line\n")


@pytest.mark.parametrize("wide", [20, 200])
def test_the_line_is_no_wider_than_the_terminal(wide: int, terminal: Terminal, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(wide))
    with watch_compilation("a_function_of_a_long_name", lambda: ("fuse",)), step(Log("passes"), "fuse"):
        wait_for(terminal, "ipujax: a_function")
    assert max(len(part) for part in terminal.getvalue().split("\r")) < wide


@pytest.mark.parametrize(("is_terminal", "options"), [(False, None), (True, ipu.Options(progress=False))])
def test_nothing_is_shown_elsewhere_or_when_switched_off(is_terminal, options, monkeypatch) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    give_stderr(stream, monkeypatch)
    monkeypatch.setattr(log, "WAIT_SECONDS", 0)
    ipu.jit(jnp.sin, device=ipu.IPUModel(tiles_per_ipu=4), options=options).lower(jnp.ones(8)).compile()
    assert stream.getvalue() == ""


def test_a_call_shows_its_compilation(terminal: Terminal) -> None:
    def step(x: jax.Array) -> jax.Array:
        wait_for(terminal, f"ipujax: step: 0 s, trace, pass 1 of {1 + len(PASSES) + 1 + len(STEPS)}")
        return jnp.tanh(x @ x.T).sum()

    ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=4))(jnp.ones((8, 8)))
    assert shown(terminal.getvalue()) == ""


def test_progress_is_a_bool() -> None:
    with pytest.raises(ipu.ArgumentError, match=r"Options\.progress must be a bool"):
        ipu.Options(progress=1)  # type: ignore[arg-type]
