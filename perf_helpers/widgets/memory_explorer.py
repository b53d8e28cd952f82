"""The memory explorer: the peak of any model and recipe, against the memory of common cards and of this machine."""

import contextlib
import html
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf_helpers import plots
from perf_helpers.cards import SIZES, context_bytes, named
from perf_helpers.estimate import MemoryEstimate, estimate, peak_model
from perf_helpers.lab import Lab, Task
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.lab.task import PRESETS
from perf_helpers.texts import bytes_text, parts_text, shown
from perf_helpers.widgets import svg
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, html_box, observe, place

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

_CONTEXT_BYTES = context_bytes((7, 0))  # that of the guide's V100
_REST_SECONDS = 0.5  # without a move, before the point itself is traced
_TRACED_TOKENS = 16  # of an answer: of more the point itself would take minutes
_OF = {"training": peak_model.Choice, "inference": peak_model.Inference}  # whose fields are what is controlled


def memory(
    lab: Lab, task: Task | None = None, *, of: str = "training", card: str | None = None, device: str | None = None
) -> None:
    """The peak of any model and recipe, by category, against the memory of common cards and of this machine: of a
    training, or of inference, with the cache of keys and values where answers are written.

    Once a model is known (six traces for each way of training it), every move is answered from those traces, at once;
    the point that the controls rest on is then traced itself. The picture says which of the two it shows.

    Args:
        task: the model to start with; None: the lab's.
        of: "training" or "inference", to start with.
        card: a GPU by its name in `cards.CARDS`, e.g. "t4", whose compute capability counts.
        device: "cpu" or "cuda", to start with; None: the card's, else this machine's.

    Raises:
        ValueError: an unknown card, or a model that cannot be followed on fake tensors.
    """
    if of not in _OF:
        raise ValueError(f"of={shown(of)}: choose 'training' or 'inference'")
    task = task or lab.task
    way = _OF[of].as_loaded(task.weights().dtype)
    capability = next((gpu.capability for gpu in lab.machine.gpus if gpu.capability), None)
    device = device or (lab.machine.kind if card is None else "cuda")
    capability = capability if card is None else named(card).capability
    options = {"compute_capability": capability} if capability else {}
    size = peak_model.nearest(peak_model.MICRO_BATCHES, lab.profile.micro_batch)
    first = estimate(task, device=device, training=of == "training", **options, **way.arguments(size))
    explorer, title = _MemoryExplorer(lab, task, first, size, options, way), f"{task.model}, micro-batch {size}"
    static = plots.picture_html(plots.memory([first], title=title), f"{title}: {parts_text(first.memory.breakdown)}")
    place(("memory explorer", lab.lesson), explorer.parts, static, repr(first), at_end=explorer.close)


