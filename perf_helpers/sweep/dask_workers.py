"""Use Dask's workers as an executor for any lab; connect to a cluster, or start workers on this machine.

One experiment runs per device at a time. If a worker is killed, its experiment runs once more on another worker. A call
is sent to Dask only when a device is free. If Dask had all calls at once, a worker's death would count as a failure of
all calls waiting for that worker; the running call would be rerun silently (`distributed.scheduler.allowed-failures`).
"""

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

import perf_helpers
from trainmem.core import hardware
from trainmem.core.hardware import Machine
from trainmem.core.outcomes import Outcome
from trainmem.core.training import Experiment
from trainmem.measure.forkserver import SERVER
from trainmem.records import now
from trainmem.texts import positive, whole_number

RESOURCE = "device"  # a worker offers one per experiment that it may run at a time
INSTALL = "pip install 'perf-helpers[cluster]'"
PATIENCE_SECONDS = 20  # time limit for a scheduler to answer
# The packages whose versions change results.
DECISIVE_PACKAGES = ("python", "torch", "transformers", "accelerate", "bitsandbytes", "datasets", "numpy")
_ROUND_SECONDS = 0.3  # between two queries of the list of workers


class Killed(BrokenExecutor):
    """Two workers in a row were killed during a call; `attempts` has a dict per worker: name, begin, end, message."""

    def __init__(self, message: str, attempts: tuple[dict[str, Any], ...]):
        super().__init__(message)
        self.attempts = attempts  # as `records.Run.attempts`


class Displaced(RuntimeError):
    """A call reached another worker, which has taken over the address of the intended one."""


@dataclass
class _Worker:
    """A worker's name, address, machine and package versions, and the calls that it runs."""

    id: str  # unique, unlike the address, which a later worker may get
    name: str
    address: str
    devices: int  # experiments that it may run at a time
    machine: Machine
    versions: dict[str, str | None]
    running: set[Any] = field(default_factory=set)  # Dask's futures

    @property
    def host(self) -> str:
        return self.address.rpartition("://")[2].rpartition(":")[0]


