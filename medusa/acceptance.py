"""Which path of a verified tree is committed: pure functions over tensors.

Every rule here is lossless. The base's own token is chosen at every node, by argmax or by sampling from the base's
distribution at that node, and a child is accepted exactly if it *is* that token. What is committed is therefore
what plain decoding would have chosen, token by token, whatever the heads guessed; guesses only decide how many
tokens one step commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa.tree import TreeBuffers


@dataclass(frozen=True)
class Accepted:
    """One committed path for each row.

    Attributes:
        node: [B] int64, the deepest accepted node.
        path: [B, D + 1] int64, node numbers from the root to `node`, padded with `node`.
        count: [B] int64, committed tokens, the root included: 1..D + 1.
        root: [B] int64, the base's token after the path: the next step's root.
    """

    node: torch.Tensor
    path: torch.Tensor
    count: torch.Tensor
    root: torch.Tensor


def accept(tokens: torch.Tensor, chosen: torch.Tensor, tree: TreeBuffers) -> Accepted:
    """Commits the longest path on which every token is the one the base chose after its parent.

    Siblings hold different tokens, so at most one child of a node matches and the longest path is unique.

    Args:
        tokens: [B, W] int64, the tree's tokens.
        chosen: [B, W] int64, the base's token after each node.
        tree: buffers of a tree of width W and depth D.
    """
    matches = tokens == chosen[:, tree.parents]
    matches[:, 0] = True  # the root is the base's own token
    on_path = matches[:, tree.ancestors].all(dim=-1)  # [B, W]; padding repeats the node itself
    node = torch.where(on_path, tree.depths, -1).argmax(dim=-1)
    return Accepted(
        node=node,
        path=tree.ancestors[node],
        count=tree.depths[node] + 1,
        root=chosen.gather(1, node[:, None]).squeeze(1),
    )


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Chooses a token at every node by inverting the cumulative distribution; argmax where temperature is 0.

    Args:
        logits: [B, W, V].
        temperature: [B] float; 0 means greedy.
        top_p: [B] float in (0, 1]; the smallest set of most probable tokens with at least this mass is kept
            (nucleus sampling, arXiv 1904.09751).
        uniform: [B, W] float in [0, 1), one draw a node.

    Returns:
        [B, W] int64.
    """
    chosen = logits.argmax(dim=-1)
    rows = temperature.nonzero().squeeze(
        1
    )  # the others need no distribution, which costs more than a row's forward
    logits, temperature, top_p, uniform = logits[rows], temperature[rows], top_p[rows], uniform[rows]
    probabilities = torch.softmax(logits.float() / temperature[:, None, None], dim=-1)
    cut = (top_p < 1).nonzero().squeeze(1)
    if len(cut):
        probabilities[cut] = _nucleus(probabilities[cut], top_p[cut, None, None])
    cumulative = probabilities.double().cumsum(dim=-1)
    threshold = uniform.double()[..., None] * cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    chosen[rows] = drawn.clamp(max=logits.shape[-1] - 1)
    return chosen


def _nucleus(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of most probable tokens with mass `top_p` [B, 1, 1] of [B, W, V]; the rest is zero.

    Sorting a whole vocabulary costs more than the base's forward, and the set is nearly always among the first
    thousand tokens.
    """
    size = min(1024, probabilities.shape[-1])
    ordered, order = probabilities.topk(size, dim=-1)
    if not bool((ordered.sum(dim=-1, keepdim=True) >= top_p).all()):
        ordered, order = probabilities.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, order, kept)
