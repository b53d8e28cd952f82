"""The memory explorer: the peak of any model and recipe, compared with the memory of common cards and this machine."""

import html
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perf_helpers import plots
from perf_helpers.lab import Lab
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, html_box, observe, place
from trainmem import recipes
from trainmem.cards import SIZES, context_bytes, named
from trainmem.core.task import PRESETS, Task
from trainmem.estimate import MemoryEstimate, estimate
from trainmem.measure.forkserver import SERVER
from trainmem.recipes import ADAMW, BF16_WEIGHTS, CHECKPOINTING, FP16
from trainmem.texts import bytes_text, parts_text, shown

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

# The values of the controls. The type of the weights is always given, because a model's default may be another.
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_PRECISIONS = {"fp32": {"dtype": "float32"}} | {
    technique.name: {"dtype": "float32"} | technique.arguments for technique in recipes.PRECISIONS
}
_OPTIMIZERS = {technique.name: technique.arguments for technique in recipes.OPTIMIZERS}
_WEIGHTS = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "8 bits": {"dtype": "bfloat16", "load_in_8bit": True},
    "4 bits": {"dtype": "bfloat16", "load_in_4bit": True},
}
# Generated tokens; 0: one forward pass. Each token is another pass to trace: 64 tokens of a model with 32 layers take
# about 20 s.
_NEW_TOKENS = (0, 2, 16, 64)
# The controls of a training only, and of inference only.
_OWN = {
    "training": ("precision", "checkpointing", "accumulation", "optimizer"),
    "inference": ("weights", "new_tokens", "beams"),
}
_CONTEXT_BYTES = context_bytes((7, 0))  # of the guide's V100
_REST_SECONDS = 0.3  # a position is traced if no control was moved for this time

Position = tuple[tuple[str, Any], ...]  # (name, value) of each visible control


def memory(
    lab: Lab, task: Task | None = None, *, of: str = "training", card: str | None = None, device: str | None = None
) -> None:
    """Show the peak of any model and recipe by category, next to the memory of common cards and of this machine.

    The controls offer training and inference; inference that generates tokens includes the key value cache. `estimate`
    calculates the peak for each position of the controls. The picture is grey until the peak for a new position is
    ready; a position that was visited before is shown at once.

    Args:
        task: the model to start with (default: the lab's).
        of: "training" or "inference", to start with.
        card: a GPU by its name in `cards.CARDS`, e.g. "t4"; the estimate uses its compute capability.
        device: "cpu" or "cuda", to start with (default: the card's device, otherwise this machine's).

    Raises:
        ValueError: `of` or the card is unknown, or the model cannot be traced on fake tensors.
    """
    if of not in _OWN:
        raise ValueError(f"of={shown(of)}: choose 'training' or 'inference'")
    task = task or lab.task
    capability = next((gpu.capability for gpu in lab.machine.gpus if gpu.capability), None)
    device = device or (lab.machine.kind if card is None else "cuda")
    capability = capability if card is None else named(card).capability
    size = lab.profile.micro_batch
    start = _start(task, of, device, size)
    first = estimate_at(task, start, capability)
    explorer, title = _MemoryExplorer(lab, task, start, first, capability), f"{task.model}, micro-batch {size}"
    static = plots.picture_html(plots.memory([first], title=title), f"{title}: {parts_text(first.memory.breakdown)}")
    place(("memory explorer", lab.lesson), explorer.parts, static, repr(first), at_end=explorer.close)


def estimate_at(
    task: Task, values: Mapping[str, Any], compute_capability: tuple[int, int] | None = None
) -> MemoryEstimate:
    """Return the estimate for the values of the controls.

    Args:
        task: the explorer's first task; if the values name another model, a default task of that model is used.
        values: {name of a control: its value}; controls of a training are not needed for inference, and vice versa.
        compute_capability: compute capability of the GPU; None: the estimate's default.

    Raises:
        ValueError: `estimate` refuses the model or an argument.
    """
    model, is_training, micro_batch = values["model"].strip(), values["of"] == "training", values["micro_batch"]
    task = task if model == task.model else Task(model)
    task = task.with_padded_vocabulary(values["vocabulary"]).replace(
        seq_len=values["seq_len"] if task.has_tokens else None,
        dataset_size=4 * micro_batch * values.get("accumulation", 1),  # enough samples for every traced step
        lengths=(),
    )
    arguments = {"attn_implementation": values["attention"]}
    if is_training:
        arguments |= {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": values["accumulation"],
        }
        arguments |= _PRECISIONS[values["precision"]] | _OPTIMIZERS[values["optimizer"]]
        arguments |= CHECKPOINTING.arguments if values["checkpointing"] else {}
    else:
        arguments |= {"per_device_eval_batch_size": micro_batch} | _WEIGHTS[values["weights"]]
        if values["new_tokens"]:
            arguments |= {"max_new_tokens": values["new_tokens"]}
            arguments |= {"num_beams": values["beams"]} if values["beams"] > 1 else {}
    options = {"device": values["device"], "compute_capability": compute_capability}
    return estimate(task, training=is_training, **options, **arguments)


