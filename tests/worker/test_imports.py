from __future__ import annotations

import subprocess
import sys

_NEVER = ("alembic", "bitsandbytes", "boto3", "pydantic", "scipy", "sklearn", "sqlalchemy")
_WATCHED = """
import sys
from importlib.util import find_spec

seen = []

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "peft":
            seen.append([each for each in ("scipy", "sklearn") if find_spec(each)])

sys.meta_path.insert(0, Watch())
import worker.child
print(seen)
"""


def test_a_child_waits_for_no_library_that_its_job_does_not_use() -> None:
    code = f"import sys, worker.child, worker.rank; print([name for name in {_NEVER} if name in sys.modules])"
    assert _run_code(code) == "[]"


def test_what_needs_a_hidden_library_is_hidden_with_it() -> None:
    """scikit-learn needs SciPy, and some versions of transformers import it wherever it is installed."""
    assert _run_code(_WATCHED) == "[[]]"


def test_what_it_did_not_wait_for_can_still_be_imported() -> None:
    """An extension of the provider may need it."""
    code = "import worker.child, boto3, scipy.optimize; print(boto3.__name__, scipy.optimize.__name__)"
    assert _run_code(code) == "boto3 scipy.optimize"


def _run_code(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()
