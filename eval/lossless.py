"""Is the output the base's own? Every mode's and repeat's token ids are compared with the first plain ones.

In float32 any difference is a fault. In bfloat16 it need not be: the plain loop multiplies one row by the
weights, a tree step many, and for another number of rows the matrix kernels add up in another order. Every
sum is rounded to bfloat16's 8 significant bits, layer after layer, so the same position's logits come out a
little different, and where the two best are that close either may win. An answer's first divergence is
therefore allowed where the base itself cannot tell the two tokens apart; what follows it has another prefix
and says nothing.

The base is asked without the engine: the logits after the common text, with the last r tokens in one forward
after the others, for r = 1 (as the plain loop does), the tree's width (as a tree step does) and all (a
prefill). A token ties if one of these evaluations puts it within `ULPS` units in the last place of bfloat16
from the best logit. Why eight: over 1,484 positions of SmolLM2-135M-Instruct's answers the difference of the
two best logits moved between r = 1 and r = all by 1.05 units (standard deviation), by 3 at the 99th
percentile and by 7.5 at the 99.9th; a run meets tens of thousands of positions, so 3 would call its rounding a
fault. A real fault such as a wrong position, mask or cache row does not stop at near-ties: at three of five
positions the two best logits are more than 8 units apart, so it fails within a few answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eval.results import Divergence, Mode

ULPS = 8
_SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def first_difference(answer: Sequence[int], plain: Sequence[int]) -> int | None:
    """The first position at which two answers differ (one may end there), or None if they are the same."""
    for position, (one, other) in enumerate(zip(answer, plain)):
        if one != other:
            return position
    return None if len(answer) == len(plain) else min(len(answer), len(plain))


def tolerance(best: float, dtype: torch.dtype) -> float:
    """How far below the best logit a token may lie to count as a tie; 0 in float32.

    Args:
        best: the best logit.
        dtype: of the base's weights and logits.
    """
    if dtype == torch.float32:
        return 0.0
    _, exponent = math.frexp(best)  # best = m * 2**exponent with 0.5 <= |m| < 1
    return ULPS * 2.0 ** (exponent - _SIGNIFICANT_BITS[dtype])


@torch.inference_mode()
def evaluations(model: torch.nn.Module, ids: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
    """The base's logits after a text, evaluated in more than one way.

    Args:
        model: the base's `PreTrainedModel`.
        ids: the text, at least one token.
        rows: for each evaluation, how many of the last tokens go through the model in one forward, the others
            before them; more than there are means all.

    Returns:
        [len(rows), V], in the model's dtype.
    """
    text = torch.tensor([list(ids)], device=model.device)
    found = []
    for count in rows:
        past = None
        if count < text.shape[1]:
            past = model(input_ids=text[:, :-count], use_cache=True, logits_to_keep=1).past_key_values
        last = text[:, -count:]
        found.append(
            model(input_ids=last, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1]
        )
    return torch.stack(found)


def examine(
    model: torch.nn.Module,
    prompt: Sequence[int],
    plain: Sequence[int],
    answer: Sequence[int],
    *,
    width: int,
    conversation: str,
    turn: int,
    mode: Mode,
) -> Divergence | None:
    """Compares one answer with the plain one; None if they are the same.

    Args:
        model: the base's `PreTrainedModel`, in the dtype of the run.
        prompt: token ids of the prompt.
        plain: token ids of the plain answer.
        answer: token ids of the answer in `mode`.
        width: of the tree that `mode` verifies in a step.
        conversation: its id, for the record.
        turn: the turn's number from 0, for the record.
        mode: how `answer` was decoded, for the record.
    """
    position = first_difference(answer, plain)
    if position is None:
        return None
    text = [*prompt, *plain[:position]]
    logits = evaluations(model, text, (len(text), 1, width)).float()
    best = logits.max(dim=-1).values
    first, second = logits[0].topk(2).values.tolist()
    chosen = [ids[position] if position < len(ids) else None for ids in (plain, answer)]
    behind = max(float((best - logits[:, token]).min()) for token in chosen if token is not None)
    dtype = model.dtype
    allowed = tolerance(first, dtype)
    return Divergence(
        conversation=conversation,
        turn=turn,
        mode=mode,
        position=position,
        plain=chosen[0],
        tree=chosen[1],
        gap=first - second,
        behind=behind,
        tolerance=allowed,
        # An answer that stops where the other goes on broke the stop rule, which no rounding excuses.
        allowed=dtype != torch.float32 and None not in chosen and behind <= allowed,
    )
