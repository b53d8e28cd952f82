"""Compare the estimate with the count on a CPU, over the classes of transformers' own registries, shrunk to two layers.

    python benchmarks/measure_architectures.py [--count 40] [--first -1]

A run measures the next `count` classes after number `first` (-1: by the date, so that nightly runs cover different
classes) and keeps the record's other rows. A class is left out, with the reason, if no shrunk form of it can be
trained.
"""

import itertools
import json
import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from runner import RESULTS, Measurement, read_record

from perf_helpers.lab import Lab
from trainmem.core import families
from trainmem.core.task import Task
from trainmem.estimate import estimate

RECORD = "architectures.json"
LENGTH, SAMPLES, LARGEST = 64, 2, 100_000_000
# Sizes by a pattern for the field's name: the first that matches counts. W is the width.
RULES = (
    (r"(num_experts_per_tok|top_k|topk|moe_k|num_selected_experts|topk_group)$", 2),
    (r"(n_group|n_shared_experts|first_k_dense_replace)$", 1),
    (r"(expert_capacity|num_extra_)", None),
    (r"(experts|expert_num)$", 4),
    (r"(^|_)(layers?|blocks|depth)$|num_hidden_layers$|n_layers?$|num_layers$", 2),
    (r"(key_value|kv|query_group)[a-z_]*heads?$", 2),
    (r"heads?$", 4),
    (r"vocab_size|num_embeddings$", 300),
    (r"(rope|nope|v|qk)[a-z_]*head_dim$|head_dim$|d_kv$|kv_channels$|attention_head_size$", "W//4"),
    (r"lora_rank$", "W//4"),
    (r"(intermediate|ffn|inner|d_ff|dff|mlp)[a-z_]*(size|dim|hidden)?$", "2*W"),
    (r"(hidden|embed|embedding)[a-z_]*(size|dim)$|^dim$|^d_model$|n_embd$|^embed_dim$|projection_dim$|word_embed", "W"),
    (r"image_size$", 64),
    (r"patch_size$", 16),
    (r"num_position_embeddings$", 16),
    (r"(max_source_positions)$", 64),
    (r"(position_embeddings|n_positions|max_seq_len|target_positions|n_ctx)$", 128),
    (r"(sliding|attention)_window$", 16),
)
# Classes whose estimate is known not to be equal, and why.
REASONS = {
    "ReformerForMaskedLM": "16 kB too low: memory in the backward of reversible layers, which no tensor shows",
}
_OF_IMAGES = {"mm_tokens_per_image": 4, "image_seq_length": 16}


def shrunk(fields: dict, width: int) -> dict:
    """Return the fields of a configuration with small sizes, also in its nested parts; `width`: of the
    hidden layers.
    """
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = shrunk(value, width)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            small[name] = _size(name, value, width)
        elif name in ("depths", "num_heads", "num_attention_heads", "hidden_sizes") and isinstance(value, list):
            least = {"depths": 1, "hidden_sizes": width}.get(name, 2)
            small[name] = [
                min(each, least * (place + 1)) if name == "hidden_sizes" else least for place, each in enumerate(value)
            ]
        elif name == "image_size" and isinstance(value, list):
            small[name] = [64] * len(value)
        elif name.endswith("layerdrop"):
            small[name] = 0.0  # it leaves out layers at random
        elif name in ("layer_types", "mlp_layer_types", "block_types", "attn_layers") and isinstance(value, list):
            small[name] = [*dict.fromkeys(value), *value][:2]
        else:
            small[name] = value
    marks = [name for name in small if name.endswith(("token_index", "image_token_id", "video_token_id"))]
    marks += [
        name for name in small if name.endswith("token_id") and isinstance(small[name], int) and small[name] >= 300
    ]
    return (
        small
        | {name: 3 + place for place, name in enumerate(marks)}
        | {name: size for name, size in _OF_IMAGES.items() if name in small}
    )


def _size(name: str, value: int, width: int) -> int:
    for pattern, size in RULES:
        if re.search(pattern, name):
            size = {"W": width, "2*W": 2 * width, "W//4": width // 4}.get(size, size)
            return value if size is None else min(value, size)
    return value


def configurations(kind: str, folder: Path):
    """Yield (name, path) of three configurations of a model type: of width 32, of width 64, and of its own width with
    two layers.
    """
    from transformers import CONFIG_MAPPING

    plain = CONFIG_MAPPING[kind]()
    fields = json.loads(plain.to_json_string(use_diff=False))
    for name in ("architectures", "dtype", "transformers_version", "model_type"):
        fields.pop(name, None)
    own = {"reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"]}}
    layers = {name: 2 for name, value in fields.items() if re.search(RULES[4][0], name) and type(value) is int}
    for name, content in {
        "width 32": shrunk(fields, 32),
        "width 64": shrunk(fields, 64),
        "few layers": layers | {"num_hidden_layers": 2},
    }.items():
        path = folder / f"{kind}-{name}.json".replace(" ", "-")
        path.write_text(json.dumps({"model_type": kind} | content | own.get(kind, {})))
        yield name, path


