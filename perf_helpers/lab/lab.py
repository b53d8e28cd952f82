"""The lab: runs experiments in clean processes, keeps what they yield, and compares them."""

import os
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

from perf_helpers import plots
from perf_helpers.lab import doctor, executors, hardware, processes, progress
from perf_helpers.lab.arguments import Arguments
from perf_helpers.lab.forkserver import SERVER
from perf_helpers.lab.interleaving import NO_TIME
from perf_helpers.lab.outcomes import Outcome
from perf_helpers.lab.task import Task, choose_profile
from perf_helpers.lab.training import Experiment, pickled
from perf_helpers.records import CPU, WALL, Comparison, Ratio, Run, Store, now
from perf_helpers.texts import arguments_of_kind, of_kind, positive, shown, whole_number
from perf_helpers.unknown import NeedsValues, RunFailed, Unknown

Answer = TypeVar("Answer")

# Effects below this factor are not told from noise by the wall's clock. On a shared 2-core CPU the same code, on one
# thread and in turns with itself, gave ratios of 0.97 to 1.07 at best; a busy neighbour made it worse: 1.3 there.
NOISE_FLOOR = {"cpu": 1.3, "cuda": 1.02}
# By CPU time and inside one process the same code is told apart by less; a comparison measures by how much.
LEAST_FLOOR = 1.05
PROCESSES = 4  # of a comparison on a CPU
MOST_RANKS = 256  # of a training on one machine, each a process
PATIENCE_SECONDS = 120  # that a lab waits for estimates that never come


