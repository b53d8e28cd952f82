"""Rehearsals: a GPU's memory to the byte, without a GPU.

torch's own CUDA build runs on a stand-in for the CUDA runtime that allocates and computes nothing. Whatever decides
about memory is the real thing: the dispatcher, autocast, the choice of attention kernel, fused optimizers, cuBLAS'
workspaces, the caching allocator and its out-of-memory error. There is no time in a rehearsal, and no floating-point
value. What depends on a driver (the context's size, what NVML counts) is assumed, and never decides a claim.

`rehearse` takes a training or a function of one's own; `Rehearsal` is an executor for a `Lab`; `run` takes any command
and returns a `ProgramRun`, whatever its end.
Where no rehearsal is possible, each of them raises a RuntimeError that says what is missing.
Not covered: the workspaces that cuDNN's convolutions and batch norms ask for (taken to be none), and what torch.compile
makes: it runs as it is written. Kernels of Triton that torch itself launches are compiled and launched like all others.
"""

from trainmem.cards import CARDS, Card, card
from trainmem.rehearsal.program_report import ProgramRun, assumed
from trainmem.rehearsal.rehearsal_process import Rehearsal, command, own_command, rehearse, run

__all__ = ["CARDS", "Card", "ProgramRun", "Rehearsal", "assumed", "card", "command", "own_command", "rehearse", "run"]
