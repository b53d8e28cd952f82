"""Share what estimates found out about operations with later estimates, through files in a folder.

A fact is the result of an operation on fake tensors (`OperationCache`), or an operation's workspace on this CPU, as
measured by `Probe`. The environment variable PERF_HELPERS_FACTS names the folder; if it is not set, nothing is shared.
A run of the course sets it, so that one lesson can use the facts that another lesson has found.
"""

import contextlib
import hashlib
import os
import pickle
import uuid
from pathlib import Path
from typing import Any

from trainmem.estimate import answers
from trainmem.records import write_whole

FOLDER = "PERF_HELPERS_FACTS"  # environment variable: a folder for the facts of this machine and these libraries
# Operations that the installed libraries define; a user's own operator may change between two estimates.
_OF_LIBRARIES = ("aten.", "bitsandbytes.")


def load() -> dict[tuple, Any]:
    """Return the shared facts, {key in `OperationCache` or `Probe`: fact}; {} if nothing is shared.

    A fact is left out if one of the environment variables in `answers.deciding_variables` had another value when the
    fact was found. Damaged files are skipped.
    """
    facts: dict[tuple, Any] = {}
    for file in _folder().iterdir() if FOLDER in os.environ and _folder().is_dir() else ():
        with contextlib.suppress(Exception):  # a damaged pickle may raise anything
            facts |= pickle.loads(file.read_bytes())
    return facts


def share(facts: dict[tuple, Any]) -> None:
    """Write the facts about operations of torch and bitsandbytes into a new file, if a folder for facts is set.

    A workspace that is unknown or was assumed is left out, because a later estimate may have the time to measure it. A
    failure to write the file is ignored.
    """
    lasting = {
        key: fact
        for key, fact in facts.items()
        if key[1].startswith(_OF_LIBRARIES) and getattr(fact, "how", "measured") in ("measured", "line")
    }
    if lasting and FOLDER in os.environ:
        with contextlib.suppress(OSError):
            write_whole(_folder() / f"{uuid.uuid4()}.pickle", pickle.dumps(lasting))


def _folder() -> Path:
    """Return the folder of the facts found with the present environment variables (`answers.deciding_variables`)."""
    variables = repr(answers.deciding_variables()).encode()
    return Path(os.environ[FOLDER], hashlib.blake2b(variables, digest_size=8).hexdigest())
