#!/usr/bin/env bash
# torch's elastic launcher with the rendezvous "c10d", which `torchrun --standalone` uses, calls `inspect.stack()` twice
# for each of its events, to name the method in a record that by default nobody receives. Each call looks for the source
# of every frame, and for that goes through all imported modules.
#
# One would guess: what a program has imported does not matter for the time of a launch, and no rendezvous costs more
# than its messages.
# What happens: with transformers' Trainer imported the stack takes a large part of the launch of one rank. The
# rendezvous "static", which needs a free port, makes no such call.
#
#     bash findings/rendezvous_inspects_the_stack.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0

cat > "$folder/show.py" <<'PYTHON'
import inspect
import socket
import sys
import time

import torch
import transformers
import transformers.trainer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

print(f"torch {torch.__version__}, transformers {transformers.__version__}, {len(sys.modules):,} modules imported")
stack, spent = inspect.stack, []


def timed(*arguments):
    began = time.process_time()
    frames = stack(*arguments)
    spent.append(time.process_time() - began)
    return frames


inspect.stack = timed


def launch(backend, endpoint, configs):
    """Launch one rank; return how often the launcher's process inspected its stack, in which share of its CPU time."""
    spent.clear()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=1, run_id="one", rdzv_backend=backend, rdzv_endpoint=endpoint,
        rdzv_configs=configs, local_addr="127.0.0.1", start_method="fork", monitor_interval=0.05,
    )
    began = time.process_time()
    elastic_launch(config, abs)(-1)
    share = sum(spent) / (time.process_time() - began)
    print(f"{backend}: {len(spent)} calls of inspect.stack(), {share:.0%} of the launcher's CPU time")
    return len(spent)


with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
dynamic, static = launch("c10d", "localhost:0", {}), launch("static", f"127.0.0.1:{port}", {"rank": 0})
sys.exit(0 if dynamic > 10 and static == 0 else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "^W\|^$"
