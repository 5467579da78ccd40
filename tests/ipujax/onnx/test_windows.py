"""Windows that slide over an array, from a node's attributes."""

from __future__ import annotations

import pytest

from ipujax.onnx.operators.window_attributes import slide


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_windows_that_need_no_padding_get_none(auto_pad: str) -> None:
    # The last window of a stride larger than the kernel ends before the last element.
    windows = slide([6], [1], strides=[2], auto_pad=auto_pad)
    assert (windows.before, windows.after, windows.counts) == ((0,), (0,), (3,))


def test_the_larger_half_of_padding_is_on_the_named_side() -> None:
    upper = slide([5], [4], auto_pad="SAME_UPPER")
    lower = slide([5], [4], auto_pad="SAME_LOWER")
    assert (upper.before, upper.after) == ((1,), (2,))
    assert (lower.before, lower.after) == ((2,), (1,))
