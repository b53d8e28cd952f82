"""Explorers: pictures of memory and speed that follow their controls. Without a front end each leaves a static picture.

What takes longer than a glance, tracing, is done by one thread in the background. It begins when a control is first
moved, waits while an experiment is measured, and ends with its widget.
"""

import html
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perf_helpers import plots
from perf_helpers.estimate import surfaces as fits
from perf_helpers.estimate.estimates import MemoryEstimate, estimate, estimates_so_far
from perf_helpers.lab import arguments as training_arguments
from perf_helpers.lab import processes
from perf_helpers.lab.runs import CATEGORIES, Run
from perf_helpers.lab.task import PRESETS, Task
from perf_helpers.unknown import is_measured
from perf_helpers.widgets import drawings
from perf_helpers.widgets import frame as widgets

CARDS = {f"{size} GB": size * 2**30 for size in (8, 16, 24, 40, 80, 141)}  # as they are sold: 8 GB are 8 * 2^30 bytes
_ROW = {"display": "flex", "flex_flow": "row wrap", **widgets.WHOLE_WIDTH}
_DIM = "opacity:0.35"
_REST_SECONDS = 0.5  # without a move, before the point itself is traced


# --------------------------------------------------------------------------------------------------------------- memory


def memory(lab, task: Task | None = None, *, device: str | None = None, micro_batch: int | None = None) -> None:
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
    size = fits.nearest(fits.MICRO_BATCHES, micro_batch or lab.profile.micro_batch)
    first = estimate(task, device=device or lab.machine.kind, **fits.Choice().arguments(size))
    explorer = _MemoryExplorer(lab, task, first, size)
    title = f"{task.model}, micro-batch {size}"
    static = widgets.image(plots.memory([first], title=title), f"{title}: {_parts_text(first.memory.breakdown)}")
    widgets.place(("memory explorer", lab.lesson), explorer.box, static, repr(first), explorer.close)


