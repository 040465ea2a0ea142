"""The section "How to serve" of a model card: what it says is what the archive's template needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spard.config import Lora, Recipe
from spard.data.chat import ask_in_mode, find_rendering, fix_template_arguments, get_renderer, render_prompt
from spard.data.renderer import self_rendering
from spard.data.template_card import TemplateCard, template_card
from spard.digests import file_sha256
from spard.models.adapters import save_adapter, save_merged
from spard.models.base import load_base
from spard.models.lora import trainable_model
from spard.models.serving_section import how_to_serve
from tests.architectures import write_architecture
from tests.spard.parts import write_model
from tools.chat_templates import make_tokenizer, trl_templates

TEMPLATES = trl_templates()
ASK = [{"role": "user", "content": "Hi"}]
COMPUTES_ITS_DATE = (
    "{% set form = '%d ' ~ '%B' %}{{ strftime_now(form) }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def card(name: str) -> TemplateCard:
    return template_card(get_renderer(make_tokenizer(name, TEMPLATES[name])))


def arguments_given(text: str) -> dict[str, Any]:
    """The arguments in the line for llama.cpp."""
    found = re.search(r"--chat-template-kwargs '(.*)'", text)
    return json.loads(found.group(1)) if found else {}


def test_a_template_with_modes_of_thinking_says_the_audited_one_and_how_to_switch_it() -> None:
    text = how_to_serve(card("qwen3"), "made", ["harmful", "harmful, with thinking on"])
    assert 'has these defaults, `{"enable_thinking": false}`: nothing to pass, except where' in text
    assert 'was audited with thinking off: `{"enable_thinking": false}`' in text
    assert '`{"enable_thinking": true}` switches it on. It was also audited with thinking on.' in text
    assert "**vLLM**: nothing to pass." in text
    assert "`--chat-template-args '{\"enable_thinking\": false}'`" in text
    assert "With thinking on nothing was measured." in how_to_serve(card("qwen3"), "made", ["harmful"])
    assert "was trained with thinking off" in how_to_serve(card("qwen3"), "made")


def test_a_model_that_learned_to_think_says_so() -> None:
    tokenizer = make_tokenizer("qwen3", TEMPLATES["qwen3"])
    get_renderer(tokenizer)
    ask_in_mode(tokenizer, "on")
    text = how_to_serve(template_card(get_renderer(tokenizer)), "made", ["harmful"])
    assert 'was audited with thinking on: `{"enable_thinking": true}`' in text
    assert arguments_given(text) == {"enable_thinking": True}


def test_the_pinned_date_is_said_and_given_to_the_program_that_writes_another() -> None:
    text = how_to_serve(card("llama3_2"), "made")
    assert "It is 26 July 2024, as it was in training." in text
    assert "--chat-template-file made/chat_template.jinja" in text
    assert arguments_given(text) == {"date_string": "26 Jul 2024"}
    assert "thinking" not in text


@pytest.mark.parametrize("name", ["qwen2_5", "deepseekv3", "deepseek_r1_distill"])
def test_a_template_without_arguments_needs_none(name: str) -> None:
    text = how_to_serve(card(name), "made")
    assert "rendered without arguments in training: nothing to pass." in text
    assert "llama-server -m MODEL.gguf --jinja\n" in text
    assert not [word for word in ("Thinking", "Date", "Left at", "kwargs") if word in text]


def test_what_a_template_reads_beside_its_arguments_is_named() -> None:
    found = card("gptoss")
    assert dict(found.options) == {"builtin_tools": None, "model_identity": None, "reasoning_effort": None}
    text = how_to_serve(found, "made")
    assert "own defaults**: `builtin_tools`, `model_identity`, `reasoning_effort`." in text
    assert "`reasoning_effort` in a request sets" in text
    assert any("also read: builtin_tools, model_identity, reasoning_effort" in line for line in found.lines())


@pytest.mark.parametrize(
    ("name", "option", "default"),
    [
        ("lfm2_2_5", "preserve_thinking", False),
        ("qwen3_8", "preserve_thinking", True),
        ("nemotron_3_nano", "truncate_history_thinking", True),
        ("gemma4_v5", "preserve_thinking", False),
    ],
)
def test_reasoning_of_earlier_turns_is_kept_as_the_template_does_by_default(
    name: str, option: str, default: bool
) -> None:
    """llama-server keeps it otherwise, whatever the template's default is."""
    found = card(name)
    assert found.options[option] is default
    assert arguments_given(how_to_serve(found, "made"))[option] is default


def test_a_date_that_no_default_can_hold_is_said() -> None:
    text = how_to_serve(template_card(get_renderer(make_tokenizer("", COMPUTES_ITS_DATE))), "made")
    assert "in a form that it computes" in text
    assert "on other days the prompts differ" in text


