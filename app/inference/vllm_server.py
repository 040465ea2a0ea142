"""Ask a vLLM server for its version, models and rank limit, and decide which models it can serve."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from app.errors import InvalidRequest, Unavailable
from app.inference.engine_errors import engine_lost
from app.inference.released import Released

OLDEST = (0, 25)  # vllm#47724: 0.22.1 and 0.24.0 answered with another adapter after a load under traffic
_RANK_LIMIT = re.compile(r"max_lora_rank (\d+)")
_PROBE_NAME, _PROBE_RANK = "spard-rank-probe", 1_000_000
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")  # initializations that leave the base model alone


class NotServable(InvalidRequest):
    """The vLLM server cannot answer with this model, or not as its audit measured it."""

    code = "model_not_servable"

    def __init__(self, why: str) -> None:
        super().__init__(f"This model cannot be served here: {why}", param="model")


@dataclass(frozen=True, slots=True)
class Server:
    """A server's version, and the context length (prompt and reply, in tokens) of each model that it serves."""

    version: str
    contexts: Mapping[str, int]

    def context(self, base: str) -> int:
        """Return a base model's context length; raise `Unavailable` if the server does not serve it."""
        if base not in self.contexts:
            message = f"The server of SPARD_SERVING_URL serves no model '{base}': start it with --served-model-name."
            raise Unavailable(message, code="no_engine")
        return self.contexts[base]

    def refuse_adapters(self) -> str | None:
        """Return why this server must not load adapters (its version is too old), or None."""
        found = re.match(r"v?(\d+)\.(\d+)", self.version)
        if found and (int(found[1]), int(found[2])) >= OLDEST:
            return None
        floor = ".".join(map(str, OLDEST))
        return f"vLLM {self.version or 'of unknown version'} may swap adapters when it loads one: use {floor} or newer."


def require_whole(model: Released) -> None:
    """Raise `NotServable` for a fully fine-tuned model, or one on a quantized base model."""
    if model.archive is not None and not model.archive.is_lora:
        raise NotServable("all of its weights were trained, and the server holds the base model's.")
    if model.quantization != "none":
        raise NotServable(f"it was measured on a base model in {model.quantization}, which the server does not hold.")


def server_root(url: str) -> str:
    """Return a server's URL without its OpenAI path `/v1`."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", ""))


def read_server(models: Any, version: Any) -> Server:
    """Parse the answers of `/v1/models` and `/version`."""
    cards = models.get("data", ()) if isinstance(models, dict) else ()
    contexts = {str(each["id"]): int(each["max_model_len"]) for each in cards if each.get("max_model_len")}
    return Server(str(version.get("version", "")) if isinstance(version, dict) else "", contexts)


async def ask_server(client: AsyncOpenAI) -> Server:
    """Ask a server for its version and models; raise `Unavailable` if it does not answer."""
    try:
        models = await client.get("/models", cast_to=object)
        try:
            version = await client.get(f"{server_root(str(client.base_url))}/version", cast_to=object)
        except APIStatusError:
            version = None
    except (APIConnectionError, APIStatusError):
        raise engine_lost() from None
    return read_server(models, version)


async def ask_rank(client: AsyncOpenAI, folder: Path) -> int | None:
    """Return the largest rank that a server loads; None if it does not say.

    The server names its limit when it refuses an adapter of a huge rank, which is written to `folder` without weights.
    Raises `Unavailable` if the server does not answer, or loads no adapters at run time.
    """
    probe = folder / _PROBE_NAME
    probe.mkdir(parents=True, exist_ok=True)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "lora_alpha": 1}
    config = json.dumps(facts | {"r": _PROBE_RANK, "target_modules": ["q_proj"]})
    (probe / "adapter_config.json").write_text(config, encoding="utf-8")
    try:
        body = {"lora_name": _PROBE_NAME, "lora_path": str(probe)}
        await client.post("/load_lora_adapter", cast_to=str, body=body)
    except APIStatusError as error:
        # This refusal is the expected answer.
        if found := _RANK_LIMIT.search(error.message):
            return int(found[1])
        is_off = "not enabled" in error.message  # without --enable-lora
        if is_off or (error.status_code in (404, 405) and "adapter" not in error.message.lower()):
            raise no_loading() from None
        return None
    except APIConnectionError:
        raise engine_lost() from None
    with suppress(APIStatusError):
        await client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": _PROBE_NAME})
    return None


def no_loading() -> Unavailable:
    """Return the error for a server that cannot load adapters at run time."""
    message = "The server of SPARD_SERVING_URL loads no adapters: start it with --enable-lora and "
    return Unavailable(f"{message}VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.", code="no_engine")


def require_loadable(config: Mapping[str, Any], max_rank: int | None) -> None:
    """Raise `NotServable` if vLLM cannot load an adapter, or loads it differently from PEFT.

    `config` is its `adapter_config.json`, and `max_rank` the server's limit, if it is known.
    """
    if config.get("use_dora"):
        raise NotServable("vLLM loads no DoRA adapters.")
    if config.get("modules_to_save"):
        raise NotServable(f"vLLM loads no adapter with whole modules ({', '.join(config['modules_to_save'])}).")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise NotServable("vLLM loads no adapter with biases.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        raise NotServable(f"its first values ({init}) change the base model's weights, which vLLM does not do.")
    for name in ("alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora"):
        if config.get(name):
            raise NotServable(f"vLLM does not know {name}.")
    rank = max([int(config["r"]), *_ranks(config.get("rank_pattern"))])
    if max_rank is not None and rank > max_rank:
        raise NotServable(f"its rank is {rank}, and the server was started with --max-lora-rank {max_rank}.")


def _ranks(pattern: object) -> Sequence[int]:
    return [int(each) for each in pattern.values()] if isinstance(pattern, dict) else ()
