"""`ipujax profile` on a script that uses Keras."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipujax.cli import main
from tests.ipujax.cli.test_profile_command import rows, written


def test_keras_models_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
    import keras, numpy as np
    import ipujax.keras as ipu
    config = ipu.IPUConfig()
    config.ipu_model.tiles_per_ipu = 4
    with ipu.IPUStrategy(config).scope():
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).predict(np.ones((4, 4), "f"), verbose=0)
    """
    assert main(["profile", written(tmp_path, source)]) == 0
    assert [name for name in rows(capsys.readouterr().err) if name.endswith("_predict")]