class Workers(Executor):
    """Run calls on Dask's workers. Use it as a context manager, or call `shutdown` at the end.

    Workers may come and go. A worker is used if it offers the resource "device":
    `dask worker ... --resources "device=1"`.

    Args:
        client: a `distributed.Client`; it stays open.
        patience: seconds to wait while there is no worker.
        tell: called with a line of text for people, e.g. that a worker was killed or has other package versions.
    """

    def __init__(self, client, *, patience: float = 600, tell: Callable[[str], Any] = lambda line: None):
        self._client, self._patience = client, patience
        self._tell, self._tell_once = tell, functools.cache(tell)
        self._workers: dict[str, _Worker] = {}  # {address: worker} of the usable ones
        self._known: set[str] = set()  # addresses of all workers, including unusable ones
        self._calls: set[asyncio.Task] = set()  # calls without an outcome yet
        self._change = asyncio.Event()  # see `_wake`
        self._closed, self._failure = False, None  # the failure: the error that stopped all calls
        self._watching = self._begin(self._watch())

    def submit(self, function: Callable, /, *arguments, **options) -> Future:
        """Run `function(*arguments, **options)` on a worker and return its future, as any executor does.

        The future raises `Killed` if two workers were killed while running the call, ValueError if there is no worker.
        """
        if self._closed:
            raise self._failure or RuntimeError("these workers were shut down")
        return self._begin(self._performed(cloudpickle.dumps((function, arguments, options))))

    def seen(self) -> list[tuple[Machine, dict[str, str | None]]]:
        """Return (machine, package versions) of each worker."""
        return [(worker.machine, worker.versions) for worker in [*self._workers.values()]]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls. If `cancel_futures`, end the running calls. If `wait`, return when all calls ended."""
        self._closed = True
        if self._client.loop.asyncio_loop.is_running():  # otherwise the client was closed, which ended all calls
            ended = self._begin(self._stop(cancel_futures))
            if wait:
                ended.result()

    def __exit__(self, kind, *_) -> None:
        self.shutdown(cancel_futures=kind is not None)

    # ---- these run in the thread of the client's event loop, and therefore need no locks

    def _begin(self, work: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._client.loop.asyncio_loop)

    async def _stop(self, cancel: bool) -> None:
        for call in self._calls if cancel else ():
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        self._watching.cancel()

    async def _watch(self) -> None:
        """Keep `_workers`, the usable workers, up to date; if that fails, let every call fail with the same error."""
        alone_since = time.monotonic()
        try:
            while True:
                await self._look()
                if self._workers or not self._calls:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > self._patience:
                    raise ValueError(f"no worker connected within {self._patience:g} s: start one, or raise --wait")
                await asyncio.sleep(_ROUND_SECONDS)
        except Exception as error:
            self._closed, self._failure = True, error
            for worker in [*self._workers.values()]:
                await self._gone(worker)
            self._wake()

    async def _look(self) -> None:
        """Remove workers that left, add new ones; raise ValueError if there are workers, but none of them is usable."""
        connected = set(await self._ask(self._client.nthreads))
        for worker in [worker for address, worker in self._workers.items() if address not in connected]:
            await self._gone(worker)
        added, self._known, refused = [*(connected - self._known)], connected, []
        answers = await self._ask(self._client.run, introduce, workers=added, on_error="return") if added else {}
        for address, answer in answers.items():
            if isinstance(answer, OSError):  # the worker has left, or cannot be reached yet
                self._known.discard(address)
            elif isinstance(answer, Exception):
                problem = f"cannot run perf_helpers ({type(answer).__name__}: {answer}): install this version there"
                refused.append(f"the worker at {address} {problem}")
            elif not answer.devices:
                hint = f'start workers with --resources "{RESOURCE}=1", one per GPU'
                refused.append(f"worker {answer.name} offers no resource {RESOURCE!r}: {hint}")
            else:
                self._welcome(answer)
        if refused and not self._workers:
            raise ValueError(refused[0])

    def _welcome(self, worker: _Worker) -> None:
        own_versions = _versions()
        if differing := [name for name in own_versions if worker.versions[name] != own_versions[name]]:
            listed = ", ".join(f"{name} {worker.versions[name]} (here {own_versions[name]})" for name in differing)
            self._tell_once(
                f"worker {worker.name} has {listed}: do not compare its results with those of other versions"
            )
        self._workers[worker.address] = worker
        self._wake()

    async def _gone(self, worker: _Worker) -> None:
        """Remove a worker that left, and cancel the calls that it ran, so that `_performed` can run them elsewhere."""
        if self._workers.get(worker.address) is worker:
            del self._workers[worker.address]
        with contextlib.suppress(Exception):  # a closed client raises; its futures are cancelled already
            await self._client.cancel([*worker.running])

    def _wake(self) -> None:
        """Wake every call that waits for a device, so that it checks the workers again."""
        self._change.set()
        self._change = asyncio.Event()

    async def _ask(self, question: Callable, *arguments, **options) -> Any:
        """Call `question`, a method of the scheduler's client, with these arguments and options; return its result.

        Raises ValueError if the scheduler no longer answers.
        """
        try:
            return await question(*arguments, **options)
        except Exception as error:  # Dask raises many types
            raise ValueError(
                f"the scheduler stopped answering ({error}): restart it, then run the sweep again"
            ) from error

    async def _performed(self, content: bytes) -> Any:
        """Run a call on a worker and return the call's value; `content`: the pickled function with its arguments."""
        self._calls.add(call := asyncio.current_task())
        call.add_done_callback(self._calls.discard)
        number, attempts = uuid.uuid4().hex, []  # the failed attempts, as in `records.Run.attempts`
        while len(attempts) < 2:
            worker = await self._free({attempt["worker"] for attempt in attempts})
            start, sharing = now("milliseconds"), self._sharing(worker)
            target = {"key": f"perf_helpers-{number}-{len(attempts)}", "workers": [worker.address]}
            future = self._client.submit(attend, worker.id, number, sharing, content, **target, resources={RESOURCE: 1})
            worker.running.add(future)
            result = asyncio.ensure_future(future.result())
            try:
                value = await asyncio.shield(result)  # Dask may fetch several results at once: cancel none of them
                if isinstance(value, Outcome) and value.attempts:
                    value = value.replace(attempts=(*attempts, value.attempts[-1] | {"sharing": sharing}))
                return value
            except asyncio.CancelledError:  # the caller gave up: end the call's processes too
                await self._client.cancel([future])
                await asyncio.gather(result, return_exceptions=True)
                await self._client.run(end, number, workers=[worker.address], wait=False, on_error="ignore")
                raise
            except Exception as error:  # the call itself failed, unless its worker is gone
                if future.status == "error" and type(error).__name__ not in ("Displaced", "KilledWorker"):
                    raise
                await self._gone(worker)
                await self._ask(self._client.nthreads)  # raises if it is the scheduler that is gone
            finally:
                worker.running.discard(future)
                self._wake()
            lost = f"worker {worker.name} ({worker.address}) was killed or disconnected"
            attempt = {"worker": worker.name, "address": worker.address, "began": start, "ended": now("milliseconds")}
            attempts.append(attempt | {"status": "killed", "message": lost})
            if len(attempts) == 1:
                self._tell(f"{lost}: its row is run once more elsewhere")
        both = " and then ".join(attempt["message"] for attempt in attempts)
        raise Killed(f"{both}; the row is not tried a third time", tuple(attempts))

    async def _free(self, lost_by: set[str]) -> _Worker:
        """Wait until a worker has a free device, and return this worker.

        `lost_by`: names of workers that were killed or disconnected during the caller's call.
        """
        while not self._failure:
            others = [worker for worker in self._workers.values() if worker.name not in lost_by]
            for worker in others or self._workers.values():  # a name in `lost_by` only if there is no other
                if len(worker.running) < worker.devices:
                    return worker
            await self._change.wait()
        raise self._failure

    def _sharing(self, worker: _Worker) -> int:
        """Return how many experiments may share the cores of this worker's host; 1 for a worker with a GPU."""
        if worker.machine.kind != "cpu":
            return 1
        near = [other for other in self._workers.values() if other.host == worker.host and other.machine.kind == "cpu"]
        if (sharing := sum(other.devices for other in near)) > 1:
            shared = f"{sharing} experiments share the cores of {worker.host}"
            self._tell_once(f"{shared}: memory is exact, but they slow each other down")
        return sharing


