"""The runner: measure trainings, inference and functions, each in fresh subprocesses, and keep the results as runs."""

import os
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from trainmem.core import hardware, progress
from trainmem.core.arguments import Arguments
from trainmem.core.dropped_settings import dropped
from trainmem.core.outcomes import Outcome
from trainmem.core.task import Task, choose_profile
from trainmem.core.training import Experiment, pickled
from trainmem.measure import executors
from trainmem.measure.forkserver import SERVER
from trainmem.records import Run, Store, now
from trainmem.texts import arguments_of_kind, positive, shown, whole_number
from trainmem.unknown import NeedsValues

METERS = ("memory", "peak", "time", "none", "value")
MOST_RANKS = 256  # ranks of a training on one machine, each a process


class Runner:
    """Measure trainings (`train`), inference (`infer`) and functions (`run`), each in a fresh subprocess; keep runs.

    Args:
        profile: "cpu", "t4" or "gpu": sets the default task and how long to measure; "auto" picks one for this machine.
        out: folder for the runs; empty: the user's cache folder.
        executor: a `concurrent.futures.Executor` that performs experiments elsewhere, e.g. `sweep.Workers`; each
            experiment gets a fresh subprocess on a worker, and its run describes the worker's machine. None: this
            machine.
        timeout: seconds that one experiment may take; None: the profile's timeout.

    Raises:
        ValueError: an unknown profile, or `out` is not a folder.
    """

    def __init__(
        self,
        profile: str = "auto",
        *,
        out: str | os.PathLike = "",
        executor: Executor | None = None,
        timeout: float | None = None,
    ):
        arguments_of_kind(Runner.__init__, locals())
        self.machine, self.versions = executors.seen_by(executor)
        if out and os.path.exists(out) and not os.path.isdir(out):
            raise ValueError(f"out={shown(str(out))} is not a folder: give one")
        self.profile = choose_profile(profile, self.machine)
        self.task = self.profile.task
        self.out, self.executor = str(out), executor
        self.timeout = positive("timeout", self.profile.timeout if timeout is None else timeout)
        self.runs: list[Run] = []
        self.store = Store(Path(self.out or hardware.cache_folder()) / "runs.jsonl")
        self._experiments: dict[str, Experiment] = {}
        if executor is None:
            SERVER.start()

    def __getstate__(self) -> dict[str, Any]:
        # A function that uses its runner is pickled with it. Each experiment holds a pickled function: with them, every
        # pickle would hold all earlier ones, and be twice as large as the one before.
        return self.__dict__ | {"_experiments": {}}

    def train(
        self,
        name: str,
        *,
        task: Task | None = None,
        optimizer: Callable | None = None,
        measure: str | Sequence[str] = ("memory", "time"),
        processes: int = 1,
        steps: int | None = None,
        timeout: float | None = None,
        **arguments,
    ) -> Run:
        """Train the task with transformers' Trainer, and return its memory and speed.

        Args:
            name: the run's name in tables and pictures.
            task: the model and its data; None: the runner's task.
            optimizer: function (model, training arguments) -> torch optimizer, for an optimizer that `optim` cannot
                name; None: the optimizer that `optim` names.
            measure: "memory" (two steps under the memory meter), "time" (warm-up and `steps` steps under the time
                meter, losses kept), or both. Each has its own fresh subprocess. "memory" usually has two: the first for
                the peak, the second for the breakdown by category. "peak" is "memory" without the breakdown, in one
                subprocess.
            processes: ranks, started by torch's elastic launcher (gloo on CPU, nccl on CUDA).
            steps: optimizer steps to time; None: the default of the runner's profile, e.g. 3 with the profile "cpu".
            timeout: seconds per experiment; None: the runner's timeout.
            arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

        Raises:
            ValueError: an unknown argument or a value out of range; it is raised before anything is built. A failure
                while the experiment runs (out of memory, a crash, a timeout) is not raised: see the run's `status`.
                Using a figure that such a run lacks raises `trainmem.unknown.RunFailed`.
        """
        arguments_of_kind(Runner.train, locals())
        parsed = Arguments.of(arguments, also=Runner.train.__annotations__)
        if self.machine.kind == "cpu" or parsed.get("use_cpu"):
            for text in parsed.passed_over_on_a_cpu:
                warnings.warn(text, stacklevel=2)
        for text in dropped(parsed.training):
            warnings.warn(text, stacklevel=2)
        optimizer = None if optimizer is None else pickled(optimizer)
        steps = self.profile.steps if steps is None else steps
        how = {"arguments": parsed, "optimizer": optimizer, "processes": processes, "steps": steps}
        return self._run(name, task, measure, timeout, **how)

    def infer(
        self,
        name: str,
        *,
        task: Task | None = None,
        measure: str | Sequence[str] = ("memory",),
        timeout: float | None = None,
        **arguments,
    ) -> Run:
        """Run forward passes without gradients, and return their memory and speed.

        A pass has `per_device_eval_batch_size` samples and counts as a step.

        Args:
            name: the run's name in tables and pictures.
            task: the model and its data; None: the runner's task.
            timeout: seconds per experiment; None: the runner's timeout.
            measure: as in `train`.
            arguments: names of `transformers.TrainingArguments`, plus `attn_implementation`, `dtype`, and
                `max_new_tokens`, with which a pass generates text.

        Raises:
            ValueError: an unknown argument or a value out of range. A failure while the experiment runs is not raised:
                see the run's `status`.
        """
        arguments_of_kind(Runner.infer, locals())
        parsed = Arguments.of(arguments, also=Runner.infer.__annotations__)
        return self._run(name, task, measure, timeout, arguments=parsed, training=False)

    def run(
        self,
        function: Callable[[Task], Any],
        name: str | None = None,
        *,
        task: Task | None = None,
        measure: str | Sequence[str] = ("memory", "time"),
        processes: int = 1,
        samples_per_step: int | None = None,
        use_cpu: bool = False,
        timeout: float | None = None,
    ) -> Run:
        """Run a function of your own, e.g. a training loop, in a fresh subprocess; return the same figures as `train`.

        Args:
            function: takes the task and returns a value that JSON can hold (`run.value`). It may be defined in a
                notebook and needs no measuring code. It is called once for each entry of `measure`, but for "memory"
                usually twice: for the peak, then for the breakdown. Each call has its own fresh subprocess.
            name: the run's name; None: the function's name.
            measure: as in `train`; or "value" or "none", which run the function without a meter. "value" is for a
                function of which you only want the result, e.g. the times from `interleaving.in_turns`. "none" is for a
                function that measures time with a clock, or whose ranks do. In a course, "none" makes other lessons
                wait until the function ends. With one rank, they wait from the function's first call of a clock on;
                with several ranks, they wait from the function's start on.
            samples_per_step: samples per optimizer step, over all processes; needed for samples per second.
            use_cpu: whether the function uses the CPU although there is a GPU; then the CPU's memory is counted.
            task, processes, timeout: as in `train`.

        Raises:
            ValueError: an argument that is out of range, or a function that cannot be sent to a subprocess.
        """
        arguments_of_kind(Runner.run, locals())
        name = name or getattr(function, "__name__", "function")
        how = {"function": pickled(function), "samples_of_function": samples_per_step, "processes": processes}
        parsed = Arguments.of({"use_cpu": True} if use_cpu else {})
        return self._run(name, task, measure, timeout, arguments=parsed, **how)

    def _run(self, name: str, task: Task | None, measure: str | Sequence[str], timeout: float | None, **more) -> Run:
        usual = {"steps": self.profile.steps, "warmup_steps": self.profile.warmup_steps}
        experiment = Experiment(name=name, task=task or self.task, **(usual | more))
        measure = (measure,) if isinstance(measure, str) else tuple(measure)
        if not measure or any(each not in METERS for each in measure):
            raise ValueError(f"measure={shown(measure)}: choose from {', '.join(map(repr, METERS))}")
        whole_number("processes", experiment.processes, most=MOST_RANKS)
        outcome = Outcome()
        try:
            for known in self._measured(experiment, measure, self.timeout if timeout is None else timeout):
                outcome = known
        except KeyboardInterrupt as interruption:
            message = "; ".join(["interrupted by the user", *getattr(interruption, "__notes__", ())])
            self.keep(experiment, outcome.replace(status="killed", message=message))
            raise
        if outcome.status == "invalid":
            raise ValueError(outcome.message)
        if outcome.status == "needs values":
            raise NeedsValues(outcome.message)
        if experiment.function and outcome.output:
            print(outcome.output, end="")
        if experiment.function and outcome.status in ("crashed", "timed out"):  # its value alone does not say why
            print(f"{experiment.name}: {outcome.message}", file=sys.stderr)
        return self.keep(experiment, outcome)

    def _measured(self, experiment: Experiment, measure: tuple[str, ...], timeout: float) -> Iterator[Outcome]:
        """Yield an outcome with all figures so far, after each meter in `measure`; `timeout`: seconds per meter."""
        if self.executor:  # all meters run in one place, and give one outcome
            yield self._perform(executors.measure, experiment, measure, timeout)
            return
        has_steps = {"memory", "peak", "time"} & {*measure}  # without a meter nothing counts them
        steps = experiment.steps + experiment.warmup_steps
        with progress.bar(experiment.name, steps, quiet=self._is_unwatched or not has_steps) as bar:
            text = progress.BarText(bar, experiment.samples_per_step)
            for known in executors.measured(experiment, measure, timeout, text.on_step):
                if known.memory:
                    text.measured(known.memory.peak_bytes)
                yield known

    def keep(self, experiment: Experiment, outcome: Outcome) -> Run:
        """Store an experiment's outcome as a `Run`, and return it. If the file of runs cannot be written, only warn."""
        same = ("status", "message", "memory", "timing", "losses", "value", "weights", "attempts")
        run = Run(
            **{field: getattr(outcome, field) for field in same},
            name=experiment.name,
            kind=experiment.kind,
            arguments=dict(experiment.arguments.given),
            task=experiment.task.to_dict(),
            samples_per_step=experiment.samples_per_step if experiment.training else None,
            ranks=tuple(map(_rank_summary, outcome.ranks)) or None,
            processes=experiment.processes,
            profile=self.profile.name,
            machine=outcome.machine or self.machine.to_dict(),
            versions=outcome.versions or self.versions,
            date=now(),
            id=uuid.uuid4().hex[:12],
        )
        self._experiments[run.id] = experiment
        self.runs.append(run)
        try:
            self.store.append(run)
        except OSError as error:
            remedy = f"Set {'out' if self.out else 'PERF_HELPERS_HOME'} to a folder that can be written to."
            print(f"The run was not saved in {self.store.path}: {error.strerror}. {remedy}", file=sys.stderr)
        return run

    def _perform(self, function, *arguments):
        if self.executor is None:
            return function(*arguments)
        return executors.outcome_of(executors.submit(self.executor, function, *arguments))

    @property
    def _is_unwatched(self) -> bool:
        """Whether to hide progress bars: True if experiments run on an executor, or if `out` names a folder."""
        return bool(self.executor or self.out)


def _rank_summary(outcome: Outcome) -> dict[str, Any]:
    peak, breakdown = (outcome.memory.peak_bytes, outcome.memory.breakdown) if outcome.memory else (None, None)
    return {"peak_bytes": peak, "breakdown": breakdown, "value": outcome.value}
