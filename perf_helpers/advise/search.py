"""The search for what fits, where every look costs an estimate.

The peak of a training is the highest of its operations, and what is alive at each operation grows linearly with the
micro-batch. So the peak is a maximum of linear functions of the micro-batch, which is convex: the straight line through
two estimates bounds it from above between the two, and from below beyond them. A few estimates find the largest
micro-batch that fits, and what is proposed was always estimated itself.

On CUDA what the allocator reserves decides. It is no such function: near the end of the card cached segments are given
back, and what does not fit is told as on a card without limit. So the lines are drawn through what is allocated, which
no card can do without, and whether a size between them fits is asked.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perf_helpers.advise.candidate_recipes import Candidate, Choices, Family
from perf_helpers.advise.measured_speedups import Ranking
from perf_helpers.estimate import MemoryEstimate
from perf_helpers.lab.processes import seconds_left
from perf_helpers.lab.task import Task
from perf_helpers.lab.techniques import QUESTIONS

_OPTIMIZERS = set(QUESTIONS[("optim",)])
_FAR = 1.2  # a guess that is beyond the limit by this factor is believed
_STEPS = 0.03  # a bound beyond the limit by less is not believed: CUDA's blocks, not always split, make a stair of it


@dataclass
class RecipeSearch:
    """The recipes of a task that fit: for one family after the other, the largest micro-batch."""

    task: Task
    predict: Callable[..., MemoryEstimate]  # of a task with training arguments, for the device that is meant
    limit: int  # bytes that there are
    context: int  # bytes of them that the CUDA context takes; 0 on a CPU
    choices: Choices
    ranking: Ranking
    on_estimate: Callable[[], Any]  # called after each estimate
    count: int = 0  # estimates asked for so far
    assumptions: dict[str, None] = field(default_factory=dict)  # of all estimates, each once, in order
    estimates: dict[Candidate, MemoryEstimate] = field(default_factory=dict)
    too_large: dict[Candidate, float] = field(default_factory=dict)  # bytes, as estimated, guessed or by a line
    notes: list[str] = field(default_factory=list)  # what was not looked at, and why

    def __post_init__(self):
        self._searches: dict[Family, Search] = {}
        self._sizes = self.choices.micro_batches
        # All samples at once: no gradients wait while a next micro-batch is forward, so this size has its own line.
        self._whole = self.choices.samples if self._sizes[0] < self._sizes[-1] == self.choices.samples else None

    def find(self, most: int) -> list[Candidate]:
        """The best recipes that fit, at most `most`, the best first.

        Families are looked at in the order in which they would rank if all fitted, except those that only add costs.

        Raises:
            ValueError: not one estimate could be made; with the first one's reason.
        """
        fitting: list[Candidate] = []
        failures: list[ValueError] = []
        largest = self._sizes[-1]
        ranked = sorted(self.choices.families, key=lambda family: self.ranking.key(Candidate(family, largest)))
        for index, family in enumerate(ranked):
            if len(fitting) == most:
                break
            if self.estimates and not seconds_left():
                self.notes.append(f"The time was up: {len(ranked) - index} ways of training were not looked at.")
                break
            beaten = [other.micro_batch for other in fitting if self.ranking.only_adds_costs(family, other.family)]
            if largest in beaten:
                continue
            try:
                if size := self._largest(family, above=max(beaten, default=0)):
                    fitting.append(Candidate(family, size))
            except ValueError as error:
                failures.append(error)
                name = ", ".join(technique.name for technique in family) or "the plain recipe"
                self.notes.append(f"{name} was left out: {error}")
        if not self.estimates:
            raise failures[0]
        return sorted(fitting, key=self.ranking.key)

    def smallest(self) -> Candidate:
        """The recipe that needs least of those that do not fit; it is estimated."""
        while (candidate := min(self.too_large, key=self.too_large.get)) not in self.estimates:
            self.needed(candidate)
        return candidate

    def needed(self, candidate: Candidate) -> int:
        """The bytes that a recipe needs, estimated once."""
        if candidate not in self.estimates:
            self.estimates[candidate] = self.estimate(self.choices.arguments(candidate))
        needed = self.needed_by(self.estimates[candidate])
        if needed > self.limit:
            self.too_large[candidate] = needed
        return needed

    def needed_by(self, estimated: MemoryEstimate) -> int:
        """The bytes that an estimate asks for: what the allocator reserves, on a CPU what is alive, and the context.
        More than the limit just where the estimate says that it is too large for the card."""
        return max(estimated.memory.reserved_bytes or 0, estimated.peak_bytes) + self.context

    def estimate(self, arguments: Mapping[str, Any], **changes: Any) -> MemoryEstimate:
        """A new estimate for training arguments, of the task with these changes."""
        self.count += 1
        estimated = self.predict(self.task.replace(**changes), **arguments)
        self.assumptions |= dict.fromkeys(estimated.assumptions)
        self.on_estimate()
        return estimated

    def _largest(self, family: Family, above: int) -> int:
        """The largest micro-batch of a family that fits and is above `above`; 0 where there is none.

        Families that differ in nothing but the optimizer have the same activations. So the search begins where it ended
        for another one of them, and takes its slope until it knows two points of its own.
        """
        activations = {*family} - _OPTIMIZERS
        related = {other: known for other, known in self._searches.items() if {*other} - _OPTIMIZERS == activations}
        if guess := next(filter(None, (self._hopeless(family, other) for other in related)), None):
            self.too_large[Candidate(family, self._sizes[0])] = guess
            return 0
        search = self._searches[family] = Search(
            self._sizes,
            lambda size: self.needed(Candidate(family, size)),
            self.limit,
            model=next((search for search in related.values() if search.slope() is not None), None),
            least=lambda size: self.estimates[Candidate(family, size)].peak_bytes + self.context,
            peak=lambda size: self._peak(Candidate(family, size)),
            outlier=self._whole,
        )
        following = next(size for size in self._sizes if size > above)
        fits = [size for other in related.values() for size, needed in other.known.items() if needed <= self.limit]
        largest = search.run(above, first=max([following, *fits]) if above or related else None)
        if larger := next((size for size in self._sizes if size > largest), None):
            self.too_large.setdefault(Candidate(family, larger), search.line(larger))
        if self._whole not in (None, *search.known) and self._whole_may_fit(family, search):
            largest = self._whole if search.at(self._whole) <= self.limit else largest
        return largest if largest > above else 0

    def _hopeless(self, family: Family, other: Family) -> float | None:
        """What a family needs with the smallest micro-batch, where that is too far off for a look, also without the
        gradients that wait between micro-batches. It is guessed: its optimizer instead of the other's makes the same
        difference as between two families that were estimated. None where it is not too far off, or no guess."""
        (mine,), (theirs,) = _OPTIMIZERS.intersection(family), _OPTIMIZERS.intersection(other)
        for one in self._searches:
            swapped = tuple(theirs if technique == mine else technique for technique in one)
            known = [Candidate(way, self._sizes[0]) for way in (other, one, swapped)]
            if mine in one and all(candidate in self.estimates for candidate in known):
                base, more, less = map(self.needed, known)
                guess = base + more - less
                waiting = self._gradients(known[0]) if self._whole else 0
                return guess if guess > _FAR * self.limit and guess - waiting > self.limit else None
        return None

    def _whole_may_fit(self, family: Family, search: "Search") -> bool:
        """Whether all samples at once may fit where several micro-batches do not, whose gradients wait meanwhile."""
        waiting = max(self._gradients(Candidate(family, size)) for size in search.known)
        line = search.line(self._whole, least=True)
        return (line or max(map(search.least, search.known))) - waiting <= self.limit

    def _gradients(self, candidate: Candidate) -> int:
        return self.estimates[candidate].memory.breakdown["gradients"]

    def _peak(self, candidate: Candidate) -> tuple[str | None, str | None]:
        memory = self.estimates[candidate].memory
        return memory.peak_phase, memory.peak_operation


@dataclass
class Search:
    """The largest of some sizes that fits, by few looks at what they need: a convex function of the size, or more.

    Between two known sizes their line is an upper bound: what fits by it does fit, or likely, where more is needed.
    Beyond them that of the convex function is a lower bound: what does not fit by it does not fit. Each look is taken
    between the two answers, until they are the same.
    """

    sizes: Sequence[int]  # ascending, above 0
    needed: Callable[[int], int]  # size -> bytes
    limit: int  # bytes that there are
    least: Callable[[int], int] | None = None  # what is convex, of a size that was looked at; None: `needed`
    model: "Search | None" = None  # another search, whose slope is taken until this one has its own
    peak: Callable[[int], Any] = lambda size: None  # what decides at a size; where it is the model's, so is the slope
    outlier: int | None = None  # a size that lies on no line with the others
    known: dict[int, int] = field(default_factory=dict)  # size: bytes, of every size that was looked at

    def __post_init__(self):
        self.least = self.least or self.at

    def run(self, low: int = 0, first: int | None = None) -> int:
        """The largest size that fits; `low` where no larger one does.

        Args:
            low: the largest size known to fit; 0: none.
            first: size to look at first; None: the search chooses.
        """
        open_to = [size for size in self.sizes if size > low]
        while open_to:
            size = self._next(low, open_to) if self.known or first is None else first
            if size not in open_to:  # each look leaves fewer, whatever it showed
                break
            if self.at(size) <= self.limit:
                low = size
            open_to = [other for other in open_to if (other > size if low == size else other < size)]
        return low

    def at(self, size: int) -> int:
        """The bytes that a size needs."""
        if size not in self.known:
            self.known[size] = self.needed(size)
        return self.known[size]

    def slope(self, least: bool = False) -> float | None:
        """The bytes that one more in size adds, over all known sizes; None where there are fewer than two. `least`: of
        what is convex, here and below."""
        sizes = self._on_line()
        return self._rise(sizes[0], sizes[-1], least) if len(sizes) > 1 else None

    def line(self, size: int, least: bool = False) -> float | None:
        """The bytes of a size by the line through the two known ones nearest to it, or through one with the model's
        slope; None where there is no line."""
        sizes = self._on_line()
        if len(sizes) == 1 and self.model:
            return self._bytes(sizes[0], least) + self.model.slope(least) * (size - sizes[0])
        if len(sizes) < 2 and len(sizes := sorted(self.known)) < 2:
            return None
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        return self._through(sizes[right - 1], sizes[right], size, least)

    def _next(self, low: int, open_to: list[int]) -> int | None:
        """The size to look at next; None where the bounds prove that none fits."""
        if not (low or self.model):  # the largest first: where it fits no more are asked
            return open_to[0] if self.known else open_to[-1]
        if self.line(open_to[-1]) is None:
            return open_to[-1]
        bounds = [self._lower_bound(size) for size in open_to]
        fits = max((i for i, size in enumerate(open_to) if self.line(size) <= self.limit), default=-1)
        if not low or bounds[0] is None:
            return open_to[max(fits, 0)]
        may_fit = max((i for i, bound in enumerate(bounds) if bound <= self.limit * (1 + _STEPS)), default=-1)
        return None if may_fit < 0 else open_to[(min(fits, may_fit) + may_fit + 1) // 2]

    def _lower_bound(self, size: int) -> float | None:
        """What a size needs at least, by the lines that end before it or begin after it; None where there is none."""
        if size == self.outlier:
            return 0
        sizes = self._on_line()
        place = bisect_left(sizes, size)
        before, after = sizes[:place][-2:], sizes[place:][:2]
        bounds = [self._through(*pair, size, least=True) for pair in (before, after) if len(pair) == 2]
        alone = len(before) == len(sizes) == 1 and self.model
        if alone and self.peak(before[0]) == self.model.peak(self.model._on_line()[-1]):
            bounds.append(self.line(size, least=True))  # by convexity, the model's slope holds beyond
        return max(bounds, default=None)

    def _on_line(self) -> list[int]:
        """The known sizes without the outlier, ascending."""
        return sorted(self.known.keys() - {self.outlier})

    def _through(self, one: int, other: int, size: int, least: bool) -> float:
        """The bytes of a size by the line through two known ones."""
        return self._bytes(one, least) + self._rise(one, other, least) * (size - one)

    def _rise(self, one: int, other: int, least: bool) -> float:
        return (self._bytes(other, least) - self._bytes(one, least)) / (other - one)

    def _bytes(self, size: int, least: bool) -> int:
        return self.least(size) if least else self.known[size]
