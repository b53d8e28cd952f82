"""The search for what fits: the recipes that may be combined, their order, and the largest micro-batch of each.

Every look costs an estimate, and what is proposed was always estimated itself: other cores begin what is looked at
next.
"""

import contextvars
import dataclasses
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
from trainmem.core import hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.estimate import MemoryEstimate
from trainmem.estimate.allocator_settings import untested_text
from trainmem.estimate.depth import STATES, Line, layers_of
from trainmem.measure.processes import seconds_left
from trainmem.recipes import QUESTIONS, Technique
from trainmem.texts import nearest_text

_PRECISIONS = {known.BF16, known.FP16, known.BF16_WEIGHTS}
_OPTIMIZERS = set(QUESTIONS[("optim",)])
_SURE = 0.99  # part of what shallow models tell of a deep one that it has alive at least; else all layers are followed
_MOST_AT_ONCE = 4  # recipes that are looked at; each takes a core and, for a large model, 1 to 2 GB


class Candidate(NamedTuple):
    """A recipe that may fit or not."""

    techniques: tuple[Technique, ...]  # answers to the questions; the library's plain ones left out, except AdamW
    micro_batch: int  # samples

    @property
    def costly(self) -> set[Technique]:
        """Its techniques that cost something: time, precision or convergence."""
        return {technique for technique in self.techniques if technique.cost}

    @property
    def costs(self) -> list[str]:
        """What they cost, in words."""
        costs = {technique: technique.cost for technique in self.techniques if technique.cost}
        if known.BF16_WEIGHTS in costs and not costs.keys().isdisjoint(known.ADAPTERS):
            costs[known.BF16_WEIGHTS] = "precision: the weights that do not learn are kept in bf16"
        return [*costs.values()]

    @property
    def without_optimizer(self) -> frozenset[Technique]:
        """Its techniques but the optimizer: those that have the same of these have the same activations."""
        return frozenset(self.techniques) - _OPTIMIZERS


class Choices:
    """The techniques and the micro-batches that may be combined.

    Args:
        samples: that one process sees in an update.
        must, avoid: as `advise` takes them.
        native: the lower precisions that the device computes in by itself.
        may: what is offered besides, as `advise` takes it.
        base: arguments of every recipe that says nothing else about them, e.g. {"dtype": "float32"}.

    Raises:
        ValueError: a name that is not known, wishes that contradict each other, or that leave nothing to choose.
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
        avoided = _named("avoid", avoid, [known.ACCUMULATION, *(each.words for each in known.techniques())])
        offered = _named("may", may, [{each.name} for each in known.ON_DEMAND])
        if not offered.isdisjoint({each.name for each in known.ADAPTERS}) and (why := optional_packages.offer("peft")):
            raise ValueError(f"may={list(may)}: LoRA {why}")
        combined = itertools.product(*_answers(self.fixed, avoided, native, offered))
        self.micro_batches = _micro_batches(samples, self.fixed, avoided)  # samples, ascending
        # Every combination of techniques, with the largest micro-batch.
        self.candidates = [Candidate(tuple(filter(None, each)), self.micro_batches[-1]) for each in combined]

    def arguments(self, candidate: Candidate) -> dict[str, Any]:
        """The training arguments of a recipe."""
        size = candidate.micro_batch
        arguments = {MICRO_BATCH: size, ACCUMULATION_STEPS: self.samples // size, **self._base}
        for technique in candidate.techniques:
            arguments |= technique.arguments
        return arguments | self.fixed

    def name(self, candidate: Candidate) -> str:
        """A recipe in words: "checkpointing, AdamW, 4 x 2" (micro-batch x accumulation)."""
        size = candidate.micro_batch
        return ", ".join([*(technique.name for technique in candidate.techniques), f"{size} x {self.samples // size}"])


def native_precisions(machine: hardware.Machine, kind: str, capability: tuple[int, int]) -> set[Technique]:
    """The lower precisions that a GPU of this compute capability, or the machine's CPU, computes in by itself."""
    if kind == "cuda" and capability < (8, 0):
        return {known.FP16}
    native = kind == "cuda" or not hardware.CPU_BF16.isdisjoint(machine.cpu_features or ())
    return {known.BF16, known.BF16_WEIGHTS} if native else set()


