"""The ledger says what the guides say, a verdict follows from numbers alone, and nothing passes unchecked."""

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from perf_helpers import claims, hardware
from perf_helpers.course.claims import Verdict
from perf_helpers.lab.runs import Ratio
from perf_helpers.unknown import Unknown

HOLDS, REFUTED, TOO_SMALL, NOT_TESTABLE = Verdict

# Every row of the ledger by the lesson that owns it, written down here a second time on purpose.
OWNED = {
    "00": "weights-cost",
    "01": "context-cost nvml-agrees weights-mixed states-adamw states-sgd-momentum states-8bit states-adafactor "
    "gradients-cost eighteen-bytes inference-six-bytes activations-scale functional-memory",
    "02": "op-classes backward-twice-forward",
    "03": "training-dwarfs-weights",
    "04": "multiples-of-eight tile-quantization larger-batch-faster",
    "05": "accumulation-memory accumulation-cost accumulation-same-gradient accumulation-fill-first "
    "accumulation-fewer-updates",
    "06": "checkpointing-memory checkpointing-cost checkpointing-same-gradient checkpointing-sqrt",
    "07": "fp16-faster half-precision-faster-cpu fp16-activations-halve fp16-small-batch-costs fp16-range bf16-range "
    "bf16-no-scaling bf16-then-fp16 tf32-layout tf32-faster autocast-cache layernorm-accumulates-fp32 half-inference",
    "08": "adafactor-memory adafactor-cost adafactor-convergence",
    "09": "adam8bit-memory adam8bit-cost adam8bit-convergence",
    "10": "multi-tensor",
    "11": "sdpa compile",
    "12": "workers-help pinned-memory",
    "13": "accelerate-same",
    "14": "combined-half-memory all-three-x all-three-memory",
    "15": "link-matters ddp-beats-dp ddp-traffic dp-traffic ddp-in-step topology-legend",
    "16": "zero-slows-if-fits zero-saves",
    "17": "parallel-tensor-pipeline",
    "18": "moe-params moe-faster",
    "19": "many-cpus",
    "21": "big-models",
    "22": "hpo",
    "23": "troubleshooting",
    "24": "cooling power-sockets gpu-choice prebuilt-images",
}
NEEDS = {  # what is not in this table is decided on any machine
    "cuda": "context-cost nvml-agrees multiples-of-eight tile-quantization fp16-faster combined-half-memory "
    "adam8bit-cost all-three-x pinned-memory topology-legend cooling",
    "sm80": "tf32-layout tf32-faster",
    "gpus2": "ddp-beats-dp dp-traffic",
    "cpu-bf16": "half-precision-faster-cpu",
    "text": "power-sockets prebuilt-images",
}
# The guides' figures, worked out from their tables: (MB, samples/s) of the 2023 guide's runs.
VANILLA, ACCUMULATED, CHECKPOINTED, FP16, COMBINED = (
    (14949, 8.86),
    (8681, 7.75),
    (6775, 5.99),
    (13939, 18.64),
    (7275, 10.09),
)
ADAFACTOR, ALL_ADAFACTOR, ADAM8BIT = (12295, 7.96), (4847, 9.06), (13085, 9.15)
FIGURES = {
    "context-cost": 1343,
    "nvml-agrees": 2 / 2631,
    "weights-cost": 4,
    "training-dwarfs-weights": 14949 / (2631 - 1343),
    "weights-mixed": 6,
    "states-adamw": 8,
    "states-sgd-momentum": 4,
    "states-8bit": 2,
    "states-adafactor": 4,
    "gradients-cost": 4,
    "eighteen-bytes": 18,
    "inference-six-bytes": 6,
    "backward-twice-forward": 2,
    "accumulation-memory": ACCUMULATED[0] / VANILLA[0],
    "accumulation-cost": ACCUMULATED[1] / VANILLA[1],
    "accumulation-fewer-updates": 1.25,
    "checkpointing-memory": CHECKPOINTED[0] / ACCUMULATED[0],
    "checkpointing-cost": CHECKPOINTED[1] / ACCUMULATED[1],
    "checkpointing-sqrt": 0.5,
    "fp16-faster": FP16[1] / VANILLA[1],
    "fp16-activations-halve": 0.5,
    "fp16-small-batch-costs": (COMBINED[0] - CHECKPOINTED[0]) / CHECKPOINTED[0],
    "combined-half-memory": (COMBINED[1] / COMBINED[0]) / (VANILLA[1] / VANILLA[0]),
    "fp16-range": 65535,
    "bf16-range": 3.39e38,
    "tf32-layout": 10,
    "tf32-faster": 3,
    "adafactor-memory": ADAFACTOR[0] / VANILLA[0],
    "adafactor-cost": ADAFACTOR[1] / VANILLA[1],
    "adam8bit-memory": ADAM8BIT[0] / VANILLA[0],
    "adam8bit-cost": ADAM8BIT[1] / VANILLA[1],
    "all-three-x": (ALL_ADAFACTOR[1] / ALL_ADAFACTOR[0]) / (VANILLA[1] / VANILLA[0]),
    "all-three-memory": ALL_ADAFACTOR[0] / VANILLA[0],
    "accelerate-same": 5363 / 5363,
    "moe-params": 10,
    "moe-faster": 4.5,
    "link-matters": 131 / 101,
    "ddp-beats-dp": 110 / 101,
    "dp-traffic": 5,
}
# Where the guides give no figure: a value that their statement calls true.
TRUE = {
    "activations-scale": 1.0,
    "functional-memory": 3.0,
    "op-classes": 0.01,
    "multiples-of-eight": 1.5,
    "tile-quantization": 1.5,
    "larger-batch-faster": 1.3,
    "accumulation-same-gradient": 1.0,
    "accumulation-fill-first": 1.5,
    "checkpointing-same-gradient": 0.0,
    "half-precision-faster-cpu": 1.5,
    "bf16-no-scaling": 0.9,
    "bf16-then-fp16": 0.01,
    "autocast-cache": 1,
    "layernorm-accumulates-fp32": 0.5,
    "half-inference": 3.0,
    "adafactor-convergence": 1.2,
    "adam8bit-convergence": 1.0,
    "multi-tensor": 2.0,
    "workers-help": 2.0,
    "pinned-memory": 2.5,
    "sdpa": 2.0,
    "compile": 1.5,
    "zero-slows-if-fits": 0.7,
    "zero-saves": 0.01,
    "ddp-traffic": 1.0,
    "ddp-in-step": 0.0,
    "topology-legend": 1.0,
    "parallel-tensor-pipeline": 0.5,
    "many-cpus": 1.8,
    "cooling": 0.0,
    "gpu-choice": 0.5,
    "big-models": 1.1,
    "hpo": 0.8,
    "troubleshooting": 1.0,
}
# For every claim that can be measured: a value that its statement calls false.
FALSE = {
    "context-cost": 100,
    "nvml-agrees": 0.2,
    "weights-cost": 2,
    "training-dwarfs-weights": 1.1,
    "weights-mixed": 4,
    "states-adamw": 4,
    "states-sgd-momentum": 8,
    "states-8bit": 8,
    "states-adafactor": 0.02,
    "gradients-cost": 2,
    "eighteen-bytes": 12,
    "inference-six-bytes": 4,
    "activations-scale": 0.0,
    "functional-memory": 1.0,
    "op-classes": 1.5,
    "backward-twice-forward": 1.0,
    "multiples-of-eight": 0.9,
    "tile-quantization": 0.9,
    "larger-batch-faster": 0.9,
    "accumulation-memory": 1.1,
    "accumulation-cost": 0.5,
    "accumulation-same-gradient": 4.0,
    "accumulation-fill-first": 0.9,
    "accumulation-fewer-updates": 0.9,
    "checkpointing-memory": 1.0,
    "checkpointing-cost": 1.0,
    "checkpointing-same-gradient": 0.5,
    "checkpointing-sqrt": 1.0,
    "fp16-faster": 0.9,
    "half-precision-faster-cpu": 0.5,
    "fp16-activations-halve": 1.0,
    "fp16-small-batch-costs": -0.1,
    "combined-half-memory": 0.9,
    "fp16-range": 65504,
    "bf16-range": 65504,
    "bf16-no-scaling": -0.1,
    "bf16-then-fp16": 0.0,
    "tf32-layout": 23,
    "tf32-faster": 0.9,
    "autocast-cache": 2,
    "layernorm-accumulates-fp32": 300,
    "half-inference": 0.5,
    "adafactor-memory": 1.1,
    "adafactor-cost": 0.5,
    "adafactor-convergence": 0.8,
    "adam8bit-memory": 1.1,
    "adam8bit-cost": 0.5,
    "adam8bit-convergence": 1.5,
    "all-three-x": 0.9,
    "all-three-memory": 1.1,
    "multi-tensor": 0.9,
    "accelerate-same": 1.3,
    "workers-help": 0.9,
    "pinned-memory": 0.9,
    "sdpa": 0.8,
    "compile": 0.8,
    "zero-slows-if-fits": 1.2,
    "zero-saves": 1.0,
    "moe-params": 1.0,
    "moe-faster": 0.8,
    "link-matters": 0.9,
    "ddp-beats-dp": 0.9,
    "ddp-traffic": 2.0,
    "dp-traffic": 1,
    "ddp-in-step": 0.001,
    "topology-legend": 0.5,
    "parallel-tensor-pipeline": 1.0,
    "many-cpus": 0.9,
    "cooling": 0.5,
    "gpu-choice": 1.5,
    "big-models": 2.2,
    "hpo": 1.1,
    "troubleshooting": 0.5,
}
# Only these may expect more than one verdict: they are timed, or their losses vary with the seed.
UNCERTAIN = (
    "backward-twice-forward larger-batch-faster accumulation-cost accumulation-fill-first accumulation-fewer-updates "
    "checkpointing-cost half-precision-faster-cpu half-inference adafactor-cost adafactor-convergence "
    "adam8bit-convergence multi-tensor workers-help sdpa compile zero-slows-if-fits moe-faster link-matters many-cpus "
    "gpu-choice hpo topology-legend adam8bit-cost combined-half-memory all-three-x"
)
LEDGER = claims.load()
MEASURED = [claim.id for claim in LEDGER.values() if claim.where != "text"]


