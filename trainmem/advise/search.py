"""Search for recipes that fit: combine techniques, order them, and find the largest micro-batch of each recipe.

Whether a recipe fits is decided by estimating its memory, and no recipe is proposed without an estimate of its own.
Other threads start the estimates that are probably needed next.
"""

import contextvars
import dataclasses
import functools
import itertools
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainmem import recipes as known
from trainmem.advise.measured_speedups import ACCUMULATION_STEPS, MICRO_BATCH, Evidence, Factor, respelt
from trainmem.advise.target import Target
from trainmem.core import hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate
from trainmem.estimate.depth import STATES, Line, layers_of
from trainmem.measure.processes import seconds_left
from trainmem.recipes import QUESTIONS, Technique
from trainmem.texts import nearest_text

_PRECISIONS = {known.BF16, known.FP16, known.BF16_WEIGHTS}
_OPTIMIZERS = set(QUESTIONS[("optim",)])
_SURE = 0.99  # share of live bytes extrapolated from shallow models that is certain; in doubt all layers are traced
_MOST_AT_ONCE = 4  # recipes checked at once; each takes a core and, for a large model, 1 to 2 GB


class Candidate(NamedTuple):
    """Hold a combination of techniques with a micro-batch in samples; the search finds out whether it fits."""

    techniques: tuple[Technique, ...]  # one per choice, without the library's defaults, except AdamW
    micro_batch: int  # samples

    @property
    def costly(self) -> set[Technique]:
        """The candidate's techniques that cost something: time, precision or convergence."""
        return {technique for technique in self.techniques if technique.cost}

    @property
    def costs(self) -> list[str]:
        """The costs of the candidate's techniques, as texts."""
        costs = {technique: technique.cost for technique in self.techniques if technique.cost}
        if known.BF16_WEIGHTS in costs and not costs.keys().isdisjoint(known.ADAPTERS):
            costs[known.BF16_WEIGHTS] = "precision: the weights that are not trained are kept in bf16"
        return [*costs.values()]

    @property
    def without_optimizer(self) -> frozenset[Technique]:
        """The candidate's techniques except the optimizer, which does not change the activations."""
        return frozenset(self.techniques) - _OPTIMIZERS


