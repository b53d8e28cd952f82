"""Plant faults in lesson 24's measurements: the verdict must change."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from lesson_24 import functions
from planted import verdict

from perf_helpers.course.ledger import Verdict
from trainmem.records import Ratio

HOLDS, REFUTED, TOO_SMALL = Verdict.HOLDS, Verdict.REFUTED, Verdict.TOO_SMALL
LENGTHS = range(2, 14)


def driver(temperatures=None, margins=None, **more):
    """Return a stub of `hardware.nvml`'s query function, which takes the name of a pynvml function and its arguments.

    Args:
        temperatures: {number of a threshold: °C}, as older drivers report them.
        margins: {number of a field: °C that are left until the threshold}, as newer drivers report them.
        more: further answers, {name of the pynvml function: answer}.
    """

    def ask(query, _, *what):
        if query == "nvmlDeviceGetTemperatureThreshold":
            return (temperatures or {}).get(what[0])
        if query == "nvmlDeviceGetFieldValues":
            value = (margins or {}).get(what[0][0])
            return [SimpleNamespace(nvmlReturn=0 if value is not None else 3, value=SimpleNamespace(siVal=value or 0))]
        return more.get(query)

    return ask


def test_an_older_driver_tells_temperatures_and_a_newer_one_margins():
    lesson = functions()
    older = lesson.thermal_limits(driver({0: 95, 1: 87}, nvmlDeviceGetEnforcedPowerLimit=300_000), "gpu")
    newer = lesson.thermal_limits(driver(margins={193: -8, 194: -2}, nvmlDeviceGetMarginTemperature=40), "gpu")
    silent = lesson.thermal_limits(driver({0: 0, 1: 0}), "gpu")
    assert (older["slowdown"], older["watts"], lesson.above_slowdown(older)) == (87, 300, 8)
    assert (newer["slowdown"], newer["margin now"], lesson.above_slowdown(newer)) == (None, 40, 6)
    assert (silent["slowdown"], lesson.above_slowdown(silent), lesson.above_slowdown({})) == (None, None, None)


@pytest.mark.parametrize(("threshold", "expected"), [(1, HOLDS), (0, REFUTED)])
def test_where_it_shuts_down_is_not_where_it_slows_down(threshold, expected):
    reported = {0: 95, 1: 87}
    known = functions().thermal_limits(driver({1: reported[threshold]}), "gpu")
    assert verdict("cooling", known["slowdown"]) is expected


@pytest.mark.parametrize(("as_degrees", "expected"), [(False, HOLDS), (True, REFUTED)])
def test_a_lower_margin_is_a_higher_temperature(as_degrees, expected):
    lesson = functions()
    known = lesson.thermal_limits(driver(margins={193: -8, 194: -2}), "gpu")
    if as_degrees:  # a margin read as if it were a temperature
        known |= {name: known[f"{name} margin"] for name in ("shutdown", "slowdown")}
    assert verdict("shutdown-temperature", lesson.above_slowdown(known)) is expected


COLD, POWER = [0, 1e14, 60, 1900, 0], [1, 9e13, 70, 1700, 4]
HOT, ALIKE = [2, 7e13, 88, 1300, 0x20], [2, 1e14, 88, 1900, 0x20]


@pytest.mark.parametrize(("rows", "expected"), [([COLD, *[HOT] * 3], HOLDS), ([COLD, *[ALIKE] * 3], TOO_SMALL)])
def test_a_slowdown_for_heat_is_one_where_it_costs_speed(rows, expected):
    ratio = Ratio.of_pairs(functions().throttling(rows)[0], 1.02)
    assert verdict("throttled", (ratio.low, ratio.high)) is expected


def test_a_limit_of_power_taken_for_heat_would_decide_the_claim():
    lesson = functions()
    assert lesson.throttling([COLD, *[POWER] * 3])[0] is None
    lesson.scope["THERMAL"] |= 4
    assert verdict("throttled", max(lesson.throttling([COLD, *[POWER] * 3])[0])) is HOLDS


def test_a_card_that_stays_cool_decides_nothing_and_neither_does_a_driver_that_is_silent():
    throttling = functions().throttling
    assert throttling([COLD, POWER]) == (None, "the driver reported a slowdown for heat in 0 of 2 readings")
    assert throttling([COLD, HOT, HOT]) == (None, "the driver reported a slowdown for heat in 2 of 3 readings")
    assert throttling([[*COLD[:-1], None]]) == (None, "the driver reports no reasons for its clocks")
    assert throttling([HOT])[0] is None


def test_what_runs_on_a_gpu_runs_without_one_given_its_answers():
    lesson = functions()
    answers = driver(nvmlDeviceGetCurrentClocksEventReasons=0x40, nvmlDeviceGetTemperature=90)

    @contextmanager
    def nvml():
        yield lambda query, *what: "gpu" if "UUID" in query else answers(query, *what), None

    lesson.scope["hardware"] = SimpleNamespace(nvml=nvml)
    cuda = SimpleNamespace(synchronize=lambda: None)
    lesson.scope["torch"] = SimpleNamespace(cuda=cuda, float16=None, randn=lambda *_, **__: torch.ones(2, 2, 2))
    rows = lesson.heated(0.01, "GPU-1", None)
    assert rows and rows[0][1] > 0 and rows[0][2:] == [90, None, 0x40]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # a toolkit of the machine is on the path, as it is on a machine that somebody set up
        ("found = {", "os.environ['PATH'] = os.path.join(sys.argv[1], 'nvidia', 'cu13', 'bin')\nfound = {"),
        # headers without a compiler taken for a toolkit
        (
            'return [exists(os.path.join(home, "bin", "nvcc")), home]\nfound = {',
            "return [True, home]\nos.environ['CUDA_HOME'] = sys.argv[1]\nfound = {",
        ),
    ],
)
def test_a_toolkit_of_the_machine_or_headers_alone_would_pass_for_pips(old, new):
    lesson = functions()
    assert old in lesson.SEARCH
    lesson.scope["SEARCH"] = lesson.SEARCH.replace(old, new)
    assert verdict("wheels-build-nothing", int(lesson.searched()["pip's torch"][0])) is REFUTED
    assert verdict("wheels-build-nothing", 0) is HOLDS


@pytest.mark.parametrize(
    ("limit", "options", "expected"),
    [(65, {"dynamic": False}, HOLDS), (None, {"dynamic": False}, REFUTED), (65, {}, REFUTED)],
)
def test_torchs_limit_or_its_default_would_hide_compilations(limit, options, expected):
    count = functions().graphs(LENGTHS, limit, **options)
    assert verdict("shapes-recompile", count / len(LENGTHS)) is expected


@pytest.mark.parametrize(("by_size", "expected"), [(False, REFUTED), (True, HOLDS)])
def test_sizes_that_are_all_marked_static_would_make_the_default_recompile(by_size, expected):
    with torch._dynamo.config.patch(automatic_dynamic_shapes=not by_size):
        count = functions().graphs(LENGTHS, 65)
    assert verdict("shapes-recompile-default", count / len(LENGTHS)) is expected


@pytest.mark.parametrize(("pad", "expected"), [(lambda n: -(-n // 32) * 32, HOLDS), (lambda n: n + 32, REFUTED)])
def test_padding_by_a_number_is_not_padding_to_a_multiple(pad, expected):
    graphs, lengths = functions().graphs, range(26, 40)
    fixed = [graphs(each, 65, dynamic=False) for each in ([pad(n) for n in lengths], lengths)]
    assert verdict("pad-to-multiple", fixed[0] / fixed[1]) is expected


def test_the_break_even_price_is_the_ratio_of_speeds_for_that_work():
    lesson = functions()
    h100, a100 = (lesson.sheet[name] for name in ("H100 SXM", "A100 40 GiB"))
    for batch, ratio in ((None, 989 / 312), (1, 3350 / 1555), (1024, 989 / 312)):
        prices = [
            lesson.price_of_million(price, card.tokens_per_second(7e9, batch))
            for price, card in ((ratio, h100), (1, a100))
        ]
        assert prices[0] == pytest.approx(prices[1])
