"""The models in a vLLM server: load adapters one after the other while it is idle, and prove them again and again."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from anyio import to_thread
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from app.db import Begin
from app.errors import AppError, Unavailable
from app.files.tokenizer import LightTokenizer
from app.inference import released
from app.inference.embedded import EmbeddedEngines
from app.inference.protocol import Proof, engine_lost
from app.inference.released import Archive, NotServed, ReleasedModel
from app.inference.vllm_probe import (
    KNOWN,
    Answers,
    Likely,
    check_adapter,
    check_base,
    first_tokens,
    probes,
    select_probes,
    strongest_probes,
)
from app.inference.vllm_server import PAUSE_S, Gate, ask_rank, require_loadable
from app.inference.vllm_writing import PLAIN, completion_tokens, prompt_ids
from app.objects import served_adapters
from app.settings import Settings
from app.storage import Storage
from spard.data.rendering import Mode
from spard.digests import MANIFEST

# Ask the probes of a vLLM server and of our own engine; an answer is the likeliest first tokens.


def probe_rows(tokenizer: LightTokenizer, mode: Mode | None) -> list[list[int]]:
    """Return the probes as token ids."""
    return [prompt_ids(tokenizer, each, mode) for each in probes()]


async def expect(engine: EmbeddedEngines, model: ReleasedModel, stall_s: float) -> tuple[list[Likely], str]:
    """Return our own engine's answers to the probes, and the adapter's tensor digest, "" if it was loaded before."""
    found, digest = list[Likely](), ""
    for each in probes():
        stream, _, proof = await engine.start(model, "prover", {**each, "adapter": model.adapter})
        digest = proof["tensor_digest"] if proof else digest
        found.append(await first_tokens(stream, stall_s))
    return found, digest


async def ask(client: AsyncOpenAI, base: str, name: str, rows: list[list[int]], timeout_s: float) -> Answers:
    """Return a server's answers to each row, by its base model and by the model `name`, which may be the same.

    Raises `NotServed` if the server refuses a probe, and `engine_lost` if it does not answer within `timeout_s`.
    """
    names = [base] if name == base else [base, name]
    asked = [_likely(client, each, row) for each in names for row in rows]
    try:
        # Not `wait_for`: it leaves the probes' exception unread, in the log, where the process ends meanwhile.
        async with asyncio.timeout(timeout_s):
            found = await asyncio.gather(*asked)
    except APIStatusError as error:
        raise NotServed(f"The server does not answer the probes: {error.message[:200]}") from None
    except (APIConnectionError, TimeoutError):
        raise engine_lost() from None
    return Answers(found[: len(rows)], found[-len(rows) :])


async def _likely(client: AsyncOpenAI, name: str, row: list[int]) -> Likely:
    """Return the likeliest first tokens after a prompt, end tokens included, with their log probabilities.

    The server computes all of the prompt: keys and values from its cache would be those of earlier weights.
    """
    own: dict[str, object] = {"ignore_eos": True, "cache_salt": secrets.token_hex(16)}
    body = {**PLAIN, **own, "skip_special_tokens": False, "return_tokens_as_token_ids": True}
    answer = await client.completions.create(
        model=name, prompt=row, max_tokens=1, temperature=0, logprobs=KNOWN, extra_body=body
    )
    tokens = completion_tokens(answer.choices[0].logprobs)
    return {each["token"]: each["logprob"] for each in tokens[0]["top_logprobs"]} if tokens else {}


log = logging.getLogger(__name__)

_AGAIN = 2  # how many probes prove an adapter again


@dataclass(eq=False)
class Resident:
    """A model in the server that was proved.

    rows     the probes, as token ids
    own      our engine's answers to them; for a base model, `own.adapter` equals `own.base`
    mode     the mode of thinking that the adapter was audited with
    proof    the result of its first probe; None for a base model
    is_used  True if it was used since its last probe
    salt     new with each load, see `cache_salt`
    """

    name: str
    base: str
    rows: list[list[int]]
    own: Answers
    mode: Mode | None = None
    proof: Proof | None = None
    is_used: bool = False
    salt: str = field(default_factory=partial(secrets.token_hex, 16))

    def cache_salt(self, project: str) -> str:
        """Return what the server's cache of prompts keeps apart: the projects, and the times before and after a load.

        vLLM finds the keys and values of an earlier prompt by the adapter's name and path. Those that the server
        computed with other weights, before that was found, are not used once the adapter is proved anew. And no project
        learns from the time of a reply what another one has asked the base model.
        """
        return hashlib.sha256(f"{self.salt} {project}".encode()).hexdigest()

    @property
    def is_base(self) -> bool:
        """Return True for a base model without an adapter."""
        return self.name == self.base


class Adapters:
    """The models of one server, by name; an adapter's name derives from its digest, so no name is used twice.

    `end_replies` is called with the name of a model and the reason as soon as one of its probes fails, before any other
    is awaited.
    """

    def __init__(
        self,
        settings: Settings,
        storage: Storage,
        own: EmbeddedEngines,
        gate: Gate,
        begin: Begin,
        end_replies: Callable[[str, AppError], None],
    ) -> None:
        self._settings, self._storage, self._own, self._gate = settings, storage, own, gate
        self._begin, self._end_replies = begin, end_replies
        self.residents: dict[str, Resident] = {}
        self._loads: dict[str, asyncio.Task[Resident]] = {}
        self._loader = asyncio.Lock()  # serializes loads
        self._max_rank: int | None = None
        self._is_rank_known = False

    async def provide(
        self, client: AsyncOpenAI, model: ReleasedModel, project: str, tokenizer: LightTokenizer
    ) -> tuple[Resident, bool]:
        """Return a model, loaded into the server and proved, and True if this call has loaded it.

        Calls for the same model share one load. Raises `NotServed` or `NotServable` if it cannot be served.
        """
        name = resident_name(model)
        if found := self.residents.get(name):
            return found, False
        load = self._loads.get(name)
        is_first = load is None or load.done()
        if load is None or is_first:
            load = self._loads[name] = asyncio.create_task(self._load(client, model, project, tokenizer))
        return await asyncio.shield(load), is_first

    def reset(self) -> None:
        """Ask for the server's limits again at the next load: it may have restarted."""
        self._is_rank_known = False

    def forget(self, name: str) -> None:
        """Load and prove a model again at its next request."""
        self.residents.pop(name, None)

    async def prove_again(self, client: AsyncOpenAI) -> None:
        """Probe all models that were used since their last probe; forget models that fail, and end their replies.

        If one fails, all others are probed too, because the same cause may have changed them.
        """
        if await self._prove(client, [each for each in self.residents.values() if each.is_used]):
            await self._prove(client, list(self.residents.values()))

    async def unload(self, client: AsyncOpenAI, digest: str) -> None:
        """Unload an adapter from the server and remove its files; raise `engine_lost` if the server does not answer."""
        name = f"spard-{digest[:24]}"
        self.forget(name)
        await to_thread.run_sync(partial(remove_folder, self._settings.serving_adapters_dir, digest))
        await _unload(client, name)

    async def _load(
        self, client: AsyncOpenAI, model: ReleasedModel, project: str, tokenizer: LightTokenizer
    ) -> Resident:
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
        """Prove a new adapter, and then all other models again; no request is answered meanwhile."""
        distances = check_adapter(await self._ask(client, resident), resident.own, self._others(resident))
        resident.proof = {
            "tensor_digest": digest,
            "max_difference": distances.to_adapter,
            "difference_to_base": distances.to_base,
        }
        self.residents[resident.name] = resident
        failed = await self._prove(client, [each for each in self.residents.values() if each is not resident])
        if failed:
            log.error("after a load, these are not proved any more: %s", ", ".join(failed))

    async def _take_back(self, client: AsyncOpenAI, resident: Resident) -> None:
        """Unload an adapter that failed its proof, and prove all others again: its load may have changed them."""
        await _unload(client, resident.name)
        await self._prove(client, [each for each in self.residents.values() if each is not resident])

    async def _load_base(self, client: AsyncOpenAI, model: ReleasedModel, tokenizer: LightTokenizer) -> Resident:
        rows = await to_thread.run_sync(probe_rows, tokenizer, None)
        own, _ = await expect(self._own, model, self._settings.serving_stall_s)
        resident = Resident(model.base, model.base, rows, Answers(own, own))
        async with self._gate.share():
            check_base((await self._ask(client, resident)).base, own)
        self.residents[resident.name] = resident
        return resident

    def _note(self, model: ReleasedModel, archive: Archive, project: str) -> None:
        """Store a row for an adapter before it is loaded, so that a withdrawal knows that it has to be unloaded."""
        facts = {"project_id": project, "job_id": archive.job_id, "model": model.name, "base": model.base}
        with self._begin() as session:
            served_adapters.note_adapter(
                session, server=str(self._settings.serving_url), sha256=archive.sha256, **facts
            )

    def _unpack(self, archive: Archive) -> tuple[Path, Mode | None]:
        """Unpack an adapter where the server can read it; return the folder and the mode of thinking of its audit."""
        root = self._settings.serving_adapters_dir
        if root is None:
            raise Unavailable("SPARD_SERVING_ADAPTERS_DIR names no folder that the server reads.", code="no_engine")
        folder = Path(root).resolve() / archive.sha256
        released.fetch_archive(self._storage, self._settings, archive, folder)
        require_loadable(json.loads((folder / "adapter_config.json").read_bytes()), None)
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if "system_prompt" in manifest:
            raise NotServed("The adapter is defended by a system prompt, which such a server does not add.")
        return folder, (manifest.get("rendering") or {}).get("asked")

    async def _place(self, client: AsyncOpenAI, resident: Resident, folder: Path) -> None:
        """Load an adapter into the server, replacing one of the same name; the caller holds the gate exclusively."""
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
        """Probe models with the probes that their adapters change most; forget failed ones and return their names."""
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
            self._end_replies(resident.name, error)
            if self.residents.get(resident.name) is resident:
                self.forget(resident.name)
            log.error("%s is answered no more until it is proved anew: %s", resident.name, error.message)
            return resident.name
        return None

    async def _ask(self, client: AsyncOpenAI, resident: Resident, places: list[int] | None = None) -> Answers:
        rows = [resident.rows[i] for i in (range(len(resident.rows)) if places is None else places)]
        return await ask(client, resident.base, resident.name, rows, self._settings.serving_stall_s)

    def _others(self, resident: Resident) -> list[Answers]:
        """Return our engine's answers to the same probes with the server's other adapters on the same base model."""
        there = [each for each in self.residents.values() if each.name != resident.name and not each.is_base]
        return [each.own for each in there if each.base == resident.base and each.rows == resident.rows]


def resident_name(model: ReleasedModel) -> str:
    """Return a model's name in the server: the alias of a base model, else a name made from the digest."""
    return f"spard-{model.adapter[:24]}" if model.adapter else model.base


def remove_folder(root: Path | None, digest: str) -> None:
    """Remove an adapter's unpacked files, if there is a folder for them."""
    if root is not None:
        shutil.rmtree(Path(root) / digest, ignore_errors=True)


async def _unload(client: AsyncOpenAI, name: str) -> None:
    try:
        with suppress(APIStatusError):  # it was not there
            await client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": name})
    except APIConnectionError:
        raise engine_lost() from None
