"""What replies cost: rows, quotas and rates in tokens, and entries in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, RateLimitError
from sqlalchemy import Connection, Engine, event, select
from sqlalchemy.exc import OperationalError

from app import db
from app.commands.chat import chat
from app.db.tables import ApiKey, AuditEntry, InferenceCall, Quota
from app.inference import calls
from app.inference.engine_process import Stream
from app.inference.protocol import Ask, Proof
from app.inference.released import ReleasedModel
from tests.app.inference.conftest import Lab

READ, MESSAGES = 3, [{"role": "user", "content": "Hello there"}]
PROOF: Proof = {"tensor_digest": "sha256:0", "max_difference": 0.0, "difference_to_base": 1.0}


class Words:
    """An engine that writes as many words as it may."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []

    async def start(self, model: ReleasedModel, project: str, ask: Ask) -> tuple[Stream, int, Proof | None]:
        self.asks.append(ask)
        stream, most = Stream(1, lambda number: None), ask["max_tokens"] or 0
        for i in range(1, most + 1):
            finish: Any = "length" if i == most else None
            stream.put({"kind": "piece", "id": 1, "index": 0, "text": "on ", "reply_tokens": i, "finish": finish})
        stream.put({"kind": "done", "id": 1, "reply_tokens": most})
        return stream, READ, PROOF if len(self.asks) == 1 else None


Limit = Callable[..., Any]


@pytest.fixture
def words(served_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Words:
    engine = Words()
    monkeypatch.setattr(served_lab.app.state.serving, "engines", engine)
    return engine


@pytest.fixture
def limited_client(served_lab: Lab, request: pytest.FixtureRequest) -> Limit:
    """A client of a project of the test's own, with limits."""
    project = f"org-{request.node.name[:40]}"

    def limit(**limits: int) -> Any:
        client = served_lab.client(project)
        with db.transaction(served_lab.app.state.engine) as session:
            session.merge(Quota(project_id=project, **limits))
        return client

    return limit


def ask(client: Any, tokens: int) -> Any:
    return client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=tokens)


def test_a_day_has_so_many_tokens(served_lab: Lab, words: Words, limited_client: Limit) -> None:
    client = limited_client(max_tokens_per_day=20)
    assert ask(client, 10).usage.total_tokens == 10 + READ
    assert ask(client, 10).usage.total_tokens == 7 + READ  # what is left is what a reply may have
    with pytest.raises(RateLimitError) as over:
        ask(client, 10)
    assert (over.value.code, over.value.response.headers["x-should-retry"]) == ("quota_exceeded", "false")


def test_a_minute_has_so_many_tokens(words: Words, limited_client: Limit) -> None:
    client = limited_client(tokens_per_minute=12)
    ask(client, 10)
    with pytest.raises(RateLimitError) as over:
        ask(client, 1)
    assert over.value.code == "rate_limit_exceeded"
    assert int(over.value.response.headers["retry-after"]) >= 1


def test_each_request_is_a_row_without_its_words(served_lab: Lab, words: Words, limited_client: Limit) -> None:
    client = limited_client()
    name = served_lab.release(41, "org-test_each_request_is_a_row_without_its_w")
    client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a secret"}], max_tokens=4)
    with db.read(served_lab.app.state.engine) as session:
        (call,) = session.scalars(select(InferenceCall).where(InferenceCall.model == name))
        entries = [
            (entry.action, entry.details) for entry in session.scalars(select(AuditEntry)) if entry.target == name
        ]
    assert (call.status, call.prompt_tokens, call.reply_tokens) == ("done", READ, 4)
    assert call.first_token_s is not None
    assert call.seconds is not None
    assert call.first_token_s <= call.seconds
    assert [action for action, _ in entries] == ["model.called", "model.loaded"]
    assert entries[1][1] == {"sha256": call.archive_sha256, **PROOF}
    assert "secret" not in repr([vars(call), entries])
    client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=1)
    with db.read(served_lab.app.state.engine) as session:
        again = session.scalars(select(AuditEntry.action).where(AuditEntry.target == name)).all()
    assert list(again) == ["model.called", "model.loaded"]


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_shown_of_a_request_whose_row_was_not_stored(
    served_lab: Lab, words: Words, limited_client: Limit, stream: bool
) -> None:
    client, engine = limited_client(), served_lab.app.state.engine
    ask(client, 2)
    stored = rows(engine)

    def note(connection: Connection, cursor: object, statement: str, *_: object) -> None:
        if "INSERT INTO inference_calls" in statement:
            connection.info["admits"] = True

    def fail(connection: Connection) -> None:
        if connection.info.pop("admits", False):
            raise OperationalError("COMMIT", {}, Exception("the disk is full"))

    event.listen(engine, "before_cursor_execute", note)
    event.listen(engine, "commit", fail)
    try:
        with pytest.raises(InternalServerError) as lost:
            client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=stream)
    finally:
        event.remove(engine, "before_cursor_execute", note)
        event.remove(engine, "commit", fail)
    assert lost.value.status_code == 503
    assert rows(engine) == stored


def rows(engine: Engine) -> set[str]:
    """The ids of all requests that were stored."""
    with db.read(engine) as session:
        return set(session.scalars(select(InferenceCall.id)))


@pytest.mark.parametrize("stop", ["x" * 1001, ["a", "x" * 1001]])
def test_what_ends_a_reply_is_short(stop: Any, words: Words, limited_client: Limit) -> None:
    with pytest.raises(BadRequestError) as refused:
        limited_client().chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, stop=stop)
    assert (refused.value.code, words.asks) == ("too_long", [])


