"""Rehearse the trainings of matrix.toml with this environment's torch, and write them in the format of a course run.

python benchmarks/matrix_rehearsal.py FILE    benchmarks/matrix.py calls it in the environment of each set

Exit code 1, with the reason in one line, if nothing can be rehearsed.
"""

import dataclasses
import sys
import tomllib
from pathlib import Path

from runner import now, write_record

from perf_helpers.course.results import SCHEMA
from trainmem.core import hardware
from trainmem.core.task import Task
from trainmem.rehearsal import build, rehearse

if reason := build.problem():
    sys.exit(reason)
if not hardware.torch_build()[1]:
    sys.exit(f"torch {hardware.torch_build()[0]} is no CUDA build")
runs = []
for row in tomllib.loads(Path(__file__).with_name("matrix.toml").read_text(encoding="utf-8"))["rehearsal"]:
    try:
        task, ranks = Task(row["model"], seq_len=row["seq_len"]), row.get("processes", 1)
        run = rehearse(task, on=row["card"], processes=ranks, **row["arguments"])
    except RuntimeError as error:
        sys.exit(" ".join(str(error).split()))
    print(f"{row['name']}: {run}", file=sys.stderr, flush=True)
    memory = run.memory and dataclasses.replace(run.memory, timeline=None)
    runs.append({"lesson": "rehearsal", **dataclasses.replace(run, name=row["name"], memory=memory).to_dict()})
data = {"schema": SCHEMA, "date": now(), "machine": hardware.describe().to_dict() | {"rehearsed": True}}
data |= {"versions": hardware.versions(), "profile": "gpu", "strict": False, "claims": [], "runs": runs}
data["lessons"] = [{"name": "rehearsal", "status": "ok", "seconds": 0, "message": ""}]
write_record(Path(sys.argv[1]), data)
