"""Why one recipe takes more memory than another: the peaks switch by switch, and tensor by tensor with the line of the
model's code that asked for each; and what of the model as it was built its user may not expect.

Both are followed as for an estimate, and a `Witness` looks on. At each operation it notes the innermost line of Python
outside the libraries. Autograd has none: what it makes has the line where the forward of its module begins, and so has
what belongs to a parameter.
"""

import bisect
import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from perf_helpers.estimate import allocator_replay, prediction
from perf_helpers.estimate.allocator import rounded
from perf_helpers.estimate.estimates import KNOWLEDGE, estimate, target
from perf_helpers.lab import adapters, optional_packages, progress
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.outcomes import Invalid
from perf_helpers.lab.task import Task
from perf_helpers.lab.training import Experiment
from perf_helpers.records import Category
from perf_helpers.texts import bytes_text, name_text

_ROWS = 10  # tensors that are shown one by one
_MOST_ALONE = 4  # switches up to which each is priced alone, too: but for the first an estimate more for each
# Between the model's code and torch: their lines are passed over; those of what calls the model end the search.
_LIBRARIES = {"torch", "accelerate", "peft", "bitsandbytes", "perf_helpers", "contextlib.py", "functools.py"}
_CALLERS = ("transformers/trainer", "perf_helpers/lab/training.py")

Tensor = tuple[str, str, str, str]  # category, module or parameter with "*" for numbers, operation, file:line


@dataclass(frozen=True, slots=True)
class Switch:
    """Arguments that go from A's values to B's."""

    arguments: tuple[str, ...]  # more than one where the first ones cannot be switched without the last
    price_bytes: int  # of the peak, after the switches before it: these sum to the whole difference
    alone_bytes: int | None  # switched in A and nothing else; None: not asked for, or no recipe


@dataclass(frozen=True, slots=True)
class Explanation:
    """The difference of two recipes, A and B. Pairs of bytes are (in A, in B)."""

    a: prediction.MemoryEstimate
    b: prediction.MemoryEstimate
    switches: tuple[Switch, ...]  # in the order in which they were switched
    tensors: dict[Tensor, tuple[int, int]]  # alive at each peak, the largest difference first; sums to the peaks
    warnings: dict[str, tuple[str, ...]]  # what holds of "A", and of "B"

    @property
    def difference_bytes(self) -> int:
        """What B takes more than A."""
        return self.b.peak_bytes - self.a.peak_bytes

    def by_category(self) -> dict[str, tuple[int, int]]:
        a, b = self.a.memory.breakdown, self.b.memory.breakdown
        return {str(name): (a[name], b[name]) for name in a if a[name] or b[name]}

    def by_tensor(self, count: int = _ROWS) -> list[tuple[Tensor, tuple[int, int]]]:
        """So many tensors, and the sum of all others."""
        every = [*self.tensors.items()]
        others = (
            ("others", f"{len(every) - count} more", "", ""),
            tuple(map(sum, zip(*(s for _, s in every[count:])))),
        )
        return every[:count] + ([others] if every[count:] else [])

    def to_dict(self) -> dict[str, Any]:
        def sizes(a: int, b: int) -> dict[str, int]:
            return {"a_bytes": a, "b_bytes": b, "difference_bytes": b - a}

        columns = ("category", "module", "operation", "source")
        return {
            **{name: each.to_dict() | {"peak_bytes": each.peak_bytes} for name, each in (("a", self.a), ("b", self.b))},
            "difference_bytes": self.difference_bytes,
            "by_category": {name: sizes(*pair) for name, pair in self.by_category().items()},
            "switches": [*map(dataclasses.asdict, self.switches)],
            "by_tensor": [dict(zip(columns, each, strict=True)) | sizes(*pair) for each, pair in self.by_tensor()],
            "warnings": self.warnings,
        }

    def __repr__(self) -> str:
        def line(name: str, *texts: Any) -> str:
            shown = (f"{'+' * (each > 0)}{bytes_text(each)}" if isinstance(each, int) else each for each in texts)
            return f"  {name:<60} {' '.join(f'{each:>12}' for each in shown)}".rstrip()

        def pair(name: str, a: int, b: int) -> str:
            return line(name, bytes_text(a), bytes_text(b), b - a)

        made = [
            f"{each.name}: {bytes_text(each.peak_bytes)}, in the {each.memory.peak_phase}" for each in (self.a, self.b)
        ]
        lines = [*made, "", line("by category, at each peak", "A", "B", "B - A")]
        lines += [pair(name_text(name), *sizes) for name, sizes in self.by_category().items()]
        lines += [pair("all", self.a.peak_bytes, self.b.peak_bytes), ""]
        lines += [line("switches, one after the other", "price", "alone")]
        for each in self.switches:
            lines.append(
                line(", ".join(each.arguments), each.price_bytes, "" if each.alone_bytes is None else each.alone_bytes)
            )
        lines += ["", line("by tensor, at each peak", "A", "B", "B - A")]
        for (category, module, operation, source), sizes in self.by_tensor():
            lines.append(pair(" ".join(filter(None, (name_text(category), module))), *sizes))
            lines += [f"      {' at '.join(filter(None, (operation, source)))}"] if operation else []
        a, b = self.warnings["A"], self.warnings["B"]
        told = [f"{'A and B' if text in b else 'A'}: {text}" for text in a] + [
            f"B: {text}" for text in b if text not in a
        ]
        return "\n".join(lines + (["", *told] if told else []))


