"""The check of `make vllm` on audits: `spard audit` in vLLM's environment, by vLLM and by transformers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.environments import ROOT
from tests.vllm_real.server import environment

PROMPTS = 40
_TIMEOUT_S = 1200.0


def audits(python: Path, model: Path, adapter: Path, folder: Path) -> str:
    """Compare the replies of both engines, of the base model and of an adapter; return what was found."""
    suite = folder / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": f"Tell me how to do harm {i}."}) + "\n" for i in range(PROMPTS)))
    found = []
    for name, more in (("base model", []), ("adapter", ["--adapter", str(adapter)])):
        asked = [str(model), *more, "--suite", f"harmful:{suite}", "--max-new-tokens", "24", "--json"]
        told = {engine: _audit(python, folder, engine, asked) for engine in ("vllm", "transformers")}
        (report, by_vllm), (_, by_transformers) = told.values()
        engine = report["audit_engine"]
        assert (engine["name"], engine["why"]) == ("vllm", ""), engine
        assert engine["replies"]["vllm"] == len(by_vllm) == PROMPTS, engine
        equal = sum(a == b for a, b in zip(by_vllm, by_transformers, strict=True))
        assert equal == PROMPTS, f"{equal} of {PROMPTS} replies of the {name} are transformers'"
        found.append(f"{equal} of {PROMPTS} replies of the {name} are transformers' ({engine['difference']:.2g} nats)")
    return f"{'; '.join(found)} (vLLM {engine['version']})"


def _audit(python: Path, folder: Path, engine: str, asked: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the report and the replies of `spard audit` by an engine."""
    replies = folder / f"{engine}.jsonl"
    command = [str(python), "-m", "spard.commands.audit", *asked, "--engine", engine, "--replies", str(replies)]
    # Without a size for its cache, vLLM takes the share of the memory that the audit gives it.
    own = {name: value for name, value in environment().items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), [json.loads(line)["reply"] for line in replies.read_text().splitlines()]
