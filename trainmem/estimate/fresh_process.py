"""Call functions that trace trainings in fresh subprocesses.

The caller uses `ask`. In the subprocess `with_probe` calls the function, with a probe that measures workspaces.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from trainmem.estimate import answers, facts
from trainmem.measure import processes

Tell = Callable[[int], Any]  # a function to call with the percentage of the work that is done


def ask(
    function: Callable,
    *arguments,
    model: str,
    timeout: float,
    on_percent: Tell | None = None,
) -> Any:
    """Call `function(*arguments, probe, tell)` in a fresh subprocess, and return its result.

    `probe` measures operator workspaces; `tell` takes the percentage of the work that is done. In the context
    `answers.stored`, the result may be the stored answer to an earlier, equal question. Only commands of the command
    line use this context.

    Args:
        function: the function to call, e.g. `peak_memory.estimate_experiment`.
        model: the model's name, for messages.
        timeout: seconds after which the subprocess is ended.
        on_percent: called with the percentage of the work that is done; None: progress is not reported.

    Raises:
        ValueError: the function raised `Invalid`, or its process failed or took too long.
    """
    call = functools.partial(processes.call, with_probe, function, arguments, timeout=timeout, on_percent=on_percent)
    try:
        return answers.remembered(function, arguments, call)
    except processes.Failed as failed:
        if failed.outcome.status == "timed out":
            raise ValueError(f"the estimate of {model} timed out ({failed}): raise timeout=") from None
        if failed.outcome.status != "crashed":
            raise ValueError(f"{model} cannot be traced on fake tensors ({failed}): measure it instead") from None
        raise ValueError(
            f"{model} failed while it was traced on fake tensors ({failed}): it may fail on a device, too, or only on "
            "fake tensors. `perf-helpers measure` shows which"
        ) from None


def with_probe(function: Callable, arguments: Sequence, tell: Tell) -> Any:
    """Return `function(*arguments, probe, tell)`, called in this subprocess with a new `operator_workspaces.Probe`.

    Args:
        tell: function to call with the percentage of the work that is done.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they represent: no GPU is touched
    from trainmem.estimate.operator_workspaces import Probe

    with contextlib.closing(Probe()) as probe:
        shared = facts.load()
        probe.known |= shared
        answer = function(*arguments, probe, tell)
        facts.share({key: fact for key, fact in probe.known.items() if key not in shared})
        return answer
