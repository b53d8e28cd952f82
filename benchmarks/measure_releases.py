"""Compare the estimate for CUDA, by the rules of one torch release, with that release's own allocator in rehearsals.

    PYTHON benchmarks/measure_releases.py [--count 96] [--seed 1] [--pythons PYTHON ...] [--out FILE]

PYTHON has the CUDA build of the release: it rehearses each training and estimates it. Each Python of --pythons has
another torch, and estimates each training for this release (argument `torch_version`). The trainings are of the kinds
in which releases differ: attention with grouped queries, masks and dropout, adapters, quantized bases, position biases,
images, and inference with a key value cache.

Exit code 1 if an estimate differs from the rehearsal by a byte, allocated or reserved.
"""

import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import cloudpickle
import measure_cuda
from architectures import configuration
from measure_adapters import BASES, METHODS
from measure_cuda import MEMORY, Training
from measure_random import random_training
from runner import Measurement, read_record, rehearsing

from perf_helpers.lab import Lab
from trainmem.core import hardware, optional_packages
from trainmem.core.arguments import Arguments
from trainmem.core.task import Task
from trainmem.core.training import Experiment, infer
from trainmem.estimate import estimate
from trainmem.rehearsal import card

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0))
KINDS = (
    *("grouped", "grouped", "grouped, dropout", "grouped, padded", "LoRA", "4 bits", "T5", "images"),
    *("accumulation, checkpoints", "Adafactor, 8-bit Adam", "inference", "inference with a cache"),
)
GROUPED = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma2",
    "phi3": "Phi3",
}
ANSWER = "--answer"  # the option for a Python that only estimates


@dataclass(frozen=True)
class Case(Training):
    """A generated training or inference of one of `KINDS`, the kinds whose memory depends on the torch release."""

    kind: str = ""
    training: bool = True
    lengths: tuple[int, ...] = ()  # tokens per sample, if they differ

    def task(self, folder: Path) -> Task:
        task = super().task(folder)
        return task.replace(lengths=tuple(self.lengths)) if self.lengths else task

    def experiment(self, folder: Path) -> Experiment:
        given = Arguments.of(self.arguments)
        return Experiment(str(self.number), task=self.task(folder), arguments=given, training=self.training)

    def estimated(self, folder: Path, torch_version: str | None = None):
        options = {"device": "cuda", "compute_capability": self.capability, "processes": self.processes}
        options |= {"torch_version": torch_version, "training": self.training}
        return estimate(self.task(folder), **options, **self.arguments)


