"""Run TRL's loss as on a GPU, where Triton kernels reduce the logits tile by tile.

These kernels allocate no memory, so the trace skips them (TRL 1.16: kernels/chunked_logprob.py). The matmuls around
them are torch's own, and are traced.
"""

import contextlib
import importlib
from types import SimpleNamespace
from unittest.mock import patch

import torch

from trainmem.core.outcomes import Invalid
from trainmem.estimate.attention_kernels import HALF


class _Kernel:
    def __getitem__(self, grid):
        return lambda *_, **__: None


@contextlib.contextmanager
def emulated():
    """Make TRL's losses take their code path for GPUs in this context; do nothing if TRL is not installed.

    The Triton kernels of the losses that this module knows are replaced by functions that do nothing. A loss that would
    launch another Triton kernel of TRL raises Invalid when it is computed.
    """
    try:
        utils = importlib.import_module("trl.trainer.utils")  # the user's TRL
    except (ImportError, RuntimeError, AttributeError):  # not installed, or incompatible with the libraries here
        yield
        return
    with contextlib.ExitStack() as stack:
        if hasattr(utils, "_supports_trl_loss_kernel"):  # from 1.14 on; TRL calls it only if there is Triton
            kernels = {"is_triton_available": lambda *_, **__: True, "_fused_logprob_entropy": _Kernel()}
            stack.enter_context(patch.multiple(utils, create=True, _supports_trl_loss_kernel=_refuse, **kernels))
        if hasattr(utils, "_use_triton"):  # from 1.16 on
            stack.enter_context(_folded_without_memory(utils))
        yield


def _refuse(*_, **__):
    raise Invalid("TRL's loss uses a Triton kernel on a GPU, which cannot be estimated: rehearse the training instead")


@contextlib.contextmanager
def _folded_without_memory(utils):
    kernels = importlib.import_module("trl.kernels.chunked_logprob")
    plain, launched = getattr(kernels, "_addmm_fp32", None), _Kernel()

    def added(acc, one, other, *args, **options):  # on a CPU it makes copies in fp32
        if one.dtype in HALF:
            torch.addmm(acc, one, other, out_dtype=torch.float32, out=acc)
        else:
            plain(acc, one, other, *args, **options)

    replaced = {"_forward_kernel": launched, "_backward_kernel": launched, "_addmm_fp32": added}
    replaced |= {
        "triton": SimpleNamespace(cdiv=lambda a, b, *_, **__: -(-a // b)),
        "_use_triton": lambda *_, **__: True,
    }
    with patch.multiple(kernels, create=True, **replaced), patch.object(utils, "_use_triton", kernels._use_triton):
        yield
