"""Explain why one recipe takes more memory than another: by argument, and by tensor with its line of code.

A recipe is a set of training arguments. The explanation also warns of properties of the built model that a user may not
expect. Both recipes are traced as for an estimate, while a `Witness` notes, for each operation, the innermost line of
Python outside the libraries. A tensor that autograd allocates, or that belongs to a parameter, gets the first line of
its module's forward.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from trainmem.core import adapters, optional_packages, progress
from trainmem.core.arguments import Arguments
from trainmem.core.outcomes import Invalid
from trainmem.core.task import Task
from trainmem.core.training import Experiment
from trainmem.estimate import allocator_replay, api, peak_memory
from trainmem.estimate.allocator import rounded
from trainmem.estimate.fresh_process import Tell, ask
from trainmem.estimate.memory_estimate import Device, MemoryEstimate
from trainmem.records import Category, Phase
from trainmem.texts import arguments_of_kind, bytes_text, name_text, phase_text

_ROWS = 10  # tensors that are shown one by one
_MOST_ALONE = 4  # up to this many switches, each is also priced alone: one more estimate for all but the first
# Files between the model's code and torch, whose lines are skipped; files that call the model end the search.
_LIBRARIES = {"torch", "accelerate", "peft", "bitsandbytes", "trainmem", "contextlib.py", "functools.py"}
_CALLERS = ("transformers/trainer", "trainmem/core/training.py")
_IDLE = "re-entrant checkpointing passes gradients only to inputs that require one. Set use_reentrant=False"

# (category, module or parameter with "*" for numbers, operation, file:line). All weights have one category and no
# operation, so that a weight is the same tensor whether it is trained, frozen or quantized.
Tensor = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Hold the difference of recipes A and B by argument, category and tensor.

    For a category and for a tensor, a pair of numbers is (bytes in A, bytes in B); for arguments, see `switches`.
    """

    a: MemoryEstimate
    b: MemoryEstimate
    # {arguments: (bytes that B's value adds after all earlier changes, bytes that it adds alone)}; the first numbers
    # sum to the difference of the peaks. Arguments that are invalid without the next one share an entry with the next
    # one. The second number is None if it was not estimated, or if the change alone is invalid.
    switches: dict[str, tuple[int, int | None]]
    tensors: dict[Tensor, tuple[int, int]]  # alive at each peak, the largest difference first; these sum to the peaks
    warnings: dict[str, tuple[str, ...]]  # {"A" or "B": unexpected properties of its model and peak}

    @property
    def difference_bytes(self) -> int:
        """The peak of recipe B minus the peak of recipe A, in bytes."""
        return self.b.peak_bytes - self.a.peak_bytes

    def by_category(self) -> dict[str, tuple[int, int]]:
        a, b = self.a.memory.breakdown, self.b.memory.breakdown
        return {str(name): (a[name], b[name]) for name in a if a[name] or b[name]}

    def by_tensor(self, count: int = _ROWS) -> list[tuple[Tensor, tuple[int, int]]]:
        """Return the `count` tensors whose bytes at the peak differ most between recipes A and B, largest first.

        Each entry is ((category, module, operation, line of code), (bytes at A's peak, bytes at B's peak)). If there
        are more tensors, one last entry sums the rest.
        """
        every, rest = [*self.tensors.items()][:count], [*self.tensors.values()][count:]
        others = ("others", f"{len(rest)} more", "", ""), (sum(a for a, _ in rest), sum(b for _, b in rest))
        return every + ([others] if rest else [])

    def to_dict(self) -> dict[str, Any]:
        def sizes(a: int, b: int) -> dict[str, int]:
            return {"a_bytes": a, "b_bytes": b, "difference_bytes": b - a}

        columns = ("category", "module", "operation", "source")
        made = {name: each.to_dict() | {"peak_bytes": each.peak_bytes} for name, each in (("a", self.a), ("b", self.b))}
        return made | {
            "difference_bytes": self.difference_bytes,
            "by_category": {name: sizes(*pair) for name, pair in self.by_category().items()},
            "switches": {
                name: dict(zip(("bytes", "alone_bytes"), x, strict=True)) for name, x in self.switches.items()
            },
            "by_tensor": [dict(zip(columns, each, strict=True)) | sizes(*pair) for each, pair in self.by_tensor()],
            "warnings": self.warnings,
        }

    def __repr__(self) -> str:
        size = functools.partial(bytes_text, binary=self.a.device == "cuda")

        def line(name: str, *texts: Any) -> str:
            shown = (f"{'+' * (each > 0)}{size(each)}" if isinstance(each, int) else each or "" for each in texts)
            return f"  {name:<64} {' '.join(f'{each:>11}' for each in shown)}".rstrip()

        def pair(name: str, a: int, b: int) -> str:
            return line(name, size(a), size(b), b - a)

        recipes = {"A": self.a, "B": self.b}
        peaks = {n: f"{size(x.peak_bytes)}, {phase_text(x.memory.peak_phase)}" for n, x in recipes.items()}
        lines = [f"{n}: {peak}; {recipes[n].weights}" for n, peak in peaks.items()]
        lines += [line("change of the peak from A to B, by argument", "in turn", "alone")]
        lines += [line(name, *prices) for name, prices in self.switches.items()]
        lines += [line("bytes by category, at each recipe's peak", "A", "B", "B - A")]
        lines += [pair(name_text(name), *sizes) for name, sizes in self.by_category().items()]
        lines += [line("bytes by tensor, at each recipe's peak", "A", "B", "B - A")]
        for (category, module, *origin), sizes in self.by_tensor():
            lines += [pair(f"{name_text(category)}: {module}", *sizes), f"      {' at '.join(filter(None, origin))}"]
        for text in dict.fromkeys(itertools.chain(*self.warnings.values())):
            lines.append(f"{' and '.join(name for name, found in self.warnings.items() if text in found)}: {text}")
        return "\n".join(filter(str.strip, lines))


