"""The weights of Medusa heads, and how formats name them: taken apart with every check, and put together again."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from medusa.errors import MedusaError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SAID = 4  # names in one message


@dataclass(frozen=True)
class HeadTensors:
    """The weights of K heads, all of one floating-point dtype or of several.

    Attributes:
        blocks: [K][L] pairs of W [H, H] and b [H]; L may be 0.
        lm_heads: K matrices [V', H], or one for all heads; None: the base's own LM head.
        draft_vocab: [V'] int64, the tokens that the matrices' rows stand for; None: all tokens in order.
    """

    blocks: list[list[tuple[torch.Tensor, torch.Tensor]]]
    lm_heads: list[torch.Tensor] | None
    draft_vocab: torch.Tensor | None = None

    @property
    def hidden_size(self) -> int:
        return (self.blocks[0][0][0] if self.blocks[0] else self.lm_heads[0]).shape[-1]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All of them once, the vocabulary's included."""
        yield from (tensor for head in self.blocks for pair in head for tensor in pair)
        yield from self.lm_heads or ()
        if self.draft_vocab is not None:
            yield self.draft_vocab


@dataclass(frozen=True)
class Layout:
    """How a format names its tensors.

    Attributes:
        block: with {h}, {l} and {part} (weight or bias), each counted from 0.
        lm_head: with {h} and perhaps {l}, which is then the number after the last block; without {h}: one for all.
    """

    block: str
    lm_head: str

    def match(self, name: str) -> re.Match[str] | None:
        """Whether a name is one of this layout's."""
        return _pattern(self.block).fullmatch(name) or _pattern(self.lm_head).fullmatch(name)

    def write(self, heads: HeadTensors) -> dict[str, torch.Tensor]:
        """The tensors under this layout's names; heads that share an LM head share its memory."""
        named = {}
        for h, head in enumerate(heads.blocks):
            for number, pair in enumerate(head):
                for part, tensor in zip(("weight", "bias"), pair):
                    named[self.block.format(h=h, l=number, part=part)] = tensor
            if heads.lm_heads is not None:
                lm_head = heads.lm_heads[min(h, len(heads.lm_heads) - 1)]
                named[self.lm_head.format(h=h, l=len(head))] = lm_head
        return named

    def read(
        self,
        tensors: dict[str, torch.Tensor],
        where: Path,
        *,
        num_heads: int | None = None,
        num_layers: int | None = None,
        lm_head: bool = True,
        biases: bool = True,
        draft_vocab: torch.Tensor | None = None,
    ) -> HeadTensors:
        """Takes all of `tensors` apart.

        Args:
            tensors: under this layout's names.
            where: the file or folder, for messages.
            num_heads: K, if the configuration says so.
            num_layers: L, if the configuration says so.
            lm_head: whether there must be LM heads.
            biases: whether the blocks have biases; without, they are zero.
            draft_vocab: [V'] int64.

        Raises:
            MedusaError: a tensor is missing, left over, of another shape, not of a floating-point type or not finite.
        """
        found = {name: self.match(name) for name in tensors}
        blocks = {(int(m["h"]), int(m["l"])) for m in found.values() if m and "part" in m.re.groupindex}
        numbered = [m for m in found.values() if m and "part" not in m.re.groupindex]
        ends = {int(m["l"]) for m in numbered if "l" in m.re.groupindex}
        if num_layers is None:
            num_layers = max(ends or {1 + number for _, number in blocks}, default=0)
        if num_heads is None:
            known = {h for h, _ in blocks} | {int(m["h"]) for m in numbered if "h" in m.re.groupindex}
            num_heads = 1 + max(known, default=-1)
        if num_heads < 1:
            raise MedusaError(f"{where} holds no heads: {_listed(sorted(tensors)) or 'no tensors at all'}")
        most = len(tensors) + _SAID + 1  # with more names than that, enough are missing to say so
        expected = list(islice(self._expected(num_heads, num_layers, lm_head, biases), most))
        wrong = [f"{name} is missing" for name in expected if name not in tensors]
        if len(expected) < most:
            wrong += [f"{name} is left over" for name in sorted(set(tensors) - set(expected))]
        if wrong:
            raise MedusaError(
                f"{where}: {_listed(wrong, '; ')} (heads: {num_heads}, blocks in each: {num_layers}); "
                "get it whole, or set its config.json right"
            )
        sizes = [tensors[name].shape[-1] for name in expected if tensors[name].dim()]
        hidden = sizes[0] if sizes else 0
        lm_names = [name for name in expected if "part" not in found[name].re.groupindex]
        rows = tensors[lm_names[0]].shape[0] if lm_names and tensors[lm_names[0]].dim() else 0
        for name in expected:
            is_lm, bias = name in lm_names, name.endswith("bias")
            check_tensor(
                tensors[name], [rows, hidden] if is_lm else [hidden] if bias else [hidden] * 2, name, where
            )

        def pair(h: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            weight = tensors[self.block.format(h=h, l=number, part="weight")]
            bias = self.block.format(h=h, l=number, part="bias")
            return weight, tensors[bias] if biases else weight.new_zeros(hidden)

        return HeadTensors(
            blocks=[[pair(h, number) for number in range(num_layers)] for h in range(num_heads)],
            lm_heads=[tensors[name] for name in lm_names] or None,
            draft_vocab=draft_vocab,
        )

    def _expected(self, num_heads: int, num_layers: int, lm_head: bool, biases: bool) -> Iterator[str]:
        """A generator: the numbers come from a file, and may be of any size."""
        if lm_head and "{h}" not in self.lm_head:
            yield self.lm_head
        for h in range(num_heads):
            for number in range(num_layers):
                for part in ("weight", "bias") if biases else ("weight",):
                    yield self.block.format(h=h, l=number, part=part)
            if lm_head and "{h}" in self.lm_head:
                yield self.lm_head.format(h=h, l=num_layers)


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template).replace(r"\{h\}", r"(?P<h>\d{1,6})").replace(r"\{l\}", r"(?P<l>\d{1,6})")
    return re.compile(text.replace(r"\{part\}", "(?P<part>weight|bias)"))


def check_tensor(tensor: torch.Tensor, shape: list[int], name: str, where: Path) -> None:
    """Raises MedusaError: the tensor has another shape, no floating-point type, or NaN or infinity in it."""
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise MedusaError(f"{where}: {name} is {kind}; quantized heads are not read, get the full ones")
    if list(tensor.shape) != shape:
        raise MedusaError(f"{where}: {name} has shape {list(tensor.shape)}, not {shape}; get the right file")
    if not bool(torch.isfinite(tensor).all()):
        raise MedusaError(f"{where}: NaN or infinity in {name}; train these heads again")


def _listed(words: list[str], between: str = ", ") -> str:
    return between.join(words[:_SAID]) + (f"{between}and more" if len(words) > _SAID else "")
