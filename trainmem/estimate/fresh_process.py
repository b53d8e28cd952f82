"""Call functions that trace trainings in fresh subprocesses, which know what earlier ones learned of operators.

`ask` is the caller's side, `with_known` the subprocess's.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from trainmem.measure import processes

Tell = Callable[[int], Any]  # is called with the percentage of the work that is done


def ask(
    function: Callable,
    *arguments,
    model: str,
    timeout: float,
    on_percent: Tell | None = None,
    is_saved: bool = True,
) -> Any:
    """Return `function(*arguments, probe, tell)`, called in a fresh subprocess.

    Args:
        function: e.g. `peak_memory.estimate_experiment`.
        model: its name, for messages.
        timeout: seconds.
        on_percent: called with the percentage of the work that is done.
        is_saved: whether to store what is learned of operators, see `with_known`.

    Raises:
        ValueError: the function raised `Invalid`, or its process failed or took too long.
    """
    job = with_known, function, arguments, is_saved
    try:
        return processes.call(*job, timeout=timeout, on_percent=on_percent)
    except processes.Failed as failed:
        if failed.outcome.status == "timed out":
            raise ValueError(f"the estimate of {model} timed out ({failed}): raise timeout=") from None
        raise ValueError(f"{model} cannot be traced on fake tensors ({failed}): measure it instead") from None


def with_known(function: Callable, arguments: Sequence, is_saved: bool, tell: Tell) -> Any:
    """Return `function(*arguments, probe, tell)` in this subprocess, which knows what earlier ones stored.

    Args:
        is_saved: whether to store what is learned. No: a user's own code may change what operators return.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they represent: no GPU is touched
    from trainmem.estimate.knowledge import Knowledge
    from trainmem.estimate.operator_workspaces import Probe

    known = Knowledge.load()
    with contextlib.closing(Probe(known=known)) as probe:
        answer = function(*arguments, probe, tell)
    if is_saved:
        known.save()
    return answer
