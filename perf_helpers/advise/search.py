"""The search for what fits, where every look costs an estimate.

The peak of a training is the highest of its operations, and what is alive at each operation grows linearly with the
micro-batch. So the peak is a maximum of linear functions of the micro-batch, which is convex: the straight line through
two estimates bounds it from above between the two, and from below beyond them. A few estimates find the largest
micro-batch that fits, and what is proposed was always estimated itself.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perf_helpers.advise.choices import Candidate, Choices, Family
from perf_helpers.advise.ranking import Ranking
from perf_helpers.estimate import MemoryEstimate
from perf_helpers.estimate.allocator import context_bytes
from perf_helpers.lab.processes import seconds_left
from perf_helpers.lab.task import Task
from perf_helpers.lab.techniques import QUESTIONS

UNKNOWN_CONTEXT_BYTES = context_bytes((7, 0))  # of a V100: left for the context of a GPU that nobody measured it on
_OPTIMIZERS = set(QUESTIONS[("optim",)])
_FAR = 1.2  # a guess that is beyond the limit by this factor is believed
_STEPS = 0.03  # a bound beyond the limit by less is not believed: the CUDA allocator's segments make the line a stair


class RecipeSearch:
    """The recipes of a task that fit a limit in bytes: for one family after the other, the largest micro-batch.

    `predict` makes the estimate of a task with training arguments, for the device that is meant.
    """

    def __init__(
        self, task: Task, predict: Callable[..., MemoryEstimate], limit: int, choices: Choices, ranking: Ranking
    ):
        self.task, self.limit, self.choices = task, limit, choices
        self._predict, self._ranking = predict, ranking
        self.count = 0  # estimates asked for so far
        self.on_estimate: Callable[[], Any] = lambda: None  # called after each estimate
        self.assumptions: dict[str, None] = {}  # of all estimates, each once, in order
        self.estimates: dict[Candidate, MemoryEstimate] = {}
        self.too_large: dict[Candidate, float] = {}  # bytes of what does not fit, as estimated, guessed or by a line
        self.notes: list[str] = []  # what was not looked at, and why
        self._searches: dict[Family, Search] = {}
        self._sizes = choices.micro_batches
        # All samples at once: no gradients wait while a next micro-batch is forward, so this size has its own line.
        several = self._sizes[-1] == choices.samples and len(self._sizes) > 1
        self._whole = choices.samples if several else None

    def find(self, most: int) -> list[Candidate]:
        """The best recipes that fit, at most `most`, the best first.

        Families are looked at in the order in which they would rank if all fitted, except those that only add costs.

        Raises:
            ValueError: not one estimate could be made; with the first one's reason.
        """
        fitting: list[Candidate] = []
        failures: list[ValueError] = []
        largest = self._sizes[-1]
        ranked = sorted(self.choices.families, key=lambda family: self._ranking.key(Candidate(family, largest)))
        for index, family in enumerate(ranked):
            if len(fitting) == most:
                break
            if self.estimates and not seconds_left(math.inf):
                self.notes.append(f"The time was up: {len(ranked) - index} ways of training were not looked at.")
                break
            beaten = [other.micro_batch for other in fitting if self._ranking.only_adds_costs(family, other.family)]
            if largest in beaten:
                continue
            try:
                size = self._largest(family, above=max(beaten, default=0))
            except ValueError as error:
                failures.append(error)
                name = ", ".join(technique.name for technique in family) or "the plain recipe"
                self.notes.append(f"{name} was left out: {error}")
                continue
            if size:
                fitting.append(Candidate(family, size))
        if not self.estimates:
            raise failures[0]
        return sorted(fitting, key=self._ranking.key)

    def smallest(self) -> Candidate:
        """The recipe that needs least of those that do not fit; it is estimated."""
        while (candidate := min(self.too_large, key=self.too_large.get)) not in self.estimates:
            self.needed(candidate)
        return candidate

    def needed(self, candidate: Candidate) -> int:
        """The bytes that a recipe needs, estimated once."""
        if candidate not in self.estimates:
            self.estimates[candidate] = self.estimate(self.choices.arguments(candidate))
        needed = self.estimates[candidate].needed_bytes(UNKNOWN_CONTEXT_BYTES)
        if needed > self.limit:
            self.too_large[candidate] = needed
        return needed

    def estimate(self, arguments: Mapping[str, Any], **changes: Any) -> MemoryEstimate:
        """A new estimate for training arguments, of the task with these changes."""
        self.count += 1
        estimated = self._predict(self.task.replace(**changes), **arguments)
        self.assumptions |= dict.fromkeys(estimated.assumptions)
        self.on_estimate()
        return estimated

    def _largest(self, family: Family, above: int) -> int | None:
        """The largest micro-batch of a family that fits; None where none does, or none above `above`.

        Families that differ in nothing but the optimizer have the same activations. So the search begins where it ended
        for another one of them, and takes its slope until it knows two points of its own.
        """
        related = [other for other in self._searches if set(other) - _OPTIMIZERS == set(family) - _OPTIMIZERS]
        for other in related:
            if (guess := self._guess(family, other)) is not None and self._is_hopeless(guess, other):
                self.too_large[Candidate(family, self._sizes[0])] = guess
                return None
        slopes = {other: slope for other in related if (slope := self._searches[other].mean_slope()) is not None}
        model = next(iter(slopes), None)
        low = self._sizes.index(above) if above else -1
        known = itertools.chain.from_iterable(self._searches[other].known.items() for other in related)
        fits = [self._sizes.index(size) for size, needed in known if needed <= self.limit]
        search = self._searches[family] = Search(
            self._sizes,
            lambda size: self.needed(Candidate(family, size)),
            self.limit,
            slope=slopes.get(model),
            slope_holds=lambda size: self._peaks_alike(Candidate(family, size), model),
            outlier=self._whole,
        )
        index = search.run(low, first=max([low + 1, *fits]) if above or related else None)
        if index + 1 < len(self._sizes):
            following = Candidate(family, self._sizes[index + 1])
            self.too_large.setdefault(following, search.line(following.micro_batch))
        if self._whole_may_fit(family) and search.at(len(self._sizes) - 1) <= self.limit:
            return self._whole
        return self._sizes[index] if index > low else None

    def _guess(self, family: Family, other: Family) -> float | None:
        """The bytes of a family with the smallest micro-batch, if the optimizers of two families make the same
        difference between them as between two that were estimated; None where there are no such two."""
        mine, theirs = set(family) & _OPTIMIZERS, set(other) & _OPTIMIZERS
        for one, each in itertools.product(self._searches, repeat=2):
            alike = set(one) - mine == set(each) - theirs and mine <= set(one) and theirs <= set(each)
            known = [Candidate(way, self._sizes[0]) for way in (other, one, each)]
            if alike and all(candidate in self.estimates for candidate in known):
                base, more, less = map(self.needed, known)
                return base + more - less
        return None

    def _is_hopeless(self, guess: float, other: Family) -> bool:
        """Whether a guess is too far off for a look, also without the gradients that wait between micro-batches."""
        waiting = self.estimates[Candidate(other, self._sizes[0])].memory.breakdown["gradients"] if self._whole else 0
        return guess > _FAR * self.limit and guess - waiting > self.limit

    def _peaks_alike(self, candidate: Candidate, model: Family) -> bool:
        """Whether a recipe peaks in the same operation as another family does at the end of its known line."""
        last = max(size for size in self._searches[model].known if size != self._whole)
        one, other = (self.estimates[each].memory for each in (candidate, Candidate(model, last)))
        return (one.peak_phase, one.peak_operation) == (other.peak_phase, other.peak_operation)

    def _whole_may_fit(self, family: Family) -> bool:
        """Whether all samples at once may fit where several micro-batches do not, whose gradients wait meanwhile."""
        search = self._searches[family]
        if self._whole is None or self._whole in search.known:
            return False
        waiting = max(self.estimates[Candidate(family, size)].memory.breakdown["gradients"] for size in search.known)
        return (search.line(self._whole) or max(search.known.values())) - waiting <= self.limit


@dataclass
class Search:
    """The largest of some sizes that fits, by few looks at what they need: a convex function of the size.

    Between two known sizes their line is an upper bound: what fits by it does fit. Beyond them it is a lower bound:
    what does not fit by it does not fit. Each look is taken between the two answers, until they are the same.
    """

    sizes: Sequence[int]  # ascending
    needed: Callable[[int], int]  # size -> bytes
    limit: int  # bytes that there are
    slope: float | None = None  # bytes that one more in size adds, where another search has shown it
    slope_holds: Callable[[int], bool] = lambda size: False  # whether it does at a size; then, by convexity, beyond too
    outlier: int | None = None  # a size that lies on no line with the others
    known: dict[int, int] = field(default_factory=dict)  # size: bytes, of every size that was looked at

    def run(self, low: int = -1, first: int | None = None) -> int:
        """The index of the largest size that fits; `low` where no later one does.

        Args:
            low: index of the largest size known to fit; -1: of none.
            first: index to look at first; None: the search chooses.
        """
        high = len(self.sizes)  # from here on nothing fits
        while high - low > 1:
            index = self._next(low, high) if self.known or first is None else first
            if index is None or not low < index < high:  # each look narrows the range, whatever it showed
                break
            if self.at(index) <= self.limit:
                low = index
            else:
                high = index
        return low

    def at(self, index: int) -> int:
        """The bytes that the size at an index needs."""
        size = self.sizes[index]
        if size not in self.known:
            self.known[size] = self.needed(size)
        return self.known[size]

    def mean_slope(self) -> float | None:
        """The bytes that one more in size adds, over all known sizes; None where there are fewer than two."""
        sizes = self._on_line()
        return self._rise(sizes[0], sizes[-1]) if len(sizes) > 1 else None

    def line(self, size: int) -> float | None:
        """The bytes of a size by the line through the two known ones nearest to it, or through one with the slope that
        was given; None where there is no line."""
        sizes = self._on_line()
        if len(sizes) == 1 and self.slope is not None:
            return self.known[sizes[0]] + self.slope * (size - sizes[0])
        if len(sizes) < 2 and len(sizes := sorted(self.known)) < 2:
            return None
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        return self._through(sizes[right - 1], sizes[right], size)

    def _next(self, low: int, high: int) -> int | None:
        """The index to look at next; None where the bounds prove that nothing beyond `low` fits."""
        if low < 0 and self.slope is None:
            return 0
        if self.line(self.sizes[high - 1]) is None:
            return high - 1
        between = range(low + 1, high)
        fits = max((i for i in between if self.line(self.sizes[i]) <= self.limit), default=low)
        bounds = [self._lower_bound(self.sizes[i]) for i in between]
        if low < 0 or bounds[0] is None:
            return max(fits, low + 1)
        limit = self.limit * (1 + _STEPS)
        may_fit = max((i for i, bound in zip(between, bounds, strict=True) if bound <= limit), default=low)
        return None if may_fit == low else (max(low, min(fits, may_fit)) + may_fit + 1) // 2

    def _lower_bound(self, size: int) -> float | None:
        """What a size needs at least, by the lines that end before it or begin after it; None where there is none."""
        if size == self.outlier:
            return 0
        sizes = self._on_line()
        before, after = [known for known in sizes if known < size][-2:], [known for known in sizes if known > size][:2]
        bounds = [self._through(*pair, size) for pair in (before, after) if len(pair) == 2]
        if len(sizes) == 1 and before and self.slope is not None and self.slope_holds(before[0]):
            bounds.append(self.line(size))
        return max(bounds, default=None)

    def _on_line(self) -> list[int]:
        """The known sizes without the outlier, ascending."""
        return sorted(self.known.keys() - {self.outlier})

    def _through(self, one: int, other: int, size: int) -> float:
        """The bytes of a size by the line through two known ones."""
        return self.known[one] + self._rise(one, other) * (size - one)

    def _rise(self, one: int, other: int) -> float:
        return (self.known[other] - self.known[one]) / (other - one)
