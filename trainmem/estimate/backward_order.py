"""Let the backward passes of an estimate for CUDA run autograd's nodes in the order in which a GPU runs them.

Among nodes that are ready, autograd runs the one with the highest sequence number first. Each thread numbers the nodes
that it makes by a count of its own (ATen/SequenceNumber.h). On a CPU, backward passes run in the thread that calls
them. On a GPU, backward passes run in a thread of their own. So the nodes that a backward pass makes there for a later
backward pass (`create_graph`) have low numbers.
"""

import functools
from collections.abc import Callable, Sequence

import torch


class BackwardOrder:
    """Give nodes made during backward passes the sequence numbers that they would have on a GPU."""

    def __init__(self):
        self._first = torch._C._autograd._get_sequence_nr()
        self._spans: list[tuple[int, int]] = []  # the first number of each backward pass, and the first after it
        self._runs = False  # whether a backward pass runs

    def numbered(self, run: Callable) -> Callable:
        """Return a function that renumbers the nodes of a pass, then calls `run` (torch's `_engine_run_backward`)."""

        @functools.wraps(run)
        def call(outputs: Sequence[torch.Tensor], gradients, keeps_graph, makes_graph, *args, **options):
            args = gradients, keeps_graph, makes_graph, *args
            if self._runs:  # a checkpoint's backward inside another one
                return run(outputs, *args, **options)
            self._renumber([each.grad_fn for each in outputs if isinstance(each, torch.Tensor)])
            begin, self._runs = torch._C._autograd._get_sequence_nr(), True
            try:
                return run(outputs, *args, **options)
            finally:
                self._runs, end = False, torch._C._autograd._get_sequence_nr()
                if makes_graph:
                    self._spans.append((begin, end))

        return call

    def _renumber(self, nodes: list) -> None:
        """Give `nodes`, and all that follow them in a backward pass, the sequence numbers that nodes have on a GPU.

        Each node is renumbered only once. In torch before 2.15, numbers cannot be changed and stay as they are.
        """
        seen = set()
        while self._spans and nodes:
            node = nodes.pop()
            if node is None or node in seen or "renumbered" in node.metadata or not hasattr(node, "_set_sequence_nr"):
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            number = node._sequence_nr()
            earlier = sum(min(end, number) - begin for begin, end in self._spans if begin <= number)
            if earlier and number < torch._C._autograd._get_sequence_nr():  # a node that adds to `grad` always is first
                is_within = any(begin <= number < end for begin, end in self._spans)
                node._set_sequence_nr(self._first + earlier if is_within else number - earlier)
                node.metadata["renumbered"] = True
