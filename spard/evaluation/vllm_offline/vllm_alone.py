"""One model with at most one adapter in vLLM: `python -P spard/evaluation/vllm_offline/vllm_alone.py`.

This file runs as a process of its own and imports nothing of this package. Each line of standard input is an order as
JSON. Its messages go as JSON lines to the original standard output; everything that vLLM prints goes to standard error.
Prompts and replies are token ids; others convert them to text.

order    fields                                         messages
load     settings (of `vllm.LLM`), adapter (or null)    loaded
first    rows, with_adapter, top                        first: for each row, pairs of token and log-probability
write    rows, with_adapter, max_new_tokens, ends       replies: token ids of some rows at a time, in order, until done
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Required, TypedDict

BATCH = 256  # replies of one message

Rows = Sequence[Sequence[int]]


def main() -> None:
    """Carry out the orders of standard input until its end; on an error, report it and exit with a failure."""
    said = os.dup(1)
    # vLLM and its libraries print to standard output, which would corrupt the messages.
    os.dup2(2, 1)
    orders = map(json.loads, sys.stdin)
    try:
        first = next(orders, None)
        if first is None:
            return
        engine = Engine(first["settings"], first["adapter"])
        _tell(said, {"kind": "loaded"})
        for order in orders:
            for message in engine.execute(order):
                _tell(said, message)
    except Exception as error:
        _tell(said, {"kind": "failed", "error": type(error).__name__})
        raise


class FirstOrder(TypedDict):
    """Asks for the `top` likeliest tokens after each row."""

    kind: Literal["first"]
    rows: Rows
    with_adapter: bool
    top: int


class WriteOrder(TypedDict):
    """Asks for a reply to each row, up to one of the end tokens or the limit."""

    kind: Literal["write"]
    rows: Rows
    with_adapter: bool
    max_new_tokens: int
    ends: list[int]


class Message(TypedDict, total=False):
    """An answer: the tokens of each row, or an error."""

    kind: Required[Literal["loaded", "first", "replies", "failed", "ended"]]
    rows: list[Any]
    error: str


class Engine:
    """vLLM with one model, and an adapter from a folder if there is one."""

    def __init__(self, settings: Mapping[str, object], adapter: str | None) -> None:
        vllm = importlib.import_module("vllm")
        self._params: Callable[..., Any] = vllm.SamplingParams
        request = importlib.import_module("vllm.lora.request").LoRARequest
        self._lora = request("adapter", 1, adapter) if adapter else None
        self._llm = vllm.LLM(**settings)

    def execute(self, order: FirstOrder | WriteOrder) -> Iterator[Message]:
        """Carry out an order and yield its messages."""
        rows, lora = order["rows"], self._lora if order["with_adapter"] else None
        if order["kind"] == "first":
            params = self._params(temperature=0.0, max_tokens=1, logprobs=order["top"], detokenize=False)
            found = [each.logprobs[0] for each in self._generate(rows, params, lora)]
            yield {"kind": "first", "rows": [[[int(i), one.logprob] for i, one in each.items()] for each in found]}
            return
        ends, most = order["ends"], order["max_new_tokens"]
        params = self._params(temperature=0.0, max_tokens=most, stop_token_ids=ends, detokenize=False)
        for start in range(0, len(rows), BATCH):
            found = self._generate(rows[start : start + BATCH], params, lora)
            yield {"kind": "replies", "rows": [list(each.token_ids) for each in found]}

    def _generate(self, rows: Rows, params: Any, lora: Any) -> list[Any]:
        asked = [{"prompt_token_ids": list(row)} for row in rows]
        found = self._llm.generate(asked, params, lora_request=lora, use_tqdm=False)
        if [list(each.prompt_token_ids) for each in found] != [list(row) for row in rows]:
            raise ValueError("other prompts were answered than were asked")
        return [each.outputs[0] for each in found]


def _tell(said: int, message: Message) -> None:
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(said, line) :]


if __name__ == "__main__":
    main()
