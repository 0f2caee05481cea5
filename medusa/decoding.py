"""The decoding engine: prefill, then steps of draft, verify, commit.

The engine knows token ids, rows and lengths. It knows nothing of text, stop rules, requests or files; see
`generation.py` for those. Plain decoding is the same engine with the empty tree: one node a step, the same forward,
the same cache.

A prefill gives the base's next token: the first root. One step, for every row at once:
  draft   the heads fill the tree below the root, from the last hidden state;
  verify  one base forward over all nodes, each seeing its row's committed tokens and its own ancestors;
  accept  the base's token is chosen after every node, and the longest agreeing path wins (`acceptance.py`);
  commit  that path's keys and values move into place; its guesses and the base's token after it are new text, and
          that token is the next root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from medusa.acceptance import accept, sample
from medusa.attention import group_mask, grouped
from medusa.cache import TreeCache
from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.packing import pack_linears
from medusa.tree import Tree, TreeBuffers

SPAN = 64  # the part of the cache that a forward reads grows in steps of this many positions


def draft(
    heads: DraftHeads,
    embed: torch.nn.Module,
    lm_head: torch.Tensor,
    tree: TreeBuffers,
    hidden: torch.Tensor,
    root: torch.Tensor,
) -> torch.Tensor:
    """Fills a tree with guesses.

    Parallel heads are evaluated once, with one matrix product for all of them over a shared LM head; sequential
    heads once for each level, over that level's parents only.

    Args:
        heads: K >= D heads.
        embed: the base's input embedding module.
        lm_head: [V, H], the base's LM head weight.
        tree: buffers of a tree of width W and depth D.
        hidden: [B, H], the base's last hidden state at the position before the root.
        root: [B] int64, the base's own next token.

    Returns:
        [B, W] int64, the root first.
    """
    batch = root.shape[0]
    tokens = root[:, None]
    if not tree.levels:
        return tokens
    if heads.sequential:
        for k, level in enumerate(tree.levels, start=1):
            path = embed(tokens[:, level.paths])  # [B, m, k, H]
            state = hidden[:, None].expand(batch, len(level.drafters), -1)
            logits = heads.draft_logits(k, heads.features(k, state, path), lm_head)
            guesses = logits.topk(level.top_k, dim=-1).indices  # [B, m, top-k]
            tokens = torch.cat([tokens, heads.to_tokens(guesses[:, level.slots, level.ranks])], dim=1)
        return tokens
    depth = len(tree.levels)
    features = torch.stack([heads.features(k, hidden, None) for k in range(1, depth + 1)])  # [D, B, H]
    if heads.lm_head is None:
        logits = heads.draft_logits(1, features, lm_head)
    else:
        logits = torch.bmm(features, heads.lm_head[:depth].transpose(1, 2))
    top_k = max(level.top_k for level in tree.levels)
    guesses = heads.to_tokens(logits.topk(top_k, dim=-1).indices)  # [D, B, top-k]
    return torch.cat([tokens, *(guesses[d][:, level.ranks] for d, level in enumerate(tree.levels))], dim=1)


@dataclass(frozen=True)
class StepResult:
    """What one step committed, on the host. Rows 0..b-1, where b - 1 is the highest row in use.

    Attributes:
        tokens: [b, D + 1] int64; a row's first `counts` entries are its new tokens: the accepted guesses, then the
            base's own token after them.
        counts: [b] int64, 1..D + 1; 0 for a row that is not active.
        hidden: [b, D + 1, H], the last hidden states at the positions *before* those tokens; None unless asked for.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    hidden: torch.Tensor | None = None


