"""List techniques that save memory, each with its training arguments, cost, and the course's claims about its speed."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Technique:
    """Hold an option of `QUESTIONS`, e.g. SGD: arguments, disadvantage, and the course's claims about its speed."""

    name: str  # shown in tables
    arguments: dict[str, Any] = field(hash=False)  # training arguments that switch it on
    cost: str = ""  # its disadvantage, as text; empty for the plain choice
    claims: dict[str, str] = field(default_factory=dict, hash=False)  # {"cpu" or "cuda": id of the claim about speed}

    @property
    def words(self) -> set[str]:
        """Words by which a user may name the technique: its name, its arguments' names, and values that are texts."""
        values = {value for value in self.arguments.values() if isinstance(value, str)}
        return {self.name, *self.arguments, *values} - ({"optim"} if not self.cost else set())


CHECKPOINTING = Technique(
    "checkpointing",
    {"gradient_checkpointing": True},
    "recomputation: each layer's forward runs again in the backward pass",
    {"cpu": "checkpointing-cost", "cuda": "checkpointing-cost"},
)
BF16 = Technique(
    "bf16",
    {"bf16": True},
    "precision: matmuls run in bf16, with 8 significant bits; weights and optimizer states stay in fp32",
    {"cpu": "half-precision-faster-cpu", "cuda": "fp16-faster"},
)
FP16 = Technique(
    "fp16",
    {"fp16": True},
    "precision: matmuls run in fp16, and steps whose gradients overflow are skipped",
    {"cuda": "fp16-faster"},
)
BF16_WEIGHTS = Technique(
    "bf16 weights",
    {"dtype": "bfloat16"},
    "precision and convergence: weights, gradients and states in bf16 lose updates smaller than 1/256 of a weight",
)
ADAMW = Technique("AdamW", {"optim": "adamw_torch_fused"})
ADAMW_UNFUSED = Technique(
    "unfused AdamW",
    {"optim": "adamw_torch"},
    "memory and time: a GPU updates all tensors together (foreach), with temporaries of their size; a CPU updates one "
    "tensor after another",
)
ADAFACTOR = Technique(
    "Adafactor",
    {"optim": "adafactor"},
    "convergence: second moments by row and column, no first moment; it may need another learning rate and more steps",
    {"cpu": "adafactor-cost", "cuda": "adafactor-cost"},
)
ADAM_8BIT = Technique(
    "8-bit Adam",
    {"optim": "adamw_bnb_8bit"},
    "precision: optimizer states are stored in 8 bits, block by block",
    {"cuda": "adam8bit-cost"},
)
PLAIN_ATTENTION = Technique(
    "plain attention",
    {"attn_implementation": "eager"},
    "memory and time: each head's matrix of length x length is stored",
)
LORA = Technique(
    "LoRA",
    {"peft": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}},
    "capacity: the model's weights are frozen; only adapters of rank 16 are trained",
    {"cpu": "lora-faster", "cuda": "lora-faster"},
)
QLORA = Technique(
    "QLoRA",
    LORA.arguments
    | {
        "quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "prepare_model_for_kbit_training": True,
    },
    "capacity, precision and time: LoRA on weights stored in 4 bits, which are dequantized before each matmul",
)
SGD = Technique("SGD", {"optim": "sgd"}, "convergence: one learning rate for all parameters, no optimizer states")

PRECISIONS = (BF16, FP16, BF16_WEIGHTS)
OPTIMIZERS = (ADAMW, ADAMW_UNFUSED, ADAFACTOR, ADAM_8BIT, SGD)

# The choices that make up a recipe: {training arguments: options}. `None` is the library's default.
QUESTIONS: dict[tuple[str, ...], tuple[Technique | None, ...]] = {
    ("gradient_checkpointing",): (None, CHECKPOINTING),
    ("bf16", "fp16", "dtype"): (None, *PRECISIONS),
    ("optim",): OPTIMIZERS,
    ("attn_implementation",): (None, PLAIN_ATTENTION),
    (*QLORA.arguments, "load_in_4bit", "load_in_8bit", "freeze"): (None, LORA, QLORA),
}
ADAPTERS = (QLORA, LORA)  # the one that needs less memory first
# Offered on request only: worse than the plain choice in memory or time, or another kind of training.
ON_DEMAND = {SGD, ADAMW_UNFUSED, PLAIN_ATTENTION, *ADAPTERS}
OF_ACTIVATIONS = {CHECKPOINTING, PLAIN_ATTENTION, BF16, FP16}  # change only what is kept for the backward pass
ACCUMULATION = ("accumulation", "gradient_accumulation_steps")


def techniques() -> list[Technique]:
    """Return the techniques of recipes (dicts of training arguments): all options in `QUESTIONS` except None."""
    return [option for options in QUESTIONS.values() for option in options if option]
