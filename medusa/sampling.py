"""How a token is chosen from logits: rules, one set for each row, and the distribution that they leave.

Every draw is bound to a place in the answer, not to a step: the n-th token of an answer is drawn by the n-th uniform
number of its seed, by inverting the cumulative distribution. All nodes of a tree at one depth stand at the same place
and share its number. So one seed gives one answer, whatever tree, batch or heads decode it, and a tree's answer is the
plain one token for token; each place's number is used for one committed token only, so the draws stay independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from medusa.errors import MedusaError

_BLOCK = 256  # uniform numbers drawn at a time; fixed, so that they do not depend on when they are asked for


@dataclass(frozen=True)
class SamplingParams:
    """One request's rules. The defaults are greedy decoding.

    Logits are changed in this order, which is also that of Hugging Face's processors: bias, repetition penalty,
    temperature, top-k, top-p.

    Attributes:
        temperature: 0 for greedy.
        top_p: nucleus mass in (0, 1]: the smallest set of most probable tokens with at least this mass is kept
            (arXiv 1904.09751).
        top_k: only so many most probable tokens are kept; 0: all.
        repetition_penalty: logits of tokens in the prompt or the answer so far are divided by it where positive and
            multiplied where negative (arXiv 1909.05858); 1: none.
        logit_bias: token id -> what is added to its logit.
        seed: of the row's uniform numbers.
        acceptance: `"lossless"`: what is committed has the base's distribution. `"typical"`: guesses that the base
            finds likely enough are committed as well (arXiv 2401.10774, section 2.3.1), which is faster and not the
            base's distribution; at temperature 0 it is the same as lossless.
        epsilon, alpha: of the typical rule's threshold, min(epsilon, alpha * exp(-entropy)).

    Raises:
        MedusaError: a value makes no sense.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    acceptance: str = "lossless"
    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        for name, holds, wanted in (
            ("temperature", 0 <= self.temperature < float("inf"), "a number from 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= 0, "a whole number from 0"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0"),
            ("acceptance", self.acceptance in ("lossless", "typical"), "'lossless' or 'typical'"),
            ("epsilon", 0 < self.epsilon <= 1, "above 0 and at most 1"),
            ("alpha", 0 < self.alpha < float("inf"), "above 0"),
        ):
            if not holds:
                raise MedusaError(f"sampling: {name} must be {wanted}, not {getattr(self, name)!r}")
        for token, bias in self.logit_bias.items():
            # minus infinity forbids a token, which is a use; NaN and plus infinity leave no distribution
            if not bias < float("inf"):
                raise MedusaError(f"sampling: logit_bias of token {token} is {bias}")


