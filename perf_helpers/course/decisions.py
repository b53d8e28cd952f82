"""What was decided, as it is shown and kept: one decision a claim, and the scoreboard of a lesson.

Both display themselves in a notebook (claims.html.j2) and in a terminal, with the same words.
"""

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jinja2

from perf_helpers.course.ledger import Guide, Verdict
from perf_helpers.texts import number_text

# A verdict is never told by colour alone: its sign and its words go with it.
SIGNS = {Verdict.HOLDS: "✓", Verdict.REFUTED: "✗", Verdict.TOO_SMALL: "≈", Verdict.NOT_TESTABLE: "–"}


@dataclass(frozen=True, slots=True, repr=False)
class Decision:
    """A claim, what was measured here, and the verdict."""

    id: str
    lesson: str  # that owns the claim, two digits
    says: str
    quantity: str | None  # None for a text claim
    where: str  # the machine that the claim needs
    verdict: Verdict
    expected: tuple[Verdict, ...]  # by the ledger, of this kind of machine
    as_expected: bool
    value: float | None  # in the unit of the quantity; None: not measured
    interval: tuple[float, float] | None  # in the same unit; None: an exact count, or a single measurement
    threshold: str  # the rule in words
    guide: Guide
    reason: str | None  # the ledger's, where a claim is expected to be refuted
    missing: str | None  # what is lacking here to measure it
    note: str  # the lesson's own
    rehearsed: bool = False  # whether the machine computes nothing, see Machine.rehearsed

    def to_dict(self) -> dict:
        """Types as JSON has them; `guide` becomes a table of source, value, text and hardware."""
        return json.loads(json.dumps(asdict(self)))

    def headline(self) -> str:
        """The verdict with its sign, and what the ledger expected where that differs."""
        words = f"{SIGNS[self.verdict]} {self.verdict}"
        if self.rehearsed and self.verdict is not Verdict.NOT_TESTABLE:
            words += " (rehearsed)"
        elif self.verdict is Verdict.REFUTED:
            words += ": not reproduced on this machine"
        return words if self.as_expected else f"{words} (unexpected, the ledger expects: {' or '.join(self.expected)})"

    def measured(self) -> str:
        """The value with its interval, or "not measured"."""
        interval = " ({} to {})".format(*map(number_text, self.interval)) if self.interval else ""
        return number_text(self.value) + interval

    def guide_text(self) -> str:
        """The guides' figure with its source and its hardware, or that there is none."""
        value = [] if self.guide.value is None else [number_text(self.guide.value)]
        figure = ": ".join([*value, self.guide.text or "no figure"])
        return f"{figure} ({'; '.join(filter(None, (self.guide.source, self.guide.hardware)))})"

    def rows(self) -> list[tuple[str, str]]:
        """What is shown below the statement, as (name, text); the reason only where the claim does not simply hold."""
        finding = self.verdict is not Verdict.HOLDS or not self.as_expected
        rows = {
            "measured": self.quantity and self.measured(),
            "quantity": self.quantity,
            "holds if": self.threshold,
            "guide": self.guide_text(),
            "missing": self.missing,
            "why": self.reason if finding and self.verdict is not Verdict.NOT_TESTABLE else None,
            "note": self.note,
        }
        return [(name, text) for name, text in rows.items() if text]

    def __repr__(self) -> str:
        rows = [f"  {name:<9} {text}" for name, text in self.rows()]
        return "\n".join([f"{self.headline()} [{self.id}]", f"  {self.says}", *rows])

    def _repr_html_(self) -> str:
        return template("claims.html.j2").module.decision(self)


@dataclass(frozen=True, slots=True, repr=False)
class Scoreboard:
    """Every decision of a lesson, and what keeps the lesson from passing."""

    title: str
    decisions: Sequence[Decision]
    problems: Sequence[str]  # one line each

    def counts(self) -> str:
        """How many claims have which verdict, e.g. "✓ 3 holds · ✗ 1 refuted"."""
        number = Counter(decision.verdict for decision in self.decisions)
        parts = [f"{sign} {number[verdict]} {verdict}" for verdict, sign in SIGNS.items() if number[verdict]]
        rehearsed = ["a rehearsal: no kernel computed"] if any(d.rehearsed for d in self.decisions) else []
        return " · ".join([*(parts or ["no claim was checked"]), *rehearsed])

    def __repr__(self) -> str:
        rows = [f"  {d.headline()} [{d.id}] {d.measured()}" for d in self.decisions]
        return "\n".join([self.title, self.counts(), *rows, *(f"  warning: {text}" for text in self.problems)])

    def _repr_html_(self) -> str:
        return template("claims.html.j2").module.scoreboard(self)


@functools.cache
def template(name: str) -> jinja2.Template:
    """A Jinja template beside this file, e.g. "report.html.j2"; what it is given is escaped."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = number_text
    return environment.get_template(name)
