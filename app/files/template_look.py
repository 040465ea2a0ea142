"""Inspect a base model's folder, tokenizer and chat template in a process of its own.

A chat template is a third-party program, and a tokenizer may be megabytes of JSON: an endless one, or one that needs
gigabytes, ends this process and nothing else. `python -m app.files.template_look FOLDER SECONDS` prints two lines of
JSON: the findings on the files, then the behavior of tokenizer and template. A third argument has the arguments that
the provider fixes for the template, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from app.errors import Unavailable
from app.files.tokenizer import LightTokenizer
from app.ops.processes import limit_cpu, limit_memory, python, safe_path
from spard.data import chat
from spard.data.template_arguments import argument_fault
from spard.data.template_card import template_card
from spard.data.tools import CONVERSATION
from spard.errors import SpardError, TemplateFault
from spard.models.folder.check import findings
from spard.models.folder.reading import Finding

CPU_S, WALL_S = 10.0, 180.0  # at low priority, so wall time may be far longer
_FILES_CPU_S = 60.0  # for reading the files: a sharded model's header may list millions of tensors
_NICE = 10
_BYTES = 2 << 30
_PASSED = frozenset({"HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "TZ"})
_ENDLESS = "its chat template takes too long to write a question and its answer: give one without such loops"
_SLOW = "its files take too long to be read: give a folder with the model's own files alone"
_HUGE = "its tokenizer or chat template takes too much memory for a question and its answer"


class TemplateLook(TypedDict):
    """The result for tokenizer and template.

    `fault` is a sentence; the other fields hold even if it is set. `argument_fault` says why the template's arguments
    cannot be fixed.
    """

    fault: str | None
    argument_fault: str | None
    has_tokenizer: bool
    has_template: bool
    has_end_token: bool
    tool_support: Mapping[str, bool] | None
    rendering: Mapping[str, object] | None
    card: CardJson | None


class ProbeJson(TypedDict):
    """An example conversation: its number of samples, its text with learned parts in brackets, or a refusal."""

    name: str
    samples: int
    text: str
    refusal: str


class CardJson(TypedDict):
    """What the chat template does to conversations, as sentences and examples."""

    lines: list[str]
    probes: list[ProbeJson]


@dataclass(frozen=True, slots=True)
class FolderLook:
    """The findings on a folder's files, and on its tokenizer and template; None without a `tokenizer.json`."""

    findings: list[Finding]
    template: TemplateLook | None


def inspect_folder(folder: Path, arguments: Mapping[str, object] | None = None) -> FolderLook:
    """Inspect a folder and render a conversation, in a process of its own.

    `arguments` are fixed for the chat template. Raises `Unavailable` if the process did not finish in time.
    """
    # Only these variables: the template's process must not see a key of the deployment.
    environment = safe_path({name: value for name, value in os.environ.items() if name in _PASSED})
    environment["TOKENIZERS_PARALLELISM"] = "false"
    try:
        done = subprocess.run(  # noqa: S603 - the command is ours
            python("app.files.template_look", str(folder), str(CPU_S), json.dumps(dict(arguments or {}))),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable("The model's chat template could not be tried in time; try again.") from None
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    is_slow = done.returncode == -signal.SIGXCPU
    if not lines:
        return FolderLook([Finding("unreadable", _SLOW if is_slow else _HUGE)], None)
    found = [Finding(**each) for each in lines[0]]
    return FolderLook(found, lines[1] if lines[1:] else _nothing(_ENDLESS if is_slow else _HUGE))


def _look(folder: Path, arguments: Mapping[str, object]) -> TemplateLook:
    try:
        tokenizer = LightTokenizer(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _nothing(f"its tokenizer cannot be read: {error}")
    found = _nothing(None)
    found["has_tokenizer"], found["has_template"] = True, tokenizer.chat_template is not None
    found["has_end_token"] = tokenizer.eos_token is not None and tokenizer.eos_token in tokenizer
    if not found["has_end_token"]:
        found["fault"] = "its tokenizer has no end token (eos_token), so that no answer would ever end"
        return found
    try:
        found["argument_fault"] = argument_fault(tokenizer, arguments)
        if found["argument_fault"]:
            return found
        chat.fix_template_arguments(tokenizer, arguments)
        renderer = chat.get_renderer(tokenizer)
        chat.encode_to_train(tokenizer, [CONVERSATION], chat.UNBOUNDED)
        found["tool_support"] = chat.tool_support(tokenizer)
        found["rendering"] = renderer.rendering.as_json()
        card = template_card(renderer)
        found["card"] = {"lines": list(card.lines()), "probes": [asdict(each) for each in card.probes]}  # type: ignore[typeddict-item]
    except TemplateFault as error:
        found["fault"] = f"its chat template {error.message}"
    except SpardError as error:
        found["fault"] = f"its chat template cannot write a question and its answer: {error.message}"
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: any exception is a fault of it
        why = (str(error).splitlines() or [""])[0][:300] or type(error).__name__
        found["fault"] = f"its chat template cannot write a question and its answer: {why}"
    return found


def _nothing(fault: str | None) -> TemplateLook:
    return {
        "fault": fault,
        "argument_fault": None,
        "has_tokenizer": False,
        "has_template": False,
        "has_end_token": False,
        "tool_support": None,
        "rendering": None,
        "card": None,
    }


def main() -> None:
    """Print what is found out about a model's folder and its chat template, as lines of JSON.

    The command's arguments are the folder, the CPU seconds that the template may take, and the template's own arguments
    as JSON.
    """
    os.nice(_NICE)
    limit_memory(_BYTES)
    limit_cpu(_FILES_CPU_S)
    folder = Path(sys.argv[1])
    try:
        # Printed at once, so that the findings on the files survive a template that ends the process.
        _print([asdict(each) for each in findings(folder)])
        limit_cpu(float(sys.argv[2]))
        _print(_look(folder, json.loads(sys.argv[3])) if (folder / "tokenizer.json").is_file() else None)
    except MemoryError:
        sys.exit(1)


def _print(found: object) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
