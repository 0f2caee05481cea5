from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.medusa_cli import looper


@dataclass(frozen=True)
class Looper:
    """Folders of the base and of a checkpoint of each kind; `cycle`: the tokens that it says."""

    base: Path
    cycle: list[int]
    checkpoints: dict[str, Path]

    def options(self, kind: str = "hydra") -> list[str]:
        return ["--checkpoint", str(self.checkpoints[kind]), "--base", str(self.base), "--dtype", "float32"]

    def said(self, count: int) -> list[int]:
        """The first `count` tokens of an answer."""
        return [self.cycle[i % len(self.cycle)] for i in range(count)]


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Looper:
    """A base whose answer is known, with both kinds of heads for it."""
    folder = tmp_path_factory.mktemp("looper")
    cycle = looper.make_base(folder / "base")
    checkpoints = {kind: folder / kind for kind in ("medusa", "hydra")}
    for kind, checkpoint in checkpoints.items():
        looper.make_checkpoint(checkpoint, folder / "base", cycle, kind)
    return Looper(folder / "base", cycle, checkpoints)
