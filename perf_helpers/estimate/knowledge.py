"""What is known of operations and models, kept here and used in clean processes.

A clean process begins with what earlier ones learnt (`Known`), and leaves what is new to the process that started it
(`Knowledge`): so the second question about a model takes a fraction of the time of the first.
"""

import os
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from perf_helpers.lab import processes
from perf_helpers.lab.task import Task

if TYPE_CHECKING:
    from perf_helpers.estimate.estimates import MemoryEstimate

Answer = TypeVar("Answer")


class Knowledge:
    """One for a process: see `KNOWLEDGE`.

    Args:
        most_bytes: how much of what was learnt is kept; beyond it the oldest is forgotten, and would be learnt again.
    """

    def __init__(self, most_bytes: int = 64 * 2**20):
        self.estimates: dict[tuple, MemoryEstimate] = {}  # by what was asked, in order
        self._most_bytes = most_bytes
        self._learned: deque[bytes] = deque()  # see `Known.news`

    def ask(
        self,
        function: Callable[..., Answer],
        *arguments,
        model: str,
        timeout: float,
        on_percent: Callable[[int], Any] | None = None,
    ) -> Answer:
        """What `function(*arguments, learned, tell=...)` answers in a clean process.

        Args:
            function: takes what earlier clean processes learnt, and returns something with an attribute `learned`, as
                `prediction.predict` does.
            model: as the user calls it, for messages.
            timeout: seconds that it may take.
            on_percent: called with how far the work is, from 0 to 100.

        Raises:
            ValueError: the function raised `Invalid`, or its process failed or took too long.
        """
        try:
            answer = processes.call(function, *arguments, [*self._learned], timeout=timeout, on_percent=on_percent)
        except processes.Failed as failed:
            if failed.outcome.status == "timed out":
                raise ValueError(f"{model} was given up, {failed}: give it more time with timeout=") from None
            raise ValueError(f"{model} cannot be followed on fake tensors: {failed}") from None
        self.keep(answer.learned)
        return answer

    def keep(self, learned: bytes) -> None:
        """Keep what a clean process learnt for the next ones."""
        if learned:
            self._learned.append(learned)
        while sum(map(len, self._learned)) > self._most_bytes:
            self._learned.popleft()


KNOWLEDGE = Knowledge()  # of this process, whoever asks: lessons, the advisor, the explorers' threads


class Known:
    """What is known in a clean process. As a context manager it ends what it started.

    Args:
        learned: what earlier clean processes learnt, each as its `news`.
    """

    def __init__(self, learned: Sequence[bytes] = ()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors are on a CPU, whatever they stand for: no GPU is touched
        from perf_helpers.estimate.cache import OperationCache
        from perf_helpers.estimate.probe import Probe

        self.cache: OperationCache = OperationCache()  # what operations make
        self.probe: Probe = Probe()  # what operations hide
        self.parameters: dict[str, int] = {}  # of models, by their task's identity
        for news in learned:
            for known, more in zip(self._all, pickle.loads(news), strict=True):
                known |= more
        self._before = [set(known) for known in self._all]

    @property
    def _all(self) -> tuple[dict, dict, dict]:
        return self.cache.known, self.probe.known, self.parameters

    def news(self) -> bytes:
        """What was learnt here, for later clean processes; b"" where it is nothing. Only they can read it: it holds
        types of torch."""
        news = [
            {key: known[key] for key in known.keys() - before}
            for known, before in zip(self._all, self._before, strict=True)
        ]
        return pickle.dumps(news) if any(news) else b""

    def parameters_of(self, task: Task) -> int:
        """How many numbers the weights of the task's model are."""
        key = task.replace(seq_len=None, dataset_size=1).identity()
        if key not in self.parameters:
            self.parameters[key] = task.parameters()
        return self.parameters[key]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.probe.close()
