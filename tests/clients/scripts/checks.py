"""What every script here shares: where the service is, and how the outcome of each check is told."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Check = Callable[[], Any]
ENDED = ("succeeded", "failed", "cancelled")
MODEL = os.environ.get("CLIENT_MODEL", "lab")  # the only thing beside address and key that a customer has to change


@dataclass(frozen=True)
class Place:
    """A service that offers `lab`, keys to it, the customer's files, and a job of theirs that has succeeded."""

    url: str
    key: str
    admin_key: str
    folder: Path
    job: str
    with_training: bool
    with_inference: bool

    @property
    def train(self) -> Path:
        return self.folder / "train.jsonl"


def place() -> Place:
    """From the command line; the variables that OpenAI's clients read are set as its customer would set them."""
    parser = ArgumentParser()
    for name in ("url", "key", "admin_key", "folder", "job"):
        parser.add_argument(name, type=Path if name == "folder" else str)
    for flag in ("--with-training", "--with-inference"):
        parser.add_argument(flag, action="store_true")
    found = Place(**vars(parser.parse_args()))
    os.environ |= {"OPENAI_BASE_URL": found.url, "OPENAI_API_BASE": found.url, "OPENAI_API_KEY": found.key}
    return found


def tell(checks: dict[str, Check]) -> None:
    """Run each check, whatever became of those before it; a JSON line each, `error` is null or how it failed."""
    for check, run in checks.items():
        error = None
        try:
            run()
        except Exception:
            error = traceback.format_exc()[-4000:]
        sys.stdout.write(json.dumps({"check": check, "error": error}) + "\n")
        sys.stdout.flush()


def wait_until(is_so: Callable[[], bool], seconds: float = 600) -> None:
    """Ask again until something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.5)
