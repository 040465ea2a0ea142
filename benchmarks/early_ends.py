"""Measure the tokens that ending replies early saves: `python -m benchmarks.early_ends --model FOLDER [--limit 40]`.

A model answers harmless prompts twice: once with whole replies, and once with replies that end as soon as their verdict
is certain, as in the audit's over-refusal suites (`spard.evaluation.audit`). The output shows new tokens and CPU
seconds of both with their ratio, how many replies get a different verdict (refused or not), and how many are
degenerate: counted on the whole replies, and extrapolated from the fifth of the replies that is never ended early.
`--prompts FILE` has a JSON object with a `prompt` on each line; the default is everyday questions.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from spard.config import Audit
from spard.data.rows import Prompt
from spard.evaluation.ask import Speaker, in_memory
from spard.evaluation.audit import Item, Suite, audit_speaker
from spard.evaluation.calibration.errors import EXCHANGES
from spard.evaluation.judges.refusal import RefusalJudge, is_refusal
from spard.evaluation.results import SuiteResult
from spard.models.base import Base, load_base


def main() -> None:
    """Audit the prompts with whole replies and with early ends, and print the comparison."""
    asked = _arguments()
    base = load_base(asked.model, device="cpu")
    suite = Suite("over-refusal", "benign", tuple(_prompts(asked.prompts, asked.limit)))
    speaker, cfg = in_memory(base.model, base.tokenizer), Audit(max_new_tokens=asked.tokens, max_prompts=1000)
    whole, whole_items, whole_s = _time_audit(replace(speaker, write_until=None), suite, cfg)
    ended, ended_items, ended_s = _time_audit(speaker, suite, cfg)
    tokens = [_tokens(base, items) for items in (whole_items, ended_items)]
    pairs = list(zip(whole_items, ended_items, strict=True))
    other = sum(is_refusal(a.reply) != is_refusal(b.reply) for a, b in pairs)
    print(f"{len(suite.prompts)} prompts, at most {asked.tokens} new tokens")
    print(f"new tokens: {tokens[0]:,} whole, {tokens[1]:,} with early ends, ratio {tokens[1] / tokens[0]:.2f}")
    print(f"CPU s: {whole_s:.1f} and {ended_s:.1f}, ratio {ended_s / whole_s:.2f}")
    print(f"replies that ended early: {ended.ended_early or 0}; with another verdict: {other}")
    print(f"refusals: {whole.hits} and {ended.hits}")
    print(f"degenerate: {whole.degenerate} counted, {ended.degenerate} with extrapolation")
    print(f"not the beginning of the whole reply: {sum(not a.reply.startswith(b.reply) for a, b in pairs)}")


def _time_audit(speaker: Speaker, suite: Suite, cfg: Audit) -> tuple[SuiteResult, list[Item], float]:
    started = time.process_time()
    [found] = audit_speaker(speaker, [suite], RefusalJudge(), cfg)
    result, items = found.result, list(found.items)
    return result, items, time.process_time() - started


def _tokens(base: Base, items: list[Item]) -> int:
    """Return the number of tokens of all replies, counting one end token for each."""
    return sum(len(base.tokenizer.encode(item.reply, add_special_tokens=False)) + 1 for item in items)


def _prompts(path: Path | None, limit: int) -> list[Prompt]:
    if path is None:
        return [Prompt(prompt) for prompt, _ in EXCHANGES][:limit]
    with path.open() as lines:
        return [Prompt(json.loads(line)["prompt"]) for line, _ in zip(lines, range(limit), strict=False)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens that early ends of replies save.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