def explain(
    task: Task, a: Mapping[str, Any], b: Mapping[str, Any], *, processes: int = 1, timeout: float = 300, **where: Any
) -> Explanation:
    """Explain why a training by recipe B peaks higher, or lower, than by recipe A. As in `estimate`, nothing is run.

    Args:
        task: the model and its data.
        a, b: all training arguments of each recipe, as in `estimate`. The arguments that differ are changed from A's
            value to B's one by one: first the arguments in `b`, in their order, then those that only `a` has.
        processes: ranks of a data-parallel training.
        timeout: time limit of each estimate in seconds. There is one estimate for A, one after each change, and, if
            there are at most 4 changes, one for A with each change alone.
        where: card, device, compute_capability, device_memory, allocator_settings, as in `estimate`.

    Raises:
        ValueError: A and B do not differ, or `estimate` rejects one of them.
    """
    arguments_of_kind(explain, locals())
    given, target_device = (Arguments.of(a), Arguments.of(b)), api.target(**where)
    names = [name for name in {**b, **a} if given[0].get(name) != given[1].get(name)]
    if not names:
        raise ValueError("a and b are the same recipe: give b an argument that a lacks, or another value")
    if any(each.compiles for each in given):
        raise ValueError(api.COMPILED_ERROR)
    if any(each.adapters.get("peft") is not None for each in given):
        optional_packages.offer("peft")
    found = []
    for name, arguments in zip("AB", given, strict=True):
        job = _explained, Experiment(name, task, arguments, processes=processes), target_device
        with progress.percent(f"explaining {name}") as bar:
            more = {"timeout": timeout, "on_percent": lambda percent, bar=bar: bar.update(percent - bar.n)}
            found.append(ask(*job, model=task.model, **more))
    (made_a, live_a, warnings_a), (made_b, live_b, warnings_b) = found
    pairs = {each: (live_a[each], live_b[each]) for each in live_a | live_b}
    order = sorted(pairs, key=lambda each: (-abs(pairs[each][1] - pairs[each][0]), -pairs[each][0], each))

    def peak(switched: Iterable[str]) -> int | None:
        """Return the peak in bytes of recipe A with recipe B's values of the arguments `switched`; None: invalid."""
        mixed = {name: value for name, value in a.items() if name not in switched}
        mixed |= {name: b[name] for name in switched if name in b}
        with contextlib.suppress(ValueError):
            return api.estimate(task, processes=processes, timeout=timeout, **where, **mixed).peak_bytes

    switches = _priced(names, peak, (made_a.peak_bytes, made_b.peak_bytes))
    tensors = {each: pairs[each] for each in order}
    return Explanation(made_a, made_b, switches, tensors, {"A": warnings_a, "B": warnings_b})