def rejected(ledger):
    """The claims on which a ledger contradicts the guides: the oracle for directions and thresholds."""
    true = FIGURES | TRUE
    return [
        claim.id
        for claim in ledger.values()
        if claim.where != "text"
        and (
            claims.decide(claim, true[claim.id], True) is not HOLDS
            or claims.decide(claim, FALSE[claim.id], True) is not REFUTED
        )
    ]


def reversed_(claim):
    """The claim the other way round: below for above, and a range that was moved away."""
    if claim.direction in ("below", "above"):
        return replace(claim, direction={"below": "above", "above": "below"}[claim.direction], refuted_from=None)
    if claim.direction == "between":
        low, high = claim.threshold
        return replace(claim, threshold=(high + (high - low), high + 2 * (high - low)))
    return replace(claim, threshold=claim.threshold * (1 + 3 * claim.tolerance) + 1)


class TestLedger:
    def test_it_has_every_claim_under_its_lesson(self):
        listed = {id: lesson for lesson, ids in OWNED.items() for id in ids.split()}
        assert len(listed) == 75
        assert {claim.id: claim.lesson for claim in LEDGER.values()} == listed

    def test_every_claim_names_the_machine_it_needs(self):
        needs = {id: where for where, ids in NEEDS.items() for id in ids.split()}
        assert {claim.id: claim.where for claim in LEDGER.values()} == {id: needs.get(id, "any") for id in LEDGER}

    def test_the_guides_figures_are_theirs(self):
        figures = {claim.id: claim.guide.value for claim in LEDGER.values() if claim.guide.value is not None}
        assert figures == {id: pytest.approx(value, rel=0.01) for id, value in FIGURES.items()}

    def test_every_claim_has_a_true_and_a_false_value(self):
        assert FIGURES.keys().isdisjoint(TRUE)
        assert sorted(FIGURES | TRUE) == sorted(FALSE) == sorted(MEASURED)

    @pytest.mark.parametrize("id", FIGURES)
    def test_the_guides_own_figure_holds(self, id):
        assert claims.decide(LEDGER[id], LEDGER[id].guide.value, True) is HOLDS

    def test_it_agrees_with_the_guides_on_every_claim(self):
        assert rejected(LEDGER) == []

    @pytest.mark.parametrize("id", MEASURED)
    def test_reversing_any_claim_is_noticed(self, id):
        assert rejected(LEDGER | {id: reversed_(LEDGER[id])}) == [id]

    @pytest.mark.parametrize("id", MEASURED)
    def test_more_than_one_verdict_is_expected_only_of_what_varies(self, id):
        for kind, verdicts in LEDGER[id].expected.items():
            assert len(set(verdicts)) == len(verdicts)
            if id not in UNCERTAIN.split():
                assert len(verdicts) == 1, kind
            assert not {HOLDS, REFUTED} <= set(verdicts), f"{id} on {kind}: whatever happens would be expected"

    def test_what_is_expected_to_be_refuted_says_why(self):
        findings = [claim for claim in LEDGER.values() if REFUTED in sum(claim.expected.values(), ())]
        assert findings
        assert all(len(claim.reason) > 40 and claim.since for claim in findings)

    @pytest.mark.parametrize("id", MEASURED)
    def test_what_decides_it_is_what_its_quantity_names(self, id):
        words = {
            "memory": r"\b(bytes|memory|peak|parameters)\b",
            "time": r"\b(seconds|throughput|FLOP/s|GB/s|samples/s|gain|cost)\b",
        }
        claim = LEDGER[id]
        if claim.decided_by != "values":
            assert re.search(words[claim.decided_by], claim.quantity)
        if claim.decided_by != "time":
            assert not re.search(words["time"].replace("|gain|cost", ""), claim.quantity)

    @pytest.mark.parametrize("id", LEDGER)
    def test_its_texts_are_short(self, id):
        claim = LEDGER[id]
        assert len(claim.says) <= 130
        assert not claim.says.endswith(".")
        assert claim.quantity is None or 15 < len(claim.quantity) <= 180


