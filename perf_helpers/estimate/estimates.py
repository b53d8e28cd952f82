"""Peak memory of a training, predicted without running it: what is asked and what is answered.

The way of a question: `estimate` asks `prediction.predict` in a clean process, which follows the training on fake
tensors (`trace`) and asks what operations hide (`operator_workspaces`). What clean processes learn of operations is
kept for the next ones (`Knowledge`).
"""

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from perf_helpers import cards
from perf_helpers.estimate import prediction
from perf_helpers.estimate.allocator_replay import place, save
from perf_helpers.estimate.allocator_settings import Settings, release
from perf_helpers.estimate.prediction import Device, MemoryEstimate, Tell
from perf_helpers.lab import hardware, processes, progress
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment
from perf_helpers.texts import arguments_of_kind, shown, whole_number

_MOST_LEARNED_BYTES = 64 * 2**20  # that are kept of clean processes


def estimate(
    task: Task | str,
    *,
    name: str = "",
    card: str | None = None,
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | None = None,
    allocator_settings: str = "",
    torch_version: str | None = None,
    training: bool = True,
    optimizer: Callable | None = None,
    function: Callable[[Task], Any] | None = None,
    processes: int = 1,
    snapshot: str | os.PathLike | None = None,
    timeout: float = 300,
    **arguments,
) -> MemoryEstimate:
    """Predict the peak memory of a training, or of inference, without running it.

    On "cpu" the prediction is what `Lab.train` counts. On "cuda" it is the allocator's peak on a GPU that need not be
    there; `assumptions` names what was modelled. A question that was asked before is answered from memory.

    Args:
        task: the model and its data; of a text, a `Task` of that model.
        name: what the estimate is called in tables and pictures.
        card: a GPU by its name in `cards.CARDS`, e.g. "h100", here or not: "cuda", its compute capability and memory.
        device: "cpu" or "cuda"; None: this machine's.
        compute_capability: of the GPU, e.g. (9, 0) for an H100; None: the card's, this machine's, else (9, 0).
        device_memory: bytes that the GPU has for the allocator, the context taken off: near its end cached segments are
            given back, and what does not fit is told by `is_too_large`. None: the card's, else enough for anything.
        allocator_settings: what PYTORCH_CUDA_ALLOC_CONF is to say, e.g. "expandable_segments:True".
        torch_version: whose allocator and workspaces are meant on "cuda", e.g. "2.10" (`allocator_settings.RELEASES`);
            all else is that of the installed torch. None: the installed one's. A newer release than all of them is
            answered by the rules of the newest, with a warning.
        training: False: forward passes without gradients on `per_device_eval_batch_size` samples.
        optimizer: function (model, training arguments) -> torch optimizer, for one that `optim` does not name.
        function: a loop of one's own that takes the task, as `Lab.run` does.
        processes: ranks of a data-parallel training; the figures are those of one rank.
        snapshot: a file to which the allocator's memory is written, and all that led to it from the loading of the
            model on, for the viewer of torch's memory snapshots; on "cuda" only. It ends where there is no room.
        timeout: seconds that the prediction may take.
        arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

    Raises:
        ValueError: an unknown argument, a value out of range, a model or an operation that cannot be followed, compiled
            code, or no prediction within `timeout` (or within what `processes.within` leaves).
    """
    import cloudpickle

    arguments_of_kind(estimate, locals())
    task = Task(task) if isinstance(task, str) else task
    whose = target(device, compute_capability, device_memory, allocator_settings, torch_version, card)
    experiment = Experiment(
        name=name or task.model,
        task=task,
        arguments=Arguments.of(arguments, also=estimate.__annotations__),
        function=cloudpickle.dumps(function) if function else None,
        optimizer=cloudpickle.dumps(optimizer) if optimizer else None,
        training=training,
        processes=processes,
    )
    if experiment.arguments.compiles:
        raise ValueError(OF_COMPILED)
    key = (repr(experiment.replace(name="")), task.identity(), whose)
    made, file = KNOWLEDGE.estimates.get(key), None
    if snapshot is not None:
        file = place(snapshot)
        if whose.kind != "cuda":
            raise ValueError("a snapshot shows CUDA's allocator: choose device='cuda'")
    if not made or file:
        began, job = time.perf_counter(), (prediction.predict, experiment, whose, bool(file))
        with progress.percent(f"estimating {task.model}") as bar:
            more = {"timeout": timeout, "on_percent": lambda percent: bar.update(percent - bar.n)}
            made, log = KNOWLEDGE.ask(*job, model=task.model, **more)
        made = dataclasses.replace(made, seconds=time.perf_counter() - began)
        if file:
            save(file, log, whose.settings, whose.memory_bytes, whose.rules)
    KNOWLEDGE.estimates[key] = dataclasses.replace(made, name=experiment.name)  # listed under its latest name
    return KNOWLEDGE.estimates[key]


