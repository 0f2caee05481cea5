"""A base that says one text over and over, byte by byte, and heads that have learned it.

Its tokens are single bytes, so that a character may be spread over several tokens and over several steps; its
next token depends on the last one only, so that what it must say is known without running it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from medusa.base import load_base
from medusa.calibration import Calibration
from medusa.checkpoint import save_checkpoint
from medusa.heads import HeadsConfig, build_heads
from medusa.tree import Tree

TEXT = "a日é🛒!"  # no byte twice: each decides the next
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
HIDDEN, HEADS = 64, 3


def make_base(folder: Path, context: int = 512) -> list[int]:
    """Saves the base, of `context` positions; returns the tokens of its text in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0, **{letter: i for i, letter in enumerate(alphabet, 1)}}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    cycle = tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(cycle) == len(set(cycle)) == len(TEXT.encode())

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # the layers run and change nothing
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = F.normalize(torch.randn(len(vocabulary), HIDDEN), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        head = torch.zeros(len(vocabulary), HIDDEN)
        for token, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            head[after] = embedding[token]
        for token in set(range(len(vocabulary))) - set(
            cycle
        ):  # whatever the prompt ends with: from the start
            head[cycle[0]] += 0.2 * embedding[token]
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    return cycle


def make_checkpoint(folder: Path, base_folder: Path, cycle: list[int], kind: str) -> None:
    """Trains heads on the text until they know it, and saves them."""
    base = load_base(str(base_folder), dtype=torch.float32)
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(kind, HEADS, HIDDEN, base.vocab_size))
    embed = base.model.get_input_embeddings()
    weight = base.model.get_output_embeddings().weight
    tokens = torch.tensor(cycle)
    hidden = base.model.model(tokens[None]).last_hidden_state[0]
    optimiser = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(150):
        loss = 0.0
        for k in range(1, HEADS + 1):
            path = torch.stack([embed(tokens.roll(-1 - i)) for i in range(k)], dim=1)
            logits = heads.features(k, hidden, path) @ weight.T
            loss = loss + F.cross_entropy(10 * logits, tokens.roll(-1 - k))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    ranks = torch.zeros(len(cycle), HEADS, dtype=torch.long)
    save_checkpoint(
        folder,
        heads,
        Tree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]),
        base=base,
        provenance={"command": "test"},
        calibration=Calibration.from_ranks(ranks.numpy(), [0, len(cycle)]),
    )
