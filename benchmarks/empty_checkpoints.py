"""Write checkpoints, tokenizers and data for programs that are rehearsed: the files have the right sizes and no values.

python benchmarks/empty_checkpoints.py litgpt MODEL FOLDER TOKENIZER     MODEL: a name that litgpt knows, e.g. phi-2
python benchmarks/empty_checkpoints.py torchtune PRESET FOLDER           PRESET: a Llama of trainmem, e.g. llama-3.2-3b
python benchmarks/empty_checkpoints.py nanochat WORDS FOLDER             WORDS: size of the vocabulary, e.g. 32768

A file of weights is a hole in the disk of the weights' size, so 16 GB of weights take a few kB. A rehearsal computes
nothing, so the weights' values do not matter. Each sample is longer than any sequence of the trainings.
"""

import argparse
import base64
import itertools
import json
import pickle
import shutil
from pathlib import Path

import torch

WORDS = 4000  # of a sample; each word is at least one token


def write_samples(folder: Path) -> None:
    """Write 80 samples of instruction tuning to data.json in a folder."""
    sample = {"instruction": "a", "input": "", "output": "la " * WORDS}
    (folder / "data.json").write_text(json.dumps([sample] * 80))


def litgpt(model: str, folder: Path, tokenizer: Path) -> None:
    """Write what litgpt's commands read into a folder: the model's weights in bf16, its configuration, a tokenizer, and
    80 samples in data.json.

    `model`: its name in litgpt; `tokenizer`: a folder whose files "tokenizer*" are copied.
    """
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    folder.mkdir(parents=True)
    config = Config.from_name(model)
    with torch.device("meta"):
        weights = GPT(config).state_dict()
    empty = {name: torch.empty(weight.shape, dtype=torch.bfloat16) for name, weight in weights.items()}
    with torch.serialization.skip_data():
        torch.save(empty, folder / "lit_model.pth")
    save_config(config, folder)
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    write_samples(folder)


def torchtune(preset: str, folder: Path) -> None:
    """Write what torchtune's recipes read into a folder: the model's weights in bf16 by their names on the Hub, its
    config.json, a tokenizer of single bytes, and samples in data.json.

    `preset`: name of a Llama model in `trainmem.core.task.PRESETS`.
    """
    import transformers

    from trainmem.core.task import Task

    folder.mkdir(parents=True)
    fields = Task(preset).build_config()
    fields.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(fields, dtype=torch.bfloat16)
    weights = model.state_dict()
    if fields.tie_word_embeddings:
        weights.pop("lm_head.weight")
    header, end = {}, 0
    for name, weight in weights.items():
        start, end = end, end + weight.nbytes
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    ranks = (f"{base64.b64encode(bytes([each])).decode()} {each}" for each in range(256))
    (folder / "tokenizer.model").write_text("\n".join(ranks))
    write_samples(folder)


def nanochat(words: str, folder: Path) -> None:
    """Write the tokenizer that nanochat's scripts read into a folder: single bytes and pairs of bytes.

    `words`: the size of its vocabulary.
    """
    import tiktoken
    from nanochat.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN

    folder.mkdir(parents=True)
    pairs = (bytes(pair) for pair in itertools.product(range(256), repeat=2))
    ranks = [*(bytes([each]) for each in range(256)), *pairs][: int(words) - len(SPECIAL_TOKENS)]
    special = {name: len(ranks) + number for number, name in enumerate(SPECIAL_TOKENS)}
    given = {"mergeable_ranks": {word: rank for rank, word in enumerate(ranks)}, "special_tokens": special}
    encoding = tiktoken.Encoding(name="bytes", pat_str=SPLIT_PATTERN, **given)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = [*map(len, ranks), *(0 for _ in special)]
    torch.save(torch.tensor(lengths, dtype=torch.int32), folder / "token_bytes.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", choices=("litgpt", "torchtune", "nanochat"))
    parser.add_argument("given", nargs="+")
    options = parser.parse_args()
    model, *folders = options.given
    {"litgpt": litgpt, "torchtune": torchtune, "nanochat": nanochat}[options.project](model, *map(Path, folders))
