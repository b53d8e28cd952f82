"""What the live monitor costs: the lab works with it and without it, in turns, in a Jupyter kernel of its own.

    python benchmarks/measure_monitor.py [--rounds 5] [--seconds 20] [--out results/monitor.json]

Shares are processor time per second on the wall: of the monitor's thread, drawing included, and of the whole kernel
with the monitor less that without it, which also has what the kernel spends on sending the pictures. Both hold on a
busy machine, where the time of the work itself says nothing: with / without gave 0.73 to 1.08 on shared cores.
"""

import json
import statistics

import measuring

CELL = """
import json, time
from contextlib import nullcontext
from perf_helpers import Lab, hardware, monitor

lab = Lab(out={out!r})

def work(task, seconds={seconds}):
    import time, torch
    torch.set_num_threads(1)
    values, end = torch.rand(200, 200), time.monotonic() + seconds
    while time.monotonic() < end:
        values @ values

def turn(watched):
    wall, used = time.perf_counter(), time.process_time()
    with monitor.live() if watched else nullcontext() as m:
        lab.run(work, measure=("none",))
        wall, used = time.perf_counter() - wall, time.process_time() - used  # before the picture that stays
    share = m.cpu_seconds / m.elapsed_seconds if watched else None
    return dict(kernel_share=used / wall, thread_share=share, samples=m.count if watched else None)

turn(True), turn(False)  # both warm up
pairs = [[turn(w) for w in ((True, False) if n % 2 else (False, True))][:: 1 if n % 2 else -1] for n in range({rounds})]
import psutil
about = dict(machine=lab.machine.name, versions=lab.versions, date=lab.runs[-1].date, programs=len(psutil.pids()))
print("RESULT" + json.dumps(dict(pairs=pairs, **about)))
"""


def main() -> None:
    import nbformat
    from jupyter_client.channels import AsyncZMQSocketChannel
    from nbclient import NotebookClient

    from perf_helpers.course.lesson_process import asking

    options = measuring.options(__doc__, rounds=5, seconds=20.0)
    source = CELL.format(out="build/monitor", seconds=options.seconds, rounds=options.rounds)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    AsyncZMQSocketChannel.get_msg = asking(AsyncZMQSocketChannel.get_msg)
    NotebookClient(notebook, kernel_name="python3").execute()
    printed = "".join(output.text for output in notebook.cells[0].outputs if output.get("name") == "stdout")
    result = json.loads(printed.partition("RESULT")[2])
    pairs = result.pop("pairs")
    report = {
        "what": "the live monitor against nothing, medians of pairs",
        "thread_share": round(statistics.median(on["thread_share"] for on, _ in pairs), 5),
        "kernel_share": round(statistics.median(on["kernel_share"] - off["kernel_share"] for on, off in pairs), 5),
        "samples_a_second": round(statistics.median(on["samples"] for on, _ in pairs) / options.seconds, 2),
        "pairs": pairs,
        "seconds": options.seconds,
        **result,
    }
    measuring.keep(report, options.out)


if __name__ == "__main__":
    main()
