"""The table "What the guides' code does today" of lesson 03: under the pinned versions, each row gives the result
listed here.

The cells are the lesson's own. If a new version removes a feature, or restores one, the test fails and shows both
results.
"""

import re
import warnings
from importlib.metadata import version
from pathlib import Path

import jupytext
import pytest

from perf_helpers import Lab
from trainmem.core import hardware

ROOT = Path(__file__).resolve().parents[1]
PINNED = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
USED = ("torch", "transformers", "accelerate", "bitsandbytes", "datasets", "nvidia-ml-py")
INSTALLED = {name: version(name).partition("+")[0] for name in USED}
RUNS = """
    datasets.Dataset.from_dict | gradient_accumulation_steps=4, fp16=True | bitsandbytes.optim.Adam8bit
    import get_parameter_names | torch._dynamo.optimize('eager') | _multi_tensor | matmul.allow_tf32 = True
    --fp16 --fp16_full_eval
"""
WARNS = """
    args(gradient_checkpointing=True) | model.gradient_checkpointing_enable() | torch.cuda.amp.autocast
    torch.distributed.launch
"""
RAISES = {
    "nvidia-ml-py3": "PackageNotFoundError",
    "evaluation_strategy": "TypeError",
    "Trainer(model, args(eval_strategy='steps')": "ValueError",
    "args(bf16=True)": "ValueError",  # for want of a GPU, as the next one
    "args(tf32=True)": "ValueError",
    "adamw_hf": "ValueError",
    "adamw_apex_fused": "ValueError",
    "Accelerator(fp16=True)": "TypeError",
    "to_bettertransformer": "AttributeError",
    "import torchdynamo": "ModuleNotFoundError",
    "file_utils.is_torch_bf16_available": "AttributeError",
    "--no_tf32": "ValueError",
    "--overwrite_output_dir": "ValueError",
}
ELSE = {
    "randint(0, 1, 512)": "differs: all labels are 0",
    "load().dtype": "differs: fp16 stays",
    "named <= listed": "differs: 7 of 7 are gone",
}


@pytest.fixture(scope="module")
def lesson():
    """Run the lesson's cells that make the table "What the guides' code does today"; return {variable: value}."""
    cells = [cell.source for cell in jupytext.read(ROOT / "notebooks/src/03_vanilla_training.py").cells]
    imports = next(cell for cell in cells if cell.startswith("import os\n")).partition("\nlab = ")[0]
    table = [cell for cell in cells if re.search(r"^(def outcomes?\(|BACKENDS =|PROGRAM =)", cell, re.MULTILINE)]
    assert len(table) == 4
    made = {"lab": Lab("cpu")}
    for cell in (imports, *table):
        exec(cell, made)
    return made


def expected():
    lists = {"runs": RUNS, "warns": WARNS}
    words = {part.strip(): word for word, text in lists.items() for part in re.split(r"[|\n]", text) if part.strip()}
    return words | {part: f"raises {error}" for part, error in RAISES.items()} | ELSE


@pytest.mark.nightly
@pytest.mark.skipif(hardware.describe().kind != "cpu", reason="some lines need a GPU to run")
@pytest.mark.skipif({name: PINNED[name] for name in USED} != INSTALLED, reason="other versions than those pinned")
def test_each_line_does_what_is_written_here(lesson):
    found = {line: today for _, line, today, *_ in lesson["rows"]}
    words = expected()
    named = {line: [word for part, word in words.items() if part in line] for line in found}
    assert found == {line: word for line, (word,) in named.items()}
    assert len(found) == len(words) == len(lesson["rows"])


@pytest.mark.nightly
def test_what_is_written_instead_runs(lesson):
    assert {outcome for *_, instead, outcome in lesson["rows"] if instead} == {"runs"}


@pytest.mark.nightly
def test_a_word_is_what_happened(lesson):
    lines = {
        "x = 1": "runs",
        "assert 1 == 2, 'it is not'": "differs: it is not",
        "1 / 0": "raises ZeroDivisionError",
        "raise SystemExit(2)": "raises SystemExit",
        "warnings.warn('ends', FutureWarning)": "warns",
        "warnings.warn('noise', UserWarning)": "runs",
    }
    assert {line: lesson["outcome"](line, {"warnings": warnings}) for line in lines} == lines
