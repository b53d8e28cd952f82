"""Recipes compared: what is measured before what is not, then the faster, then the cheaper in other respects."""

import math

from perf_helpers.advise.choices import PRECISIONS, Candidate, Choices, Family
from perf_helpers.advise.speeds import Evidence, Factor


class Ranking:
    """The order of recipes. Speed is the product of the factors of a recipe's techniques and of its micro-batch; a
    technique that all recipes share makes no difference and is left out."""

    def __init__(self, choices: Choices, evidence: Evidence):
        self._largest, self._evidence = choices.micro_batches[-1], evidence
        self._shared = set(choices.families[0]).intersection(*choices.families)

    def key(self, candidate: Candidate) -> tuple[int, float, int, int]:
        """What recipes are sorted by: measured first, then faster, then cheaper, then a larger micro-batch."""
        unknown, costs = self.unknown(candidate.family), len(_costs(candidate.family))
        return unknown, -self.speed(candidate), costs, -candidate.micro_batch

    def unknown(self, family: Family) -> int:
        """How many of a family's techniques have a speed that nobody measured."""
        return sum(factor.ratio is None for factor in self._of_techniques(family))

    def speed(self, candidate: Candidate) -> float:
        """The product of the factors that can be told from 1."""
        return math.prod(factor.told for factor in self.factors(candidate))

    def factors(self, candidate: Candidate) -> list[Factor]:
        """What makes a recipe faster or slower than the others."""
        factors = self._of_techniques(candidate.family)
        if candidate.micro_batch < self._largest:
            factors.append(self._evidence.micro_batch(candidate.micro_batch, self._largest))
        return factors

    def only_adds_costs(self, family: Family, other: Family) -> bool:
        """Whether a family has the costs of one that ranks before it and more, so that only a larger micro-batch could
        speak for it. A precision of unknown speed speaks for itself: it may be the faster one."""
        comparable = PRECISIONS & {*family} == PRECISIONS & {*other} or not self.unknown(family)
        return comparable and _costs(family) > _costs(other)

    def _of_techniques(self, family: Family) -> list[Factor]:
        return [self._evidence.factor(technique) for technique in family if technique not in self._shared]


def _costs(family: Family) -> set[str]:
    """The techniques of a family that cost something: time, precision or convergence."""
    return {technique.name for technique in family if technique.cost}