class Choices:
    """List the recipes to try (`candidates`) and their micro-batches in samples; give a recipe's arguments and name.

    Args:
        samples: samples per optimizer update and process.
        must: training arguments that every recipe has.
        avoid: names of techniques that no recipe may have.
        may: names of techniques that recipes may have although they are tried only on request (`recipes.ON_DEMAND`).
        native: the lower precisions for which the device has instructions.
        base: arguments of every recipe unless a technique sets them, e.g. {"dtype": "float32"}; None: none.

    Raises:
        ValueError: an unknown name, or arguments that contradict each other or leave nothing to choose.
    """

    def __init__(
        self,
        samples: int,
        must: Mapping[str, Any],
        avoid: Iterable[str],
        native: set[Technique],
        may: Iterable[str] = (),
        base: Mapping[str, Any] | None = None,
    ):
        self.samples, self._base = samples, base or {}
        self.fixed = respelt(Arguments.of(must))  # training arguments that every recipe has
        self._avoided = _named("avoid", avoid, [known.ACCUMULATION, *(each.words for each in known.techniques())])
        offered = _named("may", may, [{each.name} for each in known.ON_DEMAND])
        if not offered.isdisjoint({each.name for each in known.ADAPTERS}) and (why := optional_packages.offer("peft")):
            raise ValueError(f"may={list(may)}: LoRA {why}")
        left_out = {each for each in known.ON_DEMAND if each.name not in offered} | (_PRECISIONS - native)
        if hardware.versions()["bitsandbytes"] is None:
            left_out |= {known.ADAM_8BIT, known.QLORA}
        combined = [*itertools.product(*(self._options(*each, left_out) for each in QUESTIONS.items()))]
        self.micro_batches = self._sizes()  # samples, ascending
        # Every combination of techniques, with the largest micro-batch.
        self.candidates = [Candidate(tuple(filter(None, each)), self.micro_batches[-1]) for each in combined]

    def _options(
        self, names: tuple[str, ...], options: tuple[Technique | None, ...], left_out: set[Technique]
    ) -> list[Technique | None]:
        """Return the allowed options of one choice, e.g. of the optimizer; None: no technique, the library's default.

        Args:
            names: the training arguments that the choice sets.
            options: the choice's options, see `recipes.QUESTIONS`.
            left_out: techniques that a recipe may have only if `must` sets their arguments.
        """
        if set(names) & self.fixed.keys():  # `must` decides
            same = [o for o in options if o and o.arguments.items() <= self.fixed.items()]
            if clash := [option.name for option in same if option.words & self._avoided]:
                raise ValueError(f"{clash[0]!r} is both in must and in avoid: keep one")
            return same[:1] or [None]  # None: `must` has a value that belongs to no option
        allowed = [each for each in options if each not in left_out and not (each and each.words & self._avoided)]
        if not allowed:
            raise ValueError(f"avoid leaves no choice for {', '.join(names)}: avoid less, or set one with must")
        return allowed

    def _sizes(self) -> list[int]:
        """Return the micro-batches, in samples, that recipes may have: the allowed divisors of `samples`, ascending."""
        batch, steps = self.fixed.get(MICRO_BATCH), self.fixed.get(ACCUMULATION_STEPS)
        if self._avoided & set(known.ACCUMULATION):
            steps = steps or 1
            if steps > 1:
                raise ValueError(f"gradient_accumulation_steps={steps} is in must and accumulation in avoid: keep one")
        divisors = [size for size in range(1, self.samples + 1) if self.samples % size == 0]
        sizes = [each for each in divisors if batch in (None, each) and steps in (None, self.samples // each)]
        if not sizes:
            given = " x ".join(str(value) for value in (batch, steps) if value)
            raise ValueError(
                f"{given} in must does not divide {self.samples} samples per process: change one of the two"
            )
        return sizes

    def arguments(self, candidate: Candidate) -> dict[str, Any]:
        """Return the training arguments of a recipe as {name: value}."""
        size = candidate.micro_batch
        arguments = {MICRO_BATCH: size, ACCUMULATION_STEPS: self.samples // size, **self._base}
        for technique in candidate.techniques:
            arguments |= technique.arguments
        return arguments | self.fixed

    def name(self, candidate: Candidate) -> str:
        """Return a recipe's name: "checkpointing, AdamW, 4 x 2" (micro-batch x accumulation)."""
        size = candidate.micro_batch
        return ", ".join([*(technique.name for technique in candidate.techniques), f"{size} x {self.samples // size}"])


def native_precisions(machine: hardware.Machine, kind: str, capability: tuple[int, int]) -> set[Technique]:
    """Return the lower precisions for which the device has instructions.

    Args:
        machine: the machine that has the CPU, if `kind` is "cpu"; otherwise not used.
        kind: "cpu" or "cuda".
        capability: compute capability of the GPU.
    """
    if kind == "cuda" and capability < (8, 0):
        return {known.FP16}
    native = kind == "cuda" or not hardware.CPU_BF16.isdisjoint(machine.cpu_features or ())
    return {known.BF16, known.BF16_WEIGHTS} if native else set()


def _named(argument: str, given: Iterable[str], spelt: Iterable[Iterable[str]]) -> set[str]:
    """Return the names in `given` as the techniques spell them, e.g. "LoRA" for "lora".

    `argument`: "avoid" or "may", for the error; `spelt`: for each technique, the names that users may give it.
    """
    words = {word.lower(): word for word in sorted(itertools.chain(*spelt), reverse=True)}  # prefer capitals
    for name in map(str, given):
        if name.lower() not in words:
            raise ValueError(f"{argument}={name!r} is not a technique. {nearest_text(name, words.values())}")
    return {words[str(name).lower()] for name in given}


class Ranking:
    """Order recipes: those with the fewest unmeasured techniques first, and among these the fastest first.

    The expected speed is the product of one measured factor per technique and one for the micro-batch. Techniques that
    cost nothing or that all recipes have, and the largest micro-batch, count as 1.

    Args:
        choices: gives the recipes to rank.
        evidence: the measured factors of techniques and of micro-batches.
    """

    def __init__(self, choices: Choices, evidence: Evidence):
        combined = [set(candidate.techniques) for candidate in choices.candidates]
        used = set.union(*combined) - set.intersection(*combined)
        *smaller, largest = choices.micro_batches
        self._factors: dict[Technique | int, Factor] = {  # by technique, or by micro-batch in samples
            **{technique: evidence.of_technique(technique) for technique in used if technique.cost},
            **{size: evidence.of_micro_batch(size, largest) for size in smaller},
        }

    def key(self, candidate: Candidate) -> tuple[int, float, int, int]:
        """Return a sort key: (number of unmeasured techniques, -speed, number of costly techniques, -micro-batch)."""
        costs = len(candidate.costly)
        return self.unknown(candidate), -self.speed(candidate), costs, -candidate.micro_batch

    def unknown(self, candidate: Candidate) -> int:
        """Return the number of a recipe's techniques whose speed was never measured."""
        return sum(self._factors[each].ratio is None for each in candidate.techniques if each in self._factors)

    def speed(self, candidate: Candidate) -> float:
        """Return a recipe's expected speed as a multiple of the plain recipe's speed.

        The plain recipe has the largest micro-batch, and only techniques that cost nothing or that all recipes have.
        The multiple is the product of the recipe's `factors`. A factor that is unknown or within the noise counts as 1.
        """
        return math.prod(factor.significant for factor in self.factors(candidate))

    def factors(self, candidate: Candidate) -> list[Factor]:
        """Return the factors by which a recipe's techniques and its micro-batch change its speed.

        Techniques that cost nothing or that all recipes have, and the largest micro-batch, have no factor.
        """
        keys = (*candidate.techniques, candidate.micro_batch)
        return [self._factors[each] for each in keys if each in self._factors]

    def only_adds_costs(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether `candidate` has every costly technique of `other`, plus at least one more.

        If so, `candidate` can only be worthwhile with a larger micro-batch than `other`. Return False if the two differ
        in precision and the speed of `candidate` is unknown, because `candidate` may be faster.

        Args:
            candidate: the recipe that may be left out.
            other: the better-ranked recipe.
        """
        precision, other_precision = (_PRECISIONS.intersection(each.techniques) for each in (candidate, other))
        return (precision == other_precision or not self.unknown(candidate)) and candidate.costly > other.costly


@dataclass
class RecipeSearch:
    """Search for recipes that fit: `find` gives each combination of techniques the largest micro-batch that fits.

    A search keeps the estimates that it made, and the bytes of recipes that do not fit.
    """

    task: Task
    target: Target  # the device that recipes must fit
    choices: Choices
    ranking: Ranking
    ask: "Once"  # makes all estimates
    predict: Callable[..., MemoryEstimate]  # (task, training arguments) -> estimate for the target device
    line: Callable[..., Line]  # (task, training arguments) -> memory by number of layers
    of_the_leanest: bool = False  # whether only the recipe that needs least is searched
    made: list[MemoryEstimate] = field(default_factory=list)  # every estimate so far, in order
    estimates: dict[Candidate, MemoryEstimate] = field(default_factory=dict)
    too_large: dict[Candidate, int] = field(default_factory=dict)  # bytes needed by each recipe that does not fit
    notes: list[str] = field(default_factory=list)  # recipes that were not tried, and why
    at_once: int = field(default_factory=lambda: min(hardware.this_machine().cpu_cores or 1, _MOST_AT_ONCE))  # recipes
    _states: dict[frozenset[Technique], int] = field(default_factory=dict)  # bytes without activations

    def find(self, most: int) -> list[Candidate]:
        """Return the best recipes that fit, with their largest micro-batches that fit; the best recipe first.

        Combinations of techniques are ranked as if each ran with the largest micro-batch in `choices`, and tried in
        this order. A recipe that has all costly techniques of an already found recipe and at least one more is left
        out, unless it has a larger micro-batch (see `Ranking.only_adds_costs`).

        Args:
            most: number of fitting recipes after which the search stops.

        Raises:
            ValueError: every estimate failed; the message is the first error's.
        """
        fitting: list[Candidate] = []
        failures: list[ValueError] = []
        found: dict[frozenset[Technique], int] = {}  # the micro-batch of recipes that differ only by the optimizer
        ranked = sorted(self.choices.candidates, key=self.ranking.key)
        pool, submitted = ThreadPoolExecutor(self.at_once), set()  # recipes that its threads try or have tried
        for index, candidate in enumerate(ranked):
            if len(fitting) == most:
                break
            if self.ask.answers and not seconds_left():
                self.notes.append(f"The time limit was reached: {len(ranked) - index} recipes were not tried.")
                break
            if self.at_once > 1 and self.ask.answers:  # the first one finds what all others need
                may_fit = [each for each in ranked[index:] if self._known_states(each) <= self.target.room_bytes]
                for each in may_fit[: most - len(fitting)]:
                    if each not in submitted:
                        ahead(pool, self._for_thread()._largest, each, fitting, found)
                        submitted.add(each)
            try:
                size = self._largest(candidate, fitting, found)
            except ValueError as error:
                failures.append(error)
                name = ", ".join(technique.name for technique in candidate.techniques) or "the plain recipe"
                self.notes.append(f"{name} was left out: {error}")
            else:
                if size:  # otherwise another optimizer's states may leave more room
                    found[candidate.without_optimizer] = size
                    fitting.append(candidate._replace(micro_batch=size))
                    self.ask.bar.set_postfix_str(f"so far {self.choices.name(min(fitting, key=self.ranking.key))}")
        pool.shutdown(wait=False, cancel_futures=True)
        if not (self.estimates or self.too_large):
            raise failures[0]
        return sorted(fitting, key=self.ranking.key)

    def smallest(self) -> Candidate:
        """Return the recipe that needs the least memory among the recipes that do not fit."""
        while (least := min(self.too_large, key=self.too_large.get)) not in self.estimates:
            try:
                self.needed(least)  # what was known before may be the bytes of its states alone
            except ValueError:  # no time is left, or it cannot be traced
                del self.too_large[least]
        return least

    def needed(self, candidate: Candidate) -> int:
        """Return the bytes that the device must have for a recipe, with the CUDA context; estimated at the first call.

        On CUDA these are the reserved bytes, on a CPU the live bytes.
        """
        if candidate not in self.estimates:
            found = self.estimates[candidate] = self.estimate(self.task, self.choices.arguments(candidate))
            ends = (found.memory.phase_breakdowns or {}).values()
            states = (sum(parts.get(name, 0) for name in STATES) for parts in ends)
            self._states[_of_states(candidate)] = max(states, default=0)
        memory = self.estimates[candidate].memory
        needed = max(memory.reserved_bytes or 0, memory.peak_bytes) + self.target.context_bytes
        if needed > self.target.room_bytes:
            self.too_large[candidate] = needed
        return needed

    def at(self, task: Task) -> "RecipeSearch":
        """Return a search for another task; both searches add to the same lists `made` (estimates) and `notes`."""
        return dataclasses.replace(self, task=task, estimates={}, too_large={}, _states={})

    def _for_thread(self) -> "RecipeSearch":
        """Return a search for the same task, with which another thread makes estimates in advance."""
        # Nothing is estimated twice: both searches have the same `ask`, which stores all results.
        return dataclasses.replace(self, estimates={}, too_large={}, notes=[], made=[], _states={**self._states})

    def line_of(self, candidate: Candidate) -> Line | None:
        """Return a recipe's memory as a function of the number of layers, from traces of two shallow models.

        Return None if the model has at most 24 layers, or an encoder and a decoder; such a model is traced itself.
        """
        return self.ask(self.line, self.task, self.choices.arguments(candidate)) if layers_of(self.task) else None

    def trace_ahead(self, pairs: Iterable[tuple["RecipeSearch", Candidate]]) -> None:
        """Trace recipes as functions of the number of layers, in parallel; later calls of `line_of` find the results.

        `pairs`: (search for a task, recipe), one per trace.
        """
        with ThreadPoolExecutor(self.at_once) as pool:
            for search, candidate in pairs:
                ahead(pool, search.line_of, candidate)

    def about(self, candidate: Candidate) -> tuple[int, int]:
        """Return (peak of live bytes, upper estimate of reserved bytes) of a recipe, both with the CUDA context.

        For a deep model (more than 24 layers) both are extrapolated from two shallow models. Any other model is
        estimated, and both are the bytes that the recipe needs.
        """
        if (line := self.line_of(candidate)) is None:
            return (self.needed(candidate),) * 2
        alive, reserved = line.at(layers_of(self.task))
        return alive + self.target.context_bytes, reserved + self.target.context_bytes

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a recipe fits; make an estimate only if nothing simpler decides.

        The first of these that leaves no doubt decides: an earlier estimate; the known bytes of the states (weights,
        gradients, optimizer states); for a deep model (more than 24 layers), an extrapolation from shallow models; a
        new estimate.
        """
        if candidate in self.estimates:
            return self.needed(candidate) <= self.target.room_bytes
        if (states := self._known_states(candidate)) > self.target.room_bytes:
            self.too_large[candidate] = round(states)
            return False
        if line := self.line_of(candidate):
            self._states.setdefault(_of_states(candidate), _SURE * line.states_at(layers_of(self.task)))
        alive, reserved = self.about(candidate)
        if _SURE * alive > self.target.room_bytes:
            self.too_large[candidate] = alive
            return False
        return reserved <= self.target.room_bytes or self.needed(candidate) <= self.target.room_bytes

    def _known_states(self, candidate: Candidate) -> float:
        """Return the least bytes of a recipe: weights, gradients, optimizer states, CUDA context; -inf: unknown."""
        # Unknown: no recipe with the same states was estimated or traced yet.
        return self._states.get(_of_states(candidate), -math.inf) + self.target.context_bytes

    def estimate(self, task: Task, arguments: Mapping[str, Any]) -> MemoryEstimate:
        """Return the estimate of a task's memory with these training arguments, and add it to `made`."""
        self.made.append(self.ask(self.predict, task, arguments))
        return self.made[-1]

    def furthest(
        self, candidate: Candidate, sizes: Sequence[int], task_of: Callable[[int], Task], first: int
    ) -> tuple[int, "RecipeSearch"]:
        """Return (the largest size of a task with which a recipe fits, the search for this task).

        If the recipe fits with no size, return 0 and the search for the task of the smallest size.

        Args:
            candidate: the recipe.
            sizes: the sizes to choose from, ascending, e.g. sequence lengths in tokens.
            task_of: function that returns the task of a size.
            first: the size from which the search starts.
        """
        at, room = functools.cache(lambda size: self.at(task_of(size))), self.target.room_bytes
        above = largest_that_fits(sizes, lambda size: _SURE * at(size).about(candidate)[0] <= room, first)
        open_to = [size for size in sizes if size <= above]
        likely = largest_that_fits(open_to, lambda size: at(size).about(candidate)[1] <= room, above)
        if likely:
            task = at(likely).task
            length = f" with {task.seq_len:,} tokens" if task.seq_len else ""
            self.ask.bar.set_postfix_str(f"so far {task.model}{length}")

        def fits(size: int) -> bool:
            return at(size).needed(candidate) <= room

        found = largest_that_fits([size for size in open_to if size >= likely], fits, likely)
        if not found:
            found = confirmed(open_to, likely, fits)
        return found, at(found or sizes[0])

    def _largest(self, candidate: Candidate, fitting: Iterable[Candidate], found: Mapping) -> int:
        """Return the largest worthwhile micro-batch, in samples, with which a recipe fits; 0: none.

        Args:
            candidate: the recipe; its micro-batch is ignored.
            fitting: the recipes that are known to fit.
            found: {techniques except the optimizer: largest micro-batch that fits}, of recipes with other optimizers.
        """

        def of(size: int) -> Candidate:
            return candidate._replace(micro_batch=size)

        # A recipe that only adds costs to a fitting one is worthwhile only with a larger micro-batch.
        beaten = [other.micro_batch for other in fitting if self.ranking.only_adds_costs(candidate, other)]
        sizes = [size for size in self.choices.micro_batches if size > max(beaten, default=0)]
        if not sizes:
            return 0
        first, whole = found.get(candidate.without_optimizer, sizes[-1]), of(sizes[-1])
        likely = largest_that_fits(sizes, lambda size: self.fits(of(size)), first)
        if likely < sizes[-1] and whole not in self.estimates and whole.micro_batch == self.choices.samples:
            # All samples at once may fit even if fewer do not: no gradients are kept during another micro-batch.
            fewer = self.estimates.get(of(next(size for size in sizes if size > likely)))
            least = fewer.peak_bytes - fewer.memory.breakdown["gradients"] + self.target.context_bytes if fewer else 0
            if least <= self.target.room_bytes and self.fits(whole):
                likely = whole.micro_batch
        return confirmed(sizes, likely, lambda size: self.needed(of(size)) <= self.target.room_bytes)


def ahead(pool: ThreadPoolExecutor, ask: Callable, *arguments) -> Future:
    """Start `ask(*arguments)` in a thread of a pool, and return its future.

    The thread gets the caller's context variables, e.g. the time limit.
    """
    return pool.submit(contextvars.copy_context().run, ask, *arguments)


class Once:
    """Compute each result once, even if several threads need it: one thread computes, the other threads wait.

    A call takes (ask, task, arguments) and returns `ask(task, **arguments)`. Equal calls get the same result, or the
    same error.

    Args:
        bar: a tqdm bar that counts the results.
    """

    def __init__(self, bar):
        self._lock, self.answers, self.bar = threading.Lock(), {}, bar

    def __call__(self, ask: Callable[..., Any], task: Task, arguments: Mapping[str, Any]) -> Any:
        key = ask, repr((task, arguments))
        with self._lock:
            is_first = key not in self.answers
            answer = self.answers.setdefault(key, Future())
        if is_first:
            try:
                answer.set_result(ask(task, **arguments))
            except BaseException as error:
                answer.set_exception(error)
            self.bar.update()
        return answer.result()


def _of_states(candidate: Candidate) -> frozenset[Technique]:
    """Return the recipe's techniques that change the bytes of weights, gradients or optimizer states."""
    return frozenset(candidate.techniques) - known.OF_ACTIVATIONS


def confirmed(sizes: Sequence[int], likely: int, fits: Callable[[int], bool]) -> int:
    """Return `likely`, one of the ascending `sizes`, if it fits; otherwise the largest smaller size that fits, or 0.

    If `likely` is 0, return 0. A deep model's likely size comes from shallow ones, and has to be confirmed.
    """
    if not likely or fits(likely):
        return likely
    smaller = [size for size in sizes if size < likely]
    return largest_that_fits(smaller, fits, max(smaller, default=0))


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool], first: int) -> int:
    """Return the largest size that fits, by bisection; 0 if none does.

    Args:
        sizes: the sizes to choose from, ascending.
        fits: function of a size; if a size fits, all smaller sizes fit.
        first: a guess, e.g. the size that fits in a similar case; it is tried first.
    """
    low, high = 0, len(sizes)  # sizes below index `low` fit; those from `high` on are too large
    index = bisect_left(sizes, first)
    # The second try is the size above the guess, or for the largest size the smallest, because often none fits.
    likely = [0, index] if index >= high - 1 else [index + 1, index]
    while low < high:
        middle = likely.pop() if likely else (low + high) // 2
        if middle not in range(low, high):
            continue  # already decided, or not a size
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else 0
