"""Share what estimates found out about operations with later estimates, through files in a folder.

A course run sets the folder, so that its lessons do not ask torch, or measure a workspace, twice. A fact is the result
of an operation on fake tensors (`OperationCache`), or its measured workspace on this CPU (`Probe`). Without the
environment variable `FOLDER`, nothing is shared.
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
    """Return the shared facts, {key: fact}; {} if nothing is shared.

    Facts that were found under other `answers.deciding_variables` are left out, and so are damaged files.
    """
    facts: dict[tuple, Any] = {}
    for file in _folder().iterdir() if FOLDER in os.environ and _folder().is_dir() else ():
        with contextlib.suppress(Exception):  # a damaged pickle may raise anything
            facts |= pickle.loads(file.read_bytes())
    return facts


def share(facts: dict[tuple, Any]) -> None:
    """Write those facts that other estimates can use into a new file of the folder, if there is a folder.

    A workspace is left out if it was assumed: a later estimate may have the time to measure it.
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
    """Return the folder of the present values of the variables that change what libraries do."""
    variables = repr(answers.deciding_variables()).encode()
    return Path(os.environ[FOLDER], hashlib.blake2b(variables, digest_size=8).hexdigest())
