"""The models that a vLLM server holds for us: loaded one drain at a time, proved, and proved again while they serve."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anyio import to_thread
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from app.db import Begin
from app.errors import AppError, Unavailable
from app.files.tokenizer import LightTokenizer
from app.inference import archives
from app.inference.archives import NotServed
from app.inference.embedded import Embedded
from app.inference.engine_errors import engine_lost
from app.inference.protocol import Proof
from app.inference.released import Archive, Released
from app.inference.vllm_answers import ask, expect, probe_rows
from app.inference.vllm_gate import PAUSE_S, Gate
from app.inference.vllm_probe import (
    Answers,
    check_adapter,
    check_base,
    select_probes,
    strongest_probes,
)
from app.inference.vllm_server import ask_rank, require_loadable
from app.objects import served
from app.settings import Settings
from app.storage import Storage
from spard.data.rendering import Mode
from spard.digests import MANIFEST

log = logging.getLogger(__name__)

_AGAIN = 2  # probes of a model that was proved before


@dataclass(eq=False)
class Resident:
    """A model in the server: what our own engine answers to the probes, and whether it was used since they were asked.

    `own.adapter` is `own.base` for the base model itself.
    """

    name: str
    base: str
    rows: list[list[int]]  # the probes, in tokens
    own: Answers
    mode: Mode | None = None
    proof: Proof | None = None
    is_used: bool = False

    @property
    def is_base(self) -> bool:
        """Whether it is a base model without an adapter."""
        return self.name == self.base


class Adapters:
    """What one server holds, by names that follow from digests: nothing else ever has such a name."""

    def __init__(self, settings: Settings, storage: Storage, own: Embedded, gate: Gate, begin: Begin) -> None:
        self._settings, self._storage, self._own, self._gate = settings, storage, own, gate
        self._begin = begin
        self.residents: dict[str, Resident] = {}
        self._loads: dict[str, asyncio.Task[Resident]] = {}
        self._loader = asyncio.Lock()  # one load after the other
        self._max_rank: int | None = None
        self._is_rank_known = False

    async def provide(
        self, client: AsyncOpenAI, model: Released, project: str, tokenizer: LightTokenizer
    ) -> tuple[Resident, bool]:
        """Return a model that the server holds and that was proved, and whether that was done for this request."""
        name = resident_name(model)
        if found := self.residents.get(name):
            return found, False
        load = self._loads.get(name)
        is_first = load is None or load.done()
        if load is None or is_first:
            load = self._loads[name] = asyncio.create_task(self._load(client, model, project, tokenizer))
        return await asyncio.shield(load), is_first

    def reset(self) -> None:
        """Ask the server for its limits again: it may have been started anew."""
        self._is_rank_known = False

    def forget(self, name: str) -> None:
        """Have a model loaded and proved again at the next request."""
        self.residents.pop(name, None)

    async def prove_again(self, client: AsyncOpenAI) -> list[str]:
        """Ask every model that was used since a few probes; forget those that fail, and return their names.

        Where one fails, all others are asked too: whatever moved it may have moved them.
        """
        failed = await self._prove(client, [each for each in self.residents.values() if each.is_used])
        if failed:
            failed += await self._prove(client, list(self.residents.values()))
        return failed

    async def unload(self, client: AsyncOpenAI, digest: str) -> None:
        """Have a server forget an adapter, and remove its unpacked files; `engine_lost` where it does not answer."""
        name = f"spard-{digest[:24]}"
        self.forget(name)
        await to_thread.run_sync(partial(remove_folder, self._settings.serving_adapters_dir, digest))
        await _unload(client, name)

    async def _load(self, client: AsyncOpenAI, model: Released, project: str, tokenizer: LightTokenizer) -> Resident:
        name, archive = resident_name(model), model.archive
        if archive is None:
            return await self._load_base(client, model, tokenizer)
        await to_thread.run_sync(self._note, model, archive, project)
        folder, mode = await to_thread.run_sync(self._unpack, archive)
        rows = await to_thread.run_sync(probe_rows, tokenizer, mode)
        plain = replace(model, name=model.base, archive=None)
        adapter, digest = await expect(self._own, model, self._settings.serving_stall_s)
        base, _ = await expect(self._own, plain, self._settings.serving_stall_s)
        if not digest:
            digest = str(json.loads((folder / MANIFEST).read_bytes()).get("tensor_digest", ""))
        resident = Resident(name, model.base, rows, Answers(base, adapter), mode)
        async with self._loader:
            try:
                async with self._gate.exclusive(self._settings.serving_drain_s):
                    await self._place(client, resident, folder)
                    try:
                        await self._prove_new(client, resident, digest)
                    except NotServed:
                        await self._take_back(client, resident)
                        raise
            finally:
                await asyncio.sleep(PAUSE_S)
        return resident

    async def _prove_new(self, client: AsyncOpenAI, resident: Resident, digest: str) -> None:
        """Prove an adapter that was just loaded, and then the others again; the server answers nobody meanwhile."""
        distances = check_adapter(await self._ask(client, resident), resident.own, self._others(resident))
        resident.proof = {
            "tensor_digest": digest,
            "max_difference": distances.to_adapter,
            "difference_to_base": distances.to_base,
        }
        self.residents[resident.name] = resident
        failed = await self._prove(client, [each for each in self.residents.values() if each is not resident])
        if failed:
            log.error("after a load the server answers with other weights than before: %s", ", ".join(failed))

    async def _take_back(self, client: AsyncOpenAI, resident: Resident) -> None:
        """Unload an adapter that is not proved, and prove the others again: it may have moved them."""
        await _unload(client, resident.name)
        await self._prove(client, [each for each in self.residents.values() if each is not resident])

    async def _load_base(self, client: AsyncOpenAI, model: Released, tokenizer: LightTokenizer) -> Resident:
        rows = await to_thread.run_sync(probe_rows, tokenizer, None)
        own, _ = await expect(self._own, model, self._settings.serving_stall_s)
        resident = Resident(model.base, model.base, rows, Answers(own, own))
        async with self._gate.share():
            check_base((await self._ask(client, resident)).base, own)
        self.residents[resident.name] = resident
        return resident

    def _note(self, model: Released, archive: Archive, project: str) -> None:
        """Store that the server is about to hold an adapter, so that whoever withdraws it has it unloaded."""
        facts = {"project_id": project, "job_id": archive.job_id, "model": model.name, "base": model.base}
        with self._begin() as session:
            served.note_adapter(session, server=str(self._settings.serving_url), sha256=archive.sha256, **facts)

    def _unpack(self, archive: Archive) -> tuple[Path, Mode | None]:
        """Return the folder of an adapter that the server may read, and the mode of thinking it was measured in."""
        root = self._settings.serving_adapters_dir
        if root is None:
            raise Unavailable("SPARD_SERVING_ADAPTERS_DIR names no folder that the server reads.", code="no_engine")
        folder = Path(root).resolve() / archive.sha256
        archives.fetch(self._storage, self._settings, archive, folder)
        require_loadable(json.loads((folder / "adapter_config.json").read_bytes()), None)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if "system_prompt" in manifest:
            raise NotServed("The adapter is defended by a system prompt, which such a server does not add.")
        return folder, (manifest.get("rendering") or {}).get("asked")

    async def _place(self, client: AsyncOpenAI, resident: Resident, folder: Path) -> None:
        """Load an adapter in place of what may have its name; the server answers nobody meanwhile."""
        if not self._is_rank_known:
            self._max_rank = await ask_rank(client, folder.parent)
            self._is_rank_known = True
        require_loadable(json.loads((folder / "adapter_config.json").read_bytes()), self._max_rank)
        await _unload(client, resident.name)
        body = {"lora_name": resident.name, "lora_path": str(folder)}
        try:
            await client.post("/load_lora_adapter", cast_to=str, body=body)
        except APIStatusError as error:
            raise NotServed(f"The server does not load the adapter: {error.message[:200]}") from None
        except APIConnectionError:
            raise engine_lost() from None

    async def _prove(self, client: AsyncOpenAI, residents: list[Resident]) -> list[str]:
        """Ask models their most telling probes; forget those that fail, and return their names."""
        return [name for name in await asyncio.gather(*(self._fault(client, each) for each in residents)) if name]

    async def _fault(self, client: AsyncOpenAI, resident: Resident) -> str | None:
        places = list(range(len(resident.rows))) if resident.is_base else strongest_probes(resident.own, _AGAIN)
        resident.is_used = False
        try:
            found = await self._ask(client, resident, places)
            own = select_probes(resident.own, places)
            if resident.is_base:
                check_base(found.base, own.base)
            else:
                others = [select_probes(each, places) for each in self._others(resident)]
                check_adapter(found, own, others)
        except AppError as error:
            if self.residents.get(resident.name) is resident:
                self.forget(resident.name)
            log.error("%s is answered no more until it is proved anew: %s", resident.name, error.message)
            return resident.name
        return None

    async def _ask(self, client: AsyncOpenAI, resident: Resident, places: list[int] | None = None) -> Answers:
        rows = [resident.rows[i] for i in (range(len(resident.rows)) if places is None else places)]
        return await ask(client, resident.base, resident.name, rows, self._settings.serving_stall_s)

    def _others(self, resident: Resident) -> list[Answers]:
        """Return what our engine answers with the other adapters to the same probes."""
        there = [each for each in self.residents.values() if each.name != resident.name and not each.is_base]
        return [each.own for each in there if each.base == resident.base and each.rows == resident.rows]


def resident_name(model: Released) -> str:
    """Return a model's name in the server."""
    return f"spard-{model.adapter[:24]}" if model.adapter else model.base


def remove_folder(root: Path | None, digest: str) -> None:
    """Remove the unpacked files of an adapter."""
    if root is not None:
        shutil.rmtree(Path(root) / digest, ignore_errors=True)


async def _unload(client: AsyncOpenAI, name: str) -> None:
    try:
        with suppress(APIStatusError):  # it was not there
            await client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": name})
    except APIConnectionError:
        raise engine_lost() from None
