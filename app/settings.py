"""Define the settings of a deployment, read from the environment (`SPARD_...`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints
from urllib.parse import quote, urlsplit

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from app.errors import Unfit
from spard.config import AuditEngine, GateThresholds, JudgeSpec, Sharding
from spard.config.run_spec import parse
from spard.config.settings import AGENT_KEY
from spard.errors import InvalidRecipe

# Read settings that are dataclasses: each field has its own environment variable.

PREFIX = "SPARD_"


@dataclass(frozen=True, slots=True)
class Group:
    """Variables that together form one dataclass, one per field and named after it."""

    kind: type
    named: str | None = "name"  # the field whose variable has the group's own name

    def variable(self, group: str, field: str) -> str:
        """Return the name of the variable that sets a field."""
        return (f"{PREFIX}{group}" + ("" if field == self.named else f"_{field}")).upper()


class GroupSource(PydanticBaseSettingsSource):
    """Collects the variables of each group into one mapping."""

    def __init__(self, settings_cls: type[BaseSettings], groups: Mapping[str, Group]) -> None:
        super().__init__(settings_cls)
        self._groups = groups

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        """Return no value: single fields are not read here."""
        return None, field_name, False

    def __call__(self) -> dict[str, object]:
        """Return the set variables as a mapping of group to field to value."""
        # Like pydantic, which ignores the case of variables.
        environment = {name.upper(): value for name, value in os.environ.items()}
        found = {name: _read_group(name, group, environment) for name, group in self._groups.items()}
        return {name: values for name, values in found.items() if values}


def _read_group(name: str, group: Group, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the set variables of one group as a mapping of field to value."""
    found: dict[str, object] = {}
    for field, hint in get_type_hints(group.kind, include_extras=True).items():
        variable = group.variable(name, field)
        if (text := environment.get(variable)) is not None:
            found[field] = _parse_json(hint, text, variable) if get_origin(hint) is tuple else text
    return found


def _parse_json(wanted: object, text: str, variable: str) -> object:
    """Return a value that is given as JSON; raise `InvalidRecipe` for other text."""
    with suppress(ValueError):
        return parse(wanted, json.loads(text), variable)
    raise InvalidRecipe(f"{variable} is no JSON: {text[:200]!r}", variable)


# Compare the addresses of endpoints that receive one of the deployment's API keys.

_PORTS = {"http": 80, "https": 443}


def is_listed(url: str, listed: Iterable[str]) -> bool:
    """Return True if a URL equals one of `listed` in scheme, host, port and path; a trailing slash does not matter.

    A URL that cannot be parsed, or that has a user name, a query or a fragment, matches nothing.
    """
    wanted = _endpoint_parts(url)
    return wanted is not None and any(wanted == _endpoint_parts(each) for each in listed)


def _endpoint_parts(url: str) -> tuple[str, str, int | None, str] | None:
    try:
        found = urlsplit(url)
        port = found.port or _PORTS.get(found.scheme)
    except ValueError:
        return None
    if "@" in found.netloc or found.query or found.fragment or not found.hostname:
        return None
    return found.scheme, found.hostname, port, found.path.rstrip("/")


_ALIKE = 0.88  # difflib's similarity of two names: one or two letters differ, or a short word is missing
_OF_OTHERS = {"SPARD_API_KEY", "SPARD_BASE_URL", "SPARD_DEMO_DIR"}  # read by the command line and the demo
GROUPS = {"audit_engine": Group(AuditEngine), "judge": Group(JudgeSpec), "gate": Group(GateThresholds, None)}


