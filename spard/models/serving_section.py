"""The section "How to serve" of a model card: how a server must render the model's chat template.

The archive's template has the arguments and the date of training as its defaults, where that is possible. Servers that
pass nothing to it, as vLLM and transformers, then need no arguments. llama.cpp sets some names by itself, whatever the
template's defaults are, so it always gets theirs, and so does mlx-lm. With the line that is written here, the template
engine of llama.cpp 0.4.0 gave the prompts of training for all 38 text templates of TRL 1.16, except those that TRL
changed for its own training; without the arguments in it, for 17 of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from spard.data.chat_template import DATE
from spard.data.template_card import TemplateCard

# Names that llama-server 0.4.0 sets in every rendering: today's date, thinking if the template knows it, and four that
# keep the reasoning of earlier turns (`common_chat_extra_context`, `caps_apply_preserve_reasoning`).
_LLAMA_SETS = (
    *("date_string", "enable_thinking"),
    *("preserve_thinking", "clear_thinking", "truncate_history_thinking", "drop_thinking"),
)
_HARMONY = ("gpt_oss",)  # model types for which vLLM 0.32 writes prompts itself (`OnlineRenderer.use_harmony`)


def how_to_serve(card: TemplateCard, folder: str, suites: Sequence[str] = (), model_type: str | None = None) -> str:
    """Return the section for a model whose archive is unpacked as `folder` and that was audited with these suites.

    `model_type` is that of the base model's config.json, None if it has none.
    """
    is_harmony = model_type in _HARMONY
    parts = [_opening(card, is_harmony=is_harmony), *_thinking(card, suites), *_date(card)]
    parts += [*_options(card, is_harmony=is_harmony), _end(card), _vllm_harmony(card) if is_harmony else _vllm(card)]
    parts += [_transformers(card), _llama_cpp(card, folder)]
    return "\n\n".join(["## How to serve", *parts])


def _opening(card: TemplateCard, *, is_harmony: bool) -> str:
    if _must_be_passed(card):
        return f"The chat template must be rendered with {_code(card.serving)}, as it was in training."
    nothing = "nothing to pass" + (
        ", except where a line below says so" if is_harmony or _set_by_llama_cpp(card) else ""
    )
    if card.renders_itself:
        has = f"these defaults, {_code(card.serving)}" if card.serving else "the date of training as its default"
        return f"The archive's template has {has}: {nothing}."
    return f"The archive's template was rendered without arguments in training: {nothing}."


def _thinking(card: TemplateCard, suites: Sequence[str]) -> Iterator[str]:
    """Yield how the model was asked and how to ask otherwise, if the template has modes of thinking."""
    if len(card.modes) < 2:
        return
    other = next(mode for mode in card.modes if mode != card.asked)
    is_measured = any(suite.endswith(f"with thinking {other}") for suite in suites)
    also = (
        f"It was also audited with thinking {other}" if is_measured else f"With thinking {other} nothing was measured"
    )
    how = "audited" if suites else "trained"
    yield (
        f"**Thinking** can be switched. The model was {how} with thinking {card.asked}: "
        f"{_code(card.modes[card.asked])}. {_code(card.modes[other])} switches it {other}. {also}."
    )


def _date(card: TemplateCard) -> Iterator[str]:
    date = f"{DATE:%d %B %Y}"
    if not card.writes_date and "date_string" not in card.arguments:
        return
    if card.writes_date and not card.renders_itself:
        yield (
            f"**Date.** The template writes today's date in a form that it computes, so the archive cannot have it as "
            f"a default. In training it was {date}; on other days the prompts differ."
        )
        return
    yield f"**Date.** The template writes a date. It is {date}, as it was in training."


def _options(card: TemplateCard, *, is_harmony: bool) -> Iterator[str]:
    """Yield what the template reads beside its arguments, and which servers set which name without being told."""
    if card.options:
        names = ", ".join(f"`{name}`" for name in card.options)
        yield (
            f"**Left at the template's own defaults**: {names}. A server that sets another value of one writes "
            "prompts on which the model was neither trained nor measured."
        )
    read = {*card.options, *card.serving}.union(*card.modes.values())
    if read & {"reasoning_effort", "enable_thinking"} and not is_harmony:
        yield "In vLLM, `reasoning_effort` in a request sets `reasoning_effort` and `enable_thinking`: send none."
    if "enable_thinking" in card.serving:
        given = quote(json.dumps({"enable_thinking": card.serving["enable_thinking"]}))
        yield f"mlx-lm sets `enable_thinking` by itself: start its server with `--chat-template-args {given}`."


def _end(card: TemplateCard) -> str:
    added = ", which was added to each learned answer: the template writes none" if card.is_closed else ""
    stops = ", ".join(f"`{each}`" for each in card.stops)
    return f"**End.** An answer ends with `{card.end}`{added}. Servers must stop at {stops}."


def _vllm(card: TemplateCard) -> str:
    if not _must_be_passed(card):
        return "**vLLM**: nothing to pass."
    given = json.dumps(card.serving)
    return (
        f"**vLLM**: start it with `--default-chat-template-kwargs {quote(given)}`, or put "
        f'`"chat_template_kwargs": {given}` into each request.'
    )


def _vllm_harmony(card: TemplateCard) -> str:
    """Return how to ask a model in vLLM whose chat API writes prompts without the chat template.

    `findings/gpt-oss-template-tools.sh` compares the two.
    """
    effort = card.serving.get("reasoning_effort")
    asks = f'put `"reasoning_effort": {json.dumps(effort)}` into' if effort else "put no `reasoning_effort` into"
    return (
        "**vLLM** (0.32) does not use the chat template for this model: `/v1/chat/completions` and `/v1/responses` "
        "write the prompt by the library openai_harmony and ignore `chat_template_kwargs`. Start it with "
        f"`VLLM_SYSTEM_START_DATE={DATE:%Y-%m-%d}` in its environment, else the prompt has today's date, and {asks} "
        "each request. System prompts, tools and their results are still other text than in training. To ask the model "
        "as it was measured, send the token ids of the transformers line below to `/v1/completions`."
    )


def _transformers(card: TemplateCard) -> str:
    given = "".join(f", {name}={value!r}" for name, value in (card.serving if _must_be_passed(card) else {}).items())
    call = f"tokenizer.apply_chat_template(messages, add_generation_prompt=True{given})"
    return f"**transformers**: `{call}`."


def _llama_cpp(card: TemplateCard, folder: str) -> str:
    given = {**(card.serving if _must_be_passed(card) else {}), **_set_by_llama_cpp(card)}
    words = ["llama-server", "-m", "MODEL.gguf", "--jinja"]
    # A GGUF file of the base model has the base model's template.
    words += ["--chat-template-file", quote(f"{folder}/chat_template.jinja")] if card.renders_itself else []
    words += ["--chat-template-kwargs", quote(json.dumps(given))] if given else []
    own = _set_by_llama_cpp(card)
    why = (
        f"It sets {' and '.join(f'`{name}`' for name in own)} itself, whatever a template's defaults are."
        if own
        else ""
    )
    return f"**llama.cpp** (0.4.0), after a conversion to GGUF:\n\n```\n{' '.join(words)}\n```\n\n{why}".rstrip()


def _must_be_passed(card: TemplateCard) -> bool:
    """Return True if servers must pass the arguments, because the archive's template does not have them."""
    return bool(card.serving) and not card.renders_itself


def _set_by_llama_cpp(card: TemplateCard) -> dict[str, object]:
    """Return the values of training for the names that llama-server sets by itself."""
    known = {**{name: value for name, value in card.options.items() if value is not None}, **card.serving}
    return {name: known[name] for name in _LLAMA_SETS if name in known}


def _code(arguments: Mapping[str, object]) -> str:
    return f"`{json.dumps(arguments)}`"