def _named(argument: str, given: Iterable[str], spelt: Iterable[Iterable[str]]) -> set[str]:
    """The names that an argument gives, in the spelling of those that there are."""
    words = {word.lower(): word for word in sorted(itertools.chain(*spelt), reverse=True)}  # of two, that with capitals
    for name in map(str, given):
        if name.lower() not in words:
            raise ValueError(f"{argument}={name!r} is not a technique. {nearest_text(name, words.values())}")
    return {words[str(name).lower()] for name in given}


def _answers(
    fixed: Mapping[str, Any], avoided: set[str], native: set[Technique], offered: set[str]
) -> list[list[Technique | None]]:
    """The answers allowed to each question. What is `ON_DEMAND` is for who asks for it by `must` or `may`."""
    left_out = {each for each in known.ON_DEMAND if each.name not in offered} | (_PRECISIONS - native)
    if hardware.versions()["bitsandbytes"] is None:
        left_out |= {known.ADAM_8BIT, known.QLORA}
    answers = []
    for names, options in QUESTIONS.items():
        if set(names) & fixed.keys():  # answered by the user; None: in a way that is no technique of ours
            same = [o for o in options if o and all(fixed.get(name) == value for name, value in o.arguments.items())]
            if clash := [o.name for o in same if o.words & avoided]:
                raise ValueError(f"{clash[0]!r} is both in must and in avoid: keep one")
            answers.append(same[:1] or [None])
            continue
        open_to = [option for option in options if option not in left_out and not (option and option.words & avoided)]
        if not open_to:
            raise ValueError(f"avoid leaves no choice for {', '.join(names)}: avoid less, or set one with must")
        answers.append(open_to)
    return answers


