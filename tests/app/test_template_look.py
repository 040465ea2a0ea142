"""A chat template is tried in a process with limits: what it does there ends that process and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.files import template_look
from app.files.template_look import look_at
from app.files.tokenizer import LightTokenizer
from spard.data.chat import renderer_of
from spard.data.tools import CONVERSATION
from spard.digests import folder_digest, model_files
from spard.models.base import read_tokenizer
from tests.spard.parts import TEMPLATE, byte_tokenizer

LONG = "{% set n = namespace(t='x' * 1000000) %}{% for i in range(20) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_works_is_found(folder: Path) -> None:
    found = look_at(folder)
    assert (found["fault"], found["has_tokenizer"], found["has_template"], found["has_end_token"]) == (
        None,
        *[True] * 3,
    )
    assert found["tool_support"] == {"tools": False, "tool_calls": False, "tool": False}


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (LONG, "too much memory"),
        ("{{ 'x' * 9999999999999 }}", "too much memory"),
        ("{{ messages.nothing.at_all }}", "cannot write a question"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "cannot write a question"),
    ],
)
def test_a_template_that_fails_is_told(template: str, told: str, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert told in (look_at(folder)["fault"] or "")


def test_a_template_without_an_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    (folder / "chat_template.jinja").write_text(loop)
    monkeypatch.setattr(template_look, "CPU_S", 0.5)
    assert "too long" in (look_at(folder)["fault"] or "")
    monkeypatch.setattr(template_look, "WALL_S", 0.2)
    with pytest.raises(Exception, match="could not be tried in time"):
        look_at(folder)


def test_further_templates_are_read_as_transformers_reads_them_and_are_in_the_digest(folder: Path) -> None:
    before = folder_digest(folder)
    names = [path.name for path in model_files(folder)]
    other = TEMPLATE.replace("<|user|>", "<|system|>")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}" + other)
    light, own = LightTokenizer(folder), read_tokenizer(str(folder))
    assert light.chat_template == own.chat_template
    tools = [{"type": "function", "function": {"name": "a", "parameters": {}}}]
    for given in (None, tools):
        asked: dict[str, Any] = {"tools": given, "tokenize": False, "add_generation_prompt": True}
        turns = list(CONVERSATION.messages)
        rendered = renderer_of(light).render(turns, given or (), generation=True)
        assert rendered == own.apply_chat_template(turns, **asked)
    assert folder_digest(folder) != before
    assert [path.name for path in model_files(folder)] == ["tool_use.jinja", *names]


def test_the_digest_of_a_folder_without_them_is_what_it_was(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "merges.txt", "README.md"):
        (tmp_path / name).write_text(name)
    expected = "sha256:a286ccd46f7d669b"
    assert folder_digest(tmp_path).startswith(expected)
