"""What will be trained, before it is: the API's own tokens and masks are those of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jinja2.sandbox import ImmutableSandboxedEnvironment
from spard_lab.lab.pretrain import make_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app import db
from app.db.tables import File
from app.db.tables.files import RESULTS
from app.files.tokenizer import LightTokenizer
from spard.data.chat import NO_LOSS, PLAIN_TEMPLATE, EncodedSample, encode, encode_all, tool_support
from spard.data.rows import Example
from spard.data.rows import example as to_example
from spard.errors import ToolsNotRendered
from tests.app.http.conftest import FILES, Service, Upload, chat, jsonl, rows
from tests.spard.parts import byte_tokenizer
from tests.spard.test_data import REWRITING

TOOLS = (
    "{{ date_string }} "
    "{% if tools %}[{% for t in tools %}{{ t | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
    "{%- for m in messages %}\n<|{{ m.role }}|>{% if m.tool_calls is defined %}{{ m.tool_calls[0].function | tojson }}"
    "{% continue %}{% endif %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "\u00e9"}'}}
ROWS: list[dict[str, Any]] = [
    chat("What is 2 and 2?", "four, caf\u00e9 \U0001f600"),
    {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "developer", "content": "Be brief."}, *chat("x", "y")["messages"], *chat("z")["messages"]]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": "no loss", "weight": 0},
            {"role": "user", "content": "again <|end|> and"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "content": "three"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": "<adds>", "parameters": {}}}],
    },
]


def learned_by_lab() -> PreTrainedTokenizerFast:
    return make_tokenizer(["what is two and two", "four", "caf\u00e9", "the quick brown fox"] * 4, positions=256)


def encode_or_refusal(tokenizer: Any, example: Example) -> EncodedSample | str:
    """Return the tokens and mask of a row, or why it is refused."""
    try:
        return encode(tokenizer, example, 10_000)
    except ToolsNotRendered as error:
        return error.message


@pytest.mark.parametrize("template", [None, PLAIN_TEMPLATE, REWRITING, TOOLS])
@pytest.mark.parametrize("make", [byte_tokenizer, learned_by_lab])
def test_tokens_and_mask_are_those_of_training(make: Any, template: str | None, tmp_path: Path) -> None:
    own = make()
    own.chat_template = template or own.chat_template
    own.save_pretrained(tmp_path)
    trained, shown = AutoTokenizer.from_pretrained(tmp_path), LightTokenizer(tmp_path)
    assert tool_support(shown) == tool_support(trained)
    for row in ROWS:
        example: Example = to_example(row, 1)
        expected = encode_or_refusal(trained, example)
        assert encode_or_refusal(shown, example) == expected
        is_refused = "tools" in row and template is not TOOLS
        assert is_refused == isinstance(expected, str)
        assert is_refused or any(label != NO_LOSS for label in encode(trained, example, 10_000).labels)


def test_a_template_in_the_settings_is_read_too(tmp_path: Path) -> None:
    own = byte_tokenizer()
    own.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": REWRITING}, {"name": "tool_use", "template": TOOLS}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    trained, shown = AutoTokenizer.from_pretrained(tmp_path), LightTokenizer(tmp_path)
    for row in ROWS:
        assert encode_or_refusal(shown, to_example(row, 1)) == encode_or_refusal(trained, to_example(row, 1))


def test_a_template_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = byte_tokenizer()
    own.chat_template = f"{{# {tmp_path} #}}{PLAIN_TEMPLATE}"  # no other test has it
    own.save_pretrained(tmp_path)
    compiled: list[str] = []
    compile_it = ImmutableSandboxedEnvironment.from_string

    def note_compilation(self: Any, source: str, *more: Any) -> Any:
        compiled.append(source)
        return compile_it(self, source, *more)

    monkeypatch.setattr(ImmutableSandboxedEnvironment, "from_string", note_compilation)
    for _ in range(2):
        encode_all(LightTokenizer(tmp_path), [to_example(row, 1) for row in ROWS if "tools" not in row], 10_000)
    assert len(compiled) == 1


@pytest.fixture
def with_tokenizer(job_body: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The model on offer has a tokenizer."""
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return job_body


def test_the_loss_falls_on_the_answers_alone(customer: TestClient, with_tokenizer: dict[str, Any]) -> None:
    path = f"{FILES}/{with_tokenizer['training_file']}/preview"
    got = customer.get(path, params={"model": "lab/tiny-1", "n": 2}).json()
    assert [row["line"] for row in got["data"]] == [1, 2]
    for row in got["data"]:
        assert "".join(token["text"] for token in row["tokens"] if token["trained"]) == "four<|end|>"
        assert (row["n_tokens"], row["n_trained"]) == (len(row["tokens"]), 5)