VALID = """
[[claim]]
id = "some-claim"
section = "Beyond"
lesson = "05"
says = "Something gets smaller"
quantity = "peak with / without"
where = "any"
decided_by = "memory"
direction = "below"
threshold = 0.9
refuted_from = 1.0
guide.source = "2023 guide"
expected.cpu = ["holds"]
expected.cuda = ["holds"]
"""


def loaded(tmp_path, text):
    path = tmp_path / "claims.toml"
    path.write_text(text, encoding="utf-8")
    return claims.load(path)


class TestLoad:
    def test_a_valid_table_is_read(self, tmp_path):
        claim = loaded(tmp_path, VALID)["some-claim"]
        assert (claim.threshold, claim.refuted_from, claim.expected["cpu"]) == (0.9, 1.0, (HOLDS,))

    @pytest.mark.parametrize("text", ["", "[other]\nid = 1\n"])
    def test_an_empty_ledger_is_refused(self, tmp_path, text):
        with pytest.raises(ValueError, match="at least one"):
            loaded(tmp_path, text)

    def test_an_id_written_twice_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="'some-claim', field 'id': written twice"):
            loaded(tmp_path, VALID + VALID)

    @pytest.mark.parametrize(
        ("old", "new", "field"),
        [
            ('says = "Something gets smaller"', "", "says"),
            ('says = "Something gets smaller"', 'says = " "', "says"),
            ('quantity = "peak with / without"', "", "quantity"),
            ('lesson = "05"', 'lesson = "5"', "lesson"),
            ('lesson = "05"', "lesson = 5", "lesson"),
            ('lesson = "05"', 'lesson = "05"\nthread = 5', "thread"),
            ('where = "any"', 'where = "gpu"', "where"),
            ('where = "any"', 'where = "text"', "quantity"),
            ('decided_by = "memory"', "", "decided_by"),
            ('decided_by = "memory"', 'decided_by = "space"', "decided_by"),
            ('decided_by = "memory"', 'decided_by = ["memory"]', "decided_by"),
            ('where = "any"', 'where = "sm80"', "expected"),
            ('direction = "below"', 'direction = "under"', "direction"),
            ('direction = "below"', 'direction = "above"', "refuted_from"),
            ('direction = "below"', 'direction = "between"', "threshold"),
            ('direction = "below"', 'direction = "equal"', "tolerance"),
            ('direction = "below"\n', 'direction = "equal"\ntolerance = 0.1\n', "refuted_from"),
            ("threshold = 0.9", "", "threshold"),
            ("threshold = 0.9", "threshold = nan", "threshold"),
            ("threshold = 0.9", "threshold = true", "threshold"),
            ("threshold = 0.9", "threshold = 0.9\ntolerance = 0.1", "tolerance"),
            ("threshold = 0.9", "treshold = 0.9", "treshold"),
            ("refuted_from = 1.0", "refuted_from = 0.8", "refuted_from"),
            ("refuted_from = 1.0", 'refuted_from = "1"', "refuted_from"),
            ('guide.source = "2023 guide"', "", "guide"),
            ('guide.source = "2023 guide"', 'guide = "2023 guide"', "guide"),
            ('guide.source = "2023 guide"', 'guide.text = "5 MB"', "guide.source"),
            ('guide.source = "2023 guide"', 'guide.source = "2023 guide"\nguide.value = 0.5', "guide.text"),
            ('guide.source = "2023 guide"', 'guide.source = "2023 guide"\nguide.page = 5', "guide.page"),
            ('expected.cpu = ["holds"]', "", "expected"),
            ('expected.cpu = ["holds"]', 'expected.gpu = ["holds"]', "expected"),
            ('expected.cpu = ["holds"]', 'expected.cpu = ["holds"]\nexpected.h100 = ["holds"]', "expected"),
            ('expected.cpu = ["holds"]', 'expected.cpu = ["holds"]\nexpected.t4 = ["hold"]', "expected.t4"),
            ('expected.cpu = ["holds"]', 'expected.cpu = ["holds"]\nexpected.gpu = ["refuted"]', "reason"),
            ('expected.cpu = ["holds"]', "expected.cpu = []", "expected.cpu"),
            ('expected.cpu = ["holds"]', 'expected.cpu = "holds"', "expected.cpu"),
            ('expected.cpu = ["holds"]', 'expected.cpu = ["hold"]', "expected.cpu"),
            ('expected.cpu = ["holds"]', 'expected.cpu = ["refuted"]', "reason"),
        ],
    )
    def test_a_wrong_field_is_named_with_its_claim(self, tmp_path, old, new, field):
        assert old in VALID
        with pytest.raises(ValueError, match=f"claim 'some-claim', field '{re.escape(field)}'"):
            loaded(tmp_path, VALID.replace(old, new))


