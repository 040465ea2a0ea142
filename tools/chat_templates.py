"""Checks which chat templates of other packages are trained and served identically, conversation by conversation.

python -m tools.chat_templates [FOLDER]  prints the table for the templates of the installed TRL, or of a folder

No package contains the tokenizers of these models, so each template gets a tokenizer that knows its control tokens; the
stop tokens are those that the model states. A cell has the number of samples of a conversation, or the reason why it is
refused. Everything trained is compared: the learned text with the assistant's words, the tokens before it with the
served prompt, and both with transformers' own rendering of the template in the adapter's archive.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spard.data.chat import NO_LOSS, EncodedSample, encode, get_renderer, render_prompt
from spard.data.renderer import self_rendering
from spard.data.rows import Example, Message, is_learned
from spard.errors import SpardError

# By prefix of a template's name: the stop tokens of its model, the end token first.
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "command": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<eos>"),
    "gemma4": ("<turn|>", "<eos>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "idefics": ("<end_of_utterance>", "</s>"),
    "smolvlm": ("<end_of_utterance>", "</s>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "mistral": ("</s>",),
    "phi": ("<|end|>", "<|endoftext|>"),
    "": ("<|im_end|>", "<|endoftext|>"),
}
_CONTROL = re.compile(
    r"<\|[A-Za-z0-9_]+\|>|<｜[^｜<>' ]+｜>|<(?:start|end)_of_turn>|<\|?turn\|?>|<end_of_utterance>|<[be]os>|</?s>"
)
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are no control tokens

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Which one."}}},
    },
}


def _asks(text: str) -> Message:
    return {"role": "user", "content": text}


def _says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def call_and_answer(number: int, text: str = "") -> tuple[Message, Message]:
    """Return a call of the tool and its result."""
    call = {"id": f"abcdefgh{number}", "type": "function"}
    call["function"] = {"name": "weather", "arguments": {"city": f"Rome {number}"}}  # type: ignore[assignment]
    answer = {"role": "tool", "tool_call_id": call["id"], "name": "weather", "content": f"{number} degrees"}
    return _says(text, tool_calls=[call]), answer


CONVERSATIONS = {
    "one turn": Example((_asks("Hi"), _says("Hello there.")), 1),
    "system": Example(({"role": "system", "content": "Be kind."}, _asks("Hi"), _says("Hello.")), 1),
    "three turns": Example(
        (_asks("q1"), _says("<b>one</b>"), _asks("q2"), _says("two"), _asks("q3"), _says("three")), 1
    ),
    "tools, two rounds": Example(
        (_asks("w?"), *call_and_answer(1), _says("It is 1."), _asks("and?"), *call_and_answer(2), _says("It is 2.")),
        1,
        (TOOL,),
    ),
    "text beside a call": Example((_asks("w?"), *call_and_answer(1, "Let me look."), _says("It is 1.")), 1, (TOOL,)),
    "reasoning": Example(
        (
            *(_asks("q1"), _says("one", reasoning_content="because")),
            *(_asks("q2"), _says("two", reasoning_content="hence")),
        ),
        1,
    ),
    "weight 0 first": Example((_asks("q1"), _says("one", weight=0), _asks("q2"), _says("two")), 1),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for a conversation: its number of samples, or a refusal; `faults` are illegal differences."""

    samples: int = 0
    refusal: str = ""
    faults: tuple[str, ...] = ()

    @property
    def cell(self) -> str:
        """The result in a word or two."""
        return "FAULT" if self.faults else str(self.samples) if self.samples else self.refusal


def trl_templates() -> dict[str, str]:
    """Return the chat templates of the installed TRL by name."""
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("TRL is not installed")
    return read_templates(Path(found.origin).parent / "chat_templates")


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates in a folder by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def make_tokenizer(name: str, template: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the template's control tokens and the model's stop tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    stops = next(tokens for begin, tokens in STOPS.items() if name.startswith(begin))
    control = {*_CONTROL.findall(template), *stops, "<|pad|>", "<bos>"}
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(control)])
    made.add_tokens([AddedToken(token, normalized=False) for token in _PLAIN if token in template])
    make: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = make(
        tokenizer_object=made, eos_token=stops[0], pad_token="<|pad|>", bos_token="<bos>", chat_template=template
    )
    found.stated_ends = [found.convert_tokens_to_ids(token) for token in stops]
    return found


def outcome(tokenizer: Any, conversation: Example, *, is_exact: bool = True) -> Outcome:
    """Compare a conversation's tokens in training with the served ones and with transformers' own rendering.

    Unless `is_exact`, white space around an answer may be missing, because some templates strip it.
    """
    try:
        encoded = encode(tokenizer, conversation, 1 << 20)
    except SpardError as error:
        return Outcome(refusal=error.message.removeprefix("line 1: the model's chat template "))
    faults = [*_learned_faults(tokenizer, conversation, encoded, is_exact=is_exact)]
    faults += [*_prompt_faults(tokenizer, conversation, encoded)]
    return Outcome(len(encoded.samples), faults=tuple(faults))


@cache
def outcomes(name: str, template: str) -> tuple[Outcome, ...]:
    """Return what becomes of each of `CONVERSATIONS` under a template, computed once a process."""
    tokenizer = make_tokenizer(name, template)
    return tuple(outcome(tokenizer, each) for each in CONVERSATIONS.values())


