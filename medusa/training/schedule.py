"""How a run's learning rate and averaged weights move with its steps: functions of the step alone."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch


def cosine_rate(step: int, total: int, warmup: float, final: float) -> float:
    """The learning rate's share of its peak: linear over `warmup * total` steps, then a cosine to `final`."""
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, total - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


class Average:
    """Exponential moving average of parameters (Polyak averaging); off when decay is 0.

    The decay grows from 0.1 as (1 + step) / (10 + step), so that the random start is forgotten.
    """

    def __init__(self, parameters: list[torch.Tensor], decay: float):
        self._parameters = parameters
        self._decay = decay
        self.values = [p.detach().clone() for p in parameters] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self.values:
            decay = min(self._decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self.values, [p.detach() for p in self._parameters], 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the parameters hold the averages."""
        if not self.values:
            yield
            return
        own = [p.detach().clone() for p in self._parameters]
        self._set(self.values)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
