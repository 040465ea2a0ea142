"""The provider fixes what a chat template reads: in rows, prompts, the proof, the archive and its card."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from spard.commands.main import main
from spard.data.chat import find_rendering, fix_template_arguments, get_renderer, render_prompt
from spard.data.renderer import self_rendering
from spard.data.template_arguments import argument_fault
from spard.data.template_card import template_card
from spard.errors import InvalidRecipe
from spard.models.adapters import save_merged
from spard.models.base import load_base
from spard.models.serving_section import how_to_serve
from spard.pipeline.library import run
from tests.spard.parts import write_model
from tests.spard.test_run import write_run
from tools.chat_templates import make_tokenizer, trl_templates

TEMPLATES = trl_templates()
ASK = [{"role": "user", "content": "Add 1 and 2."}]
# Beside an effort that it prints, whatever it is, this template does not close an answer.
PRINTS_EFFORT = (
    "<|system|>effort {{ reasoning_effort | default('medium') }}\n{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
BIG: Any = {f"a{i}": "x" for i in range(17)}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a name that it does not read": (
        "gptoss",
        {"effort": "low"},
        "does not read effort; it reads builtin_tools, model",
    ),
    "where it reads none": ("qwen2_5", {"x": 1}, "does not read x; it reads no name that can be fixed"),
    "what rows give": ("gptoss", {"messages": []}, "messages cannot be fixed: each conversation gives it"),
    "the prompt's end": ("gptoss", {"add_generation_prompt": True}, "add_generation_prompt cannot be fixed: rendering"),
    "the date": ("llama3_2", {"date_string": "1 Jan 2026"}, "date_string cannot be fixed: the date is fixed"),
    "the clock": ("gptoss", {"strftime_now": "1"}, "strftime_now cannot be fixed: the date is fixed"),
    "thinking": ("qwen3", {"enable_thinking": True}, "enable_thinking cannot be fixed: it switches thinking"),
    "thinking, in words": ("qwen3", {"enable_thinking": "yes"}, "enable_thinking cannot be fixed"),
    "a token": ("llama3_2", {"bos_token": "<s>"}, "bos_token cannot be fixed: it is a token"),
    "a value that it cannot write": ("gptoss", {"reasoning_effort": 3}, "with these values the chat template cannot"),
    "null": ("gptoss", {"reasoning_effort": None}, "reasoning_effort is no text, number, true, false"),
    "an object": ("gptoss", {"model_identity": {"a": 1}}, "model_identity is no text, number, true, false or list"),
    "an infinite number": ("gptoss", {"model_identity": float("inf")}, "model_identity is no finite number"),
    "half a character": ("gptoss", {"model_identity": "\udfff"}, "model_identity is no valid Unicode"),
    "too long a text": ("gptoss", {"model_identity": "x" * 5000}, "bytes; at most 4096 are taken"),
    "too many": ("gptoss", BIG, "there are 17 arguments; at most 16"),
}


@pytest.mark.parametrize(("template", "arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_fixed_is_refused_with_the_reason(template: str, arguments: dict[str, Any], told: str) -> None:
    fault = argument_fault(make_tokenizer(template, TEMPLATES[template]), arguments)
    assert told in (fault or "")


FIXED: dict[str, dict[str, Any]] = {
    "gptoss": {"reasoning_effort": "high", "model_identity": "You are \u00dcma \U0001f600, {% raw %}."},
    "qwen3_8": {"preserve_thinking": False, "reasoning_effort": "low"},
    "llama3_1": {"builtin_tools": ["brave_search", "wolfram_alpha"]},
    "nemotron_3_super": {"low_effort": True},
    "muse_glimmer": {"reasoning_strength": "high", "knowledge_cutoff": "2025-06"},
}


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_is_in_every_prompt_and_a_default_of_the_archive_s_template(name: str) -> None:
    tokenizer, plain = (make_tokenizer(name, TEMPLATES[name]) for _ in range(2))
    assert argument_fault(tokenizer, FIXED[name]) is None
    assert get_renderer(tokenizer).rendering == get_renderer(plain).rendering  # looking fixes nothing
    fix_template_arguments(tokenizer, FIXED[name])
    renderer = get_renderer(tokenizer)
    assert FIXED[name].items() <= renderer.rendering.arguments.items()
    assert renderer.rendering.digest != get_renderer(plain).rendering.digest
    assert renderer.rendering.modes == get_renderer(plain).rendering.modes

    own = self_rendering(renderer, renderer.rendering.asked)["default"]
    said = tokenizer.apply_chat_template(ASK, chat_template=own, add_generation_prompt=True, tokenize=False)
    asked: Any = renderer.rendering.mode_arguments()
    by_call = plain.apply_chat_template(
        ASK, chat_template=TEMPLATES[name], add_generation_prompt=True, tokenize=False, **asked
    )
    assert own != TEMPLATES[name]
    assert tokenizer(said, add_special_tokens=False)["input_ids"] == render_prompt(tokenizer, ASK)
    if "strftime_now" not in TEMPLATES[name]:  # transformers' own is today
        assert said == by_call

    card = template_card(renderer)
    assert FIXED[name].items() <= dict(card.serving).items()
    assert not FIXED[name].keys() & card.options.keys()
    assert json.dumps(card.serving) in how_to_serve(card, "made")


def test_a_fixed_effort_is_still_set_by_a_request_to_vllm() -> None:
    tokenizer = make_tokenizer("gptoss", TEMPLATES["gptoss"])
    fix_template_arguments(tokenizer, {"reasoning_effort": "high"})
    text = how_to_serve(template_card(get_renderer(tokenizer)), "made")
    assert "`reasoning_effort` in a request sets" in text


def test_an_effort_that_a_template_only_prints_is_no_switch_of_thinking_once_it_is_fixed() -> None:
    tokenizer = make_tokenizer("", PRINTS_EFFORT)
    assert find_rendering(tokenizer).modes.keys() == {"off", "on"}
    assert "switches thinking" in (argument_fault(tokenizer, {"reasoning_effort": True}) or "")
    assert argument_fault(tokenizer, {"reasoning_effort": "high"}) is None
    fix_template_arguments(tokenizer, {"reasoning_effort": "high"})
    assert get_renderer(tokenizer).rendering.modes == {"plain": {}}
    assert get_renderer(tokenizer).render(ASK, generation=True).startswith("<|system|>effort high\n")


@pytest.fixture
def effort_folder(model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Return the folder of a tiny random model with the chat template of gpt-oss."""
    own = make_tokenizer("gptoss", TEMPLATES["gptoss"])
    ends = {"vocab_size": len(own), "eos_token_id": own.stated_ends, "pad_token_id": own.pad_token_id}
    folder = write_model(tmp_path / "model", **ends, max_position_embeddings=1024)
    own.save_pretrained(folder)
    return folder


