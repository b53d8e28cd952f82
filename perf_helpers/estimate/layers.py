"""The training of a deep model from those of shallow ones: only two and three layers are followed.

Between two neighbouring depths the bytes at each operation grow by what one layer adds, so those of the full model lie
on straight lines. To draw them, the traces of two and of three layers are aligned: which operation of the one is which
of the other, and which belong to the extra layer. Two layers are the fewest, for the first and the last layer may do
what those between them do not.

Operations are compared by their shapes and by the bytes that the extra layer adds: a layer repeats the operations of
the one before it, and names alone would not tell them apart.
"""

import itertools
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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


def depths(config) -> dict[str, int]:
    """{field of a configuration: how often it says that a layer is repeated}; {} where there is no such field."""
    fields = config.to_dict()
    for names in _DEPTHS:
        found = {name: fields[name] for name in names if isinstance(fields.get(name), int)}
        if len(found) == len(names):
            return found
    return {}


def numberless(module: str) -> str:
    """The name of a module with "*" for each number in it: the same in every layer."""
    return _LAYER_NUMBER.sub(".*", module)


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
        if count and len(grown[kind].middle):
            middle = _of_middle_layers(kind, grown, deeper, extra)
            if middle is None:
                return None
            parts += middle

    def grow(at_base, at_deeper: Sequence):
        return at_base + sum(count * (there - at_base) for there, count in zip(at_deeper, extra, strict=True))

    where = [(trace, index) for trace, indices, _ in parts for index in indices]
    figures = np.concatenate([figures for *_, figures in parts])
    return base.replace(
        operations=[trace.operations[index] for trace, index in where],
        phases=[trace.phases[index] for trace, index in where],
        modules=[numberless(trace.modules[index]) for trace, index in where],  # which layer is not known
        live=figures[:, _LIVE],
        before=figures[:, _BEFORE],
        high=figures[:, _HIGH],
        marks={label: grow(at, [other.marks[label] for other in deeper]) for label, at in base.marks.items()},
        parameters=grow(base.parameters, [other.parameters for other in deeper]),
        begins=None,
    )


# The columns of figures, as of a trace: one row for each operation, in bytes.
_LIVE, _BEFORE, _HIGH = slice(-2), -2, -1


def _figures(trace: Trace) -> np.ndarray:
    return np.column_stack([trace.live, trace.before, trace.high])


# Some operations of the full model: a shallow training's trace that shows them, their indices in it, and their figures
# in the full model.
_Part = tuple[Trace, np.ndarray, np.ndarray]


def _of_base(base: Trace, grown: Sequence["Growth"], extra: Sequence[int]) -> list[_Part]:
    """The operations that the shallow training has, each with its own figures and what the extra layers add to them.
    One that both alignments with a kind of layers know occurs twice: as it is before these layers and after them."""
    parts = []
    for alignments in itertools.product(*(each.alignments for each in grown)):
        indices = np.flatnonzero(np.all([added.known for added in alignments], axis=0))
        more = sum(count * added.figures for added, count in zip(alignments, extra, strict=True))
        parts.append((base, indices, (_figures(base) + more)[indices]))
    return parts


def _of_middle_layers(
    kind: int, grown: Sequence["Growth"], deeper: Sequence[Trace], extra: Sequence[int]
) -> list[_Part] | None:
    """The operations that only middle layers of this kind have, in the first and in the last of those layers; None
    where it is not known what layers of the other kinds add to them."""
    own = grown[kind]
    figures = _figures(deeper[kind])[own.middle]
    for other, growth_of_other in enumerate(grown):
        if other == kind:
            continue
        around = itertools.product(growth_of_other.alignments, (own.before, own.after))
        known = [added.figures[indices] for added, indices in around if added.known[indices].all()]
        if not known or any((one[:, :_HIGH] != known[0][:, :_HIGH]).any() for one in known):
            return None
        figures = figures + extra[other] * known[0]
    # For the first middle layer the others come later, as they do for the operations before it; for the last they have
    # been, as they have for the operations after it.
    first, last = own.from_start.figures[own.before], own.from_end.figures[own.after]
    return [(deeper[kind], own.middle, figures + (extra[kind] - 1) * added) for added in (first, last)]


# ---- what one extra layer adds


@dataclass(frozen=True, slots=True)
class Added:
    """What one extra layer adds to the operations of the shallow training, by one alignment."""

    known: np.ndarray  # (operations,): whether the alignment knows it
    figures: np.ndarray  # (operations, columns): what is added to those that it knows, in bytes


