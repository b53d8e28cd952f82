"""From a few layers to all, on trainings made by hand: each operation is (its name, live bytes when it ends)."""

from types import SimpleNamespace

import numpy as np
import pytest

from perf_helpers.estimate import layers
from perf_helpers.estimate.operations import Operation, Trace
from perf_helpers.lab.runs import TENSOR_CATEGORIES, Category

ACTIVATIONS = TENSOR_CATEGORIES.index(Category.ACTIVATIONS)


def training(*operations, phases="forward", modules="", parameters=0):
    live = np.zeros((len(operations), len(TENSOR_CATEGORIES)), dtype=np.int64)
    live[:, ACTIVATIONS] = [size for _, size in operations]
    total = live.sum(axis=1)
    return Trace(
        operations=[Operation(name, (), (0, (), ()), False) for name, _ in operations],
        phases=[phases] * len(operations) if isinstance(phases, str) else phases,
        modules=[modules] * len(operations) if isinstance(modules, str) else modules,
        live=live,
        before=total,
        high=total,
        marks={"forward": live[-1]},
        parameters=parameters,
        last_step=(0, len(operations)),
    )


def of_layers(count, other=0):
    """A forward that keeps 2 bytes for each layer (3 for each of another kind), and a backward that frees them."""
    operations, phases, modules, size = [("embed", 10)], ["forward"], [""], 10
    for kind, layer, more in [("a", n, 2) for n in range(count)] + [("b", n, 3) for n in range(other)]:
        operations += [(f"{kind} in", size := size + more), (f"{kind} out", size + 1)]
        phases += 2 * ["forward"]
        modules += 2 * [f"model.{kind}.{layer}.part"]
    operations += [("head", size + 5), ("loss", size + 7)]
    phases += 2 * ["forward"]
    for kind, more in other * [("b", 3)] + count * [("a", 2)]:
        operations += [(f"{kind} back", size := size - more)]
    phases += (count + other) * ["backward"]
    modules += ["", ""] + (count + other) * [""]
    return training(*operations, phases=phases, modules=modules, parameters=100 + 7 * count + 11 * other)


def added(alignment):
    return {index: alignment.figures[index, layers._HIGH] for index in np.flatnonzero(alignment.known)}


@pytest.mark.parametrize(
    "depth", [{"layers": 9}, {"layers": 4}, {"layers": 7, "others": 5}, {"layers": 2, "others": 6}]
)
def test_what_is_extrapolated_has_the_peak_and_the_ends_of_all_layers_followed(depth):
    base, *deeper = (of_layers(*few.values()) for few in layers.few_layers(depth))
    full, every = layers.extrapolated(base, deeper, depth), of_layers(*depth.values())
    for trace in (full, every):
        assert trace.operations[trace.high.argmax()].name == "loss"
    assert full.high.max() == every.high.max()
    assert (full.live[full.high.argmax()] == every.live[every.high.argmax()]).all()
    assert full.parameters == every.parameters
    assert full.marks["forward"].tolist() == every.marks["forward"].tolist()
    names = {(each.name, size) for each, size in zip(every.operations, every.high, strict=True)}
    assert {(each.name, size) for each, size in zip(full.operations, full.high, strict=True)} <= names
    assert "model.a.*.part" in full.modules and not any(".0." in module for module in full.modules)


def test_an_extra_layer_adds_nothing_from_the_start_and_its_own_from_the_end():
    two = training(("embed", 1), ("a", 3), ("b", 5), ("a", 7), ("b", 9), ("head", 10))
    three = training(("embed", 1), ("a", 3), ("b", 5), ("a", 7), ("b", 9), ("a", 11), ("b", 13), ("head", 14))
    grown = layers.growth(two, three)
    assert added(grown.from_start)[1] == 0
    assert added(grown.from_end)[4] == 4
    assert {*added(grown.from_start), *added(grown.from_end)} == set(range(6))


def test_what_only_looks_alike_is_not_aligned():
    """The head begins as a layer does; its bytes tell the difference."""
    two = training(("a", 2), ("b", 4), ("a", 6), ("b", 8), ("a", 100), ("head", 9))
    three = training(("a", 2), ("b", 4), ("a", 6), ("b", 8), ("a", 10), ("b", 12), ("a", 104), ("head", 13))
    grown = layers.growth(two, three)
    assert 4 not in added(grown.from_start)
    assert added(grown.from_end)[4] == 4


def test_what_only_a_middle_layer_does_is_kept_for_the_first_and_the_last_of_them():
    two = training(("head", 10), ("a", 9), ("first", 8), ("end", 1), phases="backward")
    three = training(("head", 12), ("a", 11), ("sum", 50), ("a", 9), ("first", 8), ("end", 1), phases="backward")
    grown = layers.growth(two, three)
    assert [grown.middle.tolist(), grown.before.tolist(), grown.after.tolist()] == [[2], [1], [1]]
    full = layers.extrapolated(two, [three], {"layers": 5})
    sums = [size for each, size in zip(full.operations, full.high.tolist(), strict=True) if each.name == "sum"]
    assert sums == [54, 50], "2 bytes for each layer still to come"


def test_an_operation_without_a_partner_grows_as_the_one_before_it():
    two = training(("embed", 1), ("a", 3), ("once", 4), ("a", 5), ("head", 6))
    three = training(("embed", 1), ("a", 3), ("a", 5), ("a", 7), ("head", 8))
    assert added(layers.growth(two, three).from_start)[2] == 0


def test_other_trainings_are_not_extrapolated():
    one = training(*((f"op {n}", n) for n in range(20)))
    other = training(*((f"another {n}", n) for n in range(22)))
    assert layers.growth(one, other) is None
    assert layers.growth(one, training(("op 1", 1), phases="backward")) is None
    assert layers.extrapolated(one, [other], {"layers": 5}) is None


def test_a_depth_is_found_by_the_names_that_configurations_have():
    def found(**fields):
        return layers.depths(SimpleNamespace(to_dict=lambda: fields))

    assert found(n_layer=5, n_head=2) == {"n_layer": 5}
    assert found(encoder_layers=3, decoder_layers=4, num_hidden_layers=3) == {"encoder_layers": 3, "decoder_layers": 4}
    assert found(num_layers=3) == {"num_layers": 3}
    assert found(num_layers=3, num_decoder_layers=5) == {"num_layers": 3, "num_decoder_layers": 5}
    assert found(depths=[2, 2]) == {}
    assert layers.few_layers({"e": 6, "d": 9}) == [{"e": 2, "d": 2}, {"e": 3, "d": 2}, {"e": 2, "d": 3}]
