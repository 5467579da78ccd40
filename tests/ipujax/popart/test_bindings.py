"""PopART's Python names: each is here, or is listed with a reason.

`tests/data/popart_bindings.txt` has the public names of `python/popart/popart_core/popart.cpp` in
github:graphcore/popart at d2f20d7, "Class.member" or a name of the module. PopART's Python files derive classes from
some of the bound ones: the list has the names that programs use, as `Builder` for `_BuilderCore`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipujax import popart
from ipujax.popart.supported_operations import AttributeDefinition, OperandDefinition

NAMES = (Path(__file__).resolve().parents[2] / "data" / "popart_bindings.txt").read_text(encoding="utf-8").split()

_CONTEXT = "a class of context managers, which methods of a builder return: here contextlib's"
_DEBUG = "PopART's debug information; here an operation has the line and the name of its own"
_IR = "PopART's intermediate representation, which is not here"
_ERROR = "an argument of PopART's own code; here prepareDevice raises OutOfMemoryException"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("AttributeContextManager", "KeyValueContextManager", "NameContextManager"), _CONTEXT),
    **dict.fromkeys(("DebugInfo", "SourceLocation"), _DEBUG),
    **dict.fromkeys(("InferenceSession.getIr", "TrainingSession.getIr"), _IR),
    **dict.fromkeys(("OutOfMemoryError", "OutOfMemoryError.getProfilePath"), _ERROR),
    **dict.fromkeys(("OutOfMemoryError.getSummaryReport", "OutOfMemoryError.isSuccessful"), _ERROR),
    "Builder.aiOnnxMlOpset1": "no operator of ai.onnx.ml is PopART's; models with them are read",
    "Builder.embedReplicationFactor": "a note in the model that nothing reads: replicatedGraphCount",
    "InferenceSession.checkInplacingAmbiguity": "values are immutable",
    "InferenceSession.updateExternallySavedTensorLocations": "a session reads parameters when it is made",
    "TrainingSession.updateExternallySavedTensorLocations": "a session reads parameters when it is made",
    "packageHash": "no package was built",
}
# Class → an object with the members that a class does not show: attributes of objects, and methods made on demand.
OBJECTS: Mapping[str, Callable[[], Any]] = {
    "AccumulateOuterFragmentSettings": popart.AccumulateOuterFragmentSettings,
    "AiGraphcoreOpset1": lambda: popart.Builder().aiGraphcore,
    "Builder": popart.Builder,
    "ClipNormSettings": lambda: popart.ClipNormSettings.clipAllWeights(1.0),
    "Patterns": popart.Patterns,
    "SessionOptions": popart.SessionOptions,
    "TensorLocation": popart.TensorLocation,
    "TensorLocationSettings": popart.TensorLocationSettings,
}
# Classes that PopART's Python module has inside of others, which `getSupportedOperationsDefinition` returns.
INNER: Mapping[str, type] = {
    "OpDefinition.Attribute": AttributeDefinition,
    "OpDefinition.Input": OperandDefinition,
    "OpDefinition.Output": OperandDefinition,
}


def is_there(name: str) -> bool:
    """Return whether a name of the list is one of the package."""
    parts = name.split(".")
    inner = INNER.get(".".join(parts[:2]))
    if inner is not None:
        return all(hasattr(inner, part) for part in parts[2:])
    if len(parts) == 1:
        return hasattr(popart, name)
    return hasattr(popart, parts[0]) and hasattr(OBJECTS.get(parts[0], lambda: getattr(popart, parts[0]))(), parts[1])


def test_every_name_is_there_or_has_a_reason() -> None:
    assert len(NAMES) == len(set(NAMES)) > 700
    assert {name for name in NAMES if not is_there(name)} == set(ABSENT)


def test_names_that_do_not_exist_are_noticed() -> None:
    assert not is_there("nothing") and not is_there("Builder.nothing") and not is_there("OpDefinition.Input.nothing")


def test_versions_are_those_of_the_package() -> None:
    text = popart.versionString()
    assert text.startswith(".".join(map(str, popart.versionNumber())))


@pytest.mark.parametrize("value", [1, "float32", None])
def test_values_without_elements_have_no_information(value: Any) -> None:
    with pytest.raises(TypeError, match="an array"):
        popart.getTensorInfo(value)
