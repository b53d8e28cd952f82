"""The births and deaths of a deep model's training, in their order, from those of shallow models.

How the caching allocator cuts its memory depends on the whole sequence, so that straight lines through bytes (see
`layers`) cannot tell what it holds. From two layers to four, say, some units of the sequence occur twice more: a
layer's forward, its backward, its parameters in a list that an optimizer works on. The sequence of the deep model has
each as often as there are layers more. That a unit occurs twice in a row, with the same bytes, is the proof that layers
are alike; one that only differs further down is not noticed, as it is not in `layers`.

Which block dies is told by its rank among the living ones of its kind: backward frees the newest, an update that
replaces a state the oldest, `zero_grad` all. A rank that holds wherever it was seen is taken to hold in the deep model.
Where none does, or two do that differ there, nothing is said.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from perf_helpers.estimate.layers import numberless

FEW = 2  # layers of each sort in the shallowest model
_TWICE = 2  # how often more a unit occurs in the others: so many layers more they have, one sort after the other
_MOST_TRIES = 1000  # of what may have been put into a stretch


class Label(NamedTuple):
    """What a block is, as far as it is the same in each layer."""

    operation: str  # that made it
    category: str  # of `Category`
    phase: str  # of its birth
    module: str  # that it belongs to, with "*" for the numbers in its name
    stream: int = 0  # see `tracker.Block`


@dataclass(frozen=True, slots=True)
class Log:
    """Births and deaths of blocks in their order, from the loading of the model on."""

    blocks: list[tuple[int, Label]]  # (bytes, not rounded; what it is), in the order of birth
    events: list[int]  # n: the birth of block n; ~n: its death
    marks: list[tuple[str, int]]  # (label, how many events are before it): "start" of the first forward, ends of phases
    emptied: tuple[int, ...] = ()  # after how many events the allocator is told to give back what is free

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(block, its bytes, +1 born or -1 dead), one by one."""
        for event in self.events:
            block, sign = (event, 1) if event >= 0 else (~event, -1)
            yield block, self.blocks[block][0], sign


def recorded(tracker: Any) -> Log:
    """The log of a training that a `tracker.Tracker` has followed, without what dies after the last birth and mark."""
    entries, marks = list(tracker.log), [(label, position) for label, position, _ in tracker.marks]
    ends = [end for end, *_ in tracker.operations]
    numbers: dict[int, int] = {}  # of the blocks
    labels: dict[Label, Label] = {}  # one object for all that are equal, so that few are sent between processes
    blocks, events, length = [], [], max((position for _, position in marks), default=0)
    for position, (block, sign) in enumerate(entries):
        if sign < 0:
            events.append(~numbers[id(block)])
            continue
        _, phase, _, module = tracker.operations[min(bisect.bisect_right(ends, position), len(ends) - 1)]
        label = Label(block.operation, block.category, phase, numberless(module), block.stream)
        numbers[id(block)] = len(blocks)
        events.append(len(blocks))
        blocks.append((block.bytes, labels.setdefault(label, label)))
        length = max(length, len(events))
    return Log(blocks, events[:length], marks, tuple(tracker.emptied))


def shallow(depth: dict[str, int], few: int = FEW) -> list[dict[str, int]]:
    """The depths that `deepened` needs, as `depth` is given: {field of the configuration: layers}."""
    base = dict.fromkeys(depth, few)
    return [base, *(base | {name: few + _TWICE} for name in depth)]


def deepened(logs: Sequence[Log], depth: dict[str, int], few: int = FEW) -> Log | None:
    """The log of a model with so many layers; None where the logs of `shallow(depth, few)` do not tell it for certain.

    Two layers are enough, unless all share their weights (ALBERT): the sum of gradients is made by the second layer
    from the end, and with two that is the first one. Then three are.

    Deaths without a birth between them are in the order of their births: an allocator is in the same state after them.
    """
    counts = tuple(layers - few for layers in depth.values())
    if min(counts) < 0:
        return None
    scores = _scores(logs)
    if any([stretch[0].token for stretch in score] != [stretch[0].token for stretch in scores[0]] for score in scores):
        return None  # other phases
    try:
        pieces = [_pieces([score[number] for score in scores]) for number in range(len(scores[0]))]
        _learn_deaths(pieces, scores)
        return _performed(pieces, counts)
    except _UnclearError:
        return None


class _UnclearError(Exception):
    """The shallow logs do not say what happens in the deep one."""


# ---- a log as beats: a birth and the deaths that follow it

