from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from app.move_in.comparison import MEASURES, PromptScores, Replies, agreement, is_exact, score, similarity
from app.move_in.replies import Prompt
from tests.app.move_in.conftest import HERE_KEY, Run
from tests.app.move_in.openai_stub import Stub, serve_stub

PROMPT = Prompt(messages=[{"role": "user", "content": "?"}], tools=[], source="f:1")


def longest_common(first: list[str], second: list[str]) -> int:
    """The textbook's table."""
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            longer = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else longer
    return table[-1][-1]


def test_similarity_is_the_longest_common_subsequence_of_words() -> None:
    source = random.Random(0)
    for _ in range(300):
        first, second = (source.choices("abcd", k=source.randrange(12)) for _ in range(2))
        both = len(first) + len(second)
        wanted = 2 * longest_common(first, second) / both if both else 1.0
        assert similarity(" ".join(first), " ".join(second)) == pytest.approx(wanted)


def test_similarity_of_words_that_one_can_count() -> None:
    assert similarity("The cat sat.", "the cat sat") == pytest.approx(6 / 7)
    assert (similarity("", ""), similarity("a", "")) == (1.0, 0.0)
    assert is_exact(" a\n", "a")
    assert not is_exact("A", "a")


def test_all_pairs_of_replies_count() -> None:
    replies = Replies("p", PROMPT, old=["a", "a", "b"], new=["a", "c"])
    found = score(replies, MEASURES["exact"])
    assert [found.new_old, found.old_old] == pytest.approx([1 / 3, 1 / 3])
    assert found.new_new == 0
    assert score(Replies("p", PROMPT, old=["a"], new=[]), MEASURES["exact"]) == PromptScores(None, None, None)


def test_a_model_that_is_the_old_one_is_not_told_from_it_and_another_one_is() -> None:
    source = random.Random(1)

    def noisy(words: str) -> list[str]:
        return [source.choice(words) for _ in range(3)]

    same = [Replies(str(i), PROMPT, noisy("ab"), noisy("ab")) for i in range(80)]
    other = [Replies(str(i), PROMPT, noisy("ab"), noisy("bc")) for i in range(80)]
    for replies, is_other in ((same, False), (other, True)):
        found = agreement([score(each, MEASURES["exact"]) for each in replies])
        assert found.is_below_floor == is_other
        assert found.old_old
        assert found.old_old.low < 0.5 < found.old_old.high


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_intervals_stay_on_the_scale_and_are_never_a_point(value: float) -> None:
    found = agreement([PromptScores(value, 1.0, None)] * 10)
    assert found.new_new is None
    for interval, least in ((found.new_old, 0.0), (found.difference, -1.0)):
        assert interval
        assert least <= interval.low <= interval.value <= interval.high <= 1
        assert interval.high - interval.low > 0.2
    assert agreement([PromptScores(1.0, None, None)]).difference is None
    (one,) = [agreement([PromptScores(0.0, 1.0, None)]).difference]
    assert one
    assert (one.low, one.high) == (-1, 1)


def move_account(run: Run) -> None:
    """The account is read, its model asked, and its job done here."""
    assert run("read")[0] == 0
    assert run("golden", "--replies", "2")[0] == 0
    assert run("file", "--model", "gpt-old=lab", "--wait")[0] == 0


def test_a_comparison_asks_the_new_model_the_same_and_shows_what_changed(
    account: Stub, service: Stub, run: Run, folder: Path
) -> None:
    account.say = lambda body, n: f"{body['messages'][-1]['content']} old {n if '0' in str(body['messages']) else 0}"
    service.say = lambda body, n: (
        "```\nnew" if "1" in str(body["messages"]) else f"{body['messages'][-1]['content']} old 0"
    )
    move_account(run)
    code, printed = run("compare", "--dry-run")
    assert (code, "8 requests" in printed) == (0, True)
    assert service.count("POST /chat/completions") == 0
    code, printed = run("compare")
    assert code == 0, printed
    sent = [body for body in service.bodies if "messages" in body]
    assert len(sent) == 8
    assert all((body["temperature"], body["max_completion_tokens"]) == (0, 512) for body in sent)

    (found,) = json.loads((folder / "comparison.json").read_text())
    exact = found["measures"]["exact"]
    assert exact["new_old"]["value"] == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert exact["old_old"]["value"] == pytest.approx(3 / 4)
    assert exact["difference"]["value"] == pytest.approx(-1 / 8)
    page = (folder / "comparison.md").read_text()
    assert "exactly what the old one said in 62.5 %" in page
    assert "### What changed: 2 of 4 prompts" in page
    assert "new:\n\n````text\n```\nnew\n````" in page
    assert page.index("And 1?") < page.index("And 0?")

    assert run("compare")[0] == 0
    assert len([body for body in service.bodies if "messages" in body]) == 8


def test_a_judge_is_asked_in_both_orders_and_once(account: Stub, service: Stub, run: Run, folder: Path) -> None:
    service.say = lambda body, n: "another word"

    def verdict(body: dict[str, object], n: int) -> str:
        texts = str(body["messages"])
        return "They differ.\nDIFFERENT" if "And 0" in texts else "No idea" if "And 1" in texts else "Both.\n**SAME**"

    move_account(run)
    with serve_stub(Stub(key="none", models=["j"], say=verdict)) as judge:
        asked = ("compare", "--judge-url", judge.url, "--judge-model", "j")
        assert run(*asked)[0] == 0
        assert judge.count("POST .*") == 8  # 4 pairs of different replies, in both orders
        assert run(*asked)[0] == 0
        assert judge.count("POST .*") == 8
    (found,) = json.loads((folder / "comparison.json").read_text())
    said = found["measures"]["judge"]
    assert (said["new_old"]["value"], said["old_old"]["value"], said["unscored"]) == (pytest.approx(2 / 3), 1.0, 1)
    assert "no verdict on 1 prompts" in (folder / "comparison.md").read_text()
    assert run("compare", "--judge-url", "http://127.0.0.1:9")[0] == 3


def test_what_cannot_be_compared_says_why(account: Stub, service: Stub, run: Run, folder: Path) -> None:
    run("read")
    assert run("compare")[1] == "spard: There are no golden replies; keep them with `spard move-in golden`.\n"
    run("golden", "--replies", "1")
    assert "no job here was filed for it" in run("compare")[1]
    service.ends = "failed"
    run("file", "--model", "gpt-old=lab", "--wait")
    code, printed = run("compare")
    assert (code, "is failed; The audit was not passed." in printed) == (1, True)
    code, printed = run("compare", "--pair", "ft:gpt-old:org:a:ftjob-a=not-served")
    assert code == 1
    assert "not-served does not answer: No such chat" in printed
    assert "Nothing can be compared" in (folder / "comparison.md").read_text()
    service.models.append("lab")
    code, printed = run("compare", "--pair", "ft:gpt-old:org:a:ftjob-a=lab")
    assert (code, "own noise is not known" in printed) == (0, True)


def test_keys_are_in_no_file_of_the_folder(account: Stub, service: Stub, run: Run, folder: Path) -> None:
    service.say = lambda body, n: f"my key is {HERE_KEY}"
    move_account(run)
    assert run("compare")[0] == 0
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"my key is [key]" in written
    assert not any(key.encode() in written for key in (HERE_KEY, account.key))
