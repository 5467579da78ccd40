"""`examples/sharded_transformer.py` on small settings: layouts, collectives, losses, and refusals."""

from __future__ import annotations

from types import ModuleType

import jax
import numpy as np
import pytest

from tests.examples.loading import example

sharded_transformer = example("sharded_transformer")
SMALL = [
    *("--width", "32", "--heads", "2", "--length", "8", "--batch", "8"),
    *("--micro-batches", "2", "--steps", "2", "--tiles", "8"),
]


def test_every_layout_has_the_losses_of_jax(sharded_transformer: ModuleType) -> None:
    rows = sharded_transformer.main(SMALL)
    assert [row.layout.num_ipus for row in rows] == [1, 2, 2, 2, 8]
    assert [set(row.collectives) for row in rows] == [set(), {"data"}, {"model"}, set(), {"data", "model"}]
    params = sharded_transformer.init(32, 2)
    tokens = sharded_transformer.batch_of(8, 8)
    loss = sharded_transformer.make_loss(sharded_transformer.Layout())
    reference = []
    for _ in range(2):
        value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
        params = jax.tree.map(lambda p, g: p - sharded_transformer.LEARNING_RATE * g, params, grads)
        reference.append(float(value))
    for row in rows:
        np.testing.assert_allclose(row.losses, reference, rtol=1e-5)


def test_each_axis_saves_cycles(sharded_transformer: ModuleType) -> None:
    one, *others = sharded_transformer.main(["--steps", "0"])
    assert all(row.cycles < one.cycles for row in others)
    assert min(others, key=lambda row: row.cycles).layout.num_ipus == 8


@pytest.mark.parametrize("flags", [("--heads", "3"), ("--width", "130"), ("--batch", "12")])
def test_flags_out_of_range_are_refused(
    sharded_transformer: ModuleType, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sharded_transformer.main(list(flags))
    assert flags[0] in capsys.readouterr().err
