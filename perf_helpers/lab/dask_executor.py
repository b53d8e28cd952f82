"""Dask's workers as an executor: one experiment at a time a device; a killed worker's is made once more, elsewhere.

The client places every call itself and never hands a worker more than it has devices. Were all calls given to Dask at
once, it would count a worker's death against every call that merely waited there, and make the one that ran up to
three times more without a word (`distributed.scheduler.allowed-failures`).
"""

import contextlib
import importlib
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

import perf_helpers
from perf_helpers.lab import executors, hardware
from perf_helpers.lab.executors import Killed
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.lab.hardware import Machine
from perf_helpers.lab.training import Experiment

RESOURCE = "device"  # that a worker offers for each experiment it may perform at once, and each experiment takes
ATTEMPTS = 2  # of a call whose workers are killed
# What figures depend on: of two workers that differ in one of these, they are not one set.
TELLING = ("python", "torch", "transformers", "accelerate", "bitsandbytes", "datasets", "numpy")
_ROUND = 0.3  # seconds after which the dispatcher looks again which workers there are


class Displaced(RuntimeError):
    """A call came to another worker than it was sent to, for that one is gone."""


@dataclass(frozen=True)
class _Worker:
    """What a worker tells of itself."""

    id: str  # unlike its address it is never used again
    name: str
    address: str
    host: str
    devices: int  # experiments that it may perform at once
    machine: Machine
    versions: dict[str, str | None]


@dataclass
class _Call:
    """Something to be performed, until its future has an outcome."""

    id: str
    content: bytes  # the pickled function and its arguments
    future: Future
    attempts: list[dict[str, Any]] = field(default_factory=list)  # that failed, as in `records.Run.attempts`


