"""One step as a function of tensors: draft, verify, accept, commit; and the prefill before the first one.

Shapes are static: rows, tree width and the span of the cache that is read are fixed by the arguments' shapes and by
plain integers. Nothing here waits for the device or branches on data, so the same modules run eagerly, under
`torch.compile` and through `torch.export`. The base's layers are transformers' own. What changes in place is the cache;
everything else comes in and goes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from medusa.acceptance import accept, choose
from medusa.attention import group_mask
from medusa.cache import CacheView, commit
from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.sampling import GREEDY, StepRules
from medusa.tree import Tree, TreeBuffers


def draft(
    heads: DraftHeads | None,
    projections: Sequence[nn.Module],
    embed: nn.Module,
    tree: TreeBuffers,
    hidden: torch.Tensor,
    root: torch.Tensor,
) -> torch.Tensor:
    """Fills a tree with guesses.

    Parallel heads are evaluated once, with one matrix product for all of them over a shared LM head; sequential
    heads once for each level, over that level's parents only.

    Args:
        heads: K >= D heads; None with the empty tree only.
        projections: K layers from features to draft logits, `DraftHeads.projections`.
        embed: the base's input embedding module.
        tree: buffers of a tree of width W and depth D.
        hidden: [B, H], the base's last hidden state at the position before the root.
        root: [B] int64, the base's own next token.

    Returns:
        [B, W] int64, the root first.
    """
    batch = root.shape[0]
    tokens = root[:, None]
    if heads is None or not tree.levels:
        return tokens
    if heads.sequential:
        for k, level in enumerate(tree.levels, start=1):
            path = embed(tokens[:, level.paths])  # [B, m, k, H]
            state = hidden[:, None].expand(batch, len(level.drafters), -1)
            logits = projections[k - 1](heads.features(k, state, path))
            guesses = logits.topk(level.top_k, dim=-1).indices  # [B, m, top-k]
            tokens = torch.cat([tokens, heads.to_tokens(guesses[:, level.slots, level.ranks])], dim=1)
        return tokens
    depth = len(tree.levels)
    features = [heads.features(k, hidden, None) for k in range(1, depth + 1)]  # D of [B, H]
    if heads.lm_head is None:
        logits = projections[0](torch.stack(features))
    else:
        logits = torch.stack([projections[k](features[k]) for k in range(depth)])
    top_k = max(level.top_k for level in tree.levels)
    guesses = heads.to_tokens(logits.topk(top_k, dim=-1).indices)  # [D, B, top-k]
    return torch.cat([tokens, *(guesses[d][:, level.ranks] for d, level in enumerate(tree.levels))], dim=1)


class StepOutput(NamedTuple):
    """What one step gives, b rows, D the tree's depth.

    Attributes:
        tokens: [b, D + 1] int64; the first `counts` of a row are new: the accepted guesses, then the base's own token.
        counts: [b] int64, 1..D + 1; 0 for rows that are not active.
        root: [b] int64, the base's own token: the next step's root.
        hidden: [b, H], the last hidden state at the position before it.
        states: [b, D + 1, H], the last hidden states at the positions before `tokens`.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    root: torch.Tensor
    hidden: torch.Tensor
    states: torch.Tensor


