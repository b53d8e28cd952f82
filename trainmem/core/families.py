"""Families of models, for tasks: which family a class belongs to, and generated training data for each family.

A family is a set of data columns that models take, e.g. "causal"; a task generates random examples of these columns.
Sizes come from the model's configuration.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# Families by their registries in transformers. A class in several registries (Bart is also registered as masked)
# belongs to the first.
FAMILIES = {
    "sequence to sequence": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "sequence classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "token classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "semantic segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "object detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "mask segmentation": "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
}
# Losses that transformers' classes lack, and the registry of the classes to train on them.
OBJECTIVES = {
    "contrastive": "MODEL_MAPPING_NAMES",
    "preference": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
WITHOUT_TOKENS = {"vision", "semantic segmentation", "object detection", "mask segmentation"}
OF_IMAGES = WITHOUT_TOKENS | {"image-text"}
OF_UNEQUAL_LENGTHS = {  # families whose examples may differ in length
    "sequence to sequence",
    "sequence classification",
    "causal",
    "masked",
    "token classification",
    "question answering",
}
CHOICES, OBJECTS = 4, 7  # choices per question; objects per image, as on average in COCO
SECONDS = 10.0  # of audio per example, by default
_SAMPLING_RATE = 16_000  # of audio, per second
_FRAMES = 100  # of a spectrogram, per second
_SIDE = {"vision": 224, "semantic segmentation": 512, "object detection": 640, "mask segmentation": 512}
_SIDE_OF_PATCHES = 448  # for models that take images of any size


def _merged(config, patches: int) -> int:
    return patches // config.vision_config.spatial_merge_size**2


# Tokens that an image takes, from the configuration and the number of patches. Only these types are known.
_IMAGE_TOKENS: dict[str, Callable[[Any, int], int]] = {
    "aya_vision": lambda config, patches: patches // config.downsample_factor**2,
    "cohere2_vision": lambda config, patches: patches // config.downsample_factor**2,
    "gemma3": lambda config, patches: config.mm_tokens_per_image,
    "idefics3": lambda config, patches: patches // config.scale_factor**2,
    "internvl": lambda config, patches: int(patches * config.downsample_ratio**2),
    "llava": lambda config, patches: patches + (config.vision_feature_select_strategy == "full"),
    "paligemma": lambda config, patches: patches,
    "smolvlm": lambda config, patches: patches // config.scale_factor**2,
    "vipllava": lambda config, patches: patches,
} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _merged)
_IN_TILES = {"smolvlm", "idefics3"}  # larger images are cut into tiles, plus one tile with the whole image scaled down

# Column name and shape of one example of a speech model, from its configuration and the seconds of audio.
_SPEECH: dict[str, Callable[[Any, float], tuple[str, tuple[int, ...]]]] = {
    "moonshine": lambda config, seconds: ("input_values", (int(seconds * _SAMPLING_RATE),)),
    "speech_to_text": lambda config, seconds: (
        "input_features",
        (int(seconds * _FRAMES), config.input_feat_per_channel * config.input_channels),
    ),
    # Always 30 seconds: shorter audio is padded.
    "whisper": lambda config, seconds: ("input_features", (config.num_mel_bins, 2 * config.max_source_positions)),
}
_OF_SAMPLES = {"data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2"}
_OF_SAMPLES |= {"wav2vec2-conformer", "wavlm"}  # CTC on the samples themselves
_KNOWN_TYPES = {
    "image-text": _IMAGE_TOKENS.keys(),
    "speech": _SPEECH.keys(),
    "ctc": _OF_SAMPLES,
    "mask segmentation": {"maskformer", "mask2former", "eomt"},
}

OF_SPECIAL_LENGTH = {*_IMAGE_TOKENS, *_OF_SAMPLES}  # types whose sequence length follows from images or audio


@functools.cache
def of_classes() -> dict[str, str]:
    """Return {class name: family} for each class of transformers for which a task can generate training data.

    An entry is e.g. {"GPT2LMHeadModel": "causal"}. The families are the keys of `FAMILIES`.
    """
    from transformers.models.auto import modeling_auto

    registry: dict[str, str] = {}
    for family, mapping in FAMILIES.items():
        for kind, names in getattr(modeling_auto, mapping).items():
            if kind not in _KNOWN_TYPES.get(family, {kind}):
                continue
            for name in (names,) if isinstance(names, str) else names:
                registry.setdefault(name, family)
    return registry


def usual_class(config, objective: str = "") -> str:
    """Return the name of the transformers class to train if the configuration names none, e.g. "GPT2LMHeadModel".

    `objective`: a loss in `OBJECTIVES`, e.g. "contrastive"; empty: the loss that the class itself computes.

    Raises:
        ValueError: no class of this model type can be trained with the `objective`.
    """
    from transformers.models.auto import modeling_auto

    if objective:
        order = [OBJECTIVES[objective]]
    else:
        of_text = ["causal", "image-text"]
        if config.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            of_text = ["sequence classification", "causal"]
        stacks = ["sequence to sequence", "speech"] * bool(getattr(config, "is_encoder_decoder", False))
        detects = ["object detection", "mask segmentation", "semantic segmentation"]
        families = ["vision", *detects, *stacks, "ctc", *of_text, "sequence classification"]
        order = [
            FAMILIES[family]
            for family in families
            if config.model_type in _KNOWN_TYPES.get(family, {config.model_type})
        ]
    if objective == "contrastive" and getattr(config, "is_encoder_decoder", False):  # a text needs no decoder
        order.insert(0, "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES")
    for mapping in order:
        if names := getattr(modeling_auto, mapping).get(config.model_type):
            return names if isinstance(names, str) else names[0]
    raise ValueError(f"{config.model_type!r} has no class with a known training loss: name one with architecture=")


def is_bare(name: str) -> bool:
    """Return whether the transformers class `name` is a bare model, which has no head and computes no loss.

    False for CLIP's bare model, which computes a contrastive loss.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_MAPPING_NAMES.values()
    if not any(name == each or (not isinstance(each, str) and name in each) for each in names):
        return False
    return "return_loss" not in inspect.signature(getattr(transformers, name).forward).parameters