def explain(
    task: Task, a: Mapping[str, Any], b: Mapping[str, Any], *, processes: int = 1, timeout: float = 300, **where: Any
) -> Explanation:
    """Why a training by recipe B would peak higher, or lower, than by A. Nothing is run, as with `estimate`.

    Args:
        a, b: all training arguments of each, as `estimate` takes them. They are switched from A to B in the order in
            which B names them, then those that A alone names.
        processes, timeout: as in `estimate`, of which this makes one more than there are switches, and those alone.
        where: card, device, compute_capability, device_memory, allocator_settings, as in `estimate`.

    Raises:
        ValueError: A and B do not differ, or whatever `estimate` raises it for.
    """
    given = Arguments.of(a), Arguments.of(b)
    names = [name for name in {**b, **a} if given[0].get(name) != given[1].get(name)]
    if not names:
        raise ValueError("a and b are one recipe: give b an argument that a has not, or another value")
    if any(each.adapters.get("peft") is not None for each in given):
        optional_packages.offer("peft")
    ask = functools.partial(estimate, task, processes=processes, timeout=timeout, **where)
    found = []
    for name, arguments in zip("AB", given, strict=True):
        ask(**arguments.given)  # says what is wrong with it, and is what its price is counted from
        experiment = Experiment(name, task, arguments, processes=processes)
        with progress.percent(f"explaining {name}") as bar:
            more = {"timeout": timeout, "on_percent": lambda percent, bar=bar: bar.update(percent - bar.n)}
            found.append(KNOWLEDGE.ask(_explained, experiment, target(**where), model=task.model, **more))
    (made_a, live_a, warnings_a), (made_b, live_b, warnings_b) = found
    tensors = {each: (live_a[each], live_b[each]) for each in live_a | live_b}
    order = sorted(tensors, key=lambda each: (-abs(tensors[each][1] - tensors[each][0]), -tensors[each][0], each))
    switches = _priced(names, given[0].given, given[1].given, ask)
    warnings = {"A": warnings_a, "B": warnings_b}
    return Explanation(made_a, made_b, switches, {each: tensors[each] for each in order}, warnings)


def _priced(names: list[str], a: Mapping[str, Any], b: Mapping[str, Any], ask: Callable) -> tuple[Switch, ...]:
    def peak(switched: Iterable[str]) -> int | None:
        """Of A with these as in B; None where that is no recipe."""
        kept = {name: value for name, value in a.items() if name not in switched}
        with contextlib.suppress(ValueError):
            return ask(**kept, **{name: b[name] for name in switched if name in b}).peak_bytes

    found, first, before = [], peak([]), peak([])
    for number in range(1, len(names) + 1):
        if (after := peak(names[:number])) is not None:
            own = tuple(names[sum(len(each.arguments) for each in found) : number])
            found.append(Switch(own, after - before, None))
            before = after
    alone = [peak(each.arguments) if len(found) <= _MOST_ALONE else None for each in found]
    sizes = [None if size is None else size - first for size in alone]
    return tuple(dataclasses.replace(each, alone_bytes=size) for each, size in zip(found, sizes, strict=True))


# ---- in the clean process