def claim_that_is(direction, threshold, **fields):
    return replace(
        LEDGER["accumulation-memory"], direction=direction, threshold=threshold, **{"refuted_from": None} | fields
    )


class TestDecide:
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
    def test_below_and_its_mirror_above(self, value, verdict):
        mirrored = tuple(-x for x in reversed(value)) if isinstance(value, tuple) else -value
        assert claims.decide(claim_that_is("below", 0.9, refuted_from=1.0), value, True) is verdict
        assert claims.decide(claim_that_is("above", -0.9, refuted_from=-1.0), mirrored, True) is verdict

    @pytest.mark.parametrize("direction", ["below", "above"])
    def test_without_refuted_from_every_number_is_decided(self, direction):
        below, exactly, above = (claims.decide(claim_that_is(direction, 1), value, True) for value in (0.9, 1, 1.1))
        assert (below, exactly, above) == (
            (HOLDS, REFUTED, REFUTED) if direction == "below" else (REFUTED, REFUTED, HOLDS)
        )

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
    def test_between_and_equal_hold_inside_their_range(self, value, verdict):
        assert claims.decide(claim_that_is("between", (2, 4)), value, True) is verdict
        assert claims.decide(claim_that_is("equal", 3, tolerance=1 / 3), value, True) is verdict

    def test_the_tolerance_is_relative_but_absolute_around_zero(self):
        assert claims.decide(claim_that_is("equal", -200, tolerance=0.01), -201.9, True) is HOLDS
        assert claims.decide(claim_that_is("equal", -200, tolerance=0.01), -202.1, True) is REFUTED
        assert claims.decide(claim_that_is("equal", 0, tolerance=0.01), 0.009, True) is HOLDS
        assert claims.decide(claim_that_is("equal", 0, tolerance=0), 1e-9, True) is REFUTED

    @pytest.mark.parametrize("value", [0.1, 9.0, (0.1, 9.0), None])
    def test_without_its_machine_nothing_is_decided(self, value):
        assert claims.decide(LEDGER["accumulation-memory"], value, False) is NOT_TESTABLE
        assert claims.decide(LEDGER["power-sockets"], value, True) is NOT_TESTABLE


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@pytest.fixture
def machine(monkeypatch):
    """A machine that has what its `features` say; no real hardware has a say in a test."""
    machine = SimpleNamespace(features={"any"})

    def supports(feature):
        if feature not in claims.WHERE:
            raise ValueError(feature)
        return (True, "") if feature in machine.features else (False, f"needs {feature}")

    monkeypatch.setattr(hardware, "supports", supports)
    claims.reset()
    yield machine
    claims.reset()


