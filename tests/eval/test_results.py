from pathlib import Path

import eval.results


def test_the_kept_schema_is_the_formats_own():
    kept = Path(eval.results.__file__).with_name("schema.json").read_text()
    assert kept == eval.results.schema(), "write it again: python -m eval schema > eval/schema.json"
