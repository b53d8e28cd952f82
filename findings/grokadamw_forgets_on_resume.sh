#!/usr/bin/env bash
# A training with `optim="grokadamw"` that is resumed from a checkpoint does not continue where it stopped.
#
# One would guess: resuming gives the losses of the uninterrupted training, as it does with AdamW on the same data.
# What happens: the optimizer looks for its states under other keys than those it saved, so it starts from none.
#
#     bash findings/grokadamw_forgets_on_resume.sh      # exits 1 if that changed
#
# It needs Python 3.10 or newer and a package index; torch is the largest download.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 grokadamw==0.1.2

cat > "$folder/show.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import torch
import transformers

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
print(f"torch {torch.__version__}, transformers {transformers.__version__}, grokadamw {version('grokadamw')}")


def losses(optim, output, resume=None):
    """The losses of six steps, or of the last three when resumed from a checkpoint."""
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    data = [{"input_ids": torch.arange(i, i + 16), "labels": torch.arange(i, i + 16)} for i in range(24)]
    args = transformers.TrainingArguments(
        output, optim=optim, max_steps=6, logging_steps=1, per_device_train_batch_size=4, use_cpu=True, save_steps=3,
        report_to="none", disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant",
    )
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)
    return [round(row["loss"], 4) for row in trainer.state.log_history if "loss" in row][-3:]


found = {}
for optim in ("adamw_torch", "grokadamw"):
    with tempfile.TemporaryDirectory() as output:
        whole = losses(optim, output)
        found[optim] = whole, losses(optim, output, resume=f"{output}/checkpoint-3")
    print(f"{optim}: steps 4 to 6 uninterrupted {found[optim][0]}, resumed {found[optim][1]}")
plain, grok = found["adamw_torch"], found["grokadamw"]
sys.exit(0 if plain[0] == plain[1] and grok[0] != grok[1] else "not as before")
PYTHON

"$folder/venv/bin/python" "$folder/show.py" 2>&1 | grep -v "\[transformers\]\|^{"
