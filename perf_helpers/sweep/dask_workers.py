"""Dask's workers as an executor for any lab, and where they come from.

One experiment at a time a device; a killed worker's is made once more, elsewhere. The client places every call itself
and never hands a worker more than it has devices. Were all calls given to Dask at once, it would count a worker's death
against every call that merely waited there, and make the one that ran up to three times more without a word
(`distributed.scheduler.allowed-failures`).
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

import perf_helpers
from perf_helpers.lab import hardware
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.lab.hardware import Machine
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.training import Experiment
from perf_helpers.records import now
from perf_helpers.texts import positive, whole_number

RESOURCE = "device"  # that a worker offers for each experiment it may perform at once, and each experiment takes
ATTEMPTS = 2  # of a call whose workers are killed
INSTALL = "pip install 'perf-helpers[cluster]'"
PATIENCE_SECONDS = 20  # until a scheduler answers
# What figures depend on: of two workers that differ in one of these, they are not one set.
TELLING = ("python", "torch", "transformers", "accelerate", "bitsandbytes", "datasets", "numpy")
_ROUND = 0.3  # seconds after which it is looked again which workers there are


class Killed(BrokenExecutor):
    """The workers that performed a call ended before it did; `attempts` as in `records.Run.attempts`."""

    def __init__(self, message: str, attempts: tuple[dict[str, Any], ...]):
        super().__init__(message)
        self.attempts = attempts


class Displaced(RuntimeError):
    """A call came to another worker than it was sent to, for that one is gone."""


@dataclass
class _Worker:
    """What a worker tells of itself, and what it performs."""

    id: str  # unlike its address it is never used again
    name: str
    address: str
    host: str
    devices: int  # experiments that it may perform at once
    machine: Machine
    versions: dict[str, str | None]
    running: set[Any] = field(default_factory=set)  # Dask's futures


class Workers(Executor):
    """Performs what it is given on Dask's workers. Use as a context manager, or `shutdown` it.

    Workers may come and go. Those count that offer the resource "device": `dask worker ... --resources "device=1"`.

    Args:
        client: a `distributed.Client`; it stays open.
        patience: seconds to wait for a worker where there is none.
        tell: called with a line for people: a worker that was killed, one whose packages differ.
    """

    def __init__(self, client, *, patience: float = 600, tell: Callable[[str], Any] = lambda line: None):
        self._client, self._patience, self._tell = client, patience, tell
        self._workers: dict[str, _Worker] = {}  # by address: those that can be used
        self._refused: dict[str, str] = {}  # by address: why one cannot
        self._calls: set[asyncio.Task] = set()  # that have no outcome yet
        self._news = asyncio.Event()  # see `_wake`
        self._told: set[str] = set()
        self._closed = False
        self._failure: Exception | None = None  # for which nothing is performed any more
        self._watching = self._begin(self._watch())

    def submit(self, function: Callable, /, *arguments, **options) -> Future:
        """As any executor's; the future fails with `Killed` where two workers were killed over it, and with ValueError
        where no worker can be had."""
        if self._closed:
            raise self._failure or RuntimeError("these workers were shut down")
        return self._begin(self._performed(cloudpickle.dumps((function, arguments, options))))

    def seen(self) -> list[tuple[Machine, dict[str, str | None]]]:
        """Machine and packages of each worker that there is."""
        return [(worker.machine, worker.versions) for worker in [*self._workers.values()]]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing more is taken. What runs is waited for; with `cancel_futures` it is ended, with its processes."""
        self._closed = True
        if self._client.loop.asyncio_loop.is_running():  # else the client was closed, which ended everything
            ended = self._begin(self._stop(cancel_futures))
            if wait:
                ended.result()

    def __exit__(self, kind, *_) -> None:
        self.shutdown(cancel_futures=kind is not None)

    # ------------------------------------------- what is done in the client's event loop, where nothing happens at once

    def _begin(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._client.loop.asyncio_loop)

    async def _stop(self, cancel: bool) -> None:
        for call in self._calls if cancel else ():
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._watching.cancel()

    def _wake(self) -> None:
        """Let whoever waits for a device look whether there is one now."""
        self._news.set()
        self._news = asyncio.Event()

    async def _watch(self) -> None:
        """Know which workers there are, for as long as that can be known."""
        alone_since = time.monotonic()
        try:
            while True:
                await self._look()
                if self._workers or not self._calls:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > self._patience:
                    raise ValueError(f"no worker connected within {self._patience:g} s: start one, or raise --wait")
                await asyncio.sleep(_ROUND)
        except Exception as error:
            self._closed, self._failure = True, error
            for worker in [*self._workers.values()]:
                await self._gone(worker)
            self._wake()

    async def _look(self) -> None:
        """Learn which workers there are."""
        there = set(await self._ask(self._client.nthreads))
        unknown = [*(there - self._workers.keys() - self._refused.keys())]
        asked = {"workers": unknown, "on_error": "return"}
        answers = await self._ask(self._client.run, introduce, **asked) if unknown else {}
        for worker in [worker for address, worker in self._workers.items() if address not in there]:
            await self._gone(worker)
        self._refused = {address: reason for address, reason in self._refused.items() if address in there}
        if self._refused and not self._workers and not unknown:  # no one else came meanwhile
            raise ValueError(next(iter(self._refused.values())))
        for address, answer in answers.items():
            if isinstance(answer, dict):
                self._welcome(_Worker(**answer))
            elif not isinstance(answer, OSError):  # of that kind is what comes of a worker that leaves meanwhile
                reason = f"{type(answer).__name__}: {answer}"
                self._refused[address] = (
                    f"the worker at {address} cannot run perf_helpers ({reason}): install this version there"
                )

    async def _ask(self, question: Callable[..., Awaitable], *arguments, **options) -> Any:
        """What the scheduler answers. Raises ValueError where it does not any more."""
        try:
            return await question(*arguments, **options)
        except Exception as error:  # of many kinds
            raise ValueError(
                f"the scheduler stopped answering ({error}): restart it, then run the sweep again"
            ) from error

    def _welcome(self, worker: _Worker) -> None:
        if not worker.devices:
            hint = f'start workers with --resources "{RESOURCE}=1", one per GPU'
            self._refused[worker.address] = f"worker {worker.name} offers no resource {RESOURCE!r}: {hint}"
            return
        ours = hardware.versions() | {"perf_helpers": perf_helpers.__version__}
        differing = [name for name in (*TELLING, "perf_helpers") if worker.versions[name] != ours[name]]
        if differing:
            said = ", ".join(f"{name} {worker.versions[name]} (here {ours[name]})" for name in differing)
            self._say_once(f"worker {worker.name} has {said}: do not compare its results with those of other versions")
        self._workers[worker.address] = worker
        self._wake()

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)

    async def _gone(self, worker: _Worker) -> None:
        """What a worker was performing that is not there any more is lost: `_performed` goes on."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
        with contextlib.suppress(Exception):  # of a client that is closed, whose futures are cancelled already
            await self._client.cancel([*worker.running])

    async def _performed(self, content: bytes) -> Any:
        """What a call returns; `content` is its pickled function with the arguments."""
        self._calls.add(call := asyncio.current_task())
        call.add_done_callback(self._calls.discard)
        number, attempts = uuid.uuid4().hex, []  # that failed, as in `records.Run.attempts`
        while len(attempts) < ATTEMPTS:
            worker = await self._free({attempt["worker"] for attempt in attempts})
            began, future = now("milliseconds"), self._sent(number, attempts, content, worker)
            result = asyncio.ensure_future(future.result())
            try:
                return await asyncio.shield(result)  # Dask may bring others' results with it
            except asyncio.CancelledError:  # nobody waits for it any more: its processes end too
                await self._client.cancel([future])
                await asyncio.gather(result, return_exceptions=True)
                await self._client.run(end, number, workers=[worker.address], wait=False, on_error="ignore")
                raise
            except Exception as error:
                # The second is Dask's own: it has tried in vain as often as its scheduler allows, which may be once.
                was_killed = isinstance(error, Displaced) or type(error).__name__ == "KilledWorker"
                if future.status == "error" and not was_killed:
                    raise
                await self._gone(worker)
                await self._ask(self._client.nthreads)  # it may be the scheduler that is gone
            finally:
                worker.running.discard(future)
                self._wake()
            said = f"worker {worker.name} ({worker.address}) was killed or disconnected"
            attempt = {"worker": worker.name, "address": worker.address, "began": began, "ended": now("milliseconds")}
            attempts.append(attempt | {"status": "killed", "message": said})
            if len(attempts) < ATTEMPTS:
                self._tell(f"{said}: its row is run once more elsewhere")
        every = " and then ".join(attempt["message"] for attempt in attempts)
        raise Killed(f"{every}; the row is not tried a third time", tuple(attempts))

    async def _free(self, lost_by: set[str]) -> _Worker:
        """A worker with a free device; for a call that was lost before, another one than lost it, if there is any."""
        while not self._failure:
            fitting = [worker for worker in self._workers.values() if worker.name not in lost_by]
            for worker in fitting or self._workers.values():
                if len(worker.running) < worker.devices:
                    return worker
            await self._news.wait()
        raise self._failure

    def _sent(self, number: str, attempts: list[dict[str, Any]], content: bytes, worker: _Worker):
        """Dask's future of a call, sent to this worker."""
        near = [other for other in self._workers.values() if other.host == worker.host and other.machine.kind == "cpu"]
        sharing = sum(other.devices for other in near) if worker.machine.kind == "cpu" else 1
        if sharing > 1:
            shared = f"{sharing} experiments share the cores of {worker.host}"
            self._say_once(f"{shared}: memory is exact, but they slow each other down")
        future = self._client.submit(
            attend,
            worker.id,
            number,
            tuple(attempts),
            sharing,
            content,
            key=f"perf_helpers-{number}-{len(attempts)}",
            workers=[worker.address],
            allow_other_workers=False,
            resources={RESOURCE: 1},
            retries=0,
            pure=False,
        )
        worker.running.add(future)
        return future


