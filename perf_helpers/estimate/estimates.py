"""Peak memory of a training, predicted without running it: what is asked and what is answered.

The way of a question: `estimate` asks `prediction.predict` in a clean process, which follows the training on fake
tensors (`trace`), extrapolates to all layers (`layers`) and asks what operations hide (`probe`). What clean processes
learn of operations is kept for the next ones (`knowledge`).
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from perf_helpers.estimate import prediction
from perf_helpers.estimate.allocator import DEFAULT_CAPABILITY
from perf_helpers.estimate.knowledge import KNOWLEDGE
from perf_helpers.lab import hardware, progress
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.runs import Memory
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment
from perf_helpers.texts import bytes_text


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The predicted peak of one experiment."""

    name: str  # what it is called in tables and pictures
    task: dict[str, Any]  # see `Task.to_dict`
    arguments: dict[str, Any]  # training arguments, as they were given
    device: str  # "cpu" or "cuda"
    memory: Memory  # with the same fields, in bytes, as that of a measured run
    assumptions: tuple[str, ...]  # in words, what was modelled or left out
    traced: str  # in words, which layers were followed
    seconds: float  # that the prediction took
    own_bytes: int | None  # peak memory of the process that made it
    processes: int = 1  # ranks of the training; the figures are those of one rank

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def needed_bytes(self, context_bytes: int = 0) -> int:
        """Bytes that the device must have: what the allocator reserves, or the peak where that is not known, and the
        CUDA context.

        Args:
            context_bytes: what to leave for a context that is not known. A CPU has none.
        """
        reserved = max(self.memory.reserved_bytes or 0, self.memory.peak_bytes)
        return reserved + (self.memory.context_bytes or (context_bytes if self.device == "cuda" else 0))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return f"{self.name}: would peak at {bytes_text(self.peak_bytes)} on {self.device} ({self.traced})"


def estimate(
    task: Task,
    *,
    name: str = "",
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    parts: Collection[str] | None = None,
    training: bool = True,
    optimizer: Callable | None = None,
    function: Callable[[Task], Any] | None = None,
    processes: int = 1,
    every_layer: bool = False,
    timeout: float = 300,
    **arguments,
) -> MemoryEstimate:
    """Predict the peak memory of a training, or of inference, without running it.

    On "cpu" the prediction is what `Lab.train` counts. On "cuda" it is the allocator's peak on a GPU that need not be
    there; `assumptions` names what was modelled. A question that was asked before is answered from memory.

    Args:
        name: what the estimate is called in tables and pictures.
        device: "cpu" or "cuda"; None: this machine's.
        compute_capability: of the GPU, e.g. (9, 0) for an H100; None: this machine's, else (9, 0).
        parts: names from `cuda.PARTS` that are modelled; None: all.
        training: False: forward passes without gradients on `per_device_eval_batch_size` samples.
        optimizer: function (model, training arguments) -> torch optimizer, for one that `optim` does not name.
        function: a loop of one's own that takes the task, as `Lab.run` does.
        processes: ranks of a data-parallel training; the figures are those of one rank.
        every_layer: follow every layer instead of extrapolating from a few.
        timeout: seconds that the prediction may take.
        arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

    Raises:
        ValueError: an unknown argument, a value out of range, a model or an operation that cannot be followed, or no
            prediction within `timeout` (or within what `processes.within` leaves).
    """
    import cloudpickle

    experiment = Experiment(
        name=name or task.model,
        task=task,
        arguments=Arguments.of(arguments),
        function=cloudpickle.dumps(function) if function else None,
        optimizer=cloudpickle.dumps(optimizer) if optimizer else None,
        training=training,
        processes=processes,
    )
    whose = target(device, compute_capability, parts)
    key = (repr(experiment.replace(name="")), task.identity(), whose, every_layer)
    if not (made := KNOWLEDGE.estimates.get(key)):
        with progress.percent(f"estimating {task.model}") as bar:
            made = _predicted(experiment, whose, every_layer, timeout, lambda part: bar.update(part - bar.n))
    KNOWLEDGE.estimates[key] = dataclasses.replace(made, name=experiment.name)  # listed under its latest name
    return KNOWLEDGE.estimates[key]


def estimates_so_far() -> list[MemoryEstimate]:
    """Every estimate that this process has made, in order."""
    return list(KNOWLEDGE.estimates.values())


def target(
    device: str | None = None,
    compute_capability: tuple[int, int] | None = None,
    parts: Collection[str] | None = None,
) -> prediction.Device:
    """Whose memory is to be predicted; the arguments are those of `estimate`.

    Raises:
        ValueError: another kind of device, or a part that there is not.
    """
    machine = hardware.describe()
    kind = device or machine.kind
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: choose 'cpu' or 'cuda'")
    if kind == "cpu":
        return prediction.Device(kind)
    from perf_helpers.estimate import cuda

    here = next((gpu.capability for gpu in machine.gpus if gpu.capability), DEFAULT_CAPABILITY)
    return prediction.Device(kind, tuple(compute_capability or here), cuda.known_parts(parts))


def _predicted(
    experiment: Experiment,
    device: prediction.Device,
    every_layer: bool,
    timeout: float,
    on_percent: Callable[[int], Any],
) -> MemoryEstimate:
    began = time.perf_counter()
    job = prediction.predict, experiment, device, every_layer
    said = KNOWLEDGE.ask(*job, model=experiment.task.model, timeout=timeout, on_percent=on_percent)
    return MemoryEstimate(
        name=experiment.name,
        task=experiment.task.to_dict(),
        arguments=dict(experiment.arguments.given),
        device=device.kind,
        memory=said.memory,
        assumptions=said.assumptions,
        traced=said.traced,
        seconds=time.perf_counter() - began,
        own_bytes=said.own_bytes,
        processes=experiment.processes,
    )
