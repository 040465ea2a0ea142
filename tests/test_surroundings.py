"""The tests answer alike whatever the environment holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.surroundings import settle

ROOT = Path(__file__).resolve().parents[1]
HOSTILE = {
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "OPENAI_API_KEY": "sk-real",
    "OPENAI_BASE_URL": "http://127.0.0.1:9",
    "SPARD_MIN_ROWS": "5000",
    "SPARD_REQUESTS_PER_MINUTE": "1",
}
SENSITIVE = [
    "tests/app/http/test_cli.py::test_a_refusal_is_one_line",
    "tests/app/http/test_openai_client.py::test_jobs",
]


def test_only_what_the_tests_are_asked_for_is_left() -> None:
    environment = HOSTILE | {"PATH": "/bin", "SPARD_SOAK": "1", "TEST_POSTGRES_URL": "x", "no_proxy": "a.example"}

    settle(environment)

    left = {"PATH", "SPARD_SOAK", "TEST_POSTGRES_URL", "HTTP_PROXY"}
    assert environment.keys() & {*HOSTILE, *left} == left
    assert environment["no_proxy"] == "a.example,127.0.0.1,localhost"


def test_torch_takes_one_thread_unless_it_is_told_another_number() -> None:
    unset, told = dict[str, str](), {"OMP_NUM_THREADS": "16"}

    settle(unset)
    settle(told)

    assert (unset["OMP_NUM_THREADS"], told["OMP_NUM_THREADS"]) == ("1", "16")


def test_a_run_of_some_paths_has_its_threads_before_torch_is_imported() -> None:
    look = "import tests.conftest, os, sys; print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, env=environment, capture_output=True, check=True)

    assert done.stdout.split() == [b"1", b"False"]


def test_tests_pass_with_a_proxy_keys_and_settings_of_somebody_else() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *SENSITIVE]

    done = subprocess.run(command, cwd=ROOT, env=os.environ | HOSTILE, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
