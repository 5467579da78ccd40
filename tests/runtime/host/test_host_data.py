"""Time of the host for batches, in profiles: per call, and the wait of IPUs."""

from __future__ import annotations

import json

import pytest

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.host.host_data import HostData
from ipujax.runtime.report import Profile
from tests.runtime.profile.profile_helpers import trained_program

HOST = HostData(batches=8, prepared_seconds=2.0, waited_seconds=0.5, batches_per_call=4)


def test_figures_are_those_of_a_call() -> None:
    assert (HOST.prepared_seconds_per_call, HOST.waited_seconds_per_call) == (1.0, 0.25)
    assert HOST.is_slower_than(0.9) and not HOST.is_slower_than(1.1)


@pytest.mark.parametrize(("is_ahead", "seconds", "idle"), [(False, 0.4, 1.0), (True, 0.4, 0.6), (True, 1.5, 0.0)])
def test_waits_less_for_batches_prepared_ahead(is_ahead: bool, seconds: float, idle: float) -> None:
    assert HostData(8, 2.0, 0.5, is_ahead, 4).idle_seconds(seconds) == pytest.approx(idle)


def test_figures_of_loops_add_up() -> None:
    twice = HOST + HOST
    assert twice == HostData(16, 4.0, 1.0, False, 4) and twice - HOST == HOST
    assert HostData(0, 0.0, 0.0).prepared_seconds_per_call == 0


def test_reports_have_host_data() -> None:
    plain = Profile(trained_program())
    profile = plain.with_host(HOST, batches_per_call=2)
    data = json.loads(json.dumps(profile.execution()))["hostData"]
    assert data == {
        "batches": 8,
        "preparedSeconds": 2.0,
        "waitedSeconds": 0.5,
        "isAhead": False,
        "batchesPerCall": 2,
    }
    assert "Prepared in:      500.000 ms a call" in profile.summary() and profile.is_host_bound
    assert "hostData" not in plain.execution() and "Host data" not in plain.summary()
    assert profile.cycles == plain.cycles


@pytest.mark.parametrize(("host", "batches"), [(3, 1), (HOST, 0), (HOST, 1.5), (HOST, True)])
def test_refuses_invalid_host_data(host: object, batches: object) -> None:
    with pytest.raises(ArgumentError, match="with_host"):
        Profile(trained_program()).with_host(host, batches)