# ----------------------------------------------------------------------------------------- where workers come from


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
    whole_number("workers", 1 if workers is None else workers, most=1024)
    positive("wait", patience)
    if scheduler and workers:
        raise ValueError("--workers and --scheduler are both given: keep one of the two")
    if importlib.util.find_spec("distributed") is None:
        if scheduler or workers:
            raise ValueError(f"several workers need Dask: {INSTALL}")
        tell(f"Dask is not installed, so rows run one by one in this process. For several workers: {INSTALL}")
        yield None
        return
    distributed = importlib.import_module("distributed")
    with contextlib.ExitStack() as stack:
        where = scheduler or stack.enter_context(_own_cluster(distributed, workers))
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
        raise ValueError(f"workers={count}: each needs a GPU, but there are {len(gpus)}. Give at most {len(gpus)}")
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


def _gpu_names(gpus) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says of each GPU: its own name where it is known, for numbers count those visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = visible if len(visible) == len(gpus) and all(visible) else [str(gpu.index) for gpu in gpus]
    return [gpu.uuid or number for gpu, number in zip(gpus, numbers, strict=True)]


# ------------------------------------------------------------------------------------------------ inside a worker

_attended: set[str] = set()  # ids of the calls that this process performs just now


def dask_setup(worker) -> None:
    """What Dask calls as it starts a worker of this machine's own. A terminal's Ctrl-C reaches it too, and is not for
    it: who started it ends it, once what runs has ended."""
    signal.signal(signal.SIGINT, lambda *_: None)