def _explained(experiment: Experiment, device: prediction.Device, probe: Any, tell: prediction.Tell):
    """The estimate, bytes by tensor at its peak, and warnings. To be called by `prediction.with_known`."""
    (followed,) = prediction.follow_all([experiment], device, probe, tell, _witnessed)
    made, (blocks, ends, warnings) = prediction.estimated(experiment, followed, device), followed.trace.told
    log, on_cuda, live = followed.trace.log, device.kind == "cuda", Counter()
    peak = None if on_cuda else ends[followed.totals.argmax()]
    for event in log.events[
        : allocator_replay.replayed(log, device.settings, device.memory_bytes).peak if on_cuda else peak
    ]:
        number, sign = (event, 1) if event >= 0 else (~event, -1)
        (size, label), (module, source) = log.blocks[number], blocks[number]
        live[str(label.category), module, label.operation, source] += sign * (rounded(size) if on_cuda else size)
    hidden = "rounding of the allocator" if on_cuda else made.memory.peak_operation
    live[str(Category.INSIDE_OPERATIONS), "", hidden, ""] += made.peak_bytes - live.total()
    return made, Counter({tensor: size for tensor, size in live.items() if size}), warnings


def _witnessed(experiment: Experiment, tracker: Any):
    """`trace.follow`, and what a witness tells: (module, line) of each block, ends of operations, warnings."""
    from perf_helpers.estimate import trace

    witness = Witness(tracker)
    with witness.looking():
        try:
            found = trace.follow(experiment, tracker)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise Invalid(f"nothing trains: {_IDLE}") from None
    first = next((operations for label, _, operations in tracker.marks if label == "start"), 0)
    ends = [end for end, *_ in tracker.operations[first:]]
    told = witness.births(), ends, witness.warnings(experiment.arguments)
    return dataclasses.replace(found, log=found.log or trace.recorded(tracker), told=told)


_IDLE = "through re-entrant checkpointing a gradient flows only where an input requires one. Give use_reentrant=False"


