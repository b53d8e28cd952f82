"""The lab of a lesson (`Lab`): it runs and compares experiments. If an estimate fails, the lesson goes on."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from perf_helpers import plots
from perf_helpers.lab import doctor
from trainmem.core import progress
from trainmem.core.outcomes import Outcome
from trainmem.core.task import TINY
from trainmem.core.training import Experiment
from trainmem.measure import processes, quiet
from trainmem.measure.interleaving import NO_TIME, NOISE_FLOOR, Seconds
from trainmem.measure.runner import Runner
from trainmem.records import CPU, WALL, Comparison, Ratio, Run
from trainmem.texts import arguments_of_kind, of_kind, positive, whole_number
from trainmem.unknown import NeedsValues, RunFailed, Unknown

Answer = TypeVar("Answer")

# The smallest noise floor of a comparison inside one process, in CPU time; a comparison measures its own noise.
LEAST_FLOOR = 1.05
PROCESSES = 4  # subprocesses per comparison on a CPU
PATIENCE_SECONDS = 120  # time limit of all failed estimates of a lab together


class Lab(Runner):
    """Run experiments, each in a fresh subprocess, and compare them.

    Args:
        profile: "cpu", "t4" or "gpu": sets the default task and how long to measure. "auto" picks one for this machine.
        strict: let `Claims.finish` raise when a verdict is not the expected one.
        out: folder for results; empty: runs are kept in the user's cache folder and nothing else is written.
        lesson: name of the lesson, e.g. "05_gradient_accumulation".
        executor: a `concurrent.futures.Executor` that performs experiments elsewhere, e.g. `sweep.Workers`. There, each
            experiment gets a fresh subprocess, and its run records that machine. None: experiments run here.
        timeout: seconds that one experiment, or one comparison, may take; None: the profile's.

    Raises:
        ValueError: an unknown profile, or `out` is not a folder.
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
        super().__init__(profile, out=out, executor=executor, timeout=timeout)
        self.strict, self.lesson = strict, lesson
        self.guess_units: dict[str, str] = {}  # {key of a guess in the lesson: its unit}
        self._patience = PATIENCE_SECONDS  # what is left of them
        self._has_rehearsed_turns = False  # a rehearsal only checks that interleaved runs work, so it does one
        plots.add_alternative_texts()

    def compare(
        self,
        baseline: Run,
        *others: Run,
        turns: int | None = None,
        steps_per_turn: int = 1,
        timeout: float | None = None,
    ) -> Comparison | list[Comparison]:
        """Compare runs of this lab with a baseline: peak memory exactly, speed by interleaved (A/B) runs.

        On a CPU, several subprocesses each interleave all runs, on one thread. In a round each of `others` has one turn
        of `steps_per_turn` steps, and the baseline has two. The time of a turn is the CPU time of its fastest step. A
        round's ratio is the mean time of the baseline's two turns, divided by the time of the other run's turn. The
        speed ratio is the median over all rounds; `wall_ratio` uses the wall clock instead. The bootstrap interval
        always includes ratio divided by f and ratio times f. Here f is the median factor between the baseline's two
        turns, but at least 1.05. On a GPU, and with several ranks, each run has its own process, the ratio uses the
        wall clock, and f is `Lab.noise_floor` of the two runs. If a comparison fails, its ratios are unknown and hold
        the reason; branching on such a ratio raises `trainmem.unknown.RunFailed`.

        Args:
            baseline: the run that the others are compared with.
            others: one run gives a comparison, several give a list of comparisons.
            turns: turns per run (default: the profile's); on a CPU they are divided among the subprocesses.
            steps_per_turn: optimizer steps per turn.
            timeout: seconds for all of `others` together; on a GPU, for each. None: the lab's timeout for each.

        Raises:
            ValueError: a run belongs to another lab, no other run is given, or a number is out of range.
        """
        for run in (baseline, *others):
            of_kind("a run to compare", run, Run)
            if run.id not in self._experiments:
                raise ValueError(f"{run.name!r} is not a run of this lab: run it first, with lab.train or lab.run")
        if not others:
            raise ValueError(f"nothing to compare {baseline.name!r} with: give another run")
        turns = whole_number("turns", self.profile.turns if turns is None else turns)
        positive("timeout", 1 if timeout is None else timeout)
        options = turns, whole_number("steps_per_turn", steps_per_turn), timeout
        at_once = [run for run in others if baseline.ok and run.ok and self._is_inside_one(baseline, run)]
        known = dict(zip([run.id for run in at_once], self._speeds(baseline, at_once, *options), strict=True))
        found = []
        for run in others:
            failed = " ".join(each.failure for each in (baseline, run) if not each.ok)
            error = self._error if failed else NeedsValues
            if baseline.peak_bytes and run.peak_bytes:
                memory_ratio = run.peak_bytes / baseline.peak_bytes
            else:
                memory_ratio = Unknown(f"memory not measured: {failed or 'add it to measure='}", error)
            if failed:
                speed = _Speed(Ratio.unknown(f"speed not measured: {failed}", error))
            else:
                speed = known.get(run.id) or self._speeds(baseline, [run], *options)[0]
            found.append(Comparison(baseline, run, memory_ratio, speed.ratio, speed.wall_ratio, speed.step_seconds))
        return found if len(others) > 1 else found[0]

    def noise_floor(self, *runs: Run) -> float:
        """Return the factor within which speeds count as equal: 1.02; 1.3 if a run used the CPU or there is no GPU."""
        return NOISE_FLOOR["cpu" if self._on_cpu(*runs) else "cuda"]

    def ratio(self, pairs: Sequence[float], *runs: Run) -> Ratio:
        """Return the median of `pairs` with a bootstrap interval, which always includes median / f and median * f.

        f is `noise_floor(*runs)`. `pairs`: a speed ratio per pair of interleaved measurements; `runs`: the compared
        runs. If one of `pairs` is unknown, the result is unknown too. Raises ValueError for fewer than 3 `pairs`.
        """
        return Ratio.of_pairs(pairs, self.noise_floor(*runs))

    def foresee(self, question: Callable[..., Answer], *arguments, seconds: float = 60, **options) -> Answer | None:
        """Call a function that predicts without training; return its answer: `lab.foresee(estimate, task, bf16=True)`.

        If the call fails or takes longer than `seconds`, print one line and return None, so that the lesson goes on.
        All failed calls of a lab together take two minutes at most; later calls are skipped. If the lab is `strict`,
        raise the call's error instead of printing, unless an installed package is outside the supported versions.

        Args:
            question: the function; it is called with `arguments` and `options`.
            seconds: time limit of this call.
        """
        start = time.monotonic()
        try:
            if self._patience <= 0:
                raise TimeoutError(f"skipped, because earlier ones took {PATIENCE_SECONDS} s together")
            with (
                quiet.experiment(quiet.Need.SHARE),
                processes.within(min(seconds, self._patience)),
                progress.hidden(bool(self.out)),
            ):
                return question(*arguments, **options)
        except Exception as error:
            self._patience -= time.monotonic() - start
            if self.strict and doctor.is_supported():
                raise
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            print(f"no estimate: {reason}")
            return None

    def sized(self, usual: Any, smallest: Any) -> Any:
        """Return `smallest` if the profile is "tiny" (which only tests that a lesson runs), otherwise `usual`."""
        return smallest if self.profile.name == TINY.name else usual

    def quiet(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a notebook may time code itself; meanwhile, the course's other lessons wait."""
        return quiet.experiment(quiet.Need.MACHINE)

    def __getitem__(self, name: str) -> Run:
        """Return the latest run called `name`. Raises KeyError if there is none."""
        for run in reversed(self.runs):
            if run.name == name:
                return run
        raise KeyError(f"no run is called {name!r}; runs so far: {', '.join(run.name for run in self.runs) or 'none'}")

    def _speeds(
        self, baseline: Run, others: Sequence[Run], turns: int, steps_per_turn: int, timeout: float | None
    ) -> list["_Speed"]:
        """Time the baseline and `others` in turns; return the speed of each of `others` relative to the baseline.

        If the timing fails, print why; the ratios are then unknown. `turns`, `steps_per_turn`: see `_interleaved`;
        `timeout`: seconds for all runs together (None: the lab's timeout times the number of `others`).
        """
        if not others or (self.machine.rehearsed and self._has_rehearsed_turns):
            return [_Speed(Ratio.unknown(NO_TIME))] * len(others)
        if self.machine.rehearsed:  # there are no times, so one turn is enough to check that the runs work
            self._has_rehearsed_turns, turns, steps_per_turn = True, 1, 1
        name = f"{baseline.name} and {others[0].name if len(others) == 1 else f'{len(others)} others'} in turns"
        timeout = self.timeout * len(others) if timeout is None else timeout
        outcome = self._interleaved(name, [baseline, *others], turns, steps_per_turn, timeout)
        if not outcome.ok:
            reason = Run(name, outcome.status, outcome.message).failure
            print(f"Speed not measured: {reason}", file=sys.stderr)
            return [_Speed(Ratio.unknown(f"speed not measured: {reason}", self._error))] * len(others)
        if self._is_inside_one(baseline, *others):  # the last player is the baseline again
            triples = [[[own[0], own[i], own[-1]] for own in outcome.value] for i in range(1, len(others) + 1)]
            return [self._speed_inside_one(baseline, *each) for each in zip(others, triples, strict=True)]
        (seconds,) = outcome.value
        return [self._speed_apart(baseline, *each, seconds[0]) for each in zip(others, seconds[1:], strict=True)]

    def _interleaved(self, name: str, runs: list[Run], turns: int, steps_per_turn: int, timeout: float) -> Outcome:
        """Time runs in turns; return an `Outcome` whose `value[process][run][turn]` is a `Seconds` (wall, CPU).

        A turn is `steps_per_turn` optimizer steps of one run; its `Seconds` are those of the fastest step. Then another
        run has a turn. On a CPU, all runs take turns inside one process, with one thread per run, and several processes
        repeat this. There, `value[process]` has one more entry at its end: more turns of the baseline (the first run).
        Their times differ from those in the first entry only by noise. On a GPU, and with several ranks, each run has
        its own process; `value` has one entry, value[0], with all runs. `turns`: least number of turns of each run,
        summed over the processes. `timeout`: seconds for all turns together. `name`: text of the progress bar.
        """
        players, inside_one = self._players(runs), self._is_inside_one(*runs)
        if inside_one:
            players, turns = [*players, players[0]], -(-turns // PROCESSES)
        done, count = (1, 1) if quiet.is_untimed() else (turns, PROCESSES)  # untimed: only check that the runs work
        total = len(players) * (done + 1) * (count if inside_one else 1)
        with (
            progress.bar(name, total, "turn", quiet=self._is_unwatched) as bar,
            quiet.experiment(quiet.Need.SHARE if inside_one else quiet.Need.MACHINE),
        ):
            on_turn = None if self.executor else lambda number: bar.update(number - bar.n)
            options = players, done, steps_per_turn, timeout, on_turn
            if inside_one:
                outcome = self._perform(processes.side_by_side, *options, count, min(2, self.machine.cpu_cores or 1))
            else:
                outcome = self._perform(processes.alternate, *options)
        if not outcome.ok:
            return outcome
        taken = [[each * (turns // done) for each in process] for process in outcome.value]
        return outcome.replace(value=taken * (PROCESSES // count) if inside_one else taken)

    def _players(self, runs: list[Run]) -> list[Experiment]:
        """Return the experiments of `runs`, changed for timing: no limit on steps or epochs, one thread on a CPU."""
        changes: dict[str, Any] = {"threads": 1 if self._on_cpu(*runs) else None}
        if self.machine.rehearsed:
            changes["warmup_steps"] = 1
        experiments = [self._experiments[run.id] for run in runs]
        endless = [each.arguments.without("max_steps", "num_train_epochs") for each in experiments]
        return [each.replace(arguments=given, **changes) for each, given in zip(experiments, endless, strict=True)]

    def _speed_inside_one(self, baseline: Run, run: Run, triples: list[list[list[Seconds]]]) -> "_Speed":
        """Return the speed of `run` relative to `baseline`; both took turns inside each of several processes.

        `triples`: for each process three lists (baseline, run, baseline again) with the `Seconds` of each turn.
        """
        samples = self._samples_ratio(baseline, run)
        ratios = [Ratio.of_turns(triples, clock, LEAST_FLOOR, samples) for clock in (CPU, WALL)]
        first, second, _ = zip(*triples, strict=True)
        return _Speed(*ratios, (_fastest(first, CPU), _fastest(second, CPU)))

    def _speed_apart(self, baseline: Run, run: Run, of_run: list[Seconds], of_baseline: list[Seconds]) -> "_Speed":
        """Return `run`'s speed relative to `baseline` by the `Seconds` of each turn, for two runs in two processes."""
        samples = self._samples_ratio(baseline, run)
        pairs = [a[WALL] / b[WALL] * samples for a, b in zip(of_baseline, of_run, strict=True)]
        fastest = _fastest([of_baseline], WALL), _fastest([of_run], WALL)
        return _Speed(self.ratio(pairs, baseline, run), step_seconds=fastest)

    def _samples_ratio(self, baseline: Run, run: Run) -> float:
        """Return the samples per step of a run divided by those of the baseline; 1 if either is unknown."""
        samples = [self._experiments[each.id].samples_per_step for each in (run, baseline)]
        return samples[0] / samples[1] if all(samples) else 1.0

    def _is_inside_one(self, *runs: Run) -> bool:
        """Return whether these runs are interleaved inside one process: on a CPU, with one rank each, not rehearsed."""
        return self._on_cpu(*runs) and not self.machine.rehearsed and max(run.processes for run in runs) == 1

    @property
    def _error(self) -> type[RuntimeError]:
        """Return the class of the exception to raise when code uses a ratio that is unknown because a run failed.

        The class is RunFailed; in a rehearsal it is NeedsValues, so that statements that need the ratio are skipped.
        """
        return NeedsValues if self.machine.rehearsed else RunFailed

    def _on_cpu(self, *runs: Run) -> bool:
        """Return whether one of these runs computed on the CPU.

        With a GPU, a run computes on the CPU in two cases: `use_cpu` is set, or the run has more ranks than there are
        GPUs (the ranks then use gloo). A function (`Lab.run`) that leaves the GPU unused still counts as on the GPU.
        """
        gpus = max(1, len(self.machine.gpus)) if self.machine.kind == "cuda" else 0
        return not gpus or any(run.arguments.get("use_cpu") or run.processes > gpus for run in runs)


@dataclass(frozen=True, slots=True)
class _Speed:
    """Hold a run's speed relative to the baseline, and the seconds of the fastest step of each, as (baseline, run)."""

    ratio: Ratio  # speed of the run / speed of the baseline; on a CPU by CPU time, otherwise by the wall clock
    wall_ratio: Ratio | None = None  # the same by the wall clock, if `ratio` is by CPU time
    step_seconds: tuple[float, float] | None = None  # by the clock of `ratio`


def _fastest(processes: Sequence[list[Seconds]], clock: int) -> float:
    """Return the seconds of a run's fastest turn over all processes; in a rehearsal, an `Unknown` number.

    `processes`: the `Seconds` of each turn, per process; `clock`: the time to compare, WALL or CPU.
    """
    return min((turn[clock] for turns in processes for turn in turns), key=float)