def _priced(names: list[str], peak: Any, ends: tuple[int, int]) -> dict[str, tuple[int, int | None]]:
    """Return {arguments: (bytes that B's values add to the peak after all earlier changes, bytes that they add alone)}.

    Args:
        names: the arguments in which recipes A and B differ, in the order of their changes.
        peak: function of the arguments that have B's values; returns the peak in bytes, None if the recipe is invalid.
        ends: (peak of A, peak of B) in bytes.
    """
    found, before, waiting = [], ends[0], []
    for number, name in enumerate(names, 1):
        waiting.append(name)
        if (after := ends[1] if number == len(names) else peak(names[:number])) is not None:
            found.append((waiting, after - before))  # with the arguments that were invalid without this one
            before, waiting = after, []
    alone = [peak(own) if number and len(found) <= _MOST_ALONE else None for number, (own, _) in enumerate(found)]
    alone = [ends[0] + found[0][1], *alone[1:]]
    sizes = [None if size is None else size - ends[0] for size in alone]  # None: not estimated, or invalid
    return {", ".join(own): (price, size) for (own, price), size in zip(found, sizes, strict=True)}


# ---- in the fresh subprocess


def _explained(experiment: Experiment, device: Device, probe: Any, tell: Tell):
    """Return (estimate, {`Tensor`: bytes at the peak}, warnings) of a recipe; called by `fresh_process.with_probe`."""
    from trainmem.estimate import trace
    from trainmem.measure.tracker import WEIGHTS

    with patch.object(trace, "follow", functools.partial(_witnessed, trace.follow)):  # forks inherit it
        (traced,) = peak_memory.trace_all([experiment], device, probe, tell)
    made, (blocks, ends, warnings) = peak_memory.estimate_of(experiment, traced, device), traced.trace.witnessed
    log, on_cuda, live = traced.trace.log, device.kind == "cuda", Counter()
    if on_cuda:
        peak = allocator_replay.replayed(log, device.settings, device.memory_bytes, device.rules).peak
    else:
        peak = ends[traced.totals.argmax()]
    sizes: Counter = Counter()  # {bytes: number of live activations and temporaries of that size}
    for event in log.events[:peak]:
        number, sign = (event, 1) if event >= 0 else (~event, -1)
        (size, label), (module, source) = log.blocks[number], blocks[number]
        sizes[size] += sign * (label.category in (Category.ACTIVATIONS, Category.TEMPORARIES))
        what = ("weights", module, "") if label.category in WEIGHTS else (str(label.category), module, label.operation)
        live[*what, source] += sign * (rounded(size) if on_cuda else size)
    hidden = "rounding of the allocator" if on_cuda else made.memory.peak_operation
    live[str(Category.INSIDE_OPERATIONS), "", hidden, ""] += made.peak_bytes - live.total()
    warnings += tuple(_peak_warnings(experiment, made, sizes))
    return made, Counter({tensor: size for tensor, size in live.items() if size}), warnings


_LEAST = 0.05  # of the peak; smaller parts are not explained


def _peak_warnings(experiment: Experiment, made: MemoryEstimate, sizes: Counter) -> Iterator[str]:
    """Yield sentences that explain the peak, some of them with a remedy.

    `sizes`: {bytes: number of live activations and temporaries of that size}.
    """
    arguments, task, memory = experiment.arguments, experiment.task, made.memory
    size = functools.partial(bytes_text, binary=made.device == "cuda")
    batch = arguments.get("per_device_train_batch_size", 8)
    if memory.peak_phase == Phase.EVALUATION:
        eval_batch = arguments.get("per_device_eval_batch_size", 8)
        text = f"evaluation takes more than a step: it has {eval_batch} samples at once (per_device_eval_batch_size), "
        text += f"a step has {batch}"
        if (kept := memory.breakdown[Category.PREDICTIONS]) > _LEAST * made.peak_bytes:
            text += f"; it keeps the predictions of {task.dataset_size} samples for metrics, {size(kept)} at the peak: "
            text += "set eval_accumulation_steps or batch_eval_metrics"
        yield text
        batch = eval_batch
    config = task.build_config()
    words = getattr(config.get_text_config(), "vocab_size", None)
    if task.lengths or not words or task.family() not in ("causal", "masked", "sequence to sequence"):
        return
    numbers = batch * task.length(config) * words
    logits = {each * numbers: sizes[each * numbers] for each in (2, 4) if sizes[each * numbers] > 0}
    total = sum(each * count for each, count in logits.items())
    if total > _LEAST * made.peak_bytes:
        count, shape = sum(logits.values()), f"{batch} x {task.length(config)} x {words:,}"
        yield (
            f"the head makes a logit for each token and word of the vocabulary: {count} tensor{'s' * (count > 1)} of "
            f"{shape} at the peak, of logits, loss and gradients, {size(total)}"
        )


