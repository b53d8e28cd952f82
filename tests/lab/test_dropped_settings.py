"""Settings that transformers ignores for some optimizers, checked against transformers with stub optimizer
libraries.
"""

import types
import warnings
from fnmatch import fnmatch

import pytest

from perf_helpers import Lab
from trainmem.core.dropped_settings import ADAM, ALWAYS_TRUE, DROPPED, dropped
from trainmem.core.task import Task

SETTINGS = {"weight_decay": 0.123, "adam_beta1": 0.456, "adam_beta2": 0.789, "adam_epsilon": 0.0123}
CLASSES = {
    "galore_torch": ["GaLoreAdamW", "GaLoreAdamW8bit", "GaLoreAdafactor"],
    "apollo_torch": ["APOLLOAdamW"],
    "lomo_optim": ["Lomo", "AdaLomo"],
    "grokadamw": ["GrokAdamW"],
    "optimi": ["StableAdamW"],
}
BUILT = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw", "lomo", "adalomo", "grokadamw")


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Return a function that builds an optimizer as the Trainer does, and returns the settings that its class received,
    one dict per parameter group.
    """
    import sys

    import torch
    import transformers
    from transformers import trainer_optimizer

    received = []

    class Recorded(torch.optim.SGD):
        def __init__(self, params, **settings):
            groups = [each for each in (params if isinstance(params, list) else [{}])]
            received.extend(
                settings | {name: value for name, value in each.items() if name != "params"} for each in groups
            )
            super().__init__([torch.nn.Parameter(torch.ones(1))], lr=0.1)

    for module, names in CLASSES.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**dict.fromkeys(names, Recorded)))
    for name in ("galore_torch", "apollo_torch", "lomo", "grokadamw", "torch_optimi"):
        monkeypatch.setattr(trainer_optimizer, f"is_{name}_available", lambda: True)

    def built(optim, **more):
        received.clear()
        targets = {"optim_target_modules": ["query"]} if optim.startswith(("galore", "apollo")) else {}
        args = transformers.TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, **targets, **SETTINGS, **more)
        transformers.Trainer(model=Task("bert-tiny").build_model(), args=args).create_optimizer()
        return [*received]

    return built


def values(group):
    return {value for setting in group.values() for value in (setting if isinstance(setting, tuple) else [setting])}


@pytest.mark.parametrize("optim", BUILT)
def test_transformers_still_drops_each_setting_of_the_table(build, optim):
    groups = build(optim)
    names = [name for pattern, names, _ in DROPPED for name in names if fnmatch(optim, pattern) and name in SETTINGS]
    assert groups and names
    for name in names:
        assert any(SETTINGS[name] not in values(group) for group in groups), f"{name} is heeded now: remove its row"


def test_what_is_not_in_the_table_reaches_the_optimizer(build):
    assert all(SETTINGS["weight_decay"] in values(group) for group in build("grokadamw")[:1])
    assert all({SETTINGS[name] for name in ADAM} <= values(group) for group in build("stable_adamw"))
    assert dropped({"optim": "stable_adamw", **SETTINGS}) == []
    assert dropped({"optim": "adamw_torch", **SETTINGS}) == []


def test_false_is_read_as_true(build):
    (group, *_) = build("stable_adamw", optim_args="kahan_sum=False,decouple_lr=False")
    assert {name: group[name] for name in ALWAYS_TRUE["stable_adamw"]} == {"kahan_sum": True, "decouple_lr": True}
    assert len(dropped({"optim": "stable_adamw", "optim_args": "kahan_sum=False,decouple_lr=True"})) == 1


@pytest.mark.parametrize("optim", ["adafactor", "adamw_torch"])
def test_optim_args_change_nothing(optim, tmp_path):
    import transformers

    def settings(**more):
        args = transformers.TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, **more)
        return transformers.Trainer.get_optimizer_cls_and_kwargs(args)[1]

    assert settings(optim_args="scale_parameter=True,betas=0.5") == settings()
    assert len(dropped({"optim": optim, "optim_args": "scale_parameter=True"})) == 1


def test_a_training_and_an_estimate_warn_of_what_the_library_drops(tmp_path):
    given = {"optim": "adafactor", "optim_args": "scale_parameter=True", "per_device_train_batch_size": 2}
    with pytest.warns(UserWarning, match=r"transformers [\d.]+ ignores optim_args=.* with optim='adafactor'"):
        Lab("cpu", out=tmp_path).train("one", task=Task("bert-tiny", seq_len=8), measure=("memory",), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dropped({"optim": "adamw_torch_8bit", "optim_args": "block_size=128"}) == []
