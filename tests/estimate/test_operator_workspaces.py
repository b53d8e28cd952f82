"""Operator workspace is measured at an operation's real size if possible, never guessed, and always in limited time."""

import random

import pytest
import torch

from trainmem.estimate import operator_workspaces
from trainmem.estimate.operator_workspaces import Hidden, Probe, Seen, line, resized, smaller
from trainmem.estimate.trace_records import Operation, Spec

F32, BF16 = torch.float32, torch.bfloat16


def dense(*shape, dtype=F32):
    return Spec(shape, torch.empty(shape, device="meta").stride(), dtype)


def operation(name, *leaves, made=0):
    """Return an `Operation` whose arguments are all single values, not lists.

    Args:
        name: name of the operator, e.g. "aten.mm.default".
        leaves: the operator's arguments.
        made: bytes of the operator's results.
    """
    return Operation(name, leaves, (len(leaves), (), (-1,) * len(leaves)), False, made)


def mm(rows, inner, columns, dtype=BF16):
    return operation(
        "aten.mm.default", dense(rows, inner, dtype=dtype), dense(inner, columns, dtype=dtype),
        made=rows * columns * dtype.itemsize,
    )  # fmt: skip


def addmm(rows, inner, columns, dtype=BF16):
    leaves = dense(columns, dtype=dtype), dense(rows, inner, dtype=dtype), dense(inner, columns, dtype=dtype)
    return operation("aten.addmm.default", *leaves, made=rows * columns * dtype.itemsize)


# An Intel server CPU with AMX, 2 cores, torch 2.13.0, oneDNN's own choice of kernels, measured on 2026-11-22:
# bytes that products of bfloat16 allocate inside themselves, by the shapes of their two factors.
ADDMM = {
    ((128, 128), (128, 512)): 26_240,
    ((256, 128), (128, 512)): 140_928,
    ((512, 128), (128, 512)): 26_240,
    ((256, 128), (128, 256)): 26_240,
    ((128, 128), (128, 128)): 37_888,
    ((1, 128), (128, 128)): 42_624,
    ((128, 512), (512, 128)): 136_192,
    ((256, 512), (512, 128)): 136_192,
    ((512, 512), (512, 128)): 272_000,
    ((256, 256), (256, 128)): 70_656,
}
MM = {
    ((128, 128), (128, 512)): 108_288,
    ((512, 128), (128, 128)): 173_824,
    ((512, 512), (512, 128)): 698_112,
    ((128, 512), (512, 512)): 419_584,
    ((128, 256), (256, 512)): 206_592,
    ((512, 256), (256, 128)): 337_664,
}


class Recorded:
    """A stub for the runner of operations, which reports given workspaces; `ran` lists the requested operations.

    Args:
        hides: takes an operation and returns the bytes of workspace that the operation allocates in each thread; None:
            the operation fails.
        bytes_a_second: speed at which the operation's bytes are processed.
    """

    def __init__(self, hides, bytes_a_second=1e9):
        self.hides, self.rate, self.ran = hides, bytes_a_second, []

    def __call__(self, operations, threads):
        self.ran += operations
        found = [(self.hides(one), one.bytes / self.rate) for one in operations]
        return [None if hidden is None else Seen(threads * hidden, seconds) for hidden, seconds in found]


@pytest.fixture
def machine(monkeypatch):
    """Return a function that replaces the estimate's runner of operations by a stub, `Recorded`, and returns this stub.

    The function takes the arguments of `Recorded`.
    """

    def made(hides, **speed):
        recorded = Recorded(hides, **speed)
        monkeypatch.setattr(operator_workspaces, "Runner", lambda: recorded)
        return recorded

    return made


@pytest.fixture(autouse=True)
def ended(monkeypatch):
    """After each test, end the processes that ran operations."""
    runners, kind = [], operator_workspaces.Runner
    monkeypatch.setattr(operator_workspaces, "Runner", lambda: runners.append(kind()) or runners[-1])
    yield
    for runner in runners:
        runner.close()


def found(*operations):
    probe = Probe(1)
    probe.run(operations)
    return [probe[one] for one in operations]


def factors(one):
    return tuple(leaf.shape for leaf in one.leaves[-2:])


def test_what_a_machine_with_amx_hides_at_sizes_that_were_measured_is_what_is_estimated(machine):
    tables = {"aten.addmm.default": ADDMM, "aten.mm.default": MM}
    machine(lambda one: tables[one.name][factors(one)])
    for build, table in ((addmm, ADDMM), (mm, MM)):
        operations = [build(*left, right[1]) for left, right in table]
        assert found(*operations) == [Hidden(size, "measured") for size in table.values()]


