#!/usr/bin/env bash
# With a layer-wise optimizer the Trainer logs a gradient norm of 0, and `max_grad_norm` clips nothing.
#
# One would guess: `max_grad_norm` either clips, or is refused, for the logged norm is what people watch for divergence.
# What happens: a hook updates and frees each gradient during backward, so the clipping that follows finds none.
#
#     bash findings/layerwise_optimizer_reports_no_gradient.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 galore-torch==1.0

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
print(f"torch {torch.__version__}, transformers {transformers.__version__}, galore-torch {version('galore-torch')}")


def trained(optim, max_grad_norm):
    """The logged gradient norms, and the weights after three steps."""
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    data = [{"input_ids": torch.arange(i, i + 16), "labels": torch.arange(i, i + 16)} for i in range(12)]
    with tempfile.TemporaryDirectory() as output:
        args = transformers.TrainingArguments(
            output, optim=optim, optim_target_modules=["q_proj", "k_proj"] if "galore" in optim else None,
            max_grad_norm=max_grad_norm, max_steps=3, logging_steps=1, per_device_train_batch_size=4, use_cpu=True,
            report_to="none", disable_tqdm=True, save_strategy="no", learning_rate=1e-3,
        )
        trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
    norms = [float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
    return norms, torch.cat([weight.detach().flatten() for weight in model.parameters()])


results = {}
for optim in ("adamw_torch", "galore_adamw_layerwise"):
    for limit in (1e-4, 1e4):
        results[optim, limit] = norms, weights = trained(optim, limit)
        print(f"{optim}, max_grad_norm={limit}: norms {[round(norm, 3) for norm in norms]}")
same = torch.equal(results["galore_adamw_layerwise", 1e-4][1], results["galore_adamw_layerwise", 1e4][1])
print("layer-wise: the limit changes no weight:", same)
zero = not any(results["galore_adamw_layerwise", 1e4][0])
sys.exit(0 if zero and same and all(results["adamw_torch", 1e4][0]) else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]\|^{"