class Witness:
    """Looks on while a tracker follows a training."""

    def __init__(self, tracker: Any):
        self._tracker, self._execute, self._prepared = tracker, tracker.execute, adapters.prepared
        self._model: Any = None  # the outermost module that was called
        self._lines: dict[int, str] = {}  # by the number of the operation
        self._owners: dict[int, str] = {}  # parameters, by the id of a block that holds one, its gradient or states
        self._cast: dict[str, int] = {}  # parameters that were cast up, in bytes that they take now
        self._idle: dict[str, int] = {}  # parameters that should learn and got no gradient, in bytes

    @contextlib.contextmanager
    def looking(self):
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
                stack.callback(register(self._note).remove)
            stack.enter_context(patch.object(self._tracker, "execute", self._see))
            stack.enter_context(patch.object(adapters, "prepared", self._prepare))
            yield

    def _enter(self, module, _) -> None:
        self._model = self._model or module

    def _see(self, function, args, kwargs):
        self._lines[len(self._tracker.operations)] = _line(sys._getframe(1))
        return self._execute(function, args, kwargs)

    def _prepare(self, model, checkpointing):
        before = {name: each.nbytes for name, each in model.named_parameters()}
        made = self._prepared(model, checkpointing)
        self._cast = {name: each.nbytes for name, each in made.named_parameters() if each.nbytes > before[name]}
        return made

    def _note(self, optimizer: Any, *_) -> None:
        """Whose the blocks of weights, gradients and the optimizer's states are."""
        import torch
        from torch.utils._pytree import tree_leaves

        of_codes = {id(weight): kept for weight, kept in adapters.constants(self._model)}
        for name, weight in itertools.chain(self._model.named_parameters(), self._model.named_buffers()):
            if weight.requires_grad and weight.grad is None and not optimizer.state.get(weight):
                self._idle[name] = weight.nbytes
            for leaf in tree_leaves([weight, weight.grad, optimizer.state.get(weight), of_codes.get(id(weight))]):
                if isinstance(leaf, torch.Tensor) and (block := self._tracker.block(leaf)):
                    self._owners.setdefault(id(block), name)

    def births(self) -> list[tuple[str, str]]:
        """(module or parameter, line) of each block, in the order of births."""
        operations, known = self._tracker.operations, {}
        ends, found = [end for end, *_ in operations], []
        for position, (block, sign) in enumerate(self._tracker.log):
            number = min(bisect.bisect_right(ends, position), len(ends) - 1)
            name = self._owners.get(id(block))
            line = None if name else self._lines.get(number)
            if name is None:
                was_sent = block.operation in ("before", "copy to the device")
                name, line = ("", "") if was_sent else (operations[number][3], line)
            if sign > 0:
                found.append(known.setdefault((name, line), (_plain(name), line or self._forward_of(name))))
        return found

    def _forward_of(self, name: str) -> str:
        """The line at which the forward begins of the module that has this name, or holds the parameter: of the
        nearest around it that is the model's own."""
        modules = self._modules
        while name:
            code = getattr(inspect.unwrap(type(modules[name]).forward), "__code__", None) if name in modules else None
            if code and not _is_library(_shown(code.co_filename)):
                return f"{_shown(code.co_filename)}:{code.co_firstlineno}"
            name = name.rpartition(".")[0]
        return ""

    @functools.cached_property
    def _modules(self) -> dict[str, Any]:
        return {name.removeprefix("module."): module for name, module in self._model.named_modules()}

    def warnings(self, arguments: Arguments) -> tuple[str, ...]:
        """What holds of the model as it was built, each with its evidence."""
        import torch

        adapted, modules = arguments.adapters.get("peft") is not None, self._modules
        weights = dict(self._model.named_parameters())
        base = {n: w for n, w in weights.items() if w.is_floating_point() and not (adapted and w.requires_grad)}
        owner = {name: modules.get(name.rpartition(".")[0]) for name in base}
        experts = [
            n for n, w in base.items() if w.dim() > 2 and not isinstance(owner[n], torch.nn.modules.conv._ConvNd)
        ]
        linear = [n for n in base if isinstance(owner[n], torch.nn.Linear) and n.endswith(".weight")]
        saved = {name: weight.nbytes for name, weight in weights.items() if ".modules_to_save." in name}
        head, embedding = (getattr(self._model, f"get_{end}put_embeddings", lambda: None)() for end in ("out", "in"))
        tied = getattr(head, "weight", None) is getattr(embedding, "weight", 0)
        found = []

        def tell(text: str, names: Mapping[str, int] | Iterable[str]) -> None:
            sizes = names if isinstance(names, Mapping) else {name: weights[name].nbytes for name in names}
            shown = [*dict.fromkeys(map(_plain, sizes))]
            more = f" and {len(shown) - 3} more" * (len(shown) > 3)
            if shown:
                found.append(f"{text}: {', '.join(shown[:3])}{more}, {bytes_text(sum(sizes.values()))}")

        if arguments.quantization:
            tell("these experts are not quantized: they are no linear layers, and only those are", experts)
            tell("these linear layers are not quantized", linear)
        elif adapted:
            tell(
                "the frozen weights are in fp32: dtype=bfloat16 takes half",
                [n for n in base if base[n].dtype is torch.float32],
            )
        tell("prepare_model_for_kbit_training cast these to fp32", self._cast)
        tell("modules_to_save copies these whole, and the copies learn, with gradients and states", saved)
        if arguments.adapters and tied:
            tell(
                "the head is the embedding, one weight that is held whole",
                [n for n, w in weights.items() if w is head.weight],
            )
        if arguments.get("gradient_checkpointing"):
            tell(f"these get no gradient, for {_IDLE}", self._idle)
        return tuple(found)


def _line(frame: Any) -> str:
    """The innermost line outside the libraries, as file:line; "" where what calls the model comes first."""
    while frame is not None:
        file = _shown(frame.f_code.co_filename)
        if file.startswith(_CALLERS):
            return ""
        if not _is_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(file: str) -> bool:
    return file.startswith("<") or file.partition("/")[0] in _LIBRARIES


@functools.cache
def _shown(file: str) -> str:
    """A file below the folder that it is imported from."""
    folders = [each for each in sys.path if each and file.startswith(each + os.sep)]
    return file[len(max(folders, key=len)) + 1 :].replace(os.sep, "/") if folders else file


def _plain(name: str) -> str:
    """The name of a module or a parameter, one for all layers, and the same with adapters as without."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("module.").removeprefix("base_model.model."))
    return name.replace(".base_layer", "").replace(".default", "")
