"""Explain errors of CUDA's libraries in a rehearsal, which does not know how much memory these libraries would take."""

from trainmem.unknown import NeedsLibrary

# CUDA libraries by their names in torch's messages; the stub answers only the calls in answers.toml and libraries.cpp.
_LIBRARIES = {"cudnn": "cuDNN", "cufft": "cuFFT", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cublas": "cuBLAS"}


def explained(error: RuntimeError) -> RuntimeError:
    """Return a clearer error, `NeedsLibrary`, if `error` means that a CUDA library cannot be used in a rehearsal.

    The new error names the library. Any other error is returned unchanged.
    """
    text = str(error).lower()
    is_refusal = "not answered in a rehearsal" in text or any(f"{word} error" in text for word in _LIBRARIES)
    if not is_refusal or isinstance(error, NeedsLibrary):
        return error
    found = next((name for word, name in _LIBRARIES.items() if word in text), "the CUDA runtime")
    first = str(error).partition(". ")[0].partition("(")[0]
    return NeedsLibrary(f"a rehearsal does not know the memory that {found} takes here ({first})")
