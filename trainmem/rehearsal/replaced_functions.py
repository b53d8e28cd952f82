"""Replace functions of torch and Python in a rehearsed process, to track in all threads which values are known.

`known_values.Values`, a function mode, does this tracking. It does not see some reads of unknown values. Some
replacements in this module answer these reads.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from trainmem.rehearsal import compiled_code, exchanged_values, process_recorder
from trainmem.rehearsal.device_memory import memory_of, out_of_sight
from trainmem.rehearsal.known_values import EXACT, LARGE_WEIGHT, LARGEST, Values, is_small
from trainmem.rehearsal.needed_libraries import explained
from trainmem.unknown import CHECKS, NeedsLibrary, NeedsValues, Unknown


def install() -> None:
    """Track which tensors have known values (see `Values`), from now on and in all threads, also those of autograd.

    torch calls this function at the end of `import torch`, because it is declared as the entry point of a backend
    (inside/perf_helpers_rehearsal.dist-info).
    """
    mode, assert_close = Values(assumes="REHEARSAL_ASSUMES" in os.environ), torch.testing.assert_close

    def entered(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args, **kwargs):
            is_seen = mode in _get_current_function_mode_stack() or compiled_code.is_traced()
            with contextlib.nullcontext() if is_seen else mode:
                return function(*args, **kwargs)

        return run

    def explaining(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args, **kwargs):
            try:
                made = function(*args, **kwargs)
                mode.note_sparse_gradients()
                return made
            except RuntimeError as error:
                if explained(error) is error:  # no variable here, see `Values`
                    raise
                raise explained(error) from error

        return run

    def finite(name: str, answer: bool) -> Callable:
        """Return a replacement of `math.<name>`, e.g. `math.isnan`, that returns `answer` for an unknown number.

        A rehearsal assumes that unknown numbers, and unknown values in tensors, are finite.
        """
        plain = getattr(math, name)
        return functools.wraps(plain)(lambda number: answer if isinstance(number, Unknown) else plain(number))

    @functools.wraps(assert_close)
    def close(*args, **kwargs):
        """Compare tensors as `torch.testing.assert_close` does.

        If values are assumed, tensors with unknown values are close.

        Raises:
            NeedsValues: a number is unknown. torch's own error is about the number's type, which would mislead.
        """
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Unknown):
                raise NeedsValues(value.why)
            if mode.assumes and isinstance(value, torch.Tensor) and mode.is_known(value) is not True:
                mode.answers[CHECKS] += 1
                return None
        return assert_close(*args, **kwargs)

    truncated_normal = torch.nn.init._no_grad_trunc_normal_

    def fill(tensor, *args, **kwargs):
        """Fill a tensor from a truncated normal distribution, as `torch.nn.init.trunc_normal_` does, and return it.

        A large weight, whose values are unknown, is filled from a normal distribution that is not truncated, because
        torch would draw again until all values are within the bounds.
        """
        large = tensor.numel() >= LARGE_WEIGHT and torch.cuda.is_available()
        return tensor.normal_() if large else truncated_normal(tensor, *args, **kwargs)

    any_of = torch.Tensor.any

    def any_outlier(tensor, *args, **kwargs):
        """Replace `Tensor.any`: return the same result, except False if bitsandbytes' LLM.int8 looks for outliers.

        `Values` cannot give this answer: it is a function mode, and no function mode sees a call inside bitsandbytes'
        operation.
        """
        found = any_of(tensor, *args, **kwargs)
        if tensor.is_cuda and sys._getframe(1).f_globals.get("__name__") == "bitsandbytes.backends.cuda.ops":
            memory_of(found).zero_()
        return found

    is_in = torch.isin

    def is_in_tokens(*args, **kwargs):
        """Replace `torch.isin`: return the same result, except False if transformers looks for end tokens.

        Generation then continues to its maximum length.
        """
        found = is_in(*args, **kwargs)
        if torch.compiler.is_compiling():
            return found
        if sys._getframe(1).f_globals.get("__name__") == "transformers.generation.stopping_criteria":
            mode.answers["tokens that might end a generation, no"] += 1
            mode.fill(found, False)
        return found

    grouped_product = torch._grouped_mm

    def of_groups(first, second, offs=None, **options):
        """Replace `torch._grouped_mm`: return the same result, but first fill `offs` if its values are unknown.

        `offs` holds the ends of the groups. It is filled with the ends of equal groups, but still counts as unknown.
        If torch has no kernel for all groups together, torch reads the ends on the host, and multiplies each group
        that is not empty. The memory for these products is the same for all ends, unless every group is empty.
        """
        if offs is not None and not torch.compiler.is_compiling() and not mode.is_known(offs):
            length = second.shape[-1] if first.dim() == 3 else first.shape[-1 if second.dim() == 2 else 0]
            memory_of(offs).copy_(torch.arange(1, len(offs) + 1, device="cpu") * length // len(offs))
        return grouped_product(first, second, offs, **options)

    torch._grouped_mm = of_groups
    if mode.assumes:
        torch.isin = is_in_tokens
    for name, answer in (("isfinite", True), ("isnan", False), ("isinf", False)):
        setattr(math, name, finite(name, answer))
    rebuild = torch._utils._rebuild_tensor

    def rebuilt(*args, **kwargs):
        """Rebuild a tensor from a file as torch does. Mark small device tensors of whole numbers or booleans as known.

        Their values are known because `torch.load(map_location="cuda")` has copied them from the file to the device.
        """
        tensor = rebuild(*args, **kwargs)
        if tensor.is_cuda and tensor.dtype in EXACT and tensor.untyped_storage().nbytes() <= LARGEST:
            mode.mark(True, tensor)
        return tensor

    def share(*_):
        raise NeedsLibrary(
            "a rehearsal cannot share a card's memory between processes: send the tensor from the host, e.g. by .cpu()"
        )

    torch._utils._rebuild_tensor, torch.UntypedStorage._share_cuda_ = rebuilt, share
    for name in [each for each in vars(torch.cuda) if each.endswith("Tensor")]:
        setattr(torch.cuda, name, LegacyType(getattr(torch.cuda, name), mode))
    set_default = torch._C._set_default_tensor_type
    torch._C._set_default_tensor_type = lambda kind: set_default(getattr(kind, "plain", kind))
    if torch.distributed.is_available():
        exchanged_values.install(mode)
    if importlib.util.find_spec("triton"):
        _note_kernels(mode)
    with warnings.catch_warnings(action="ignore"):  # a warning that a kernel is replaced
        mode.library = torch.library.Library("aten", "IMPL")  # kept alive: the kernel goes with it
        mode.library.impl("nonzero", mode.positions, "CUDA")
        mode.library.impl("_linalg_check_errors", lambda *_, **__: None, "CUDA")  # no solver ran that could have failed
        mode.library.impl("_coalesce", functools.partial(_coalesced, mode), "SparseCUDA")
    torch.Tensor.any = any_outlier
    torch.compile = compiled_code.compiling(torch.compile, mode)
    torch.nn.init._no_grad_trunc_normal_ = fill
    torch.testing.assert_close = close
    threading.Thread.run = entered(threading.Thread.run)
    # A mode is off while it handles a call, as of `Tensor.backward`; a forward that is recomputed inside must see it.
    torch.autograd.graph._engine_run_backward = entered(explaining(torch.autograd.graph._engine_run_backward))
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward
    if folder := os.environ.get("REHEARSAL_REPORT"):  # a user's program, see `process_recorder`
        process_recorder.install(mode, folder)
    mode.__enter__()


def _note_kernels(mode: Values) -> None:
    """Let each launch of a Triton kernel note in `mode` that the values of its floating-point tensors are unknown."""
    # The kernel is not run. Without the note, a loss that it adds to `torch.zeros(1)` would stay a known 0.
    kernels = importlib.import_module("triton.runtime.jit").JITFunction
    launch = kernels.run

    @functools.wraps(launch)
    def launched(self, *args, **kwargs):
        made = launch(self, *args, **kwargs)
        given = (getattr(each, "base", each) for each in (*args, *kwargs.values()))  # a tensor or its descriptor
        tensors = [each for each in given if isinstance(each, torch.Tensor) and each.is_cuda]
        mode.mark(False, *(each for each in tensors if each.dtype not in EXACT))
        return made

    kernels.run = launched


def _coalesced(mode: Values, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sparse `tensor` without repeated positions, as `aten._coalesce` does.

    Raises:
        NeedsValues: the positions are unknown, and `mode` assumes no values.
    """
    old, values, count = tensor._indices(), tensor._values(), tensor._nnz()
    is_known = mode.is_known(old)
    if not is_known and not mode.assumes:
        raise NeedsValues("a rehearsal does not know how many positions of a sparse tensor differ")
    if not is_known:
        mode.answers["positions of a sparse tensor, all differ"] += 1
    with out_of_sight():
        flat = old.sum(0)  # as torch's kernel: flat positions, two arrays of their size, and memory for sorting
        working = [torch.empty_like(flat), torch.empty_like(flat), flat.new_empty(2 * count)]
        positions = memory_of(old).unique(dim=1) if is_known else memory_of(old)
        del working[2]
        flat.resize_(1, positions.shape[1])
        made = values.new_empty((positions.shape[1], *values.shape[1:]))
        indices = flat if len(old) == 1 else old.new_empty(positions.shape)
        if is_known:
            mode.fill(indices, positions)
        return torch.sparse_coo_tensor(indices, made, tensor.shape, is_coalesced=True, check_invariants=False)


class LegacyType:
    """Replace an old type of CUDA tensors, e.g. `torch.cuda.LongTensor`, by an object that makes the same tensors.

    `plain`: the old type. `values`: the `Values` of this process, which track the tensors whose values are known. A
    small tensor that is made from known numbers is marked in `values` as known.
    """

    def __init__(self, plain: type, values: Values):
        self.plain, self.values = plain, values

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        made = self.plain(*args, **kwargs)
        is_data = args and not isinstance(args[0], int | torch.Tensor | torch.Size)
        if is_data and is_small(made, "") and not any(isinstance(leaf, Unknown) for leaf in tree_leaves(args)):
            self.values.mark(True, made)
        return made

    def __instancecheck__(self, tensor) -> bool:
        return isinstance(tensor, self.plain)

    def __getattr__(self, name: str):
        return getattr(self.plain, name)
