"""Query tools from PyPI that claim to predict the memory of a training on a GPU.

    PYTHON benchmarks/tools_pypi.py TOOL QUESTIONS.json   # as measure_cuda_tools.py and published_tools.py do

PYTHON has the tool installed; of this project only `tools` is imported. A tool is called as its documentation says. If
it would download from the Hub, the training's config.json and number of parameters replace the download. A setting of
the training for which a tool has no option is left out of the question. If a tool has the option but not the value, it
cannot answer.

Each answer comes from its own process, forked after the tool was imported.
"""

import dataclasses
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tools

MIB, GIB = 2**20, 2**30
SECONDS = 60  # time limit of an answer
ABSENT = 3  # exit code: the tool is not installed


class Cannot(Exception):
    """The tool cannot express this training."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A training in terms that these tools know."""

    folder: str  # the folder with its config.json
    fields: dict  # content of config.json
    parameters: int
    largest_layer: int  # parameters of the largest single module
    width: int | None  # hidden_size, whatever its name in the configuration
    depth: int | None  # num_hidden_layers
    heads: int | None  # num_attention_heads
    tokens: int | None  # per sequence; None for images
    size: int  # samples per micro-batch
    precision: str  # of the computation: fp32, fp16 or bf16
    mixed: bool  # weights are in fp32
    optimizer: str  # a value of the Trainer's `optim`
    checkpointing: bool
    flash: bool  # attention stores no table of length x length
    card: str  # a card of the training's compute capability
    trained: int  # trained parameters
    method: str = "full"  # or "lora": adapters in fp32 on q, k, v and o
    rank: int | None = None  # of LoRA

    @property
    def length(self) -> int:
        """Return the tokens per sequence."""
        if self.tokens is None:
            raise Cannot("images")
        return self.tokens

    @property
    def experts(self) -> int:
        return self.fields.get("num_local_experts") or self.fields.get("num_experts") or 1

    @property
    def experts_of_a_token(self) -> int:
        return self.fields.get("num_experts_per_tok") or 1

    @property
    def key_heads(self) -> int | None:
        return self.fields.get("num_key_value_heads")

    @property
    def half(self) -> str:
        """Return torch's name of the precision."""
        return {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[self.precision]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes per weight."""
        return 4 if self.mixed or self.precision == "fp32" else 2

    def words(self, **names: str) -> dict:
        """Return {a tool's name of a setting: its value}."""
        return {theirs: getattr(self, ours) for theirs, ours in names.items()}

    def named(self, *plain: str, **theirs: str) -> str:
        """Return the tool's name for the optimizer: that in OPTIMIZERS, or another."""
        for name, ours in OPTIMIZERS.items():
            if self.optimizer in ours and (name in plain or name in theirs):
                return theirs.get(name, name)
        raise Cannot(f"the optimizer {self.optimizer}")


OPTIMIZERS = {  # {kind that tools distinguish: the Trainer's names}
    "adamw": ("adamw_torch", "adamw_torch_fused"),
    "adamw_8bit": ("adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"),
    "sgd": ("sgd",),
    "adafactor": ("adafactor",),
    "adagrad": ("adagrad",),
    "rmsprop": ("rmsprop",),
    "lion": ("lion_32bit",),
    "lion_8bit": ("lion_8bit",),
}
# Bytes of tensors; then the total with additions for context, fragmentation and safety; then the context, if named.
Answer = float | tuple[float, float] | tuple[float, float, float]  # one number: bytes of tensors


def vramcalc(asked: Question) -> Answer:
    from vramcalc import estimate

    how = asked.words(dtype="precision", batch="size", seq_len="length", grad_checkpoint="checkpointing")
    how |= {"attn_impl": "sdpa" if asked.flash else "eager", "precision": "amp" if asked.mixed else "pure"}
    how |= {"lora_rank": asked.rank, "optimizer": asked.named("adamw", "sgd")}
    said = estimate(asked.folder, mode="train", **how)
    return said.total, said.total + said.overhead


def fitcheck(asked: Question) -> Answer:
    from fitcheck import config_parser
    from fitcheck.estimator import TrainingConfig, estimate
    from fitcheck.gpu_db import get_gpu
    from fitcheck.overhead_db import DEFAULT_OVERHEAD_PROFILE, get_overhead_profile

    config_parser.hf_hub_download = lambda **_: f"{asked.folder}/config.json"
    config_parser._reported_param_count = lambda *_: asked.parameters
    how = asked.words(precision="precision", batch_size="size", seq_len="length", grad_checkpoint="checkpointing")
    how |= {"optimizer": asked.named("adamw", "sgd", adamw_8bit="adam8bit"), "flash_attn": asked.flash}
    in_fp32 = asked.rank or asked.mixed or asked.precision == "fp32"
    how |= {"optimizer_dtype": "fp32" if in_fp32 else "bf16", "lora_rank": asked.rank}
    card = {"T4": "t4", "A100": "a100-80", "RTX 3090": "3090", "H100": "h100"}[asked.card]
    said = estimate(config_parser.fetch_model_config("a/model"), TrainingConfig(**how), get_gpu(card))
    context = (get_overhead_profile(card, asked.flash, "none") or DEFAULT_OVERHEAD_PROFILE).base_context_mib
    return (said.total_mib - said.overhead_mib) * MIB, said.total_mib * MIB, context * MIB


def preflight(asked: Question) -> Answer:
    from torch_preflight.vram import costmodel, hardware, types
    from torch_preflight.vram.providers import hub

    hub.fetch_config = lambda _: asked.fields
    precision = "amp" if asked.mixed else "fp32" if asked.precision == "fp32" else f"pure-{asked.precision}"
    how = asked.words(batch_size="size", seq_len="length", gradient_checkpointing="checkpointing")
    names = {"adamw_8bit": "adamw-8bit", "lion_8bit": "lion-8bit"}
    optimizer = asked.named("adamw", "sgd", "adafactor", "adagrad", "rmsprop", "lion", **names)
    how |= {"precision": types.PrecisionMode(precision), "optimizer": types.OptimizerKind(optimizer)}
    how |= {"flash_attention": asked.flash, "frozen_fraction": 1 - asked.trained / asked.parameters}
    card = {"T4": "t4", "A100": "a100-80gb", "RTX 3090": "rtx3090", "H100": "h100-80gb"}[asked.card]
    made = costmodel.estimate(hub.resolve("a/model"), types.RunConfig(**how), hardware.resolve(card)[0]).breakdown
    return made.total - made.fragmentation - made.cuda_context, made.total, made.cuda_context


def canifinetune(asked: Question) -> Answer:
    from canifinetune.estimator.memory import EstimateRequest, estimate

    how = asked.words(model_id="folder", seq_len="length", micro_batch_size="size", base_dtype="precision")
    how |= {"optimizer": asked.named("adamw_8bit", "sgd", adamw=asked.optimizer), "use_network": False}
    how |= asked.words(gradient_checkpointing="checkpointing", method="method")
    how |= {"lora_rank": asked.rank} if asked.rank else {}
    how |= {"attention_implementation": "sdpa" if asked.flash else "eager"}
    card = {"T4": 16, "A100": 80, "RTX 3090": 24, "H100": 80}[asked.card]
    said = estimate(EstimateRequest(gpu_vram_gb=card, **how)).memory
    total = said.total_estimated_gb
    return (total - said.cuda_overhead_gb - said.safety_margin_gb) * GIB, total * GIB


def ftuneai(asked: Question) -> Answer:
    from ftuneai import Estimator, hub

    hub.fetch_model_config = lambda _: asked.fields
    how = asked.words(batch_size="size", seq_length="length", gradient_checkpointing="checkpointing")
    how |= {"optimizer": asked.named("adamw", "sgd", "adafactor", adamw_8bit="adam_8bit"), "method": asked.method}
    how |= {"lora_rank": asked.rank, "lora_target": "attention_all"} if asked.rank else {}
    said = Estimator(f"asked/{asked.parameters}", flash_attention=asked.flash, **how).estimate_memory()
    return (said.total_gb - said.overhead_gb) * GIB, said.total_gb * GIB


def fitscout(asked: Question) -> Answer:
    from fitscout.memory.estimator import estimate_memory
    from fitscout.model.introspect import inspect_model

    width = 4 if asked.precision == "fp32" else 2
    how = asked.words(micro_batch="size", seq_len="length", grad_ckpt="checkpointing")
    how |= {"opt_8bit": asked.named("adamw", "adamw_8bit") == "adamw_8bit", "grad_dtype_bytes": width}
    how |= asked.words(method="method", lora_rank="rank")
    said = estimate_memory(inspect_model(asked.folder, dtype_bytes=width), **how)
    return (said.total_gb - said.overhead_gb) * GIB, said.total_gb * GIB


def llmcalculator(asked: Question) -> Answer:
    from llmcalculator.estimate import estimate
    from llmcalculator.hardware.base import CPU, HardwareProfile
    from llmcalculator.models.catalog import _spec_from_config
    from llmcalculator.workloads import FULL_FINETUNE, LORA

    model, machine = _spec_from_config("a/model", asked.fields), HardwareProfile(CPU("", 1, 1), 2**40)
    how = asked.words(quant_name="precision", context="length", batch="size", gradient_checkpointing="checkpointing")
    said = estimate(model, machine, LORA if asked.rank else FULL_FINETUNE, **how).breakdown
    return said.total - said.overhead, said.total


def alloc(asked: Question) -> Answer:
    from alloc.ghost import ghost

    names = {"adamw": "AdamW", "adamw_8bit": "AdamW8bit", "sgd": "SGD", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
    names |= {"lion": "Lion", "adafactor": "Adafactor"}
    how = asked.words(param_count="parameters", dtype="half", batch_size="size", seq_length="tokens")
    said = ghost(optimizer_type=asked.named(**names), hidden_dim=asked.width, **how)
    parts = said.weights_gb + said.gradients_gb + said.optimizer_gb + said.activations_gb
    return parts * GIB, said.total_gb * GIB


def vram_check(asked: Question) -> Answer:
    from vram_check import estimate

    optimizer = asked.named("adamw", "sgd")
    return estimate(asked.parameters, asked.size, asked.precision, optimizer, seq_len=asked.tokens or 128).total_bytes


def memguard(asked: Question) -> Answer:
    from memory_guard.estimator import FinetuneMethod, ModelArch, ModelSpec, TrainSpec, estimate_training_memory

    sizes = asked.words(params="parameters", hidden_dim="width", num_heads="heads", num_kv_heads="key_heads")
    sizes |= asked.words(num_layers="depth", num_experts="experts", num_active_experts="experts_of_a_token")
    sizes |= {"intermediate_dim": asked.fields.get("intermediate_size"), "bits": 8 * asked.weight_bytes}
    model = ModelSpec(arch=ModelArch.MOE if asked.experts > 1 else ModelArch.DENSE, **sizes)
    how = asked.words(batch_size="size", seq_length="length", grad_checkpoint="checkpointing", flash_attention="flash")
    how |= {"lora_layers": asked.depth}  # the tool counts activations over these, in full fine-tuning too
    how |= {"optimizer": asked.named("adamw", "sgd", "adafactor", "lion"), "mixed_precision": asked.precision != "fp32"}
    how |= {"method": FinetuneMethod(asked.method), "lora_rank": asked.rank or 8}
    said = estimate_training_memory(model, TrainSpec(**how))
    return (said.total_mb - said.overhead_mb) * MIB, said.total_mb * MIB


def qmemcalc(asked: Question) -> Answer:
    from qmemcalc import estimate_memory

    how = asked.words(precision="precision", num_trainable_params="trained", gradient_checkpointing="checkpointing")
    how |= {"optimizer": asked.named("adamw", "sgd", "adagrad", "rmsprop")}
    said = estimate_memory(asked.folder, asked.size, asked.length, **how)
    return (said["total_MB"] - said["buffers_MB"]) * 1e6, said["total_MB"] * 1e6


def gpu_estimator(asked: Question) -> Answer:
    from gpu_estimator import GPUEstimator

    sizes = asked.parameters, asked.size, asked.length, asked.precision, asked.named("adamw", "sgd")
    said = GPUEstimator().estimate(*sizes, gradient_checkpointing=asked.checkpointing)
    states = said.model_memory_gb + said.gradient_memory_gb + said.optimizer_memory_gb
    return (states + said.activation_memory_gb) * GIB, said.total_memory_gb * GIB


def kitsune(asked: Question) -> Answer:
    from kitsune.predict import predict_hf_memory

    how = asked.words(batch_size="size", seq_len="tokens", dtype="half")
    how |= {"optimizer": asked.named("adamw", "sgd", "adagrad", "rmsprop"), "training": True}
    said = predict_hf_memory(asked.folder, **how)
    return said.total_bytes - said.overhead_bytes, said.total_bytes


def hf_vram_calc(asked: Question) -> Answer:
    from hf_vram_calc.calculator import VRAMCalculator
    from hf_vram_calc.config import ConfigManager

    calculator = VRAMCalculator(ConfigManager())
    weights = calculator.calculate_model_memory(asked.parameters, asked.precision)
    if asked.rank:
        said = calculator.calculate_lora_memory(weights, asked.parameters, asked.rank)
        return said / calculator.lora_overhead_factor * GIB, said * GIB
    said = [calculator.calculate_training_memory(weights, overhead_factor=factor) for factor in (1.0, None)]
    return said[0] * GIB, said[1] * GIB


def memscale(asked: Question) -> Answer:
    from memscale.utils import estimate_training_memory

    optimizer = asked.named("adamw", "sgd")
    return estimate_training_memory(asked.weight_bytes * asked.parameters, asked.size, asked.length, optimizer)


def trainkit(asked: Question) -> Answer:
    from trainkit.memory import estimate_training_vram

    weights = asked.weight_bytes * asked.parameters
    return estimate_training_vram(weights, asked.size, asked.length, asked.width, asked.depth, asked.checkpointing)


def llm_analysis(asked: Question) -> Answer:
    from llm_analysis.analysis import ActivationRecomputation, LLMAnalysis
    from llm_analysis.config import DtypeConfig, ModelConfig, get_gpu_config_by_name

    bits = 32 if asked.precision == "fp32" else 16
    sizes = asked.words(num_key_value_heads="key_heads", moe_num_experts="experts", moe_top_k="experts_of_a_token")
    vocabulary = asked.fields.get("vocab_size")
    model = ModelConfig("a model", asked.depth, asked.heads, asked.width, vocabulary, asked.length, **sizes)
    card, efficiency = get_gpu_config_by_name("h100-pcie-80gb"), {"flops_efficiency": 0.5, "hbm_memory_efficiency": 1}
    states = {
        "adamw": "8",
        "adamw_8bit": "2",
        "sgd": "0",
        "lion": "4",
        "rmsprop": "4",
        "adagrad": "4",
        "lion_8bit": "1",
    }
    how = asked.words(batch_size_per_gpu="size", seq_len="length", master_weights_dtype_bytes="weight_bytes")
    how |= {"gradient_accumulation_steps": 1, "total_num_tokens": 10**6, "flash_attn": asked.flash}
    how |= {"activation_recomputation": ActivationRecomputation(2 if asked.checkpointing else 0)}
    how |= {"other_op_bytes": int(asked.named(**states)) * asked.weight_bytes // 4}
    said = LLMAnalysis(model, card, DtypeConfig("", bits, bits, bits), **efficiency).training(**how)
    return said["(weight+op_state+grad)_memory_per_gpu"] + said["activation_memory_per_gpu"]


def deepspeed_zero2(asked: Question) -> Answer:
    return tools.zero2(asked.parameters)


def deepspeed_zero3(asked: Question) -> Answer:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    here = {"cpu_offload": False, "cpu_offload_params": False, "zero_init": True}
    return estimate_zero3_model_states_mem_needs(asked.parameters, asked.largest_layer, 1, 1, **here)[1]


TOOLS: dict[str, Callable[[Question], Answer]] = {  # by distribution name
    "DeepSpeed, ZeRO stage 2": deepspeed_zero2,
    "DeepSpeed, ZeRO stage 3": deepspeed_zero3,
    "vramcalc": vramcalc,
    "fitcheck-llm": fitcheck,
    "torch-preflight": preflight,
    "canifinetune": canifinetune,
    "llm-analysis": llm_analysis,
    "fitscout": fitscout,
    "ftuneai": ftuneai,
    "llmcalculator": llmcalculator,
    "torch-kitsune": kitsune,
    "ml-memguard": memguard,
    "gpu-estimator": gpu_estimator,
    "qmemcalc": qmemcalc,
    "trainkit-vp": trainkit,
    "memscale": memscale,
    "alloc": alloc,
    "vram-check": vram_check,
    "hf-vram-calc": hf_vram_calc,
}


def answer(tool: Callable[[Question], Answer], asked: Question) -> dict:
    """Return {"bytes", "total_bytes", "context_bytes", "seconds", "own_bytes"} or {"refused": reason}."""
    began = time.perf_counter()
    try:
        if asked.rank and tool.__name__ not in tools.ABOUT["lora"]:
            raise Cannot("LoRA")
        said = tool(asked)
    except Cannot as error:
        return {"refused": f"cannot say {error}"}
    except (Exception, SystemExit) as error:
        return {"refused": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    said = said if isinstance(said, tuple) else (said, said)
    found = dict(zip(("bytes", "total_bytes", "context_bytes"), map(int, (*said, 0)), strict=False))
    return found | {"seconds": time.perf_counter() - began, "own_bytes": own}


def forked(tool: Callable[[Question], Answer], asked: Question) -> dict:
    """Return a tool's answer from a forked process."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the alarm ends the process, even if the tool sets a handler
        signal.alarm(SECONDS)
        os.write(writing, json.dumps(answer(tool, asked)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"refused": f"no answer in {SECONDS} seconds"}


def main() -> None:
    tool = TOOLS[sys.argv[1]]
    try:
        version = importlib.metadata.version(sys.argv[1].partition(",")[0])
    except importlib.metadata.PackageNotFoundError:
        sys.exit(ABSENT)
    own = os.dup(1)
    os.dup2(2, 1)  # keep the tool's output out of the answer
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    questions = [Question(**asked) for asked in json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))]
    easy = dataclasses.replace(next(asked for asked in questions if asked.tokens), optimizer="adamw_torch")
    answer(tool, easy)  # lets the tool import its libraries
    said = [forked(tool, asked) for asked in questions]
    os.write(own, json.dumps({"version": version, "said": said}).encode())


if __name__ == "__main__":
    main()
