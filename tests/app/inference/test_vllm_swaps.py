"""Servers that answer with one customer's adapter for another: no such reply leaves, whenever the swap happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from openai import APIError, InternalServerError, RateLimitError

from app.errors import TooManyRequests
from app.inference import vllm_server
from app.inference.vllm_server import Gate
from tests.app.inference.conftest import Lab
from tests.app.inference.vllm_stub import Vllm, serve_by_stub
from tests.faults.storm import is_soak
from tests.vllm_real.__main__ import traffic

ASK: Any = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0, "max_tokens": 12}
WAIT_S = 60.0


@pytest.fixture
def server(served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    with serve_by_stub(served_lab, tmp_path, monkeypatch, serving_canary_s=0.05) as state:
        yield state


def text(client: Any, model: str, **more: Any) -> str:
    return str(client.chat.completions.create(model=model, **ASK | more).choices[0].message.content)


def test_what_a_load_swaps_for_good_is_found_before_anybody_is_answered(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(61), served_lab.release(62)
    right = text(client, first)
    server.fault = "swaps"
    text(client, second)
    assert server.swapped  # the first answers with the second's weights from now on
    server.fault = None
    assert text(client, first) == right  # it was loaded and proved anew
    assert not server.swapped


def test_what_was_computed_with_swapped_weights_is_not_used_after_the_next_proof(
    served_lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(73), served_lab.release(74)
    with serve_by_stub(served_lab, tmp_path, monkeypatch) as server:  # it looks again at loads alone
        right, wrong = text(client, first), text(client, second)
        server.blocks.clear()  # so that the swapped adapter computes the prompt
        server.swapped[server.names[0]] = server.names[1]
        assert text(client, first) == wrong
        text(client, served_lab.release(75))
        assert text(client, first) == right
    assert [ask["model"] for ask in server.asks if ask.get("stream")].count(server.loads[0][0]) == 3


def test_projects_share_no_computed_prompts_and_probes_none(served_lab: Lab, server: Vllm) -> None:
    for project in ("org-customer", "org-other", "org-customer"):
        text(served_lab.client(project), "tiny")
    salts = [ask["cache_salt"] for ask in server.asks if ask.get("stream")]
    assert salts[0] == salts[2] != salts[1]
    of_probes = [ask["cache_salt"] for ask in server.asks if not ask.get("stream")]
    assert len({*of_probes, *salts}) == len(of_probes) + 2


def test_a_base_model_that_a_load_moves_is_answered_no_more(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(71), served_lab.release(72)
    text(client, first)
    text(client, "tiny")
    server.fault = "moves_base"
    for model in (second, "tiny", first):
        with pytest.raises(InternalServerError) as refused:
            text(client, model)
        assert refused.value.code == "model_not_proved"
    assert not {each for each in server.names if each not in (name for name, _ in server.loads[:1])}


def test_no_adapter_is_loaded_while_replies_are_written(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(63), served_lab.release(64)
    right = text(client, first)
    server.fault = "swaps_in_flight"
    chunks = iter(client.chat.completions.create(model=first, stream=True, **ASK))
    begun = [next(chunks)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(text, client, second)
        written = "".join(each.choices[0].delta.content or "" for each in [*begun, *chunks] if each.choices)
        assert other.result(WAIT_S)
    assert written == right
    assert [models for _, models in server.loads] == [[], []]


def test_what_is_swapped_while_it_serves_is_found_and_what_is_being_written_ends(served_lab: Lab, server: Vllm) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(65), served_lab.release(66)
    right = [text(client, each) for each in (first, second)]
    began, may_go_on = Event(), Event()

    def hold(model: str) -> None:
        if began.is_set() is False and model == server.names[0]:
            began.set()
            may_go_on.wait(WAIT_S)

    engine: Any = served_lab.app.state.serving.engines
    with ThreadPoolExecutor(1) as pool:
        server.before_token = hold
        reply = pool.submit(text, client, first)
        assert began.wait(WAIT_S)
        server.swapped[server.names[0]] = server.names[1]
        end = time.monotonic() + WAIT_S
        while any(each.name == server.names[0] for each in list(engine.adapters.residents.values())):
            assert time.monotonic() < end, "nobody looked"
            time.sleep(0.01)
        may_go_on.set()
        with pytest.raises((InternalServerError, APIError)) as ended:
            reply.result(WAIT_S)
    assert ended.value.code == "model_not_proved"
    assert [text(client, each) for each in (first, second)] == right


def test_a_reply_whose_probe_gets_no_answer_is_not_said_to_be_of_other_weights(
    served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, first = served_lab.client(), served_lab.release(76)
    text(client, first)
    adapters: Any = served_lab.app.state.serving.engines.adapters
    began, may_go_on = Event(), Event()

    def set_stall(seconds: float) -> None:
        monkeypatch.setattr(adapters, "_settings", adapters._settings.model_copy(update={"serving_stall_s": seconds}))

    def hold(model: str) -> None:
        if any(each.ask.get("stream") for each in server.running):  # the reply has begun: it and its probes wait
            began.set()
            may_go_on.wait(WAIT_S)

    set_stall(WAIT_S / 6)  # a probe that was sent just before the reply began waits as long as the setting was then
    server.before_token = hold
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(text, client, first)
        assert began.wait(WAIT_S)
        set_stall(0.2)
        end = time.monotonic() + WAIT_S
        while server.names[0] in adapters.residents:
            assert time.monotonic() < end, "nobody looked"
            time.sleep(0.01)
        may_go_on.set()
        with pytest.raises(InternalServerError) as ended:
            reply.result(WAIT_S)
    assert ended.value.code == "engine_lost"


def test_no_tenant_gets_another_s_reply_while_many_adapters_are_loaded(
    served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load would swap what is being written, and each twentieth swaps all other adapters for good."""
    tenants, loads = (8, 200) if is_soak() else (3, 4)
    load, swaps_after = server.load, 20 if is_soak() else tenants + 2

    def load_and_swap(name: str, path: str) -> None:
        server.fault = "swaps_in_flight" if (len(server.loads) + 1) % swaps_after else "swaps"
        load(name, path)

    monkeypatch.setattr(server, "load", load_and_swap)
    assert f"{tenants} tenants, {loads} loads" in traffic(served_lab, tenants, loads)
    assert len(server.loads) > swaps_after