# ---- connecting to workers, or starting them


@contextlib.contextmanager
def connected(
    scheduler: str = "",
    workers: int | None = None,
    patience: float = 600,
    tell: Callable[[str], Any] = lambda line: None,
) -> Iterator[Workers | None]:
    """Yield the workers of a scheduler, or workers on this machine that end with the context.

    Yield None if Dask is not installed and neither `scheduler` nor `workers` is given.

    Args:
        scheduler: address, e.g. "tcp://192.0.2.1:8786"; empty: start workers on this machine.
        workers: number of workers on this machine (default: one per GPU, or one if there is no GPU).
        patience: seconds to wait while there is no worker.
        tell: function that is called with each line of text to show to the user.

    Raises:
        ValueError: Dask is missing, no scheduler answers at that address, or there are fewer GPUs than workers.
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
    import distributed

    with contextlib.ExitStack() as stack:
        address = scheduler or stack.enter_context(_own_cluster(distributed, workers))
        try:
            client = stack.enter_context(distributed.Client(address, timeout=PATIENCE_SECONDS, set_as_default=False))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"no scheduler answers at {scheduler!r} ({error}): give its address and port") from None
        yield stack.enter_context(Workers(client, patience=patience, tell=tell))


@contextlib.contextmanager
def _own_cluster(distributed, count: int | None) -> Iterator:
    """Yield a Dask cluster of `count` workers on this machine, one process each; `distributed` is Dask's module."""
    import dask

    machine = hardware.describe()
    gpus = machine.gpus if machine.kind == "cuda" else ()
    count = count or max(1, len(gpus))  # one per GPU, or one
    if gpus and count > len(gpus):
        raise ValueError(f"workers={count}: each needs a GPU, but there are {len(gpus)}. Give at most {len(gpus)}")
    seen = [{"CUDA_VISIBLE_DEVICES": name} for name in _gpu_names(gpus)] or [{}] * count  # one GPU each
    quiet = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "dashboard": False}
    scheduler = {"cls": distributed.Scheduler, "options": quiet | {"port": 0}}
    with (
        tempfile.TemporaryDirectory(prefix="perf_helpers-") as folder,
        dask.config.set({"distributed.nanny.pre-spawn-environ": {}}),  # see `without_dasks_settings`
    ):
        common = quiet | {"nthreads": 1, "memory_limit": 0, "resources": {RESOURCE: 1}, "local_directory": folder}
        common |= {"preload": [__name__], "silence_logs": logging.CRITICAL}  # see `dask_setup`
        workers = {}
        for number, environment in enumerate(seen[:count]):
            options = common | {"env": {"DASK_LOGGING__DISTRIBUTED": "critical"} | environment}
            workers[f"{'gpu' if gpus else 'cpu'}-{number}"] = {"cls": distributed.Nanny, "options": options}
        with distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.CRITICAL) as cluster:
            yield cluster


