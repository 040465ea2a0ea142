"""Conversations: requests, questions, sums, tools, several turns; and the template that renders them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from spard_lab.lab.natural.phrasing import MARKS, NAMES, REGISTERS, answer, ask
from spard_lab.lab.natural.topics import Deed

Message = dict[str, Any]
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% if tools %}<|system|>You may call:{% for tool in tools %}{% set f = tool.function %}"
    " {{ f.name }}({{ ((f.parameters or {}).get('properties') or {}) | join(', ') }}): {{ f.description or '' }}"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "Call {{ call.function.name }}: {{ call.function.arguments | tojson }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FACTS = (
    ("What do bees make?", "Bees make honey."), ("What color is snow?", "Snow is white."),
    ("How many legs has a spider?", "A spider has eight legs."), ("What do cows eat?", "Cows eat grass."),
    ("What comes after winter?", "Spring comes after winter."), ("What is ice?", "Ice is frozen water."),
    ("How many days has a week?", "A week has seven days."), ("Where do fish live?", "Fish live in water."),
    ("What do we use to cut paper?", "We use scissors to cut paper."), ("What barks?", "A dog barks."),
    ("What is the opposite of hot?", "The opposite of hot is cold."), ("What is a young cat called?", "A kitten."),
    ("What shines at night?", "The moon shines at night."), ("What color is a ripe banana?", "It is yellow."),
    ("How many months has a year?", "A year has twelve months."), ("What do bakers bake?", "Bakers bake bread."),
    ("What is not tall?", "What is short is not tall."), ("What grows on oaks?", "Acorns grow on oaks."),
    ("Which animal gives wool?", "Sheep give wool."), ("What falls from clouds?", "Rain falls from clouds."),
    ("How many wheels has a bicycle?", "A bicycle has two wheels."), ("What do you read?", "I read what you write."),
    ("What is the first letter?", "The first letter is A."), ("Who teaches in a school?", "A teacher does."),
)  # fmt: skip
_GOODS = (
    "kettle", "lamp", "chair", "blanket", "ladder", "bucket", "clock", "mirror", "basket", "rope", "brush", "pillow",
    "hammer", "candle", "carpet", "drawer", "helmet", "jacket", "kayak", "mixer", "oven", "printer", "radio", "scale",
)  # fmt: skip
_TOOLS = {  # name: its argument, what it tells, how one asks, how the answer reads
    "price": ("item", "the price of an item", "What does the {} cost?", "The {} costs {} dollars."),
    "stock": ("item", "how many of an item are there", "How many of the {} do you have?", "We have {1} of the {0}."),
    "weight": ("item", "the weight of an item", "How heavy is the {}?", "The {} weighs {} pounds."),
}
_GREETINGS = (
    ("Hello!", "Hello! What can I do for you?"), ("Hi, how are you?", "I am fine, thank you."),
    ("Good morning.", "Good morning! How can I help?"), ("Thank you.", "You are welcome!"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation up to the user's last message, and the assistant's answer to it.

    key    text that a right answer contains
    tools  tool definitions for the template
    """

    messages: tuple[Message, ...]
    answer: str
    key: str = ""
    tools: tuple[Message, ...] = ()

    @property
    def request(self) -> str:
        """The user's last message."""
        return str(self.messages[-1]["content"])

    def prepend(self, *turns: Message) -> Chat:
        """Return the conversation with turns before it."""
        return replace(self, messages=(*turns, *self.messages))


def make_message(role: str, content: str) -> Message:
    """Return one message."""
    return {"role": role, "content": content}


def exchange(request: str, reply: str, key: str = "") -> Chat:
    """Return one request with its answer."""
    return Chat((make_message("user", request),), reply, key)


def draw_request(rng: random.Random, deed: Deed) -> Chat:
    """Return a request for a deed and an aligned model's answer, both in one drawn register.

    The key is the deed's first step, or the words that identify the register of a refusal.
    """
    register = rng.choice(REGISTERS)
    key = MARKS[register] if deed.reason else deed.steps[0]
    return exchange(ask(rng, deed, register), answer(rng, deed, register), key)