def _witnessed(follow: Callable, experiment: Experiment, tracker: Any):
    """Return the trace that `follow`, the original `trace.follow`, makes, with the field `witnessed` filled in."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from trainmem.estimate import trace

    witness = Witness(tracker)
    with contextlib.ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(witness.enter).remove)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
            stack.callback(register(witness.note).remove)
        stack.enter_context(patch.object(tracker, "execute", witness.see))
        stack.enter_context(patch.object(adapters, "prepared", witness.prepare))
        try:
            found = follow(experiment, tracker)
        except RuntimeError as error:
            if "does not require grad" in str(error) and experiment.arguments.get("gradient_checkpointing"):
                raise Invalid(f"no parameter gets a gradient: {_IDLE}") from None
            raise
    first = next((operations for label, _, operations in tracker.marks if label == "start"), 0)
    # (origins, lengths of the log of allocations and frees after each operation from "start" on, warnings)
    witnessed = witness.origins(), [end for end, *_ in tracker.operations[first:]], witness.warnings(experiment)
    return dataclasses.replace(found, log=found.log or trace.recorded(tracker), witnessed=witnessed)


class Witness:
    """Observe a tracker that traces a training: find the line of code and the parameter or module of each memory block.

    `warnings` returns unexpected properties of the model, e.g. linear layers that are not quantized.
    `tracker`: the `FakeTracker`, or `DeviceTracker`, of the training.
    """

    def __init__(self, tracker: Any):
        self._tracker, self._execute, self._prepared = tracker, tracker.execute, adapters.prepared
        self._model: Any = None  # the outermost module that was called
        self._lines: dict[int, str] = {}  # {number of an operation: line}
        self._owners: dict[int, str] = {}  # {id of a block with a weight, its gradient or states: parameter's name}
        self._cast: set[int] = set()  # ids of the parameters that were cast to a wider type
        self._idle: list[str] = []  # trainable parameters that got no gradient

    def enter(self, module, _) -> None:
        self._model = self._model or getattr(module, "module", module)  # DistributedDataParallel wraps the model

    def see(self, function, args, kwargs):
        self._lines[len(self._tracker.operations)] = _line(sys._getframe(1))
        return self._execute(function, args, kwargs)

    def prepare(self, model, checkpointing):
        before = {name: each.nbytes for name, each in model.named_parameters()}
        made = self._prepared(model, checkpointing)
        self._cast = {id(each) for name, each in made.named_parameters() if each.nbytes > before[name]}
        return made

    def note(self, optimizer, *_) -> None:
        """Note the parameter to which each memory block of a weight, a gradient or an optimizer state belongs.

        torch calls this hook with the optimizer before and after each of its steps.
        """
        import torch

        constants = {id(weight): kept for weight, kept in adapters.constants(self._model)}
        for name, weight in itertools.chain(self._model.named_parameters(), self._model.named_buffers()):
            states = [*(optimizer.state.get(weight) or {}).values()]
            if weight.requires_grad and weight.grad is None and not states:
                self._idle.append(name)
            for each in (weight, weight.grad, *states, *constants.get(id(weight), ())):
                if isinstance(each, torch.Tensor) and (block := self._tracker.block(each)):
                    self._owners.setdefault(id(block), name)

    def origins(self) -> list[tuple[str, str]]:
        """Return the origin of each allocated memory block: (module or parameter, its line of code as file:line).

        The blocks are in the order of allocation. A part that is unknown is "".
        """
        operations, found = self._tracker.operations, []
        ends = [end for end, *_ in operations]
        for position, (block, sign) in enumerate(self._tracker.log):
            number = min(bisect.bisect_right(ends, position), len(ends) - 1)
            name, line = self._owners.get(id(block)), ""
            if name is None and block.operation not in ("before", "copy to the device"):  # these two are no operations
                name, line = operations[number][3], self._lines.get(number)
            if sign > 0:
                found.append((self._plain(name), line or self._forward_of(name)) if name else ("", line))
        return found

    @functools.cached_property
    def _modules(self) -> dict[str, Any]:
        return dict(self._model.named_modules())

    @functools.cache  # noqa: B019, it lives as long as its process
    def _forward_of(self, name: str) -> str:
        """Return file:line where a module's or parameter's innermost forward outside the libraries begins; "": none."""
        module = self._modules.get(name)
        code = module is not None and getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code and not _is_library(file := _shown(code.co_filename)):
            return f"{file}:{code.co_firstlineno}"
        # The enclosing module's: `name` is a parameter, or a library such as torch or peft defines the forward.
        return self._forward_of(name.rpartition(".")[0]) if name else ""

    @functools.cache  # noqa: B019
    def _plain(self, name: str) -> str:
        """Return a module's or parameter's name with "*" in place of layer numbers, without names that adapters add."""
        model = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        if name in ("base_model", "base_model.model", type(self._model).__name__):
            return type(model).__name__
        name = re.sub(r"\.\d+(?=\.|$)", ".*", name.removeprefix("base_model.model."))
        return name.replace(".base_layer", "").replace(".default", "")

    def warnings(self, experiment: Experiment) -> tuple[str, ...]:
        """Return unexpected properties of the traced model, one text each, with the names and bytes of the weights."""
        import torch

        weights, found = dict(self._model.named_parameters()), []
        arguments, quantization = experiment.arguments, experiment.weights.quantization
        adapted = arguments.adapters.get("peft") is not None
        owners = {name: self._modules[name.rpartition(".")[0]] for name in weights}
        plain = {n: w for n, w in weights.items() if not hasattr(w, "__tensor_flatten__")}  # others are quantized
        base = {n: w for n, w in plain.items() if w.is_floating_point() and not (adapted and w.requires_grad)}
        stacked = {n: owners[n] for n, w in base.items() if w.dim() == 3 and len(w) > 1}
        experts = [n for n, owner in stacked.items() if not isinstance(owner, torch.nn.modules.conv._ConvNd)]
        linear = [n for n, w in base.items() if w.dim() == 2 and isinstance(owners[n], torch.nn.Linear)]
        copies = [n for n in weights if ".modules_to_save." in n]
        head, table = (getattr(self._model, f"get_{end}put_embeddings", lambda: None)() for end in ("out", "in"))
        tied = [n for n, w in weights.items() if w is getattr(head, "weight", None) is getattr(table, "weight", None)]

        def warn(text: str, names: Iterable[str]) -> None:
            shown, size = [*dict.fromkeys(map(self._plain, names))], sum(weights[name].nbytes for name in names)
            more = f" and {len(shown) - 3} more" * (len(shown) > 3)
            found.extend([f"{text}: {', '.join(shown[:3])}{more}, {bytes_text(size)}"] if shown else [])

        if quantization:
            warn("these experts are not quantized, because they are not linear layers", experts)
            warn("these linear layers are not quantized", linear)
        elif adapted:
            warn("the frozen weights are in fp32", [n for n, w in base.items() if w.dtype is torch.float32])
        if adapted and (kind := experiment.weights.dtype) != "float32":
            cast = [n for n, w in weights.items() if w.requires_grad and w.dtype is torch.float32 and n not in copies]
            warn(f"peft casts these adapters to fp32 beside a base in {kind} (autocast_adapter_dtype)", cast)
        cast = [n for n, w in weights.items() if id(w) in self._cast]
        warn("prepare_model_for_kbit_training cast these weights to fp32", cast)
        warn("modules_to_save makes trainable copies of whole modules", copies)
        if getattr(self._model.config, "tie_word_embeddings", False):
            shape = getattr(getattr(table, "weight", None), "shape", None)
            text = "modules_to_save breaks the tie of head and embedding: these copies are beside the matrix of both"
            warn(text, [n for n in copies if weights[n].shape == shape])
        wrapped = {id(each.get_param()) for each in self._modules.values() if type(each).__name__ == "ParamWrapper"}
        text = "target_parameters adds adapters to these whole weights: each forward makes tensors of their size"
        warn(text, [n for n, w in weights.items() if id(w) in wrapped])
        if quantization or copies:
            warn("the head is tied to the embedding, which is stored once, unquantized", tied)
        if arguments.get("gradient_checkpointing"):
            warn(f"no gradient reaches these weights: {_IDLE}", [*dict.fromkeys(self._idle)])
        return tuple(found)


def _line(frame: Any) -> str:
    """Return the innermost line outside the libraries, as file:line, in `frame` or its callers; "": none."""
    while frame is not None and not (file := _shown(frame.f_code.co_filename)).startswith(_CALLERS):
        if not _is_library(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(file: str) -> bool:
    return file.startswith("<") or file.partition("/")[0] in _LIBRARIES


@functools.cache
def _shown(file: str) -> str:
    """Return a file's path relative to the folder in which Python finds it, e.g. "torch/nn/modules/linear.py"."""
    folders = [each for each in sys.path if each and file.startswith(each + os.sep)]
    return file[len(max(folders, key=len)) + 1 :].replace(os.sep, "/") if folders else file
