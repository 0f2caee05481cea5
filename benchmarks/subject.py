"""What is measured: the base, its heads, random heads of the same shape, and groups of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eval.decode import prompt_ids
from eval.prompts import load_prompts
from medusa.base import Base
from medusa.errors import MedusaError
from medusa.heads import DraftHeads, build_heads

Prompts = list[list[int]]


def random_heads(heads: DraftHeads, seed: int = 0) -> DraftHeads:
    """Heads of the same configuration that cost as much and guess nothing: every weight is drawn anew."""
    own = torch.random.get_rng_state()
    torch.manual_seed(seed)
    made = build_heads(heads.config)
    with torch.no_grad():
        for parameter in made.parameters():
            # Loud enough to drown the hidden state: a head that adds little repeats the base's own prediction.
            parameter.normal_(0, 0.1)
    torch.random.set_rng_state(own)
    if heads.draft_vocab is not None:
        made.draft_vocab = heads.draft_vocab
    like = next(heads.parameters())
    return made.to(device=like.device, dtype=like.dtype).eval().requires_grad_(False)


def read_prompts(base: Base, data: str, count: int, max_new_tokens: int) -> Prompts:
    """Token ids of the first user message of `count` held-out conversations, balanced; fewer if there are fewer.

    Args:
        base: its tokenizer and chat template.
        data: `test`, or a file; see `eval.prompts.load_prompts`.
        count: how many.
        max_new_tokens: that must have room after each.

    Raises:
        MedusaError: nothing to decode, or no prompt leaves room for an answer.
    """
    rows = load_prompts(data, turns="first", limit=count).rows
    prompts = [prompt_ids(base, row, []) for row in rows]
    fitting = [ids for ids in prompts if len(ids) + max_new_tokens <= base.max_length]
    if not fitting:
        raise MedusaError(
            f"--data {data}: no prompt leaves room for {max_new_tokens} tokens in a context of {base.max_length}; "
            "lower --max-new-tokens"
        )
    return fitting


def groups(prompts: Prompts, batch: int, limit: int) -> list[Prompts]:
    """Groups of `batch` prompts that hold `limit` prompts together, one group at least.

    With fewer prompts than that they come again, each group as far from the others as can be.
    """
    count = max(1, -(-limit // batch))
    return [[prompts[(group * batch + row) % len(prompts)] for row in range(batch)] for group in range(count)]


def room(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
    """Tokens that the longest prompt and its answer take."""
    return max(map(len, prompts)) + max_new_tokens
