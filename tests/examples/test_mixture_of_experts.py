"""`examples/mixture_of_experts.py` on small settings: the layer's numbers, all-to-alls, losses, and refusals."""

from __future__ import annotations

from types import ModuleType

import jax
import numpy as np
import pytest

from tests.examples.loading import example

mixture_of_experts = example("mixture_of_experts")
SMALL = [
    *("--ipus", "1", "2", "4", "--experts", "4", "--groups", "4", "--tokens", "16"),
    *("--features", "16", "--steps", "2", "--tiles", "8"),
]


def test_tokens_travel_by_all_to_alls_and_losses_stay(mixture_of_experts: ModuleType) -> None:
    one, *others = mixture_of_experts.main(SMALL)
    assert one.collectives == {} and all(row.collectives["all_to_all"] == 3 for row in others)
    for row in others:
        np.testing.assert_allclose(row.losses, one.losses, rtol=1e-5)
        assert row.cycles == pytest.approx(row.cycles_by_hand, rel=0.1)


def test_the_layer_is_that_of_each_token_alone(mixture_of_experts: ModuleType) -> None:
    rng = np.random.default_rng(0)
    shapes = {"gate": (4, 3), "up": (3, 4, 8), "down": (3, 8, 4)}
    params = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tokens = rng.standard_normal((2, 5, 4)).astype(np.float32)
    # With room for all tokens of a group at one expert each token has its own.
    out = mixture_of_experts.mixture(params, tokens, 5, lambda x: x, lambda x: x)
    for token, result in zip(tokens.reshape(-1, 4), np.asarray(out).reshape(-1, 4), strict=True):
        probabilities = np.asarray(jax.nn.softmax(token @ params["gate"]))
        n = probabilities.argmax()
        expert = np.maximum(token @ params["up"][n], 0) @ params["down"][n]
        np.testing.assert_allclose(result, token + probabilities[n] * expert, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flags", [("--ipus", "3"), ("--tokens", "12")])
def test_flags_out_of_range_are_refused(
    mixture_of_experts: ModuleType, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        mixture_of_experts.main(list(flags))
    assert flags[0] in capsys.readouterr().err
