"""How often each head is right on the answers that were decoded, given the true tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from medusa.base import Base
from medusa.calibration import calibrate
from medusa.heads import DraftHeads

TOPS = (1, 2, 3, 5, 10)


@dataclass(frozen=True)
class States:
    """Some answers' states, flat; N tokens of S answers.

    Attributes:
        hidden: [N, H], the base's last hidden state at the position just before each token.
        tokens: [N] int64.
        offsets: [S + 1] int64, where each answer starts.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    offsets: torch.Tensor


class DecodedAnswers:
    """Answers by their exact token ids, as a source of states for `medusa.calibration`.

    Text would have to be tokenised again, and need not give the tokens that were decoded.

    Args:
        model: the base's `PreTrainedModel`.
        answers: (prompt token ids, answer token ids) pairs, neither empty.
    """

    def __init__(self, model: PreTrainedModel, answers: Sequence[tuple[Sequence[int], Sequence[int]]]):
        self._body, self._device = model.get_decoder(), model.device
        self._answers = answers
        self.lengths = [len(answer) for _, answer in answers]

    @torch.inference_mode()
    def get(self, ids: Sequence[int]) -> States:
        """States of the answers with these numbers: one forward for each, over its prompt and itself."""
        hidden, tokens = [], []
        for number in ids:
            prompt, answer = self._answers[number]
            text = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
            states = self._body(input_ids=text, use_cache=False).last_hidden_state
            hidden.append(states[0, len(prompt) - 1 :])
            tokens += answer
        lengths = torch.tensor([0, *(self.lengths[number] for number in ids)])
        return States(torch.cat(hidden), torch.tensor(tokens), lengths.cumsum(0))


def head_accuracy(
    heads: DraftHeads, base: Base, answers: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> dict[int, list[float]]:
    """Top-k accuracy of every head, for the k of `TOPS`; heads that never had a token to guess are left out.

    Args:
        heads: in the dtype that they decode in.
        base: with its model and tokenizer.
        answers: (prompt token ids, answer token ids) pairs.
    """
    source = DecodedAnswers(base.model, answers)
    counted = calibrate(heads, base, source, range(len(answers)))
    tried = [head for head, places in enumerate(counted.head_positions) if places]
    if not tried:
        return {}
    return {top: [counted.accuracy(top)[head] for head in tried] for top in TOPS if top <= counted.top_k}
