"""A chat template is tried in a process with limits: what it does there ends that process and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from app.files import template_look
from app.files.template_look import inspect_folder
from app.files.tokenizer import LightTokenizer
from spard.data.chat import get_renderer
from spard.data.tools import CONVERSATION
from spard.digests import folder_digest, model_files
from spard.models.base import read_tokenizer
from tests.spard.parts import TEMPLATE, byte_tokenizer

APP = Path(template_look.__file__).parents[1]
READS = ("app.files.tokenizer", "spard.models.folder.check", "spard.models.folder.check")
LONG = "{% set n = namespace(t='x' * 1000000) %}{% for i in range(20) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def template_fault(folder: Path) -> str:
    found = inspect_folder(folder).template
    return (found and found["fault"]) or ""


def test_what_works_is_found(folder: Path) -> None:
    found = inspect_folder(folder).template
    assert found is not None
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
    assert told in template_fault(folder)


def test_a_template_without_an_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    (folder / "chat_template.jinja").write_text(loop)
    monkeypatch.setattr(template_look, "CPU_S", 0.5)
    assert "too long" in template_fault(folder)
    monkeypatch.setattr(template_look, "WALL_S", 0.2)
    with pytest.raises(Exception, match="could not be tried in time"):
        inspect_folder(folder)


def test_what_its_files_tell_is_found_beside_a_template_without_an_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_look, "CPU_S", 0.5)
    (folder / "chat_template.jinja").write_text("{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4)
    found = inspect_folder(folder)
    assert any(each.is_fault for each in found.findings)  # it has no weights
    assert "too long" in ((found.template and found.template["fault"]) or "")


def test_a_folder_without_a_tokenizer_has_no_template(tmp_path: Path) -> None:
    assert inspect_folder(tmp_path).template is None


def test_nobody_else_in_the_service_reads_tokenizers() -> None:
    """`files/counter.py` is a process with limits too; a vLLM server's prompts are written in that of the API."""
    readers = set()
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {each.name for each in node.names} if isinstance(node, ast.ImportFrom) else set()
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module in READS and names & {"LightTokenizer", "open_tokenizer", "read_vocabulary", "findings"}:
                readers.add(str(path.relative_to(APP)))
    vllm = {"inference/vllm_adapters.py", "inference/vllm_writing.py"}
    assert readers == {"files/counter.py", "files/template_look.py", *vllm}


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
        rendered = get_renderer(light).render(turns, given or (), generation=True)
        assert rendered == own.apply_chat_template(turns, **asked)
    assert folder_digest(folder) != before
    assert [path.name for path in model_files(folder)] == ["tool_use.jinja", *names]


def test_the_digest_of_a_folder_without_them_is_what_it_was(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "chat_template.jinja", "merges.txt", "README.md"):
        (tmp_path / name).write_text(name)
    expected = "sha256:a286ccd46f7d669b"
    assert folder_digest(tmp_path).startswith(expected)