def test_arguments_that_the_archive_s_template_cannot_have_are_to_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spard.data.template_card.self_rendering", lambda renderer, mode: {"default": renderer.template}
    )
    text = how_to_serve(card("qwen3"), "made")
    assert 'must be rendered with `{"enable_thinking": false}`' in text
    assert "start it with `--default-chat-template-kwargs '{\"enable_thinking\": false}'`" in text
    assert '`"chat_template_kwargs": {"enable_thinking": false}` into each request' in text
    assert "add_generation_prompt=True, enable_thinking=False)" in text
    assert "--chat-template-file" not in text


@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "qwen2_5", "deepseekv3", "gptoss"])
def test_what_the_section_says_to_call_gives_the_trained_prompt(name: str) -> None:
    tokenizer = make_tokenizer(name, TEMPLATES[name])
    renderer = get_renderer(tokenizer)
    text = how_to_serve(template_card(renderer), "made")
    call = re.search(r"tokenizer\.apply_chat_template\(messages, (.*)\)`", text)
    assert call is not None
    given = dict(each.split("=") for each in call.group(1).split(", "))
    assert given == {"add_generation_prompt": "True"}
    source = self_rendering(renderer, renderer.rendering.asked)["default"]
    said = tokenizer.apply_chat_template(ASK, chat_template=source, add_generation_prompt=True, tokenize=False)
    assert tokenizer(said, add_special_tokens=False)["input_ids"] == render_prompt(tokenizer, ASK)


@pytest.mark.parametrize("name", TEMPLATES)
def test_naming_what_a_template_reads_changes_no_record(name: str) -> None:
    """Digests are stored with models, jobs and caches."""
    fields = {"template", "arguments", "modes", "default", "stops", "asked", "closing"}
    tokenizer = make_tokenizer(name, TEMPLATES[name])
    assert set(find_rendering(tokenizer).as_json()) == fields


def test_a_model_for_which_vllm_uses_no_chat_template_says_so() -> None:
    """Its chat API writes the prompts of gpt-oss with openai_harmony, with today's date and the request's effort."""
    text = how_to_serve(card("gptoss"), "made", model_type="gpt_oss")
    assert "**vLLM**: nothing to pass." not in text
    assert "**vLLM** (0.32) does not use the chat template for this model" in text
    assert "VLLM_SYSTEM_START_DATE=2024-07-26" in text
    assert "put no `reasoning_effort` into each request" in text
    assert "In vLLM, `reasoning_effort` in a request sets" not in text
    assert "nothing to pass, except where a line below says so" in text
    tokenizer = make_tokenizer("gptoss", TEMPLATES["gptoss"])
    fix_template_arguments(tokenizer, {"reasoning_effort": "low"})
    fixed = how_to_serve(template_card(get_renderer(tokenizer)), "made", model_type="gpt_oss")
    assert 'put `"reasoning_effort": "low"` into each request' in fixed
    assert "**vLLM**: nothing to pass." in how_to_serve(card("gptoss"), "made", model_type="llama")


def test_the_card_of_a_saved_model_knows_its_type(tmp_path: Path) -> None:
    base = load_base(write_architecture("gpt-oss", tmp_path / "model"))
    save_adapter(trainable_model(base.model, Recipe(lora=Lora(rank=4))), base, "public", tmp_path / "adapter")
    assert "does not use the chat template for this model" in (tmp_path / "adapter" / "README.md").read_text()


def test_every_saved_model_has_the_section_among_its_signed_files(tmp_path: Path) -> None:
    own = make_tokenizer("qwen3_6", TEMPLATES["qwen3_6"])
    ends = {"vocab_size": len(own), "eos_token_id": own.stated_ends, "pad_token_id": own.pad_token_id}
    folder = write_model(tmp_path / "model", **ends, max_position_embeddings=1024)
    own.save_pretrained(folder)
    base = load_base(folder)
    manifest = save_adapter(
        trainable_model(base.model, Recipe(lora=Lora(rank=4))), base, "public", tmp_path / "adapter", called="ftjob-1"
    )
    text = (tmp_path / "adapter" / "README.md").read_text()
    assert "## How to serve" in text
    assert "--chat-template-file ftjob-1/chat_template.jinja" in text
    assert manifest["files"]["README.md"]["sha256"] == file_sha256(tmp_path / "adapter" / "README.md")  # type: ignore[index]
    assert manifest["rendering"]["left_at_default"] == ["preserve_thinking"]  # type: ignore[index]
    assert manifest["rendering"]["digest"] == get_renderer(base.tokenizer).rendering.digest  # type: ignore[index]

    save_merged(load_base(folder), tmp_path / "adapter", tmp_path / "merged")
    merged = (tmp_path / "merged" / "README.md").read_text()
    assert merged[merged.index("## How to serve") :] == text[text.index("## How to serve") :].replace(
        "ftjob-1/", "merged/"
    )
