"""A small random base and random heads, on disk as real ones are: what the harness is tested on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.base import Base, load_base
from medusa.calibration import Calibration
from medusa.checkpoint import save_checkpoint
from medusa.heads import HeadsConfig, build_heads
from medusa.tree import Tree

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
# Wide rather than deep: random heads must have some guesses accepted, at every depth, or nothing is tested.
TREE = Tree([*((rank,) for rank in range(8)), *((a, b) for a in range(3) for b in range(3)), (0, 0, 0)])


@dataclass(frozen=True)
class Small:
    """Where things lie."""

    folder: Path
    base: Base

    @property
    def base_folder(self) -> Path:
        return self.folder / "base"

    @property
    def heads_folder(self) -> Path:
        return self.folder / "heads"

    @property
    def data(self) -> Path:
        return self.folder / "talks.jsonl"


def make_base(folder: Path, hidden: int = 32) -> Base:
    """A random Llama over bytes: 256 tokens and two special ones; 4 attention heads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return load_base(str(folder), dtype=torch.float32)


def make_heads(folder: Path, base: Base, kind: str = "hydra") -> None:
    """Random heads with a tree and a calibration, saved as a checkpoint."""
    torch.manual_seed(5)
    config = HeadsConfig(kind=kind, num_heads=3, hidden_size=base.hidden_size, vocab_size=base.vocab_size)
    heads = build_heads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    accuracies = [[0.4, 0.2, 0.1, 0.05, *[0.01] * 6]] * 3
    save_checkpoint(
        folder,
        heads,
        TREE,
        base=base,
        provenance={"command": ["train_heads.py"]},
        calibration=Calibration.from_accuracies(accuracies),
    )


def make_talks(path: Path) -> None:
    """Six conversations of one and two turns, with every label."""
    rows = []
    for number in range(6):
        messages = [{"role": "user", "content": f"what about item {number}"}]
        if number % 3 == 2:
            messages.append({"role": "user", "content": "and in blue"})
        labels = {"source": "grammar", "intent": ["gift", "care"][number % 2], "category": "tents"}
        rows.append({"id": f"talk-{number}", "messages": messages, **labels})
    rows[4] |= {"source": "magpie-shopping", "intent": None, "category": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_small(folder: Path) -> Small:
    base = make_base(folder / "base")
    make_heads(folder / "heads", base)
    make_talks(folder / "talks.jsonl")
    return Small(folder, base)