def case(number: int, seed: int) -> Case:
    """Return the random case that `seed` and `number` determine.

    Successive numbers go through all of `KINDS`, one after the other; after each such round the compute capability
    changes.
    """
    draw = random.Random(f"releases {seed} {number}")
    kind = KINDS[number % len(KINDS)]
    if kind in ("T5", "images"):
        names = {"T5": ("T5", "mT5", "LongT5"), "images": ("ViT", "DINOv2", "BEiT")}[kind]
        name = draw.choice(names)
        config, one = configuration(name, draw), random_training(0, draw.randrange(10**6))
        one = replace(
            one, architecture=name, config=config, seq_len=None if kind == "images" else draw.randint(20, 300)
        )
    else:
        one = next(found for found in _drawn(draw) if found.architecture in GROUPED)
    arguments, more = dict(one.arguments), {}
    if kind == "grouped, dropout":
        more["config"] = one.config | {"attention_dropout": draw.choice((0.1, 0.125, 0.25))}
    if kind == "grouped, padded":
        size = arguments["per_device_train_batch_size"] = draw.choice((2, 3, 4))
        more["lengths"] = tuple(draw.randint(5, 400) for _ in range(size * draw.choice((1, 2))))
        more["seq_len"] = None
    if kind in ("LoRA", "4 bits"):
        of_base = [base for base in BASES if bool(base) == (kind == "4 bits")]
        arguments |= {"peft": draw.choice(METHODS[:4])} | draw.choice(of_base)
    if kind == "accumulation, checkpoints":
        arguments |= {"gradient_accumulation_steps": draw.choice((2, 3)), "gradient_checkpointing": True}
    if kind == "Adafactor, 8-bit Adam":
        arguments["optim"] = draw.choice(("adafactor", "adamw_bnb_8bit"))
    if kind.startswith("inference"):
        same = {name: arguments[name] for name in ("fp16", "bf16", "dtype", "attn_implementation") if name in arguments}
        arguments = same | {"per_device_eval_batch_size": draw.choice((1, 2, 5))}
        more["training"] = False
        if "cache" in kind:
            arguments["max_new_tokens"] = draw.choice((1, 5, 40))
            more["config"] = one.config | {"architectures": [f"{GROUPED[one.architecture]}ForCausalLM"]}
    capability = CAPABILITIES[number // len(KINDS) % len(CAPABILITIES)]
    fields = one.to_dict() | {"number": number, "arguments": arguments, "capability": capability, "kind": kind} | more
    return Case.from_dict(fields)


def _is_accepted(config: dict) -> bool:
    """Return whether transformers accepts a configuration's width; some architectures need a multiple of the number of
    heads.
    """
    return "head_dim" not in config or not config["hidden_size"] % config["num_attention_heads"]


def _drawn(draw: random.Random) -> Iterator[Training]:
    while True:
        yield random_training(draw.randrange(1000), draw.randrange(10**6))


# ---- torch's allocator, and estimates


def inferred(experiment: Experiment):
    """Return a function for a fresh process of a rehearsal: it runs two passes of an experiment in inference and
    returns torch's peaks.

    The peaks, allocated and reserved bytes, count from the first forward pass.
    """

    def work(_):
        import torch

        seen = []

        def first(*_):
            if not seen:
                seen.append(torch.cuda.memory_allocated())
                torch.cuda.reset_peak_memory_stats()

        torch.nn.modules.module.register_module_forward_pre_hook(first)
        infer(experiment)
        stats = torch.cuda.memory_stats()
        return {name: stats[f"{name}_bytes.all.peak"] for name in ("allocated", "reserved")}

    return work


def reference(lab: Lab, one: Case, folder: Path) -> dict:
    work = measure_cuda.rehearsed if one.training else inferred
    try:
        run = lab.run(work(one.experiment(folder)), measure="none")
    except ValueError as error:
        return {"left_out": f"refused: {str(error)[-200:]}"}
    if not run.ok:
        return {"left_out": run.message[-200:]}
    return {"rehearsed": {name: run.value[name] for name in ("allocated", "reserved")}}


def estimate_of(one: Case, torch_version: str | None) -> dict:
    """Return the estimate of a case in this process: {"allocated", "reserved": bytes} or {"refused": reason}.

    `torch_version`: the release whose rules are used; None: the installed one.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            memory = one.estimated(Path(folder), torch_version).memory
        except ValueError as error:
            return {"refused": str(error)[:300]}
    return {"allocated": memory.peak_bytes, "reserved": memory.reserved_bytes}


@contextlib.contextmanager
def answering(python: str) -> Iterator:
    """Yield a function (case, torch_version) that estimates a case in a process of another Python.

    It returns {"allocated", "reserved": bytes} or {"refused": reason}. `python`: path of the other Python; its process
    ends when the context ends.
    """
    command = [python, __file__, ANSWER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:

        def ask(one: Case, torch_version: str) -> dict:
            process.stdin.write(json.dumps([one.to_dict(), torch_version]) + "\n")
            return json.loads(process.stdout.readline())

        ask.version = json.loads(process.stdout.readline())
        yield ask
        process.stdin.close()


def answer() -> None:
    """Read cases from standard input, a line of JSON each, until its end, and print the estimate of each as JSON."""
    optional_packages.offer("peft")
    print(json.dumps(hardware.versions()["torch"]), flush=True)
    for line in sys.stdin:
        fields, torch_version = json.loads(line)
        print(json.dumps(estimate_of(Case.from_dict(fields), torch_version)), flush=True)


# ---- the record


def cases(options) -> dict[str, Case]:
    return {str(number): case(number, options.seed) for number in range(options.count)}


def measure(cases, options):
    if reason := optional_packages.offer("peft"):
        raise SystemExit(f"measure_releases: {reason}")
    cloudpickle.register_pickle_by_value(measure_cuda)
    here = hardware.versions()["torch"]
    release = re.match(r"\d+\.\d+", here)[0]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        others = [stack.enter_context(answering(python)) for python in options.pythons]
        for capability in CAPABILITIES:
            own = {name: one for name, one in cases.items() if one.capability == capability}
            with rehearsing(card(None, capability, MEMORY)) as lab:
                for name, one in own.items():
                    row = one.to_dict() | reference(lab, one, folder)
                    if "rehearsed" in row:
                        row["estimated"] = {here: estimate_of(one, None)}
                        row["estimated"] |= {other.version: other(one, release) for other in others}
                        row["missed"] = [name for name, found in row["estimated"].items() if found != row["rehearsed"]]
                    yield name, row


def conclude(rows: list[dict], options) -> dict:
    tried = [row for row in rows if "rehearsed" in row]
    summary = {name: {"equal": 0, "of": 0} for row in tried for name in row["estimated"]}
    for row in tried:
        for name in row["estimated"]:
            summary[name]["of"] += 1
            summary[name]["equal"] += name not in row["missed"]
    what = "the estimate for CUDA, by the rules of one release of torch, beside that release's allocator in rehearsals"
    return {"what": what, "seed": options.seed, "summary": summary, "left_out": len(rows) - len(tried)}


def line(row: dict) -> str:
    where = f"{row['kind']}, {row['architecture']}, {row['capability'][0]}.{row['capability'][1]}"
    if "left_out" in row:
        return f"{where}: left out, {row['left_out']}"
    off = {name: row["estimated"][name] for name in row["missed"]}
    return where + (f": rehearsed {row['rehearsed']}, estimated {off}" if off else ": equal")


OPTIONS = {"count": 96, "seed": 1, "pythons": []}
RELEASES = Measurement(__doc__, "releases.json", cases, measure, conclude, OPTIONS, line=line, rehearsed=True)

if __name__ == "__main__":
    if ANSWER in sys.argv:
        answer()
    else:
        code = RELEASES.main()
        found = read_record(RELEASES.parsed(None).out)["summary"].values()
        sys.exit(code or int(any(each["equal"] < each["of"] for each in found)))
