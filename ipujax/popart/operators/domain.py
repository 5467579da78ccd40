"""The domain of PopART's operators, and the decorator that registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipujax.onnx import register

DOMAIN = "ai.graphcore"


def graphcore(op_type: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as an operator of ai.graphcore.

    Args:
        op_type: type of its nodes.
    """
    return register(DOMAIN, op_type)
