"""The search for the largest size that fits, where a size is costly to try."""

from collections.abc import Callable, Sequence

CLOSE = 0.03  # beyond the limit by less than this, a line is not believed: segments of the CUDA allocator are steps


class Search:
    """The largest of some growing sizes whose peak is within a limit, by few estimates.

    Args:
        needed: size -> bytes, growing with the size.
        slope: bytes that a size is known to add, from a search like this one.
        odd: a size that does not lie on the others' line.
        sure: whether at a size the peak is at the moment that `slope` is of, so that it cannot grow less from there on.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        needed: Callable[[int], int],
        limit: int,
        slope: float | None = None,
        odd: int | None = None,
        sure: Callable[[int], bool] = lambda size: False,
    ):
        self.sizes, self._needed, self.limit, self._slope, self._odd = sizes, needed, limit, slope, odd
        self._sure = sure
        self.known: dict[int, int] = {}

    def at(self, place: int) -> int:
        size = self.sizes[place]
        if size not in self.known:
            self.known[size] = self._needed(size)
        return self.known[size]

    def run(self, first: int | None = None, low: int = -1) -> int:
        """The place of that size; `low` where no later one fits. `first` is the place to look at first, if known."""
        high = len(self.sizes)
        while high - low > 1:
            place = self._next(low, high) if self.known or first is None else first
            if place is None or not low < place < high:  # each look narrows the rest, whatever was found
                break
            if self.at(place) <= self.limit:
                low = place
            else:
                high = place
        return low

    def _next(self, low: int, high: int) -> int | None:
        """Where to look next; None where what is known proves that nothing larger fits."""
        if low < 0 and self._slope is None:
            return 0
        if self.line(self.sizes[high - 1]) is None:
            return high - 1
        places = range(low + 1, high)
        likely = max((place for place in places if self.line(self.sizes[place]) <= self.limit), default=low)
        bounds = [self._at_least(low, high, self.sizes[place]) for place in places]
        if low < 0 or bounds[0] is None:
            return max(likely, low + 1)
        beyond = self.limit * (1 + CLOSE)
        possible = max((place for place, least in zip(places, bounds, strict=True) if least <= beyond), default=low)
        return None if possible == low else (max(low, min(likely, possible)) + possible + 1) // 2

    def _at_least(self, low: int, high: int, size: int) -> float | None:
        """What a size between two places needs at least, by the lines that end before it and begin after it."""
        if size == self._odd:
            return 0
        points = sorted(point for point in self.known if point != self._odd)
        below = [point for point in points if point < size][-2:]
        above = [point for point in points if point > size][:2]
        bounds = [self._through(*pair, size) for pair in (below, above) if len(pair) > 1]
        if len(points) == 1 and below and self._slope is not None and self._sure(below[0]):
            bounds.append(self.line(size))
        return max(bounds, default=None)

    def line(self, size: int) -> float | None:
        """What `size` needs by the line through the two nearest sizes known."""
        points = sorted(point for point in self.known if point != self._odd)
        if len(points) == 1 and self._slope is not None:
            return self.known[points[0]] + self._slope * (size - points[0])
        points = points if len(points) > 1 else sorted(self.known)
        if len(points) < 2:
            return None
        right = next((place for place in range(1, len(points)) if points[place] >= size), len(points) - 1)
        return self._through(points[right - 1], points[right], size)

    def slope(self) -> float | None:
        points = sorted(point for point in self.known if point != self._odd)
        if len(points) < 2:
            return None
        return (self.known[points[-1]] - self.known[points[0]]) / (points[-1] - points[0])

    def _through(self, one: int, other: int, size: int) -> float:
        rise = (self.known[other] - self.known[one]) / (other - one)
        return self.known[one] + rise * (size - one)
