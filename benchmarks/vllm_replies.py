"""The arm of `benchmarks.audits` that answers with vLLM, in vLLM's own environment.

`replies` runs here and talks to a child, which is this file run by another Python that has vLLM. The child loads the
model once; each line that it gets, a JSON object with token ids, is answered by a line with texts and CPU seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ANSWER = "replies: "  # begins a line of the child's; vLLM prints others
CACHE_GB = 2

Replies = Callable[[Sequence[Sequence[int]], Sequence[int], int], tuple[list[str], float]]


@contextmanager
def replies(python: Path, model: Path, threads: int) -> Iterator[Replies]:
    """Yield a function from rows of token ids, end tokens and a limit of tokens to (texts, CPU seconds).

    python   the interpreter of an environment with vLLM, as `make vllm` installs it
    threads  that vLLM computes with
    """
    known = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }  # empty: no CPU either
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    command = [str(python), "-P", __file__, str(model)]  # -P: modules of benchmarks/ have names of the library
    with subprocess.Popen(command, env=known | own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin
        assert child.stdout
        asked, told = child.stdin, child.stdout

        def answer(rows: Sequence[Sequence[int]], ends: Sequence[int], tokens: int) -> tuple[list[str], float]:
            asked.write(json.dumps({"rows": [[*row] for row in rows], "ends": [*ends], "tokens": tokens}) + "\n")
            asked.flush()
            for line in told:
                if line.startswith(ANSWER):
                    found = json.loads(line[len(ANSWER) :])
                    return found["texts"], found["cpu_s"]
            raise SystemExit("vLLM ended without replies; its messages are above")

        try:
            yield answer
        finally:
            asked.close()


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that vLLM has started."""
    import psutil

    own = psutil.Process()
    times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _serve(model: str) -> None:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model, dtype="float32", enforce_eager=True, max_model_len=2048, enable_prefix_caching=True)
    for line in sys.stdin:
        asked = json.loads(line)
        limits = SamplingParams(temperature=0, max_tokens=asked["tokens"], stop_token_ids=asked["ends"])
        engine.reset_prefix_cache()
        begun = _cpu_seconds()
        found = engine.generate([{"prompt_token_ids": row} for row in asked["rows"]], limits, use_tqdm=False)
        cpu_s = _cpu_seconds() - begun
        texts = [each.outputs[0].text.strip() for each in found]
        sys.stdout.write(f"\n{ANSWER}{json.dumps({'texts': texts, 'cpu_s': cpu_s})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
