"""Heads in other programs' formats: one module for each."""
