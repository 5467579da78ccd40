"""Executors of other libraries: skipped, with the reason, where a library or its workers cannot start."""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from typing import Any

import pytest

import ipujax as ipu
from tests.ipujax.studies.swept_functions import ARGS, layer

GRID = {"internal_sync_cycles": [20, 90]}
FUNCTION = "tests.ipujax.studies.swept_functions:layer"


def assert_same_rows(executor: Any) -> None:
    assert ipu.sweep(FUNCTION, *ARGS, grid=GRID, plan="again", executor=executor) == ipu.sweep(
        layer, *ARGS, grid=GRID, plan="again"
    )


@pytest.mark.filterwarnings("ignore")  # of the library
def test_dask() -> None:
    distributed = pytest.importorskip("distributed", reason="the package distributed (of Dask) is not installed")
    with (
        distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        assert_same_rows(client.get_executor())


@pytest.mark.filterwarnings("ignore")
def test_ray() -> None:
    ray = pytest.importorskip("ray", reason="the package ray is not installed")

    class RayExecutor:
        """The executor of docs/studies.md."""

        def submit(self, function: Any, *args: Any) -> Future[Any]:
            future: Future[Any] = ray.remote(function).remote(*args).future()
            return future

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        assert_same_rows(RayExecutor())
    finally:
        ray.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_mpi() -> None:
    pytest.importorskip("mpi4py", reason="the package mpi4py is not installed")
    try:
        futures = importlib.import_module("mpi4py.futures")
    except RuntimeError as error:
        pytest.skip(f"mpi4py has no library of MPI: {str(error).splitlines()[0]}")
    with futures.MPIPoolExecutor(1) as executor:
        assert_same_rows(executor)
