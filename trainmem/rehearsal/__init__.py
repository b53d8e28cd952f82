"""Rehearsals: a GPU's memory to the byte, without a GPU.

A rehearsal is a dry run of torch's own CUDA build on a stub CUDA runtime, which allocates but computes nothing.
Everything that decides about memory is real: the dispatcher, autocast, the choice of attention kernel, fused
optimizers, cuBLAS' workspaces, the caching allocator and its out-of-memory error. Times and floating-point values are
unknown. Sizes that depend on a driver (the context, the memory that NVML reports) are assumed; no claim of the course
is judged by them.

`rehearse` takes a training or a function of yours; `Rehearsal` is an executor for a `Lab`; `run` takes any command and
returns a `ProgramRun`, even if the command fails. Each of them raises a RuntimeError that names what is missing if this
machine cannot rehearse.
Not covered: workspaces of cuDNN's convolutions and batch norms (assumed to be none). Code under torch.compile is
compiled, but for its kernels. Triton kernels that torch itself launches are compiled and launched like all others.
"""

from trainmem.cards import CARDS, Card, card
from trainmem.rehearsal.program_report import ProgramRun, assumed
from trainmem.rehearsal.rehearsal_process import Rehearsal, command, own_command, rehearse, run

__all__ = ["CARDS", "Card", "ProgramRun", "Rehearsal", "assumed", "card", "command", "own_command", "rehearse", "run"]
