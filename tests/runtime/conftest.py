"""Fixtures of the tests of profiles and of reports."""

from __future__ import annotations

import pytest

from ipujax.runtime.compile import Executable
from ipujax.runtime.report import Profile
from tests.runtime.profile.profile_helpers import trained_program


@pytest.fixture(scope="session")
def trained() -> Executable:
    """One step of training, compiled."""
    return trained_program()


@pytest.fixture(scope="session")
def profile(trained: Executable) -> Profile:
    """Its static profile."""
    return Profile(trained)
