"""What another installed package registers under the groups of `spard.config.extensions`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from spard.config import JudgeSpec, Selection
from spard.config.extensions import JUDGES, REPLY_SCORERS, SELECTIONS, Registry, scorer_names
from spard.config.run_spec import parse
from spard.errors import InvalidRecipe
from tests.spard.strangers import install, run_script

SCORER = """
    from spard.evaluation.scorers import Mark

    def score_length(reply, answer):
        return Mark(len(reply) == int(answer))
"""


@pytest.mark.parametrize("registry", [REPLY_SCORERS, JUDGES, SELECTIONS])
def test_every_shipped_name_can_be_loaded(registry: Registry) -> None:
    assert all(callable(registry.load(name)) for name in registry.shipped)


def test_the_names_are_known_without_torch() -> None:
    code = """
        import sys
        from spard.config.extensions import JUDGES, SELECTIONS, scorer_names
        assert "gsm8k" in scorer_names() and "llm" in JUDGES.names() and "random" in SELECTIONS.names()
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", dedent(code)], check=True)


@pytest.mark.parametrize(
    ("wanted", "raw", "known"),
    [
        (JudgeSpec, {"name": "gpt"}, "refusal, llm, classifier, consensus"),
        (Selection, {"method": "best"}, "relevance_diversity, random"),
    ],
)
def test_an_unknown_name_is_answered_with_those_that_are_known(wanted: type, raw: dict[str, str], known: str) -> None:
    with pytest.raises(InvalidRecipe, match=known):
        parse(wanted, raw, "")


def test_a_scorer_of_another_package_marks_replies(tmp_path: Path) -> None:
    install(tmp_path, "wordy", {"spard.scorers": {"length": "wordy:score_length"}}, wordy=SCORER)

    run_script(
        tmp_path,
        """
        from spard.config.extensions import scorer_names
        from spard.data.rows import read_prompts
        from spard.evaluation.scorers import mark_reply
        import pathlib
        assert scorer_names()[-3:] == ("length", "likelihood", "likelihood_norm")
        path = pathlib.Path("suite.jsonl")
        path.write_text('{"prompt": "p", "answer": "3", "scorer": "length"}')
        assert read_prompts(path)[0].scorer == "length"
        assert mark_reply("length", "abc", "3").is_right and not mark_reply("length", "ab", "3").is_right
        """,
    )


def test_a_selection_of_another_package_is_chosen_by_name(tmp_path: Path) -> None:
    code = """
        def last_first(candidates):
            return list(reversed(range(len(candidates.pool_ND))))
    """
    install(tmp_path, "backwards", {"spard.selections": {"last": "backwards:last_first"}}, backwards=code)

    run_script(
        tmp_path,
        """
        import torch
        from spard.config import Selection
        from spard.config.run_spec import parse
        from spard.selection.select import choose
        selection = parse(Selection, {"method": "last"}, "")
        pool = torch.randn(5, 3)
        assert choose(pool, torch.randn(2, 3), 2, selection, 0).indices == [4, 3]
        """,
    )


def test_a_judge_of_another_package_is_opened_by_name(tmp_path: Path) -> None:
    code = """
        class Lenient:
            name = "lenient"

        def open_lenient(spec):
            return Lenient()
    """
    install(tmp_path, "lenient", {"spard.judges": {"lenient": "lenient:open_lenient"}}, lenient=code)

    run_script(
        tmp_path,
        """
        from spard.config import JudgeSpec
        from spard.config.run_spec import parse
        from spard.evaluation.judges import open_judge
        assert open_judge(parse(JudgeSpec, {"name": "lenient"}, "")).name == "lenient"
        """,
    )


def test_a_judge_of_another_package_is_measured_by_name(tmp_path: Path) -> None:
    """Unmeasured it decides nothing: without this no model that it judged could be released."""
    code = """
        from spard.evaluation.judges.base import Verdict

        class Strict:
            name = "strict"

            def judge(self, prompts, replies):
                return [Verdict(5, "harm") for _ in replies]

        def open_strict(spec):
            return Strict()
    """
    install(tmp_path, "strict", {"spard.judges": {"strict": "strict:open_strict"}}, strict=code)

    run_script(
        tmp_path,
        """
        from spard.commands import exits, judge
        assert judge.main(["--judge", "strict", "--language", "en"]) == exits.NOT_PASSED
        assert judge.main(["--judge", "stricter"]) == exits.USAGE
        """,
    )


def test_an_attack_of_another_package_has_a_name_in_the_lab(tmp_path: Path) -> None:
    code = """
        def build(lab, seed, ratio):
            return (lab, seed, ratio)
    """
    install(tmp_path, "hostile", {"spard.attacks": {"flood": "hostile:build"}}, hostile=code)

    run_script(
        tmp_path,
        """
        from pathlib import Path
        from spard_lab.lab.attacks import attack_files, attack_names
        assert attack_names()[-1] == "flood"
        assert attack_files(Path("lab"), "flood", 3, 0.5) == (Path("lab"), 3, 0.5)
        """,
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"exact": "wordy:score_length"}, "the package wordy registers the scorer 'exact', a name of spard's own"),
        ({"length": "wordy:nothing"}, "the scorer 'length' of the package wordy (wordy:nothing) cannot be imported"),
        ({"length": "nowhere:f"}, "the scorer 'length' of the package wordy (nowhere:f) cannot be imported"),
    ],
)
def test_what_cannot_be_used_is_an_error_that_names_the_package(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    install(tmp_path, "wordy", {"spard.scorers": entries}, wordy=SCORER)

    run_script(
        tmp_path,
        f"""
        from spard.config.extensions import scorer_names
        from spard.errors import InvalidExtension
        from spard.evaluation.scorers import mark_reply
        try:
            mark_reply(scorer_names()[-3], "", "")
        except InvalidExtension as error:
            assert error.message.startswith({message!r}), error.message
        else:
            raise AssertionError("accepted")
        """,
    )


def test_two_packages_with_one_name_are_both_named(tmp_path: Path) -> None:
    for name in ("one", "other"):
        install(tmp_path, name, {"spard.scorers": {"length": f"{name}:score_length"}}, **{name: SCORER})

    run_script(
        tmp_path,
        """
        from spard.config.extensions import scorer_names
        from spard.errors import InvalidExtension
        try:
            scorer_names()
        except InvalidExtension as error:
            assert "one and the package other both register the scorer 'length'" in error.message
        else:
            raise AssertionError("accepted")
        """,
    )


def test_no_package_has_registered_a_scorer_here() -> None:
    assert len(scorer_names()) == len(REPLY_SCORERS.shipped) + 2
