"""vLLM's speculators format, which has no place for Medusa heads today.

Read in vllm-project/speculators at commit c05b95b:
- src/speculators/models/__init__.py lines 3-7: the kinds are dflash, dspark, eagle3, mtp and peagle; each is registered
  by `SpeculatorModelConfig.register(NAME)` (models/*/config.py), and config.py lines 222-242 loads a folder only if its
  `speculators_model_type` is one of them.
- src/speculators/convert/entrypoints.py lines 32 and 115-116: convert_model takes eagle3, mtp and dflash.
- Medusa was asked for in issue 622 (closed), and is not there.

vLLM itself runs Medusa heads without it: `medusa export --format vllm`.
"""

from __future__ import annotations

import os
from pathlib import Path

from medusa.base import Base
from medusa.errors import MedusaError
from medusa.export.foreign import Foreign
from medusa.export.sources import Source

KINDS = ("dflash", "dspark", "eagle3", "mtp", "peagle")


def recognises(source: Source) -> bool:
    """Whether this is a speculator of any kind."""
    return "speculators_model_type" in source.config


def read(source: Source) -> Foreign:
    """Raises MedusaError: no kind of speculator is Medusa."""
    kind = source.config.get("speculators_model_type")
    raise MedusaError(
        f"{source.path} is a speculator of kind {kind}; the format holds {', '.join(KINDS)} and no Medusa heads, so "
        "there is nothing to import"
    )


def export(checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, base: Base) -> Path:
    """Raises MedusaError: no kind of speculator is Medusa."""
    raise MedusaError(
        f"speculators has no Medusa: its format holds {', '.join(KINDS)} (vllm-project/speculators, commit c05b95b, "
        f"src/speculators/models/__init__.py); use --format vllm for {checkpoint_dir}"
    )
