"""Where a step's time goes: clocks around the functions and modules that an eager step calls.

Only one part's clock runs at a time: a part that calls another one stands still meanwhile. So the parts never overlap,
and what they leave of a step's whole is Python and the host: the engine's bookkeeping around the step.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from medusa import step
from medusa.step import Body, Step

REST = "host"
PARTS = ("heads", "mask", "base", "lm head", "accept", "commit", REST)  # in the order of a step

# What an eager step calls by these names. Private ones among them: the tests notice when a name goes.
_CALLS: tuple[tuple[Any, str, str], ...] = (
    (step, "draft", "heads"),
    (Step, "_view", "mask"),
    (Body, "_masks", "mask"),
    (Body, "forward", "base"),
    (step, "choose", "accept"),
    (step, "accept", "accept"),
    (step, "commit", "commit"),
)


class PartClock:
    """Seconds by part, since the last `take`.

    Args:
        device: of the model; on an accelerator each part waits for it, which takes time that a step otherwise overlaps.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self._wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _switch(self) -> None:
        """Gives the time since the last switch to the part that is open innermost."""
        self._wait()
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block; the part around it, if there is one, stands still."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def take(self, whole: float) -> dict[str, float]:
        """Every part's seconds, which sum to `whole`, and starts anew.

        Args:
            whole: seconds of the step, taken around all parts.
        """
        found = {name: self._seconds.get(name, 0.0) for name in PARTS}
        found[REST] = whole - sum(found.values())
        self._seconds.clear()
        return found

    @contextlib.contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the block every eager step of this model is timed by part."""

        def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self.part(name):
                    return function(*args, **kwargs)

            return call

        before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in _CALLS]
        lm_head = model.get_output_embeddings()
        try:
            for owner, attribute, name in _CALLS:
                setattr(owner, attribute, timed(getattr(owner, attribute), name))
            lm_head.forward = timed(lm_head.forward, "lm head")
            yield
        finally:
            for owner, attribute, function in before:
                setattr(owner, attribute, function)
            lm_head.__dict__.pop("forward", None)