def test_a_run_with_fixed_arguments_ends_in_an_adapter_that_is_proved_and_keeps_them(
    effort_folder: Path, tmp_path: Path
) -> None:
    spec = write_run(effort_folder, tmp_path)
    spec = replace(
        spec, recipe=replace(spec.recipe, max_seq_length=1024), template_arguments={"reasoning_effort": "low"}
    )
    with pytest.raises(InvalidRecipe, match="does not read effort"):
        run(replace(spec, template_arguments={"effort": "low"}), tmp_path / "none", lambda message: None)
    run(spec, tmp_path / "out", lambda message: None)

    adapter = tmp_path / "out" / "adapter"
    manifest = json.loads((adapter / "manifest.json").read_text())
    assert manifest["proof"]["difference_to_base"] > 0
    assert manifest["rendering"]["arguments"] == {"reasoning_effort": "low"}
    loaded: Any = AutoTokenizer.from_pretrained(adapter)
    assert "Reasoning: low" in loaded.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    assert '`{"reasoning_effort": "low"}`' in (adapter / "README.md").read_text()

    merged = tmp_path / "merged"
    save_merged(load_base(effort_folder), adapter, merged)
    again: Any = AutoTokenizer.from_pretrained(merged)
    assert "Reasoning: low" in again.apply_chat_template(ASK, add_generation_prompt=True, tokenize=False)
    assert get_renderer(load_base(merged).tokenizer).rendering.arguments == {"reasoning_effort": "low"}


def test_check_model_tries_the_template_with_them(effort_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(["check-model", str(effort_folder), "--template-arguments", arguments])
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    status, told = check('{"reasoning_effort": "high"}')
    assert status == 0
    assert "rendered with reasoning_effort='high': the adapter's own template does so by itself" in told
    assert "also read: builtin_tools, model_identity;" in told
    assert check('{"effort": "high"}')[1].startswith("invalid_model: template_arguments: the chat template does not")
    assert check('["high"]')[1].startswith("invalid_recipe: template_arguments: give one JSON object")