def _split_names(text: Any) -> Any:
    """Return the comma-separated names in a text."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if isinstance(text, str) else text


PolicyEndpoint = Literal["agent", "guard", "unattested"]  # endpoints whose addresses are in policies
Names = Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_split_names)]


class Settings(BaseSettings):
    """The settings of a deployment; the defaults are the embedded mode: SQLite, a folder, no broker, loopback."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True)

    data_dir: Path = Path("data")
    database_url: SecretStr | None = None  # None: SQLite under data_dir; else postgresql+psycopg://...
    storage_url: str | None = None  # None: file:// under data_dir; else s3://bucket/prefix
    s3_endpoint_url: str | None = None  # where API and workers reach an S3 other than Amazon's
    s3_public_endpoint_url: str | None = None  # where customers reach the same S3; None: they cannot
    downloads: Literal["auto", "redirect", "stream"] = "auto"  # auto: redirect if customers reach the S3, else stream
    broker_url: SecretStr | None = None  # None: workers poll only; else redis://..., rediss://... or unix://...
    admin_key: SecretStr | None = None  # the first key; None: one is created and shown once
    signing_key: Path | None = None  # PEM file (Ed25519) to sign adapters with; None: created in data_dir

    max_upload_mb: int = Field(default=512, ge=1)
    max_multipart_mb: int = Field(default=8192, ge=1)  # of a file uploaded in parts
    max_line_bytes: int = Field(default=1_048_576, ge=1)
    max_rows: int = Field(default=1_000_000, ge=1)
    min_rows: int = Field(default=10, ge=0)
    bad_files: Literal["reject", "fail"] = "reject"  # fail: a job on a bad file is created and fails, as at OpenAI
    download_url_ttl_s: int = Field(default=300, ge=1)
    results_csv_base64: bool = False  # for scripts that expect OpenAI's base64-encoded metrics CSV

    requests_per_minute: int | None = Field(default=12_000, ge=1)  # of a project, at one API process; None: no limit
    wrong_keys_per_minute: int = Field(default=60, ge=1)  # of an address, likewise; more are refused
    connections_per_address: int | None = Field(default=512, ge=1)  # at one API process; None: no limit but descriptors
    requests_at_once: int = Field(default=4, ge=1, le=40)  # of a project, likewise: further ones wait
    uploads_at_once: int = Field(default=8, ge=1)  # of a project, likewise: each holds a thread meanwhile
    reads_at_once: int = Field(default=8, ge=1, le=64)  # likewise: downloads and reports that wait for the storage
    streams_at_once: int = Field(default=100, ge=1, le=10_000)  # likewise: jobs followed live
    counting_processes: int = Field(default=1, ge=1, le=64)  # per API process, to render and count customers' rows
    counting_cpu_s: float = Field(default=10.0, gt=0)  # CPU time per request; then the counts are partial
    previews_at_once: int = Field(default=2, ge=1, le=64)  # likewise: previews, validations, estimates

    lease_s: float = Field(default=90.0, gt=0)
    heartbeat_s: float = Field(default=15.0, gt=0)
    poll_s: float = Field(default=1.0, gt=0)
    reap_s: float = Field(default=10.0, gt=0)
    killed_wait_s: float = Field(default=120.0, ge=0)  # after a kill from outside, before the next attempt
    stall_s: float = Field(default=600.0, gt=0)
    stop_grace_s: float = Field(default=90.0, gt=0)
    max_run_s: float | None = Field(default=7 * 86_400.0, gt=0)  # from a job's first start to its end; None: no limit
    gpus_per_job: int = Field(default=1, ge=1, le=64)  # on one machine; each computes a share of every batch
    nodes_per_job: int = Field(default=1, ge=1, le=64)  # machines with that many GPUs each; set by a launcher
    nodes_port: int = Field(default=29401, ge=1, le=65_535)  # where the job's worker waits for the other nodes
    nodes_wait_s: float = Field(default=600.0, gt=0)  # for all nodes to arrive, before the job is claimed
    sharding: Sharding = "none"  # of base models over these GPUs; full: each GPU holds a part
    gpu_probe_s: float = Field(default=60.0, gt=0)  # at most, between checks of what failed: GPU, disk, storage, judge
    storage_notice_s: float = Field(default=10.0, gt=0)  # of waiting for the storage, before a job's events say so
    outage_patience_s: float = Field(default=600.0, ge=0)  # for storage or judge, before the job goes back to the queue
    warm_child: bool = True  # keep an idle child with torch imported and the last base model read, if memory is left
    metrics_port: int | None = Field(default=None, ge=1, le=65_535)  # of each worker; None: it shows no metrics
    log_format: Literal["text", "json"] = "text"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda: refuse to start without a GPU
    cpu_dtype: Literal["float32", "bfloat16", "auto"] = "float32"  # of models on CPUs, in jobs and embedded engines
    worker_threads: int | None = Field(default=None, ge=1)  # torch threads of a child; None: all cores but one
    pass_tokens: int | None = Field(default=None, ge=64)  # padded tokens per pass; None: as many as fit the free memory
    launcher: Literal["workers", "kubernetes"] = "workers"  # who starts jobs: polling workers, or app.launchers
    launch_namespace: str = "spard"  # of the cluster's Jobs
    launch_queue: str | None = None  # Kueue's LocalQueue for them; None: they start at once
    launch_most: int = Field(default=100, ge=1, le=10_000)  # at the same time, waiting or running
    launch_gpu_gib: float | None = Field(default=None, gt=0)  # memory of a GPU; None: the pod template sets the GPUs
    launch_gpus_per_node: int = Field(default=8, ge=1, le=64)  # that a job may get
    launch_nodes: int = Field(default=1, ge=1, le=64)  # for jobs that do not fit one node; above 1: JobSet
    launch_s: float = Field(default=10.0, gt=0)  # between two looks at the cluster

    # Inference. An engine is a process with one base model and any number of adapters.
    serving_models: int = Field(default=2, ge=1, le=64)  # engines per API process
    serving_rows: int = Field(default=16, ge=1, le=1024)  # concurrent replies of an engine; further ones wait
    serving_adapters_mb: float = Field(default=2048.0, gt=0)  # of adapters in an engine; the least used are unloaded
    serving_device: Literal["cpu", "cuda"] = "cpu"  # cuda: a GPU that no worker uses
    serving_reserve_mb: int = Field(default=1024, ge=0)  # of memory to keep free; an engine ends before
    serving_idle_s: float = Field(default=900.0, gt=0)  # without requests, after which an engine ends
    serving_start_s: float = Field(default=300.0, gt=0)  # to load a base model
    serving_stall_s: float = Field(default=120.0, gt=0)  # between two tokens of a reply
    serving_step_s: float = Field(default=90.0, gt=0)  # without a step, after which an engine is replaced
    serving_url: str | None = None  # of a vLLM server to use instead, with /v1; None: own engines
    serving_api_key: SecretStr | None = None
    serving_adapters_dir: Path | None = None  # written by the API and read by that server, under one path
    serving_drain_s: float = Field(default=30.0, gt=0, le=3600)  # to wait for running replies before a load
    serving_canary_s: float = Field(default=15.0, gt=0, le=3600)  # between two checks of that server's weights
    # Keys of endpoints that a policy names; each is sent only to the comma-separated addresses listed for it.
    unattested_api_key: SecretStr | None = None  # of servers that a policy lists as unattested
    unattested_urls: Names = None  # with /v1, as in the policy
    guard_api_key: SecretStr | None = None  # of the moderation endpoint that a policy names
    guard_urls: Names = None  # likewise
    max_reply_tokens: int = Field(default=16_384, ge=1)  # of one reply

    # Prompts of each suite in a checkpoint's audit; fewer than 20 decide nothing. 0: checkpoints are listed with their
    # losses only, and none is released.
    checkpoint_prompts: int = Field(default=100, ge=0, le=10_000)
    # Rows of a job's training file that are not trained on, at most, to show whether its task is learned; 0: only where
    # a job's request names a number.
    held_out_rows: int = Field(default=100, ge=0, le=100)
    # Steps of an undefended probe of a job's rows, which is reported and decides nothing; 0: no probe. Off because
    # honest files of a kind that the reference does not hold may look like attacks.
    probe_steps: int = Field(default=0, ge=0, le=256)
    # Unusual evidence makes a job's audit longer. Off because no figures show that a longer audit finds more.
    probe_longer_audit: bool = False

    objects_check_s: float = Field(default=86_400.0, gt=0)  # between comparisons of rows and storage
    objects_reported_days: int = Field(default=7, ge=1)  # until `spard objects repair` moves objects without a row
    objects_aside_days: int = Field(default=30, ge=1)  # until it deletes objects that were moved aside

    # Trackers that receive every job's step metrics and audit: mlflow, tensorboard, trackio, wandb, or those of other
    # packages. `integrations` are the trackers that customers may request.
    sinks: Names = None
    integrations: Names = None
    sink_timeout_s: float = Field(default=60.0, gt=0)  # that a tracker may run on after its job

    webhooks_to_loopback: bool = False  # for development: also http:// to this machine

    # SPARD_JUDGE is its name, SPARD_JUDGE_MODEL its model and so on; SPARD_JUDGE_MEMBERS is a JSON list of judges.
    judge: Annotated[JudgeSpec, NoDecode] = JudgeSpec()
    audit_engine: Annotated[AuditEngine, NoDecode] = AuditEngine()  # SPARD_AUDIT_ENGINE is its name, and so on
    judge_api_key: SecretStr | None = None
    agent_api_key: SecretStr | None = None  # of the auditing agent that a policy names
    agent_urls: Names = None  # addresses that receive this key, comma-separated; others get none
    agent_errors: Path | None = None  # output of `spard measure-agent --json`: its false positives
    judge_errors: Path | None = None  # output of `spard judge --json`; without it the gate never passes
    gate: Annotated[GateThresholds, NoDecode] = GateThresholds()  # SPARD_GATE_MAX_ASR, ...: defaults of policies

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the environment only, groups first."""
        # One source: no .env files and no secrets folder.
        return init_settings, GroupSource(settings_cls, GROUPS), env_settings

    def judge_key(self, judge: JudgeSpec) -> str | None:
        """Return the key for the endpoint of a judge or the auditing agent; None if it is not set.

        The agent's address comes from a policy, so its key is returned only for addresses in `agent_urls`.
        """
        if judge.api_key_env == AGENT_KEY:
            return self.policy_key("agent", judge.base_url or "")
        if self.judge_api_key and judge.api_key_env == JudgeSpec().api_key_env:
            return self.judge_api_key.get_secret_value()
        return os.environ.get(judge.api_key_env)

    def policy_key(self, kind: PolicyEndpoint, url: str) -> str | None:
        """Return the key for an endpoint that a policy names; None unless its address is listed for that key."""
        key, urls = self._keys_of_policies()[kind]
        return key.get_secret_value() if key and is_listed(url, urls or ()) else None

    def keys_without_addresses(self) -> list[str]:
        """Return the names of unset address lists whose key is set, such as `SPARD_GUARD_URLS`."""
        pairs = self._keys_of_policies().items()
        return [f"{PREFIX}{kind}_urls".upper() for kind, (key, urls) in pairs if key and not urls]

    def _keys_of_policies(self) -> dict[PolicyEndpoint, tuple[SecretStr | None, tuple[str, ...] | None]]:
        return {
            "agent": (self.agent_api_key, self.agent_urls),
            "guard": (self.guard_api_key, self.guard_urls),
            "unattested": (self.unattested_api_key, self.unattested_urls),
        }

    def database(self) -> str:
        """Return the database's URL, which may contain a password; by default SQLite in `data_dir`."""
        embedded = quote(str((self.data_dir / "spard.db").resolve()))
        return self.database_url.get_secret_value() if self.database_url else f"sqlite:///{embedded}"

    def storage(self) -> str:
        """Return the storage's URL; by default a folder in `data_dir`."""
        return self.storage_url or (self.data_dir / "objects").resolve().as_uri()

    def download_link_s(self) -> int | None:
        """Return for how many seconds a storage link is valid; None if the API streams downloads itself."""
        reached = self.s3_endpoint_url is None or self.s3_public_endpoint_url is not None
        redirects = self.downloads == "redirect" or (self.downloads == "auto" and reached)
        return self.download_url_ttl_s if redirects else None

    def is_embedded(self) -> bool:
        """Return True if everything is on this machine, in one folder."""
        return self.database().startswith("sqlite")

    def cache_dir(self) -> Path:
        """Return the folder for embeddings and audits of base models: machine-local, safe to delete."""
        return self.data_dir.resolve() / "cache"

    def sinks_dir(self) -> Path:
        """Return the folder for trackers that write files, unless their own variables name another one."""
        return self.data_dir.resolve() / "sinks"

    def work_dir(self) -> Path:
        """Return the folder for running jobs' folders: machine-local, each removed when its job ends."""
        return self.data_dir.resolve() / "work"


