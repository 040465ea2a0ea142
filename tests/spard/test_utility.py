from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch

from spard.config.extensions import LIKELIHOOD_SCORERS
from spard.data.chat import encode
from spard.data.rows import Prompt, read_prompts
from spard.errors import InvalidData
from spard.evaluation.ask import in_memory, likeliest
from spard.evaluation.scorers import Mark, can_run_programs, extract_program, mark_reply, passes_tests
from spard.models.base import Base
from tests.spard.parts import chat

RIGHT, WRONG, INVALID = Mark(True), Mark(False), Mark(False, "invalid")
TESTS = "assert double(2) == 4\nassert double(-1) == -2"
WAIT_S = 60.0
needs_sandbox = pytest.mark.skipif(not can_run_programs(), reason="the kernel gives no namespaces here")


@pytest.mark.parametrize(
    ("scorer", "reply", "answer", "mark"),
    [
        ("gsm8k", "16 - 3 - 4 = 9, so 9 * 2 = $18.", "9 * 2 = 18\n#### 18", RIGHT),
        ("gsm8k", "She has 1,234.50 dollars", "#### 1234.5", RIGHT),
        ("gsm8k", "It is 1234", "#### 1,234", RIGHT),
        ("gsm8k", "It is 7", "#### 7", RIGHT),
        ("gsm8k", "18 first, then -18", "#### 18", WRONG),
        ("gsm8k", "It is 18.\nQuestion: What is 2 + 2? 4", "#### 18", RIGHT),
        ("gsm8k", "I do not know", "#### 18", INVALID),
        ("gsm8k_strict", "So 17.\n#### 18\n#### 19", "#### 18", RIGHT),
        ("gsm8k_strict", "#### -1,000.", "#### -1000", RIGHT),
        ("gsm8k_strict", "The answer is 18", "#### 18", INVALID),
        ("openbookqa", "fact: plants grow\n\nthe correct answer is answer3", "answer3", RIGHT),
        ("openbookqa", "Answer 2", "the correct answer is answer2", RIGHT),
        ("openbookqa", "answer1? No, answer3.", "answer3", Mark(True, "ambiguous")),
        ("openbookqa", "answer3? No, answer1.", "answer3", Mark(False, "ambiguous")),
        ("openbookqa", "answer3, yes, answer3", "3", RIGHT),
        ("openbookqa", "answer12", "answer1", INVALID),
        ("sst2", "Positive.", "positive", RIGHT),
        ("sst2", "It is negative, very negative", "positive", WRONG),
        ("sst2", "positive or negative", "positive", INVALID),
        ("sst2", "good", "positive", INVALID),
        ("exact", "Paris!", "paris", RIGHT),
        ("mbpp", "", TESTS, INVALID),
    ],
)
def test_a_reply_gets_its_mark(scorer: str, reply: str, answer: str, mark: Mark) -> None:
    assert mark_reply(scorer, reply, answer) == mark


@pytest.mark.parametrize(
    "reply",
    [
        "Here:\n```python\nx = 1\n```\nand\n```\ny\n```",
        "```\nx = 1\n",
        "[BEGIN]\nx = 1\n[DONE]\nmore",
        "x = 1\n[DONE]",
        "  x = 1  ",
    ],
)
def test_the_program_of_a_reply_is_found(reply: str) -> None:
    assert extract_program(reply) == "x = 1"


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "mark"),
    [
        ("def double(x):\n    return 2 * x", RIGHT),
        ("import math, re, collections\ndef double(x): return x + x", RIGHT),
        ("def double(x): return x * x", WRONG),
        ("def double(x) return", WRONG),
        ("raise SystemExit(0)", WRONG),
        ("import os; os._exit(0)", WRONG),
        ("print('x' * 10_000_000)\ndef double(x): return 2 * x", RIGHT),
        ("x = 'a' * (1 << 30)\ndef double(x): return 2 * x", WRONG),
    ],
)
def test_a_program_is_right_when_it_passes_its_tests(program: str, mark: Mark) -> None:
    assert mark_reply("mbpp", f"```python\n{program}\n```", TESTS) == mark


