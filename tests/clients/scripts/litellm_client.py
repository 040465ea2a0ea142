"""litellm's functions for files and fine-tuning, blocking and not."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import litellm

from tests.clients.scripts.checks import MODEL, Check, place, tell

PLACE = place()
THERE: dict[str, Any] = {"custom_llm_provider": "openai", "api_base": PLACE.url, "api_key": PLACE.key}


@cache
def file() -> str:
    with PLACE.train.open("rb") as data:
        made: str = litellm.create_file(file=data, purpose="fine-tune", **THERE).id
    return made


@cache
def job() -> Any:
    return litellm.create_fine_tuning_job(
        model=MODEL, training_file=file(), hyperparameters={"n_epochs": 2}, suffix="litellm", **THERE
    )


def create_file_not_blocking() -> None:
    async def create() -> str:
        made: str = (
            await litellm.acreate_file(file=("a.jsonl", PLACE.train.read_bytes()), purpose="fine-tune", **THERE)
        ).id
        await litellm.afile_delete(file_id=made, **THERE)
        return made

    assert asyncio.run(create()).startswith("file-")


def retrieve_file() -> None:
    assert litellm.file_retrieve(file_id=file(), **THERE).id == file()


def content() -> None:
    assert litellm.file_content(file_id=file(), **THERE).content == PLACE.train.read_bytes()


def files() -> None:
    assert file() in {each.id for each in litellm.file_list(**THERE)}


def create() -> None:
    assert job().hyperparameters["n_epochs"] == 2 if isinstance(job().hyperparameters, dict) else job().id


def retrieve() -> None:
    found = litellm.retrieve_fine_tuning_job(fine_tuning_job_id=job().id, **THERE)
    assert (found.id, found.model, found.training_file) == (job().id, MODEL, file())


def job_is_listed() -> None:
    assert job().id in {each.id for each in litellm.list_fine_tuning_jobs(limit=20, **THERE)}


def cancel() -> None:
    assert litellm.cancel_fine_tuning_job(fine_tuning_job_id=job().id, **THERE).status == "cancelled"


def delete_file() -> None:
    assert litellm.file_delete(file_id=file(), **THERE).deleted is True


def _tuned_model() -> str:
    found: str = litellm.retrieve_fine_tuning_job(fine_tuning_job_id=PLACE.job, **THERE).fine_tuned_model
    return found


def models() -> None:
    found = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=PLACE.url, api_key=PLACE.key
    )
    assert {MODEL, _tuned_model()} & {name.removeprefix("openai/") for name in found}, found


def chat() -> None:
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "api_base": PLACE.url}
    answer = litellm.completion(model=f"openai/{_tuned_model()}", api_key=PLACE.key, **ask)
    assert answer.choices[0].message.content


CHECKS: dict[str, Check] = {
    "create_file": file,
    "acreate_file, afile_delete": create_file_not_blocking,
    "file_retrieve": retrieve_file,
    "file_content": content,
    "file_list": files,
    "create_fine_tuning_job": create,
    "retrieve_fine_tuning_job": retrieve,
    "list_fine_tuning_jobs": job_is_listed,
    "cancel_fine_tuning_job": cancel,
    "file_delete right after": delete_file,
    "get_valid_models": models,
}

if __name__ == "__main__":
    tell(CHECKS | ({"completion": chat} if PLACE.with_inference else {}))