class Lab:
    """Runs experiments, one clean process each.

    Args:
        profile: "auto", "cpu", "t4" or "gpu": the task and the lengths of measurement.
        strict: let `claims.finish` raise when a verdict is not the expected one.
        out: folder for results; empty: runs are kept in the user's cache folder and nothing else is written.
        lesson: name of the lesson, e.g. "05_gradient_accumulation".
        executor: a `concurrent.futures.Executor` that performs experiments elsewhere, as `sweep.Workers` and Dask's own
            do; each still gets a clean process there, and its run has that machine. None: here.
        timeout: seconds that one experiment, or one comparison, may take; None: the profile's.

    Raises:
        ValueError: no such profile.
    """

    def __init__(
        self,
        profile: str = "auto",
        *,
        strict: bool = False,
        out: str | os.PathLike = "",
        lesson: str = "",
        executor: Executor | None = None,
        timeout: float | None = None,
    ):
        arguments_of_kind(Lab.__init__, locals())
        self.machine, self.versions = executors.seen_by(executor)
        if out and os.path.exists(out) and not os.path.isdir(out):
            raise ValueError(f"out={shown(str(out))}: give a folder")
        self.profile = choose_profile(profile, self.machine)
        self.task = self.profile.task
        self.strict, self.out, self.lesson = strict, str(out), lesson
        self.executor = executor
        self.timeout = positive("timeout", self.profile.timeout if timeout is None else timeout)
        self.runs: list[Run] = []
        self.store = Store(Path(self.out or hardware.cache_folder()) / "runs.jsonl")
        self._experiments: dict[str, Experiment] = {}
        self._patience = PATIENCE_SECONDS
        self._has_rehearsed_turns = False  # once is enough to see that they run
        if executor is None:
            SERVER.start()
        plots.give_words()

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
        """Train the task with transformers' Trainer and return what it took.

        Args:
            name: what the run is called in tables and pictures.
            task: another task than the lab's.
            optimizer: function (model, training arguments) -> torch optimizer, for one that `optim` does not name.
            measure: "memory" (two steps under the memory meter), "time" (warm-up and `steps` steps under the time
                meter, losses kept), each in a clean process of its own.
            processes: ranks, started by torch's elastic launcher (gloo on CPU, nccl on CUDA).
            steps: optimizer steps to time; default: the profile's.
            arguments: names of `transformers.TrainingArguments`, plus `attn_implementation` and `dtype`.

        Raises:
            ValueError: an unknown argument or a value out of range, before anything is built. What goes wrong while the
                experiment runs (out of memory, a crash, a timeout) is no exception: it is the run's status. Using a
                figure that such a run lacks raises `perf_helpers.unknown.RunFailed`.
        """
        arguments_of_kind(Lab.train, locals())
        told = Arguments.of(arguments, also=Lab.train.__annotations__)
        if self.machine.kind == "cpu" or told.get("use_cpu"):
            for text in told.passed_over_on_a_cpu:
                warnings.warn(text, stacklevel=2)
        optimizer = None if optimizer is None else pickled(optimizer)
        steps = self.profile.steps if steps is None else steps
        how = {"arguments": told, "optimizer": optimizer, "processes": processes, "steps": steps}
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
        """Forward passes without gradients, `per_device_eval_batch_size` samples each, and what they took.

        Arguments and errors are those of `train`; each pass is a step.
        """
        arguments_of_kind(Lab.infer, locals())
        told = Arguments.of(arguments, also=Lab.infer.__annotations__)
        return self._run(name, task, measure, timeout, arguments=told, training=False)

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
        """Run a function of one's own, e.g. a training loop, in a clean process; same figures as `train`.

        Args:
            function: takes the task and returns something that JSON can hold (`run.value`). It may be defined in a
                notebook. Each entry of `measure` calls it in a clean process of its own (memory on CPU: in two, see
                `memory_meter.MemoryMeter`); it needs no measuring code.
            measure: as in `train`; ("none",) runs it once with no meter.
            samples_per_step: samples that one optimizer step sees (all processes together), for samples per second.
            use_cpu: the function uses the CPU although there is a GPU: its memory is what is counted.
        """
        arguments_of_kind(Lab.run, locals())
        name = name or getattr(function, "__name__", "function")
        how = {"function": pickled(function), "samples_of_function": samples_per_step, "processes": processes}
        told = Arguments.of({"use_cpu": True} if use_cpu else {})
        return self._run(name, task, measure, timeout, arguments=told, **how)

    def compare(
        self,
        baseline: Run,
        *others: Run,
        turns: int | None = None,
        steps_per_turn: int = 1,
        timeout: float | None = None,
    ) -> Comparison | list[Comparison]:
        """Runs of this lab against a baseline: memory exactly, speed by letting them take turns.

        On a CPU all of them, and the baseline once more, take turns inside one clean process, on one thread, and so in
        several processes. The speed ratio is that of the seconds computed, the median of all pairs; its interval a
        bootstrap over processes and pairs, widened by the noise floor: what the baseline differed from itself, at least
        1.05. `wall_ratio` is the same by the wall's clock. On GPUs, and between several ranks, each of two has a
        process of its own; the clock decides, and the floor is the runs' `noise_floor`.
        What could not be measured is unknown, and says why: a comparison that fails is no exception. To decide by it
        raises `perf_helpers.unknown.RunFailed`.

        Args:
            others: one gives a comparison, several a list of them.
            turns: of each run, on a CPU shared out among the processes; default: the profile's.
            steps_per_turn: optimizer steps in a turn, of which the fastest counts.
            timeout: seconds for all that take turns at once; default: the lab's, for each of the others.
        """
        for run in (baseline, *others):
            of_kind("a run to compare", run, Run)
            if run.id not in self._experiments:
                raise ValueError(f"{run.name!r} was not run by this lab: run it with lab.train or lab.run first")
        if not others:
            raise ValueError(f"{baseline.name!r} is alone: give a run to compare it with")
        turns = whole_number("turns", self.profile.turns if turns is None else turns)
        positive("timeout", 1 if timeout is None else timeout)
        how = turns, whole_number("steps_per_turn", steps_per_turn), timeout
        at_once = [run for run in others if baseline.ok and run.ok and self._is_inside_one(baseline, run)]
        known = dict(zip([run.id for run in at_once], self._speeds(baseline, at_once, *how), strict=True))
        found = []
        for run in others:
            failed = " ".join(each.failure for each in (baseline, run) if not each.ok)
            error = self._error if failed else NeedsValues
            if baseline.peak_bytes and run.peak_bytes:
                memory_ratio = run.peak_bytes / baseline.peak_bytes
            else:
                memory_ratio = Unknown(f"memory not measured: {failed or 'nobody asked for it'}", error)
            if failed:
                speed = (Ratio.unknown(f"speed not measured: {failed}", error),)
            else:
                speed = known.get(run.id) or self._speeds(baseline, [run], *how)[0]
            found.append(Comparison(baseline, run, memory_ratio, *speed))
        return found if len(others) > 1 else found[0]

    def noise_floor(self, *runs: Run) -> float:
        """The factor within which the speeds of these runs are not told apart; without runs, that of the machine."""
        return NOISE_FLOOR["cpu" if self._on_cpu(*runs) else "cuda"]

    def ratio(self, pairs: Sequence[float], *runs: Run) -> Ratio:
        """A ratio from pairs measured in turns: median, bootstrap interval, widened by the `noise_floor` of the runs.

        It is unknown where a pair is.
        """
        return Ratio.of_pairs(pairs, self.noise_floor(*runs))

    def foresee(self, question: Callable[..., Answer], *arguments, seconds: float = 60, **options) -> Answer | None:
        """The answer to a question that trains nothing: an estimate, an advice, an explorer made of them.

        A lesson does not depend on it. Where it is refused, fails or takes longer than `seconds`, one line says so, and
        the answer is None. A lab waits two minutes at most for answers that never come, all questions together. A
        strict lab raises instead, where the packages installed are supported ones.

        Args:
            question: called with the arguments and options, e.g. `lab.foresee(estimate, task, bf16=True)`.
        """
        began = time.monotonic()
        try:
            if self._patience <= 0:
                raise TimeoutError("earlier ones took too long, this one was not waited for")
            with processes.within(min(seconds, self._patience)), progress.hidden(bool(self.out)):
                return question(*arguments, **options)
        except Exception as error:
            self._patience -= time.monotonic() - began
            if self.strict and doctor.is_supported():
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            print(f"no estimate: {reason}")
            return None

    def __getitem__(self, name: str) -> Run:
        """The latest run of that name."""
        for run in reversed(self.runs):
            if run.name == name:
                return run
        raise KeyError(f"no run {name!r} yet; there are {', '.join(run.name for run in self.runs) or 'none'}")

    def _run(self, name: str, task: Task | None, measure: str | Sequence[str], timeout: float | None, **more) -> Run:
        usual = {"steps": self.profile.steps, "warmup_steps": self.profile.warmup_steps}
        experiment = Experiment(name=name, task=task or self.task, **(usual | more))
        measure = (measure,) if isinstance(measure, str) else tuple(measure)
        if not measure or any(each not in ("memory", "time", "none") for each in measure):
            raise ValueError(f"measure={shown(measure)}: choose from 'memory', 'time', 'none'")
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
        if experiment.function and outcome.status in ("crashed", "timed out"):  # its value alone says not why
            print(f"{experiment.name}: {outcome.message}", file=sys.stderr)
        return self.keep(experiment, outcome)

    def _measured(self, experiment: Experiment, measure: tuple[str, ...], timeout: float) -> Iterator[Outcome]:
        """What is known of the experiment after each of the meters, until one of them fails."""
        if self.executor:  # one place for all meters
            yield self._perform(executors.measure, experiment, measure, timeout)
            return
        quiet = self._is_unwatched or measure == ("none",)  # without a meter there are no steps to tell
        with progress.bar(experiment.name, experiment.steps + experiment.warmup_steps, quiet=quiet) as bar:
            text = progress.BarText(bar, experiment.samples_per_step)
            for known in executors.measured(experiment, measure, timeout, text.on_step):
                if known.memory:
                    text.measured(known.memory.peak_bytes)
                yield known

    def keep(self, experiment: Experiment, outcome: Outcome) -> Run:
        """Make a run of what was measured, here or elsewhere, and store it."""
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
            print(f"The run could not be kept in {self.store.path}: {error.strerror}.", file=sys.stderr)
        return run

    def _perform(self, function, *arguments):
        if self.executor is None:
            return function(*arguments)
        return executors.outcome_of(executors.submit(self.executor, function, *arguments))

    def _speeds(
        self, baseline: Run, others: Sequence[Run], turns: int, steps_per_turn: int, timeout: float | None
    ) -> list[tuple]:
        """What the `Comparison` of each of the others with the baseline says of speed: all take turns at once."""
        if not others or (self.machine.rehearsed and self._has_rehearsed_turns):
            return [(Ratio.unknown(NO_TIME),)] * len(others)
        runs = [baseline, *others]
        inside_one = self._is_inside_one(*runs)
        changes: dict[str, Any] = {"threads": 1 if self._on_cpu(*runs) else None}
        if self.machine.rehearsed:  # one turn shows that they run, which is all that can be seen
            self._has_rehearsed_turns, turns, steps_per_turn = True, 1, 1
            changes["warmup_steps"] = 1
        of_runs = [self._experiments[run.id] for run in runs]
        endless = [each.arguments.without("max_steps", "num_train_epochs") for each in of_runs]
        players = [each.replace(arguments=given, **changes) for each, given in zip(of_runs, endless, strict=True)]
        if inside_one:
            players, turns = [*players, players[0]], -(-turns // PROCESSES)
        total = len(players) * (turns + 1) * (PROCESSES if inside_one else 1)
        what = f"{baseline.name} and {others[0].name if len(others) == 1 else f'{len(others)} others'} in turns"
        with progress.bar(what, total, "turn", quiet=self._is_unwatched) as bar:
            told = None if self.executor else lambda number: bar.update(number - bar.n)
            how = players, turns, steps_per_turn, timeout if timeout is not None else self.timeout * len(others), told
            if inside_one:
                outcome = self._perform(processes.side_by_side, *how, PROCESSES, min(2, self.machine.cpu_cores or 1))
            else:
                outcome = self._perform(processes.alternate, *how)
        if not outcome.ok:
            reason = Run(what, outcome.status, outcome.message).failure
            print(f"Speed not measured: {reason}", file=sys.stderr)
            return [(Ratio.unknown(f"speed not measured: {reason}", self._error),)] * len(others)
        found, clock = [], CPU if inside_one else WALL
        for which, (run, experiment) in enumerate(zip(others, of_runs[1:], strict=True), 1):
            samples = [each.samples_per_step for each in (of_runs[0], experiment)]
            per_sample = samples[1] / samples[0] if all(samples) else 1.0
            three = [[process[0], process[which], process[-1]] for process in outcome.value]
            if inside_one:
                ratios = [Ratio.of_turns(three, each, LEAST_FLOOR, per_sample) for each in (CPU, WALL)]
            else:
                pairs = zip(*three[0][:2], strict=True)
                ratios = [self.ratio([a[WALL] / b[WALL] * per_sample for a, b in pairs], baseline, run), None]
            steps = [min((turn[clock] for each in three for turn in each[player]), key=float) for player in (0, 1)]
            found.append((*ratios, tuple(steps)))
        return found

    def _is_inside_one(self, *runs: Run) -> bool:
        """Whether these runs take turns inside one process."""
        return self._on_cpu(*runs) and not self.machine.rehearsed and max(run.processes for run in runs) == 1

    @property
    def _error(self) -> type[RuntimeError]:
        """What a ratio raises that is unknown because a run failed. A rehearsal leaves out whatever needs a ratio."""
        return NeedsValues if self.machine.rehearsed else RunFailed

    @property
    def _is_unwatched(self) -> bool:
        """Whether no bars are shown: experiments run elsewhere, or results are written where nobody looks on."""
        return bool(self.executor or self.out)

    def _on_cpu(self, *runs: Run) -> bool:
        """Whether one of these runs computed on the CPU, which a machine with a GPU has too: it was told to, or there
        are fewer GPUs than ranks, which then talk by gloo. A function that has a GPU and leaves it idle does not tell.
        """
        gpus = max(1, len(self.machine.gpus)) if self.machine.kind == "cuda" else 0
        return not gpus or any(run.arguments.get("use_cpu") or run.processes > gpus for run in runs)


def _rank_summary(outcome: Outcome) -> dict[str, Any]:
    memory = outcome.memory
    breakdown = memory and memory.breakdown
    return {"peak_bytes": memory and memory.peak_bytes, "breakdown": breakdown, "value": outcome.value}
