"""Training arguments: valid names and values, under every name that a library version uses."""

import pickle

import pytest

from trainmem.core import arguments
from trainmem.core.arguments import Arguments

CHECKPOINTING = {"gradient_checkpointing", "activation_checkpointing"}


def test_words_are_read_as_transformers_own_parser_reads_them():
    batch = ["--per_device_train_batch_size", "4"]
    reported = arguments.parse(["--bf16", "--fp16", "False", *batch, "--optim=adafactor", "--dtype", "bfloat16"])
    expected = {
        "bf16": True,
        "fp16": False,
        "per_device_train_batch_size": 4,
        "optim": "adafactor",
        "dtype": "bfloat16",
    }
    assert reported.given == expected
    assert reported.model == {"dtype": "bfloat16"} and "dtype" not in reported.training
    assert arguments.parse([]) == Arguments()


def test_what_is_read_from_the_library_s_source_is_what_the_library_has():
    """The parser that we make from transformers' source text accepts the same words as transformers' own parser. It
    differs only for values that are not literals in the source: log levels, and a class of accelerate.
    """
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.training_args import OptimizerNames

    def actions(fields):
        for action in HfArgumentParser(fields)._actions:
            kind = getattr(action.type, "__name__", action.type)
            yield action.dest, [*action.option_strings], action.nargs, action.const, kind, list(action.choices or [])

    expected, built = (list(actions(fields)) for fields in (TrainingArguments, arguments._read()))
    different = {one[0] for one, other in zip(expected, built, strict=True) if one != other}
    assert different == {"log_level", "log_level_replica", "parallelism_config"} and len(expected) > 100
    assert {*arguments._kernels()} == {"eager", *(name for name in ALL_ATTENTION_FUNCTIONS if "|" not in name)}
    for optimizer in OptimizerNames:
        Arguments.of({"optim": optimizer}), Arguments.of({"optim": optimizer.value})


def test_a_library_whose_source_is_written_otherwise_is_imported(monkeypatch):
    from transformers import TrainingArguments

    def refuse(name):
        raise KeyError(name)

    known, kernels = arguments.known(), {*arguments._kernels()}
    for read in (arguments._declared, arguments.known, arguments._kernels):
        monkeypatch.setattr(arguments, read.__name__, read.__wrapped__)
    monkeypatch.setattr(arguments, "_source", refuse)
    assert arguments._declared() is TrainingArguments
    assert arguments.known() == known and {*arguments._kernels()} == kernels
    assert arguments.parse(["--bf16", "--optim", "adafactor"]).given == {"bf16": True, "optim": "adafactor"}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--no-such", "3"], "'no-such'"),
        (["--bf16", "True", "3"], r"\b3\b.*--bf16 True"),
        (["--output_dir", "out"], "output_dir cannot be set"),
        (["--output-dir=out"], "output_dir cannot be set"),
    ],
)
def test_words_that_are_no_arguments_are_refused(words, problem):
    with pytest.raises(ValueError, match=problem):
        arguments.parse(words)


def test_samples_per_step_is_the_effective_batch():
    recipe = Arguments({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4})
    assert recipe.samples_per_step(processes=3) == 24
    assert Arguments().samples_per_step() == 8  # the library's own micro-batch


@pytest.mark.parametrize("typed", sorted(CHECKPOINTING))
def test_an_argument_is_found_and_changed_by_any_of_its_names(typed):
    reported = Arguments.of({"bf16": True, typed: True})
    (other,) = CHECKPOINTING - {typed}
    assert reported.get(other) is reported.get(typed) is True
    changed = reported.replace(**{other: False})
    assert changed.get(typed) is False and len(changed.given) == 2 and reported.get(typed) is True
    assert list(reported.replace(bf16=False).given) == ["bf16", typed], "a value is changed where it stands"
    assert list(reported.without(other).given) == ["bf16"]


def test_a_deepspeed_file_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"deepspeed=.*no such file"):
        Arguments.of({"deepspeed": "zero3.json"})


def test_one_argument_under_two_names_is_refused():
    with pytest.raises(ValueError, match=r"checkpointing.*keep one"):
        Arguments.of(dict.fromkeys(CHECKPOINTING, True))


def test_arguments_travel_and_are_equal_where_they_say_the_same():
    reported = Arguments.of({"bf16": True})
    assert reported.training == {"bf16": True}  # remembered from here on
    assert pickle.loads(pickle.dumps(reported)) == reported == Arguments({"bf16": True})
    assert repr(reported) == "Arguments(given={'bf16': True})"


def test_they_are_shown_as_python_to_paste():
    text = Arguments({"bf16": True, "attn_implementation": "eager"}).to_python()
    assert (
        "TrainingArguments(\n    bf16=True,\n)" in text and "from_pretrained(..., attn_implementation='eager')" in text
    )
    qlora = {"peft": {"r": 8}, "load_in_4bit": True}
    requested = [Arguments(qlora | more).to_python() for more in ({}, {"prepare_model_for_kbit_training": False})]
    assert ["# then prepare_model_for_kbit_training(model)\n# then get_peft_model" in text for text in requested] == [
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("given", "compiles"),
    [
        ({}, False),
        ({"torch_compile": False}, False),
        ({"torch_compile": True}, True),
        ({"torch_compile_backend": "aot_eager"}, True),
        ({"torch_compile_mode": "max-autotune"}, True),
    ],
)
def test_what_compiles_is_what_the_library_compiles(given, compiles, tmp_path):
    reported = Arguments.of(given)
    assert reported.compiles == reported.build(str(tmp_path)).torch_compile == compiles
