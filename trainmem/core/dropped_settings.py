"""Training settings that transformers accepts but ignores because of the optimizer, so that a run can warn of them.

The table `DROPPED` follows how transformers builds each optimizer (`trainer_optimizer.py`; 5.23 and 5.24 are the same).
`tests/lab/test_dropped_settings.py` fails when a release starts to use an ignored setting.
"""

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from trainmem.core import hardware

ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_OWN_DEFAULTS = "its optimizer is built with the library's own defaults"
_FREED = "each gradient is freed during backward, and the logged norm is 0"
# (optimizers, settings that are dropped, why)
DROPPED = (
    ("galore_adamw*", ("weight_decay", *ADAM), _OWN_DEFAULTS),
    ("galore_adafactor*", ("weight_decay",), _OWN_DEFAULTS),
    ("apollo_adamw*", ("weight_decay",), "its parameter groups are built without it"),
    ("apollo_adamw*", ADAM, "only the weights of optim_target_modules get them"),
    ("*_layerwise", ("max_grad_norm",), _FREED),
    ("*lomo", ("max_grad_norm",), _FREED),
    ("*lomo", ("weight_decay", *ADAM), _OWN_DEFAULTS),
    ("grokadamw", ADAM, _OWN_DEFAULTS),
    ("grokadamw", ("resume_from_checkpoint",), "its states are in no checkpoint, so it begins without them"),
    *(
        (each, ("optim_args",), "its optimizer is built without them")
        for each in ("adafactor", "adamw_torch", "adamw_torch_fused")
    ),
)
# Names in optim_args that transformers converts with bool(): every text but the empty one is true.
ALWAYS_TRUE = {"stable_adamw": ("kahan_sum", "decouple_lr")}


def dropped(training: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each setting that transformers ignores with the optimizer that `training` names.

    Args:
        training: {name: value} of `TrainingArguments`, with the names that the installed transformers uses. Without
            "optim" the optimizer is "adamw_torch".
    """
    optim, version = str(training.get("optim") or "adamw_torch"), hardware.version_of("transformers")
    found = [
        f"transformers {version} ignores {name}={training[name]!r} with optim={optim!r}: {why}"
        for optimizers, names, why in DROPPED
        for name in names
        if fnmatch(optim, optimizers) and training.get(name) is not None
    ]
    given = dict(pair.split("=", 1) for pair in str(training.get("optim_args") or "").split(",") if "=" in pair)
    return found + [
        f"transformers {version} reads {name}={given[name]} in optim_args as true with optim={optim!r}: leave it out"
        for name in ALWAYS_TRUE.get(optim, ())
        if given.get(name, "true").strip().lower() in ("false", "0", "no", "off")
    ]