OF_COMPILED = (
    "torch_compile: what compiled code keeps is its compiler's choice, which no estimate follows. Measure it with "
    "lab.train(..., torch_compile=True), or ask without it: that is the recipe as it is written"
)


def estimates_so_far() -> list[MemoryEstimate]:
    """Every estimate that this process has made, in order."""
    return list(KNOWLEDGE.estimates.values())


def target(
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    device_memory: int | None = None,
    allocator_settings: str = "",
    torch_version: str | None = None,
    card: str | None = None,
) -> Device:
    """Whose memory is to be predicted; arguments and errors are those of `estimate`."""
    arguments_of_kind(target, locals())
    if card is not None:
        known = cards.named(card)
        device, compute_capability = "cuda" if device is None else device, compute_capability or known.capability
        device_memory = known.memory_bytes - known.context_bytes if device_memory is None else device_memory
    cards.check_capability(compute_capability or cards.DEFAULT_CAPABILITY)
    machine = hardware.describe()
    kind = machine.kind if device is None else device
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={shown(device)}: choose 'cpu' or 'cuda'")
    if kind == "cpu":
        if torch_version is not None:
            raise ValueError(f"torch_version={torch_version!r} is of CUDA's allocator: choose device='cuda'")
        return Device(kind)
    here = next((gpu.capability for gpu in machine.gpus if gpu.capability), cards.DEFAULT_CAPABILITY)
    capability, rules = tuple(compute_capability or here), release(torch_version)
    Settings.parse(allocator_settings, rules.torch)  # says what is wrong with them
    if device_memory is not None:
        whole_number("device_memory", device_memory, 0, 2**60)
    return Device(kind, capability, allocator_settings, device_memory, rules)


class Knowledge:
    """What is kept in this process of its clean ones: their estimates, and what they learnt of operations and models.
    Each begins with what earlier ones learnt: so the second question about a model takes a fraction of the time. Of too
    much the oldest is forgotten, and would be learnt again."""

    def __init__(self):
        self.estimates: dict[tuple, MemoryEstimate] = {}  # by what was asked, in order
        self._learned: deque[bytes] = deque()  # the news that `prediction.with_known` returns

    def ask(self, function: Callable, *arguments, model: str, timeout: float, on_percent: Tell | None = None) -> Any:
        """What a function such as `prediction.predict` answers to these arguments in a clean process, within `timeout`
        seconds. `model` is named in messages; `on_percent` is told how far it is, from 0 to 100.

        Raises:
            ValueError: the function raised `Invalid`, or its process failed or took too long.
        """
        job = prediction.with_known, function, arguments, [*self._learned]
        try:
            answer, learned = processes.call(*job, timeout=timeout, on_percent=on_percent)
        except processes.Failed as failed:
            if failed.outcome.status == "timed out":
                raise ValueError(f"{model} was given up, {failed}: give it more time with timeout=") from None
            raise ValueError(f"{model} cannot be followed on fake tensors: {failed}") from None
        if learned:
            self._learned.append(learned)
        while sum(map(len, self._learned)) > _MOST_LEARNED_BYTES:
            self._learned.popleft()
        return answer


KNOWLEDGE = Knowledge()  # of this process, whoever asks: lessons, the advisor, the explorers' threads
