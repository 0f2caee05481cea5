"""Draft heads. A third kind is one new file here and one line in `HEAD_KINDS`."""

from medusa.errors import MedusaError
from medusa.heads.base import DraftHeads
from medusa.heads.config import HeadsConfig
from medusa.heads.hydra import HydraHeads
from medusa.heads.medusa import MedusaHeads

HEAD_KINDS: dict[str, type[DraftHeads]] = {"medusa": MedusaHeads, "hydra": HydraHeads}


def build_heads(config: HeadsConfig) -> DraftHeads:
    """Makes untrained heads, each the identity.

    Raises:
        MedusaError: `config.kind` is not known.
    """
    if config.kind not in HEAD_KINDS:
        raise MedusaError(f"heads: unknown kind {config.kind!r}; known: {', '.join(sorted(HEAD_KINDS))}")
    return HEAD_KINDS[config.kind](config)


__all__ = ["HEAD_KINDS", "DraftHeads", "HeadsConfig", "HydraHeads", "MedusaHeads", "build_heads"]