@pytest.mark.parametrize("table, build", [(ADDMM, addmm), (MM, mm)], ids=["addmm", "mm"])
def test_sizes_that_lie_on_no_line_are_measured_or_assumed_and_never_negative(machine, table, build):
    """A large matmul's workspace is extrapolated from three smaller matmuls. Here their workspaces are random values of
    `table`, which lie on no line. So the large matmul is run on a fast machine. On a slow one, its workspace is assumed
    to be its tensors' bytes times the largest ratio of workspace to bytes among the smaller matmuls.
    """
    rng, figures = random.Random(0), list(table.values())
    large = build(4096, 4096, 4096)
    for _ in range(50):
        drawn = {one.signature: rng.choice(figures) for one in smaller(large, 2**20)}
        fast = machine(lambda one, drawn=drawn: drawn.get(one.signature, 123), bytes_a_second=1e10)
        assert found(large) == [Hidden(123, "measured")] and fast.ran[-1] == large
        slow = machine(lambda one, drawn=drawn: drawn.get(one.signature, 123), bytes_a_second=1e6)
        (hidden,) = found(large)
        assert hidden.how == "assumed" and hidden.bytes > 0 and large not in slow.ran
        shares = [drawn[one.signature] / one.bytes for one in smaller(large, 2**20)]
        assert hidden.bytes == round(max(shares) * large.bytes)