# ---- sizes


def text_of(config):
    """Return the part of a configuration that describes the text: the vocabulary and the positions."""
    try:
        return config.get_text_config()
    except ValueError:  # several parts describe text
        return config


def positions(config) -> int | None:
    """Return the number of positions in a model's configuration, which limits a sequence's tokens; None: no limit."""
    text = text_of(config)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    count = next(filter(None, (getattr(text, name, None) for name in names)), None)
    return count if count and count > 0 else None


def sides(config, family: str, image_size: int | None) -> tuple[int, int]:
    """Return (height, width) of an image in pixels.

    Both are `image_size` if that is given, otherwise the size in the configuration, otherwise the usual size of the
    `family`, e.g. "vision".
    """
    vision = getattr(config, "vision_config", None) or config
    own = getattr(vision, "image_size", None) or _SIDE.get(family, _SIDE_OF_PATCHES)
    side = image_size or own
    return (side[0], side[-1]) if isinstance(side, list | tuple) else (side, side)


def _patch(config) -> int:
    size = config.vision_config.patch_size
    return size[0] if isinstance(size, list | tuple) else size


def _has_any_size(config) -> bool:
    """Return whether the model takes images of any size, cut into patches by its processor."""
    return _IMAGE_TOKENS[config.model_type] is _merged


def _grid(config, image_size: int | None) -> tuple[int, int]:
    """Return (patches in one row of an image or tile, number of tiles); `image_size`: pixels, None: as configured."""
    patch, (side, _) = _patch(config), sides(config, "image-text", image_size)
    if _has_any_size(config):
        unit = patch * config.vision_config.spatial_merge_size
        return max(round(side / unit), 1) * unit // patch, 1
    own, _ = sides(config, "image-text", None)
    if config.model_type in _IN_TILES:
        return own // patch, math.ceil(side / own) ** 2 + 1 if side > own else 1
    if side != own:
        raise ValueError(f"image_size={side}: the vision tower of {config.model_type} takes {own} pixels: leave it out")
    return own // patch, 1


