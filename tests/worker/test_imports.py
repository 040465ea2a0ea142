from __future__ import annotations

import subprocess
import sys

_NEVER = ("alembic", "bitsandbytes", "boto3", "pydantic", "scipy", "sqlalchemy")


def test_a_child_waits_for_no_library_that_its_job_does_not_use() -> None:
    code = f"import sys, worker.child, worker.rank; print([name for name in {_NEVER} if name in sys.modules])"
    assert _said(code) == "[]"


def test_what_it_did_not_wait_for_can_still_be_imported() -> None:
    """An extension of the provider may need it."""
    code = "import worker.child, boto3, scipy.optimize; print(boto3.__name__, scipy.optimize.__name__)"
    assert _said(code) == "boto3 scipy.optimize"


def _said(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
