"""The training of a deep model from those of shallow ones: only two and three layers are followed.

Between two neighbouring depths the bytes at each operation grow by what one layer adds, so those of the full model lie
on straight lines. To draw them, the traces of two and of three layers are aligned: which operation of the one is which
of the other, and which belong to the extra layer. Two layers are the fewest, for the first and the last layer may do
what those between them do not.

This alignment compares operations by their shapes and by the bytes that the extra layer adds, for a layer repeats the
operations of the one before it and names alone would not tell them apart. Traces at different micro-batches or lengths
share neither shapes nor bytes: `fitting` aligns those by names and modules.
"""

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perf_helpers.estimate.operations import Trace

# How configurations call their number of layers. Of a pair (encoder, decoder) each is a depth of its own.
_DEPTHS = (
    ("encoder_layers", "decoder_layers"),
    ("num_layers", "num_decoder_layers"),
    ("num_hidden_layers",),
    ("n_layer",),
    ("n_layers",),
    ("num_layers",),
)
_FOLLOWED = 2  # layers of the shallow model
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_MOST_ALONE = 8  # operations that may be without a partner; more, and the two depths are different trainings

# Bytes at some operations (axis 0), by the name of the field of `Trace`: "live", "before", "high", "born".
Figures = dict[str, np.ndarray]
_NAMES = ("live", "before", "high", "born")


def depths(config) -> dict[str, int]:
    """{field of a configuration: how often it says that a layer is repeated}; {} where there is no such field."""
    fields = config.to_dict()
    for names in _DEPTHS:
        found = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
        if len(found) == len(names):
            return found
    return {}


def few_layers(depth: dict[str, int]) -> list[dict[str, int]]:
    """The depths that `extrapolated` needs: two layers of each kind and, kind by kind, the same with an extra layer."""
    base = dict.fromkeys(depth, _FOLLOWED)
    return [base, *(base | {name: _FOLLOWED + 1} for name in depth)]


