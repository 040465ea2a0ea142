"""Checks of `make vllm` on single adapters: one that calls tools, a swapped one, and those that vLLM cannot load."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2
import pytest
import torch
from openai import APIStatusError, InternalServerError
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy

from spard.config import Lora, Recipe
from spard.data.chat import encode_all
from spard.data.rows import example
from spard.digests import MANIFEST, write_manifest
from spard.models.adapters import save_adapter
from spard.models.base import load_base
from spard.models.lora import CONFIG, trainable_model
from tests.app.inference import conftest
from tests.app.inference.conftest import RECIPE, Lab, make_adapter
from tests.spard.parts import TEMPLATE

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
QUESTION = "What is 1 plus 2?"
ARGUMENTS = '{"a": 1, "b": 2}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
_LIST = "{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>\n{% endif %}"
_CONTENT = "{{ m['content'] }}"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
TEMPLATE_WITH_TOOLS = _LIST + TEMPLATE.replace(_CONTENT, _CONTENT + _CALLS)
_STEPS = 600  # of training, at most, until an adapter has learned two answers
_FOUND_S = 60.0  # in which a swap has to be found
_LONG = "Tell me, in one short word, what you think of the sea. " * 4  # several blocks of vLLM's cache of prompts


def turns(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the question, and what follows it."""
    return [{"role": "user", "content": QUESTION}, *more]


def turns_after_call() -> list[dict[str, Any]]:
    """Return the conversation in which the tool has answered."""
    return turns(CALLING, {"role": "tool", "tool_call_id": "call_1", "content": "3"})


def teach(model: Path, folder: Path, seed: int, facts: dict[str, Any] | None = None, recipe: Recipe = RECIPE) -> Path:
    """Train an adapter until it calls the tool, and then says what the tool has answered."""
    base = load_base(model, device="cpu")
    tuned = trainable_model(base.model, recipe)
    words = turns(CALLING), [*turns_after_call(), {"role": "assistant", "content": "It is 3."}]
    examples = [example({"messages": each, "tools": [TOOL]}, 1) for each in words]
    rows = encode_all(base.tokenizer, examples, 512)
    optimizer = torch.optim.AdamW([each for each in tuned.parameters() if each.requires_grad], lr=3e-3)
    for _ in range(_STEPS):
        lost = [_loss(tuned, row) for row in rows]
        if max(float(each) for each, _ in lost) < 0.1:  # each token is by far the likeliest
            break
        optimizer.zero_grad()
        torch.stack([mean for _, mean in lost]).mean().backward()
        optimizer.step()
    else:
        raise AssertionError("the adapter did not learn to call a tool")
    save_adapter(tuned.eval(), base, "tiny", folder, facts)
    return folder


def _loss(model: Any, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest and the mean loss of a row's learned tokens, in nats."""
    ids, labels = torch.tensor([row.ids]), torch.tensor(row.labels)
    each = cross_entropy(model(input_ids=ids).logits[0, :-1], labels[1:], reduction="none", ignore_index=-100)
    learned = each[labels[1:] != -100]
    return learned.max().detach(), learned.mean()


def tools(lab: Lab) -> str:
    """Ask a model that calls tools: whole, as a stream, and with the tool's answer."""
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    with _making(lab, teach, Recipe(lora=Lora(rank=16, alpha=32.0, target_modules=linear))):
        model = lab.release(4)
    create: Any = lab.client().chat.completions.create
    fields: Any = {"model": model, "tools": [TOOL], "temperature": 0, "max_tokens": 100}
    whole = create(messages=turns(), **fields).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "add"), whole
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}, call
    chunks = [each.choices[0] for each in create(messages=turns(), stream=True, **fields) if each.choices]
    parts = [part for each in chunks for part in each.delta.tool_calls or ()]
    assert "".join(each.function.arguments or "" for each in parts) == call.function.arguments, parts
    assert (parts[0].function.name, chunks[-1].finish_reason) == ("add", "tool_calls"), chunks
    text = create(messages=turns_after_call(), **fields).choices[0].message.content
    assert text == "It is 3.", text
    return "a call, the same call as a stream, and the answer after the tool's"


@contextmanager
def _making(lab: Lab, make: Any, recipe: Recipe) -> Iterator[None]:
    """Have the lab publish what `make` makes by a recipe."""
    with patch.object(conftest, "make_adapter", make), patch.object(lab, "recipe", recipe):
        yield


