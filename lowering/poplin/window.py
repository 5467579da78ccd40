"""Window of a convolution along one dimension of its field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd


@dataclass(frozen=True, slots=True)
class Window:
    """Index map from outputs and kernel elements to the input along one dimension.

    Output y and kernel element k meet the input element `(y · stride + k · rhs_dilation − padding[0]) / lhs_dilation`,
    or zero where there is none.
    """

    size: int
    kernel: int
    padding: tuple[int, int]
    stride: int
    lhs_dilation: int
    rhs_dilation: int

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        dilated = (self.size - 1) * self.lhs_dilation + 1 if self.size else 0
        window = (self.kernel - 1) * self.rhs_dilation + 1 if self.kernel else 0
        return max(0, (dilated + sum(self.padding) - window) // self.stride + 1)

    def without_skipped(self) -> tuple[int, int, Window]:
        """Returns first element and step of the input that windows meet, and the window over these elements."""
        # All steps of a window may have a common divisor. Its padding after the input has no meaning.
        steps = (self.stride if self.outputs > 1 else 0, self.rhs_dilation if self.kernel > 1 else 0)
        step = gcd(*steps)
        if self.lhs_dilation > 1 or step == 1 or self.size == 0:
            return 0, 1, self
        low = self.padding[0]
        if step == 0:  # one output, one kernel element: at most one input element
            step = self.size
        start = -low % step
        if start >= self.size:
            return 0, 1, self
        size = len(range(start, self.size, step))
        stride, dilation = (max(1, n // step) for n in steps)
        return (
            start,
            step,
            replace(self, size=size, padding=((low + start) // step, 0), stride=stride, rhs_dilation=dilation),
        )
