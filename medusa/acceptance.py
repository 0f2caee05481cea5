"""Which path of a verified tree is committed: pure functions over tensors.

**Lossless** (greedy and sampled). The base's own token is chosen at every node, by argmax or by sampling from the
base's distribution at that node, and a child is accepted exactly if it *is* that token. What is committed is therefore
what plain decoding would have chosen, token by token, whatever the heads guessed; guesses only decide how many tokens
one step commits.

This is tree rejection sampling (SpecInfer, arXiv 2305.09781, algorithm 2; Leviathan et al., arXiv 2211.17192) for
drafts that are chosen and not drawn, as a head's top-k guesses are: their q is 1 at the guess. The rule there tries
siblings x_1, x_2, ... in order, accepts x_i with probability min(1, p_i(x_i) / q(x_i)) = p_i(x_i), and after each
refusal goes on with the residual p_{i+1} = norm(max(0, p_i - q)), which is p_i without x_i, renormalised; after the
last refusal the token is drawn from what is left. So x_i is taken with probability

    p(x_i) / (1 - p(x_1) - ... - p(x_{i-1})) * (1 - p(x_1) - ... - p(x_{i-1})) = p(x_i),

and any other token y with p(y): one draw from p, compared with the siblings, is the same rule with one random number
instead of several. The tests hold it against the rule spelled out.

**Typical** (arXiv 2401.10774, section 2.3.1). A child x is accepted where p(x) > min(epsilon, alpha * exp(-H(p))), p
being the base's distribution at its parent after temperature, top-k and top-p, and H its entropy in nats. The longest
accepted path wins, the most probable one of several; the token after it is a *sample* from the base's distribution,
not its argmax. What is committed does not have the base's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa.sampling import StepRules, change_logits, distribution, invert
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


def accept(
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    tree: TreeBuffers,
    likely: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
) -> Accepted:
    """Commits the longest path on which every token was accepted after its parent.

    Without `likely`, a token is accepted if it is the one that the base chose after its parent. Siblings hold different
    tokens, so at most one child of a node matches and the longest path is unique.

    Args:
        tokens: [B, W] int64, the tree's tokens.
        chosen: [B, W] int64, the base's token after each node.
        tree: buffers of a tree of width W and depth D.
        likely: [B, W] bool, whether each node is accepted after its parent by another rule; the root's is ignored.
        weight: [B, W], decides between accepted paths of one length, the greatest first.
    """
    matches = tokens == chosen[:, tree.parents] if likely is None else likely.clone()
    matches[:, 0] = True  # the root is the base's own token
    on_path = matches[:, tree.ancestors].all(dim=-1)  # [B, W]; padding repeats the node itself
    reached = torch.where(on_path, tree.depths, -1)
    if weight is None:
        node = reached.argmax(dim=-1)
    else:
        longest = reached == reached.max(dim=-1, keepdim=True).values
        node = torch.where(longest, weight, -torch.inf).argmax(dim=-1)
    return Accepted(
        node=node,
        path=tree.ancestors[node],
        count=tree.depths[node] + 1,
        root=chosen.gather(1, node[:, None]).squeeze(1),
    )


def typical(
    tokens: torch.Tensor,
    probabilities: torch.Tensor,
    epsilon: torch.Tensor,
    alpha: torch.Tensor,
    tree: TreeBuffers,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which nodes the typical rule accepts after their parents, and how probable each node's whole path is.

    Args:
        tokens: [n, W] int64.
        probabilities: [n, W, V], the base's distribution after each node.
        epsilon, alpha: [n].
        tree: buffers.

    Returns:
        [n, W] bool, and [n, W] summed log-probabilities from the root.
    """
    entropy = torch.special.entr(probabilities).sum(dim=-1)  # [n, W]
    threshold = torch.minimum(epsilon[:, None], alpha[:, None] * torch.exp(-entropy))
    after_parent = probabilities[:, tree.parents].gather(2, tokens[..., None]).squeeze(-1)  # [n, W]
    likely = after_parent > threshold[:, tree.parents]
    logs = after_parent.log()
    logs[:, 0] = 0.0
    # A node's path, padded with the node itself: each ancestor is counted once.
    place = torch.arange(tree.ancestors.shape[1], device=tokens.device)
    own = (place <= tree.depths[:, None]).to(logs.dtype)  # [W, D + 1]
    summed = torch.where(own.bool(), logs[:, tree.ancestors], 0.0).sum(dim=-1)
    return likely, summed


def choose(
    logits: torch.Tensor, tokens: torch.Tensor, tree: TreeBuffers, rules: StepRules
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The base's token after every node, by each row's own rules, and what `accept` needs of the typical rule.

    Args:
        logits: [b, W, V], the base's after each node.
        tokens: [b, W] int64, the tree's.
        tree: buffers.
        rules: of the step.

    Returns:
        chosen [b, W] int64; `likely` [b, W] bool and `weight` [b, W], or None where no row is under the typical rule.
    """
    logits = change_logits(logits, tokens, tree.ancestors, rules)
    chosen = logits.argmax(dim=-1)
    if rules.sampled is None:
        return chosen, None, None
    probabilities = distribution(logits[rules.sampled], rules)
    drawn = invert(probabilities, rules.draws[:, tree.depths])
    chosen = chosen.index_copy(0, rules.sampled, drawn)
    if rules.typical is None:
        return chosen, None, None
    likely = tokens == chosen[:, tree.parents]
    weight = torch.zeros(likely.shape, device=logits.device)
    ruled, summed = typical(tokens[rules.sampled], probabilities, rules.epsilon, rules.alpha, tree)
    mask = rules.typical[:, None]
    likely = likely.index_copy(0, rules.sampled, torch.where(mask, ruled, likely[rules.sampled]))
    weight = weight.index_copy(0, rules.sampled, torch.where(mask, summed, 0.0))
    return chosen, likely, weight
