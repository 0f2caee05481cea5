"""The decoding engine: rows that join and leave, around the step function of `step.py`.

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

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from medusa.attention import grouped
from medusa.cache import TreeCache
from medusa.errors import MedusaError
from medusa.heads import DraftHeads
from medusa.packing import pack_linears
from medusa.sampling import Draws, SamplingParams, StepRules, gather_rules
from medusa.step import Prefill, Step
from medusa.tree import Tree

if TYPE_CHECKING:
    from medusa.adaptive import AdaptiveTrees

SPAN = 64  # the part of the cache that an eager forward reads grows in steps of this many positions
COMPILED_SPAN = 256  # and of a compiled one: each costs a compilation
COMPILED_PROMPT = 64  # prompts are padded to a multiple of this before a compiled prefill
MOST_GRAPHS = 256  # compiled graphs kept: batch sizes x trees x spans, greedy and sampled


@dataclass(frozen=True)
class StepResult:
    """What one step committed, on the host. Rows 0..b-1, where b - 1 is the highest row in use.

    Attributes:
        tokens: [b, D + 1] int64; a row's first `counts` entries are its new tokens: the accepted guesses, then the
            base's own token after them.
        counts: [b] int64, 1..D + 1; 0 for a row that is not active.
        hidden: [b, D + 1, H], the last hidden states at the positions *before* those tokens.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    hidden: torch.Tensor