class TestCheck:
    def test_a_number_gets_its_verdict(self, machine):
        decision = claims.check("accumulation-memory", 0.5, note="batch 16")
        assert (decision.verdict, decision.as_expected, decision.value) == (HOLDS, True, 0.5)
        assert (decision.interval, decision.note, decision.missing) == (None, "batch 16", None)

    def test_a_ratio_is_judged_by_its_whole_interval(self, machine):
        assert claims.check("accumulation-cost", Interval(0.9, 0.8, 1.0)).verdict is HOLDS
        decision = claims.check("accumulation-cost", Interval(0.9, 0.7, 1.1))
        assert (decision.verdict, decision.value, decision.interval) == (TOO_SMALL, 0.9, (0.7, 1.1))

    def test_a_refuted_claim_is_as_expected_only_if_the_ledger_expects_it(self, machine):
        assert claims.check("fp16-range", 65504).as_expected
        assert not claims.check("fp16-range", 65535).as_expected
        assert not claims.check("accumulation-memory", 2.0).as_expected

    def test_what_is_expected_depends_on_the_kind_of_machine(self, machine):
        assert claims.check("accumulation-cost", Interval(0.9, 0.7, 1.1)).as_expected
        machine.features.add("cuda")
        assert not claims.check("accumulation-cost", Interval(0.9, 0.7, 1.1)).as_expected

    @pytest.mark.parametrize("missing", [None, "needs patience"])
    @pytest.mark.parametrize("value", [None, 3.0])
    def test_without_its_machine_a_claim_is_not_testable_and_the_value_is_kept(self, machine, value, missing):
        decision = claims.check("tf32-faster", value, missing=missing)
        assert (decision.verdict, decision.as_expected, decision.value) == (NOT_TESTABLE, True, value)
        assert decision.missing == "needs sm80"

    def test_one_gpu_of_two_needed_is_as_expected(self, machine):
        machine.features |= {"cuda", "sm80"}
        decision = claims.check("ddp-beats-dp")
        assert (decision.verdict, decision.expected, decision.as_expected) == (NOT_TESTABLE, (HOLDS,), True)

    def test_a_text_claim_is_never_asserted(self, machine):
        decision = claims.check("power-sockets")
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True)

    def test_something_else_missing_is_as_expected_only_if_the_ledger_expects_it(self, machine):
        decision = claims.check("link-matters", missing="needs root to shape a link")
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True)
        assert decision.missing == "needs root to shape a link"
        assert not claims.check("accumulation-memory", 0.5, missing="needs patience").as_expected

    @pytest.mark.parametrize(
        "value",
        [None, math.nan, True, "0.5", [0.5, 0.6], Interval(1, 2, math.nan), Interval(1, 2, 1), Interval(1, None, None)],
    )
    def test_what_is_no_measurement_is_refused_and_leaves_no_decision(self, machine, value):
        with pytest.raises(ValueError, match=r"'accumulation-memory'.*missing="):
            claims.check("accumulation-memory", value)
        assert claims.decisions() == []

    def test_a_misspelt_id_gets_the_nearest_one(self, machine):
        with pytest.raises(ValueError, match="'accumulation-memory'"):
            claims.check("acumulation-memry", 0.5)

    def test_checking_again_replaces_the_earlier_decision(self, machine):
        claims.check("accumulation-memory", 0.5)
        claims.check("accumulation-cost", 0.9)
        claims.check("accumulation-memory", 1.5)
        assert [(d.id, d.value) for d in claims.decisions()] == [
            ("accumulation-memory", 1.5),
            ("accumulation-cost", 0.9),
        ]
        claims.reset()
        assert claims.decisions() == []

    @pytest.mark.parametrize(
        "value", [Ratio.unknown("timed out"), Unknown("timed out"), Ratio.unknown("timed out") / 2]
    )
    def test_what_is_unknown_is_not_testable_and_not_expected(self, machine, value):
        decision = claims.check("accumulation-cost", value)
        assert (decision.verdict, decision.value, decision.interval) == (NOT_TESTABLE, None, None)
        assert decision.missing == "timed out" and not decision.as_expected
        assert claims.check("link-matters", value).as_expected, "the ledger lists that it may not be testable"
        assert json.loads(json.dumps(decision.to_dict(), allow_nan=False))["value"] is None

    def test_what_is_unknown_does_not_hide_what_the_machine_lacks(self, machine):
        decision = claims.check("tf32-faster", Ratio.unknown("timed out"))
        assert (decision.missing, decision.as_expected) == ("needs sm80", True)

    def test_a_profile_of_gpus_may_expect_another_verdict(self, machine, monkeypatch):
        machine.features.add("cuda")
        expected = {"cpu": (HOLDS,), "t4": (TOO_SMALL,), "gpu": (HOLDS,)}  # cpu: of a GPU that is given a CPU's sizes
        for name, verdicts in expected.items():
            monkeypatch.setattr(claims, "choose_profile", lambda *_, name=name: SimpleNamespace(name=name))
            decision = claims.check("all-three-memory", 0.581)
            assert (decision.expected, decision.as_expected) == (verdicts, verdicts == (TOO_SMALL,)), name
        machine.features.remove("cuda")
        monkeypatch.setattr(claims, "choose_profile", lambda *_: SimpleNamespace(name="t4"))
        assert claims.check("all-three-memory", 0.581).expected == LEDGER["all-three-memory"].expected["cpu"]

    @pytest.mark.parametrize("where", claims.WHERE)
    def test_this_machine_answers_for_every_kind_of_need(self, where):
        met, lacking = hardware.supports(where)
        assert met is (lacking == "")
        assert not (where == "text" and met)


