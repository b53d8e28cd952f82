"""What a training is told: names and values that are right, whatever the library calls them."""

import pickle

import pytest

from perf_helpers.lab import arguments
from perf_helpers.lab.arguments import Arguments

CHECKPOINTING = {"gradient_checkpointing", "activation_checkpointing"}


def test_words_are_read_as_transformers_own_parser_reads_them():
    batch = ["--per_device_train_batch_size", "4"]
    told = arguments.parse(["--bf16", "--fp16", "False", *batch, "--optim=adafactor", "--dtype", "bfloat16"])
    expected = {
        "bf16": True,
        "fp16": False,
        "per_device_train_batch_size": 4,
        "optim": "adafactor",
        "dtype": "bfloat16",
    }
    assert told.given == expected
    assert told.model == {"dtype": "bfloat16"} and "dtype" not in told.training
    assert arguments.parse([]) == Arguments()


@pytest.mark.parametrize(
    ("words", "problem"),
    [(["--no-such", "3"], "unknown training argument 'no-such'"), (["--bf16", "True", "3"], "not understood: 3")],
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
    told = Arguments.of({"bf16": True, typed: True})
    (other,) = CHECKPOINTING - {typed}
    assert told.get(other) is told.get(typed) is True
    changed = told.replace(**{other: False})
    assert changed.get(typed) is False and len(changed.given) == 2 and told.get(typed) is True
    assert list(told.replace(bf16=False).given) == ["bf16", typed], "a value is changed where it stands"


def test_one_argument_under_two_names_is_refused():
    with pytest.raises(ValueError, match="Keep one"):
        Arguments.of(dict.fromkeys(CHECKPOINTING, True))


def test_arguments_travel_and_are_equal_where_they_say_the_same():
    told = Arguments.of({"bf16": True})
    assert told.training == {"bf16": True}  # remembered from here on
    assert pickle.loads(pickle.dumps(told)) == told == Arguments({"bf16": True})
    assert repr(told) == "Arguments(given={'bf16': True})"


def test_they_are_shown_as_python_to_paste():
    text = Arguments({"bf16": True, "attn_implementation": "eager"}).to_python()
    assert (
        "TrainingArguments(\n    bf16=True,\n)" in text and "from_pretrained(..., attn_implementation='eager')" in text
    )


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
    told = Arguments.of(given)
    assert told.compiles == told.build(str(tmp_path)).torch_compile == compiles
