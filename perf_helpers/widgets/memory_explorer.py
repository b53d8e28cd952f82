"""The memory explorer: the peak of any model and recipe, against the memory of common cards and of this machine."""

import html
import threading
import time
from pathlib import Path
from typing import NamedTuple

from perf_helpers import plots
from perf_helpers.estimate import MemoryEstimate, allocator, estimate, surfaces
from perf_helpers.lab import Lab, Task, processes
from perf_helpers.lab.task import PRESETS
from perf_helpers.texts import bytes_text, parts_text
from perf_helpers.widgets import drawings
from perf_helpers.widgets.frame import ROW, WHOLE_WIDTH, guarded, html_box, place

_V100 = (7, 0)  # its compute capability; the one card whose CUDA context is published
_REST_SECONDS = 0.5  # without a move, before the point itself is traced


def memory(lab: Lab, task: Task | None = None, *, device: str | None = None, micro_batch: int | None = None) -> None:
    """The peak of any model and recipe, by category, against the memory of common cards and of this machine.

    Once a model is known (six traces for each way of training it), every move is answered from those traces, at once;
    the point that the controls rest on is then traced itself. The picture says which of the two it shows.

    Args:
        task: the model to start with; None: the lab's.
        device: "cpu" or "cuda", to start with; None: this machine's.
        micro_batch: to start with; None: the profile's.

    Raises:
        ValueError: the model cannot be followed on fake tensors.
    """
    task = task or lab.task
    size = surfaces.nearest(surfaces.MICRO_BATCHES, micro_batch or lab.profile.micro_batch)
    first = estimate(task, device=device or lab.machine.kind, **surfaces.Choice().arguments(size))
    explorer = _MemoryExplorer(lab, task, first, size)
    title = f"{task.model}, micro-batch {size}"
    picture = plots.memory([first], title=title)
    static = plots.picture_html(picture, f"{title}: {parts_text(first.memory.breakdown)}")
    place(("memory explorer", lab.lesson), explorer.box, static, repr(first), at_end=explorer.close)


class _Point(NamedTuple):
    """Where the controls stand."""

    known: surfaces.Surfaces  # what is known of the model on that device
    choice: surfaces.Choice  # the recipe
    micro_batch: int
    seq_len: int | None  # tokens; None for images

    @property
    def answer(self) -> surfaces.Answer | None:
        return self.known.answer(self.choice, self.micro_batch, self.seq_len)


