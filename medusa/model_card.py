"""The README.md of a checkpoint: the Hub's metadata and what one must know before using it."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

from medusa.calibration import Calibration
from medusa.heads import HeadsConfig
from medusa.tree import Tree


def model_card(
    heads: HeadsConfig,
    tree: Tree,
    calibration: Calibration | None,
    *,
    base_name: str,
    base_model: str | None = None,
    license: str | None = None,
    language: str | None = None,
    figures: dict[str, Any] | None = None,
) -> str:
    """Markdown with a YAML header.

    Args:
        heads, tree, calibration: what the checkpoint holds.
        base_name: the base as this kit names it.
        base_model: its id on the Hub; by default base_name.
        license: an SPDX id as the Hub writes it.
        language: ISO 639-1.
        figures: name -> value rows for the results table.
    """
    header = ModelCardData(
        license=license,
        language=language,
        base_model=base_model or base_name,
        library_name="medusa-kit",
        pipeline_tag="text-generation",
        tags=["medusa", "speculative-decoding", heads.kind, "shopping"],
    ).to_yaml()
    size = (
        f"{heads.draft_vocab_size:,} most frequent answer tokens"
        if heads.draft_vocab_size
        else "whole vocabulary"
    )
    lm_head = "the base's own, frozen" if heads.lm_head == "shared" else "one trained matrix for each head"
    lines = [
        f"# {heads.kind.capitalize()} heads for {base_model or base_name}",
        "",
        f"{heads.num_heads} decoding heads that guess the next tokens of {base_model or base_name}; the base "
        "verifies every guess, so its output does not change. They are of no use with any other base.",
        "",
        f"- kind: {heads.kind}, {heads.num_layers} layer(s) a head",
        f"- LM head: {lm_head}",
        f"- draft vocabulary: {size}",
        f"- tree: {tree.width} nodes with the root, {tree.depth} deep",
        "",
    ]
    if calibration is not None:
        lines += [
            f"Guesses on held-out answers, true prefix given ({calibration.positions:,} positions, expected "
            f"acceptance length {calibration.expected(tree):.2f}):",
            "",
            "| | " + " | ".join(f"head {k}" for k in range(1, heads.num_heads + 1)) + " |",
            "|---" * (heads.num_heads + 1) + "|",
        ]
        for top in (1, 2, 3, 5, 10):
            if top <= calibration.top_k:
                row = " | ".join(f"{share:.3f}" for share in calibration.accuracy(top))
                lines.append(f"| top-{top} | {row} |")
        lines.append("")
    if figures:
        lines += (
            ["| measured | |", "|---|---|"]
            + [f"| {name} | {value} |" for name, value in figures.items()]
            + [""]
        )
    lines += [
        "## Use",
        "",
        "```",
        "medusa chat --checkpoint THIS_FOLDER",
        "```",
        "",
        "`provenance.json` says what the heads were trained on, by which command, commit and versions.",
        "",
    ]
    return f"---\n{header}\n---\n\n" + "\n".join(lines)
