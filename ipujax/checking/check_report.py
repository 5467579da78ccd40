"""Report of a check: differences of results, and the first equation at which two computations of it part.

Input: figures of a check. Output: `CheckReport`, with its text, and `ResultMismatchError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipujax.runtime.errors import ResultMismatchError


@dataclass(frozen=True, slots=True)
class ResultDifference:
    """Differences of one result from plain JAX.

    Args:
        name: path of the result in the pytree, "result" if it is the only one.
        type: dtype and shape, "float32[8, 16]".
        program: largest absolute difference of the lowered program; infinite where only one has a number.
        tiles: likewise of the tile interpreter; None if it has not run.
        is_error: whether rounding does not explain them.
    """

    name: str
    type: str
    program: float
    tiles: float | None
    is_error: bool


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first equation whose value rounding does not explain.

    Args:
        found_in: what computes the value: "pass fuse", "the lowered program" or "the tile interpreter".
        primitive: primitive of the equation; "" if no equation parts, only a result.
        line: the user's line, `file.py:12 (loss)`; "" if there is none.
        layer: its layer, "" if there is none.
        type: dtype and shape of the value.
        index: element that differs most.
        expected: that element by plain JAX.
        got: that element as found.
    """

    found_in: str
    primitive: str
    line: str
    layer: str
    type: str
    index: tuple[int, ...]
    expected: str
    got: str

    def __str__(self) -> str:
        name = self.primitive or "a result"
        place = "".join(f" {word} {text}" for word, text in (("at", self.line), ("in", self.layer)) if text)
        element = f"{self.type}, element {list(self.index)}" if self.index else self.type
        return f"{name}{place}, by {self.found_in}: {element} is {self.got}, not {self.expected}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Findings of `ipu.check`.

    Args:
        function: name of the function.
        results: differences of each result.
        mismatch: the first equation at which two computations part; None if rounding explains all differences.
        equations: number of equations of the program whose values were compared.
        not_run: number of equations in branches and loops that did not run.
        without_operands: number of equations that read values which stay off the chip, and are compared only by what
            is computed from them.
        on_tiles: whether the tile interpreter ran.
        notes: what was not compared, and why.
    """

    function: str
    results: tuple[ResultDifference, ...]
    mismatch: Mismatch | None
    equations: int
    not_run: int
    without_operands: int
    on_tiles: bool
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all differences."""
        return self.mismatch is None

    @property
    def largest_difference(self) -> float:
        """Largest absolute difference of any result, by the program or the tile interpreter."""
        return max((max(row.program, row.tiles or 0.0) for row in self.results), default=0.0)

    def raise_mismatch(self) -> None:
        """Raise a mismatch as an error.

        Raises:
            ResultMismatchError: an equation parts from plain JAX.
        """
        if self.mismatch is None:
            return
        mismatch = self.mismatch
        raise ResultMismatchError(
            f"{self.function}: {mismatch.primitive or 'a result'} is computed wrongly by {mismatch.found_in}",
            where=mismatch.line or None,
            expected=f"{mismatch.expected}, element {list(mismatch.index)} of {mismatch.type} by plain JAX",
            got=f"{mismatch.got}, which rounding does not explain",
            hint="report this program: ipujax lowers it wrongly; ipu.CPU() computes it without a machine",
        )

    def summary(self) -> str:
        """Return the report as text: a line for each result, and one for the equation at which it parts."""
        verdict = "agrees with plain JAX" if self.agrees else "differs from plain JAX"
        lines = [f"{self.function} {verdict}: {self.equations:,} equations compared"]
        lines += [f"  first: {self.mismatch}"] if self.mismatch is not None else []
        for row in self.results:
            tiles = "" if row.tiles is None else f", tile interpreter {row.tiles:.3g}"
            kind = "error" if row.is_error else "rounding" if row.program or row.tiles else "equal"
            lines.append(f"  {row.name} {row.type}: program {row.program:.3g}{tiles} ({kind})")
        counts = {"did not run": self.not_run, "have operands off the chip": self.without_operands}
        lines += [f"  {count:,} equations {text}" for text, count in counts.items() if count]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.summary()
