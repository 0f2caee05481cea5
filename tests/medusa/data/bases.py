"""A small random base with a real byte-level tokenizer and a chat template, on disk and loaded in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.base import Base, load_base

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    "system user assistant hello which kettle is the best one for a small kitchen? It's $19.90. Thanks, bye! "
)


def make_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text round-trips; id 0 is the end of a text, id 2 ends a turn."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_WORDS] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    fast.chat_template = template
    return fast


def make_model(vocab: int, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama whose answers vary, and end by themselves now and then."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[2] *= 2.5  # the end of a turn: in one of ten places or so
    return model.eval()


def save_base(folder: Path, seed: int = 0, template: str = TEMPLATE) -> Path:
    """Writes a base in the Hugging Face layout."""
    tokenizer = make_tokenizer(template)
    make_model(len(tokenizer), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_base(folder: Path, seed: int = 0) -> Base:
    """Writes a base and loads it in float32."""
    return load_base(str(save_base(folder, seed)), dtype=torch.float32)
