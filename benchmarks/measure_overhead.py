"""Measure the cost of the time meter and of keeping losses: compare interleaved trainings with both and with neither.

    python benchmarks/measure_overhead.py [--rounds 9] [--steps 20]

Each training runs in a fresh process. On a CPU, the script compares the CPU seconds of `trainer.train()` on one thread,
which other load disturbs less than wall-clock time. On CUDA it compares wall-clock seconds.
"""

import statistics
import sys

from runner import Measurement

from perf_helpers import Lab
from trainmem.core.task import Task
from trainmem.records import Ratio


def train(task, steps: int, metered: bool) -> list[float]:
    """Train a task for some steps, and return [seconds of `trainer.train()`, seconds spent inside the time meter].

    `metered`: train under the lab's time meter; otherwise without a meter.
    """
    import tempfile
    import time

    import torch
    from transformers import Trainer, trainer

    from trainmem.core import training
    from trainmem.core.arguments import Arguments
    from trainmem.measure import time_meter

    torch.set_num_threads(1)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    plain, stepped = Trainer.train, time_meter.TimeMeter.stepped
    taken, inside = [], []

    def timed(self, *arguments, **options):
        begin = clock()
        result = plain(self, *arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(clock() - begin)
        return result

    def watched(*arguments):
        begin = clock()
        stepped(*arguments)
        inside.append(clock() - begin)

    trainer.Trainer.train, time_meter.TimeMeter.stepped = timed, watched
    experiment = training.Experiment("overhead", task, Arguments.of({"per_device_train_batch_size": 4}))
    with tempfile.TemporaryDirectory() as folder:
        if metered:
            with time_meter.TimeMeter(1, lambda number: None):
                training.train(experiment, folder, steps)
        else:
            training.train(experiment, folder, steps, keep_losses=False)
    return [taken[0], sum(inside)]


def measure(cases, options):
    lab = Lab(out="build/overhead")
    task = lab.task if lab.machine.kind == "cuda" else Task("bert-small", seq_len=128)

    def seconds(metered: bool) -> list[float]:
        run = lab.run(lambda task: train(task, options.steps, metered), "overhead", task=task, measure=("none",))
        if not run.ok:
            raise SystemExit(run.message)
        return run.value

    seconds(True), seconds(False)  # warm up both
    clock = "wall" if lab.machine.kind == "cuda" else "processor"
    for name, metered_first in cases.items():
        found = {metered: seconds(metered) for metered in (metered_first, not metered_first)}
        (metered, inside), (bare, _) = found[True], found[False]
        yield name, {"pair": metered / bare, "share": inside / metered, "clock": clock, "task": str(task)}


def conclude(rows: list[dict], options) -> dict:
    ratio = Ratio.of_pairs([row["pair"] for row in rows], floor=1)
    return {
        "what": "time of trainer.train() with the time meter / bare, median of pairs",
        "ratio": round(ratio.value, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        "share_inside_the_meter": round(statistics.median(row["share"] for row in rows), 7),
        "pairs": [round(row["pair"], 4) for row in rows],
        "clock": rows[0]["clock"],
        "steps": options.steps,
        "task": rows[0]["task"],
    }


OVERHEAD = Measurement(
    __doc__,
    "overhead.json",
    lambda options: {str(number): number % 2 == 1 for number in range(options.rounds)},
    measure,
    conclude,
    {"rounds": 9, "steps": 20},
    rows="",
)

if __name__ == "__main__":
    sys.exit(OVERHEAD.main())
