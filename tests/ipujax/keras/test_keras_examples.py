"""Programs as in Keras' guides and code examples, in the scope of an `IPUStrategy`, against stock Keras."""

from __future__ import annotations

import pytest

from tests.ipujax.keras.keras_examples import EXAMPLES
from tests.ipujax.keras.test_strategy import assert_alike, both


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_program_gives_the_numbers_of_stock_keras(name: str) -> None:
    """Losses and metrics of each epoch, evaluation, predictions, and the state that is left."""
    example = EXAMPLES[name]
    assert_alike(both(example.make, example.use, **example.compiled), rtol=1e-4)
