"""What is said beside the recipes: techniques that are no choice of theirs, as far as anything is known of them."""

import contextlib

from perf_helpers.advise.candidate_recipes import Candidate
from perf_helpers.advise.measured_speedups import Evidence
from perf_helpers.advise.search import RecipeSearch

_FROM_VOCABULARY = {"causal", "masked", "sequence to sequence"}  # families with a product as wide as the vocabulary


def notes(search: RecipeSearch, best: Candidate, evidence: Evidence, capability: tuple[int, int] | None) -> list[str]:
    """One line each about attention's kernel, compiled code and padding, of the best recipe that fits.

    Args:
        capability: of the GPU; None: a CPU, whose products have no tiles to fill.
    """
    lines = [_attention(search.estimates[best].attention), _compiling(evidence)]
    return [*lines, *(_padding(search, best, 64 if capability >= (8, 0) else 8) if capability else ())]


def _attention(kernels: tuple[str, ...]) -> str:
    if kernels:
        return f"Attention takes the {' and '.join(kernels)} kernel, which keeps no square of length x length."
    return "Attention is plain: no fused kernel takes it, and the square of length x length is among the activations."


def _compiling(evidence: Evidence) -> str:
    if (measured := evidence.of_compiling()) is None:
        how = "lab.train(..., torch_compile=True) measures it, and the next advice knows"
        return f"torch.compile is no part of the recipes: what compiled code keeps cannot be estimated; {how}."
    speed, memory = measured
    return f"{speed}: {memory:.2f} x the peak at the most. It is no part of the recipes: its memory is not estimated."


def _padding(search: RecipeSearch, best: Candidate, multiple: int) -> list[str]:
    """What is no multiple of the sizes that a GPU's matrix units want, and what a padded vocabulary would take."""
    task, lines = search.task, []
    if task.family() in _FROM_VOCABULARY and (padded := task.with_padded_vocabulary(multiple)) != task:
        line = (
            f"The vocabulary is no multiple of {multiple}: resize_token_embeddings with pad_to_multiple_of={multiple} "
        )
        line += f"pads it to {padded.config['vocab_size']}"
        with contextlib.suppress(ValueError):  # no time is left
            there = search.estimate(search.choices.arguments(best), config=padded.config).peak_bytes
            line += f", and the peak changes by {(there - search.estimates[best].peak_bytes) / 1e6:+.3g} MB"
        lines.append(f"{line}.")
    if task.family() != "vision" and task.length() % 8:
        lines.append(f"{task.length()} tokens are no multiple of 8: pad to {-(-task.length() // 8) * 8}.")
    return lines
