from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "openai",
    "torch",
    "numpy",
    "fastapi",
    "sqlalchemy",
    "uvicorn",
    "app.main",
    "app.db",
    "app.settings",
)
CODE = f"""
import sys
from spard.commands import main
try:
    main(["move-in", *sys.argv[1:]])
except SystemExit:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def test_the_command_imports_neither_the_server_nor_torch() -> None:
    for arguments in (["--help"], ["status", "nowhere"]):
        ended = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
        assert ended.stderr.splitlines()[-1] == "[]"
