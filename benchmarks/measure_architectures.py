"""Compare the estimate with the count on a CPU, over the classes of transformers' own registries, shrunk to two layers.

    python benchmarks/measure_architectures.py [--count 40] [--first -1]

A run measures `count` classes, beginning with class number `first` (-1: the date determines the first class, so that
successive nights measure different classes), and keeps the record's other rows. A class is left out, with the reason,
if no shrunk form of it can be trained.
"""

import functools
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
from trainmem.core.configurations import merged
from trainmem.core.task import Task
from trainmem.estimate import estimate

RECORD = "architectures.json"
LENGTH, SAMPLES, LARGEST = 64, 2, 100_000_000
# Sizes by a pattern for the field's name: the first that matches counts. W is the width, None: as it is.
LAYERS = r"(^|_)(layers?|blocks|depth)$|num_hidden_layers$|n_layers?$|num_layers$|self_attends_per_block$"
KEY_HEADS, HEADS = r"(key_value|kv|query_group)[a-z_]*heads?$", r"heads?$"
RULES = (
    (r"(expert_capacity|num_extra_|feat_extract_layers|feature_layers?$|encoder_blocks$)", None),
    (r"(n_groups?|ngroups|topk_group|expert_groups?|n_shared_experts|first_k_dense_replace)$", 1),
    (r"(num_experts_per_tok|num_experts_per_token|top_k|topk|top_k_experts|moe_k|num_selected_experts)$", 2),
    (r"kv_shared_layers$", 0),
    (r"(experts|expert_num)$", 4),
    (LAYERS, 2),
    (KEY_HEADS, 2),
    (HEADS, 4),
    (r"vocab_size|num_embeddings$|n_words$", 300),
    (r"num_latents$", 8),
    (r"num_queries$", 10),
    (r"(rope|nope|v|qk)[a-z_]*head_dim$|head_dim$|d_kv$|kv_channels$|attention_head_size$|rotary_dim$", "W//4"),
    (r"lora_rank$", "W//4"),
    (r"(intermediate|ffn|inner|d_ff|dff|mlp)[a-z_]*(size|dim|hidden)?$", "2*W"),
    (r"(hidden|emb|embed|embedding)[a-z_]*(size|dim)$|^dim$|^d_model$|d_latents$|n_embd$", "W"),
    (r"projection_dim$|word_embed", "W"),
    (r"image_size$", 64),
    (r"patch_size$", 16),
    (r"num_position_embeddings$", 16),
    (r"(max_source_positions)$", 64),
    (r"(position_embeddings|n_positions|max_seq_len|target_positions|n_ctx)$", 128),
    (r"(sliding|attention)_window$", 16),
)
# Fields that some types need and leave out of their default configuration.
MISSING = {"head_dim": "W//4", "num_key_value_heads": 2, "vocab_size": 300, "n_routed_experts": 4}
MISSING |= {
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": "2*W",
    "pad_token_id": 0,
    "mask_token_id": 5,
}
MISSING |= {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": "W//4", "indexer_budget": 16}
MISSING |= {"indexer_compress_ratio": 4}
# Fields of single types: kinds of layers, stages, and sizes that depend on others.
_ROPE, _LAYERS = {"rope_type": "default", "rope_theta": 1e4}, {"num_hidden_layers": 4}
_STACK = ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"]
_HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
_ATTENTION = {"layers_block_type": _HYBRID, "attention_head_dim": "W//2", "attention_hidden_size": "2*W"}
_MROPE = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}}
OWN = {
    "bamba": {"mamba_d_head": "W//2", "attn_layer_indices": [1]},
    "beit": _LAYERS | {"out_features": None, "out_indices": [1, 2, 3, 4]},
    "bit": {"num_groups": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "data2vec-vision": _LAYERS | {"out_indices": [0, 1, 2, 3]},
    "dory": {"num_hidden_layers": 6, "layer_types": _STACK},
    "dpt": _LAYERS | {"backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.2, "hidden_dim": 640},
    "falcon_h1": {"mamba_d_ssm": "2*W", "mamba_d_head": "W//2"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_d_head": "W//2", "layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": "W//2"},
    "nemotron_h": {"mamba_head_dim": "W//2"},
    "perceiver": {"num_cross_attention_heads": 1, "num_self_attention_heads": 1, "max_position_embeddings": LENGTH},
    "qwen2_vl": _MROPE,
    "qwen2_5_vl": _MROPE,
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"]},
    "sapiens2": {"out_features": ["stage2"], "out_indices": [2]},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
    "zamba": _LAYERS | _ATTENTION,
    "zamba2": _LAYERS | _ATTENTION | {"hybrid_layer_ids": [1, 3], "n_mamba_heads": 4, "mamba_headdim": "W//2"},
}
# Fields of single classes.
OF_CLASS = {"ReformerModelWithLMHead": {"is_decoder": True, "attn_layers": ["local", "local"]}}
# Classes whose estimate is known not to be equal, and why.
REASONS = {"XLNetLMHeadModel": "12 bytes are in another category than in the count; the peak is equal"}
# Why classes are left out, by words in the errors of their forms; the first that matches counts.
_DATA = r"bbox|visual_feats|input_features|or inputs_embeds|kv_states|tor tokens:|addmm: mat1|of size 128|batch_size"
LEFT_OUT = (
    (r"\b(timm|natten|detectron2|scipy)\b", "needs a package that is not installed"),
    (r"turn a loss from|not support training|no attribute 'loss'", "transformers has no loss for it"),
    (_DATA, "its forward takes data that a task does not generate"),
    (r"", "no small configuration of it was found"),
)
_FEW = {"image_size": 64, "num_queries": 10}
_OF_IMAGES = {"mm_tokens_per_image": 4, "image_seq_length": 16}


def shrunk(fields: dict, width: int) -> dict:
    """Return the fields of a model's configuration with small sizes, also in nested configurations, e.g. of a vision
    tower.

    A list with an entry per layer keeps two entries, of different kinds if there are any. `width`: the hidden size.
    """
    numbers = {name: value for name, value in fields.items() if type(value) is int and value > 0}
    layers = {value for name, value in numbers.items() if _rule(name) and re.search(LAYERS, name)}
    heads = {value for name, value in numbers.items() if re.search(HEADS, name) and not re.search(KEY_HEADS, name)}
    small = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = shrunk(value, width)
        elif isinstance(value, dict) and value and all(each.isdigit() for each in value) and name != "id2label":
            small[name] = {each: shrunk(part, width) for each, part in value.items() if int(each) < 2}  # by layer
        elif name in numbers:
            small[name] = 4 if re.search(KEY_HEADS, name) and value in heads else _size(name, value, width)
        elif name in ("depths", "num_heads", "num_attention_heads", "hidden_sizes") and isinstance(value, list):
            least = {"depths": 1, "hidden_sizes": width}.get(name, 2)
            small[name] = [
                min(each, least * (place + 1)) if name == "hidden_sizes" else least for place, each in enumerate(value)
            ]
        elif name == "image_size" and isinstance(value, list):
            small[name] = [64] * len(value)
        elif name.endswith("layerdrop"):
            small[name] = 0.0  # it leaves out layers at random
        elif isinstance(value, list) and len(value) in layers - {1, 2} and not name.startswith("out_"):
            kept = [*dict.fromkeys(map(str, value)), *map(str, value)][:2]
            kept = [next(each for each in value if str(each) == text) for text in kept]
            small[name] = [_size(name, each, width) if type(each) is int else each for each in kept]
        else:
            small[name] = value
    if "qk_head_dim" in small:
        whole = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
        small |= {name: whole for name in ("qk_head_dim", "head_dim") if fields.get(name) == fields["qk_head_dim"]}
    if isinstance(rope := small.get("rope_parameters"), dict) and "mrope_section" in rope:
        small["rope_parameters"] = rope | {"mrope_section": [width // 16, width // 32, width // 32]}
    marks = [name for name in small if name.endswith(("token_index", "image_token_id", "video_token_id"))]
    marks += [
        name for name in small if name.endswith("token_id") and isinstance(small[name], int) and small[name] >= 300
    ]
    return (
        small
        | {name: 3 + place for place, name in enumerate(marks)}
        | {name: size for name, size in _OF_IMAGES.items() if name in small}
    )


def _rule(name: str):
    return next((size for pattern, size in RULES if re.search(pattern, name)), None)


def _size(name: str, value: int, width: int) -> int:
    size = _in_widths(_rule(name), width)
    return value if size is None else min(value, size)


def _in_widths(size, width: int):
    sizes = {"W": width, "2*W": 2 * width, "W//2": width // 2, "W//4": width // 4}
    return sizes.get(size, size) if isinstance(size, str) else size


def _filled(fields: dict, width: int) -> dict:
    """Return the fields of a model's configuration, with a size for each field that is None and is in `MISSING`.

    `MISSING` gives the size as a number, or as a function of `width`, the hidden size. Nested configurations, e.g. of a
    vision tower, are filled in the same way.
    """
    found = {}
    for name, value in fields.items():
        part = isinstance(value, dict) and "model_type" in value
        least = _in_widths(MISSING.get(name), width)
        found[name] = _filled(value, width) if part else least if value is None else value
    return found


def configurations(name: str, kind: str, folder: Path):
    """Yield (form, path) for each reduced configuration of a model class, in the order in which they are tried.

    The forms are "width 32" and "width 64", with small hidden sizes; "width 32, no size missing", which sets sizes that
    are None; "few layers", which changes only the number of layers; and "small images", which changes only sizes of
    images and numbers of queries.

    Args:
        name: name of the class.
        kind: its model type.
        folder: folder for the configuration files.
    """
    from transformers import CONFIG_MAPPING

    plain = CONFIG_MAPPING[kind]()
    fields = json.loads(plain.to_json_string(use_diff=False))
    for each in ("architectures", "dtype", "transformers_version", "model_type"):
        fields.pop(each, None)
    layers = {each: 2 for each, value in fields.items() if re.search(LAYERS, each) and type(value) is int}
    for form, width, content in (
        ("width 32", 32, shrunk(fields, 32)),
        ("width 64", 64, shrunk(fields, 64)),
        ("width 32, no size missing", 32, _filled(shrunk(fields, 32), 32)),
        ("few layers", 32, layers | {"num_hidden_layers": 2}),
        ("small images", 32, {each: size for each, size in _FEW.items() if isinstance(fields.get(each), int)}),
    ):
        path = folder / f"{kind}-{form}.json".replace(" ", "-")
        own = OWN.get(kind, {}) if "width" in form else {}
        own = {each: _in_widths(value, width) for each, value in own.items()}
        own |= OF_CLASS.get(name, {})
        path.write_text(json.dumps({"model_type": kind} | merged(content, own)))
        yield form, path


@functools.cache
def classes() -> dict[str, tuple[str, str]]:
    """Return {class: (its model type, its family)} of all classes for which a task can generate training data.

    Successive entries alternate between the families, which `families.FAMILIES` lists. An entry is e.g.
    "BertForMaskedLM": ("bert", "masked").
    """
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
    """Return {class: (its model type, its family)} of the classes to measure now and of those already in the record.

    `options`: the script's command-line options.
    """
    every, known = classes(), {row["class"] for row in recorded()}
    return {name: every[name] for name in every if name in known or name in chosen(options)}


def recorded() -> list[dict]:
    return read_record(RESULTS / RECORD)["rows"] if (RESULTS / RECORD).is_file() else []


def chosen(options) -> list[str]:
    """Return the names of the classes that this run measures.

    `options`: the script's options.
    """
    names = [*classes()]
    first = datetime.now(UTC).toordinal() * options.count if options.first < 0 else options.first
    return [names[(first + place) % len(names)] for place in range(min(options.count, len(names)))]


def measure(cases, options):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lab = Lab("cpu", out=folder / "lab")
        for each, (kind, family) in cases.items():
            yield each, {"class": each, "family": family} | compared(lab, each, kind, folder)


def task_of(path: Path, name: str, family: str) -> Task:
    """Return the task of a class, with images of 64 pixels unless the configuration gives their size.

    Args:
        path: path of the configuration's file.
        name: name of the class.
        family: the kind of training, e.g. "masked", a key of `families.FAMILIES`.
    """
    task = Task(str(path), None if family == "ctc" else LENGTH, 16, name, audio_seconds=1.0)
    config = task.build_config()
    own = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    return task if own or family not in families.OF_IMAGES else task.replace(image_size=64)


def compared(lab: Lab, name: str, kind: str, folder: Path) -> dict:
    """Compare the estimate of a model class with counted memory, and return the row for the record.

    "counted" and "estimated" are {category: bytes}, and "peak" is a key too. If the estimate refuses the class, the row
    has "refused", the reason, instead of "estimated". If no training of the class runs, it has only "left_out", the
    reason.

    Args:
        lab: runs the training.
        name, kind: name of the class, and its model type.
        folder: folder for the files of configurations.
    """
    reasons = []
    given = {"per_device_train_batch_size": SAMPLES, "optim": "adamw_torch"}
    try:
        forms, family = [*configurations(name, kind, folder)], classes()[name][1]
    except Exception as error:  # a library's default that the library rejects
        return {"left_out": f"no default configuration: {str(error)[:200]}"}
    for form, path in forms:
        try:
            task = task_of(path, name, family)
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
        assumed = [text for text in found.assumptions if text.startswith(("experts", "masks"))]
        return row | ({"assumed": assumed} if assumed else {})
    return {"left_out": "; ".join(reasons)}


def conclude(rows: list[dict], options) -> dict:
    compared = [row for row in rows if "counted" in row]
    off = [row["class"] for row in compared if row.get("estimated") != row["counted"]]
    left_out: dict[str, list[str]] = {}
    for row in rows:
        if text := row.get("left_out"):
            reason = next(reason for words, reason in LEFT_OUT if re.search(words, text))
            left_out.setdefault(reason, []).append(row["class"])
    return {
        "what": "classes of transformers' registries, shrunk: the estimate beside the count on a CPU; bytes",
        "classes": len(classes()),
        "summary": {
            "tried": len(rows),
            "compared": len(compared),
            "equal_in_every_category": len(compared) - len(off),
            "not_equal": off,
            "reasons": {name: REASONS[name] for name in off if name in REASONS},
            "left_out": left_out,
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