@pytest.fixture
def rehearsal(machine, monkeypatch):
    """A rehearsal of a GPU: as far as a claim can tell it is there."""
    machine.features |= {"cuda", "sm80"}
    monkeypatch.setattr(claims, "_rehearsed", lambda: True)


class TestRehearsal:
    def test_memory_is_decided_and_marked(self, rehearsal):
        decision = claims.check("accumulation-memory", 0.5)
        assert (decision.verdict, decision.as_expected, decision.rehearsed) == (HOLDS, True, True)
        assert decision.headline() == "✓ holds (rehearsed)" and decision.to_dict()["rehearsed"] is True
        unexpected = claims.check("accumulation-memory", 1.5)
        assert not unexpected.as_expected and unexpected.headline().startswith("✗ refuted (rehearsed) (unexpected")

    @pytest.mark.parametrize("value", [0.9, Ratio(0.9, 0.8, 1.0), Unknown(), Ratio.unknown("x"), None, math.nan, "odd"])
    @pytest.mark.parametrize("id", ["accumulation-cost", "fp16-range"])
    def test_nothing_else_is_whatever_was_passed(self, rehearsal, id, value):
        decision = claims.check(id, value)
        assert (decision.verdict, decision.as_expected, decision.value) == (NOT_TESTABLE, True, None)
        assert decision.missing.startswith("a rehearsal: no kernel computes, so there")
        assert decision.headline() == "– not testable here"

    @pytest.mark.parametrize("value", [Unknown("nothing was computed"), None])
    def test_memory_that_is_not_known_is_not_testable(self, rehearsal, value):
        decision = claims.check("accumulation-memory", value)
        assert (decision.verdict, decision.as_expected) == (NOT_TESTABLE, True) and decision.missing

    def test_what_the_rehearsed_machine_lacks_comes_first(self, rehearsal):
        assert claims.check("ddp-beats-dp", 2.0).missing == "needs gpus2"

    def test_a_lesson_of_it_passes_and_says_so_and_is_not_in_the_journal(self, rehearsal, tmp_path, capsys):
        claims.check("workers-help", Ratio(0.5, 0.4, 0.6))
        claims.check("pinned-memory", 0.1)
        claims.finish(a_lab(tmp_path, strict=True))
        shown = capsys.readouterr().out
        assert "– 2 not testable here · a rehearsal: no kernel computed" in shown
        content = json.loads((tmp_path / "out/12_dataloader.json").read_text())
        assert all(claim["rehearsed"] for claim in content["claims"])
        assert not (tmp_path / "kept").exists()

    def test_only_a_machine_that_says_so_rehearses(self, monkeypatch):
        for rehearsed in (False, True):
            machine = hardware.Machine("a card", "cuda", rehearsed=rehearsed)
            monkeypatch.setattr(hardware, "this_machine", lambda machine=machine: machine)
            assert claims._rehearsed() is rehearsed


