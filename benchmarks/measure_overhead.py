"""What the time meter costs: the Trainer with it (and its losses kept) and bare, in turns, each in a clean process.

    python benchmarks/measure_overhead.py [--rounds 9] [--steps 20] [--out results/overhead.json]

Compares processor seconds of the whole of `trainer.train()` on one thread, which a busy neighbour disturbs less than
the clock on the wall. On CUDA it compares seconds on the wall.
"""

import statistics

import measuring

from perf_helpers import Lab, Task
from perf_helpers.records import Ratio


def train(task, steps: int, metered: bool) -> list[float]:
    """[seconds of `trainer.train()`, seconds of them inside the meter], with the lab's time meter or bare."""
    import tempfile
    import time

    import torch
    from transformers import Trainer, trainer

    from perf_helpers.lab import time_meter, training
    from perf_helpers.lab.arguments import Arguments

    torch.set_num_threads(1)
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    plain = Trainer.train
    taken, inside = [], []

    def timed(self, *arguments, **options):
        begin = clock()
        result = plain(self, *arguments, **options)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(clock() - begin)
        return result

    trainer.Trainer.train = timed
    experiment = training.Experiment("overhead", task, Arguments.of({"per_device_train_batch_size": 4}))
    with tempfile.TemporaryDirectory() as folder:
        if metered:
            stepped = time_meter.TimeMeter.stepped

            def watched(*arguments):
                begin = clock()
                stepped(*arguments)
                inside.append(clock() - begin)

            time_meter.TimeMeter.stepped = watched
            with time_meter.TimeMeter(1, lambda number: None):
                training.train(experiment, folder, steps)
        else:
            training.train(experiment, folder, steps, keep_losses=False)
    return [taken[0], sum(inside)]


def main() -> None:
    options = measuring.options(__doc__, rounds=9, steps=20)
    lab = Lab(out="build/overhead")
    task = lab.task if lab.machine.kind == "cuda" else Task("bert-small", seq_len=128)
    pairs, shares, inside = [], [], 0.0
    for number in range(options.rounds + 1):
        seconds = {}
        for metered in (True, False) if number % 2 else (False, True):
            run = lab.run(lambda t, m=metered: train(t, options.steps, m), "overhead", task=task, measure=("none",))
            if not run.ok:
                raise SystemExit(run.message)
            seconds[metered], inside = run.value[0], run.value[1] or inside
        if number:  # the first round warms up
            pairs.append(seconds[True] / seconds[False])
            shares.append(inside / seconds[True])
            print(f"{pairs[-1]:.4f} {shares[-1]:.7f}", flush=True)
    ratio = Ratio.of_pairs(pairs, floor=1)
    report = {
        "what": "time of trainer.train() with the time meter / bare, median of pairs",
        "ratio": round(ratio.value, 4),
        "interval": [round(ratio.low, 4), round(ratio.high, 4)],
        "share_inside_the_meter": round(statistics.median(shares), 7),
        "pairs": [round(pair, 4) for pair in pairs],
        "clock": "wall" if lab.machine.kind == "cuda" else "processor",
        "steps": options.steps,
        "task": str(task),
        "machine": lab.machine.name,
        "versions": lab.versions,
        "date": run.date,
    }
    measuring.keep(report, options.out)


if __name__ == "__main__":
    main()
