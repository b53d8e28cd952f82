#!/usr/bin/env bash
# AdaLoRA divides by `ranknum`, the present rank of a matrix. peft keeps it as a parameter that is not trained.
#
# One would guess: it stays untrained, whatever the type of the base model.
# What happens: beside a base in bf16, peft 0.21.2 casts adapters to fp32 and makes new parameters for them, which are
# trained by default. So the optimizer changes the rank. Beside a base in fp32, and with peft 0.19.1, it does not.
#
#     bash findings/adalora_trains_its_rank.sh      # exits 1 if that changed
#
# It needs Python 3.11 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 peft==0.21.2 transformers==5.23.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("ignore")
import peft
import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
trained = {}
for kind in (torch.float32, torch.bfloat16):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(kind)
    model = peft.get_peft_model(model, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10))
    ranks = [(weight, weight.item()) for name, weight in model.named_parameters() if "ranknum" in name]
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    for name, weight in model.named_parameters():
        if "lora_E" in name:
            torch.nn.init.ones_(weight)  # it begins at 0, where no gradient reaches the rank
        if "lora_B" in name:
            torch.nn.init.ones_(weight)
    ids = torch.arange(20).view(2, 10)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    trained[kind] = sum(weight.requires_grad for weight, _ in ranks)
    moved = [(before, round(weight.item(), 3)) for weight, before in ranks]
    print(f"base in {kind}: {trained[kind]} of {len(ranks)} ranks are trained; before and after a step: {moved}")
sys.exit(0 if [*trained.values()] == [0, 2] else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]"
