"""Architectures of all kinds in small sizes: what a generated set of trainings is drawn from."""


def _encoder(kind, **more):
    def config(draw):
        heads = draw.choice((2, 4, 8))
        width = heads * draw.choice((32, 64))
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": draw.randint(2, 6)}
        sizes |= {"intermediate_size": 4 * width, "vocab_size": draw.choice((2000, 9000, 30522, 50265))}
        return {"model_type": kind, "max_position_embeddings": 4200} | sizes | more

    return config


def _decoder(kind, grouped=True, **more):
    def config(draw):
        heads = draw.choice((4, 8, 16))
        width = heads * 64
        sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": draw.randint(2, 6)}
        sizes |= {"intermediate_size": 8 * width // 3 // 64 * 64, "vocab_size": draw.choice((4000, 32000, 50304))}
        sizes |= {"num_key_value_heads": heads // draw.choice((1, 2, 4))} if grouped else {}
        return {"model_type": kind, "max_position_embeddings": 4200} | sizes | more

    return config


def _both(kind, names, **more):
    def config(draw):
        heads, count = draw.choice((4, 8)), draw.randint(2, 4)
        sizes = {"d_model": heads * 64, "vocab_size": draw.choice((5000, 32128))}
        sizes |= {name: count for name in names[:2]} | {name: heads for name in names[2:4]}
        return {"model_type": kind, "max_position_embeddings": 4200} | sizes | dict.fromkeys(names[4:], 1024) | more

    return config


def _gpt2(draw):
    heads = draw.choice((4, 8))
    sizes = {"n_embd": heads * 64, "n_head": heads, "n_layer": draw.randint(2, 6)}
    return {"model_type": "gpt2", "n_positions": 4200, "vocab_size": draw.choice((8000, 50257))} | sizes


def _gpt_j(kind, **more):
    def config(draw):
        sizes = {"n_embd": 256, "n_head": 4, "n_layer": draw.randint(2, 4), "rotary_dim": 32, "n_positions": 4200}
        return {"model_type": kind, "vocab_size": draw.choice((8000, 50400))} | sizes | more

    return config


def _distilbert(draw):
    sizes = {"dim": 256, "n_heads": 4, "n_layers": draw.randint(2, 5), "hidden_dim": 1024}
    return {"model_type": "distilbert", "max_position_embeddings": 4200} | sizes


def _vision(kind, **more):
    def config(draw):
        heads = draw.choice((3, 4, 6))
        sizes = {"hidden_size": heads * 64, "num_attention_heads": heads, "num_hidden_layers": draw.randint(2, 5)}
        return {"model_type": kind, "intermediate_size": heads * 256, "image_size": 224} | sizes | more

    return config


_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
_EXPERTS |= {"shared_expert_intermediate_size": 512}
_T5 = ("num_layers", "num_decoder_layers", "num_heads", "num_heads", "d_ff")
_BOTH = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim")
_BOTH += ("decoder_ffn_dim",)
ARCHITECTURES = {
    "BERT": _encoder("bert"),
    "BERT, masked": _encoder("bert", architectures=["BertForMaskedLM"]),
    "RoBERTa": _encoder("roberta"),
    "DistilBERT": _distilbert,
    "ELECTRA": _encoder("electra", embedding_size=128),
    "ALBERT": _encoder("albert", embedding_size=128),
    "DeBERTa": _encoder("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "MPNet": _encoder("mpnet"),
    "ModernBERT": _encoder(
        "modernbert", pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
    "GPT-2": _gpt2,
    "GPT-NeoX": _decoder("gpt_neox", grouped=False),
    "OPT": lambda draw: (
        {"model_type": "opt", "hidden_size": 256, "num_attention_heads": 4, "ffn_dim": 1024}
        | {"num_hidden_layers": draw.randint(2, 5), "word_embed_proj_dim": 256, "max_position_embeddings": 4200}
        | {"vocab_size": draw.choice((8000, 50272))}
    ),
    "BLOOM": lambda draw: (
        {"model_type": "bloom", "hidden_size": 256, "n_head": 4, "n_layer": draw.randint(2, 5)}
        | {"vocab_size": draw.choice((8000, 60000))}
    ),
    "Falcon": lambda draw: (
        {"model_type": "falcon", "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 20000}
        | {"num_hidden_layers": draw.randint(2, 5), "max_position_embeddings": 4200}
    ),
    "Phi": _decoder("phi", grouped=False),
    "Llama": _decoder("llama"),
    "Mistral": _decoder("mistral"),
    "Qwen2": _decoder("qwen2"),
    "Qwen3": _decoder("qwen3", head_dim=64),
    "Gemma": _decoder("gemma", head_dim=64),
    "Gemma 2": _decoder("gemma2", head_dim=64),
    "Granite": _decoder("granite"),
    "StableLM": _decoder("stablelm"),
    "OLMo 2": _decoder("olmo2"),
    "Mixtral": _decoder("mixtral", **_EXPERTS),
    "Qwen2-MoE": _decoder("qwen2_moe", **_EXPERTS),
    "OLMoE": _decoder("olmoe", **_EXPERTS),
    "T5": _both("t5", _T5, d_kv=64),
    "BART": _both("bart", _BOTH, architectures=["BartForConditionalGeneration"]),
    "Pegasus": _both("pegasus", _BOTH, architectures=["PegasusForConditionalGeneration"]),
    "ViT": _vision("vit"),
    "DeiT": _vision("deit"),
    "BEiT": _vision("beit"),
    "DINOv2": _vision("dinov2"),
    "Swin": lambda draw: {
        "model_type": "swin",
        "embed_dim": 48,
        "depths": [2, 2, 2],
        "num_heads": [3, 6, 12],
        "image_size": 224,
    },
    "XLM-R": _encoder("xlm-roberta"),
    "Megatron-BERT": _encoder("megatron-bert"),
    "RoFormer": _encoder("roformer", embedding_size=128),
    "MobileBERT": lambda draw: {
        "model_type": "mobilebert",
        "num_hidden_layers": draw.randint(2, 4),
        "max_position_embeddings": 4200,
    },
    "ConvBERT": lambda draw: (
        {"model_type": "convbert", "hidden_size": 256, "num_attention_heads": 4, "embedding_size": 128}
        | {"num_hidden_layers": draw.randint(2, 4), "intermediate_size": 1024, "max_position_embeddings": 4200}
    ),
    "GPT-J": _gpt_j("gptj"),
    "CodeGen": _gpt_j("codegen", n_ctx=4200),
    "GPT-BigCode": lambda draw: _gpt2(draw) | {"model_type": "gpt_bigcode"},
    "GPT-Neo": lambda draw: (
        {"model_type": "gpt_neo", "hidden_size": 256, "num_heads": 4, "num_layers": 4, "max_position_embeddings": 4200}
        | {"attention_types": [[["global", "local"], 2]], "vocab_size": draw.choice((8000, 50257))}
    ),
    "MPT": lambda draw: (
        {"model_type": "mpt", "d_model": 256, "n_heads": 4, "n_layers": draw.randint(2, 4), "max_seq_len": 4200}
        | {"vocab_size": draw.choice((8000, 50304))}
    ),
    "Phi-3": _decoder("phi3", pad_token_id=0),
    "Gemma 3": _decoder("gemma3_text", head_dim=64),
    "Cohere": _decoder("cohere"),
    "Starcoder2": _decoder("starcoder2"),
    "SmolLM3": _decoder("smollm3", pad_token_id=0),
    "Qwen3-MoE": _decoder("qwen3_moe", head_dim=64, **_EXPERTS),
    "Granite-MoE": _decoder("granitemoe", **_EXPERTS),
    "DeepSeek-V3": lambda draw: (
        {"model_type": "deepseek_v3", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
        | {"num_hidden_layers": 3, "first_k_dense_replace": 1, "intermediate_size": 512, "moe_intermediate_size": 128}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"vocab_size": draw.choice((8000, 32000)), "max_position_embeddings": 4200}
    ),
    "mT5": _both("mt5", _T5, d_kv=64),
    "LongT5": _both("longt5", _T5, d_kv=64),
    "Marian": _both("marian", _BOTH, pad_token_id=0, decoder_start_token_id=0),
    "mBART": _both("mbart", _BOTH, architectures=["MBartForConditionalGeneration"]),
    "M2M": _both("m2m_100", _BOTH, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
    "ViT-MSN": _vision("vit_msn"),
    "Data2Vec": _vision("data2vec-vision"),
    "SwinV2": lambda draw: (
        {"model_type": "swinv2", "embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "image_size": 256}
    ),
    "ConvNeXt": lambda draw: (
        {"model_type": "convnext", "hidden_sizes": [48, 96, 192, 384], "depths": [2, 2, 3, 2], "image_size": 224}
    ),
    "ResNet": lambda draw: (
        {"model_type": "resnet", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "image_size": 224}
    ),
    "SegFormer": lambda draw: {"model_type": "segformer", "image_size": 224},
}