def extrapolated(base: Trace, deeper: Sequence[Trace], depth: dict[str, int]) -> Trace | None:
    """The trace of the full model from those of `few_layers`; None where the depths differ by more than a layer.

    Of what layers do it holds two instances, as in the first layer and as in the last: the bytes of those between lie
    between. That is enough for the peak, and too little for a timeline.

    Args:
        depth: {field of the configuration: layers of the full model}, in the order of `deeper`.
    """
    extra = [count - _FOLLOWED for count in depth.values()]
    grown = [growth(base, other) for other in deeper]
    if any(each is None for each in grown):
        return None
    parts = _of_base(base, grown, extra)
    for kind, count in enumerate(extra):
        if count and len(grown[kind].middle.indices):
            middle = _of_middle_layers(kind, grown, deeper, extra)
            if middle is None:
                return None
            parts += middle

    def grow(at_base, at_deeper: Sequence):
        return at_base + sum(count * (there - at_base) for there, count in zip(at_deeper, extra, strict=True))

    where = [(part.trace, index) for part in parts for index in part.indices]
    return base.replace(
        operations=[trace.operations[index] for trace, index in where],
        phases=[trace.phases[index] for trace, index in where],
        modules=[_LAYER_NUMBER.sub(".*", trace.modules[index]) for trace, index in where],  # which layer is not known
        **{name: np.concatenate([part.figures[name] for part in parts]) for name in _NAMES},
        marks={label: grow(at, [other.marks[label] for other in deeper]) for label, at in base.marks.items()},
        parameters=grow(base.parameters, [other.parameters for other in deeper]),
        reserved_bytes=None,  # how blocks fall into segments does not lie on a line
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some operations of the full model."""

    trace: Trace  # of the shallow training that shows them
    indices: np.ndarray  # of the operations in that trace
    figures: Figures  # in the full model


def _of_base(base: Trace, grown: Sequence["Growth"], extra: Sequence[int]) -> list[_Part]:
    """The operations that the shallow training has, each with its own figures and what the extra layers add to them.

    Each kind of layers has two alignments. An operation that both of them know occurs twice: as it is before the extra
    layers of that kind, and as it is after them.
    """
    parts = []
    for alignments in itertools.product(*(each.alignments for each in grown)):
        indices = np.arange(len(base.operations))
        for added in alignments:
            indices = np.intersect1d(indices, added.indices)
        figures = _figures(base, indices)
        for added, count in zip(alignments, extra, strict=True):
            figures = _sum(figures, added.at(indices), count)
        parts.append(_Part(base, indices, figures))
    return parts


def _of_middle_layers(
    kind: int, grown: Sequence["Growth"], deeper: Sequence[Trace], extra: Sequence[int]
) -> list[_Part] | None:
    """The operations that only middle layers of this kind have, in the first and in the last of those layers.

    None where it is not known what layers of the other kinds add to them.
    """
    own, middle = grown[kind], grown[kind].middle
    figures = _figures(deeper[kind], middle.indices)
    # For the first middle layer the others come later, as they do for the operations before it; for the last they have
    # been, as they have for the operations after it.
    first = _sum(figures, own.from_start.at(middle.before), extra[kind] - 1)
    last = _sum(figures, own.from_end.at(middle.after), extra[kind] - 1)
    for other, growth_of_other in enumerate(grown):
        if other == kind:
            continue
        around = itertools.product(growth_of_other.alignments, (middle.before, middle.after))
        known = [added.at(indices) for added, indices in around if added.knows(indices)]
        if not known or any((one[name] != known[0][name]).any() for one in known for name in ("live", "before")):
            return None
        first, last = (_sum(each, known[0], extra[other]) for each in (first, last))
    return [_Part(deeper[kind], middle.indices, each) for each in (first, last)]


def _figures(trace: Trace, indices: np.ndarray) -> Figures:
    return {name: getattr(trace, name)[indices] for name in _NAMES}


def _sum(one: Figures, other: Figures, times: int) -> Figures:
    return {name: one[name] + times * other[name] for name in _NAMES}


# ---- what one extra layer adds


@dataclass(frozen=True, slots=True)
class Added:
    """What one extra layer adds to operations of the shallow training, by one alignment."""

    indices: np.ndarray  # of the operations that the alignment knows, in the shallow trace, ascending
    figures: Figures  # added to them, in bytes

    def knows(self, indices: np.ndarray) -> bool:
        """Whether all these operations are among those aligned."""
        return bool(np.isin(indices, self.indices).all())

    def at(self, indices: np.ndarray) -> Figures:
        """What is added to these operations, all of which are known."""
        rows = np.searchsorted(self.indices, indices)
        return {name: values[rows] for name, values in self.figures.items()}


@dataclass(frozen=True, slots=True)
class Middle:
    """The operations that only the deeper training has: its middle layer does what neither the first nor the last does,
    such as adding to a gradient that all layers share."""

    indices: np.ndarray  # of these operations, in the deeper trace
    before: np.ndarray  # the aligned operation before each, by its index in the shallow trace
    after: np.ndarray  # and the one after it


@dataclass(frozen=True, slots=True)
class Growth:
    """What one extra layer adds to each operation of a training.

    Operations are aligned twice, from the start of each phase and from its end. Those before the extra layer line up
    from the start, those after it line up from the end.
    """

    from_start: Added
    from_end: Added
    middle: Middle

    @property
    def alignments(self) -> tuple[Added, Added]:
        return self.from_start, self.from_end


def growth(shallow: Trace, deep: Trace) -> Growth | None:
    """What one extra layer adds; None where the trainings differ by more than a layer put in between."""
    stretches, others = _phases(shallow), _phases(deep)
    if [shallow.phases[here.start] for here in stretches] != [deep.phases[there.start] for there in others]:
        return None
    from_start, from_end = (np.full(len(shallow.operations), -1) for _ in range(2))  # partners by index, -1 for none
    for here, there in zip(stretches, others, strict=True):
        for index, partner in _aligned(shallow, deep, here, there):
            from_start[index] = partner
        for index, partner in _aligned(shallow, deep, here[::-1], there[::-1]):
            from_end[index] = partner
    alone = np.flatnonzero((from_start < 0) & (from_end < 0))
    # Each of these grows as the one before it does, which therefore must have a partner.
    if len(alone) > _MOST_ALONE or (np.diff(alone) == 1).any() or (len(alone) and alone[0] == 0):
        return None
    middle = _middle(shallow, deep, from_start, from_end)
    if middle is None:
        return None
    added = (_with_neighbours(_added(shallow, deep, partners), alone) for partners in (from_start, from_end))
    return Growth(*added, middle)


def _phases(trace: Trace) -> list[range]:
    """The stretches of operations that are in one phase, as ranges of indices."""
    ends = [i for i in range(1, len(trace.phases)) if trace.phases[i] != trace.phases[i - 1]]
    return [range(*edges) for edges in itertools.pairwise([0, *ends, len(trace.phases)])]


def _aligned(shallow: Trace, deep: Trace, here: range, there: range) -> Iterator[tuple[int, int]]:
    """Pairs of indices in two corresponding stretches, from where the ranges begin.

    Alignment starts at an unambiguous pair and goes on one by one, while keys are equal and the extra layer adds the
    same bytes to each. A different number of bytes means that the two merely look alike: then it waits for the next
    unambiguous pair.
    """
    keys, other_keys = ([t.operations[i].key for i in stretch] for t, stretch in ((shallow, here), (deep, there)))
    certain = _unambiguous(keys, other_keys)
    shift, added = None, None  # how far partners lie apart, and the bytes by category that the extra layer adds there
    for position, key in enumerate(keys):
        index = here[position]
        if position in certain:
            shift = certain[position] - position
            added = deep.live[there[certain[position]]] - shallow.live[index]
        elif shift is not None:
            partner = position + shift
            is_alike = partner < len(there) and other_keys[partner] == key
            if not is_alike or not _grows_by(added, shallow, index, deep, there[partner]):
                shift = None
        if shift is not None:
            yield index, there[position + shift]


def _unambiguous(keys: list[Hashable], other_keys: list[Hashable]) -> dict[int, int]:
    """Pairs of positions that must belong together: the first of each kind, and all of a kind of which the extra layer
    has none."""
    positions: tuple[dict, dict] = {}, {}
    for found, each in zip(positions, (keys, other_keys), strict=True):
        for position, key in enumerate(each):
            found.setdefault(key, []).append(position)
    pairs = {}
    for key, here in positions[0].items():
        there = positions[1].get(key, [])
        pairs |= zip(here, there, strict=True) if len(here) == len(there) else zip(here[:1], there[:1], strict=False)
    return pairs


def _grows_by(added: np.ndarray, shallow: Trace, index: int, deep: Trace, partner: int) -> bool:
    """Whether the deep training has these bytes more at that operation: when it ends, when it begins and at its
    highest."""
    totals = {deep.high[partner] - shallow.high[index], deep.before[partner] - shallow.before[index]}
    return (deep.live[partner] - shallow.live[index] == added).all() and totals == {added.sum()}


def _added(shallow: Trace, deep: Trace, partners: np.ndarray) -> Added:
    indices = np.flatnonzero(partners >= 0)
    return Added(indices, _sum(_figures(deep, partners[indices]), _figures(shallow, indices), -1))


def _with_neighbours(added: Added, alone: np.ndarray) -> Added:
    """An operation without a partner, such as the first update after the last state was made, grows as the one before
    it does, where the alignment knows that one."""
    new = alone[np.isin(alone - 1, added.indices)]
    live = added.at(new - 1)["live"]
    total = live.sum(axis=1)
    grown = {"live": live, "before": total, "high": total, "born": 0 * total}
    indices = np.concatenate([added.indices, new])
    order = np.argsort(indices)
    figures = {name: np.concatenate([added.figures[name], grown[name]])[order] for name in _NAMES}
    return replace(added, indices=indices[order], figures=figures)


def _middle(shallow: Trace, deep: Trace, from_start: np.ndarray, from_end: np.ndarray) -> Middle | None:
    """The operations that only the deeper training has; None where they are in no phase that both trainings have there.

    Args:
        from_start, from_end: for each operation of the shallow trace its partner's index in the deep one, or -1.
    """
    indices = np.setdiff1d(np.arange(len(deep.operations)), np.concatenate([from_start, from_end]))
    starts, ends = np.flatnonzero(from_start >= 0), np.flatnonzero(from_end >= 0)
    before = np.searchsorted(from_start[starts], indices) - 1
    after = np.searchsorted(from_end[ends], indices)
    if len(indices) and (before.min() < 0 or after.max() >= len(ends)):
        return None
    middle = Middle(indices, starts[before], ends[after])
    for index, one, other in zip(middle.indices, middle.before, middle.after, strict=True):
        if len({deep.phases[index], shallow.phases[one], shallow.phases[other]}) > 1:
            return None
    return middle
