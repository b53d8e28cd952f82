#!/usr/bin/env bash
# transformers 5.24 calls a model's `past_key_values` `cache`. It still takes the old name, so nothing seems to change
# for peft 0.21.2, the newest release on 2026-11-28, which looks for the old one.
#
# One would guess: prompts learnt with peft work as before, or an error says that they do not.
# What happens with transformers 5.24.0, without an error:
# - prefix tuning and cartridges: `generate` ignores the prefix. Its text is that of the model without an adapter.
# - prompt tuning and P-tuning: `generate` puts the prompt before every token, not only before the first. After 8
#   prompt tokens, 4 virtual ones and 8 new ones the cache holds 47 tokens, not 19, and the text differs from what the
#   same model says without a cache.
# LoRA is right in both. With transformers 5.23.0 all of them are.
#
#     bash findings/peft_loses_prompts.sh       # exits 1 if a release behaves in another way
#
# It needs Python 3.11 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
install() { "$folder/venv/bin/python" -m pip install -q --disable-pip-version-check "$@"; }
install torch==2.13.0 peft==0.21.2 transformers==5.23.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("ignore")
import peft
import torch
import transformers
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
TASK = {"task_type": "CAUSAL_LM"}
KINDS = {
    "LoRA": LoraConfig(target_modules=["q_proj"], **TASK),
    "prefix tuning": PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "prompt tuning": PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "P-tuning": PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=32, **TASK),
}
PROMPT = torch.arange(16).view(2, 8)


def written(model, **options):
    options |= dict(max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    made = model.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), **options)
    return made.sequences[:, 8:].tolist(), made["past_key_values"]


def forwards(model):
    """What the model writes when it reads all tokens again for each new one."""
    tokens = PROMPT
    for _ in range(8):
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens[:, 8:].tolist()


found = {}
for name, kind in KINDS.items():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, eos_token_id=None, pad_token_id=0))
    model = get_peft_model(model, kind).eval()
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight)  # as if something had been learnt
    with torch.no_grad():
        text, cache = written(model)
        right = forwards(model)
        with model.disable_adapter():
            without, _ = written(model)
    verdict = "right" if text == right else "the adapter is ignored" if text == without else "wrong"
    found[name] = f"{verdict}, {cache.get_seq_length()} tokens in the cache"
print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
for name, verdict in found.items():
    print(f"  generate with {name}: {verdict}")
expected = dict.fromkeys(KINDS, "right, 19 tokens in the cache") | {"LoRA": "right, 15 tokens in the cache"}
if sys.argv[1] == "lost":
    expected["prefix tuning"] = "the adapter is ignored, 15 tokens in the cache"
    expected["prompt tuning"] = expected["P-tuning"] = "wrong, 47 tokens in the cache"
sys.exit(f"not as before; it was {expected}" if found != expected else 0)
PYTHON

"$folder/venv/bin/python" "$folder/show.py" right 2>&1 | grep -v "\[transformers\]"
install transformers==5.24.0
"$folder/venv/bin/python" "$folder/show.py" lost 2>&1 | grep -v "\[transformers\]"
