"""Measures a heads checkpoint: speedup, acceptance, losslessness; and makes the report.

`python -m eval run` measures and writes `results.json`; `python -m eval report` draws a report from it again;
`python -m eval table` puts several runs side by side. Everything in a report comes from `results.json` alone.
"""
