"""Medusa Kit: Medusa decoding heads, from training to verified tree decoding."""

__version__ = "0.1.0"