def unloadable(lab: Lab) -> str:
    """See that what vLLM does not load is refused with a reason, and that vLLM itself would have refused it."""
    kinds: dict[str, Any] = {
        "DoRA": {"use_dora": True},
        "whole modules": {"modules_to_save": ["lm_head"]},
        "rank": {"r": 32},
    }
    for seed, (name, fields) in enumerate(kinds.items(), 10):
        folder = lab.home / f"plain-{seed}"
        base = load_base(lab.model, device="cpu")
        peft = get_peft_model(base.model, LoraConfig(**{"r": 4, "target_modules": ["q_proj"]} | fields))
        peft.save_pretrained(str(folder))
        answer = httpx2.post(_url(lab, "load"), json={"lora_name": name, "lora_path": str(folder)}, timeout=120)
        assert answer.status_code != 200, f"vLLM loads {name}, which we refuse"
        # Our engine computes with the adapter before the server's largest rank is asked for, so that one is whole.
        recipe = Recipe(lora=Lora(rank=fields["r"])) if "r" in fields else lab.recipe
        model = _release_like(lab, seed, json.loads((folder / CONFIG).read_text()), fields, recipe)
        with pytest.raises(APIStatusError) as refused:
            ask_bytes(lab, model, "Hello")
        assert refused.value.code == "model_not_servable", (name, refused.value.code, refused.value.message)
    return f"{', '.join(kinds)}: refused by us with the reason, and by vLLM"


def _release_like(lab: Lab, seed: int, config: dict[str, Any], fields: dict[str, Any], recipe: Recipe) -> str:
    """Release an adapter of a recipe whose configuration has these fields of another one."""

    def make(model: Path, folder: Path, *rest: Any) -> Path:
        made = make_adapter(model, folder, *rest)
        own = json.loads((made / CONFIG).read_text())
        (made / CONFIG).write_text(json.dumps(own | {name: config[name] for name in fields}))
        facts = json.loads((made / MANIFEST).read_text())
        write_manifest(made, {name: value for name, value in facts.items() if name != "files"})
        return made

    with _making(lab, make, recipe):
        return lab.release(seed)


def _url(lab: Lab, what: str) -> str:
    return f"{lab.settings.serving_url}/{what}_lora_adapter"


def ask_bytes(lab: Lab, model: str, text: str, project: str = "org-customer") -> list[list[int]]:
    """Return the tokens of a greedy reply as bytes: a random model writes no valid UTF-8."""
    messages: Any = [{"role": "user", "content": text}]
    create: Any = lab.client(project).chat.completions.create
    found = create(model=model, messages=messages, temperature=0, max_tokens=24, logprobs=True)
    return [each.bytes for each in found.choices[0].logprobs.content]


def planted_swap(lab: Lab) -> str:
    """Have the server answer for one tenant with another's weights, and see how long that stays unseen.

    The name and the path stay the same, as in a swap inside the server. Its cache of prompts has the keys and values of
    the other's weights when the adapter is loaded again: the prompt is asked for the first time while it is swapped.
    """
    owners = {each: lab.release(20 + i, each) for i, each in enumerate(("org-one", "org-two"))}
    for name, model in owners.items():
        ask_bytes(lab, model, "Hello", name)
    vllm: Any = lab.app.state.serving.engines
    with patch.object(lab.app.state.serving, "engines", vllm._prover):
        right = ask_bytes(lab, owners["org-one"], _LONG, "org-one")
    names = list(vllm.adapters.residents)[-2:]
    root = Path(str(lab.settings.serving_adapters_dir))
    ours, theirs = (next(root.glob(f"{name.removeprefix('spard-')}*")) for name in names)
    before = _ask_server(lab, names[0])
    _plant(lab, names[0], ours, theirs)
    assert _ask_server(lab, names[0]) != before, "nothing was swapped"
    began, replies, answered_wrongly = time.monotonic(), 0, 0
    while names[0] in vllm.adapters.residents:
        with _unless_refused():
            answered_wrongly += ask_bytes(lab, owners["org-one"], _LONG, "org-one") != right
            replies += 1
        assert time.monotonic() - began < _FOUND_S, f"the swap was not found within {_FOUND_S:g} s"
        time.sleep(0.2)
    found_s = time.monotonic() - began
    after = [ask_bytes(lab, owners["org-one"], _LONG, "org-one") == right for _ in range(3)]
    assert all(after), f"after the next proof {after.count(False)} of 3 replies were wrong"
    return f"found after {found_s:.0f} s, and {answered_wrongly} of {replies} replies were wrong until then, 0 after it"


def _ask_server(lab: Lab, name: str) -> Any:
    """Return what the server itself answers under a name, to a prompt that its cache does not keep."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    answer = httpx2.post(f"{lab.settings.serving_url}/completions", json=body, timeout=300).raise_for_status()
    return answer.json()["choices"][0]["logprobs"]["tokens"]


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Let a reply be ended, because the swap is found while it is written."""
    try:
        yield
    except InternalServerError as error:
        if error.code != "model_not_proved":
            raise


def _plant(lab: Lab, name: str, ours: Path, theirs: Path) -> None:
    """Load another adapter's files under one's name and path, and put the right files back."""
    aside = ours.with_name("aside")
    ours.rename(aside)
    shutil.copytree(theirs, ours)
    httpx2.post(_url(lab, "unload"), json={"lora_name": name}, timeout=120).raise_for_status()
    body = {"lora_name": name, "lora_path": str(ours)}
    httpx2.post(_url(lab, "load"), json=body, timeout=120).raise_for_status()
    shutil.rmtree(ours)
    aside.rename(ours)