@dataclass(frozen=True)
class _Running:
    call: _Call
    worker: _Worker
    sharing: int  # experiments that may run at once on this worker's CPU; 1 on a GPU
    began: str


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
        self._waiting: deque[_Call] = deque()
        self._running: dict[Any, _Running] = {}  # by Dask's future
        self._told: set[str] = set()
        self._wake, self._lock, self._closed = threading.Event(), threading.Lock(), False
        self._failure: BaseException | None = None  # for which nothing is dispatched any more
        self._thread = threading.Thread(target=self._dispatch, name="perf_helpers-workers", daemon=True)
        self._thread.start()

    def submit(self, function: Callable, /, *arguments, **options) -> Future:
        """As any executor's; the future fails with `Killed` where two workers were killed over it, and with ValueError
        where no worker can be had."""
        call = _Call(uuid.uuid4().hex, cloudpickle.dumps((function, arguments, options)), Future())
        call.future.add_done_callback(lambda _: self._wake.set())  # it may be cancelled
        with self._lock:
            if self._closed:
                raise self._failure or RuntimeError("these workers were shut down")
            self._waiting.append(call)
        self._wake.set()
        return call.future

    def machine(self) -> Machine:
        """That of a worker; waits for one."""
        return self.submit(hardware.describe).result()

    def versions(self) -> dict[str, str | None]:
        """A worker's packages; waits for one."""
        return self.submit(hardware.versions).result()

    def seen(self) -> list[tuple[Machine, dict[str, str | None]]]:
        """Machine and packages of each worker that there is."""
        return [(worker.machine, worker.versions) for worker in [*self._workers.values()]]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing more is taken. What runs is waited for; with `cancel_futures` it is ended, with its processes."""
        self._closed = True
        if cancel_futures:
            for call in [*self._waiting, *(running.call for running in [*self._running.values()])]:
                call.future.cancel()
        self._wake.set()
        if wait:
            self._thread.join()

    def __exit__(self, kind, *_) -> None:
        self.shutdown(cancel_futures=kind is not None)

    # ------------------------------------------------------------------------------------------------ the dispatcher

    def _dispatch(self) -> None:
        alone_since = time.monotonic()
        try:
            while not (self._closed and not self._waiting and not self._running):
                self._wake.clear()
                self._look()
                self._collect()
                self._place()
                if self._workers or not self._waiting:
                    alone_since = time.monotonic()
                elif time.monotonic() - alone_since > self._patience:
                    raise ValueError(f"no worker came within {self._patience:g} s")
                self._wake.wait(_ROUND)
        except Exception as error:
            self._failure = error
        with self._lock:
            self._closed = True
        while self._waiting or self._running:
            call = self._waiting.popleft() if self._waiting else self._running.popitem()[1].call
            _settle(call.future, error=self._failure)

    def _look(self) -> None:
        """Learn which workers there are."""
        try:
            there = set(self._client.nthreads())
            for known in (self._workers, self._refused):
                for address in known.keys() - there:
                    del known[address]
            unknown = [*(there - self._workers.keys() - self._refused.keys())]
            answers = self._client.run(introduce, workers=unknown, on_error="return") if unknown else {}
        except Exception as error:  # of many kinds
            raise ValueError(f"the scheduler does not answer any more ({error})") from error
        if self._refused and not self._workers and not unknown:  # no one else came meanwhile
            raise ValueError(next(iter(self._refused.values())))
        for address, answer in answers.items():
            if isinstance(answer, dict):
                self._welcome(_Worker(**answer))
            elif not isinstance(answer, OSError):  # of that kind is what comes of a worker that leaves meanwhile
                reason = f"{type(answer).__name__}: {answer}"
                self._refused[address] = f"the worker at {address} does not have this perf_helpers ({reason})"

    def _welcome(self, worker: _Worker) -> None:
        if not worker.devices:
            hint = f'start workers with --resources "{RESOURCE}=1", one for each GPU'
            self._refused[worker.address] = f"worker {worker.name} offers no resource {RESOURCE!r}: {hint}"
            return
        ours = hardware.versions() | {"perf_helpers": perf_helpers.__version__}
        differing = [name for name in (*TELLING, "perf_helpers") if worker.versions[name] != ours[name]]
        if differing:
            said = ", ".join(f"{name} {worker.versions[name]} (here {ours[name]})" for name in differing)
            self._say(f"worker {worker.name} has {said}: its figures and those of other versions are not one set", said)
        self._workers[worker.address] = worker

    def _say(self, line: str, once: str) -> None:
        if once not in self._told:
            self._told.add(once)
            self._tell(line)

    def _collect(self) -> None:
        """Settle what has finished, put back what was lost with its worker, end what was cancelled."""
        for future, running in [*self._running.items()]:
            call, worker = running.call, running.worker
            if call.future.cancelled():
                del self._running[future]
                self._end(future, running)
            elif future.status == "finished":
                with contextlib.suppress(TimeoutError, CancelledError, OSError):  # it is lost this moment: see below
                    value = future.result(timeout=30)
                    del self._running[future]
                    self._done(running, value)
            elif future.status == "error":
                del self._running[future]
                error = future.exception()
                if isinstance(error, Displaced):
                    self._workers.pop(worker.address, None)
                if isinstance(error, Displaced) or type(error).__name__ == "KilledWorker":  # where none is allowed
                    self._lost(future, running)
                else:
                    _settle(call.future, error=error)
            elif worker.address not in self._workers or future.status in ("cancelled", "lost"):
                del self._running[future]
                self._lost(future, running)

    def _done(self, running: _Running, value: Any) -> None:
        if place := getattr(value, "place", None):
            last = place.attempt(value) | {"sharing": running.sharing}
            value = value.replace(attempts=(*running.call.attempts, last))
        _settle(running.call.future, value)

    def _lost(self, future, running: _Running) -> None:
        """Put a call back whose worker has gone: once."""
        call, worker = running.call, running.worker
        future.cancel()
        said = f"worker {worker.name} ({worker.address}) was killed or left"
        attempt = {"worker": worker.name, "address": worker.address, "began": running.began, "ended": executors.now()}
        call.attempts.append(attempt | {"status": "killed", "message": said})
        if len(call.attempts) < ATTEMPTS:
            self._tell(f"{said}: what it did is done once more elsewhere")
            self._waiting.appendleft(call)
            return
        every = " and then ".join(attempt["message"] for attempt in call.attempts)
        _settle(call.future, error=Killed(f"{every}; not tried again", tuple(call.attempts)))

    def _end(self, future, running: _Running) -> None:
        """End what nobody waits for any more, with the processes that it started."""
        _settle(running.call.future)
        future.cancel()
        self._client.run(end, running.call.id, workers=[running.worker.address], on_error="ignore")

    def _place(self) -> None:
        """Hand what waits to devices that are free."""
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if call.future.cancelled():
                _settle(call.future)
            elif worker := self._free_for(call):
                self._send(call, worker)
            else:
                self._waiting.append(call)

    def _free_for(self, call: _Call) -> _Worker | None:
        """A worker with a free device; for a call that was lost before, another one than lost it, if there is any."""
        lost_by = {attempt["worker"] for attempt in call.attempts}
        fitting = [worker for worker in self._workers.values() if worker.name not in lost_by]
        busy = [running.worker.id for running in self._running.values()]
        free = (worker for worker in fitting or self._workers.values() if busy.count(worker.id) < worker.devices)
        return next(free, None)

    def _send(self, call: _Call, worker: _Worker) -> None:
        near = [other for other in self._workers.values() if other.host == worker.host and other.machine.kind == "cpu"]
        sharing = sum(other.devices for other in near) if worker.machine.kind == "cpu" else 1
        if sharing > 1:
            line = f"{sharing} experiments share the CPU of {worker.host}, on an equal part of its cores each"
            self._say(f"{line}: memory is exact, speeds disturb each other", line)
        future = self._client.submit(
            attend,
            worker.id,
            call.id,
            sharing,
            call.content,
            key=f"perf_helpers-{call.id}-{len(call.attempts)}",
            workers=[worker.address],
            allow_other_workers=False,
            resources={RESOURCE: 1},
            retries=0,
            pure=False,
        )
        self._running[future] = _Running(call, worker, sharing, executors.now())
        future.add_done_callback(lambda _: self._wake.set())


def _settle(future: Future, value: Any = None, error: BaseException | None = None) -> None:
    """Give a future its result, unless it was cancelled meanwhile."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