class _MemoryExplorer:
    """The controls, the picture, and what is known of the models looked at.

    The front end's thread moves the controls and draws; one other thread traces and then draws. It reads where the
    controls stand afresh for each thing that it does, so that what is wanted now comes first.
    """

    def __init__(
        self, lab: Lab, task: Task, first: MemoryEstimate, micro_batch: int, options: dict[str, Any], way: Any
    ):
        import ipywidgets

        self._task, self._machine, self._folder = task, lab.machine, Path(lab.store.path).with_name("fits")
        self._options = options  # of the estimate: whose memory
        self._models: dict[tuple, peak_model.Surfaces] = {}  # by model, device and vocabulary
        self._prepared: set[peak_model.Surfaces] = set()  # those whose lengths are known
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._error: str | None = None  # why the point cannot be answered
        self._controls = _controls(task, first, micro_batch, way)
        self._picture, self._note, self._progress = html_box(), html_box(), html_box()
        self._output = ipywidgets.Output()
        self._callback = observe(self._controls.values(), self._moved, self._output)
        grid = ipywidgets.Box(list(self._controls.values()), layout=ROW)
        self.parts = [grid, self._picture, self._note, self._progress, self._output]
        self._show(peak_model.Answer.traced(first.memory, first.attention))
        self._tell("Move a control: the recipes around it are then traced, for some seconds.")

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._closed = True
        self._wake.set()

    def _moved(self, change) -> None:
        if change["owner"] is self._controls["device"]:
            self._controls["precision"].options = peak_model.precisions(change["new"])
        if change["owner"] is self._controls["of"]:
            _offer(self._controls)
        self._error = None
        self._draw()
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="memory explorer", daemon=True)
            self._thread.start()

    def _point(self) -> tuple[peak_model.Surfaces, tuple[peak_model.Way, int, int | None]]:
        """Where the controls stand: what is known of the model on that device, and the recipe, the micro-batch and the
        length (in tokens; None for images)."""
        value = {name: control.value for name, control in self._controls.items()}
        which = model, device, multiple = value.pop("model").strip(), value.pop("device"), value.pop("vocabulary")
        micro_batch, seq_len = value.pop("micro_batch"), value.pop("seq_len")
        with self._lock:
            if which not in self._models:
                task = self._task if model == self._task.model else Task(model)
                with contextlib.suppress(ValueError):  # no such model: `prepare` says so
                    task = task.with_padded_vocabulary(multiple)
                self._models[which] = peak_model.Surfaces(task, device, folder=self._folder, **self._options)
        known = self._models[which]
        is_image = known in self._prepared and not known.lengths
        kind = _OF[value["of"]]
        way = kind(**{each.name: value[each.name] for each in fields(kind)})
        return known, (way, micro_batch, None if is_image else seq_len)

    # ---- the thread

    def _work(self) -> None:
        try:
            while True:
                self._wake.clear()  # before looking where the controls stand: what moves from here on wakes it again
                if self._closed:
                    return
                if not self._do_next():
                    self._wake.wait()
        except Exception as error:  # what is raised in a thread is seen by nobody
            kind = type(error).__name__
            shown = {"ename": kind, "evalue": str(error), "traceback": [f"{kind}: {error}"]}
            self._output.outputs = (*self._output.outputs, {"output_type": "error"} | shown)

    def _do_next(self) -> bool:
        """Do what is most wanted; False if there is nothing left to do."""
        known, point = self._point()
        choice, *_ = point
        while SERVER.measuring and not self._closed:
            time.sleep(0.2)
        try:
            if known not in self._prepared:
                self._prepare(known)
            elif not known.is_known(choice):
                known.learn(choice)
            elif (
                (answer := known.answer(*point))
                and answer.how == "interpolated"
                and choice.new_tokens <= _TRACED_TOKENS
            ):
                if self._wake.wait(_REST_SECONDS):
                    return True  # it was moved on
                known.trace(*point)
            elif near := next((near for near in choice.near(known.device) if not known.is_known(near)), None):
                known.learn(near)
            else:
                return False
        except ValueError as error:
            self._error = str(error)
            self._draw()
            return False
        self._draw()
        return True

    def _prepare(self, known: peak_model.Surfaces) -> None:
        """Find out what lengths the model can take, and offer them."""
        known.prepare()
        slider = self._controls["seq_len"]
        self._prepared.add(known)
        if known.lengths and tuple(slider.options) != known.lengths:
            wanted = peak_model.nearest(known.lengths, slider.value)
            slider.unobserve(self._callback, names="value")  # it is not moved by the learner
            slider.options, slider.value = known.lengths, wanted
            slider.observe(self._callback, names="value")
        slider.disabled = not known.lengths

    # ---- the picture

    def _draw(self) -> None:
        if self._closed:
            return
        known, point = self._point()
        choice, *_ = point
        answer = known.answer(*point) if known in self._prepared else None
        if answer is not None:
            self._show(answer)
        else:
            refused = self._error or known.refusal(choice, point[2])
            text = f"✗ {refused}" if refused else f"Tracing {known.task.model} with this recipe: a few seconds ..."
            self._picture.value = f"<div style='opacity:0.35'>{self._drawn}</div>"
            self._note.value = f"<div role='status'>{html.escape(text)}</div>"
        ways = [known.is_known(each) for each in choice.near(known.device)]
        state = "all are answered at once" if all(ways) else "the others are being traced"
        bar = f"<progress value='{sum(ways)}' max='{len(ways)}' aria-label='recipes known'></progress>"
        self._tell(f"{bar} {sum(ways)} of {len(ways)} ways known: {state}.")

    def _tell(self, progress: str) -> None:
        self._progress.value = f"<div style='font-size:12px;line-height:1.4'>{progress}</div>"

    def _show(self, answer: peak_model.Answer) -> None:
        device, machine = self._controls["device"].value, self._machine
        size = machine.gpus[0].memory_bytes if machine.kind == "cuda" else machine.memory_bytes
        own = {"this machine": size} if size and machine.kind == device else {}
        parts = answer.breakdown | ({"context": _CONTEXT_BYTES} if device == "cuda" else {})
        self._picture.value = self._drawn = svg.bar("Peak", parts, SIZES | own)
        self._note.value = f"<div role='status' style='line-height:1.4'>{_verdict(answer, parts, own)}</div>"


