"""Predict a deep model's memory from two shallow models, as the first step of the advisor's search.

At each place of a training, such as the backward pass of the first layer's norm, the live bytes grow linearly with the
number of layers. The place with the most bytes is the peak. The result is not an estimate: it tells the search which
settings to trace with all layers (`tests/estimate/test_depth.py` shows how close the result is).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import peak_memory
from trainmem.estimate.allocator_replay import replayed
from trainmem.estimate.api import target
from trainmem.estimate.fresh_process import Tell, ask
from trainmem.estimate.memory_estimate import Device
from trainmem.estimate.trace_records import Trace, highest
from trainmem.records import TENSOR_CATEGORIES, Category, Phase

if TYPE_CHECKING:
    import numpy as np

    from trainmem.estimate.operator_workspaces import Probe

_SHALLOW = (2, 4)  # layers
_DEEP = 24  # models with at most this many layers are traced whole

STATES = (Category.WEIGHTS, Category.FROZEN_WEIGHTS, Category.QUANTIZED_WEIGHTS, Category.GRADIENTS)
STATES += (Category.OPTIMIZER_STATES,)
_STATES = [number for number, category in enumerate(TENSOR_CATEGORIES) if category in STATES]

Places = dict[tuple[str, str, str], int]  # the most bytes alive, by phase, operation and module


def layers_of(task: Task) -> int | None:
    """Return the number of layers of a deep model (more than 24 layers in one stack); None for other models."""
    config = task.build_config()
    layers = getattr(config, "num_hidden_layers", 0) or 0
    return layers if layers > _DEEP and not config.is_encoder_decoder else None


def parameters(tasks: Sequence[Task]) -> list[int]:
    """Return the number of parameters of each task's model, counted in a fresh subprocess.

    Raises:
        ValueError: a model cannot be built, or counting fails or takes more than 300 seconds.
    """
    return ask(_parameters, [*tasks], model=tasks[0].model, timeout=300)


def _parameters(tasks: list[Task], probe: "Probe", tell: Tell) -> list[int]:
    return [task.parameters() for task in tasks]


@dataclass(frozen=True, slots=True)
class Line:
    """Hold a training's memory in bytes as a function of the number of layers, from two traced shallow models."""

    places: tuple[Places, Places]  # of the two shallow models
    reserved: tuple[int, int]  # bytes
    states: tuple[int, int]  # most bytes of weights, gradients and optimizer states together

    def at(self, layers: int) -> tuple[int, int]:
        """Return approximate (peak of live bytes, reserved bytes) for `layers` layers; the second may be too high."""
        few, more = self.places
        peak = max(_beyond((few[place], more[place]), layers) for place in few.keys() & more.keys())
        beside = [held - max(places.values()) for held, places in zip(self.reserved, self.places, strict=True)]
        return peak, peak + max(_beyond(beside, layers), 0)

    def states_at(self, layers: int) -> int:
        """Return the bytes of weights, gradients and optimizer states for a model of `layers` layers."""
        return _beyond(self.states, layers)


def _beyond(shallow: Sequence[int], layers: int) -> int:
    """Extrapolate linearly: return the bytes at `layers` layers; `shallow`: the bytes at 2 and at 4 layers."""
    return round(shallow[1] + (layers - _SHALLOW[1]) / (_SHALLOW[1] - _SHALLOW[0]) * (shallow[1] - shallow[0]))


def line(task: Task, *, processes: int = 1, timeout: float = 300, **options) -> Line:
    """Return the memory of a training as a function of the number of layers, from traces with 2 and with 4 layers.

    Args:
        task: the model and its data; the model's own number of layers is ignored.
        processes: ranks of a data-parallel training.
        timeout: time limit in seconds for the two traces together.
        options: `device` and `compute_capability` as in `estimate`, and training arguments.

    Raises:
        ValueError: an unknown argument, a value out of range, a model that cannot be traced, or no result in time.
    """
    target_device = target(options.pop("device", None), options.pop("compute_capability", None))
    for name, usual in (("gradient_accumulation_steps", 1), ("max_steps", 2)):
        options[name] = min(options.get(name, usual), 2)  # more of them take no more memory
    arguments = Arguments.of(options)
    tasks = [task.with_text(num_hidden_layers=count) for count in _SHALLOW]
    experiments = [Experiment(each.model, each, arguments, processes=processes) for each in tasks]
    found = ask(_shallow, experiments, target_device, model=task.model, timeout=timeout)
    return Line(*zip(*found, strict=True))


def _shallow(
    experiments: list[Experiment], device: Device, probe: "Probe", tell: Tell
) -> list[tuple[Places, int, int]]:
    """Trace a training with 2 and with 4 layers; return (`_places`, reserved bytes, most bytes of `STATES`) of each.

    `experiments`: the training with 2 and with 4 layers; `probe`, `tell`: see `fresh_process.ask`.
    """
    found = []
    traced = peak_memory.trace_all(experiments, device, probe, tell)
    for count, each in zip(_SHALLOW, traced, strict=True):
        states = max(int(live[_STATES].sum()) for live in each.trace.marks.values())
        totals, reserved = each.totals, int(each.totals.max())  # on a CPU the peak of live bytes
        if device.kind == "cuda":
            laid_out = replayed(each.trace.log, device.settings, None, device.rules)
            totals, reserved = highest(laid_out.allocated, each.trace.begins), laid_out.memory().reserved_bytes
        found.append((_places(each.trace, totals, count), reserved, states))
    return found


def _places(trace: Trace, totals: "np.ndarray", layers: int) -> Places:
    """Return the highest live bytes at each place of a training: {(phase, operation, module): bytes}.

    `totals`: live bytes during each operation, of shape (operations,); `layers`: number of the model's layers.
    """
    places: Places = {}
    names = {"0": "first", str(layers - 1): "last"}
    for phase, operation, module, total in zip(trace.phases, trace.operations, trace.modules, totals, strict=True):
        # In other phases, the moment of an operation outside all modules may depend on the number of layers.
        if not module and phase not in (Phase.STEP, Phase.EVALUATION):
            continue
        # "first", "last" or "between" for the layer's number: models of different depths then have the same places.
        layer = re.sub(r"\d+", lambda found: names.get(found[0], "between"), module, count=1)
        place = phase.shown, operation.name, layer
        places[place] = max(places.get(place, 0), int(total))
    return places
