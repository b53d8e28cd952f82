"""Run hundreds of experiments, estimates and rehearsals in one process: no resource grows, and the last one is as quick
as the first.

SOAK=1000 python -m pytest -m nightly -s tests/test_soak.py    the long run, of 1000 experiments; default: 60
"""

import gc
import getpass
import os
import statistics
import tempfile
import time

import psutil
import pytest
from machines import TINY

from perf_helpers.lab.lab import Lab
from trainmem.estimate import estimate
from trainmem.rehearsal import build, rehearse

COUNT = int(os.environ.get("SOAK", 60))


def footprint(folder):
    """Return (resident MB, open files, child processes, temporary files without torch's cache) of this process.

    `folder`: folder of the temporary files.
    """
    gc.collect()
    own = psutil.Process()
    cache = f"torchinductor_{getpass.getuser()}"
    counts = own.num_fds(), len(own.children(recursive=True)), len({*os.listdir(folder)} - {cache})
    return own.memory_info().rss / 1e6, *counts


@pytest.mark.nightly
@pytest.mark.timeout(3600 + 60 * COUNT)
def test_nothing_grows_however_many_experiments_one_process_makes(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    can_rehearse = not build.problem() and build.interpreter()
    lab, seconds, seen, peaks = Lab("cpu", out=tmp_path / "out"), [], [], {}
    for number in range(1, COUNT + 1):
        if number % 2:
            start = time.monotonic()
            lab.run(lambda task: 1, measure=("none",))
            seconds.append(time.monotonic() - start)
        else:
            run = lab.train("trained", task=TINY, measure="memory", per_device_train_batch_size=2)
            peaks.setdefault("trained", set()).add(run.peak_bytes)
        if number % 5 == 0:
            estimated = estimate(TINY, device="cpu", per_device_train_batch_size=2)
            peaks.setdefault("estimated", set()).add(estimated.memory.peak_bytes)
        if number % 20 == 0 and can_rehearse:
            run = rehearse(TINY, on="t4", per_device_train_batch_size=2)
            peaks.setdefault("rehearsed", set()).add(run.peak_bytes)
        if number % 20 == 0:
            lab.runs.clear()  # a lab keeps its runs, each with the timeline of its memory (50 kB): they are the user's
            lab._experiments.clear()
            seen.append(footprint(temporary))
            recent = statistics.median(seconds[-10:])
            print("{}: {:.0f} MB, {} files, {} processes, {} temporary".format(number, *seen[-1]), f"{recent:.3f} s")
    assert all(len(each) == 1 and None not in each for each in peaks.values()), peaks
    warm, last = seen[0], seen[-1]
    assert last[0] <= 1.05 * warm[0] and last[1:] == warm[1:], seen
    early, late = (statistics.median(part) for part in (seconds[1:11], seconds[-10:]))
    assert late < 10 * early + 1, (early, late)
