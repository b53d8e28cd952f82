"""Call functions that trace trainings in fresh subprocesses, which know what earlier ones learned of operators.

`Knowledge.ask` is this process's side, `with_known` the subprocess's. Facts about operators (what they return, what
they allocate internally) hold types of torch, so they are pickled: only subprocesses read them.
"""

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from perf_helpers.estimate.memory_estimate import MemoryEstimate
from perf_helpers.lab import processes

Tell = Callable[[int], Any]  # is called with the percentage of the work that is done
_MOST_LEARNED_BYTES = 64 * 2**20  # kept from subprocesses


class Knowledge:
    """What this process keeps of its subprocesses: their estimates, and the facts that they learned about operators.

    With these facts a second question about a model takes a fraction of the time. Beyond a limit the oldest facts are
    dropped, and learned again when they are needed.
    """

    def __init__(self):
        self.estimates: dict[tuple, MemoryEstimate] = {}  # by experiment and device, in order
        self._learned: deque[bytes] = deque()  # the facts that `with_known` returns

    def ask(self, function: Callable, *arguments, model: str, timeout: float, on_percent: Tell | None = None) -> Any:
        """Return `function(*arguments, probe, tell)`, called in a fresh subprocess.

        Args:
            function: e.g. `peak_memory.estimate_experiment`.
            model: its name, for messages.
            timeout: seconds.
            on_percent: called with the percentage of the work that is done.

        Raises:
            ValueError: the function raised `Invalid`, or its process failed or took too long.
        """
        job = with_known, function, arguments, [*self._learned]
        try:
            answer, learned = processes.call(*job, timeout=timeout, on_percent=on_percent)
        except processes.Failed as failed:
            if failed.outcome.status == "timed out":
                raise ValueError(f"the estimate of {model} timed out ({failed}): raise timeout=") from None
            raise ValueError(f"{model} cannot be traced on fake tensors ({failed}): measure it instead") from None
        if learned:
            self._learned.append(learned)
        while sum(map(len, self._learned)) > _MOST_LEARNED_BYTES:
            self._learned.popleft()
        return answer


KNOWLEDGE = Knowledge()  # of this process: lessons, the advisor and the explorers' threads share it


def with_known(function: Callable, arguments: Sequence, learned: Sequence[bytes], tell: Tell) -> tuple[Any, bytes]:
    """Return `function(*arguments, probe, tell)`, and the facts about operators that it learned; b"" if there are none.

    To be called in a fresh subprocess. `learned`: the facts that earlier subprocesses returned.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they represent: no GPU is touched
    from perf_helpers.estimate.operator_workspaces import Probe

    facts: dict[tuple, Any] = {}  # what operators return (see `operation_cache`), and what they allocate internally
    for pickled in learned:
        facts.update(pickle.loads(pickled))
    before = set(facts)
    with contextlib.closing(Probe(known=facts)) as probe:
        answer = function(*arguments, probe, tell)
    new = added(facts, before)
    return answer, pickle.dumps(new) if new else b""


def added(facts: dict[tuple, Any], before: set[tuple]) -> dict[tuple, Any]:
    """Return the facts whose keys were not there before."""
    return {key: facts[key] for key in facts.keys() - before}
