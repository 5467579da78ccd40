"""Checks of refusals: the error names the user's line, the one marked `# here`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ipujax.runtime.errors import IpuError


@contextmanager
def refused(error: type[IpuError], match: str) -> Iterator[None]:
    """Expects this error from the body, with a message that matches, at a line of the calling file marked `# here`."""
    file = Path(sys._getframe(2).f_code.co_filename)
    with pytest.raises(error, match=match) as caught:
        yield
    name, number = str(caught.value.where).split(" ")[0].split(":")
    assert name == file.name
    line = file.read_text(encoding="utf-8").splitlines()[int(number) - 1]
    assert "# here" in line, f"the error names line {number}: {line.strip()}"
