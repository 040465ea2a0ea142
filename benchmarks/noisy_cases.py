"""The cases of `benchmarks.noisy_neighbor`: the load that project A makes, and the request of B that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

import httpx2

from spard.config import Recipe
from spard.config.run_spec import to_mapping
from tests.app.inference.conftest import Lab

LOUD, QUIET = "org-loud", "org-quiet"
MESSAGES = [{"role": "user", "content": "What is two and two?"}]


@dataclass(frozen=True)
class Request:
    """The request that B repeats; `path` starts after /v1, and any status but `status` is an error."""

    method: str = "POST"
    path: str = "/chat/completions"
    body: Any = field(default_factory=lambda: {"model": "tiny", "messages": MESSAGES, "max_tokens": 4})
    status: int = 200


@dataclass(frozen=True)
class Case:
    """A load of project A, running while the context `load` is open, and the request of B to measure."""

    name: str
    load: Callable[[Lab], AbstractContextManager[None]]
    request: Request = Request()


@contextmanager
def repeat_in_threads(count: int, work: Callable[[Event], None]) -> Iterator[None]:
    """Repeat `work` in `count` threads until the block ends; `work` gets the event that is set then."""
    over = Event()

    def repeat() -> None:
        while not over.is_set():
            work(over)

    threads = [Thread(target=repeat, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    over.wait(1.0)  # let all threads start before B is measured
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def _chat(lab: Lab, over: Event, **more: Any) -> None:
    """Send a streaming chat request as A, and close it when the load is over."""
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, **more}
    headers = {"Authorization": f"Bearer {lab.key(LOUD)}"}
    with httpx2.stream("POST", f"{lab.url}/chat/completions", json=body, headers=headers, timeout=300) as answer:
        for _ in answer.iter_lines():
            if over.is_set():
                return


def _form(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@contextmanager
def _costly_schema(lab: Lab) -> Iterator[None]:
    schema = _form({"title": "spin", "type": "object"})
    with repeat_in_threads(2, lambda over: _chat(lab, over, response_format=schema, max_tokens=100)):
        yield


@contextmanager
def _endless_arrays(lab: Lab) -> Iterator[None]:
    schema = _form({"type": "array", "items": {"type": "integer"}, "minItems": 5000})
    with repeat_in_threads(1, lambda over: _chat(lab, over, response_format=schema, n=16, max_tokens=900)):
        yield


@contextmanager
def _first_fetch(lab: Lab) -> Iterator[None]:
    """Block the storage's downloads while A requests a model whose weights are all fine-tuned."""
    name = lab.release(1, LOUD, recipe=to_mapping(Recipe(lora=None)))
    storage, thawed = lab.app.state.storage, Event()
    download = storage.download_file

    def wait_for_thaw(*given: Any, **more: Any) -> Any:
        thawed.wait()
        return download(*given, **more)

    storage.download_file = wait_for_thaw
    try:
        with repeat_in_threads(2, lambda over: _ask_repeatedly(lab, name, over)):
            yield
            thawed.set()
    finally:
        thawed.set()
        storage.download_file = download


def _ask_repeatedly(lab: Lab, name: str, over: Event) -> None:
    headers = {"Authorization": f"Bearer {lab.key(LOUD)}"}
    body = {"model": name, "messages": MESSAGES, "max_tokens": 4}
    httpx2.post(f"{lab.url}/chat/completions", json=body, headers=headers, timeout=300)
    over.wait(0.5)


CASES: Sequence[Case] = (
    Case("a schema that is costly to compile", _costly_schema),
    Case("n=16 with endless arrays", _endless_arrays),
    Case("the first fetch of a large model from frozen storage", _first_fetch),
)
