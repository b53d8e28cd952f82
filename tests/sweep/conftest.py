"""Fixtures for the tests of sweeps: Dask's workers."""

import logging

import pytest


@pytest.fixture(scope="session")
def cluster():
    """Yield a Dask cluster in processes of its own: two workers with two threads and one device each."""
    distributed = pytest.importorskip("distributed", reason="pip install perf-helpers[cluster]")
    each = {"threads_per_worker": 2, "resources": {"device": 1}, "memory_limit": 0}
    quiet = {"dashboard_address": "127.0.0.1:0", "silence_logs": logging.CRITICAL}
    with distributed.LocalCluster(n_workers=2, processes=True, **each, **quiet) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    """Wait until both workers are connected, for an earlier test may have killed one; yield a client of the cluster."""
    with pytest.importorskip("distributed").Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(2)
        yield client


@pytest.fixture
def elsewhere(client):
    """Yield a function that takes addresses of workers (default: all workers) and makes these workers report another
    machine and another torch version.
    """
    requested = []

    def pretend():
        from dataclasses import replace

        from trainmem.core import hardware

        hardware.real = hardware.describe, hardware.versions
        hardware.describe = lambda: replace(hardware.real[0](), name="another machine")
        hardware.versions = lambda: hardware.real[1]() | {"torch": "1.0"}

    def undo():
        from trainmem.core import hardware

        hardware.describe, hardware.versions = hardware.real

    def make(*addresses):
        requested.append([*addresses] or None)
        client.run(pretend, workers=requested[-1])

    yield make
    for addresses in requested:
        client.run(undo, workers=addresses)