class _MemoryExplorer:
    """The controls, the picture, and what is known of the models looked at."""

    def __init__(self, lab, task: Task, first: MemoryEstimate, micro_batch: int):
        import ipywidgets

        self._task, self._machine = task, lab.machine
        gpu = next((gpu for gpu in lab.machine.gpus if gpu.capability), None)
        self._capability = gpu.capability if gpu else (9, 0)
        self._folder = Path(lab.store.path).with_name("fits")
        self._all: dict[tuple[str, str], fits.Fits] = {}
        self._context: int | None = None
        self._lock, self._wake, self._closed = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._answer: fits.Answer | None = None
        self._ready: set[tuple[str, str]] = set()

        width = {"description_width": "7.5em"}
        field = {"style": width, "layout": {**widgets.WHOLE_WIDTH, "flex": "1 1 20em"}}
        length = first.task.get("seq_len") or task.length() if task.family() != "vision" else None
        lengths = fits.LENGTHS if length in fits.LENGTHS else sorted({*fits.LENGTHS, length or 32})
        self.controls = {
            "model": ipywidgets.Combobox(
                options=sorted({task.model, *PRESETS}),
                value=task.model,
                description="model",
                continuous_update=False,
                placeholder="a preset, a config.json, a name on the Hub",
                **field,
            ),
            "device": ipywidgets.Dropdown(
                options=[("a GPU", "cuda"), ("a CPU", "cpu")], value=first.device, description="on", **field
            ),
            "micro_batch": ipywidgets.SelectionSlider(
                options=fits.MICRO_BATCHES, value=micro_batch, description="micro-batch", **field
            ),
            "seq_len": ipywidgets.SelectionSlider(
                options=lengths, value=length or 32, description="length", disabled=length is None, **field
            ),
            "precision": ipywidgets.Dropdown(
                options=fits.precisions(first.device), value="fp32", description="precision", **field
            ),
            "checkpointing": ipywidgets.Dropdown(
                options=[("none", False), ("every layer", True)], value=False, description="checkpointing", **field
            ),
            "accumulation": ipywidgets.SelectionSlider(
                options=fits.ACCUMULATION, value=1, description="accumulation", **field
            ),
            "optimizer": ipywidgets.Dropdown(options=list(fits.OPTIMIZERS), description="optimizer", **field),
            "attention": ipywidgets.Dropdown(options=list(fits.ATTENTION), description="attention", **field),
        }
        self.picture, self.note, self.known = _html(), _html(), _html()
        self.output = ipywidgets.Output()
        self._callback = widgets.guarded(self._moved, self.output)
        for control in self.controls.values():
            control.observe(self._callback, names="value")
        grid = ipywidgets.Box(list(self.controls.values()), layout=_ROW)
        parts = [grid, self.picture, self.note, self.known, self.output]
        self.box = ipywidgets.VBox(parts, layout=widgets.WHOLE_WIDTH)
        memory = first.memory
        self._show(fits.Answer(memory.breakdown, memory.peak_phase, memory.peak_operation, "traced"))
        self.known.value = _small("Move a control: the recipes around it are then traced, for some seconds.")

    # ---- the controls

    def _moved(self, change) -> None:
        if change["owner"] is self.controls["device"]:
            self.controls["precision"].options = fits.precisions(change["new"])
        self._error = None
        self._draw()
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="memory explorer", daemon=True)
            self._thread.start()

    def _place(self) -> tuple[fits.Fits, fits.Choice, int, int | None]:
        """Where the controls stand."""
        value = {name: control.value for name, control in self.controls.items()}
        names = ("precision", "checkpointing", "accumulation", "optimizer", "attention")
        model = value["model"].strip()
        with self._lock:
            key = model, value["device"]
            if key not in self._all:
                task = self._task if model == self._task.model else Task(model)
                self._all[key] = fits.Fits(task, value["device"], self._capability, self._folder)
        found = self._all[key]
        length = value["seq_len"] if found.lengths or not self._is_ready(found) else None
        return found, fits.Choice(**{name: value[name] for name in names}), value["micro_batch"], length

    def _is_ready(self, found: fits.Fits) -> bool:
        return (found.task.model, found.device) in self._ready

    # ---- the thread

    def _work(self) -> None:
        try:
            while not self._closed:
                if not self._step():
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:  # what is raised in a thread is seen by nobody
            text = f"{type(error).__name__}: {error}"
            shown = {"output_type": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": [text]}
            self.output.outputs = (*self.output.outputs, shown)

    def _step(self) -> bool:
        """Do what is most wanted; False if there is nothing left to do."""
        found, choice, size, length = self._place()
        while processes.are_measuring() and not self._closed:
            time.sleep(0.2)
        try:
            if not self._is_ready(found):
                found.prepare()
                self._prepared(found)
            elif not found.is_known(choice):
                found.learn(choice)
            elif self._is_interpolated(found, choice, size, length):
                self._wake.clear()
                if self._wake.wait(_REST_SECONDS):
                    return True  # it was moved on
                found.trace(choice, size, length)
            elif near := next((near for near in found.choices(choice) if not found.is_known(near)), None):
                found.learn(near)
            else:
                return False
        except ValueError as error:
            self._error = str(error)
            self._draw()
            return False
        self._draw()
        return True

    def _is_interpolated(self, found, choice, size, length) -> bool:
        answer = found.answer(choice, size, length)
        return answer is not None and answer.how == "interpolated"

    def _prepared(self, found: fits.Fits) -> None:
        """Offer the lengths that the model can take."""
        if found.device == "cuda" and self._context is None:
            from perf_helpers.estimate import allocator

            self._context = allocator.context_bytes((7, 0))
        slider = self.controls["seq_len"]
        self._ready.add((found.task.model, found.device))
        if found.lengths:
            wanted = fits.nearest(found.lengths, slider.value)
            if tuple(slider.options) != found.lengths:
                slider.unobserve(self._callback, names="value")  # it is not moved by the learner
                slider.options, slider.value = found.lengths, wanted
                slider.observe(self._callback, names="value")
        slider.disabled = not found.lengths

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._closed = True
        self._wake.set()

    # ---- the picture

    def _draw(self) -> None:
        if self._closed:
            return
        found, choice, size, length = self._place()
        answer = found.answer(choice, size, length) if self._is_ready(found) else None
        refused = self._error or found.refusal(choice)
        if answer is not None:
            self._show(answer)
        else:
            self.picture.value = f"<div style='{_DIM}'>{self._drawn(self._answer)}</div>"
            text = f"✗ {refused}" if refused else f"Tracing {found.task.model} with this recipe: a few seconds ..."
            self.note.value = f"<div role='status'>{html.escape(text)}</div>"
        every = list(found.choices(choice))
        count = sum(found.is_known(each) for each in every)
        state = "all are answered at once" if count == len(every) else "the others are being traced"
        bar = f"<progress value='{count}' max='{len(every)}' aria-label='recipes known'></progress>"
        self.known.value = _small(f"{bar} {count} of {len(every)} ways of training known: {state}.")

    def _show(self, answer: fits.Answer) -> None:
        self._answer = answer
        self.picture.value = self._drawn(answer)
        parts, limits = self._parts(answer), self._limits()
        needed = sum(parts.values())
        text = f"<b>{plots.bytes_text(needed)}</b> {answer.how}: the peak is in {answer.phase}, at {answer.operation}. "
        smallest = next((name for name in CARDS if CARDS[name] >= needed), None)
        text += f"It fits on cards from {smallest} up" if smallest else "It fits on none of these cards"
        own = next((name for name in limits if name not in CARDS), None)
        if own:
            is_enough = "is large enough" if limits[own] >= needed else "is too small"
            text += f"; {own} ({plots.bytes_text(limits[own])}) {is_enough}"
        text += "."
        if "context" in parts:
            text += " The context is that of a V100, the one figure that is published; yours may differ."
        elif self.controls["device"].value == "cuda":
            text += " The CUDA context comes on top."
        self.note.value = f"<div role='status' style='line-height:1.4'>{text}</div>"

    def _drawn(self, answer: fits.Answer) -> str:
        return drawings.bar(self._parts(answer), self._limits())

    def _parts(self, answer: fits.Answer) -> dict[str, int]:
        context = self._context if self.controls["device"].value == "cuda" else None
        return answer.breakdown | ({"context": context} if context else {})

    def _limits(self) -> dict[str, int]:
        """Of cards and, where the figure is for its kind of device, of this machine."""
        kind, own = self._machine.kind, {}
        if kind == self.controls["device"].value:
            size = self._machine.gpus[0].memory_bytes if kind == "cuda" else self._machine.memory_bytes
            own = {"this machine": size} if size else {}
        return CARDS | own


# ------------------------------------------------------------------------------------------------------------- timeline


def timeline(*runs: Run | MemoryEstimate) -> None:
    """Live memory by category through one step, a slider to its moments, and a second run under the first to compare.

    Args:
        runs: those on offer, the first two shown; each measured with its memory.

    Raises:
        ValueError: none of them has a timeline.
    """
    import ipywidgets

    runs = {run.name: run for run in runs if run.memory and run.memory.timeline}
    if not runs:
        raise ValueError("none of these runs has a timeline: run them with measure=('memory',)")
    names = list(runs)
    wide = {**widgets.WHOLE_WIDTH, "flex": "1 1 18em"}
    upper = ipywidgets.Dropdown(options=names, value=names[0], description="above", layout=wide)
    lower = ipywidgets.Dropdown(options=["", *names], value=[*names, ""][1], description="below", layout=wide)
    last = max(len(run.memory.timeline["phase"]) for run in runs.values()) - 1
    moment = ipywidgets.IntSlider(min=0, max=last, description="moment", readout=False, layout=widgets.WHOLE_WIDTH)
    picture, output = _html(), ipywidgets.Output()

    def draw(_=None) -> None:
        picture.value = _timelines([runs[name] for name in (upper.value, lower.value) if name], moment.value / last)

    def to_the_peak(_=None) -> None:
        series = runs[upper.value].memory.timeline
        place = round(last * drawings.peak_of(series) / (len(series["phase"]) - 1))
        if moment.value == place:
            draw()
        moment.value = place

    button = ipywidgets.Button(description="to the peak", tooltip="move to the peak of the upper run")
    button.on_click(widgets.guarded(to_the_peak, output))
    for control in (upper, lower, moment):
        control.observe(widgets.guarded(draw, output), names="value")
    to_the_peak()
    top = ipywidgets.Box([upper, lower, button] if len(names) > 1 else [button], layout=_ROW)
    box = ipywidgets.VBox([top, moment, picture, output], layout=widgets.WHOLE_WIDTH)
    shown = [runs[name] for name in names[:2]]
    static = "".join(widgets.image(plots.timeline(run), _peak_text(run)) for run in shown)
    widgets.place(("timeline", *names), box, static, "\n".join(map(_peak_text, shown)))


def _timelines(runs: Sequence[Run], share: float) -> str:
    """The timelines of one or two runs on one scale, and the moment chosen in words."""
    series = [run.memory.timeline for run in runs]
    top = max(max(drawings.totals_of(each)) for each in series)
    places = [round(share * (len(each["phase"]) - 1)) for each in series]
    pictures = "".join(
        drawings.timeline(each, top, place, run.name) for run, each, place in zip(runs, series, places, strict=True)
    )
    shown = [name for name in CATEGORIES if any(max(each[name]) > 0.002 * top for each in series)]
    at = [_moment(each, place) for each, place in zip(series, places, strict=True)]
    rows = [[key, *(cells[key] for cells in at)] for key in ("phase", "operation", "module", "total", *shown)]
    return pictures + drawings.table(["at the line", *(run.name for run in runs)], rows)


def _moment(series: dict[str, Any], place: int) -> dict[str, str]:
    """A moment in words: where it is, and its bytes."""
    where = {name: (series.get(name) or {place: ""})[place] for name in ("phase", "operation", "module")}
    parts = {name: series[name][place] for name in CATEGORIES}
    return where | {name: plots.bytes_text(size) for name, size in (parts | {"total": sum(parts.values())}).items()}


def _peak_text(run: Run) -> str:
    series = run.memory.timeline
    return f"{run.name}: peak {drawings.moment_text(series, drawings.peak_of(series))}"


# -------------------------------------------------------------------------------------------------------------- recipes


def recipes(lab, *more: Run) -> None:
    """Every run and estimate so far as memory against throughput, with the arguments of the one selected, to paste.

    Throughputs of different days are never in one picture: the earlier runs of this machine are offered by day.

    Args:
        more: runs to offer beside those of the lab.
    """
    import ipywidgets

    groups = _groups(lab, more)
    if not groups:
        raise ValueError("no run so far has its memory measured: train something first")
    wide = {"layout": {**widgets.WHOLE_WIDTH, "flex": "1 1 18em"}}
    group = ipywidgets.Dropdown(options=list(groups), description="runs of", **wide)
    card = ipywidgets.Dropdown(options=[("any", None), *CARDS.items()], description="fits on", **wide)
    limit = ipywidgets.FloatText(value=0, description="or MB", tooltip="0: no limit", **wide)
    chosen = ipywidgets.Select(description="recipe", rows=8, layout=widgets.WHOLE_WIDTH)
    picture, text, output = _html(), _html(), ipywidgets.Output()

    def fitting() -> list[_Recipe]:
        most = min([size for size in (card.value, limit.value * 1e6) if size] or [float("inf")])
        return [item for item in groups[group.value] if item.peak_bytes <= most]

    def offer(_=None) -> None:
        found = fitting()
        front = _front(found)
        options = [(item.line(item in front), number) for number, item in enumerate(found)]
        before = chosen.value
        chosen.options = options
        chosen.value = next(iter(sorted(found.index(item) for item in front)), 0 if found else None)
        if chosen.value == before:
            draw()

    def draw(_=None) -> None:
        found = fitting()
        if not found:
            picture.value, text.value = "Nothing fits.", ""
            return
        selected = found[chosen.value or 0]
        picture.value = _scattered(found, selected, CARDS | ({"limit": limit.value * 1e6} if limit.value else {}))
        code = html.escape(training_arguments.to_python(selected.arguments))
        text.value = f"<b>{html.escape(selected.name)}</b>, {html.escape(selected.task)}<pre>{code}</pre>"

    for control in (group, card, limit):
        control.observe(widgets.guarded(offer, output), names="value")
    chosen.observe(widgets.guarded(draw, output), names="value")
    offer()
    controls = ipywidgets.Box([group, card, limit], layout=_ROW)
    box = ipywidgets.VBox([controls, picture, chosen, text, output], layout=widgets.WHOLE_WIDTH)
    found = next(iter(groups.values()))
    header = ["recipe", "peak", "samples/s", "best of both", "arguments"]
    front = _front(found)
    rows = [[*item.cells(), "yes" if item in front else "", _inline(item.arguments)] for item in found]
    table = plots.Table(header, rows)
    widgets.place(("recipes", lab.lesson), box, table._repr_html_(), repr(table))


class _Recipe:
    """A run or an estimate as a point."""

    def __init__(self, found: Run | MemoryEstimate):
        self.name, self.peak_bytes, self.arguments = found.name, found.peak_bytes, dict(found.arguments)
        speed = getattr(found, "samples_per_second", None)
        self.speed = speed if is_measured(speed) else None
        self.kind = found.memory.kind
        self.task = str(Task.from_dict(found.task))

    def cells(self) -> list[str]:
        speed = "not measured" if self.speed is None else f"{self.speed:.3g}"
        return [f"{self.name} ({self.kind})", plots.bytes_text(self.peak_bytes), speed]

    def line(self, is_best: bool) -> str:
        name, peak, speed = self.cells()
        speed = drawings.NO_SPEED if self.speed is None else f"{speed} samples/s"
        return f"{peak}, {speed}: {name}{' ★' if is_best else ''}"


def _groups(lab, more: Sequence[Run]) -> dict[str, list[_Recipe]]:
    """What is shown together: one task, one session."""
    session = {run.id for run in lab.runs}
    labelled: dict[str, dict[str, _Recipe]] = {}

    def add(label: str, found) -> None:
        if found.memory is None or not found.arguments or found.peak_bytes is None:
            return
        item = _Recipe(found)
        labelled.setdefault(f"{label}: {Task.from_dict(found.task).model}", {})[f"{item.name} {item.kind}"] = item

    for run in [*lab.runs, *more]:
        if run.ok:
            add("this notebook", run)
    for found in estimates_so_far():
        if found.device == lab.machine.kind:
            add("this notebook", found)
    machine = lab.machine.name
    for run in lab.store.read():
        if run.ok and run.id not in session and run.machine.get("name") == machine:
            add(run.date[:10], run)
    groups = {label: sorted(items.values(), key=lambda item: item.peak_bytes) for label, items in labelled.items()}
    first = f"this notebook: {lab.task.model}"
    return dict(sorted(groups.items(), key=lambda pair: (pair[0] != first, not pair[0].startswith("this"), pair[0])))


def _front(found: Sequence[_Recipe]) -> list[_Recipe]:
    """Those for which no other is both smaller and faster."""
    timed = [item for item in found if item.speed is not None]
    return [
        item
        for item in timed
        if not any(
            other.peak_bytes <= item.peak_bytes
            and other.speed >= item.speed
            and (other.peak_bytes, other.speed) != (item.peak_bytes, item.speed)
            for other in timed
        )
    ]


def _scattered(found: Sequence[_Recipe], selected: _Recipe, limits: dict[str, float]) -> str:
    kinds = list(dict.fromkeys(item.kind for item in found))
    front = _front(found)
    points = [
        drawings.Point(item.name, item.peak_bytes, item.speed, kinds.index(item.kind), item in front, item is selected)
        for item in found
    ]
    return drawings.scatter(points, limits, kinds)


def _inline(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _parts_text(parts: dict[str, int]) -> str:
    return ", ".join(f"{plots.name_text(name)} {plots.bytes_text(size)}" for name, size in parts.items() if size > 0)


def _html():
    """A place for HTML that is never wider than its cell."""
    import ipywidgets

    return ipywidgets.HTML(layout={**widgets.WHOLE_WIDTH, "min_width": "0", "overflow": "hidden"})


def _small(text: str) -> str:
    return f"<div style='font-size:12px;line-height:1.4'>{text}</div>"