class TestDisplay:
    def test_a_terminal_and_a_notebook_show_the_same_facts(self, machine):
        decision = claims.check("accumulation-cost", Interval(0.5, 0.4, 0.6), note="<batch> & more")
        facts = [
            "✗ refuted: not reproduced on this machine",
            "the ledger expects: holds or too small to tell",
            "above 0.75",
        ]
        facts += [
            "0.5 (0.4 to 0.6)",
            decision.says,
            decision.quantity,
            "7.75 against 8.86 samples/s",
            "V100-SXM2 16 GB",
        ]
        assert [fact for fact in [*facts, "<batch> & more"] if fact not in repr(decision)] == []
        html = decision._repr_html_()
        assert [fact for fact in [*facts, "&lt;batch&gt; &amp; more"] if fact not in html] == []
        assert "<batch>" not in html

    def test_a_finding_tells_why(self, machine):
        decision = claims.check("fp16-range", 65504)
        for shown in (repr(decision), decision._repr_html_()):
            assert "65,504" in shown and "65,535" in shown and "round to infinity" in shown
            assert "unexpected" not in shown

    @pytest.mark.parametrize(
        ("id", "value", "sign"),
        [("op-classes", 0.01, "✓"), ("op-classes", 2, "✗"), ("op-classes", 0.5, "≈"), ("cooling", None, "–")],
    )
    def test_no_verdict_is_told_by_colour_alone(self, machine, id, value, sign):
        decision = claims.check(id, value)
        assert decision.headline().startswith(f"{sign} {decision.verdict}")
        assert decision.headline().split(" (")[0] in decision._repr_html_()
        assert f'aria-label="{id}: {decision.verdict}"' in decision._repr_html_()

    def test_colours_follow_the_theme(self, machine):
        html = claims.check("op-classes", 0.01)._repr_html_()
        colours = re.findall(r"(?:border[a-z-]*|color|background[a-z-]*):([^;\"]*)", html)
        assert colours and all(re.search(r"var\(--jp-[a-z0-9-]+, #[0-9a-f]+\)", colour) for colour in colours)

    def test_nothing_measured_is_never_a_zero(self, machine):
        assert "not measured" in repr(claims.check("cooling")) and "not measured" not in repr(
            claims.check("ddp-in-step", 0)
        )


def a_lab(tmp_path, **fields):
    described = SimpleNamespace(name="Some CPU", to_dict=lambda: {"name": "Some CPU"})
    lab = {"lesson": "12_dataloader", "profile": "cpu", "strict": False, "out": str(tmp_path / "out"), "runs": []}
    lab["store"] = SimpleNamespace(path=tmp_path / "kept/runs.jsonl")
    return SimpleNamespace(**lab | {"machine": described, "versions": {"torch": "2.13.0"}} | fields)


@pytest.fixture
def passed(machine):
    """Lesson 12 with both of its claims decided as expected."""
    claims.check("workers-help", Interval(2.0, 1.5, 2.6))
    claims.check("pinned-memory")


