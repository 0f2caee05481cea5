"""The static candidate tree: from paths to the index tensors that a step uses.

A *path* is a tuple of ranks: `(0, 2)` is head 1's best token followed by head 2's third best. Each path is a node;
the root (the base's own next token) is node 0 and is not listed. Nodes are numbered level by level, so a node's
parent always has a smaller number, and so the nodes of one level lie next to each other, which is how sequential
heads draft them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from medusa.errors import MedusaError
from medusa.files import read_json, write_json

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeLevel:
    """One depth d of a tree, all int64. n: its nodes; m: the nodes above them that have children.

    Attributes:
        drafters: [m]; the nodes of depth d - 1 that head d guesses after.
        paths: [m, d]; each drafter's path from the root, as node numbers.
        slots: [n]; which drafter (0..m-1) is a node's parent.
        ranks: [n]; which of the drafter's guesses a node is.
        top_k: guesses needed of each drafter, a plain int so that no step waits for the device to say.
    """

    drafters: torch.Tensor
    paths: torch.Tensor
    slots: torch.Tensor
    ranks: torch.Tensor
    top_k: int


@dataclass(frozen=True)
class TreeBuffers:
    """A tree as tensors, all int64 unless said otherwise. W: width (root included), D: depth, L: leaves.

    Attributes:
        mask: [W, W] bool; `mask[i, j]` says that node i sees node j, its ancestor or itself.
        depths: [W]; the root's is 0. A node's position is the sequence's length plus its depth.
        parents: [W]; the root's is itself.
        ranks: [W]; which of the parent's guesses a node is; the root's is 0.
        ancestors: [W, D + 1]; node i's path from the root, padded with i itself past its own depth.
        levels: one entry for each depth 1..D.
    """

    mask: torch.Tensor
    depths: torch.Tensor
    parents: torch.Tensor
    ranks: torch.Tensor
    ancestors: torch.Tensor
    levels: tuple[TreeLevel, ...]


class Tree:
    """A validated candidate tree in canonical order: by depth, then by ranks.

    Args:
        paths: the nodes below the root. Order does not matter; the empty tree is plain decoding.

    Raises:
        MedusaError: a path is empty or repeated, has a negative rank, or lacks its prefix.
    """

    def __init__(self, paths: Iterable[Sequence[int]] = ()):
        listed = [tuple(path) for path in paths]
        for path in listed:
            if not path:
                raise MedusaError("tree: an empty path; the root is implied and must not be listed")
            if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
                raise MedusaError(f"tree: path {list(path)} must hold ranks, integers from 0")
        known = set(listed)
        for path in listed:
            if len(path) > 1 and path[:-1] not in known:
                raise MedusaError(f"tree: node {list(path)} is an orphan; add its parent {list(path[:-1])}")
        if len(known) != len(listed):
            twice = next(path for path in listed if listed.count(path) > 1)
            raise MedusaError(f"tree: path {list(twice)} is listed twice; remove one")
        self.paths: tuple[Path, ...] = tuple(sorted(known, key=lambda path: (len(path), path)))

    @property
    def width(self) -> int:
        """Tokens verified in one step: the root and every listed node."""
        return 1 + len(self.paths)

    @property
    def depth(self) -> int:
        """Heads used: the length of the longest path. A step commits at most depth + 1 tokens."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def top_k(self) -> int:
        """How many guesses of a head are needed: the largest rank plus one."""
        return 1 + max((max(path) for path in self.paths), default=-1)

    @classmethod
    def chain(cls, depth: int) -> Tree:
        """Each head's best token only."""
        return cls([(0,) * length for length in range(1, depth + 1)])

    def check(self, num_heads: int, vocabulary: int) -> None:
        """Says whether heads can fill this tree.

        Args:
            num_heads: K, how deep the heads can guess.
            vocabulary: how many distinct tokens a head can guess.

        Raises:
            MedusaError: the tree is deeper than there are heads, or asks for more guesses than there are tokens.
        """
        if self.depth > num_heads:
            deepest = list(self.paths[-1])
            raise MedusaError(
                f"tree: node {deepest} needs {self.depth} heads and there are {num_heads}; "
                f"choose a tree of depth <= {num_heads} or train more heads"
            )
        if self.top_k > vocabulary:
            raise MedusaError(
                f"tree: rank {self.top_k - 1} asked of heads that know only {vocabulary} tokens"
            )

    @cached_property
    def _index(self) -> dict[Path, int]:
        return {path: number for number, path in enumerate(((), *self.paths))}

    def buffers(self, device: torch.device | str = "cpu") -> TreeBuffers:
        """The tree as tensors on `device`; see `TreeBuffers` for shapes."""
        nodes = ((), *self.paths)
        ancestors = [[self._index[path[:depth]] for depth in range(len(path) + 1)] for path in nodes]
        mask = torch.zeros(self.width, self.width, dtype=torch.bool)
        for node, line in enumerate(ancestors):
            mask[node, line] = True
        padded = [line + [line[-1]] * (self.depth + 1 - len(line)) for line in ancestors]
        parents = [line[-2] if len(line) > 1 else 0 for line in ancestors]
        ranks = [path[-1] if path else 0 for path in nodes]

        def index(values: list) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        def level(depth: int) -> TreeLevel:
            members = [number for number, path in enumerate(nodes) if len(path) == depth]
            drafters = sorted({parents[number] for number in members})
            return TreeLevel(
                drafters=index(drafters),
                paths=index([ancestors[number] for number in drafters]),
                slots=index([drafters.index(parents[number]) for number in members]),
                ranks=index([ranks[number] for number in members]),
                top_k=1 + max(ranks[number] for number in members),
            )

        return TreeBuffers(
            mask=mask.to(device),
            depths=index([len(path) for path in nodes]),
            parents=index(parents),
            ranks=index(ranks),
            ancestors=index(padded),
            levels=tuple(level(depth) for depth in range(1, self.depth + 1)),
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> Tree:
        """Reads `{"paths": [[0], [0, 0], ...]}`, or the bare list of paths that Medusa's choices are published as.

        Raises:
            MedusaError: the file cannot be read, or does not hold a tree.
        """
        value: Any = read_json(path)
        paths = value.get("paths") if isinstance(value, dict) else value
        if not isinstance(paths, list) or not all(isinstance(item, list) for item in paths):
            raise MedusaError(
                f'{path}: a tree is a list of paths such as [[0], [0, 0]], or {{"paths": [...]}}'
            )
        try:
            return cls(paths)
        except MedusaError as error:
            raise MedusaError(f"{path}: {error}") from error

    def to_json(self, path: str | os.PathLike) -> None:
        """Writes `{"paths": [...]}`, atomically."""
        write_json(path, {"paths": [list(item) for item in self.paths]})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"Tree(width={self.width}, depth={self.depth})"