def _learned_faults(tokenizer: Any, conversation: Example, encoded: EncodedSample, *, is_exact: bool) -> Iterator[str]:
    """Yield differences between the learned text and the assistant's words with their end token."""
    renderer = get_renderer(tokenizer)
    turns = [turn for turn in conversation.messages if is_learned(turn)]
    runs = [run for sample in encoded.samples for run in _learned_runs(sample)]
    if len(runs) != len(turns):
        yield f"{len(runs)} answers are learned of {len(turns)}"
        return
    for turn, (_, ids) in zip(turns, runs, strict=True):
        text = tokenizer.decode(ids)
        calls = [call["function"] for call in turn.get("tool_calls") or ()]
        said = turn["content"] if is_exact else turn["content"].strip()
        words = [said, turn.get("reasoning_content") or "", *(call["name"] for call in calls)]
        words += [str(value) for call in calls for value in call["arguments"].values()]
        if missing := [word for word in words if word not in text]:
            yield f"{missing[0]!r} is not learned in {text!r}"
        if ids[-1] not in renderer.rendering.stops:
            yield f"{text!r} does not end at a stop token"


def _prompt_faults(tokenizer: Any, conversation: Example, encoded: EncodedSample) -> Iterator[str]:
    """Yield differences between the tokens before an answer and the served prompt."""
    renderer = get_renderer(tokenizer)
    places = [i for i, turn in enumerate(conversation.messages) if is_learned(turn)]
    runs = [(sample, at) for sample in encoded.samples for at, _ in _learned_runs(sample)]
    for place, (sample, at) in zip(places, runs, strict=False):
        before = conversation.messages[:place]
        mode = renderer.answer_mode(conversation.messages[place])
        prompt = render_prompt(tokenizer, before, conversation.tools, mode=mode)
        if list(sample.ids[:at]) != prompt:
            yield f"the prompt before answer {place} is served otherwise than it is trained"
        if _by_transformers(tokenizer, before, conversation.tools, mode) != prompt:
            yield f"transformers renders the prompt before answer {place} otherwise"


def _by_transformers(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Message], mode: Any) -> list[int]:
    """Return a prompt as transformers renders it from the template in the adapter's archive."""
    renderer = get_renderer(tokenizer)
    source = self_rendering(renderer, mode)[
        "tool_use" if tools and "tool_use" in template_sources(tokenizer) else "default"
    ]
    plain = [{key: value for key, value in turn.items() if key != "weight"} for turn in messages]
    asked: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
    text = tokenizer.apply_chat_template(plain, chat_template=source, **asked)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def template_sources(tokenizer: Any) -> dict[str, str]:
    """Return a tokenizer's chat templates by name."""
    template = tokenizer.chat_template
    return template if isinstance(template, dict) else {"default": template}


def _learned_runs(sample: EncodedSample) -> list[tuple[int, list[int]]]:
    """Return (start, tokens) of each run of learned tokens."""
    found: list[tuple[int, list[int]]] = []
    for at, label in enumerate(sample.labels):
        if label == NO_LOSS:
            continue
        if not found or found[-1][0] + len(found[-1][1]) != at:
            found.append((at, []))
        found[-1][1].append(label)
    return found


def table(templates: dict[str, str]) -> list[tuple[str, str, list[Outcome]]]:
    """Return (name, facts, outcome of each conversation) for each template."""
    rows = list[tuple[str, str, list[Outcome]]]()
    for name, template in templates.items():
        tokenizer = make_tokenizer(name, template)
        try:
            rendering = get_renderer(tokenizer).rendering
        except SpardError as error:
            rows.append((name, f"refused: {error.message}", []))
            continue
        facts = [
            f"thinking {rendering.default} by default" if rendering.default != "plain" else "",
            f"closed with `{rendering.closing}`" if rendering.closing else "",
        ]
        rows.append((name, ", ".join(filter(None, facts)), [*outcomes(name, template)]))
    return rows


def markdown(rows: Sequence[tuple[str, str, list[Outcome]]]) -> str:
    """Return the table as Markdown: templates with equal results in one row, each refusal as a numbered note below."""
    notes: dict[str, int] = {}
    lines = [f"| template | | {' | '.join(CONVERSATIONS)} |", f"|---|---|{'---|' * len(CONVERSATIONS)}"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, facts, found in rows:
        cells = []
        for each in found:
            if each.refusal:
                number = notes.setdefault(each.refusal, len(notes) + 1)
                cells.append(f"({number})")
            else:
                cells.append(each.cell)
        alike.setdefault((facts, *(cells or [""] * len(CONVERSATIONS))), []).append(name)
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in alike.items()]
    told = [f"{number}. The template {text.replace('|', '&#124;')}" for text, number in notes.items()]
    return "\n".join([*lines, "", *told]) + "\n"


_PAGE = """# Chat templates

<!-- generated by `python -m tools.references`; do not edit -->

A model is trained on what it is served with: each answer follows exactly the tokens that serving puts before it, and is
learned from its first token to the end token at which engines stop. `python -m tools.chat_templates` makes the table
from the {count} chat templates in the package `trl` {version}; a test repeats it.

A number is the number of samples that a conversation becomes: one if the template only appends, or one for each answer
if it rewrites earlier turns. A number in brackets refers to a note below the table: the row is refused. "Closed with"
names the end token that is added to each answer, because the template writes none at which engines stop. No package
contains the models' own tokenizers; each one here knows the control tokens that its template writes.

{table}"""


def page() -> str:
    """Return the page's text."""
    found = trl_templates()
    return _PAGE.format(count=len(found), version=version("trl"), table=markdown(table(found)))


def main(argv: Sequence[str]) -> int:
    """Print the table; the exit status is 1 if training and serving differ anywhere."""
    rows = table(read_templates(Path(argv[0])) if argv else trl_templates())
    sys.stdout.write(markdown(rows))
    faults = [f"{name}: {fault}" for name, _, found in rows for each in found for fault in each.faults]
    sys.stdout.write("\n".join([*faults, f"{len(faults)} differences"]) + "\n")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
