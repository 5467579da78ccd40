"""Tutorials 1, 2 and 4 of the Poplar user guide: they print the output of the guide."""

from __future__ import annotations

import io
import re

import numpy as np

from tests.examples.poplar_examples import example


def test_poplar_tut1(capsys):
    h3 = example("tut1_variables").main()
    out, printed = capsys.readouterr()
    assert printed.splitlines() == [
        "v1-debug: {0,0,0,0}",
        "v1-debug: {1,1.5,2,2.5}",
        "v2-debug: {1,1.5,2,2.5}",
        "v4-0: {0,1,2,3,4,5,6,7,8,9}",
        "v4-1: {10,11,12,13,14,15,16,17,18,19}",
    ]
    assert out == ("Running program\nProgram complete\n\nh3 data:\n  0 0 0 0\n  0 1 1.5 2\n  0 0 0 0\n  0 0 0 0\n")
    assert h3.shape == (4, 4)


def test_poplar_tut2(capsys):
    example("tut2_operations").main()
    out, printed = capsys.readouterr()
    assert printed.startswith("v3: {\n {5,4.5},\n {4,3.5}\n}\n")
    # v3 + v2, and v1 plus the transpose of v2, by hand
    assert printed.endswith("v4: {\n {9,7.5},\n {6,4.5}\n}\nv5: {\n {5,3.5},\n {5,3.5}\n}\n")
    assert out == "Running program\nProgram complete\n"


def test_poplar_tut4():
    engine = example("tut4_profiling").main(out := io.StringIO(), num_tiles=64)
    text = out.getvalue()
    (error,) = re.findall(r"largest element: (\S+)", text)
    assert float(error) < 1e-5
    # The questions the tutorial asks can be answered from what it prints.
    assert re.search(r"Fullest tile:.*\(\s*\d+\.\d %\)", text)
    assert re.search(r"Cycles: +[\d,]+\n", text)
    assert {"m4", "m5"} <= set(re.findall(r"OnTileExecute \(.*\): (\w+)$", text, re.MULTILINE))
    assert re.search(r"Exchange: +[\d,]+ +\d+\.\d %", text)
    execution = engine.get_execution_profile()["simulation"]
    assert execution["cycles"] == engine.execution.cycles > 0
    assert np.isclose(engine.profile.seconds, engine.profile.cycles / engine.get_target().clock_hz)