class Body(nn.Module):
    """A base without its LM head, over rows of unequal lengths and a bound cache.

    It must be called with `attention.grouped` in force.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.body = model.get_decoder()
        self.config: PretrainedConfig = model.config.get_text_config()
        types = set(getattr(self.config, "layer_types", None) or ())
        if not types <= {"full_attention", "sliding_attention"}:
            raise MedusaError(
                f"the base has layers of type {sorted(types)}; only full and sliding attention are known"
            )
        self._types = types
        self._window = getattr(self.config, "sliding_window", None)
        self.windowless = self._window is None or types == {"full_attention"}
        self._unread = torch.zeros(1, 1, 1, 1, device=model.get_output_embeddings().weight.device)
        # Models whose layers differ look their mask up by layer type; those with one type take the mask itself.
        self._takes_dict = hasattr(self.body, "has_sliding_layers") or len(types) > 1

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        key_positions: torch.Tensor | None,
        visible: torch.Tensor | None,
        cache: CacheView,
        spans: list[int] | None = None,
    ) -> torch.Tensor:
        """[b, q] tokens to their last hidden states [b, q, H].

        Args:
            ids: [b, q] int64.
            positions: [b, q] int64, of the tokens.
            key_positions: [b, S] int64, of what the cache's span holds.
            visible: [b, q, S] bool, which keys a token sees; None: all of them, in a model without sliding windows.
            cache: where keys and values go.
            spans: how far each row is read; see `attention.grouped_attention`.
        """
        if visible is None:  # any mask keeps the model from making its own; the attention does not read it
            masks = self._by_type(self._unread, self._unread)
        else:
            masks = self._masks(positions, key_positions, visible)
        return self.body(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            spans=spans,
            unmasked=visible is None,
        ).last_hidden_state

    def _masks(self, positions: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> object:
        """The mask in the form the model takes: one, or one for each type of layer (sliding windows)."""
        dtype = next(self.body.parameters()).dtype
        full = group_mask(visible, self.config, dtype)
        if self.windowless:
            sliding = full
        else:
            near = positions[:, :, None] - keys[:, None, :] < self._window
            sliding = group_mask(visible & near, self.config, dtype)
        return self._by_type(full, sliding)

    def _by_type(self, full: torch.Tensor, sliding: torch.Tensor) -> object:
        if not self._types:
            return sliding
        masks = {"full_attention": full, "sliding_attention": sliding}
        return masks if self._takes_dict else masks[next(iter(self._types))]


class Prefill(nn.Module):
    """Reads one row's prompt into its cache."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.base, self.lm_head = Body(model), model.get_output_embeddings()
        self.plain = Tree().buffers(self.lm_head.weight.device)

    def forward(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        ids: torch.Tensor,
        start: torch.Tensor,
        last: torch.Tensor,
        span: int,
        rules: StepRules = GREEDY,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            keys: [layers, 1, kv heads, capacity, head dim], changed in place.
            values: the same.
            ids: [1, n] int64; what follows `last` is padding, whose keys and values nothing sees.
            start: [] int64, where in the row the prompt goes on.
            last: [] int64, which of `ids` is the prompt's last token.
            span: positions of the cache that are read, at least start + n.
            rules: how the first token is chosen.

        Returns:
            root [1] int64, the base's token after the prompt, and hidden [1, H], the last hidden state before it.
        """
        offsets = torch.arange(ids.shape[1], device=ids.device)
        positions = (start + offsets)[None]
        at = torch.arange(span, device=ids.device)[None]
        visible = at[:, None] <= positions[:, :, None]
        cache = CacheView(keys, values, positions, span)
        hidden = self.base(ids, positions, at, visible, cache).index_select(1, last[None])  # [1, 1, H]
        token = ids.index_select(1, last[None])
        chosen, _, _ = choose(self.lm_head(hidden), token, self.plain, rules)
        return chosen[:, 0], hidden[:, 0]


class Step(nn.Module):
    """Draft, verify, accept and commit with one tree. The empty tree is plain decoding."""

    def __init__(self, model: PreTrainedModel, heads: DraftHeads | None, tree: Tree):
        super().__init__()
        self.base, self.lm_head = Body(model), model.get_output_embeddings()
        self.embed, self.heads = model.get_input_embeddings(), heads
        shared = () if heads is None else heads.projections(self.lm_head.weight)
        self.projections = nn.ModuleList(shared)
        self.tree = tree.buffers(self.lm_head.weight.device)

    def forward(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: torch.Tensor,
        root: torch.Tensor,
        hidden: torch.Tensor,
        active: torch.Tensor,
        span: int,
        rules: StepRules = GREEDY,
        spans: list[int] | None = None,
        whole: bool = False,
    ) -> StepOutput:
        """
        Args:
            keys: [layers, b, kv heads, capacity, head dim], changed in place.
            values: the same.
            lengths: [b] int64, tokens in the cache.
            root: [b] int64, the pending token.
            hidden: [b, H], the last hidden state at the position before it.
            active: [b] int64, 1 for rows that are in use and 0 for others, whose results mean nothing.
            span: positions of the cache that are read, at least the longest row's plus the tree's width.
            rules: how tokens are chosen.
            spans: how far each row is read; None: all of the span. For eager decoding on a CPU.
            whole: the one row's one node sees all of the span, in a base without sliding windows: no mask is made.
        """
        tree = self.tree
        tokens = draft(self.heads, self.projections, self.embed, tree, hidden, root)
        if whole:
            positions, key_positions, visible = lengths[:, None], None, None
        else:
            positions, key_positions, visible = self._view(lengths, span)
        slots = lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        cache = CacheView(keys, values, slots, span)
        states = self.base(tokens, positions, key_positions, visible, cache, spans)  # [b, W, H]
        chosen, likely, weight = choose(self.lm_head(states), tokens, tree, rules)
        accepted = accept(tokens, chosen, tree, likely, weight)
        commit(keys, values, lengths, accepted.path)
        last = (accepted.count - 1)[:, None]
        new = torch.cat([tokens.gather(1, accepted.path[:, 1:]), accepted.root[:, None]], dim=1)
        new = new.scatter(1, last, accepted.root[:, None])
        size = states.shape[-1]
        on_path = states.gather(1, accepted.path[..., None].expand(-1, -1, size))
        return StepOutput(
            tokens=new,
            counts=accepted.count * active,
            root=accepted.root,
            hidden=states.gather(1, accepted.node[:, None, None].expand(-1, 1, size))[:, 0],
            states=on_path,
        )

    def _view(self, lengths: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Node positions [b, W], positions of the keys in the span [b, span], and who sees whom [b, W, span]."""
        tree = self.tree
        width = tree.depths.shape[0]
        # < 0: committed; 0..W-1: nodes
        offset = torch.arange(span, device=lengths.device)[None] - lengths[:, None]
        column = offset.clamp(-1, width) + 1
        edge = torch.ones(width, 1, dtype=torch.bool, device=lengths.device)
        visible = torch.cat([edge, tree.mask, ~edge], dim=1)[:, column].transpose(0, 1)
        keys = torch.where(offset < 0, offset, tree.depths[offset.clamp(0, width - 1)]) + lengths[:, None]
        return lengths[:, None] + tree.depths, keys, visible