class _MemoryExplorer:
    """The controls, the picture, and what is known of the models looked at.

    The front end's thread moves the controls and draws; one other thread traces and then draws. It reads where the
    controls stand afresh for each thing that it does, so that what is wanted now comes first.
    """

    def __init__(self, lab: Lab, task: Task, first: MemoryEstimate, micro_batch: int):
        self._task, self._machine = task, lab.machine
        gpu = next((gpu for gpu in lab.machine.gpus if gpu.capability), None)
        self._options = {"compute_capability": gpu.capability} if gpu else {}
        self._folder = Path(lab.store.path).with_name("fits")
        self._models: dict[tuple[str, str], surfaces.Surfaces] = {}  # by model and device
        self._prepared: set[tuple[str, str]] = set()  # those whose lengths are known
        self._context_bytes: int | None = None  # of CUDA, known once a model was prepared for it
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._error: str | None = None  # why the point cannot be answered
        self._answer = surfaces.Answer.traced(first.memory)  # what is shown
        self._build(task, first, micro_batch)
        self._show(self._answer)
        self.progress.value = _small("Move a control: the recipes around it are then traced, for some seconds.")

    # ---- the controls

    def _build(self, task: Task, first: MemoryEstimate, micro_batch: int) -> None:
        import ipywidgets

        def field(kind: type, description: str, **options):
            layout = {**WHOLE_WIDTH, "flex": "1 1 20em"}
            return kind(description=description, style={"description_width": "7.5em"}, layout=layout, **options)

        length = first.task.get("seq_len") or task.length() if task.family() != "vision" else None
        lengths = surfaces.LENGTHS if length in surfaces.LENGTHS else sorted({*surfaces.LENGTHS, length or 32})
        kinds = {"options": sorted({task.model, *PRESETS}), "placeholder": "a preset, a config.json, a name on the Hub"}
        menu, slider = ipywidgets.Dropdown, ipywidgets.SelectionSlider
        self.controls = {
            "model": field(ipywidgets.Combobox, "model", value=task.model, continuous_update=False, **kinds),
            "device": field(menu, "on", options=[("a GPU", "cuda"), ("a CPU", "cpu")], value=first.device),
            "micro_batch": field(slider, "micro-batch", options=surfaces.MICRO_BATCHES, value=micro_batch),
            "seq_len": field(slider, "length", options=lengths, value=length or 32, disabled=length is None),
            "precision": field(menu, "precision", options=surfaces.precisions(first.device), value="fp32"),
            "checkpointing": field(menu, "checkpointing", options=[("none", False), ("every layer", True)]),
            "accumulation": field(slider, "accumulation", options=surfaces.ACCUMULATION, value=1),
            "optimizer": field(menu, "optimizer", options=list(surfaces.OPTIMIZERS)),
            "attention": field(menu, "attention", options=list(surfaces.ATTENTION)),
        }
        self.picture, self.note, self.progress = html_box(), html_box(), html_box()
        self.output = ipywidgets.Output()
        self._callback = guarded(self._moved, self.output)
        for control in self.controls.values():
            control.observe(self._callback, names="value")
        grid = ipywidgets.Box(list(self.controls.values()), layout=ROW)
        parts = [grid, self.picture, self.note, self.progress, self.output]
        self.box = ipywidgets.VBox(parts, layout=WHOLE_WIDTH)

    def _moved(self, change) -> None:
        if change["owner"] is self.controls["device"]:
            self.controls["precision"].options = surfaces.precisions(change["new"])
        self._error = None
        self._draw()
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="memory explorer", daemon=True)
            self._thread.start()

    def _point(self) -> _Point:
        value = {name: control.value for name, control in self.controls.items()}
        model, device = value.pop("model").strip(), value.pop("device")
        micro_batch, seq_len = value.pop("micro_batch"), value.pop("seq_len")
        with self._lock:
            if (model, device) not in self._models:
                task = self._task if model == self._task.model else Task(model)
                self._models[model, device] = surfaces.Surfaces(task, device, folder=self._folder, **self._options)
        known = self._models[model, device]
        is_image = self._is_prepared(known) and not known.lengths
        return _Point(known, surfaces.Choice(**value), micro_batch, None if is_image else seq_len)

    def _is_prepared(self, known: surfaces.Surfaces) -> bool:
        return (known.task.model, known.device) in self._prepared

    # ---- the thread

    def _work(self) -> None:
        try:
            while not self._closed:
                if not self._do_next():
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:  # what is raised in a thread is seen by nobody
            text = f"{type(error).__name__}: {error}"
            shown = {"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": [text]}
            self.output.outputs = (*self.output.outputs, shown)

    def _do_next(self) -> bool:
        """Do what is most wanted; False if there is nothing left to do."""
        point = self._point()
        known, choice = point.known, point.choice
        while processes.are_measuring() and not self._closed:
            time.sleep(0.2)
        try:
            if not self._is_prepared(known):
                self._prepare(known)
            elif not known.is_known(choice):
                known.learn(choice)
            elif point.answer is not None and point.answer.how == "interpolated":
                self._wake.clear()
                if self._wake.wait(_REST_SECONDS):
                    return True  # it was moved on
                known.trace(choice, point.micro_batch, point.seq_len)
            elif near := next((near for near in known.choices(choice) if not known.is_known(near)), None):
                known.learn(near)
            else:
                return False
        except ValueError as error:
            self._error = str(error)
            self._draw()
            return False
        self._draw()
        return True

    def _prepare(self, known: surfaces.Surfaces) -> None:
        """Find out what lengths the model can take, and offer them."""
        known.prepare()
        if known.device == "cuda":
            self._context_bytes = allocator.context_bytes(_V100)
        slider = self.controls["seq_len"]
        self._prepared.add((known.task.model, known.device))
        if known.lengths and tuple(slider.options) != known.lengths:
            wanted = surfaces.nearest(known.lengths, slider.value)
            slider.unobserve(self._callback, names="value")  # it is not moved by the learner
            slider.options, slider.value = known.lengths, wanted
            slider.observe(self._callback, names="value")
        slider.disabled = not known.lengths

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._closed = True
        self._wake.set()

    # ---- the picture

    def _draw(self) -> None:
        if self._closed:
            return
        point = self._point()
        known, choice = point.known, point.choice
        answer = point.answer if self._is_prepared(known) else None
        refused = self._error or known.refusal(choice)
        if answer is not None:
            self._show(answer)
        else:
            self.picture.value = f"<div style='opacity:0.35'>{self._drawn(self._answer)}</div>"
            text = f"✗ {refused}" if refused else f"Tracing {known.task.model} with this recipe: a few seconds ..."
            self.note.value = f"<div role='status'>{html.escape(text)}</div>"
        every = list(known.choices(choice))
        count = sum(known.is_known(each) for each in every)
        state = "all are answered at once" if count == len(every) else "the others are being traced"
        bar = f"<progress value='{count}' max='{len(every)}' aria-label='recipes known'></progress>"
        self.progress.value = _small(f"{bar} {count} of {len(every)} ways of training known: {state}.")

    def _show(self, answer: surfaces.Answer) -> None:
        self._answer = answer
        self.picture.value = self._drawn(answer)
        parts, limits = self._parts(answer), self._limits()
        needed = sum(parts.values())
        where = html.escape(f"in {answer.phase}, at {answer.operation}")
        text = f"<b>{bytes_text(needed)}</b> {answer.how}: the peak is {where}. "
        smallest = next((name for name, size in drawings.CARDS.items() if size >= needed), None)
        text += f"It fits on cards from {smallest} up" if smallest else "It fits on none of these cards"
        for own in limits.keys() - drawings.CARDS:
            is_enough = "is large enough" if limits[own] >= needed else "is too small"
            text += f"; {own} ({bytes_text(limits[own])}) {is_enough}"
        text += "."
        if "context" in parts:
            text += " The context is that of a V100, the one figure that is published; yours may differ."
        elif self.controls["device"].value == "cuda":
            text += " The CUDA context comes on top."
        self.note.value = f"<div role='status' style='line-height:1.4'>{text}</div>"

    def _drawn(self, answer: surfaces.Answer) -> str:
        return drawings.bar(self._parts(answer), self._limits())

    def _parts(self, answer: surfaces.Answer) -> dict[str, int]:
        context = self._context_bytes if self.controls["device"].value == "cuda" else None
        return answer.breakdown | ({"context": context} if context else {})

    def _limits(self) -> dict[str, int]:
        """Of cards and, where the figure is for its kind of device, of this machine."""
        kind, own = self._machine.kind, {}
        if kind == self.controls["device"].value:
            size = self._machine.gpus[0].memory_bytes if kind == "cuda" else self._machine.memory_bytes
            own = {"this machine": size} if size else {}
        return drawings.CARDS | own


def _small(text: str) -> str:
    return f"<div style='font-size:12px;line-height:1.4'>{text}</div>"