class TestFinish:
    def test_the_file_holds_the_whole_lesson(self, passed, tmp_path):
        run = SimpleNamespace(to_dict=lambda: {"name": "slow input", "losses": [math.nan]})
        claims.finish(a_lab(tmp_path, strict=True, runs=[run]))
        content = json.loads((tmp_path / "out/12_dataloader.json").read_text(encoding="utf-8"))
        date = content.pop("date")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", date)
        assert [run["name"] for run in content.pop("runs")] == ["slow input"]
        assert content == {
            "schema": 1,
            "lesson": "12_dataloader",
            "profile": "cpu",
            "machine": {"name": "Some CPU"},
            "versions": {"torch": "2.13.0"},
            "claims": [decision.to_dict() for decision in claims.decisions()],
            "complete": True,
        }
        first = content["claims"][0]
        assert (first["verdict"], first["expected"]) == ("holds", ["holds", "too small to tell"])
        assert (first["value"], first["interval"], first["guide"]["source"]) == (2.0, [1.5, 2.6], "2023 guide")

    def test_a_lesson_is_judged_by_the_profile_that_it_ran(self, machine, tmp_path, capsys):
        machine.features.add("cuda")
        others = {claim.id: 2.0 for claim in LEDGER.values() if claim.lesson == "14" and claim.where == "cuda"}
        for id, value in (others | {"all-three-memory": 0.581}).items():
            claims.check(id, value)
        lesson = {"lesson": "14_all_together", "strict": True}
        with pytest.raises(claims.NotReproduced, match="all-three-memory: too small to tell, expected holds"):
            claims.finish(a_lab(tmp_path, profile="gpu", **lesson))
        claims.finish(a_lab(tmp_path, profile=SimpleNamespace(name="t4"), **lesson))
        content = json.loads((tmp_path / "out/14_all_together.json").read_text())
        assert content["profile"] == "t4"
        assert [claim["as_expected"] for claim in content["claims"]] == [True] * 3

    def test_a_comparison_that_failed_fails_a_strict_lesson_with_its_reason(self, machine, tmp_path):
        claims.check("workers-help", Ratio.unknown("speed not measured: timed out"))
        claims.check("pinned-memory")
        claims.finish(a_lab(tmp_path))
        with pytest.raises(claims.NotReproduced, match=r"not testable here, expected holds .*timed out"):
            claims.finish(a_lab(tmp_path, strict=True))

    def test_without_out_nothing_is_written(self, passed, tmp_path):
        claims.finish(a_lab(tmp_path, out=""))
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]  # the learner's own journal

    def test_the_scoreboard_shows_every_claim_with_machine_and_version(self, passed, tmp_path, capsys):
        claims.finish(a_lab(tmp_path))
        shown = capsys.readouterr().out
        for part in ("Some CPU", "torch 2.13.0", "workers-help", "pinned-memory", "✓ 1 holds · – 1 not testable here"):
            assert part in shown
        assert "warning" not in shown

    def test_the_scoreboard_in_html_escapes_and_has_a_row_a_claim(self, passed):
        board = claims.Scoreboard("A <b>", tuple(claims.decisions()), ("x & y",))
        html = board._repr_html_()
        assert html.count("<tr>") == 3 and "A &lt;b&gt;" in html and "x &amp; y" in html
        assert "no claim was checked" in claims.Scoreboard("A", (), ())._repr_html_()

    @pytest.mark.parametrize(
        ("lesson", "checked", "problem"),
        [
            ("12_dataloader", {"workers-help": 0.5, "pinned-memory": None}, "workers-help: refuted, expected holds"),
            ("12_dataloader", {"workers-help": 2.0}, "pinned-memory: belongs to this lesson and was not checked"),
            ("13_accelerate", {"accelerate-same": 1, "ddp-traffic": 1}, "ddp-traffic: belongs to lesson 15"),
            ("99_no_such_lesson", {}, "nothing was checked"),
            ("", {}, "nothing was checked"),
        ],
    )
    def test_a_strict_lesson_fails_where_another_is_warned(self, machine, tmp_path, capsys, lesson, checked, problem):
        for id, value in checked.items():
            claims.check(id, value)
        out = str(tmp_path) if lesson else ""
        claims.finish(a_lab(tmp_path, lesson=lesson, out=out))
        assert f"warning: {problem}" in capsys.readouterr().out
        before = sorted(tmp_path.rglob("*.json"))
        for file in before:
            file.unlink()
        with pytest.raises(claims.NotReproduced, match=re.escape(problem)):
            claims.finish(a_lab(tmp_path, lesson=lesson, out=out, strict=True))
        assert sorted(tmp_path.rglob("*.json")) == before  # written all the same

    def test_a_lesson_that_owns_no_claim_may_check_none(self, machine, tmp_path):
        assert all(lesson not in OWNED for lesson in claims.LESSONS_WITHOUT_CLAIMS)
        claims.finish(a_lab(tmp_path, lesson="20_inference", strict=True))

    def test_results_need_a_lesson_to_be_filed_under(self, passed, tmp_path):
        with pytest.raises(ValueError, match="Lab\\(lesson="):
            claims.finish(a_lab(tmp_path, lesson=""))

    def test_the_file_is_complete_before_it_takes_its_name(self, passed, tmp_path, monkeypatch):
        order, really = [], {"fsync": os.fsync, "replace": os.replace}
        monkeypatch.setattr(claims.journal, "finished", lambda *_: None)  # another file

        def replace_seen(source, target):
            order.append("replace")
            assert os.path.dirname(source) == str(tmp_path / "out")
            assert json.loads(Path(source).read_text(encoding="utf-8"))["complete"]
            really["replace"](source, target)

        monkeypatch.setattr(os, "fsync", lambda file: order.append("fsync") or really["fsync"](file))
        monkeypatch.setattr(os, "replace", replace_seen)
        claims.finish(a_lab(tmp_path))
        assert order == ["fsync", "replace"]

    @pytest.mark.parametrize("call", ["fsync", "replace"])
    def test_a_failed_write_leaves_the_old_file_and_no_other(self, passed, tmp_path, monkeypatch, call):
        claims.finish(a_lab(tmp_path))
        path = tmp_path / "out/12_dataloader.json"
        old = path.read_text(encoding="utf-8")

        def fail(*_):
            raise OSError("No space left on device")

        monkeypatch.setattr(os, call, fail)
        with pytest.raises(OSError, match="No space"):
            claims.finish(a_lab(tmp_path, profile="t4"))
        assert path.read_text(encoding="utf-8") == old
        assert os.listdir(path.parent) == [path.name]

    def test_what_json_cannot_hold_leaves_the_old_file(self, passed, tmp_path):
        claims.finish(a_lab(tmp_path))
        with pytest.raises(TypeError):
            claims.finish(a_lab(tmp_path, runs=[SimpleNamespace(to_dict=lambda: {"value": object()})]))
        assert json.loads((tmp_path / "out/12_dataloader.json").read_text(encoding="utf-8"))["complete"]
