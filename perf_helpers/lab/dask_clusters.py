"""Where Dask's workers come from: a scheduler that is there, or a cluster of this machine's own."""

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from perf_helpers.lab import hardware
from perf_helpers.lab.dask_executor import RESOURCE, Workers

INSTALL = "pip install 'perf-helpers[cluster]'"
PATIENCE_SECONDS = 20  # until a scheduler answers


@contextlib.contextmanager
def connected(
    scheduler: str = "",
    workers: int | None = None,
    patience: float = 600,
    tell: Callable[[str], Any] = lambda line: None,
) -> Iterator[Workers | None]:
    """The workers of a scheduler; without its address those of a cluster of this machine's own, which ends with the
    context: one for each GPU, else one. None where Dask is not installed and nothing asks for it.

    Args:
        scheduler: address, as in "tcp://192.0.2.1:8786".
        workers: how many of this machine's own; None: one for each GPU, one without any.
        patience, tell: as in `Workers`.

    Raises:
        ValueError: Dask is missing, nobody answers at that address, or there are fewer GPUs than workers.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: give a whole number of at least 1")
    if scheduler and workers:
        raise ValueError("workers are started here, or a scheduler has some: give one of the two")
    if importlib.util.find_spec("distributed") is None:
        if scheduler or workers:
            raise ValueError(f"several workers need Dask: {INSTALL}")
        tell(f"one training after another, in this process; on several workers with Dask: {INSTALL}")
        yield None
        return
    distributed = importlib.import_module("distributed")
    with contextlib.ExitStack() as stack:
        if not scheduler:
            where = stack.enter_context(_own_cluster(distributed, workers))
        else:
            where = scheduler
        try:
            client = stack.enter_context(distributed.Client(where, timeout=PATIENCE_SECONDS, set_as_default=False))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"no scheduler answers at {scheduler!r} ({error}): give its address and port") from None
        yield stack.enter_context(Workers(client, patience=patience, tell=tell))


@contextlib.contextmanager
def _own_cluster(distributed, count: int | None) -> Iterator:
    """Workers on this machine, each in a process of its own: one for each GPU, which alone it sees, else one."""
    machine = hardware.describe()
    gpus = machine.gpus if machine.kind == "cuda" else ()
    count = count or max(1, len(gpus))
    if gpus and count > len(gpus):
        raise ValueError(f"workers={count}: each has a GPU, and there are {len(gpus)}")
    quiet = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "dashboard": False}
    silent = {"DASK_LOGGING__DISTRIBUTED": "critical"}  # what happens to workers is told in lines of our own
    with tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder:
        common = {"nthreads": 1, "memory_limit": 0, "resources": {RESOURCE: 1}, "local_directory": folder}
        common["preload"] = [__name__]  # see `dask_setup`
        each = [{"CUDA_VISIBLE_DEVICES": name} for name in _gpu_names(gpus)] or [{}] * count
        specification = {
            f"{'gpu' if gpus else 'cpu'}-{number}": {
                "cls": distributed.Nanny,  # which starts a killed worker anew
                "options": quiet | common | {"env": silent | environment, "silence_logs": logging.CRITICAL},
            }
            for number, environment in enumerate(each[:count])
        }
        own = importlib.import_module("dask").config.set({"distributed.nanny.pre-spawn-environ": {}})
        with (
            own,
            distributed.SpecCluster(
                workers=specification,
                scheduler={"cls": distributed.Scheduler, "options": quiet | {"port": 0}},
                silence_logs=logging.CRITICAL,
            ) as cluster,
        ):
            yield cluster


def dask_setup(worker) -> None:
    """What Dask calls in each of these workers as it starts. A terminal's Ctrl-C reaches them too, and is not theirs:
    who started them ends them, once what runs has ended."""
    signal.signal(signal.SIGINT, lambda *_: None)


def _gpu_names(gpus) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says of each GPU: its own name where it is known, for numbers count those visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = visible if len(visible) == len(gpus) and all(visible) else [str(gpu.index) for gpu in gpus]
    return [gpu.uuid or number for gpu, number in zip(gpus, numbers, strict=True)]
