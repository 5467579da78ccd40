"""`examples/flax_transformer.py` on small settings: it learns as without the machine, and writes."""

from __future__ import annotations

import re
from types import ModuleType

import jax
import numpy as np
import pytest
from flax import nnx

import ipujax as ipu
from tests.examples.loading import example

CONTEXT = 8
WIDTH = 16
HEADS = 2
SMALL = f"--epochs 2 --steps 20 --batch 8 --context {CONTEXT} --width {WIDTH} --heads {HEADS} --layers 1".split()


transformer = example("flax_transformer")


def test_text_is_read_as_numbers_of_its_characters(transformer: ModuleType) -> None:
    text, letters = transformer.read()
    assert 'The "while" statement' in "".join(letters[n] for n in text) and len(set(letters)) == len(letters) < 256


def test_each_character_is_followed_by_the_next(transformer: ModuleType) -> None:
    first, second = (list(transformer.batches(np.arange(30), 4, 5, 2, epoch)) for epoch in (1, 2))
    for passages, following in (*first, *second):
        assert passages.shape == (4, 5)
        np.testing.assert_array_equal(following, passages + 1)
    assert not np.array_equal(first, second)


def test_learns_as_without_the_machine(transformer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses = transformer.main([*SMALL, "--sample", "0", "--tiles", "8"])
    on_ipu = capsys.readouterr().out
    assert losses[1] < losses[0] < np.log(len(transformer.read()[1]))
    costs = re.search(r"^a step: [\d,]+ cycles, [\d,]+ µs on a mk2\nfullest tile: [\d,]+ bytes\n", on_ipu, re.MULTILINE)
    assert costs is not None

    np.testing.assert_allclose(transformer.main([*SMALL, "--sample", "0", "--device", "cpu"]), losses, rtol=1e-4)
    assert capsys.readouterr().out == on_ipu.replace(costs[0], "")


def test_generated_text_has_known_characters(transformer: ModuleType) -> None:
    text, letters = transformer.read()
    model = transformer.Transformer(len(letters), CONTEXT, WIDTH, HEADS, 1)
    count = 5
    graph, params = nnx.split(model, nnx.Param)
    logits = jax.jit(lambda text: nnx.merge(graph, params)(text[None])[0, -1])
    expected = text[:CONTEXT]
    for key in jax.random.split(jax.random.key(transformer.SEED), count):
        letter = jax.random.categorical(key, logits(expected[-CONTEXT:]) / transformer.TEMPERATURE)
        expected = np.append(expected, letter)
    with ipu.default_device(ipu.IPUModel(tiles_per_ipu=8)):
        written = transformer.written(graph, params, text[:CONTEXT], count)
    np.testing.assert_array_equal(written, expected[CONTEXT:])


@pytest.mark.parametrize(
    "flags", [("--steps", "0"), ("--heads", "3"), ("--device", "mk9"), ("--tiles", "8", "--device", "cpu")]
)
def test_flags_that_make_no_sense_are_refused(
    transformer: ModuleType, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        transformer.main(list(flags))
    assert flags[0] in capsys.readouterr().err


def test_default_settings(transformer: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses = transformer.main([])
    assert len(losses) == 5 and losses[-1] < 1.9
    start = 'The "assert" statement\n'
    assert len(capsys.readouterr().out.partition(start)[2]) == 64 - len(start) + 300 + 1
    np.testing.assert_allclose(transformer.main(["--device", "cpu"]), losses, rtol=1e-2)