def classes() -> dict[str, tuple[str, str]]:
    """Return {class: (its type, its family)} of all classes whose data are known; the families alternate."""
    from transformers.models.auto import modeling_auto

    known, found = families.of_classes(), {}
    for family, mapping in families.FAMILIES.items():
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                if known.get(name) == family:
                    found.setdefault(name, (kind, family))
    rows: dict[str, list] = {}
    for name, (_, family) in found.items():
        rows.setdefault(family, []).append(name)
    turns = itertools.chain(*itertools.zip_longest(*rows.values()))
    return {name: found[name] for name in turns if name}


def cases(options) -> dict[str, tuple[str, str]]:
    """Return {class: (its type, its family)} of this run's classes and of those in the record."""
    every, known = classes(), {row["class"] for row in recorded()}
    return {name: every[name] for name in every if name in known or name in chosen(options)}


def recorded() -> list[dict]:
    return read_record(RESULTS / RECORD)["rows"] if (RESULTS / RECORD).is_file() else []


def chosen(options) -> list[str]:
    """Return the names of the classes that this run measures."""
    names = [*classes()]
    first = datetime.now(UTC).toordinal() * options.count if options.first < 0 else options.first
    return [names[(first + place) % len(names)] for place in range(min(options.count, len(names)))]


def measure(cases, options):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = Lab("cpu", out=folder / "lab")
        for each, (kind, family) in cases.items():
            yield each, {"class": each, "family": family} | compared(lab, each, kind, folder)


def compared(lab: Lab, name: str, kind: str, folder: Path) -> dict:
    """Return the row of a class: bytes counted and estimated by category, or the reason why it was left out."""
    reasons = []
    given = {"per_device_train_batch_size": SAMPLES, "optim": "adamw_torch"}
    try:
        forms = [*configurations(kind, folder)]
    except Exception as error:  # a library's default that the library rejects
        return {"left_out": f"no default configuration: {str(error)[:200]}"}
    for form, path in forms:
        task = Task(str(path), LENGTH, 16, name, audio_seconds=1.0)
        try:
            if task.parameters() > LARGEST:
                reasons.append(f"{form}: more than {LARGEST:,} parameters")
                continue
            run = lab.train(name, task=task, measure="memory", **given)
        except (ValueError, ImportError) as error:
            reasons.append(f"{form}: {str(error).replace(str(path), '')[-200:]}")
            continue
        if not run.ok:
            reasons.append(f"{form}: {run.message[-200:]}")
            continue
        row = {"form": form, "counted": {"peak": run.peak_bytes} | run.memory.breakdown}
        try:
            found = estimate(task, device="cpu", **given)
        except ValueError as error:
            return row | {"refused": str(error)[:300]}
        row |= {"estimated": {"peak": found.peak_bytes} | found.memory.breakdown}
        assumed = [text for text in found.assumptions if text.startswith("experts")]
        return row | ({"assumed": assumed} if assumed else {})
    return {"left_out": "; ".join(reasons)}


def conclude(rows: list[dict], options) -> dict:
    compared = [row for row in rows if "counted" in row]
    off = [row["class"] for row in compared if row.get("estimated") != row["counted"]]
    return {
        "what": "classes of transformers' registries, shrunk: the estimate beside the count on a CPU; bytes",
        "classes": len(classes()),
        "summary": {
            "tried": len(rows),
            "compared": len(compared),
            "equal_in_every_category": len(compared) - len(off),
            "not_equal": off,
            "reasons": {name: REASONS[name] for name in off if name in REASONS},
        },
    }


def line(row: dict) -> str:
    if "counted" not in row:
        return f"left out: {row['left_out']}"
    same = row.get("estimated") == row["counted"]
    return "equal" if same else f"{row['counted']} {row.get('estimated') or row['refused']} {row.get('assumed', '')}"


ARCHITECTURES = Measurement(
    __doc__,
    RECORD,
    cases,
    measure,
    conclude,
    {"count": 40, "first": -1},
    name_of=lambda number, row: row["class"],
    line=line,
)

if __name__ == "__main__":
    options = ARCHITECTURES.parsed(sys.argv[1:])
    again = ["--rows", *chosen(options)] if options.rows is None and options.out.is_file() else []
    sys.exit(ARCHITECTURES.main([*sys.argv[1:], *again]))
