"""The command `spard` as a whole: its tree, its exit codes, what it imports before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spard_lab.commands import KINDS

from spard.commands import main
from tools import commands

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "openai",
    "sqlalchemy",
    "alembic",
    "fastapi",
    "starlette",
    "celery",
    "boto3",
    "botocore",
    "cryptography",
    "pydantic_settings",
    "uvicorn",
)
# What a command works with once it was understood.
NEVER_IN_A_LIST = (
    "httpx2",
    "sqlite3",
    "tarfile",
    "concurrent.futures",
    "jinja2",
    "rich.progress",
    "spard.config",
    "app.move_in.ledger",
)
WITHOUT_JSON = {
    "spard up": "serves until it is stopped",
    "spard down": "ends what was started, and says so in one line",
    "spard lab example-file": "writes a file",
    "spard mcp": "speaks a protocol of JSON until its client goes",
    "spard lab make": "leaves a folder",
    "spard move-in read": "fills a folder; spard move-in status --json tells of it",
    "spard move-in golden": "likewise",
    "spard move-in file": "likewise",
    "spard move-in compare": "likewise",
} | {f"spard bench {kind}": "leaves its runs as JSON, and a page" for kind in (*KINDS, "adversary", "detectors")}


def spard(code: str, *, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the command in a process of its own."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(cwd), "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], env=clean, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_page_lists_the_tree() -> None:
    page = commands.PAGE.read_text(encoding="utf-8")
    assert commands.page_table(page) == commands.table(), "run python -m tools.commands --write"


def test_every_command_that_prints_something_prints_json_too() -> None:
    found = commands.leaves()
    assert len(found) > 80
    assert WITHOUT_JSON.keys() <= found.keys()
    without = {name for name, command in found.items() if "--json" not in _options(command)}
    assert without == WITHOUT_JSON.keys()


def _options(command: object) -> list[str]:
    return [option for parameter in getattr(command, "params", []) for option in parameter.opts]


def test_every_command_and_every_argument_says_what_it_is() -> None:
    for name, command in commands.leaves().items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name == "help", f"{name}: {parameter.name}"


def test_the_bench_s_commands_are_its_kinds() -> None:
    """The command line imports none of the bench, so it has their names of its own."""
    from spard_lab.bench import kinds

    assert set(KINDS) == set(kinds.KINDS)


def test_building_the_whole_tree_imports_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; from tools.commands import leaves; n = len(leaves())"
    done = spard(f"{code}; print(n, [each for each in {HEAVY} if each in sys.modules])", cwd=tmp_path)
    assert done.stdout.split(maxsplit=1)[1:] == ["[]\n"], done.stdout + done.stderr


@pytest.mark.parametrize("command", [["jobs", "list"], ["files", "list"], ["keys", "list"], ["doctor", "--help"]])
def test_a_command_imports_nothing_heavy_before_it_asks(command: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from spard.commands import main
from spard_lab.commands import KINDS
try:
    main({command})
except SystemExit as ended:
    print("\\n", ended.code, [each for each in {HEAVY} if each in sys.modules])
"""
    done = spard(code, cwd=tmp_path, SPARD_BASE_URL="http://127.0.0.1:9", SPARD_API_KEY="sk-spard-x")
    code_and_heavy = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert code_and_heavy[1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_the_list_of_commands_builds_none_of_them(asked: str, tmp_path: Path) -> None:
    """The options of 100 subcommands that nobody looks at, and what they work with, took as long as all the rest."""
    code = f"""
import sys
from spard.commands.main import command_line, main
groups = command_line(["{asked}"]).registered_groups
try:
    main(["{asked}"])
except SystemExit as ended:
    print("\\n", ended.code, groups, [each for each in {(*HEAVY, *NEVER_IN_A_LIST)} if each in sys.modules])
"""
    done = spard(code, cwd=tmp_path)
    assert done.stdout.splitlines()[-1].split(maxsplit=1) == ["0", "[] []"], done.stdout + done.stderr
    assert ("spard-service 1" if asked == "--version" else "Read and verify the audit log") in done.stdout


@pytest.mark.parametrize(
    "wrong",
    [["--nonsense"], ["nonsense"], ["jobs"], ["jobs", "nonsense"], ["jobs", "list", "--limit", "x"], ["jobs", "show"]],
)
def test_what_is_not_understood_is_exit_code_3(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert (ended.value.code, "Traceback" in capsys.readouterr().err) == (3, False)


def test_help_and_version_are_exit_code_0_and_name_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--help"], ["--version"], ["jobs", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(asked)
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert "Exit codes: 0 success" in shown or asked != ["--help"]


@pytest.mark.parametrize(
    ("typed", "word", "offered"),
    [("spard jo", "1", "jobs"), ("spard jobs wat", "2", "watch"), ("spard waiv", "1", "waivers")],
)
def test_a_shell_completes_commands(typed: str, word: str, offered: str, tmp_path: Path) -> None:
    asked = {"_SPARD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": word}
    done = spard("from spard.commands import main; main([])", cwd=tmp_path, **asked)
    assert offered in done.stdout.split(), done.stderr
