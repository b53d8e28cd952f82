"""A verdict follows from the ledger and the number alone."""

import math
from dataclasses import replace

import pytest

from perf_helpers.course.ledger import Verdict, decide, load

HOLDS, REFUTED, TOO_SMALL, NOT_TESTABLE = Verdict
LEDGER = load()


def claim_that_is(direction, threshold, **fields):
    return replace(
        LEDGER["accumulation-memory"], direction=direction, threshold=threshold, **{"refuted_from": None} | fields
    )


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.5, HOLDS),
        (0.9, TOO_SMALL),
        (0.95, TOO_SMALL),
        (1.0, REFUTED),
        ((0.5, 0.89), HOLDS),
        ((0.5, 0.91), TOO_SMALL),
        ((0.5, 1.5), TOO_SMALL),
        ((0.99, 1.5), TOO_SMALL),
        ((1.0, 1.5), REFUTED),
    ],
)
def test_below_and_its_mirror_above(value, verdict):
    mirrored = tuple(-x for x in reversed(value)) if isinstance(value, tuple) else -value
    assert decide(claim_that_is("below", 0.9, refuted_from=1.0), value, True) is verdict
    assert decide(claim_that_is("above", -0.9, refuted_from=-1.0), mirrored, True) is verdict


@pytest.mark.parametrize("direction", ["below", "above"])
def test_without_refuted_from_every_number_is_decided(direction):
    below, exactly, above = (decide(claim_that_is(direction, 1), value, True) for value in (0.9, 1, 1.1))
    assert (below, exactly, above) == ((HOLDS, REFUTED, REFUTED) if direction == "below" else (REFUTED, REFUTED, HOLDS))


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (2, HOLDS),
        (4, HOLDS),
        (1.99, REFUTED),
        (4.01, REFUTED),
        ((2, 4), HOLDS),
        ((1.9, 3), TOO_SMALL),
        ((3, 4.1), TOO_SMALL),
        ((1, 9), TOO_SMALL),
        ((0, 1.9), REFUTED),
        ((4.1, math.inf), REFUTED),
    ],
)
def test_between_and_equal_hold_inside_their_range(value, verdict):
    assert decide(claim_that_is("between", (2, 4)), value, True) is verdict
    assert decide(claim_that_is("equal", 3, tolerance=1 / 3), value, True) is verdict


def test_the_tolerance_is_relative_but_absolute_around_zero():
    assert decide(claim_that_is("equal", -200, tolerance=0.01), -201.9, True) is HOLDS
    assert decide(claim_that_is("equal", -200, tolerance=0.01), -202.1, True) is REFUTED
    assert decide(claim_that_is("equal", 0, tolerance=0.01), 0.009, True) is HOLDS
    assert decide(claim_that_is("equal", 0, tolerance=0), 1e-9, True) is REFUTED


@pytest.mark.parametrize("value", [0.1, 9.0, (0.1, 9.0), None])
def test_without_its_machine_nothing_is_decided(value):
    assert decide(LEDGER["accumulation-memory"], value, False) is NOT_TESTABLE
    assert decide(LEDGER["power-sockets"], value, True) is NOT_TESTABLE
