"""The command line that came with the official Python client up to 2.34, as a shell script would use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.clients.scripts.checks import MODEL, Check, place, tell

PLACE = place()
LISTS = {"files.list", "models.list"}  # printed one object after the other


def run(key: str, command: str, *options: str) -> Any:
    """`openai api COMMAND` to its end; of the address it wants the last slash too."""
    argv = [str(Path(sys.executable).with_name("openai")), "-b", f"{PLACE.url}/", "-k", key, "api", command, *options]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def ask(command: str, *options: str) -> Any:
    """What `openai api COMMAND` printed, or an error with what it complained about; of a list, its entries."""
    done = run(PLACE.key, command, *options)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    objects = json.loads("[" + re.sub(r"^}\n(?={)", "},", done.stdout, flags=re.MULTILINE) + "]")
    return objects if command in LISTS else objects[0]


@cache
def file() -> str:
    made: str = ask("files.create", "-f", str(PLACE.train), "-p", "fine-tune")["id"]
    return made


@cache
def job() -> str:
    made: str = ask("fine_tuning.jobs.create", "-m", MODEL, "-F", file(), "-s", "cli", "-H", '{"n_epochs": 2}')["id"]
    return made


def create() -> None:
    assert job().startswith("ftjob-")


def retrieve() -> None:
    assert ask("fine_tuning.jobs.retrieve", "-i", job())["hyperparameters"]["n_epochs"] == 2


def job_is_listed() -> None:
    assert job() in {each["id"] for each in ask("fine_tuning.jobs.list")["data"]}


def events() -> None:
    told = ask("fine_tuning.jobs.list_events", "-i", job())["data"]
    assert "Fine-tuning job started" in {each["message"] for each in told} or told[-1]["message"].startswith("Created")


def cancel() -> None:
    assert ask("fine_tuning.jobs.cancel", "-i", job())["status"] == "cancelled"


def models() -> None:
    assert MODEL in {each["id"] for each in ask("models.list")}


def model() -> None:
    assert ask("models.retrieve", "-i", MODEL)["id"] == MODEL


def files() -> None:
    assert file() in {each["id"] for each in ask("files.list")}


def retrieve_file() -> None:
    assert ask("files.retrieve", "-i", file())["id"] == file()


def delete_file() -> None:
    assert ask("files.delete", "-i", file())["deleted"] is True


def wrong_key() -> None:
    done = run("sk-no", "models.list")
    assert done.returncode
    assert "invalid_api_key" in done.stderr, done.stderr


def chat() -> None:
    tuned = ask("fine_tuning.jobs.retrieve", "-i", PLACE.job)["fine_tuned_model"]
    done = run(PLACE.key, "chat.completions.create", "-m", tuned, "-g", "user", "hello", "-M", "8")
    assert (done.returncode, bool(done.stdout.strip())) == (0, True), done.stderr


CHECKS: dict[str, Check] = {
    "files.create": file,
    "fine_tuning.jobs.create": create,
    "fine_tuning.jobs.retrieve": retrieve,
    "fine_tuning.jobs.list": job_is_listed,
    "fine_tuning.jobs.list_events": events,
    "fine_tuning.jobs.cancel": cancel,
    "models.list": models,
    "models.retrieve": model,
    "files.list": files,
    "files.retrieve": retrieve_file,
    "files.delete": delete_file,
    "a wrong key": wrong_key,
}

if __name__ == "__main__":
    tell(CHECKS | ({"chat.completions.create": chat} if PLACE.with_inference else {}))
