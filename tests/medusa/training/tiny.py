"""A base of 64 words, real states of it, and a recipe that trains in seconds; all on disk, as in earnest."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import typer
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.base import Base, load_base
from medusa.data.states import StatesCache

VOCAB, HIDDEN = 64, 32
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }} "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>{% endgeneration %}"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


@dataclass(frozen=True)
class Tiny:
    """Folders of a base and of states made with it."""

    folder: Path
    base: Base

    @property
    def train(self) -> StatesCache:
        return StatesCache(self.folder / "train")

    @property
    def validation(self) -> StatesCache:
        return StatesCache(self.folder / "validation")

    def recipe(self, **sections: dict) -> dict:
        """Recipe values that name this base and these states."""
        values = {
            "base": str(self.folder / "base"),
            "data": {"train": str(self.folder / "train"), "validation": str(self.folder / "validation")},
            "heads": {"kind": "hydra", "num_heads": 3, "width": 32, "draft_vocab_size": 48},
            "training": {
                "epochs": 2,
                "batch_tokens": 100,
                "precision": "fp32",
                "save_steps": 3,
                "log_steps": 2,
            },
            "card": {"weights_dtype": "float32", "license": "apache-2.0"},
        }
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
        return values

    def recipe_file(self, path: Path, **sections: dict) -> Path:
        path.write_text(yaml.safe_dump(self.recipe(**sections)))
        return path


def make_base(
    folder: Path, *, vocab: int = VOCAB, hidden: int = HIDDEN, seed: int = 0, words: str = "w"
) -> Base:
    """A random Llama with grouped-query attention and a tokenizer of whole words, saved and loaded again."""
    names = ["<pad>", "<s>", "</s>", "user", "assistant"]
    names += [f"{words}{i}" for i in range(vocab - len(names))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<s>", "</s>"]})
    fast.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return load_base(str(folder), dtype=torch.float32)


def make_answers(count: int, seed: int, vocab: int = VOCAB) -> list[list[int]]:
    """Answers that can be learned: each word decides the next one, but for one in ten."""
    rng = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        word, answer = int(rng.integers(5, vocab)), []
        for _ in range(int(rng.integers(6, 30))):
            answer.append(word)
            word = 5 + (7 * word + 3) % (vocab - 5) if rng.random() > 0.1 else int(rng.integers(5, vocab))
        answers.append([*answer, 2])
    return answers


@torch.inference_mode()
def write_states(folder: Path, base: Base, answers: list[list[int]]) -> None:
    """The base's states over answers, in the format of `medusa.data.states`, in two shards."""
    folder.mkdir(parents=True)
    shards = []
    half = (len(answers) + 1) // 2
    for number, first in enumerate(range(0, len(answers), half)):
        part = answers[first : first + half]
        hidden = []
        for answer in part:
            ids = torch.tensor([[1, 4, *answer]])
            states = base.model.base_model(ids).last_hidden_state[0]
            hidden.append(states[1:-1].to(torch.bfloat16))  # the state before each token of the answer
        offsets = np.cumsum([0] + [len(answer) for answer in part])
        name = f"shard-{number:05d}.safetensors"
        tensors = {
            "hidden": torch.cat(hidden),
            "tokens": torch.tensor([t for answer in part for t in answer], dtype=torch.int32),
            "offsets": torch.tensor(offsets, dtype=torch.int64),
            "conversations": torch.arange(first, first + len(part), dtype=torch.int32),
        }
        safetensors.torch.save_file(tensors, folder / name)
        shards.append({"file": name, "segments": len(part), "tokens": int(offsets[-1])})
    manifest = {
        "format": 1,
        "fingerprint": {
            "base": base.fingerprint,
            "tokenizer": base.tokenizer_fingerprint,
            "template": base.template_fingerprint,
            "data": f"tiny-{len(answers)}",
        },
        "hidden_size": base.hidden_size,
        "dtype": "bfloat16",
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def make_tiny(folder: Path) -> Tiny:
    base = make_base(folder / "base")
    write_states(folder / "train", base, make_answers(60, 1))
    write_states(folder / "validation", base, make_answers(20, 2))
    return Tiny(folder, base)


def run_script(words: list[str], log: str) -> None:
    """`train_heads.py` with these words, in a process of its own; what it prints is added to `log`."""
    import train_heads

    sys.argv = ["train_heads.py", *words]
    with open(log, "a", buffering=1) as sys.stdout:
        sys.stderr = sys.stdout
        typer.run(train_heads.main)
