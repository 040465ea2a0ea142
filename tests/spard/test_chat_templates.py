"""Whatever chat template a model has: what is trained is what is served, and what transformers renders by itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spard.data.chat import encode, get_renderer
from spard.data.renderer import self_rendering
from spard.data.rows import Example
from spard.data.template_card import template_card
from spard.errors import TemplateFault
from tools import chat_templates
from tools.chat_templates import CONVERSATIONS, make_tokenizer, outcome, outcomes, trl_templates

TEMPLATES = trl_templates()
PAGE = Path(chat_templates.__file__).parents[1] / "docs" / "chat-templates.md"
# Templates of the models that the paper and the README name: every conversation that they can write is trained.
FAMILIES = ("qwen2_5", "qwen3", "llama3_2")
USABLE = [name for name in TEMPLATES if not name.startswith(("idefics", "llava", "smolvlm"))]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_is_what_is_served(name: str) -> None:
    tokenizer = make_tokenizer(name, TEMPLATES[name])
    if name.startswith("llava"):
        with pytest.raises(TemplateFault, match="cannot write an answer"):
            template_card(get_renderer(tokenizer))
    for kind, found in zip(CONVERSATIONS, outcomes(name, TEMPLATES[name]), strict=True):
        assert not found.faults, kind
        assert found.samples or found.refusal, kind


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_of_the_paper_train_all_that_they_can_write(name: str) -> None:
    found = zip(CONVERSATIONS, outcomes(name, TEMPLATES[name]), strict=True)
    refused = {kind for kind, each in found if each.refusal}
    cannot = {"qwen2_5": {"reasoning"}, "qwen3": set(), "llama3_2": {"reasoning", "text beside a call"}}
    assert refused == cannot[name]


def test_the_page_has_the_table_of_the_installed_trl() -> None:
    assert PAGE.read_text(encoding="utf-8") == chat_templates.page()


def test_chat_templates_are_rendered_in_one_place() -> None:
    """The clean process of the proof alone does it otherwise: as a stranger, who loads the archive.

    The model card tells such strangers what to call; its module has the call as a text.
    """
    root = Path(chat_templates.__file__).parents[1]
    sources = [path for part in ("spard", "app", "worker") for path in (root / part).rglob("*.py")]
    calls = {
        path.name
        for path in sources
        if re.search(r"apply_chat_template\(|from_string\(|jinja2.*Sandbox", path.read_text())
    }
    assert calls == {"chat_template.py", "clean_load.py", "serving_section.py"}
    tree = ast.parse((root / "spard" / "models" / "serving_section.py").read_text())
    assert "apply_chat_template" not in {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)}


words = st.text(alphabet="ab <>&\n/\\'\"{}é中|", min_size=1, max_size=12)
answers = st.tuples(words.filter(str.strip), st.booleans(), st.booleans())


@st.composite
def conversations(draw: Any) -> Example:
    """Draw a conversation, under a system prompt or not, with answers of weight 0 and calls among its turns."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    has_tools = draw(st.booleans())
    for number in range(draw(st.integers(1, 3))):
        text, is_learned, calls = draw(answers)
        turns.append({"role": "user", "content": draw(words)})
        if has_tools and calls:
            turns += chat_templates.call_and_answer(number)
        turns.append({"role": "assistant", "content": text} | ({} if is_learned else {"weight": 0}))
    turns[-1].pop("weight", None)
    return Example(tuple(turns), 1, (chat_templates.TOOL,) if has_tools else ())


@settings(max_examples=6)
@pytest.mark.parametrize("name", USABLE)
@given(conversation=conversations())
def test_drawn_conversations_are_trained_as_they_are_served_or_refused(name: str, conversation: Example) -> None:
    tokenizer = _tokenizer(name)
    found = outcome(tokenizer, conversation, is_exact=False)
    assert not found.faults


_MADE: dict[str, Any] = {}


def _tokenizer(name: str) -> Any:
    if name not in _MADE:
        _MADE[name] = make_tokenizer(name, TEMPLATES[name])
    return _MADE[name]


def test_a_template_that_asks_for_the_date_gives_the_same_tokens_tomorrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mistral Small, gpt-oss, SmolLM3 and Granite write the day: a job would train on other tokens after midnight."""
    source = "<|system|>Now: {{ strftime_now('%Y-%m-%d %H:%M:%S') }}" + PLAIN
    tokenizer = make_tokenizer("", source)
    row = Example(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}), 1)
    first = encode(tokenizer, row, 1000).ids
    assert "Now: 2024-07-26 00:00:00" in tokenizer.decode(list(first))
    alone = self_rendering(get_renderer(tokenizer), "plain")["default"]
    text = tokenizer.apply_chat_template(
        list(row.messages[:1]), chat_template=alone, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(first[: len(tokenizer(text)["input_ids"])])


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
