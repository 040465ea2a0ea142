"""Ask the probes of a vLLM server and of our own engine; an answer is the likeliest first tokens."""

from __future__ import annotations

import asyncio

from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from app.files.tokenizer import LightTokenizer
from app.inference.archives import NotServed
from app.inference.embedded import Embedded
from app.inference.engine_errors import engine_lost
from app.inference.released import Released
from app.inference.vllm_probe import KNOWN, Answers, Likely, first_tokens, probes
from app.inference.vllm_prompts import prompt_ids
from app.inference.vllm_writing import PLAIN, completion_tokens
from spard.data.rendering import Mode


def probe_rows(tokenizer: LightTokenizer, mode: Mode | None) -> list[list[int]]:
    """Return the probes as token ids."""
    return [prompt_ids(tokenizer, each, mode) for each in probes()]


async def expect(engine: Embedded, model: Released, stall_s: float) -> tuple[list[Likely], str]:
    """Return our own engine's answers to the probes, and the adapter's tensor digest, "" if it was loaded before."""
    found, digest = list[Likely](), ""
    for each in probes():
        stream, _, proof = await engine.start(model, "prover", {**each, "adapter": model.adapter})
        digest = proof["tensor_digest"] if proof else digest
        found.append(await first_tokens(stream, stall_s))
    return found, digest


async def ask(client: AsyncOpenAI, base: str, name: str, rows: list[list[int]], timeout_s: float) -> Answers:
    """Return a server's answers to each row, by its base model and by the model `name`, which may be the same.

    Raises `NotServed` if the server refuses a probe, and `engine_lost` if it does not answer within `timeout_s`.
    """
    names = [base] if name == base else [base, name]
    asked = [_likely(client, each, row) for each in names for row in rows]
    try:
        found = await asyncio.wait_for(asyncio.gather(*asked), timeout_s)
    except APIStatusError as error:
        raise NotServed(f"The server does not answer the probes: {error.message[:200]}") from None
    except (APIConnectionError, TimeoutError):
        raise engine_lost() from None
    return Answers(found[: len(rows)], found[-len(rows) :])


async def _likely(client: AsyncOpenAI, name: str, row: list[int]) -> Likely:
    """Return the likeliest first tokens after a prompt, end tokens included, with their log probabilities."""
    body = {**PLAIN, "ignore_eos": True, "skip_special_tokens": False, "return_tokens_as_token_ids": True}
    answer = await client.completions.create(
        model=name, prompt=row, max_tokens=1, temperature=0, logprobs=KNOWN, extra_body=body
    )
    tokens = completion_tokens(answer.choices[0].logprobs)
    return {each["token"]: each["logprob"] for each in tokens[0]["top_logprobs"]} if tokens else {}
