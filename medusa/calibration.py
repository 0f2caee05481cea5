"""What the heads guess right, counted on true answers; and what a tree would gain from it.

The *rank vector* of a position holds, for each head k, the place of the true token among head k's guesses
when the true tokens before it are given; `top_k` means "not among the first top_k". A tree commits a path's
tokens exactly where the rank vector starts with that path, so counting prefixes of rank vectors gives the
joint probability of every path, without assuming that heads err independently.

Which positions are counted matters. Decoding does not start a step everywhere: it skips what it has just
guessed right and starts again after a miss, where text is harder to guess. Over all positions alike, paths
seem more frequent than decoding finds them (2.23 tokens a step expected and 1.93 walked, on the same answers).
So paths are counted where a walk through the answers starts its steps.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medusa.errors import MedusaError
from medusa.files import read_json, write_json
from medusa.heads import DraftHeads
from medusa.targets import reach_of, shifted_tokens
from medusa.tree import Tree

TOP_K = 10  # guesses counted for each head
WALKED_WIDTH = 16  # nodes of the tree whose walk says where paths are counted
KEPT_PATHS = 512  # most frequent paths kept: eight times the widest tree that is searched
_CHUNK_TOKENS = 2048  # rows whose logits are held at once
_ROUNDS = 4  # of counting where the tree's own walk starts its steps; two are usually enough


@dataclass(frozen=True)
class Calibration:
    """Counts over `positions` places in true answers.

    Attributes:
        top_k: guesses counted for each head; a rank of top_k is a miss.
        positions: N, every place where a step could start (the last token of an answer included).
        starts: the places among them that `paths` is counted over.
        head_positions: [K]; the places where head k had a token to guess, N less the answers' ends.
        hits: [K][top_k]; how often the true token was head k's guess number r.
        paths: path -> how many of the starts' rank vectors begin with it; the KEPT_PATHS most frequent. Floats
            when they come from marginal accuracies and not from counting.
    """

    top_k: int
    positions: int
    starts: int
    head_positions: tuple[int, ...]
    hits: tuple[tuple[int, ...], ...]
    paths: dict[tuple[int, ...], float]

    @property
    def num_heads(self) -> int:
        return len(self.hits)

    def accuracy(self, top: int) -> list[float]:
        """[K] share of places where the true token is among the first `top` guesses, in 0..1."""
        pairs = zip(self.hits, self.head_positions, strict=True)
        return [sum(row[:top]) / places if places else 0.0 for row, places in pairs]

    def expected(self, tree: Tree) -> float:
        """Expected acceptance length of `tree` at one of the starts: 1 + the sum of its paths' chances.

        Raises:
            MedusaError: the tree is deeper than there are heads.
        """
        tree.check(self.num_heads, self.top_k)
        return 1.0 + sum(self.paths.get(path, 0) for path in tree.paths) / max(self.starts, 1)

    def best_tree(self, width: int) -> Tree:
        """The tree of at most `width` nodes (root included) that commits the most on these answers.

        A path's count is never above its prefix's, so the most frequent paths always form a tree, and each
        width's tree lies inside the next one's.
        """
        ordered = sorted(self.paths.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        return Tree(path for path, count in ordered[: width - 1] if count > 0)

    @classmethod
    def from_ranks(
        cls,
        ranks: np.ndarray,
        offsets: Sequence[int] | np.ndarray,
        top_k: int = TOP_K,
        starts: np.ndarray | None = None,
    ) -> Calibration:
        """Counts rank vectors.

        Args:
            ranks: [N, K] integers in 0..top_k, where top_k is a miss and stands past an answer's end.
            offsets: [S + 1]; where each answer starts.
            top_k: R.
            starts: [N] bool, the places that paths are counted over; None: all.
        """
        ranks = np.asarray(ranks, dtype=np.int64)
        num_heads = ranks.shape[1]
        reach = np.repeat(np.asarray(offsets)[1:], np.diff(offsets)) - 1 - np.arange(len(ranks))
        hits = tuple(tuple(np.bincount(column, minlength=top_k + 1)[:top_k].tolist()) for column in ranks.T)
        counted: list[tuple[tuple[int, ...], int]] = []
        if starts is not None:
            ranks = ranks[starts]
        places = len(ranks)
        code = np.zeros(places, dtype=np.int64)
        for depth in range(num_heads):
            alive = ranks[:, depth] < top_k
            ranks, code = ranks[alive], code[alive] * top_k + ranks[alive, depth]
            for number, count in zip(*np.unique(code, return_counts=True), strict=True):
                digits = [int(number) // top_k**place % top_k for place in range(depth, -1, -1)]
                counted.append((tuple(digits), int(count)))
        counted.sort(key=lambda item: (-item[1], len(item[0]), item[0]))
        reached = tuple(int((reach >= k).sum()) for k in range(1, num_heads + 1))
        return cls(top_k, len(reach), places, reached, hits, dict(counted[:KEPT_PATHS]))

    @classmethod
    def from_walk(
        cls, ranks: np.ndarray, offsets: Sequence[int] | np.ndarray, width: int, top_k: int = TOP_K
    ) -> Calibration:
        """Counts rank vectors where decoding with the best tree of `width` nodes starts its steps.

        Which tree is best depends on the counts and where steps start on the tree: a few rounds settle it. For
        that tree `expected` is then what `simulate` finds; for other widths it is close to it.

        Args:
            ranks, offsets, top_k: as for `from_ranks`.
            width: nodes, root included.
        """
        found = cls.from_ranks(ranks, offsets, top_k)
        tree = found.best_tree(width)
        for _ in range(_ROUNDS):
            found = cls.from_ranks(ranks, offsets, top_k, walk(ranks, offsets, tree, top_k))
            before, tree = tree, found.best_tree(width)
            if tree == before:
                break
        return found

    @classmethod
    def from_accuracies(cls, accuracies: Sequence[Sequence[float]], positions: int = 10**6) -> Calibration:
        """The fallback where only marginal accuracies are known: ranks of different heads taken as
        independent.

        Args:
            accuracies: [K][R], the share of places where the true token is head k's guess number r (each row
                sums to at most 1). Medusa publishes these as cumulative top-k: pass differences.
            positions: how many places to state the counts over.

        Raises:
            MedusaError: a row is not a distribution, or rows differ in length.
        """
        top_k = len(accuracies[0]) if accuracies else 0
        for k, row in enumerate(accuracies, 1):
            if len(row) != top_k or not top_k or min(row) < 0 or sum(row) > 1 + 1e-6:
                raise MedusaError(
                    f"calibration: head {k} needs {top_k or 'some'} shares >= 0 whose sum is at most 1"
                )
        level: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        paths: list[tuple[tuple[int, ...], float]] = []
        for row in accuracies:
            level = [((*path, r), chance * p) for path, chance in level for r, p in enumerate(row)]
            level = sorted(level, key=lambda item: -item[1])[:KEPT_PATHS]
            paths += level
        paths = sorted(paths, key=lambda item: (-item[1], len(item[0]), item[0]))[:KEPT_PATHS]
        hits = tuple(tuple(round(p * positions) for p in row) for row in accuracies)
        counts = {path: chance * positions for path, chance in paths}
        return cls(top_k, positions, positions, (positions,) * len(hits), hits, counts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": 2,
            "top_k": self.top_k,
            "positions": self.positions,
            "starts": self.starts,
            "head_positions": list(self.head_positions),
            "hits": [list(row) for row in self.hits],
            "paths": [[list(path), count] for path, count in self.paths.items()],
        }

    @classmethod
    def from_dict(cls, value: Any) -> Calibration:
        """Raises MedusaError if `value` is not what `to_dict` gives."""
        try:
            calibration = cls(
                int(value["top_k"]),
                int(value["positions"]),
                int(value["starts"]),
                tuple(int(places) for places in value["head_positions"]),
                tuple(tuple(int(hit) for hit in row) for row in value["hits"]),
                {tuple(int(rank) for rank in path): count for path, count in value["paths"]},
            )
            ranks_known = all(0 <= r < calibration.top_k for path in calibration.paths for r in path)
            if not ranks_known or any(len(row) != calibration.top_k for row in calibration.hits):
                raise ValueError("a rank is outside top_k")
            counts = list(calibration.paths.values())
            if not all(type(count) in (int, float) and 0 <= count <= calibration.starts for count in counts):
                raise ValueError("a path's count is not a number from 0 to starts")
            if len(calibration.head_positions) != calibration.num_heads:
                raise ValueError("head_positions and hits differ in length")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise MedusaError(
                f"calibration: not a calibration ({error!r}); run the calibration again"
            ) from error
        return calibration

    def to_json(self, path: str | os.PathLike) -> None:
        write_json(path, self.to_dict())

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> Calibration:
        """Raises MedusaError if the file is not a calibration."""
        value = read_json(path)
        try:
            return cls.from_dict(value)
        except MedusaError as error:
            raise MedusaError(f"{path}: {error}") from error


def walk(
    ranks: np.ndarray, offsets: Sequence[int] | np.ndarray, tree: Tree, top_k: int = TOP_K
) -> np.ndarray:
    """Where greedy decoding with `tree` would start its steps in true answers.

    From an answer's first token, a step commits the root and the longest path of the tree that the rank
    vector starts with, and the next step begins after what was committed.

    Args:
        ranks: [N, K], as in `Calibration.from_ranks`.
        offsets: [S + 1].
        tree: at most K deep.
        top_k: R.

    Returns:
        [N] bool.
    """
    ranks = np.asarray(ranks, dtype=np.int64)
    tree.check(ranks.shape[1], top_k)
    committed = np.ones(len(ranks), dtype=np.int64)
    alive = np.ones(len(ranks), dtype=bool)
    code = np.zeros(len(ranks), dtype=np.int64)
    for depth in range(1, tree.depth + 1):
        rank = ranks[:, depth - 1]
        code = code * top_k + rank
        known = [
            sum(r * top_k**p for p, r in enumerate(reversed(path)))
            for path in tree.paths
            if len(path) == depth
        ]
        alive &= (rank < top_k) & np.isin(code, known)
        committed += alive
    jump, starts = committed.tolist(), np.zeros(len(ranks), dtype=bool)
    for start, stop in itertools.pairwise(offsets):
        place = int(start)
        while place < stop:
            starts[place] = True
            place += jump[place]
    return starts


def simulate(ranks: np.ndarray, offsets: Sequence[int] | np.ndarray, tree: Tree, top_k: int = TOP_K) -> float:
    """The acceptance length of `tree` on true answers: tokens over the steps of `walk`, >= 1.

    1.0 where there are no tokens. Arguments as for `walk`.
    """
    steps = int(walk(ranks, offsets, tree, top_k).sum())
    return len(ranks) / steps if steps else 1.0


@torch.inference_mode()
def rank_vectors(
    heads: DraftHeads, base: Any, source: Any, segment_ids: Iterable[int], top_k: int = TOP_K
) -> tuple[np.ndarray, np.ndarray]:
    """Rank vectors of whole answers, sequential heads being shown the true path.

    Ties go as `torch.topk` orders them, which is also what decoding drafts by.

    Args:
        heads: K heads, of the dtype they will decode in (autocast is respected).
        base: a `medusa.base.Base`.
        source: `StatesCache` or `OnlineStates`.
        segment_ids: the answers to read.
        top_k: R.

    Returns:
        ranks [N, K] int16 in 0..R and offsets [S + 1] int64.

    Raises:
        MedusaError: a hidden state is not finite.
    """
    num_heads, device = heads.config.num_heads, next(heads.parameters()).device
    dtype = next(heads.parameters()).dtype
    embed = base.model.get_input_embeddings()
    lm_head = base.model.get_output_embeddings().weight
    guesses = min(top_k, heads.config.draft_size)
    parts, lengths = [], [0]
    for ids in _groups(segment_ids, source.lengths, _CHUNK_TOKENS):
        states = source.get(ids)
        offsets = states.offsets.long()
        lengths += offsets.diff().tolist()
        if not bool(torch.isfinite(states.hidden).all()):
            raise MedusaError("the hidden states hold NaN or infinity; make the cache again")
        reach = reach_of(offsets)
        targets = shifted_tokens(states.tokens, reach, num_heads)
        ranks = torch.full((len(states.tokens), num_heads), top_k, dtype=torch.int16)
        embedded = embed(states.tokens.to(embed.weight.device)).to(device, dtype)
        hidden = states.hidden.to(device, dtype)
        for k in range(1, num_heads + 1):
            rows = (reach >= k).nonzero().flatten()
            if not len(rows):
                continue
            path = embedded[(rows[:, None] + torch.arange(k)).to(device)]
            features = heads.features(k, hidden[rows.to(device)], path)
            features = features.to(heads.draft_weight(k, lm_head).dtype)
            logits = heads.draft_logits(k, features, lm_head)
            tokens = heads.to_tokens(logits.topk(guesses, dim=-1).indices).cpu()
            hit = tokens == targets[k - 1, rows, None]
            ranks[rows, k - 1] = torch.where(hit.any(-1), hit.int().argmax(-1), top_k).to(torch.int16)
        parts.append(ranks.numpy())
    stacked = np.concatenate(parts) if parts else np.zeros((0, num_heads), dtype=np.int16)
    return stacked, np.cumsum(lengths)


def calibrate(
    heads: DraftHeads, base: Any, source: Any, segment_ids: Iterable[int], width: int = WALKED_WIDTH
) -> Calibration:
    """`Calibration.from_walk` of `rank_vectors`: arguments as there; best on greedy answers."""
    return Calibration.from_walk(*rank_vectors(heads, base, source, segment_ids), width)


def _groups(segment_ids: Iterable[int], lengths: Any, most: int) -> Iterable[list[int]]:
    """Runs of segments of at most `most` tokens together (a longer segment stands alone)."""
    group: list[int] = []
    held = 0
    for segment in segment_ids:
        length = int(lengths[segment])
        if group and held + length > most:
            yield group
            group, held = [], 0
        group.append(int(segment))
        held += length
    if group:
        yield group
