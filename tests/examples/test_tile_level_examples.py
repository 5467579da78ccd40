"""The examples of `examples/tile_level/`, each run as a program at small size."""

from __future__ import annotations

import pytest

from examples.tile_level import jacobi_stencil, n_body, tiled_qr

Printed = pytest.CaptureFixture[str]


def test_bodies_keep_their_energy(capsys: Printed) -> None:
    assert n_body.main(["--tiles", "4", "--bodies", "3", "--steps", "2"]) < 1e-3
    printed = capsys.readouterr().out
    assert "12 bodies on 4 tiles: energy" in printed and "cycles a step" in printed


def test_stencil_equals_numpy(capsys: Printed) -> None:
    assert jacobi_stencil.main(["--tiles", "4", "--rows", "2", "--columns", "8", "--iterations", "5"]) < 1e-6
    assert "cycles an iteration" in capsys.readouterr().out


def test_tiled_qr_is_a_decomposition(capsys: Printed) -> None:
    assert tiled_qr.main(["--tiles", "4", "--rows", "4", "--columns", "3"]) < 1e-5
    assert "on 4 tiles" in capsys.readouterr().out