def test_a_load_that_finds_no_pause_is_refused_and_the_others_go_on(
    served_lab: Lab, server: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = served_lab.client()
    first, second = served_lab.release(67), served_lab.release(68)
    right = text(client, first)
    engine: Any = served_lab.app.state.serving.engines
    monkeypatch.setattr(
        engine.adapters, "_settings", engine.adapters._settings.model_copy(update={"serving_drain_s": 0.05})
    )
    may_go_on = Event()
    server.before_token = lambda model: may_go_on.wait(WAIT_S) if server.running[0].ask.get("stream") else None
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(text, client, first)
        while not server.running:
            time.sleep(0.01)
        with pytest.raises(RateLimitError) as busy:
            text(client, second)
        may_go_on.set()
        assert reply.result(WAIT_S) == right
    assert busy.value.code == "engine_busy"
    assert len(server.names) == 1


def test_turns_hold_between_processes_of_the_api(tmp_path: Path) -> None:
    async def run() -> list[str]:
        ours, theirs, done = Gate(tmp_path), Gate(tmp_path), list[str]()
        await ours.enter()
        load = asyncio.create_task(_load(theirs, done))
        while not _is_waiting(tmp_path):
            await asyncio.sleep(0)
        late = asyncio.create_task(_join(ours, done))
        await asyncio.sleep(0)
        assert not done
        ours.leave()
        await asyncio.gather(load, late)
        return done

    assert asyncio.run(run()) == ["loaded", "joined"]


def test_a_failed_drain_gives_the_requests_their_time(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate(tmp_path)
        await gate.enter()
        for _ in range(2):  # the second one does not even try
            with pytest.raises(TooManyRequests):
                await _load(gate, [], 0.05)
        await asyncio.wait_for(gate.enter(), WAIT_S)

    asyncio.run(run())


def test_a_request_does_not_wait_for_a_process_that_was_stopped_in_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_LONGEST_LOAD_S", 0.05)

    async def run() -> None:
        async with Gate(tmp_path).exclusive(WAIT_S):
            with pytest.raises(TooManyRequests, match="loading an adapter for too long"):
                await asyncio.wait_for(Gate(tmp_path).enter(), WAIT_S)

    asyncio.run(run())


async def _load(gate: Gate, done: list[str], patience_s: float = WAIT_S) -> None:
    async with gate.exclusive(patience_s):
        done.append("loaded")


async def _join(gate: Gate, done: list[str]) -> None:
    async with gate.share():
        done.append("joined")


def _is_waiting(folder: Path) -> bool:
    """Whether a load holds its turn, and waits for replies to end."""
    probe = Gate(folder)
    if not probe._enter():
        return True
    probe.leave()
    return False