class _MemoryExplorer:
    """Hold the controls, the picture and the estimates so far; a second thread (`_work`) makes missing estimates.

    `start`: {name of a control: its first value}; `first`: the estimate for `start`.
    """

    def __init__(
        self,
        lab: Lab,
        task: Task,
        start: Mapping[str, Any],
        first: MemoryEstimate,
        compute_capability: tuple[int, int] | None,
    ):
        import ipywidgets

        self._task, self._machine, self._capability = task, lab.machine, compute_capability
        self._controls = _controls(start)
        self._visited: dict[Position, MemoryEstimate | str] = {self._position(): first}  # str: why estimating failed
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._picture, self._note, self._output = html_box(), html_box(), ipywidgets.Output()
        observe(self._controls.values(), self._moved, self._output)
        grid = ipywidgets.Box(list(self._controls.values()), layout=ROW)
        self.parts = [grid, self._picture, self._note, self._output]
        self._draw()

    def close(self) -> None:
        """Let the thread that makes the estimates end after its current estimate."""
        self._closed = True
        self._wake.set()

    def _moved(self, change) -> None:
        if change["owner"] is self._controls["device"]:
            self._controls["precision"].options = _precisions(change["new"])
        if change["owner"] is self._controls["of"]:
            _offer(self._controls)
        self._draw()

    def _position(self) -> Position:
        return tuple((name, each.value) for name, each in self._controls.items() if each.layout.display != "none")

    # ---- tracing

    def _work(self) -> None:
        try:
            while not self._closed:
                self._wake.wait()
                self._wake.clear()  # before the position is read: a later move wakes this thread again
                if self._wake.wait(_REST_SECONDS):  # a control was moved again: no estimate for a position passed over
                    continue
                while SERVER.measuring and not self._closed:
                    time.sleep(0.2)
                position = self._position()
                if position not in self._visited and not self._closed:
                    self._visited[position] = self._traced(position)
                    self._draw()
        except Exception as error:  # an exception in a thread would not be shown
            kind = type(error).__name__
            output = {"ename": kind, "evalue": str(error), "traceback": [f"{kind}: {error}"]}
            self._output.outputs = (*self._output.outputs, {"output_type": "error"} | output)

    def _traced(self, position: Position) -> MemoryEstimate | str:
        """Return the estimate for a position of the controls; if `estimate_at` fails, return the error's message."""
        try:
            return estimate_at(self._task, dict(position), self._capability)
        except ValueError as error:
            return str(error)

    # ---- the picture

    def _draw(self) -> None:
        """Show the estimate at the current position; if there is none yet, grey the picture out and start tracing."""
        with self._lock:  # both threads draw: an older answer must not be drawn over a newer one
            if self._closed:
                return
            answer = self._visited.get(self._position())
            if isinstance(answer, MemoryEstimate):
                self._show(answer)
                return
            waiting = f"Tracing {self._controls['model'].value} with this recipe ..."
            self._picture.value = f"<div style='opacity:0.35'>{self._drawn}</div>"
            self._note.value = f"<div role='status'>{html.escape(f'✗ {answer}' if answer else waiting)}</div>"
        if not answer:
            self._wake.set()
            if not (self._thread and self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="memory explorer", daemon=True)
                self._thread.start()

    def _show(self, answer: MemoryEstimate) -> None:
        machine, on_gpu = self._machine, answer.device == "cuda"
        size = machine.gpus[0].memory_bytes if machine.kind == "cuda" else machine.memory_bytes
        own = {"this machine": size} if size and machine.kind == answer.device else {}
        parts = answer.memory.breakdown | ({"context": _CONTEXT_BYTES} if on_gpu else {})
        self._picture.value = self._drawn = svg.bar("Peak", parts, SIZES | own)
        self._note.value = f"<div role='status' style='line-height:1.4'>{_verdict(answer, parts, own)}</div>"
        self._controls["seq_len"].disabled = answer.task["seq_len"] is None  # images have no length