# What a beat can be recognized by at other depths: a block's label and its bytes, None where these depend on the depth.
# For a mark: its label, which begins a stretch.
_Token = tuple[Label | str, int | None]
_Kind = tuple[int, _Token]  # blocks that are alike: the number of the stretch that they are born in, their token


@dataclass(slots=True)
class _Beat:
    token: _Token
    block: int | None  # that is born; None at a mark
    bytes: int = 0
    dead: dict[_Kind, list[int]] = field(default_factory=lambda: defaultdict(list))
    key: int = 0  # beats that look alike have the same, at all depths


_Score = list[list[_Beat]]  # the beats of each stretch, which goes from one mark to the next


def _scores(logs: Sequence[Log]) -> list[_Score]:
    steady = set.intersection(*({(label, size) for size, label in log.blocks} for log in logs))
    scores = [_score(log, steady) for log in logs]
    beats = [[beat for stretch in score for beat in stretch] for score in scores]
    everywhere = frozenset.intersection(*(frozenset(kind for beat in each for kind in beat.dead) for each in beats))
    keys: dict[tuple, int] = {}
    for beat in itertools.chain(*beats):
        beat.key = keys.setdefault((beat.token, everywhere.intersection(beat.dead)), len(keys))
    return scores


def _score(log: Log, steady: set[tuple[Label, int]]) -> _Score:
    score = [[_Beat(("", None), None)]]
    marks, kinds = defaultdict(list), []
    for label, position in log.marks:
        marks[position].append(label)
    for position, event in enumerate([*log.events, None]):
        score += [[_Beat((label, None), None)] for label in marks[position]]
        if event is None:
            break
        if event >= 0:
            size, label = log.blocks[event]
            token = (label, size if (label, size) in steady else None)
            score[-1].append(_Beat(token, event, size))
            kinds.append((len(score) - 1, token))
        else:
            score[-1][-1].dead[kinds[~event]].append(~event)
    return score


# ---- what further layers put in

# How the dead among the blocks of one kind are told: whether by their own ranks or by those of the blocks that live on,
# whether ranks count from the oldest or from the newest, and the ranks. All die where none lives on.
_Choice = tuple[bool, bool, tuple[int, ...]]


@dataclass(slots=True)
class _Part:
    """A beat of the full model."""

    token: _Token
    is_repeated: bool  # in each further layer
    bytes: list[int] = field(default_factory=list)  # in each shallow log that has it
    dead: dict[_Kind, set[_Choice] | None] = field(default_factory=dict)  # which die; None: not yet learnt


@dataclass(frozen=True, slots=True)
class _Piece:
    """Parts that follow one another."""

    parts: list[_Part]
    sort: int | None  # the sort of layers with each of which they occur once more; None: they occur once

    def times(self, counts: Sequence[int]) -> int:
        return 1 if self.sort is None else counts[self.sort]


def _pieces(stretches: Sequence[list[_Beat]]) -> list[_Piece]:
    """One stretch of all the shallow logs as pieces."""
    base, *deeper = ([beat.key for beat in beats] for beats in stretches)
    units = [
        (position, sort, stretches[1 + sort][start : start + length])
        for sort, keys in enumerate(deeper)
        for position, start, length in _put_in(base, keys)
    ]
    units.sort(key=lambda unit: unit[:2])
    for (one, _, first), (other, _, second) in itertools.pairwise(units):
        orders = ([beat.key for beat in beats] for beats in (first + second, second + first))
        if one == other and len({*map(tuple, orders)}) > 1:
            raise _UnclearError  # which comes first
    pieces, begin = [], 0
    for position, sort, beats in units:
        pieces.append(_Piece([_Part(beat.token, False) for beat in stretches[0][begin:position]], None))
        pieces.append(_Piece([_Part(beat.token, True) for beat in beats], sort))
        begin = position
    return [*pieces, _Piece([_Part(beat.token, False) for beat in stretches[0][begin:]], None)]


