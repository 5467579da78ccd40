"""The answer to one question about a profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question.

    Args:
        question: what was asked.
        sentence: the answer.
        hint: what to try; empty when nothing is to be gained.
        subject: what it is about: an operation, "tile 3", "IPU 1", or a line of source; empty when unknown.
        share: how much of the whole that is, 0 to 1.
        section: the part of the report that shows more.
    """

    question: str
    sentence: str
    hint: str = ""
    subject: str = ""
    share: float = 0.0
    section: str = ""