@dataclass(frozen=True, slots=True)
class Growth:
    """What one extra layer adds to each operation of a training.

    Operations are aligned twice, from the start of each phase and from its end. Those before the extra layer line up
    from the start, those after it line up from the end. A middle layer may also do what neither the first nor the last
    does, such as adding to a gradient that all layers share.
    """

    from_start: Added
    from_end: Added
    middle: np.ndarray  # indices, in the deeper trace, of the operations that only it has
    before: np.ndarray  # the aligned operation before each of them, by its index in the shallow trace
    after: np.ndarray  # and the one after it

    @property
    def alignments(self) -> tuple[Added, Added]:
        return self.from_start, self.from_end


def growth(shallow: Trace, deep: Trace) -> Growth | None:
    """What one extra layer adds; None where the trainings differ by more than a layer put in between."""
    stretches, others = _phases(shallow), _phases(deep)
    if [shallow.phases[here.start] for here in stretches] != [deep.phases[there.start] for there in others]:
        return None
    from_start, from_end = (np.full(len(shallow.operations), -1) for _ in range(2))  # partners by index, -1 for none
    keys = [[operation.key for operation in trace.operations] for trace in (shallow, deep)]
    figures = _figures(shallow), _figures(deep)
    for here, there in zip(stretches, others, strict=True):
        _align(from_start, keys, figures, here, there)
        _align(from_end, keys, figures, here[::-1], there[::-1])
    alone = np.flatnonzero((from_start < 0) & (from_end < 0))
    # Each of these grows as the one before it does, which therefore must have a partner.
    if len(alone) > _MOST_ALONE or (np.diff(alone) == 1).any() or 0 in alone:
        return None
    middle = np.setdiff1d(np.arange(len(deep.operations)), np.concatenate([from_start, from_end]))
    starts, ends = np.flatnonzero(from_start >= 0), np.flatnonzero(from_end >= 0)
    before, after = np.searchsorted(from_start[starts], middle) - 1, np.searchsorted(from_end[ends], middle)
    if len(middle) and (before.min() < 0 or after.max() >= len(ends)):
        return None
    before, after = starts[before], ends[after]
    for index, one, other in zip(middle, before, after, strict=True):
        if not deep.phases[index] == shallow.phases[one] == shallow.phases[other]:
            return None
    alignments = (_added(figures, partners, alone) for partners in (from_start, from_end))
    return Growth(*alignments, middle, before, after)


def _phases(trace: Trace) -> list[range]:
    """The stretches of operations that are in one phase, as ranges of indices."""
    ends = [i for i in range(1, len(trace.phases)) if trace.phases[i] != trace.phases[i - 1]]
    return [range(*edges) for edges in itertools.pairwise([0, *ends, len(trace.phases)])]


def _align(partners: np.ndarray, keys: list[list], figures: Sequence[np.ndarray], here: range, there: range) -> None:
    """Set the partners of the operations in a stretch, from where the ranges of two corresponding ones begin.

    Alignment starts at an unambiguous pair and goes on one by one, while keys are equal and the extra layer adds the
    same bytes to each: when it ends, when it begins and at its highest. A different number of bytes means that the two
    merely look alike: then it waits for the next unambiguous pair.
    """
    (keys, other_keys), (figures, other_figures) = keys, figures  # of the shallow training and of the deep one
    certain = _unambiguous([keys[index] for index in here], [other_keys[index] for index in there])
    shift, added = None, None  # how far partners lie apart, and the figures that the extra layer adds there
    for position, index in enumerate(here):
        if position in certain:
            shift = certain[position] - position
            added = other_figures[there[certain[position]]] - figures[index]
            added[_BEFORE:] = added[_LIVE].sum()
        elif shift is not None:
            at = position + shift
            is_alike = at < len(there) and other_keys[there[at]] == keys[index]
            if not is_alike or (other_figures[there[at]] - figures[index] != added).any():
                shift = None
        if shift is not None:
            partners[index] = there[position + shift]


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


def _added(figures: tuple[np.ndarray, np.ndarray], partners: np.ndarray, alone: np.ndarray) -> Added:
    """What is added by one alignment. An operation without a partner, such as the first update after the last state was
    made, grows as the one before it does, where the alignment knows that one."""
    known = partners >= 0
    added = figures[1][partners] - figures[0]
    for index in alone[known[alone - 1]]:
        known[index] = True
        added[index, _LIVE] = added[index - 1, _LIVE]
        added[index, _BEFORE:] = added[index, _LIVE].sum()
    return Added(known, added)