def _put_in(base: list[int], deeper: list[int]) -> list[tuple[int, int, int]]:
    """What must be put into one sequence, twice in a row each, to make the other: (position in `base`, first position
    in `deeper`, length). Of several lengths those come first after which the sequences agree longest."""
    tries = itertools.count()

    def units(here: int, there: int) -> list[tuple[int, int, int]] | None:
        agreed = _agreement(base, deeper, here, there)
        here, there = here + agreed, there + agreed
        if (here, there) == (len(base), len(deeper)):
            return []
        found = []
        for length in range(1, (len(deeper) - there) // _TWICE + 1):
            after = there + _TWICE * length
            if (
                deeper[there] == deeper[there + length]  # quick, and mostly not so
                and deeper[there : there + length] * _TWICE == deeper[there:after]
            ):
                found.append((-_agreement(base, deeper, here, after), length))
        for _, length in sorted(found):
            if next(tries) < _MOST_TRIES and (rest := units(here, there + _TWICE * length)) is not None:
                return [(here, there, length), *rest]
        return None

    if (found := units(0, 0)) is None:
        raise _UnclearError
    return found


def _agreement(base: list[int], deeper: list[int], here: int, there: int) -> int:
    """For how long two sequences agree from these positions on."""
    pairs = zip(itertools.islice(base, here, None), itertools.islice(deeper, there, None), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _parts(pieces: Iterable[_Piece], counts: Sequence[int]) -> Iterator[_Part]:
    """The parts of a stretch, with as many further layers of each sort."""
    for piece in pieces:
        for _ in range(piece.times(counts)):
            yield from piece.parts


# ---- which blocks die


def _learn_deaths(pieces: list[list[_Piece]], scores: Sequence[_Score]) -> None:
    """Note in each part which blocks die there, and its bytes."""
    sorts = range(len(scores) - 1)
    counts = [[0 for _ in sorts], *([_TWICE * (sort == own) for sort in sorts] for own in sorts)]
    placed = [
        [list(zip(_parts(own, count), beats, strict=True)) for own, beats in zip(pieces, score, strict=True)]
        for score, count in zip(scores, counts, strict=True)
    ]
    for part, beat in itertools.chain(*itertools.chain(*placed)):
        part.bytes.append(beat.bytes)
        part.dead |= dict.fromkeys(beat.dead)
    for stretches in placed:
        living: dict[_Kind, list[int]] = defaultdict(list)
        for number, stretch in enumerate(stretches):
            for part, beat in stretch:
                if beat.block is not None:
                    living[number, part.token].append(beat.block)
                for kind, known in part.dead.items():
                    dead = set(beat.dead.get(kind, ()))
                    choices = _choices(living[kind], dead)
                    part.dead[kind] = choices if known is None else choices & known
                    living[kind] = [block for block in living[kind] if block not in dead]


def _choices(living: list[int], dead: set[int]) -> set[_Choice]:
    """All ways to tell the dead from those that live on."""
    last, choices = len(living) - 1, set()
    for of_dead in (True, False):
        ranks = [rank for rank, block in enumerate(living) if (block in dead) == of_dead]
        choices |= {(of_dead, True, tuple(ranks)), (of_dead, False, tuple(last - rank for rank in reversed(ranks)))}
    return choices


def _chosen(choices: set[_Choice], living: int) -> list[int]:
    """The ranks, from the oldest, of those that die."""
    told = set()
    for of_dead, from_oldest, ranks in choices:
        named = {rank if from_oldest else living - 1 - rank for rank in ranks}
        if not named <= set(range(living)):
            raise _UnclearError
        told.add(tuple(rank for rank in range(living) if (rank in named) == of_dead))
    if len(told) != 1:
        raise _UnclearError
    return list(told.pop())


def _performed(pieces: list[list[_Piece]], counts: Sequence[int]) -> Log:
    """The log with as many further layers of each sort."""
    log = Log([], [], [])
    living: dict[_Kind, list[int]] = defaultdict(list)
    for number, stretch in enumerate(pieces):
        for at, part in enumerate(_parts(stretch, counts)):
            label, _ = part.token
            if at:
                living[number, part.token].append(len(log.blocks))
                log.events.append(len(log.blocks))
                log.blocks.append((_grown(part, counts), label))
            elif label:
                log.marks.append((label, len(log.events)))
            dead = []
            for kind, choices in part.dead.items():
                blocks = living[kind]
                ranks = _chosen(choices, len(blocks))
                dead += [blocks[rank] for rank in ranks]
                for rank in reversed(ranks):
                    del blocks[rank]
            log.events.extend(~block for block in sorted(dead))
    return log


def _grown(part: _Part, counts: Sequence[int]) -> int:
    """Bytes of a block: of what each layer has they are the same, of what occurs once they lie on a straight line."""
    base, *others = part.bytes
    if part.is_repeated:
        if any(size != base for size in others):
            raise _UnclearError
        return base
    more, rest = divmod(sum(count * (size - base) for count, size in zip(counts, others, strict=True)), _TWICE)
    if rest:
        raise _UnclearError
    return base + more