def introduce(dask_worker) -> dict[str, Any]:
    """What this worker is, as a `_Worker`; and a fork server is started for it."""
    without_dasks_settings()
    SERVER.start()
    offered = dask_worker.state.total_resources.get(RESOURCE, 0)
    return {
        "id": dask_worker.id,
        "name": str(dask_worker.name),
        "address": dask_worker.address,
        "host": dask_worker.address.rpartition("://")[2].rpartition(":")[0],
        "devices": min(int(offered), dask_worker.state.nthreads),
        "machine": hardware.describe(),
        "versions": hardware.versions() | {"perf_helpers": perf_helpers.__version__},
    }


def without_dasks_settings() -> None:
    """Undo what Dask's nanny sets for the sums of its own tasks: one thread for every library, and an allocator that
    hands memory back at once. Experiments would train so, at another speed than anywhere else."""
    config = sys.modules.get("dask.config")
    told = config.get("distributed.nanny.pre-spawn-environ", None) if config else None
    for name, value in (told or {}).items():
        if os.environ.get(name) == str(value):
            del os.environ[name]


def attend(worker_id: str, number: str, attempts: tuple[dict, ...], sharing: int, content: bytes) -> Any:
    """Perform a call on the worker that it was sent to.

    Args:
        number: of the call, which makes it unlike any other.
        attempts: at this call, which failed.
        sharing: experiments that share this machine's CPU, each on its part of the cores.

    Raises:
        Displaced: another worker has come to have that one's address; nothing was performed.
    """
    if importlib.import_module("distributed").get_worker().id != worker_id:
        raise Displaced
    function, arguments, options = cloudpickle.loads(content)
    arguments = [_on_its_part(each, sharing) if isinstance(each, Experiment) else each for each in arguments]
    _attended.add(number)
    try:
        value = function(*arguments, **options)
    finally:
        _attended.discard(number)
    if isinstance(value, Outcome) and value.attempts:
        return value.replace(attempts=(*attempts, value.attempts[-1] | {"sharing": sharing}))
    return value


def _on_its_part(experiment: Experiment, sharing: int) -> Experiment:
    if sharing < 2 or experiment.threads:
        return experiment
    return experiment.replace(threads=max(1, (hardware.this_machine().cpu_cores or 1) // sharing))


async def end(number: str) -> None:
    """End the clean processes of a call, and any that it goes on to start, if it is the only one performed here."""
    while _attended == {number}:
        SERVER.end_forks()
        await asyncio.sleep(0.1)
