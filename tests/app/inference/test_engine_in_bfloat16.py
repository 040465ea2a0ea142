"""An engine in bfloat16, on a CPU by `SPARD_CPU_DTYPE` and on a GPU (`make gpu`): the official client asks it.

Its words may differ from a CPU's in float32 where two are as likely: what it says is compared by how likely such a CPU
finds it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from peft import PeftModel
from torch.nn.functional import log_softmax
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spard.data.chat import render_question
from spard.models.base import load_base
from tests.app.inference.conftest import Lab, serve_lab
from tests.spard.parts import byte_tokenizer

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = [{"cpu_dtype": "bfloat16"}, pytest.param({"serving_device": "cuda"}, marks=ON_GPU)]
# Nats a token: bfloat16 has three digits, and logits here lie within some units. On a CPU the adapters' products are
# rounded at other places: one of 24 tokens was 0.16 away.
NEAR = {"cuda": 0.1, "cpu": 0.4}
QUESTIONS = ["What is two and two?", "Hello there", "x", "Say something that nobody has said before"]
TOKENS = 24


@pytest.fixture(scope="module", params=PLACES, ids=["cpu", "gpu"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    with serve_lab(tmp_path_factory.mktemp("in_bfloat16"), tiny_model, **request.param) as made:
        yield made


@pytest.fixture(scope="module")
def models(lab: Lab) -> list[str]:
    """Return the names of the base model and of three adapters that say other things."""
    return ["tiny", *(lab.release(seed) for seed in (1, 2, 3))]


def test_words_are_as_likely_as_a_cpu_finds_them(lab: Lab, models: list[str]) -> None:
    client = lab.client()
    said = {(name, question): greedy_reply(client, name, question) for name in models for question in QUESTIONS}
    compare(lab, said)
    texts = {name: [reply.message.content for (of, _), reply in said.items() if of == name] for name in models}
    assert len({tuple(each) for each in texts.values()}) == len(models), "the adapters say what the base model says"


def test_streams_of_several_adapters_are_written_at_once(lab: Lab, models: list[str]) -> None:
    asks = [(name, question) for question in QUESTIONS for name in models]
    with ThreadPoolExecutor(len(asks)) as pool:
        texts = list(pool.map(lambda ask: streamed_reply(lab.client(), *ask), asks))
        said = dict(zip(asks, pool.map(lambda ask: greedy_reply(lab.client(), *ask), asks), strict=True))
    assert [bool(text) for text in texts] == [bool(reply.message.content) for reply in said.values()]
    compare(lab, said)


def test_an_engine_that_is_killed_is_started_anew(lab: Lab, models: list[str]) -> None:
    greedy_reply(lab.client(), models[1], QUESTIONS[0])
    (pid,) = lab.app.state.serving.engines.pids()
    os.kill(pid, signal.SIGKILL)
    reply = _until_answered(lab, models[1])
    compare(lab, {(models[1], QUESTIONS[0]): reply})
    assert lab.app.state.serving.engines.pids() != [pid]


def greedy_reply(client: OpenAI, model: str, question: str) -> Any:
    """Return the greedy reply, with the likelihood of each token."""
    messages: Any = [{"role": "user", "content": question}]
    found = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=TOKENS, logprobs=True
    )
    return found.choices[0]


def streamed_reply(client: OpenAI, model: str, question: str) -> str:
    """Return the greedy reply, received token by token."""
    messages: Any = [{"role": "user", "content": question}]
    parts = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=TOKENS, stream=True
    )
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


def compare(lab: Lab, said: dict[tuple[str, str], Any]) -> None:
    """Assert that each token was the likeliest, or nearly, and as likely as it was said to be."""
    assert any(reply.logprobs.content for reply in said.values())
    numbers = {
        bytes([byte]): byte_tokenizer().convert_tokens_to_ids(letter) for byte, letter in bytes_to_unicode().items()
    }
    near = NEAR[lab.settings.serving_device]
    for (name, question), reply in said.items():
        base = load_base(lab.model, device="cpu")
        model: Any = (
            base.model if name == "tiny" else PeftModel.from_pretrained(base.model, lab.adapter_folder(name)).eval()
        )
        before = render_question(base.tokenizer, question)
        ids = [numbers[bytes(each.bytes)] for each in reply.logprobs.content]
        if not ids:  # the end of the reply was the likeliest first token
            continue
        with torch.inference_mode():
            logits_TV = model(input_ids=torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].float()
        likely_TV = log_softmax(logits_TV, dim=-1)
        own_T = likely_TV.gather(1, torch.tensor(ids)[:, None])[:, 0]
        told_T = torch.tensor([each.logprob for each in reply.logprobs.content])
        assert (likely_TV.amax(1) - own_T).amax() < near, (name, question)
        assert (own_T - told_T).abs().amax() < near, (name, question)


def _until_answered(lab: Lab, model: str) -> Any:
    client = OpenAI(base_url=lab.url, api_key=lab.key(), max_retries=5)
    return greedy_reply(client, model, QUESTIONS[0])