def image_tokens(config, image_size: int | None) -> int:
    """Return the number of tokens that an image takes in a sequence.

    `image_size`: height and width of the image in pixels; None: the size in the configuration.

    Raises:
        ValueError: the vision tower does not take this size.
    """
    rows, tiles = _grid(config, image_size)
    return tiles * _IMAGE_TOKENS[config.model_type](config, rows * rows)


def frames(config, seconds: float) -> int:
    """Return the number of output frames of a speech model's convolutions over `seconds` of audio.

    A transcript may have at most this many tokens, because the CTC loss needs one frame per token.
    """
    count = int(seconds * _SAMPLING_RATE)
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        count = (count - kernel) // stride + 1
    return count // getattr(config, "squeeze_factor", 1)


# ---- data


@dataclass(frozen=True, slots=True)
class Data:
    """Generate the examples of a task, from its configuration and its family, e.g. "causal"."""

    task: Any  # a `task.Task`: gives the seed, whether the data are learnable, `lengths`, `image_size` and the like
    config: Any
    family: str
    size: int  # number of examples
    length: int  # tokens per example

    def arrays(self) -> dict[str, Any]:
        """Return {column: numpy array of the examples}.

        The columns in `LISTED`, the labels of object detection and mask segmentation, are lists instead, with one item
        per example.

        Raises:
            ValueError: no data can be generated for the family; the image has an unsuitable size, too many tokens for
                the length, or an invalid token.
        """
        import numpy as np

        draw = np.random.default_rng(self.task.seed)
        classes, learnable = getattr(self.config, "num_labels", None) or 2, self.task.data == "learnable"
        if self.family in WITHOUT_TOKENS:
            return self._images(draw, self._sides()) | self._labels_of_images(draw, classes)
        ids = self._ids(draw, learnable)
        match self.family:
            case "sequence classification":
                labels = self._classes(draw, classes)
                if learnable:
                    first = self._first()
                    marked = (draw.random(ids.shape) < 0.1) & (labels.reshape(self.size, -1)[:, -1:] == 1)
                    ids[ids == first] = first + 1
                    ids[marked] = first
                return {"input_ids": self._ended(ids), "labels": labels}
            case "causal" | "masked" | "sequence to sequence":
                if learnable:
                    ids[:, self.length - self.length // 2 :] = ids[:, : self.length // 2]
                return {"input_ids": ids, "labels": ids.copy()}
            case "token classification":
                return {"input_ids": ids, "labels": ids % classes}
            case "question answering":
                ends = draw.integers(0, self.length, self.size)
                return {"input_ids": ids, "start_positions": ends, "end_positions": ends.copy()}
            case "multiple choice":
                return {"input_ids": np.stack([ids] * CHOICES, 1), "labels": draw.integers(0, CHOICES, self.size)}
            case "contrastive":
                columns = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
                return columns | {f"pair_{name}": column.copy() for name, column in columns.items()}
            case "preference":
                both = np.stack([self._ended(ids), self._ended(ids)], 1)
                return {"input_ids": both, "attention_mask": np.ones_like(both)}
            case "image-text":
                return self._with_images(draw, ids)
            case "speech" | "ctc":
                return self._audio(draw) | {"labels": ids}
        raise ValueError(f"no data can be generated for {self.family}")

    def _classes(self, draw, classes: int):
        """Return a random label per example: class numbers (examples,), or floats (examples, `classes`)."""
        kind = getattr(self.config, "problem_type", None) or ("regression" if classes == 1 else None)
        if kind not in ("multi_label_classification", "regression"):
            return draw.integers(0, classes, self.size)
        return draw.integers(0, 2, (self.size, classes)).astype("float32")  # several labels, or a regression

    def _vocabulary(self) -> int:
        return getattr(text_of(self.config), "vocab_size", None) or getattr(self.config, "vocab_size", None) or 1000

    def _first(self) -> int:
        return min(100, self._vocabulary() // 4)  # above the special tokens

    def _ids(self, draw, learnable: bool):
        """Return random token ids (examples, length), none of an image; `learnable`: of at most 32 distinct ids."""
        first = self._first()
        last = first + 32 if learnable else self._vocabulary()
        ids = draw.integers(first, min(last, self._vocabulary()), (self.size, self.length))
        if self.family == "image-text":
            fields = self.config.to_dict().items()
            named = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
            marks = {*itertools.chain.from_iterable(each if isinstance(each, list) else [each] for each in named)}
            plain = next(token for token in range(first, self._vocabulary()) if token not in marks)
            for mark in marks - {None}:
                ids[ids == mark] = plain
        return ids

    def _ended(self, ids):
        """Return `ids` (examples, length), in which only the last id of each example is the end token."""
        end = getattr(self.config, "eos_token_id", None)
        if not isinstance(end, int) or not getattr(self.config, "is_encoder_decoder", False):
            return ids  # only encoder-decoder models search for the end token
        ids[ids == end] = end - 1 if end else 1
        lengths = self.task.lengths
        ends = [length - 1 for length in lengths] if len(lengths) == len(ids) else [-1] * len(ids)
        ids[range(len(ids)), ends] = end
        return ids

    def _sides(self) -> tuple[int, int]:
        return sides(self.config, self.family, self.task.image_size)

    def _images(self, draw, size: tuple[int, int], *tiles: int) -> dict[str, Any]:
        """Return {"pixel_values": random values of shape (examples, tiles if any, channels, *size)}.

        `draw`: a random generator of numpy; `size`: height and width in pixels.
        """
        import numpy as np

        channels = getattr(getattr(self.config, "vision_config", None) or self.config, "num_channels", 3)
        shape = (self.size, *tiles, channels, *size)
        return {"pixel_values": draw.standard_normal(shape, dtype=np.float32)}

    def _labels_of_images(self, draw, classes: int) -> dict[str, Any]:
        import numpy as np

        if self.family == "vision":
            return {"labels": self._classes(draw, classes)}
        height, width = self._sides()
        if self.family == "semantic segmentation":
            return {"labels": draw.integers(0, classes, (self.size, height, width))}
        kinds = [draw.integers(0, classes, OBJECTS) for _ in range(self.size)]
        if self.family == "mask segmentation":
            masks = draw.integers(0, 2, (self.size, OBJECTS, height, width)).astype(np.float32)
            return {"mask_labels": [*masks], "class_labels": kinds}
        boxes = draw.uniform(0.2, 0.6, (self.size, OBJECTS, 4)).astype(np.float32)
        return {"labels": [{"class_labels": a, "boxes": b} for a, b in zip(kinds, boxes, strict=True)]}

    def _with_images(self, draw, ids) -> dict[str, Any]:
        """Return {column: array} of sequences with one image each; the image's tokens have no labels.

        `ids`: token ids (examples, length); the image's tokens overwrite those after the first.
        """
        import numpy as np

        config, kind, token = self.config, self.config.model_type, self.config.image_token_id
        rows, tiles = _grid(config, self.task.image_size)
        count = image_tokens(config, self.task.image_size)
        if count + 2 > self.length:
            raise ValueError(
                f"seq_len={self.length} is too short: an image takes {count} tokens of {kind}. Give "
                f"{count + 2} or more, or a smaller image_size; image_size=0 trains on text only"
            )
        if token >= self._vocabulary() and kind not in ("gemma3", "paligemma"):
            raise ValueError(f"image_token_id={token} is not in the vocabulary of {self._vocabulary()}: correct one")
        ids[:, 1 : count + 1] = token
        is_image = ids == token
        found = {"input_ids": ids, "labels": np.where(is_image, -100, ids)}
        if _has_any_size(config):
            vision, patch = config.vision_config, _patch(config)
            channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
            values = channels * vision.temporal_patch_size * patch * patch
            pixels = draw.standard_normal((self.size, rows * rows, values), dtype=np.float32)
            found |= {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, rows]] * self.size)}
            return found | {"mm_token_type_ids": is_image.astype(np.int64)}
        # A tile has the size of the tower's own images.
        found |= self._images(draw, sides(config, self.family, None), *[tiles] * (kind in _IN_TILES))
        if kind in _IN_TILES:
            pixels = found["pixel_values"].shape
            found["pixel_attention_mask"] = np.ones((*pixels[:2], *pixels[3:]), dtype=np.int64)
        if kind in ("gemma3", "paligemma"):  # 1: tokens of the image, tokens of the answer
            found["token_type_ids"] = (is_image if kind == "gemma3" else ~is_image).astype(np.int64)
        return found

    def _audio(self, draw) -> dict[str, Any]:
        import numpy as np

        seconds = self.task.audio_seconds or SECONDS
        name, shape = "input_values", (int(seconds * _SAMPLING_RATE),)
        if self.family == "speech":
            name, shape = _SPEECH[self.config.model_type](self.config, seconds)
        return {name: draw.standard_normal((self.size, *shape), dtype=np.float32)}