# ------------------------------------------------------------------------------------------------ inside the worker

_attended: set[str] = set()  # ids of the calls that this process performs just now


def introduce(dask_worker) -> dict[str, Any]:
    """What this worker is, as a `_Worker`; and a fork server is started for it."""
    executors.without_dasks_settings()
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


def attend(worker_id: str, call_id: str, sharing: int, content: bytes) -> Any:
    """Perform a call on the worker that it was sent to.

    Args:
        sharing: experiments that share this machine's CPU, each on its part of the cores.

    Raises:
        Displaced: another worker has come to have that one's address; nothing was performed.
    """
    if importlib.import_module("distributed").get_worker().id != worker_id:
        raise Displaced
    function, arguments, options = cloudpickle.loads(content)
    arguments = [_on_its_part(each, sharing) if isinstance(each, Experiment) else each for each in arguments]
    _attended.add(call_id)
    try:
        return function(*arguments, **options)
    finally:
        _attended.discard(call_id)


def _on_its_part(experiment: Experiment, sharing: int) -> Experiment:
    if sharing < 2 or experiment.threads:
        return experiment
    return experiment.replace(threads=max(1, (hardware.this_machine().cpu_cores or 1) // sharing))


def end(call_id: str) -> None:
    """End the clean processes of a call, and any that it goes on to start, if it is the only one performed here."""
    threading.Thread(target=_end, args=(call_id,), daemon=True).start()  # Dask has this asked in its own loop


def _end(call_id: str) -> None:
    while _attended == {call_id}:
        SERVER.end_forks()
        time.sleep(0.1)