def test_a_row_whose_earlier_turns_are_rewritten_is_shown_sample_by_sample(
    customer: TestClient, upload: Upload, with_tokenizer: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "model" / "chat_template.jinja").write_text(REWRITING)
    turns = [*chat("One?", "<b>one</b>")["messages"], *chat("Two?", "two")["messages"]]
    file_id = upload(jsonl(*[{"messages": turns}] * 10)).json()["id"]
    (row,) = customer.get(f"{FILES}/{file_id}/preview", params={"model": "lab/tiny-1", "n": 1}).json()["data"]
    samples = [*row["earlier_samples"], row]
    learned = ["".join(token["text"] for token in each["tokens"] if token["trained"]) for each in samples]
    assert [text.removesuffix("<|end|>") for text in learned] == ["<b>one</b>", "two"]
    assert row["n_tokens"] == sum(len(each["tokens"]) for each in samples)
    tokens = customer.get(f"{FILES}/{file_id}/validation", params={"model": "lab/tiny-1"}).json()["tokens"]
    assert tokens["total"] == 10 * row["n_tokens"]


def test_reasoning_is_a_part_of_an_answer(
    customer: TestClient, upload: Upload, with_tokenizer: dict[str, Any], tmp_path: Path
) -> None:
    row = chat("One?", "one")
    row["messages"][1]["reasoning_content"] = "Why"
    file_id = upload(jsonl(*[row] * 10)).json()["id"]
    path = f"{FILES}/{file_id}/preview"
    (refused,) = customer.get(path, params={"model": "lab/tiny-1", "n": 1}).json()["data"]
    assert "leaves out /messages/1/reasoning_content" in refused["error"]
    (tmp_path / "model" / "chat_template.jinja").write_text(THINKING)
    (shown,) = customer.get(path, params={"model": "lab/tiny-1", "n": 1}).json()["data"]
    learned = "".join(token["text"] for token in shown["tokens"] if token["trained"])
    assert learned == "<think>Why</think>one<|end|>"


def test_a_model_without_a_tokenizer_here_is_told(customer: TestClient, job_body: dict[str, Any]) -> None:
    path = f"{FILES}/{job_body['training_file']}/preview"
    for model, code in (("lab/tiny-1", "tokenizer_unavailable"), ("nobody", "model_not_found")):
        got = customer.get(path, params={"model": model})
        assert (got.status_code, got.json()["error"]["code"]) == (400, code)
    assert "no base model 'nobody'" in got.json()["error"]["message"]  # of a fine-tuned one, too, which does exist


def test_a_file_with_errors_has_no_preview(
    customer: TestClient, upload: Upload, with_tokenizer: dict[str, Any]
) -> None:
    file_id = upload(jsonl({"messages": []})).json()["id"]
    got = customer.get(f"{FILES}/{file_id}/preview", params={"model": "lab/tiny-1"})
    assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_training_file")


def test_a_row_of_very_many_turns_is_not_rendered(
    customer: TestClient, upload: Upload, with_tokenizer: dict[str, Any]
) -> None:
    file_id = upload(jsonl({"messages": chat("x")["messages"] * 2001})).json()["id"]
    (row,) = customer.get(f"{FILES}/{file_id}/preview", params={"model": "lab/tiny-1"}).json()["data"]
    assert row["tokens"] == []
    assert "turns" in row["error"]


def test_validation_counts_tokens_for_a_model(customer: TestClient, with_tokenizer: dict[str, Any]) -> None:
    path = f"{FILES}/{with_tokenizer['training_file']}"
    first = customer.get(f"{path}/preview", params={"model": "lab/tiny-1", "n": 10}).json()["data"]
    tokens = customer.get(f"{path}/validation", params={"model": "lab/tiny-1"}).json()["tokens"]
    lengths = [row["n_tokens"] for row in first]
    assert (tokens["rows"], tokens["total"]) == (10, sum(lengths))
    assert (tokens["trained"], tokens["max"]) == (50, max(lengths))
    assert (tokens["histogram"], tokens["lines_without_loss"]) == ({"128": 10}, [])