def test_what_a_product_is_assumed_to_hide_is_reported_with_its_size(machine):
    machine(lambda one: one.bytes // 2 + len(str(one.bytes)) * 1000, bytes_a_second=1e6)
    probe, large = Probe(1), mm(8192, 4096, 8192)
    probe.run([large])
    (reported,) = operator_workspaces.assumptions([large], probe)
    assert reported.startswith("aten.mm.default is assumed to allocate up to ")
    assert f"{probe[large].bytes / 1e6:,.1f} MB" in reported


def test_a_product_that_hides_nothing_at_three_sizes_is_not_run_at_its_own(machine):
    seen = machine(lambda one: 0)
    assert found(mm(4096, 4096, 4096, F32)) == [Hidden(0, "line")]
    assert len(seen.ran) == 3 and max(one.bytes for one in seen.ran) <= 2**20


def test_three_sizes_on_a_line_are_traced_to_its_own(machine):
    def hides(one):
        return one.leaves[0].shape[0] * 24 + 640

    softmax = operation("aten._softmax.default", dense(10**6, 64), 1, False, made=10**6 * 256)
    seen = machine(hides)
    assert found(softmax) == [Hidden(hides(softmax), "line")] and softmax not in seen.ran


def test_what_grows_with_only_some_of_the_lengths_that_were_cut_is_no_line(machine):
    """The smaller sizes of an operation have fewer rows and fewer columns, but its workspace depends on the rows only.
    So the workspaces at the smaller sizes lie on no line, and the operation is run at its full size.
    """
    large = operation("aten._softmax.default", dense(5000, 2048), 1, False, made=5000 * 2048 * 4)
    assert smaller(large, 2**24)[0].leaves[0].shape == (1250, 1024)
    seen = machine(lambda one: one.leaves[0].shape[0] * 8)
    assert found(large) == [Hidden(40_000, "measured")] and seen.ran[-1] == large


@pytest.mark.parametrize(
    "sizes, hidden, wanted, expected",
    [
        ((400, 200, 100), (40, 20, 10), 4000, 400),
        ((400, 200, 100), (50, 50, 50), 4000, 50),
        ((400_000, 200_000, 100_000), (26_240, 140_928, 26_240), 4_000_000, None),
        ((400_000, 200_000, 100_000), (26_240, 37_888, 43_712), 4_000_000, None),  # downwards: below zero at last
        ((400_000, 200_000, 100_000), (10_000, 5_000, 2_500), 4_000_000, 100_000),
        ((100, 100, 100), (1, 2, 3), 400, None),
    ],
)
def test_a_line_goes_through_three_points_and_never_below_zero(sizes, hidden, wanted, expected):
    assert line(sizes, hidden, wanted) == expected


def test_whatever_is_measured_the_answer_is_not_negative_and_comes_after_a_few_runs(machine):
    rng = random.Random(1)
    for _ in range(300):
        build = rng.choice([mm, addmm])
        large = build(*(rng.randrange(1, 6000) for _ in range(3)), dtype=rng.choice([F32, BF16]))
        seen = machine(lambda _: rng.choice([None, 0, 64, rng.randrange(10**7)]), bytes_a_second=rng.choice([1e5, 1e9]))
        (hidden,) = found(large)
        assert hidden.bytes is None or hidden.bytes >= 0
        assert len(seen.ran) <= 5


def test_all_that_is_run_at_its_own_size_together_takes_a_few_seconds(machine):
    operations = [mm(2000 + n, 2048, 2048) for n in range(400)]
    seen = machine(lambda one: hash(one.signature) % 10**6, bytes_a_second=2e8)
    sources = [hidden.how for hidden in found(*operations)]
    whole = [one for one in seen.ran if one in operations]
    assert 0 < len(whole) < len(operations) and set(sources) == {"measured", "assumed"}
    assert sum(one.bytes for one in whole) / 2e8 < 2 * operator_workspaces.OWN_SIZE_SECONDS
    assert sources[: len(whole)] == ["measured"] * len(whole), "the first ones matter most"


def test_what_is_too_large_for_this_process_is_not_run(machine):
    huge = mm(65536, 4096, 65536)
    seen = machine(lambda one: 7 * len(str(one.bytes)), bytes_a_second=1e12)
    assert found(huge)[0].how == "assumed" and max(one.bytes for one in seen.ran) <= operator_workspaces.OWN_SIZE_BYTES


def test_smaller_sizes_cut_the_same_lengths_everywhere():
    one = addmm(2048, 512, 30522)
    sizes = smaller(one, 2**20)
    assert len(sizes) == 3 and sizes[0].bytes <= 2**20 and sizes[0].bytes > sizes[1].bytes > sizes[2].bytes
    for cut in sizes:
        bias, left, right = (leaf.shape for leaf in cut.leaves)
        assert left[1] == right[0] and right[1] == bias[0]
    assert smaller(mm(3, 2, 3), 1) == [], "nothing is left to cut"


def test_strides_keep_their_order_and_what_is_broadcast_stays_so():
    one = operation("aten.bmm.default", Spec((8, 64, 32), (0, 1, 64), F32), dense(8, 32, 16))
    cut = resized(one, {64: 4})
    assert cut.leaves[0] == Spec((8, 16, 32), (0, 1, 16), F32) and cut.leaves[1] == one.leaves[1]


def test_an_operation_that_needs_its_data_is_unknown_and_reported():
    gone = operation("aten.embedding.default", dense(4, 4), "no tensor")
    probe = Probe(1)
    probe.run([gone])
    assert probe[gone] == Hidden(None, "unknown")
    (reported,) = operator_workspaces.assumptions([gone], probe)
    assert "aten.embedding.default" in reported and "0 bytes" in reported


def test_an_operation_that_ends_its_process_is_unknown_and_the_others_are_measured(monkeypatch):
    import os

    once, deadly = operator_workspaces._once, mm(5, 6, 7)
    monkeypatch.setattr(
        operator_workspaces, "_once", lambda one, mark: os._exit(8) if one == deadly else once(one, mark)
    )
    operations = [mm(n, 8, 8) for n in range(1, 8)]
    assert found(*operations[:3], deadly, *operations[3:])[3] == Hidden(None, "unknown")
    assert all(hidden.how == "measured" for hidden in found(*operations[:3], deadly, *operations[3:])[4:])


@pytest.mark.nightly
def test_heads_that_are_shared_may_be_cut_to_what_no_kernel_takes():
    """A workspace is measured at smaller sizes. If an attention with grouped queries is reduced to fewer query heads
    than key heads, torch's kernel divides by zero; the estimate must nevertheless return an answer.
    """
    query, key = dense(8, 32, 512, 128), dense(8, 8, 512, 128)
    leaves = query, key, key, 0.0, True
    attention = Operation(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", leaves, (5, (), (-1,) * 5), False, query.bytes
    )
    (hidden,) = found(attention)
    assert hidden.how in ("measured", "assumed", "unknown")


def test_what_is_known_for_some_threads_is_not_taken_for_others(machine):
    machine(lambda _: 100)
    one, four = Probe(1), Probe(1).under(4)
    for probe in (one, four):
        probe.run([mm(8, 8, 8)])
    assert (one[mm(8, 8, 8)].bytes, four[mm(8, 8, 8)].bytes) == (100, 400)


def test_on_this_machine_the_estimate_is_what_the_allocator_did():
    """Matmuls are run at full size here, so each estimated workspace equals the one in a profile of the same call."""
    operations = [
        build(rows, 128, 256, dtype) for build in (mm, addmm) for rows in (1, 64, 300) for dtype in (F32, BF16)
    ]
    probe = Probe(1)
    probe.run(operations)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for one in operations:
            tensors = [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in one.leaves]
            with torch.profiler.profile(profile_memory=True) as profile:
                result = one.function(*tensors)
            sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
            totals = [sum(sizes[: n + 1]) for n in range(len(sizes))]
            assert probe[one] == Hidden(max(totals) - result.nbytes, "measured")
    finally:
        torch.set_num_threads(threads)