@pytest.mark.parametrize(("levels", "is_read"), [(64, True), (65, False), (900, False)])
def test_schemas_are_read_to_a_depth_that_can_be_written_again(
    levels: int, is_read: bool, words: Words, limited_client: Limit
) -> None:
    client, schema = limited_client(), dict[str, Any]()
    for _ in range(levels - 1):
        schema = {"properties": schema}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    asks: list[tuple[Any, dict[str, Any]]] = [
        (client.chat.completions, {"messages": MESSAGES, "max_tokens": 1, "tools": [tool]}),
        (client.chat.completions, {"messages": MESSAGES, "max_tokens": 1, "response_format": form}),
        (client.responses, {"input": "Hello", "tools": [{"type": "function", **tool["function"]}]}),
    ]
    for resource, ask in asks:
        if is_read:
            assert resource.create(model="tiny", **ask).id
            continue
        with pytest.raises(BadRequestError) as refused:
            resource.create(model="tiny", **ask)
        assert refused.value.code == "nesting_too_deep"


def chain(length: int, path: str = "#/$defs/d") -> dict[str, Any]:
    """A schema that refers to one that refers to the next."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"{path}{i + 1}"} for i in range(length)}
    return {"$defs": links | {f"d{length}": {"type": "string"}}, "$ref": f"{path}0"}


@pytest.mark.parametrize(
    ("schema", "is_read"),
    [
        (chain(900), True),
        (chain(1100), False),  # of 3,000 links llguidance ran out of stack, and the engine of all customers ended
        (chain(400, "#/%24defs/d"), False),  # spelled otherwise, each may lead to the deepest part
        (chain(400) | {"$id": "https://example.com/schema"}, False),
        (
            {"$defs": {"a": {"items": {"$ref": "#"}, "properties": {"b": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
            True,
        ),
    ],
    ids=["chain", "long chain", "other spelling", "other beginning", "circle"],
)
def test_schemas_are_followed_only_so_far(schema: Any, is_read: bool, words: Words, limited_client: Limit) -> None:
    client = limited_client()
    form: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    text: Any = {"format": {"type": "json_schema", "name": "f", "schema": schema}}
    asks: list[Callable[[], Any]] = [
        lambda: client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, response_format=form),
        lambda: client.responses.create(model="tiny", input="Hello", max_output_tokens=1, text=text),
    ]
    for ask in asks:
        if is_read:
            assert ask().id
            continue
        with pytest.raises(BadRequestError) as refused:
            ask()
        assert refused.value.code == "nesting_too_deep"


def test_the_provider_sees_the_sums(served_lab: Lab, words: Words, limited_client: Limit) -> None:
    client = limited_client()
    ask(client, 5)
    ask(client, 6)
    provider = served_lab.client("org-provider", "admin", "customer")
    usage: Any = provider.get("/admin/usage", cast_to=object)
    (mine,) = [each for each in usage["data"] if each["project_id"] == "org-test_the_provider_sees_the_sums"]
    assert (mine["calls"], mine["prompt_tokens"], mine["reply_tokens"]) == (2, 2 * READ, 11)


def test_spard_chat_prints_the_reply(
    served_lab: Lab, words: Words, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_BASE_URL", served_lab.url)
    monkeypatch.setenv("SPARD_API_KEY", served_lab.key())
    chat("tiny", "Hello there", system="Be short.", max_tokens=3)
    assert capsys.readouterr().out == "on on on \n"
    assert [message["role"] for message in words.asks[0]["messages"] or []] == ["system", "user"]
    lines = iter(["One", "Two", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat("tiny", max_tokens=1)
    assert [message.get("content") for message in words.asks[2]["messages"] or []] == ["One", "on ", "Two"]


def test_tokens_that_are_only_reserved_are_worth_a_retry(served_lab: Lab, words: Words, limited_client: Limit) -> None:
    client = limited_client(max_tokens_per_day=100)
    project = f"org-{test_tokens_that_are_only_reserved_are_worth_a_retry.__name__[:40]}"
    with db.transaction(served_lab.app.state.engine) as session:
        key = session.scalars(select(ApiKey.id).where(ApiKey.project_id == project)).one()
        held = InferenceCall(project_id=project, key_id=key, endpoint="completions", model="tiny", owner="another")
        held.reserved_tokens, held.lease_expires_at = 90, db.now() + 600.0
        session.add(held)
        session.flush()
        call_id = held.id
    with pytest.raises(RateLimitError) as over:
        ask(client, 20)
    headers = over.value.response.headers
    assert (over.value.code, over.value.type) == ("tokens_reserved", "rate_limit_error")
    assert (headers["x-should-retry"], headers["retry-after"]) == ("true", "5")
    assert ask(client, 10).usage.completion_tokens == 10  # there is room for it beside the other
    with db.transaction(served_lab.app.state.engine) as session:
        session.get_one(InferenceCall, call_id).status = "done"
    assert ask(client, 20).usage.completion_tokens == 20


def test_a_request_reserves_no_more_than_the_positions_that_it_has_left(
    served_lab: Lab, words: Words, limited_client: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "read_positions", lambda source, revision: 50)
    client, reserved = limited_client(max_tokens_per_day=3000), list[int]()
    start = words.start

    async def look(model: ReleasedModel, project: str, asked: Ask) -> Any:
        reserved.append(asked["max_tokens"] or 0)
        return await start(model, project, asked)

    monkeypatch.setattr(words, "start", look)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    with db.read(served_lab.app.state.engine) as session:
        row = session.scalars(select(InferenceCall).order_by(InferenceCall.created_at.desc())).first()
    stream.close()
    assert reserved == [50]
    assert row is not None
    assert row.reserved_tokens in (0, 50 - READ)  # 0: it has ended meanwhile
