"""What this process knows of trainings that it asked about: the answers, and what clean processes learnt for them.

Clean processes begin with what earlier ones learnt of operations: so the second question about a model takes a fraction
of the time of the first.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from perf_helpers.lab import processes

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
        self._learned: deque[bytes] = deque()  # see `prediction.Known.news`: only clean processes read it

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
