"""Answer to one question about a profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one question.

    Args:
        question: in words.
        sentence: the answer; empty where the question does not arise.
        hint: a change to try; empty when no change promises a gain.
        subject: of the answer: an operation, "tile 3", "IPU 1", or a line of source; empty when unknown.
        share: of the run, or of the tile's memory, that the subject takes; above 1 for a tile without enough memory.
        section: of the page with details.
    """

    question: str
    sentence: str
    hint: str = ""
    subject: str = ""
    share: float = 0.0
    section: str = ""