def _controls(task: Task, first: MemoryEstimate, micro_batch: int, way: peak_model.Way) -> dict[str, "DOMWidget"]:
    """The controls by what they choose, set to what was estimated first; `_OF` has those of a way of training or of
    inference."""
    import ipywidgets

    def field(kind: type, description: str, **options) -> "DOMWidget":
        layout = {**WHOLE_WIDTH, "flex": "1 1 20em"}
        return kind(description=description, style={"description_width": "7.5em"}, layout=layout, **options)

    length = first.task.get("seq_len") or task.length() if task.family() != "vision" else None
    lengths = peak_model.LENGTHS if length in peak_model.LENGTHS else sorted({*peak_model.LENGTHS, length or 32})
    chosen = {name: getattr(way, name, "fp32") for name in ("precision", "weights")}
    precisions = peak_model.precisions(first.device)
    models = {"options": sorted({task.model, *PRESETS}), "placeholder": "a preset, a config.json, a name on the Hub"}
    menu, slider = ipywidgets.Dropdown, ipywidgets.SelectionSlider
    new = [(str(count) if count else "none", count) for count in peak_model.NEW_TOKENS]
    controls = {
        "model": field(ipywidgets.Combobox, "model", value=task.model, continuous_update=False, **models),
        "of": field(menu, "memory of", options=list(_OF), value=next(of for of in _OF if isinstance(way, _OF[of]))),
        "device": field(menu, "on", options=[("a GPU", "cuda"), ("a CPU", "cpu")], value=first.device),
        "micro_batch": field(slider, "micro-batch", options=peak_model.MICRO_BATCHES, value=micro_batch),
        "seq_len": field(slider, "length", options=lengths, value=length or 32, disabled=length is None),
        "precision": field(menu, "precision", options=precisions, value=chosen["precision"]),
        "checkpointing": field(menu, "checkpointing", options=[("none", False), ("every layer", True)]),
        "accumulation": field(slider, "accumulation", options=peak_model.ACCUMULATION, value=1),
        "optimizer": field(menu, "optimizer", options=list(peak_model.OPTIMIZERS)),
        "weights": field(menu, "weights", options=list(peak_model.WEIGHTS), value=chosen["weights"]),
        "new_tokens": field(slider, "new tokens", options=new),
        "beams": field(slider, "beams", options=peak_model.BEAMS),
        "attention": field(menu, "attention", options=list(peak_model.ATTENTION)),
        "vocabulary": field(menu, "vocabulary", options=[("as it is", 1), ("padded to 8", 8), ("padded to 64", 64)]),
    }
    _offer(controls)
    return controls


def _offer(controls: dict[str, "DOMWidget"]) -> None:
    """Show the controls of what is chosen, a training or inference."""
    names = {of: {each.name for each in fields(kind)} for of, kind in _OF.items()}
    for name in set.union(*names.values()):
        controls[name].layout.display = None if name in names[controls["of"].value] else "none"


def _verdict(answer: peak_model.Answer, parts: dict[str, int], own: dict[str, int]) -> str:
    """What is needed, where the peak is, and on which cards and on which of the learner's `own` devices it fits."""
    needed = sum(parts.values())
    where = html.escape(f"in {answer.phase}, at {answer.operation}")
    smallest = next((name for name, size in SIZES.items() if size >= needed), None)
    text = f"<b>{bytes_text(needed, binary=True)}</b> {answer.how}: the peak is {where}. "
    text += f"It fits on cards from {smallest} up" if smallest else "It fits on none of these cards"
    for name, size in own.items():
        text += f"; {name} ({bytes_text(size, binary=True)}) is {'large enough' if size >= needed else 'too small'}"
    if answer.attention is not None:
        kernels = " and ".join(answer.attention)
        text += f". Attention uses the {kernels} kernel" if kernels else ". Attention uses no fused kernel"
    context = " The context is that of a V100, the one figure that the guides give; yours may differ."
    return f"{text}.{context if 'context' in parts else ''}"
