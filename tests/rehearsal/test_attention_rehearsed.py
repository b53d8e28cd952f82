"""The attention kernel that the estimate selects, compared with the one that torch's own CUDA build selects."""

import json
import sys
from pathlib import Path

import cloudpickle
import pytest

from perf_helpers import Lab
from trainmem.estimate.allocator_settings import release
from trainmem.rehearsal import Rehearsal, build, card

if build.problem() or build.interpreter() is None:
    pytest.skip("torch's CUDA build is not here: make wheel", allow_module_level=True)

ESTIMATE = str(Path(__file__).parents[1] / "estimate")
sys.path.append(ESTIMATE)
import attention_cases  # noqa: E402

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def chosen_by_torch(count: int, seed: int):
    """Return a function that makes random attention calls in a rehearsal's process, and returns one letter per call.

    The letter names the kernel that torch selects, e.g. "f" for flash; "-" if torch refuses the call. The module
    `attention_cases` lists the letters. `count`: number of calls; `seed`: the seed from which the calls are drawn.
    """

    def work(_):
        import sys

        sys.path.append(ESTIMATE)
        import attention_cases

        return "".join(map(attention_cases.chosen, attention_cases.calls(count, seed)))

    return work


def letters(capability: tuple[int, int], count: int = attention_cases.COUNT, seed: int = 0) -> str:
    with Rehearsal(card(None, capability, "40GB")) as stage:
        run = Lab("gpu", executor=stage).run(chosen_by_torch(count, seed), measure="none")
    assert run.ok, run.message
    return run.value


@pytest.mark.nightly
@pytest.mark.parametrize("capability", attention_cases.CAPABILITIES, ids=str)
def test_attention_takes_the_kernel_that_torch_takes(capability):
    from test_attention import selected

    seed, rules = 1, release()  # other calls than those of the record
    kernels = selected(rules, capability, attention_cases.calls(400, seed))
    expected = letters(capability, 400, seed)
    differ = [n for n, (own, other) in enumerate(zip(kernels, expected, strict=True)) if other not in ("-", own)]
    assert not differ, [(attention_cases.calls(400, seed)[n], kernels[n], expected[n]) for n in differ[:3]]
    assert len({*expected}) > 2, "no kernel but plain attention was selected"


if __name__ == "__main__":  # writes what the installed release chooses
    record = Path(ESTIMATE, "attention_choices.json")
    choices = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    choices[release().torch] = {"{}.{}".format(*each): letters(each) for each in attention_cases.CAPABILITIES}
    record.write_text(json.dumps(dict(sorted(choices.items())), indent=0) + "\n", encoding="utf-8")