def _start(task: Task, of: str, device: str, micro_batch: int) -> dict[str, Any]:
    """Return {name of a control: its first value}."""
    dtype = task.weights().dtype  # in which transformers loads them
    return {
        "model": task.model,
        "of": of,
        "device": device,
        "micro_batch": micro_batch,
        "seq_len": task.length() if task.has_tokens else _LENGTHS[0],
        "precision": BF16_WEIGHTS.name if dtype == "bfloat16" else "fp32",  # training in plain fp16 is not offered
        "checkpointing": False,
        "accumulation": 1,
        "optimizer": ADAMW.name,
        "weights": next((name for name, given in _WEIGHTS.items() if given["dtype"] == dtype), "fp32"),
        "new_tokens": 0,
        "beams": 1,
        "attention": "sdpa",
        "vocabulary": 1,
    }


def _controls(start: Mapping[str, Any]) -> dict[str, "DOMWidget"]:
    """Return {name: control}; `start`: {name of a control: its first value}."""
    import ipywidgets

    menu, slider = ipywidgets.Dropdown, ipywidgets.SelectionSlider
    placeholder = "a preset, a config.json, a name on the Hub"
    models = {"options": sorted({start["model"], *PRESETS}), "placeholder": placeholder, "continuous_update": False}
    new = [(str(count) if count else "none", count) for count in _NEW_TOKENS]
    offered = {
        "model": (ipywidgets.Combobox, "model", models),
        "of": (menu, "memory of", list(_OWN)),
        "device": (menu, "on", [("a GPU", "cuda"), ("a CPU", "cpu")]),
        "micro_batch": (slider, "micro-batch", sorted({*_MICRO_BATCHES, start["micro_batch"]})),
        "seq_len": (slider, "length", sorted({*_LENGTHS, start["seq_len"]})),
        "precision": (menu, "precision", _precisions(start["device"])),
        "checkpointing": (menu, "checkpointing", [("none", False), ("every layer", True)]),
        "accumulation": (slider, "accumulation", [1, 2, 4, 8, 16, 32]),
        "optimizer": (menu, "optimizer", list(_OPTIMIZERS)),
        "weights": (menu, "weights", list(_WEIGHTS)),
        "new_tokens": (slider, "new tokens", new),
        "beams": (slider, "beams", [1, 2, 4, 8]),
        "attention": (menu, "attention", ["sdpa", "eager"]),
        "vocabulary": (menu, "vocabulary", [("as it is", 1), ("padded to 8", 8), ("padded to 64", 64)]),
    }
    style, layout, controls = {"description_width": "7.5em"}, {**WHOLE_WIDTH, "flex": "1 1 20em"}, {}
    for name, (kind, description, options) in offered.items():
        options = options if isinstance(options, dict) else {"options": options}
        controls[name] = kind(description=description, value=start[name], style=style, layout=layout, **options)
    _offer(controls)
    return controls


def _precisions(device: str) -> list[str]:
    """Return the precisions to offer for a device; not fp16 on a CPU, where the Trainer ignores it."""
    return [name for name in _PRECISIONS if name != FP16.name or device == "cuda"]


def _offer(controls: dict[str, "DOMWidget"]) -> None:
    """Show the controls of the chosen mode, training or inference, and hide those that only the other mode has."""
    for of, names in _OWN.items():
        for name in names:
            controls[name].layout.display = None if of == controls["of"].value else "none"


def _verdict(answer: MemoryEstimate, parts: dict[str, int], own: dict[str, int]) -> str:
    """Return HTML: the memory needed, the phase and operation of the peak, and the devices that have enough memory.

    `parts`: {category: bytes needed}; `own`: {device of this machine: bytes of its memory}.
    """
    needed = sum(parts.values())
    peak = html.escape(f"in {answer.memory.peak_phase}, at {answer.memory.peak_operation}")
    smallest = next((name for name, size in SIZES.items() if size >= needed), None)
    text = f"<b>{bytes_text(needed, binary=True)}</b> traced: the peak is {peak}. "
    text += f"It fits on cards from {smallest} up" if smallest else "It fits on none of these cards"
    for name, size in own.items():
        text += f"; {name} ({bytes_text(size, binary=True)}) is {'large enough' if size >= needed else 'too small'}"
    kernels = " and ".join(answer.attention)
    text += f". Attention uses the {kernels} kernel" if kernels else ". Attention uses no fused kernel"
    context = " The context is that of a V100, the one figure that the guides give; yours may differ."
    return f"{text}.{context if 'context' in parts else ''}"