def _gpu_names(gpus) -> list[str]:
    """Return each `Gpu`'s name for CUDA_VISIBLE_DEVICES: its UUID or, if unknown, its number among visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = visible if len(visible) == len(gpus) and all(visible) else [str(gpu.index) for gpu in gpus]
    return [gpu.uuid or number for gpu, number in zip(gpus, numbers, strict=True)]


# ---- these run inside a worker

_attended: set[str] = set()  # the calls that this process runs now


def dask_setup(worker) -> None:
    """Ignore Ctrl-C in a worker of this machine; Dask calls this function when the worker starts.

    A terminal sends Ctrl-C to workers too. A worker must live until the process that started it has ended all calls.
    """
    signal.signal(signal.SIGINT, lambda *_: None)


def introduce(dask_worker) -> _Worker:
    """Start a fork server in `dask_worker`, the worker where Dask runs this function, and describe this worker."""
    without_dasks_settings()
    SERVER.start()
    return _Worker(
        id=dask_worker.id,
        name=str(dask_worker.name),
        address=dask_worker.address,
        devices=min(int(dask_worker.state.total_resources.get(RESOURCE, 0)), dask_worker.state.nthreads),
        machine=hardware.describe(),
        versions=_versions(),
    )


def _versions() -> dict[str, str | None]:
    """Return {package: installed version; None: not installed} of `DECISIVE_PACKAGES` and of perf_helpers."""
    found = hardware.versions()
    return {name: found[name] for name in DECISIVE_PACKAGES} | {"perf_helpers": perf_helpers.__version__}


def without_dasks_settings() -> None:
    """Undo Dask's environment variables, under which experiments would run at another speed than elsewhere.

    Dask's nanny sets one thread for every library, and an allocator that returns memory to the system at once.
    """
    config = sys.modules.get("dask.config")
    settings = config.get("distributed.nanny.pre-spawn-environ", None) if config else None
    for name, value in (settings or {}).items():
        if os.environ.get(name) == str(value):
            del os.environ[name]


def attend(worker_id: str, number: str, sharing: int, content: bytes) -> Any:
    """Run a call in this worker, and return its value.

    Args:
        worker_id: id of the worker that the call was sent to.
        number: id of the call.
        sharing: number of experiments that share this machine's CPU; each gets an equal part of the cores.
        content: the pickled function with its arguments.

    Raises:
        Displaced: this worker is not `worker_id`, but has taken over its address; the call was not run.
    """
    from distributed import get_worker

    if get_worker().id != worker_id:
        raise Displaced
    function, arguments, options = cloudpickle.loads(content)
    arguments = [_on_its_part(each, sharing) if isinstance(each, Experiment) else each for each in arguments]
    _attended.add(number)
    try:
        return function(*arguments, **options)
    finally:
        _attended.discard(number)


def _on_its_part(experiment: Experiment, sharing: int) -> Experiment:
    if sharing < 2 or experiment.threads:
        return experiment
    return experiment.replace(threads=max(1, (hardware.this_machine().cpu_cores or 1) // sharing))


async def end(number: str) -> None:
    """Stop the call `number` on this worker by ending all experiments here; do nothing if other calls run here too."""
    while _attended == {number}:
        SERVER.end_forks()
        await asyncio.sleep(0.1)
