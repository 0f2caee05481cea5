"""What every kind of draft heads has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import nn

from medusa.heads.config import HeadsConfig
from medusa.packing import pack_linears


class DraftHeads(nn.Module, ABC):
    """K heads that turn the base's last hidden state into features for an LM head.

    A kind implements `features`. At step 0 it must return `hidden` unchanged, so that every untrained head repeats
    the base's own prediction exactly. "Last hidden state" is after the final norm: what the LM head reads.

    Attributes:
        sequential: True if features depend on the guessed path, so that drafting walks the tree level by level.
        draft_vocab: [V'] int64, draft id -> token id; None when the heads guess among all V tokens.
        lm_head: [K, V', H], the heads' own LM heads; None when they share the base's.
    """

    sequential: bool = False

    def __init__(self, config: HeadsConfig):
        super().__init__()
        self.config = config
        pruned = config.draft_vocab_size is not None
        self.register_buffer("draft_vocab", torch.arange(config.draft_size) if pruned else None)
        own = config.lm_head == "own"
        self.lm_head = (
            nn.Parameter(torch.zeros(config.num_heads, config.draft_size, config.hidden_size))
            if own
            else None
        )
        self._pruned: tuple[tuple, torch.Tensor] | None = None
        self._projections: tuple[list, list[nn.Linear]] | None = None

    @abstractmethod
    def features(self, k: int, hidden: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Head k's features.

        Args:
            k: 1..K.
            hidden: [..., H] the base's last hidden state.
            path: [..., k, H] the base's input embeddings of the root token and the k - 1 guesses after it.

        Returns:
            [..., H], for the LM head.
        """

    def draft_weight(self, k: int, base_lm_head: torch.Tensor) -> torch.Tensor:
        """The [V', H] matrix that turns head k's features into draft logits.

        The base's rows of a pruned vocabulary are gathered once and kept: gathering costs as much as a step.

        Args:
            k: 1..K.
            base_lm_head: [V, H], the base's LM head weight.
        """
        if self.lm_head is not None:
            return self.lm_head[k - 1]
        if self.draft_vocab is None:
            return base_lm_head
        key = (
            base_lm_head.data_ptr(),
            base_lm_head.dtype,
            self.draft_vocab.data_ptr(),
            self.draft_vocab._version,
        )
        if self._pruned is None or self._pruned[0] != key:
            self._pruned = (key, base_lm_head.detach()[self.draft_vocab].contiguous())
        return self._pruned[1]

    def projections(self, base_lm_head: torch.Tensor) -> list[nn.Linear]:
        """K layers [..., H] -> [..., V'] without gradients: head k's features to its draft logits.

        Heads that share an LM head share one layer. Packed where that is faster; made once and kept.

        Args:
            base_lm_head: [V, H], the base's LM head weight.
        """
        weights = [self.draft_weight(k, base_lm_head) for k in range(1, self.config.num_heads + 1)]
        key = [(weight.data_ptr(), weight.dtype) for weight in weights]  # the layers keep the storage alive
        if self._projections is None or self._projections[0] != key:
            layers: dict[int, nn.Linear] = {}
            for weight in weights:
                if weight.data_ptr() not in layers:
                    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
                    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
                    layers[weight.data_ptr()] = layer
                    if self.lm_head is None and self.draft_vocab is not None:
                        pack_linears(layer)  # the base's own LM head is packed where it stands
            self._projections = (key, [layers[weight.data_ptr()] for weight in weights])
        return self._projections[1]

    def draft_logits(self, k: int, features: torch.Tensor, base_lm_head: torch.Tensor) -> torch.Tensor:
        """Head k's draft logits: features [..., H] -> [..., V']."""
        if torch.is_grad_enabled():
            return F.linear(features, self.draft_weight(k, base_lm_head))
        return self.projections(base_lm_head)[k - 1](features)

    def start_lm_heads(self, base_lm_head: torch.Tensor) -> None:
        """Sets own LM heads to the base's, as training starts from; nothing to do when shared."""
        if self.lm_head is not None:
            rows = base_lm_head if self.draft_vocab is None else base_lm_head[self.draft_vocab]
            with torch.no_grad():
                self.lm_head.copy_(rows.expand_as(self.lm_head))

    def to_tokens(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids to token ids, any shape, int64."""
        return draft_ids if self.draft_vocab is None else self.draft_vocab[draft_ids]
