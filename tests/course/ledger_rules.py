"""Check each row of claims.toml. An error names the claim and the field, and says what to write there.

Most rules concern two fields at once, e.g. a direction and its threshold, or a machine and the verdicts expected on it.
"""

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields

from perf_helpers.course.ledger import GPU_PROFILES, WHERE, Claim, Guide, Verdict

DECIDED_BY = ("memory", "time", "values")
Need = Callable[[object, str, str], None]  # need(what must be true, field, what to write there), or it raises


def check(text: str) -> None:
    """Check the text of a ledger; raise ValueError for the first field that breaks a rule."""
    ids = set()
    for table in tomllib.loads(text).get("claim", []):
        _check_claim(table)
        if table["id"] in ids:
            raise ValueError(f"claim {table['id']!r}, field 'id': written twice; give one of the two another id")
        ids.add(table["id"])
    if not ids:
        raise ValueError("no [[claim]] table: a ledger has at least one")


def _check_claim(table: dict) -> None:
    """Check the fields that every claim has, then those of a claim with a measurement; `table` is the claim's TOML
    table.
    """

    def need(met: object, name: str, what_to_write: str) -> None:
        if not met:
            raise ValueError(f"claim {table.get('id', '(without id)')!r}, field {name!r}: {what_to_write}")

    _check_statement(table, need)
    if table["where"] != "text":
        _check_rule(table, need)
        return
    for name in ("quantity", "decided_by", "direction", "threshold", "tolerance", "no_effect", "predicted", "expected"):
        need(name not in table, name, "a text claim has nothing to measure; leave it out")


def _check_statement(table: dict, need: Need) -> None:
    """Check that text fields contain text, that lesson and machine exist, and that the guide has a source.

    `table`: the claim's TOML table; `need`: need(condition, field, message) raises if the condition is false.
    """
    measured = [] if table.get("where") == "text" else ["quantity", "direction"]
    explained = [name for name in ("predicted", "reason", "since", "thread") if name in table]
    _check_names(table, Claim, ["id", "section", "lesson", "says", "where", *measured, *explained], "", need)
    need(re.fullmatch(r"\d\d", table["lesson"]), "lesson", "two digits are needed, as in '05'")
    need(table["where"] in WHERE, "where", f"{table['where']!r} is not one of {', '.join(WHERE)}")
    guide = table.get("guide")
    need(isinstance(guide, dict), "guide", "write guide.source = '...', and guide.value where there is a figure")
    with_a_figure = ["text", "hardware"] if "value" in guide else []  # how the guides put it, and where they measured
    _check_names(guide, Guide, ["source", *with_a_figure], "guide.", need)
    need(_is_number(guide.get("value", 0)), "guide.value", "a finite number is needed, or none at all")


def _check_names(given: dict, kind: type, texts: list[str], prefix: str, need: Need) -> None:
    """Check that `given` has only fields of the dataclass `kind`, and a text in each field named in `texts`.

    Args:
        prefix: comes before a field's name in messages, e.g. "guide.".
        need: called as need(condition, field, message); it raises an error with the message if the condition is false.
    """
    known = [item.name for item in fields(kind)]
    for name in given:
        need(name in known, prefix + name, f"unknown; the fields are {', '.join(known)}")
    for name in texts:
        need(isinstance(given.get(name), str) and given[name].strip(), prefix + name, "write a text here")


def _check_rule(table: dict, need: Need) -> None:
    """Check that a claim has the threshold fields that its direction ("above", "below", "between" or "equal") needs and
    no others, and expected verdicts for each kind of machine that can decide the claim.

    `table`: the claim's TOML table; `need`: need(condition, field, message) raises if the condition is false.
    """
    direction, threshold = table["direction"], table.get("threshold")
    need(table.get("decided_by") in DECIDED_BY, "decided_by", f"{', '.join(DECIDED_BY)}: one of these is needed")
    need(direction in ("below", "above", "between", "equal"), "direction", "below, above, between or equal is needed")
    if direction == "between":
        pair = isinstance(threshold, list) and len(threshold) == 2 and all(map(_is_number, threshold))
        need(pair and threshold[0] < threshold[1], "threshold", "between needs [low, high] with low < high")
    else:
        need(_is_number(threshold), "threshold", "a finite number is needed")
    if direction == "equal":
        tolerance = table.get("tolerance")
        need(_is_number(tolerance) and tolerance >= 0, "tolerance", "equal needs one, 0 or more")
    else:
        need("tolerance" not in table, "tolerance", "only equal takes one")
    if "no_effect" in table:
        need(direction != "equal", "no_effect", "a size that is exact has none")
        none, ends = table["no_effect"], threshold if direction == "between" else [threshold]
        outside = _is_number(none) and {
            "below": none >= ends[0], "above": none <= ends[0], "between": none < ends[0] or ends[-1] < none
        }[direction]  # fmt: skip
        need(outside, "no_effect", "a number is needed, on the side where the claim does not hold")
    expected = table.get("expected", {} if "predicted" in table else None)
    kinds = {"cuda"} if table["where"] in ("cuda", "sm80", "gpus2") else {"cpu", "cuda"}
    given = set(expected) - set(GPU_PROFILES) if isinstance(expected, dict) else None
    complete = given == kinds or ("predicted" in table and given is not None and given < kinds)
    what = (
        f"exactly {sorted(kinds)} are needed (fewer where it is predicted); {', '.join(GPU_PROFILES)} may say otherwise"
    )
    need(complete, "expected", what)
    for kind, verdicts in expected.items():
        known = isinstance(verdicts, list) and verdicts and all(verdict in list(Verdict) for verdict in verdicts)
        need(known, f"expected.{kind}", f"a list is needed, out of: {', '.join(Verdict)}")
        both = {Verdict.HOLDS, Verdict.REFUTED} <= set(verdicts)
        need(not both, f"expected.{kind}", "holds or refuted, not both: nothing could contradict it")
    finding = any({Verdict.REFUTED, Verdict.SMALLER} & set(verdicts) for verdicts in expected.values())
    need("reason" in table or not finding, "reason", "needed where a claim is expected not to hold")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