def read_settings() -> Settings:
    """Read the environment; raise `Unfit` for the first invalid setting, with its value and what is allowed."""
    try:
        return Settings()
    except InvalidRecipe as error:
        raise Unfit(f"{error.message}.") from None
    except ValidationError as error:
        raise Unfit(_explain_error(error)) from None


@cache
def get_settings() -> Settings:
    """Return the settings, read at the first call."""
    return read_settings()


def misspelled_variables(settings: Settings) -> dict[str, str]:
    """Return variables that look like misspelled settings, each with the setting of the similar name."""
    ours = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} - {"SPARD_GATE"}
    ours |= {group.variable(name, field.name) for name, group in GROUPS.items() for field in fields(group.kind)}
    meant = {each.api_key_env for each in settings.judge.with_members()} | _OF_OTHERS
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in ours | meant)
    likes = {name: get_close_matches(name, ours, n=1, cutoff=_ALIKE) for name in unknown}
    return {name: like[0] for name, like in likes.items() if like}


def _explain_error(error: ValidationError) -> str:
    """Return one line on the first invalid setting."""
    wrong = error.errors(include_url=False)[0]
    name, *below = (str(part) for part in wrong["loc"])
    group = GROUPS.get(name)
    variable = group.variable(name, below[0]) if group and below else f"{PREFIX}{name}".upper()
    return f"{variable} is {wrong['input']!r}: {wrong['msg'].replace('Input should', 'it should')}."
