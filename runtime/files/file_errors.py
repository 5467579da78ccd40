"""Reasons to refuse a file, one class each; who opens files for users makes an `IpuError` of them."""

from __future__ import annotations


class FileError(ValueError):
    """A file that is refused; the text says why.

    Args:
        problem: the reason.
        expected: description of what is valid; empty if there is none.
        got: description of what the file has; empty if there is none.
    """

    def __init__(self, problem: str, expected: str = "", got: str = "") -> None:
        super().__init__(": expected ".join(filter(None, (problem, expected))) + (f", got {got}" if got else ""))
        self.problem = problem
        self.expected = expected
        self.got = got


class UnreadableError(FileError):
    """No regular file, or one that the system does not open."""


class ForeignError(FileError):
    """A file that is not of ipujax, or of another kind."""


class VersionError(FileError):
    """A file of another version of ipujax."""


class DamagedError(FileError):
    """Content that differs from what was written, or that no writer of this version writes."""
