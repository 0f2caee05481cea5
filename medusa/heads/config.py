"""What a set of draft heads is, as it stands in a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from medusa.errors import MedusaError


@dataclass(frozen=True)
class HeadsConfig:
    """Configuration of draft heads.

    Attributes:
        kind: `"medusa"` (parallel; arXiv 2401.10774) or `"hydra"` (sequential; arXiv 2402.05109).
        num_heads: K; head k guesses the token k positions after the base's own next token.
        hidden_size: H, the base's.
        vocab_size: V, rows of the base's LM head.
        num_layers: L; medusa: residual blocks in each head; hydra: hidden layers in each head.
        width: units of hydra's hidden layers; None: H. Ignored by medusa, whose blocks are H wide.
        lm_head: `"shared"` (the base's own LM head, frozen) or `"own"` (one trained matrix for each head).
        draft_vocab_size: V'; the heads guess among this many tokens only; None: all V.
    """

    kind: str
    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 1
    width: int | None = None
    lm_head: str = "shared"
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "hidden_size", "vocab_size", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise MedusaError(f"heads: {name} must be a whole number from 1, not {value!r}")
        if not isinstance(self.kind, str):
            raise MedusaError(f"heads: kind must be a name, not {self.kind!r}")
        for name in ("width", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise MedusaError(f"heads: {name} must be a whole number or null, not {value!r}")
        if self.lm_head not in ("shared", "own"):
            raise MedusaError(f"heads: lm_head must be 'shared' or 'own', not {self.lm_head!r}")
        if self.width is not None and self.width < 1:
            raise MedusaError(f"heads: width must be at least 1, not {self.width}")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise MedusaError(
                f"heads: draft_vocab_size must lie between 1 and the vocabulary's {self.vocab_size}, "
                f"not {self.draft_vocab_size}"
            )

    @property
    def draft_size(self) -> int:
        """How many tokens a head can guess: V' or V."""
        return self.draft_vocab_size or self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadsConfig:
        """Raises MedusaError for an unknown key (naming the nearest known one) or a missing one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise MedusaError(
                    f"heads: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")
                )
        missing = [name for name in ("kind", "num_heads", "hidden_size", "vocab_size") if name not in values]
        if missing:
            raise MedusaError(f"heads: {', '.join(missing)} missing from the configuration")
        return cls(**values)
