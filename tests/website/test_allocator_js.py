"""Compare the allocator of the calculator's page (JavaScript) with `trainmem.estimate.allocator`.

The random traces are those of benchmarks/measure_allocator.py, which compares the package's allocator with torch's.
"""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainmem.estimate.allocator import MIB, CachingAllocator, OutOfMemory
from trainmem.estimate.allocator_settings import Settings, newest, release

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import measure_allocator

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="no node: apt-get install nodejs")

AT_ONCE = 500  # traces that node is given
KINDS = [*itertools.product((False, True), (None, 1024 * MIB, 10**9))]  # expandable segments, capacity in bytes


def counted(events, expandable, capacity):
    """Return, after each event, [allocated bytes, reserved bytes, peak of reserved bytes, -1 if there was no room, else
    0].

    Args:
        events: events of a trace of benchmarks/measure_allocator.py.
        expandable: whether segments are expandable.
        capacity: bytes that the card has for segments.
    """
    settings = Settings(expandable_segments=expandable)
    allocator = CachingAllocator(settings, capacity, rules=release(newest()))
    found = []
    for event in events:
        full = 0
        try:
            if event is None:
                allocator.empty_cache()
            elif event[1]:
                allocator.allocate(*event)
            else:
                allocator.free(event[0])
        except OutOfMemory:
            full = -1
        found.append([allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_reserved_bytes, full])
    return found


def run(traces):
    command = ["node", Path(__file__).with_name("allocate.mjs")]
    done = subprocess.run(command, input=json.dumps(traces), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [300, pytest.param(13_000, marks=pytest.mark.nightly)])
def test_the_pages_allocator_counts_what_the_packages_does(count):
    full = 0
    for first in range(0, count, AT_ONCE):
        numbers, traces = range(first, min(first + AT_ONCE, count)), []
        for number in numbers:
            expandable, capacity = KINDS[number % len(KINDS)]
            events = measure_allocator.trace(f"page {number}", capacity or 16 * 1024 * MIB)
            traces.append({"events": events, "expandable": expandable, "capacity": capacity})
        for number, trace, on_page in zip(numbers, traces, run(traces), strict=True):
            expected = counted(**trace)
            differ = [place for place, both in enumerate(zip(expected, on_page, strict=True)) if both[0] != both[1]]
            assert not differ, f"trace {number}, {trace['expandable']}, {trace['capacity']}, event {differ[0]}"
            full += any(event[-1] for event in expected)
    assert full > count / 20, "traces that fill the device are among them"