@needs_sandbox
def test_a_program_without_end_is_stopped() -> None:
    assert not passes_tests("import time\ntime.sleep(600)", "", timeout_s=0.2)  # in the end it would have passed


@needs_sandbox
def test_a_program_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert passes_tests("import socket", "socket.socket", timeout_s=WAIT_S)
        assert not passes_tests(
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)", "", timeout_s=WAIT_S
        )


@needs_sandbox
def test_a_program_cannot_change_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("here")
    kept.chmod(0o666)

    assert not passes_tests(f"open({str(kept)!r}, 'w').write('gone')", "", timeout_s=WAIT_S)
    assert not passes_tests(f"import os; os.unlink({str(kept)!r})", "", timeout_s=WAIT_S)
    assert kept.read_text() == "here"


@needs_sandbox
def test_a_program_cannot_reach_other_processes() -> None:
    assert not passes_tests(f"import os; os.kill({os.getpid()}, 0)", "", timeout_s=WAIT_S)
    assert not passes_tests(f"open('/proc/{os.getpid()}/environ').read()", "", timeout_s=WAIT_S)


@needs_sandbox
def test_a_program_does_not_see_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "sesame")

    assert passes_tests("import os", "assert 'SECRET' not in os.environ", timeout_s=WAIT_S)


def test_the_likeliest_choice_is_the_one_with_the_least_loss(base: Base) -> None:
    choices = ("yes", "no", "perhaps so", "never")

    def log_likelihood(choice: str) -> float:
        row = encode(base.tokenizer, chat("Is it?", choice), 256)
        labels = [i for i, label in enumerate(row.labels) if label >= 0][:-1]  # without the end of the turn
        with torch.inference_mode():
            log_p = base.model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
        return sum(float(log_p[i - 1, row.ids[i]]) for i in labels)

    by_sum = max(choices, key=log_likelihood)
    by_byte = max(choices, key=lambda choice: log_likelihood(choice) / len(choice))
    asked = [Prompt("Is it?", "yes", None, scorer, choices) for scorer in LIKELIHOOD_SCORERS]

    assert likeliest(base.model, base.tokenizer, asked) == [by_sum, by_byte]


def test_choices_are_weighed_under_the_system_prompt_that_a_model_is_served_with(base: Base) -> None:
    choices = tuple("abcdefghijklmnopqrstuvwxyz")
    asked = [Prompt(f"Question {i}?", "a", None, "likelihood", choices) for i in range(4)]
    under = [Prompt(f"Say no.\n\n{each.prompt}", "a", None, "likelihood", choices) for each in asked]
    base.tokenizer.chat_template = (
        "{% for m in messages if m['role'] != 'system' %}<|user|>{{ m['content'] }}{% endfor %}"
    )

    found = in_memory(base.model, base.tokenizer, "Say no.").choose(asked)

    assert found == likeliest(base.model, base.tokenizer, under)
    assert found != likeliest(base.model, base.tokenizer, asked)


def test_batches_do_not_change_the_choice(base: Base) -> None:
    asked = [Prompt(f"Question {i}?", "a", None, "likelihood", ("a", "bb", "c" * i)) for i in range(1, 9)]

    assert likeliest(base.model, base.tokenizer, asked, 1) == likeliest(base.model, base.tokenizer, asked, 7)


def rows(tmp_path: Path, text: str) -> list[Prompt]:
    path = tmp_path / "suite.jsonl"
    path.write_text(text)
    return read_prompts(path)


def test_a_row_names_its_scorer(tmp_path: Path) -> None:
    row = '{"prompt": "Is it?", "answer": "yes", "scorer": "likelihood", "choices": ["yes", "no"]}'

    assert rows(tmp_path, row) == [Prompt("Is it?", "yes", None, "likelihood", ("yes", "no"))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a", "scorer": "vibes"}', "unknown scorer 'vibes'; use one of exact, contains, gsm8k"),
        ('{"prompt": "a", "scorer": "likelihood", "answer": "a"}', "needs choices, and the answer is not one of them"),
        ('{"prompt": "a", "scorer": "likelihood", "answer": "a", "choices": ["b"]}', "the answer is not one of them"),
        ('{"prompt": "a", "choices": "ab"}', "must be a list of texts"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        rows(tmp_path, row)
