"""List the library releases that this project was tested with, for code that warns about other releases."""

import importlib.metadata
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "perf-helpers"
COURSE = "course"  # the extra with the lessons' additional requirements
NEWEST_TORCH = "2.15"  # the newest tested release, with its CUDA allocator's rules and the rehearsal's stub


def requirements() -> "list[Requirement]":
    """Return the requirements of this project and of its course; the course's have a marker, `extra == "course"`.

    Raises:
        ImportError: the project's metadata is missing because it is not installed, or packaging is missing.
    """
    from packaging.requirements import Requirement

    every = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or ())
    return [each for each in every if not each.marker or each.marker.evaluate({"extra": COURSE})]


def is_untested_torch(version: str) -> bool:
    """Return whether a torch version, e.g. "2.16.0a0+git", is newer than every tested release."""
    numbers = [re.match(r"(\d+)\.(\d+)", text) for text in (version, NEWEST_TORCH)]
    if None in numbers:
        return True
    here, newest = ((int(found[1]), int(found[2])) for found in numbers)
    return here > newest