def bytes_of(columns: Any) -> int:
    """Return the bytes of the numpy arrays in nested dictionaries and lists."""
    parts = columns.values() if isinstance(columns, dict) else columns if isinstance(columns, list) else None
    return columns.nbytes if parts is None else sum(map(bytes_of, parts))


def listed(examples: list[dict], names: Iterable[str]) -> dict[str, Any]:
    """Return a batch: {column: list of tensors if `names` has the column, otherwise one stacked tensor}.

    Models for object detection expect their labels as a list.
    """
    import torch

    columns = {name: [example[name] for example in examples] for name in examples[0]}
    return {name: column if name in names else torch.stack(column) for name, column in columns.items()}


LISTED = {"object detection": ("labels",), "mask segmentation": ("mask_labels", "class_labels")}  # columns by family


# ---- losses


def with_objective(kind: type, objective: str) -> type:
    """Return a subclass of a transformers class that computes another loss.

    Args:
        kind: the class.
        objective: the loss, a name in `OBJECTIVES`.
    """
    return type(kind.__name__, (_LOSSES[objective], kind), {"accepts_loss_kwargs": False})


class _Contrastive:
    """Compute the contrastive loss of sentence-transformers' MultipleNegativesRankingLoss over pairs of texts.

    Inputs are token ids and attention masks of both texts of each pair, (pairs, length).
    """

    def forward(self, input_ids, attention_mask, pair_input_ids, pair_attention_mask, **_):
        import torch

        vectors = []
        for ids, mask in ((input_ids, attention_mask), (pair_input_ids, pair_attention_mask)):
            states = super().forward(input_ids=ids, attention_mask=mask).last_hidden_state
            mask = mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
            vectors.append(torch.sum(states * mask, 1) / torch.clamp(mask.sum(1), min=1e-9))  # mean over tokens
        first, second = (torch.nn.functional.normalize(each, p=2, dim=1) for each in vectors)
        scores = 20.0 * torch.mm(first, second.transpose(0, 1))
        return {"loss": torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))}


class _Preference:
    """Compute the loss of TRL's RewardTrainer from ids and masks (pairs, 2, length), the better answer first."""

    def forward(self, input_ids, attention_mask, **_):
        import torch

        both = super().forward(input_ids=input_ids.flatten(0, 1), attention_mask=attention_mask.flatten(0, 1))
        chosen, rejected = both.logits.squeeze(-1).view(-1, 2).unbind(1)
        return {"loss": -torch.nn.functional.logsigmoid(chosen - rejected).mean(), "logits": both.logits}


_LOSSES = {"contrastive": _Contrastive, "preference": _Preference}