class Engine:
    """Decodes `batch` rows of unequal lengths, one tree a step. Rows join and leave between steps.

    Args:
        model: a Hugging Face causal LM with rotary positions, in eval mode.
        heads: draft heads in the model's dtype and on its device; None for plain decoding only.
        tree: the candidate tree; None: plain decoding.
        batch: rows.
        max_length: most tokens of a row, prompt and answer together.
        pack: lay the weights of a frozen float32 model on a CPU out a second time for small batches; see `packing.py`.

    Raises:
        MedusaError: the tree does not fit the heads, or the heads do not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heads: DraftHeads | None = None,
        tree: Tree | None = None,
        *,
        batch: int = 1,
        max_length: int = 2048,
        pack: bool = True,
    ):
        self.model, self.heads = model, heads
        self.body = model.get_decoder()
        self.embed, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.device, dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        self.config = model.config.get_text_config()
        self.batch, self.max_length = batch, max_length
        if heads is not None and heads.config.hidden_size != self.config.hidden_size:
            raise MedusaError(
                f"the heads were made for a hidden size of {heads.config.hidden_size} and the base has "
                f"{self.config.hidden_size}; use the base that the heads were trained on"
            )
        if pack:
            for module in (model, heads):
                if module is not None:
                    pack_linears(module)
        self.set_tree(tree or Tree())
        spare = 64 + self.tree.width  # a tree's nodes lie after the last committed token
        capacity = -(-(max_length + spare) // SPAN) * SPAN
        self.cache = TreeCache(self.config, batch, capacity, dtype, self.device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.root = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.hidden = torch.zeros(batch, self.config.hidden_size, dtype=dtype, device=self.device)
        self.temperature = torch.zeros(batch, device=self.device)
        self.top_p = torch.ones(batch, device=self.device)
        self._generators: list[torch.Generator | None] = [None] * batch
        self._lengths = [0] * batch  # the same on the host, so that a span is known without a synchronisation
        self._text: list[list[int]] = [[] for _ in range(batch)]  # a row's tokens and, last, its pending root
        self._used: set[int] = set()

    def set_tree(self, tree: Tree) -> None:
        """Changes the tree between steps. Raises MedusaError if the heads cannot fill it."""
        if tree.depth and self.heads is None:
            raise MedusaError(
                "a tree needs heads; give a checkpoint, or use the empty tree for plain decoding"
            )
        if tree.depth:
            tree.check(self.heads.config.num_heads, self.heads.config.draft_size)
        if hasattr(self, "cache") and self.max_length + tree.width > self.cache.capacity:
            raise MedusaError(f"a tree of {tree.width} nodes is wider than this engine's cache has room for")
        self.tree, self.buffers = tree, tree.buffers(self.device)

    @torch.inference_mode()
    def prefill(
        self,
        row: int,
        ids: Sequence[int],
        *,
        start: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> int:
        """Puts a prompt into a row, makes the row active, and returns the base's next token, the first root.

        Args:
            row: 0..batch-1.
            ids: the prompt's tokens from position `start` on.
            start: how many of the row's committed tokens are kept, as the prompt's beginning.
            temperature: 0 for greedy, else lossless sampling.
            top_p: nucleus mass.
            seed: of this row's random draws.

        Raises:
            MedusaError: the prompt is empty, or longer than `max_length`.
        """
        if not len(ids):
            raise MedusaError("the prompt is empty; give at least one token")
        end = start + len(ids)
        if end > self.max_length:
            raise MedusaError(
                f"the prompt has {end} tokens and the context holds {self.max_length}; shorten it"
            )
        if start > self._lengths[row]:
            raise MedusaError(
                f"row {row} holds {self._lengths[row]} tokens, so a prompt cannot continue at {start}"
            )
        positions = torch.arange(start, end, device=self.device)[None]
        span = min(-(-end // SPAN) * SPAN, self.cache.capacity)
        keys = torch.arange(span, device=self.device)
        hidden = self._forward(
            torch.tensor([list(ids)], dtype=torch.long, device=self.device),
            positions,
            keys[None],
            (keys[None, :] <= positions[0, :, None])[None],
            slice(row, row + 1),
            positions,
            span,
        )[:, -1]
        self.lengths[row], self._lengths[row] = end, end
        self.hidden[row] = hidden[0]
        self.temperature[row], self.top_p[row] = temperature, top_p
        self._generators[row] = torch.Generator().manual_seed(seed) if temperature > 0 else None
        root = self._choose(self.lm_head(hidden)[:, None], row, row + 1)[0, 0]
        self.root[row] = root
        self._used.add(row)
        self._text[row][start:] = [*ids, int(root)]
        return self._text[row][-1]

    def kept_prefix(self, row: int, ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens a row still holds from before, so that a prefill can start there."""
        most = min(self._lengths[row], len(ids) - 1)  # the last token's hidden state is needed anew
        return next((at for at in range(most) if self._text[row][at] != ids[at]), max(most, 0))

    def free(self, row: int) -> None:
        """Takes a row out of the following steps. Its tokens stay until the row is filled again."""
        self._used.discard(row)
        self.temperature[row], self._generators[row] = 0.0, None

    def rewind(self, row: int, length: int) -> None:
        """Forgets a row's tokens from position `length` on; the pending root and hidden state stay as they are."""
        if not 0 <= length <= self._lengths[row]:
            raise MedusaError(
                f"row {row} holds {self._lengths[row]} tokens and cannot be cut back to {length}"
            )
        self.lengths[row] = self._lengths[row] = length
        del self._text[row][length:-1]

    def length(self, row: int) -> int:
        """Tokens of a row in the cache: all of its text but the pending root."""
        return self._lengths[row]

    @torch.inference_mode()
    def step(self, want_hidden: bool = False) -> StepResult:
        """Adds at least one token to every active row: the accepted guesses and the base's token after them."""
        count = max(self._used) + 1
        rows, tree = slice(0, count), self.buffers
        lengths = self.lengths[:count]
        if tree.levels:
            tokens = draft(
                self.heads, self.embed, self.lm_head.weight, tree, self.hidden[:count], self.root[:count]
            )
        else:
            tokens = self.root[:count, None].clone()
        ends = [length + self.tree.width for length in self._lengths[:count]]
        span = min(-(-max(ends) // SPAN) * SPAN, self.cache.capacity)
        spans = ends if count > 1 and self.device.type == "cpu" else None
        hidden = self._forward(
            tokens, *self._tree_view(lengths, span), rows, self._slots(lengths), span, spans
        )
        accepted = accept(tokens, self._choose(self.lm_head(hidden), 0, count), tree)
        self.cache.commit(rows, lengths, accepted.path)
        self.hidden[:count] = hidden[torch.arange(count, device=self.device), accepted.node]
        self.root[:count] = accepted.root
        last = (accepted.count - 1)[:, None]
        new = torch.cat([tokens.gather(1, accepted.path[:, 1:]), accepted.root[:, None]], dim=1)
        new = new.scatter(1, last, accepted.root[:, None])
        active = torch.zeros(count, dtype=torch.long, device=self.device)
        active[sorted(self._used)] = 1
        counts = accepted.count * active
        self.lengths[:count] += counts
        result = torch.cat([new, counts[:, None]], dim=1).cpu()  # the step's one wait for the device
        for row in self._used:
            self._lengths[row] += int(result[row, -1])
            self._text[row] += result[row, : int(result[row, -1])].tolist()
        states = None
        if want_hidden:
            states = hidden.gather(1, accepted.path[..., None].expand(-1, -1, hidden.shape[-1]))
        return StepResult(tokens=result[:, :-1], counts=result[:, -1], hidden=states)

    def _slots(self, lengths: torch.Tensor) -> torch.Tensor:
        """[b, W]: where each node's keys and values are written."""
        return lengths[:, None] + torch.arange(self.tree.width, device=self.device)

    def _tree_view(self, lengths: torch.Tensor, span: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Node positions [b, W], positions of the keys in the span [b, span], and who sees whom [b, W, span]."""
        width, tree = self.tree.width, self.buffers
        offset = (
            torch.arange(span, device=self.device)[None] - lengths[:, None]
        )  # < 0: committed; 0..W-1: nodes
        column = offset.clamp(-1, width) + 1
        edge = torch.ones(width, 1, dtype=torch.bool, device=self.device)
        visible = torch.cat([edge, tree.mask, ~edge], dim=1)[:, column].transpose(0, 1)
        keys = torch.where(offset < 0, offset, tree.depths[offset.clamp(0, width - 1)]) + lengths[:, None]
        return lengths[:, None] + tree.depths, keys, visible

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keys: torch.Tensor,
        visible: torch.Tensor,
        rows: slice,
        slots: torch.Tensor,
        span: int,
        spans: list[int] | None = None,
    ) -> torch.Tensor:
        """The base without its LM head over [b, q] tokens. Returns the last hidden states [b, q, H]."""
        self.cache.bind(rows, slots, span)
        with grouped(self.config):
            return self.body(
                input_ids=ids,
                attention_mask=self._masks(positions, keys, visible),
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                spans=spans,
            ).last_hidden_state

    def _masks(self, positions: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor) -> object:
        """The mask in the form the model takes: one, or one for each type of layer (sliding windows)."""
        dtype = self.hidden.dtype
        window = getattr(self.config, "sliding_window", None)
        types = set(getattr(self.config, "layer_types", None) or ())
        if not types <= {"full_attention", "sliding_attention"}:
            raise MedusaError(
                f"the base has layers of type {sorted(types)}; only full and sliding attention are known"
            )
        full = group_mask(visible, self.config, dtype)
        if window is None or types == {"full_attention"}:
            sliding = full
        else:
            near = positions[:, :, None] - keys[:, None, :] < window
            sliding = group_mask(visible & near, self.config, dtype)
        if not types:
            return sliding
        masks = {"full_attention": full, "sliding_attention": sliding}
        return masks if self._takes_mask_dict else masks[types.pop()]

    @property
    def _takes_mask_dict(self) -> bool:
        # Models whose layers differ look their mask up by layer type; those with one type take the mask itself.
        return hasattr(self.body, "has_sliding_layers") or len(set(self.config.layer_types)) > 1

    def _choose(self, logits: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The base's token after each node: [b, W, V] -> [b, W], by each row's own rule."""
        generators = self._generators[first:last]
        if not any(generators):
            return logits.argmax(dim=-1)
        draws = torch.zeros(logits.shape[:2])
        for row, generator in enumerate(generators):
            if generator is not None:
                draws[row] = torch.rand(logits.shape[1], generator=generator)
        return sample(logits, self.temperature[first:last], self.top_p[first:last], draws.to(self.device))
