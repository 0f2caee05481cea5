"""Small random models of several families, in float32, for tests that need a real base."""

from __future__ import annotations

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from medusa.heads import DraftHeads, HeadsConfig, build_heads

VOCABULARY = 64
HIDDEN = 48

# head_dim 16 is not hidden / heads = 8: a kit that derives it would crash or corrupt the cache here.
_SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    num_hidden_layers=3,
    intermediate_size=96,
    max_position_embeddings=512,
    pad_token_id=2,
    eos_token_id=2,
)

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-mixed-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
}


def small_model(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A random base in eval mode. Its greedy output varies enough that agreement is not an accident."""
    kind, config, extra = FAMILIES[family]
    torch.manual_seed(seed)
    return kind(config(**(_SHAPE | extra))).eval()


def small_heads(kind: str = "medusa", seed: int = 0, scale: float = 0.05, **changes: object) -> DraftHeads:
    """Random heads for `small_model`, wrong often enough that paths of every length are accepted."""
    values = {"num_heads": 3, "hidden_size": HIDDEN, "vocab_size": VOCABULARY} | changes
    torch.manual_seed(seed)
    heads = build_heads(HeadsConfig(kind=kind, **values)).eval().requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(0, scale)
    return heads