class Draws:
    """A seed's uniform numbers in [0, 1), by place in the answer."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._numbers = torch.empty(0)

    def at(self, place: int, count: int) -> torch.Tensor:
        """[count] float32: the numbers of places `place` and those after it."""
        while len(self._numbers) < place + count:
            self._numbers = torch.cat([self._numbers, torch.rand(_BLOCK, generator=self._generator)])
        return self._numbers[place : place + count]


@dataclass(frozen=True)
class StepRules:
    """What one step needs to choose tokens for b rows, as tensors; n of the rows sample, m have their logits changed.

    Which rows these are is known on the host beforehand, so that a step never has to ask.

    Attributes:
        sampled: [n] int64, rows with a temperature above 0; the rest takes the argmax.
        temperature, top_p, top_k: [n]; top_k int64, the vocabulary's size for all.
        draws: [n, D + 1], one number for each depth of a tree.
        cut: whether any of the rows has a top_p or top_k.
        typical: [n] bool, rows under the typical rule; None: no row.
        epsilon, alpha: [n], of the typical rule; None: no row.
        changed: [m] int64, rows with a penalty or a bias.
        penalty: [m].
        bias: [m, V], None: no row has any.
        seen: [m, V] bool, tokens in the prompt or the answer; None: no row has a penalty.
    """

    sampled: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    draws: torch.Tensor | None = None
    cut: bool = False
    typical: torch.Tensor | None = None
    epsilon: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    changed: torch.Tensor | None = None
    penalty: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    seen: torch.Tensor | None = None


GREEDY = StepRules()


def gather_rules(
    rules: Sequence[SamplingParams | None],
    draws: Sequence[Draws | None],
    places: Sequence[int],
    texts: Sequence[Sequence[int]],
    depth: int,
    vocabulary: int,
    device: torch.device | str = "cpu",
) -> StepRules:
    """Lays b rows' rules out for one step.

    Args:
        rules: [b]; None for a row that is not in use.
        draws: [b]; needed where the temperature is above 0.
        places: [b], how many tokens of the answer are known: the place of the token chosen after the root.
        texts: [b], each row's prompt and answer so far.
        depth: D of the tree.
        vocabulary: V.
        device: where the tensors go.
    """
    sampled = [row for row, rule in enumerate(rules) if rule is not None and rule.temperature > 0]
    changed = [
        row
        for row, rule in enumerate(rules)
        if rule is not None and (rule.logit_bias or rule.repetition_penalty != 1)
    ]
    if not sampled and not changed:
        return GREEDY

    def index(rows: list[int]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=device)

    def column(rows: list[int], name: str) -> torch.Tensor:
        return torch.tensor([float(getattr(rules[row], name)) for row in rows], device=device)

    values: dict = {}
    if sampled:
        typical = [rules[row].acceptance == "typical" for row in sampled]
        top_k = [min(rules[row].top_k or vocabulary, vocabulary) for row in sampled]
        values |= {
            "sampled": index(sampled),
            "temperature": column(sampled, "temperature"),
            "top_p": column(sampled, "top_p"),
            "top_k": index(top_k),
            "draws": torch.stack([draws[row].at(places[row], depth + 1) for row in sampled]).to(device),
            "cut": any(rules[row].top_p < 1 or rules[row].top_k for row in sampled),
        }
        if any(typical):
            values |= {
                "typical": torch.tensor(typical, device=device),
                "epsilon": column(sampled, "epsilon"),
                "alpha": column(sampled, "alpha"),
            }
    if changed:
        values |= {"changed": index(changed), "penalty": column(changed, "repetition_penalty")}
        if any(rules[row].logit_bias for row in changed):
            bias = torch.zeros(len(changed), vocabulary)
            for place, row in enumerate(changed):
                for token, value in rules[row].logit_bias.items():
                    bias[place, token] = value
            values["bias"] = bias.to(device)
        if any(rules[row].repetition_penalty != 1 for row in changed):
            seen = torch.zeros(len(changed), vocabulary, dtype=torch.bool)
            for place, row in enumerate(changed):
                seen[place, index(list(texts[row])).cpu()] = True
            values["seen"] = seen.to(device)
    return StepRules(**values)


def change_logits(
    logits: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor, rules: StepRules
) -> torch.Tensor:
    """Applies bias and repetition penalty at every node of the rows that have any.

    A node's penalty counts the row's text and the tokens on the node's own path, as plain decoding would have it there.

    Args:
        logits: [b, W, V].
        tokens: [b, W] int64, the tree's tokens.
        ancestors: [W, D + 1] int64, each node's path, padded with the node itself.
        rules: the step's.

    Returns:
        [b, W, V]; `logits` itself where nothing changes.
    """
    if rules.changed is None:
        return logits
    rows = logits[rules.changed].float()  # [m, W, V]
    if rules.bias is not None:
        rows = rows + rules.bias[:, None]
    if rules.seen is not None:
        penalty = rules.penalty[:, None, None]
        punished = torch.where(rows > 0, rows / penalty, rows * penalty)
        path = tokens[rules.changed][:, ancestors]  # [m, W, D + 1]
        on_path = punished.gather(2, path)
        rows = torch.where(rules.seen[:, None], punished, rows).scatter(2, path, on_path)
    return logits.index_copy(0, rules.changed, rows.to(logits.dtype))


def distribution(logits: torch.Tensor, rules: StepRules) -> torch.Tensor:
    """The sampled rows' distributions at every node, after temperature, top-k and top-p.

    Args:
        logits: [n, W, V], of the sampled rows only.
        rules: the step's.

    Returns:
        [n, W, V] float32, each summing to 1.
    """
    probabilities = torch.softmax(logits.float() / rules.temperature[:, None, None], dim=-1)
    if not rules.cut:
        return probabilities
    return _cut(probabilities, rules.top_k[:, None, None], rules.top_p[:, None, None])


def invert(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draws by inverting the cumulative distribution: [n, W, V] and [n, W] in [0, 1) -> [n, W] int64.

    In float64, because the last of 49,152 float32 sums is off by more than most tokens' probability.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform.double()[..., None] * cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return drawn.clamp(max=probabilities.shape[-1] - 1)


_FIRST = 1024  # tokens looked at before a whole vocabulary is sorted


def _cut(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the `top_k` most probable tokens, and of them the smallest set with mass `top_p`; the rest is zero.

    Both [n, 1, 1]. The mass is of what top-k left, which is how Hugging Face's processors and vLLM have it.
    """
    vocabulary = probabilities.shape[-1]
    size = min(_FIRST, vocabulary)
    ordered, order = probabilities.topk(size, dim=-1)
    if size < vocabulary:
        # Sorting a whole vocabulary costs more than the base's forward, and what is kept is nearly always among the
        # first thousand. A compiled step may not ask, and sorts.
        if torch.compiler.is_compiling() or not _holds_all(ordered, top_k, top_p, vocabulary):
            ordered, order = probabilities.sort(dim=-1, descending=True)
    place = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(place >= top_k, 0.0)
    # Rows without top-k keep all of their mass, of which `ordered` may hold the first thousand tokens only.
    mass = torch.where(top_k < vocabulary, ordered.sum(dim=-1, keepdim=True), 1.0)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p * mass, 0.0)
    whole = (top_k >= vocabulary) & (top_p >= 1)
    kept = torch.zeros_like(probabilities).scatter(-1, order, kept)
    kept = torch.where(whole, probabilities, kept)
    return kept / kept.sum(dim=-1, keepdim=True)


def _holds_all(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, vocabulary: int) -> bool:
    """Whether the tokens looked at are all that is kept, in every row that cuts."""
    few = top_k <= ordered.shape[-1]
    massive = ordered.sum(dim=-1, keepdim=True) >= top_p
    whole = (top_p >= 1) & (top_k >= vocabulary)
    return bool((few | massive | whole).all())
