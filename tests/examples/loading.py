"""Examples as modules: they are scripts in a folder that is no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str, beside: str | None = None) -> Any:
    """A fixture of an example as a module.

    Args:
        name: its file, without ".py".
        beside: another example that it imports, as it can when it is run.
    """

    @pytest.fixture(scope="module")
    def loaded() -> Iterator[ModuleType]:
        spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            if beside is not None:
                patch.syspath_prepend(EXAMPLES)
            patch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)
            yield module
        sys.modules.pop(beside or "", None)

    return loaded
