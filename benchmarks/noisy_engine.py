"""Run an engine whose compilation of a schema with the title `spin` never ends, for `benchmarks.noisy_neighbor`.

Run `python -m benchmarks.noisy_engine ORDER PARENT`. The title simulates schemas that are expensive to compile; real
ones are kept out of this repository.
"""

from __future__ import annotations

from typing import Any

from worker.engine import grammar
from worker.engine.__main__ import main


def _spin_if_asked(vocabulary: Any, schema: str) -> Any:
    while '"spin"' in schema:
        pass
    return _compile(vocabulary, schema)


if __name__ == "__main__":
    _compile = grammar.compile_schema
    grammar.compile_schema = _spin_if_asked
    main()