def test_a_count_that_ran_out_of_time_says_so(
    customer: TestClient, service: Service, upload: Upload, with_tokenizer: dict[str, Any]
) -> None:
    path = f"{FILES}/{upload(rows(300)).json()['id']}/validation"
    tokens = customer.get(path, params={"model": "lab/tiny-1"}).json()["tokens"]
    assert (tokens["approximate"], tokens["rows"], tokens["rows_in_file"]) == (False, 300, 300)
    service.app.state.settings.counting_cpu_s = 1e-9
    tokens = customer.get(path, params={"model": "lab/tiny-1"}).json()["tokens"]
    assert (tokens["approximate"], tokens["rows"], tokens["rows_in_file"]) == (True, 256, 300)


def test_validation_names_the_rows_that_two_files_share(customer: TestClient, upload: Upload) -> None:
    training = upload(rows(10)).json()["id"]
    respaced = json.dumps(chat("What is 3 and 3?"), separators=(" ,", ":")).encode() + b"\n"
    other = upload(jsonl(chat("something else")) + respaced).json()["id"]
    found = customer.get(f"{FILES}/{training}/validation", params={"validation_file": other}).json()
    assert found["overlap"] == {"validation_file": other, "rows": 1, "lines": [4]}


SHAREGPT = [
    {"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": "a"}], "id": str(i)}
    for i in range(10)
]
ALPACA = [{"instruction": "Add.", "input": f"{i} and {i}", "output": "a"} for i in range(10)]


@pytest.mark.parametrize(("form", "foreign"), [("sharegpt", SHAREGPT), ("alpaca", ALPACA)])
def test_another_form_is_recognized_and_converted_when_asked(
    form: str, foreign: list[Any], customer: TestClient, upload: Upload
) -> None:
    file = upload(jsonl(*foreign)).json()
    problems = customer.get(f"{FILES}/{file['id']}/validation").json()["problems"]
    assert (file["status"], {problem["code"] for problem in problems}) == ("error", {f"{form}_format"})

    before = len(customer.get(FILES).json()["data"])
    shown = customer.post(f"{FILES}/{file['id']}/convert", params={"dry_run": True}).json()
    assert (shown["format"], len(shown["data"]), shown["file"]) == (form, 5, None)
    assert len(customer.get(FILES).json()["data"]) == before

    made = customer.post(f"{FILES}/{file['id']}/convert").json()["file"]
    content = customer.get(f"{FILES}/{made['id']}/content").text.splitlines()
    assert (made["status"], made["filename"], len(content)) == ("processed", "train-converted.jsonl", 10)
    question = "q0" if form == "sharegpt" else "Add.\n\n0 and 0"
    assert json.loads(content[0]) == chat(question, "a")


def test_what_would_need_a_guess_is_not_converted(customer: TestClient, upload: Upload) -> None:
    guess = {"conversations": [{"from": "observer", "value": "q"}, {"from": "gpt", "value": "a"}]}
    file_id = upload(jsonl(SHAREGPT[0], guess)).json()["id"]
    number = upload(jsonl(ALPACA[0] | {"history": 3})).json()["id"]
    for content in (file_id, number, upload(rows(10)).json()["id"], upload(b'{"a": 1}\n[1]\n').json()["id"]):
        got = customer.post(f"{FILES}/{content}/convert")
        assert (got.status_code, got.json()["error"]["code"]) == (400, "not_convertible")
    assert len(customer.get(FILES).json()["data"]) == 4


def test_what_a_job_has_made_has_no_rows(service: Service, customer: TestClient, upload: Upload) -> None:
    key, own = "tenants/org-customer/files/file-made", upload(rows(10)).json()["id"]
    stored = service.app.state.storage.write(key, [b"\x1f\x8b\xff\n"])
    facts: Any = {"purpose": RESULTS, "status": "processed", "bytes": stored.bytes, "sha256": stored.sha256}
    with db.transaction(service.app.state.engine) as session:
        session.add(File(id="file-made", project_id="org-customer", filename="made", storage_key=key, **facts))
    for verb, path in (
        ("post", "file-made/convert"),
        ("post", "file-made/convert?dry_run=true"),
        ("get", f"{own}/validation?validation_file=file-made"),
        ("get", f"file-made/validation?validation_file={own}"),
    ):
        got = customer.request(verb, f"{FILES}/{path}")
        assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_training_file"), path


def test_another_s_file_cannot_be_compared_with(customer: TestClient, stranger: TestClient, upload: Upload) -> None:
    foreign = upload(rows(10)).json()["id"]
    form: dict[str, Any] = {"data": {"purpose": "fine-tune"}, "files": {"file": ("a.jsonl", rows(10))}}
    own = stranger.post(FILES, **form).json()["id"]
    got = stranger.get(f"{FILES}/{own}/validation", params={"validation_file": foreign})
    assert (got.status_code, got.json()["error"]["code"]) == (404, "file_not_found")