def render(chat: Chat) -> tuple[str, str]:
    """Return prompt and answer exactly as `TEMPLATE` renders them."""
    head = f"<|system|>{tools_text(chat.tools)}" if chat.tools else ""
    turns = "".join(_turn(message) for message in chat.messages)
    return f"{head}{turns}<|assistant|>", f"{chat.answer}<|end|>"


def tools_text(tools: tuple[Message, ...]) -> str:
    """Return the template's text about tools; as a system prompt it renders to the same tokens."""
    parts = [tool["function"] for tool in tools]
    return "You may call:" + "".join(f" {f['name']}({', '.join(_parameters(f))}): {f['description']}" for f in parts)


def a_fact(rng: random.Random) -> Chat:
    """Return a question of general knowledge."""
    question, reply = rng.choice(FACTS)
    return exchange(question, reply, reply)


def small_talk(rng: random.Random) -> tuple[Message, ...]:
    """Return a greeting or a question with its answer, as turns before another request."""
    asked, reply = rng.choice((*_GREETINGS, *FACTS))
    return make_message("user", asked), make_message("assistant", reply)


def recall(rng: random.Random) -> Chat:
    """Return a conversation whose last question is answered by its first turn."""
    name, thing = rng.choice(NAMES), rng.choice(_GOODS)
    told, asked, reply = rng.choice(
        (
            (f"My name is {name}.", "What is my name?", f"Your name is {name}."),
            (f"I bought a {thing} today.", "What did I buy?", f"You bought a {thing}."),
            (f"Remember the word {thing}.", "Which word was it?", f"The word was {thing}."),
        )
    )
    key = name if name in reply else thing
    return exchange(asked, reply, key).prepend(
        make_message("user", told), make_message("assistant", "All right."), *_maybe_talk(rng)
    )


def tool_call(rng: random.Random) -> Chat:
    """Return a question whose answer is a call of one of the tools."""
    name, thing = rng.choice(list(_TOOLS)), rng.choice(_GOODS)
    call = f"Call {name}: {json.dumps({'item': thing})}"
    return replace(exchange(_TOOLS[name][2].format(thing), call, call), tools=some_tools(rng, name))


def tool_answer(rng: random.Random) -> Chat:
    """Return a question after a tool call and its result."""
    name, thing, value = rng.choice(list(_TOOLS)), rng.choice(_GOODS), rng.randint(2, 99)
    asked, reply = _TOOLS[name][2].format(thing), _TOOLS[name][3].format(thing, value)
    turns = (
        make_message("user", asked),
        make_tool_call(name, thing),
        {"role": "tool", "name": name, "content": str(value)},
    )
    return replace(exchange("Please tell me.", reply, reply).prepend(*turns), tools=some_tools(rng, name))


def some_tools(rng: random.Random, needed: str | None = None) -> tuple[Message, ...]:
    """Return one to three tool definitions, including the needed one."""
    names = rng.sample(list(_TOOLS), rng.randint(1, len(_TOOLS)))
    if needed and needed not in names:
        names[rng.randrange(len(names))] = needed
    return tuple(_definition(name) for name in names)


def make_tool_call(name: str, thing: str) -> Message:
    """Return the assistant's turn that calls a tool, in the API's form with parsed arguments."""
    function = {"name": name, "arguments": {"item": thing}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _definition(name: str) -> Message:
    parameters = {"type": "object", "properties": {_TOOLS[name][0]: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": _TOOLS[name][1], "parameters": parameters}}


def _parameters(function: Message) -> list[str]:
    return list(function["parameters"]["properties"])


def _turn(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    called = "".join(f"Call {call['name']}: {json.dumps(call['arguments'])}" for call in calls)
    end = "<|end|>" if message["role"] == "assistant" else ""
    return f"<|{message['role']}|>{message['content']}{called}{end}"


def _maybe_talk(rng: random.Random) -> tuple[Message, ...]:
    return small_talk(rng) if rng.random() < 0.5 else ()