def _micro_batches(samples: int, fixed: Mapping[str, Any], avoided: set[str]) -> list[int]:
    """The micro-batches that make `samples` with a whole number of accumulation steps, ascending."""
    batch, steps = fixed.get(MICRO_BATCH), fixed.get(ACCUMULATION_STEPS)
    if avoided & set(known.ACCUMULATION):
        steps = steps or 1
        if steps > 1:
            raise ValueError(f"gradient_accumulation_steps={steps} is in must and accumulation in avoid: keep one")
    sizes = [
        size
        for size in range(1, samples + 1)
        if samples % size == 0 and batch in (None, size) and steps in (None, samples // size)
    ]
    if not sizes:
        given = " x ".join(str(value) for value in (batch, steps) if value)
        raise ValueError(f"{given} in must does not divide {samples} samples per process: change one of the two")
    return sizes


class Ranking:
    """The order of recipes. Speed is the product of the factors of a recipe's techniques and of its micro-batch; plain
    choices, and what all recipes share, make no difference and have no factor."""

    def __init__(self, choices: Choices, evidence: Evidence):
        combined = [set(candidate.techniques) for candidate in choices.candidates]
        used = set.union(*combined) - set.intersection(*combined)
        *smaller, largest = choices.micro_batches
        self._factors: dict[Technique | int, Factor] = {  # by technique, or by samples of a micro-batch
            **{technique: evidence.of_technique(technique) for technique in used if technique.cost},
            **{size: evidence.of_micro_batch(size, largest) for size in smaller},
        }

    def key(self, candidate: Candidate) -> tuple[int, float, int, int]:
        """What recipes are sorted by: measured first, then faster, then cheaper, then a larger micro-batch."""
        costs = len(candidate.costly)
        return self.unknown(candidate), -self.speed(candidate), costs, -candidate.micro_batch

    def unknown(self, candidate: Candidate) -> int:
        """How many of a recipe's techniques have a speed that nobody measured."""
        return sum(self._factors[each].ratio is None for each in candidate.techniques if each in self._factors)

    def speed(self, candidate: Candidate) -> float:
        """The product of the factors that can be told from 1."""
        return math.prod(factor.told for factor in self.factors(candidate))

    def factors(self, candidate: Candidate) -> list[Factor]:
        """What makes a recipe faster or slower than the others."""
        asked = (*candidate.techniques, candidate.micro_batch)
        return [self._factors[each] for each in asked if each in self._factors]

    def only_adds_costs(self, candidate: Candidate, other: Candidate) -> bool:
        """Whether a recipe has the costs of one that ranks before it and more, so that only a larger micro-batch could
        speak for it. A precision of unknown speed speaks for itself: it may be the faster one."""
        precision, its = (_PRECISIONS.intersection(each.techniques) for each in (candidate, other))
        return (precision == its or not self.unknown(candidate)) and candidate.costly > other.costly


@dataclass
class RecipeSearch:
    """The recipes of a task that fit: for one combination of techniques after the other, the largest micro-batch."""

    task: Task
    predict: Callable[..., MemoryEstimate]  # of a task with training arguments, for the device that is meant
    limit: int  # bytes that there are
    context: int  # bytes of them that the CUDA context takes; 0 on a CPU
    choices: Choices
    ranking: Ranking
    ask: "Once"  # by which all looks are taken
    line: Callable[..., Line]  # of a task with training arguments, by its number of layers
    on_gpu: bool = False  # whether the memory is a card's, whose sizes are in GiB
    of_the_leanest: bool = False  # recipe alone: no other was looked at
    count: int = 0  # estimates asked for so far
    assumptions: dict[str, None] = field(default_factory=dict)  # of all estimates, each once, in order
    estimates: dict[Candidate, MemoryEstimate] = field(default_factory=dict)
    too_large: dict[Candidate, int] = field(default_factory=dict)  # bytes that each of those needs that do not fit
    notes: list[str] = field(default_factory=list)  # what was not looked at, and why
    at_once: int = field(default_factory=lambda: min(hardware.this_machine().cpu_cores or 1, _MOST_AT_ONCE))  # recipes
    _states: dict[frozenset[Technique], int] = field(default_factory=dict)  # bytes besides activations

    def find(self, most: int) -> list[Candidate]:
        """The best recipes that fit, at most `most`, the best first.

        Techniques are looked at in the order in which they would rank if all fitted, except those that only add costs.

        Raises:
            ValueError: not one estimate could be made; with the first one's reason.
        """
        fitting: list[Candidate] = []
        failures: list[ValueError] = []
        found: dict[frozenset[Technique], int] = {}  # the micro-batch, of those that differ by the optimizer only
        ranked = sorted(self.choices.candidates, key=self.ranking.key)
        pool, begun = ThreadPoolExecutor(self.at_once), set()  # what is looked at in its threads, or was
        for index, candidate in enumerate(ranked):
            if len(fitting) == most:
                break
            if self.ask.answers and not seconds_left():
                self.notes.append(f"The time limit was reached: {len(ranked) - index} recipes were not tried.")
                break
            if self.at_once > 1 and self.ask.answers:  # the first one learns what all others need
                may_fit = [each for each in ranked[index:] if self._known_states(each) <= self.limit]
                for each in may_fit[: most - len(fitting)]:
                    if each not in begun:
                        ahead(pool, self._beside()._largest, each, fitting, found)
                        begun.add(each)
            try:
                size = self._largest(candidate, fitting, found)
            except ValueError as error:
                failures.append(error)
                name = ", ".join(technique.name for technique in candidate.techniques) or "the plain recipe"
                self.notes.append(f"{name} was left out: {error}")
            else:
                if size:  # else another optimizer's states may leave more room
                    found[candidate.without_optimizer] = size
                    fitting.append(candidate._replace(micro_batch=size))
                    self.ask.bar.set_postfix_str(f"so far {self.choices.name(min(fitting, key=self.ranking.key))}")
        pool.shutdown(wait=False, cancel_futures=True)
        if not (self.estimates or self.too_large):
            raise failures[0]
        return sorted(fitting, key=self.ranking.key)

    def smallest(self) -> Candidate:
        """The recipe that needs least of those that do not fit."""
        while (least := min(self.too_large, key=self.too_large.get)) not in self.estimates:
            try:
                self.too_large[least] = self.needed_by(self._estimated(least))
            except ValueError:  # no time is left, or it cannot be followed
                del self.too_large[least]
        return least

    def looks_at(self, pairs: Iterable[tuple[Task, Candidate]]) -> None:
        """What recipes take by the number of layers is learnt of several at once: whoever asks has it by then."""
        with ThreadPoolExecutor(self.at_once) as pool:
            for task, candidate in pairs:
                ahead(pool, self._beside().line_of, task, candidate)

    def needed(self, candidate: Candidate) -> int:
        """The bytes that a recipe needs, estimated once; where its states alone are too many, theirs."""
        states = self._known_states(candidate)
        is_open = candidate in self.estimates or states <= self.limit
        needed = self.needed_by(self._estimated(candidate)) if is_open else round(states)
        if needed > self.limit:
            self.too_large[candidate] = needed
        return needed

    def _beside(self) -> "RecipeSearch":
        """One that finds the same and notes it elsewhere: what it asks is answered for this one too."""
        return dataclasses.replace(self, estimates={}, too_large={}, notes=[], assumptions={}, _states={**self._states})

    def line_of(self, task: Task, candidate: Candidate) -> Line | None:
        """What a recipe takes by the number of layers; None where all layers are followed at once."""
        return self.ask(self.line, task, self.choices.arguments(candidate)) if layers_of(task) else None

    def about(self, task: Task, candidate: Candidate) -> tuple[int, int] | None:
        """About how many bytes a deep model has alive, and reserves at the most, with the context; else None."""
        if (line := self.line_of(task, candidate)) is None:
            return None
        alive, reserved = line.at(layers_of(task))
        return alive + self.context, reserved + self.context

    def told(self, candidate: Candidate) -> int:
        """The bytes that a recipe needs; of a deep model about so many."""
        about = self.about(self.task, candidate)
        return about[1] if about else self.needed(candidate)

    def fits(self, candidate: Candidate) -> bool:
        """Whether it does; of a deep model by what shallow ones tell, where that is clear."""
        is_open = candidate not in self.estimates and self._known_states(candidate) <= self.limit
        if is_open and (line := self.line_of(self.task, candidate)):
            self._states.setdefault(_of_states(candidate), _SURE * line.states_at(layers_of(self.task)))
            alive, reserved = self.about(self.task, candidate)
            if _SURE * alive > self.limit:
                self.too_large[candidate] = alive
                return False
            if reserved <= self.limit:
                return True
        return self.needed(candidate) <= self.limit

    def _known_states(self, candidate: Candidate) -> float:
        """The bytes that its states and the context take at least; negative where none like it was estimated."""
        return self._states.get(_of_states(candidate), -math.inf) + self.context

    def _estimated(self, candidate: Candidate) -> MemoryEstimate:
        if candidate not in self.estimates:
            found = self.estimates[candidate] = self.estimate(self.task, self.choices.arguments(candidate))
            ends = (found.memory.phase_breakdowns or {}).values()
            states = (sum(parts.get(name, 0) for name in STATES) for parts in ends)
            self._states[_of_states(candidate)] = max(states, default=0)
        return self.estimates[candidate]

    def needed_by(self, estimated: MemoryEstimate) -> int:
        """The bytes that an estimate asks for: what the allocator reserves, on a CPU what is alive, and the context.
        More than the limit just where the estimate says that it is too large for the card."""
        return max(estimated.memory.reserved_bytes or 0, estimated.peak_bytes) + self.context

    def estimate(self, task: Task, arguments: Mapping[str, Any]) -> MemoryEstimate:
        """An estimate that is counted, and whose assumptions are kept."""
        self.count += 1
        estimated = self.ask(self.predict, task, arguments)
        self.assumptions |= dict.fromkeys(estimated.assumptions)
        if (newer := estimated.untested_torch) and f"{untested_text(newer)}." not in self.notes:
            self.notes.append(f"{untested_text(newer)}.")
        return estimated

    def furthest(
        self, candidate: Candidate, sizes: Sequence[int], task_of: Callable[[int], Task], first: int
    ) -> tuple[int, int]:
        """The largest of ascending sizes of a task at which a recipe fits, looked for from `first` on, and the bytes
        that it needs there; 0, and what the smallest needs, where it fits at none."""
        arguments, exact = self.choices.arguments(candidate), {}  # bytes by size

        def needed(size: int) -> int:
            if size not in exact:
                exact[size] = self.needed_by(self.estimate(task_of(size), arguments))
            return exact[size]

        def about(size: int) -> tuple[int, int]:
            """Bytes alive, and reserved at the most."""
            return self.about(task_of(size), candidate) or (needed(size), needed(size))

        def does(size: int) -> bool:
            return needed(size) <= self.limit

        above = largest_that_fits(sizes, lambda size: _SURE * about(size)[0] <= self.limit, first)
        sizes = [size for size in sizes if size <= (above or sizes[0])]
        below = above and largest_that_fits(sizes, lambda size: about(size)[1] <= self.limit, above)
        if below:
            likely = task_of(below)
            length = f" with {likely.seq_len:,} tokens" if likely.seq_len else ""
            self.ask.bar.set_postfix_str(f"so far {likely.model}{length}")
        found = above and largest_that_fits([size for size in sizes if size >= below], does, below)
        if not found and (smaller := [size for size in sizes if size < below]):
            found = largest_that_fits(smaller, does, smaller[-1])
        return found, needed(found or sizes[0])

    def _largest(self, candidate: Candidate, fitting: Iterable[Candidate], found: Mapping) -> int:
        """The largest micro-batch that fits, looked for from that of a recipe alike on; 0: none, or one that is no
        larger than that of a recipe to which this one only adds costs."""

        def of(size: int) -> Candidate:
            return candidate._replace(micro_batch=size)

        beaten = [other.micro_batch for other in fitting if self.ranking.only_adds_costs(candidate, other)]
        sizes = [size for size in self.choices.micro_batches if size > max(beaten, default=0)]
        if not sizes:
            return 0
        first, whole = found.get(candidate.without_optimizer, sizes[-1]), of(sizes[-1])
        most = largest_that_fits(sizes, lambda size: self.fits(of(size)), first)
        if most < sizes[-1] and whole not in self.estimates and whole.micro_batch == self.choices.samples:
            # All samples at once may fit where fewer do not: no gradients wait while a next micro-batch is forward.
            fewer = self.estimates.get(of(next(size for size in sizes if size > most)))
            least = fewer.peak_bytes - fewer.memory.breakdown["gradients"] + self.context if fewer else 0
            if least <= self.limit and self.fits(whole):
                most = whole.micro_batch
        sizes = [size for size in sizes if size <= most]  # of a deep model by what shallow ones tell
        while sizes and self.needed(of(sizes[-1])) > self.limit:
            sizes.pop()
        return sizes[-1] if sizes else 0


def ahead(pool: ThreadPoolExecutor, ask: Callable, *arguments) -> Future:
    """What is begun in a pool's thread, within the time that there is here."""
    return pool.submit(contextvars.copy_context().run, ask, *arguments)


class Once:
    """Asks each question once, whichever thread is first; the others wait. A bar of tqdm shows how many were asked."""

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
    """The techniques that decide about weights, gradients and optimizer states."""
    return frozenset(candidate.techniques) - known.OF_ACTIVATIONS


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool], first: int) -> int:
    """The largest of ascending sizes that fits, by bisection; 0: none. `first`, and the one above it, are looked at
    first: what fitted in a similar case, or a guess. After the largest the smallest is next: often none does."""
    low, high = 0, len(sizes)  # so many are small enough; from that index on they are too large
    index = bisect_left(sizes, first)
    likely = [0, index] if index >= high - 1 else [index + 1, index]
    while low < high:
        middle = likely.pop() if likely else (low + high) // 2
        if middle not in range(low, high):
            continue  # it is known, or there is none
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else 0