class Engine:
    """Decodes `batch` rows of unequal lengths, one tree a step. Rows join and leave between steps.

    Args:
        model: a Hugging Face causal LM with rotary positions, in eval mode.
        heads: draft heads in the model's dtype and on its device; None for plain decoding only.
        tree: the candidate tree; None: plain decoding.
        batch: rows.
        max_length: most tokens of a row, prompt and answer together.
        pack: lay the weights of a frozen float32 model on a CPU out a second time for few rows; see `packing.py`.
        compile: run prefill and step under `torch.compile`. Each batch size (rounded up to a power of two), tree and
            span of the cache (in steps of 256) compiles once, which takes a minute or so for a real base.

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
        compile: bool = False,
    ):
        self.model, self.heads, self.compiled = model, heads, compile
        lm_head = model.get_output_embeddings()
        self.device, dtype = lm_head.weight.device, lm_head.weight.dtype
        self.config = model.config.get_text_config()
        self.batch, self.max_length = batch, max_length
        if heads is not None and heads.config.hidden_size != self.config.hidden_size:
            raise MedusaError(
                f"the heads were made for a hidden size of {heads.config.hidden_size} and the base has "
                f"{self.config.hidden_size}; use the base that the heads were trained on"
            )
        if pack:
            pack_linears(model)
            if heads is not None:
                pack_linears(heads, exact=False)
        self._steps: dict[Tree, Step] = {}
        self._prefill = self._ready(Prefill(model))
        self._grain = COMPILED_SPAN if compile else SPAN
        self.policy: AdaptiveTrees | None = None
        self.set_tree(tree or Tree())
        spare = 64 + max(self.tree.width, 64)  # a tree's nodes lie after the last committed token
        capacity = -(-(max_length + spare) // self._grain) * self._grain
        self.cache = TreeCache(self.config, batch, capacity, dtype, self.device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.root = torch.zeros(batch, dtype=torch.long, device=self.device)
        self.hidden = torch.zeros(batch, self.config.hidden_size, dtype=dtype, device=self.device)
        self._sampling: list[SamplingParams | None] = [None] * batch
        self._draws: list[Draws | None] = [None] * batch
        self._lengths = [0] * batch  # the same on the host, so that a span is known without a synchronisation
        self._prompts = [0] * batch  # of which the prompt
        self._text: list[list[int]] = [[] for _ in range(batch)]  # a row's tokens and, last, its pending root
        self._used: set[int] = set()

    def set_tree(self, tree: Tree) -> None:
        """Changes the tree between steps, for good. Raises MedusaError if the heads cannot fill it."""
        self._check(tree)
        self.policy, self.tree = None, tree

    def set_policy(self, policy: AdaptiveTrees) -> None:
        """Lets a policy choose the tree before each step.

        Raises:
            MedusaError: the heads cannot fill one of its trees.
        """
        for tree in policy.trees:
            self._check(tree)
        self.policy = policy

    def _check(self, tree: Tree) -> None:
        if tree.depth and self.heads is None:
            raise MedusaError(
                "a tree needs heads; give a checkpoint, or use the empty tree for plain decoding"
            )
        if tree.depth:
            tree.check(self.heads.config.num_heads, self.heads.config.draft_size)
        if hasattr(self, "cache") and self.max_length + tree.width > self.cache.capacity:
            raise MedusaError(f"a tree of {tree.width} nodes is wider than this engine's cache has room for")

    def _ready(self, module: torch.nn.Module) -> torch.nn.Module:
        return torch.compile(module, fullgraph=True, dynamic=False) if self.compiled else module

    def _span(self, needed: int) -> int:
        """How much of the cache a forward reads: what is needed, rounded up so that few shapes occur."""
        return min(-(-needed // self._grain) * self._grain, self.cache.capacity)

    @torch.inference_mode()
    def prefill(
        self, row: int, ids: Sequence[int], *, start: int = 0, sampling: SamplingParams | None = None
    ) -> int:
        """Puts a prompt into a row, makes the row active, and returns the base's next token, the first root.

        Args:
            row: 0..batch-1.
            ids: the prompt's tokens from position `start` on.
            start: how many of the row's committed tokens are kept, as the prompt's beginning.
            sampling: how the row's tokens are chosen; None: greedily.

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
        sampling = sampling or SamplingParams()
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        if sampling.logit_bias and not all(0 <= token < vocabulary for token in sampling.logit_bias):
            raise MedusaError(f"sampling: logit_bias names a token outside 0..{vocabulary - 1}")
        self._sampling[row] = sampling
        self._draws[row] = Draws(sampling.seed) if sampling.temperature > 0 else None
        # Until the prompt is read the row holds its kept beginning only: an interruption must not leave it more.
        self.lengths[row] = self._lengths[row] = start
        del self._text[row][start:]
        padded = [*ids]
        if self.compiled:
            room = self.cache.capacity - start
            padded += [ids[-1]] * (min(-(-len(ids) // COMPILED_PROMPT) * COMPILED_PROMPT, room) - len(ids))
        rules = gather_rules(
            [sampling], [self._draws[row]], [0], [[*self._text[row], *ids]], 0, vocabulary, self.device
        )
        with grouped(self.config), _many_graphs(self.compiled):
            root, hidden = self._prefill(
                *self.cache.rows(row, row + 1),
                torch.tensor([padded], dtype=torch.long, device=self.device),
                torch.tensor(start, device=self.device),
                torch.tensor(len(ids) - 1, device=self.device),
                self._span(start + len(padded)),
                rules,
            )
        self._text[row] += ids
        self.lengths[row] = self._lengths[row] = self._prompts[row] = end
        self.hidden[row], self.root[row] = hidden[0], root[0]
        self._used.add(row)
        if self.policy is not None:
            self.policy.start(row)
        self._text[row].append(int(root))
        return self._text[row][-1]

    def kept_prefix(self, row: int, ids: Sequence[int]) -> int:
        """How many of a prompt's first tokens a row still holds from before, so that a prefill can start there."""
        most = min(self._lengths[row], len(ids) - 1)  # the last token's hidden state is needed anew
        return next((at for at in range(most) if self._text[row][at] != ids[at]), max(most, 0))

    def free(self, row: int) -> None:
        """Takes a row out of the following steps. Its tokens stay until the row is filled again."""
        self._used.discard(row)
        self._sampling[row] = self._draws[row] = None

    def rewind(self, row: int, length: int) -> None:
        """Forgets a row's tokens from position `length` on; the pending root and hidden state stay as they are."""
        if not 0 <= length <= self._lengths[row]:
            raise MedusaError(
                f"row {row} holds {self._lengths[row]} tokens and cannot be cut back to {length}"
            )
        self.lengths[row] = self._lengths[row] = length
        self._prompts[row] = min(self._prompts[row], length)
        del self._text[row][length:-1]

    def length(self, row: int) -> int:
        """Tokens of a row in the cache: all of its text but the pending root."""
        return self._lengths[row]

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Adds at least one token to every active row: the accepted guesses and the base's token after them."""
        used = sorted(self._used)
        count = used[-1] + 1
        if self.policy is not None:
            self.tree = self.policy.choose(used, count)
        if self.compiled:  # rows that are not in use cost time, but other sizes would cost a compilation each
            count = min(1 << (count - 1).bit_length(), self.batch)
        ends = [length + self.tree.width for length in self._lengths[:count]]
        self.cache.check_span(max(ends))
        eager = self.device.type == "cpu" and not self.compiled
        step = self._step()
        whole = eager and count == 1 and self.tree.width == 1 and step.base.windowless
        active = torch.zeros(count, dtype=torch.long)
        active[used] = 1
        with grouped(self.config), _many_graphs(self.compiled):
            out = step(
                *self.cache.rows(0, count),
                self.lengths[:count],
                self.root[:count],
                self.hidden[:count],
                active.to(self.device),
                ends[0] if whole else self._span(max(ends)),
                self._rules(count),
                ends if eager and count > 1 else None,
                whole,
            )
        self.root[:count], self.hidden[:count] = out.root, out.hidden
        self.lengths[:count] += out.counts
        result = torch.cat(
            [out.tokens, out.counts[:, None]], dim=1
        ).cpu()  # the step's one wait for the device
        for row in used:
            new = int(result[row, -1])
            self._text[row] += result[row, :new].tolist()
            self._lengths[row] += new
        if self.policy is not None:
            self.policy.observe(used, [int(result[row, -1]) - 1 for row in used])
        return StepResult(tokens=result[:, :-1], counts=result[:, -1], hidden=out.states)

    def _step(self) -> torch.nn.Module:
        """The step module of the current tree, made once for each tree."""
        if self.tree not in self._steps:
            self._steps[self.tree] = self._ready(Step(self.model, self.heads, self.tree))
        return self._steps[self.tree]

    def _rules(self, count: int) -> StepRules:
        """How rows 0..count-1 choose their tokens in this step."""
        rows = range(count)
        return gather_rules(
            [self._sampling[row] if row in self._used else None for row in rows],
            self._draws[:count],
            # the pending root is known as well: it is the answer's last token so far
            [self._lengths[row] - self._prompts[row] + 1 for row in rows],
            self._text[:count],
            self.tree.depth,
            self.model.get_output_embeddings().weight.shape[0],
            self.device,
        )


def _many_graphs(compiled: bool) -> contextlib.AbstractContextManager:
    """Within the block torch compiles as many shapes as the engine has buckets, instead of giving up after eight."""
    if not compiled:
        return contextlib.nullcontext()
    import torch._dynamo as dynamo

    return dynamo.config.patch(recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=4 * MOST_GRAPHS)
