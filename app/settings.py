"""Everything a deployment can set, from the environment (`SPARD_...`)."""

from __future__ import annotations

import os
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from app.addresses import is_listed
from app.errors import Unfit
from app.variable_groups import PREFIX, Group, GroupSource
from spard.config import AuditEngine, GateThresholds, JudgeSpec, Sharding
from spard.config.agent import KEY as AGENT_KEY
from spard.errors import InvalidRecipe

_ALIKE = 0.88  # of two names, as difflib counts it: a letter or two are wrong, or a short word is missing
_OF_OTHERS = {"SPARD_API_KEY", "SPARD_BASE_URL", "SPARD_DEMO_DIR"}  # read by the command line and the demo
GROUPS = {"audit_engine": Group(AuditEngine), "judge": Group(JudgeSpec), "gate": Group(GateThresholds, None)}


def _split_names(text: Any) -> Any:
    """Return the names in a text, between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if isinstance(text, str) else text


PolicyEndpoint = Literal["agent", "guard", "unattested"]  # endpoints whose addresses are in policies
Names = Annotated[tuple[str, ...] | None, NoDecode, BeforeValidator(_split_names)]


class Settings(BaseSettings):
    """The defaults are the embedded mode: SQLite, a folder, no broker, loopback."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True)

    data_dir: Path = Path("data")
    database_url: SecretStr | None = None  # None: SQLite under data_dir; else postgresql+psycopg://...
    storage_url: str | None = None  # None: file:// under data_dir; else s3://bucket/prefix
    s3_endpoint_url: str | None = None  # where API and workers reach an S3 other than Amazon's
    s3_public_endpoint_url: str | None = None  # where customers reach the same one; None: they do not
    downloads: Literal["auto", "redirect", "stream"] = "auto"  # auto: redirect if customers reach the S3, else stream
    broker_url: SecretStr | None = None  # None: workers poll only; else redis://..., rediss://... or unix://...
    admin_key: SecretStr | None = None  # the first key; None: one is made and shown once
    signing_key: Path | None = None  # a PEM file (Ed25519) that adapters are signed with; None: made under data_dir

    max_upload_mb: int = Field(default=512, ge=1)
    max_multipart_mb: int = Field(default=8192, ge=1)  # of a file that comes in parts
    max_line_bytes: int = Field(default=1_048_576, ge=1)
    max_rows: int = Field(default=1_000_000, ge=1)
    min_rows: int = Field(default=10, ge=0)
    bad_files: Literal["reject", "fail"] = "reject"  # fail: a job on a bad file is made and fails, as at OpenAI
    download_url_ttl_s: int = Field(default=300, ge=1)
    results_csv_base64: bool = False  # for scripts that decode the metrics CSV, as OpenAI's content was at times

    requests_per_minute: int | None = Field(default=12_000, ge=1)  # of a project, at one API process; None: no limit
    wrong_keys_per_minute: int = Field(default=60, ge=1)  # of an address, likewise; more are not heard
    connections_per_address: int | None = Field(default=512, ge=1)  # at one API process; None: no limit but descriptors
    requests_at_once: int = Field(default=4, ge=1, le=40)  # of a project, likewise: more wait for their turn
    uploads_at_once: int = Field(default=8, ge=1)  # of a project, likewise: each holds a thread while it arrives
    reads_at_once: int = Field(default=8, ge=1, le=64)  # likewise: downloads and reports that wait for the storage
    streams_at_once: int = Field(default=100, ge=1, le=10_000)  # likewise: jobs that are followed live
    counting_processes: int = Field(default=1, ge=1, le=64)  # of an API process: they render and count customers' rows
    counting_cpu_s: float = Field(default=10.0, gt=0)  # that one request may count for; it then says how far it came
    previews_at_once: int = Field(default=2, ge=1, le=64)  # likewise: previews, validations, estimates

    lease_s: float = Field(default=90.0, gt=0)
    heartbeat_s: float = Field(default=15.0, gt=0)
    poll_s: float = Field(default=1.0, gt=0)
    reap_s: float = Field(default=10.0, gt=0)
    killed_wait_s: float = Field(default=120.0, ge=0)  # after a kill from outside, before the job is tried again
    stall_s: float = Field(default=600.0, gt=0)
    stop_grace_s: float = Field(default=90.0, gt=0)
    max_run_s: float | None = Field(default=7 * 86_400.0, gt=0)  # from a job's first start to its end; None: no limit
    gpus_per_job: int = Field(default=1, ge=1, le=64)  # of one machine; each has a share of every batch
    nodes_per_job: int = Field(default=1, ge=1, le=64)  # machines with so many GPUs each; a launcher sets it
    nodes_port: int = Field(default=29401, ge=1, le=65_535)  # where the worker of such a job hears of the others
    nodes_wait_s: float = Field(default=600.0, gt=0)  # until all of them are there, before the job is claimed
    sharding: Sharding = "none"  # of base models over them; full: each GPU holds a part
    gpu_probe_s: float = Field(default=60.0, gt=0)  # at most, between looks at what failed: GPU, disk, storage, judge
    storage_notice_s: float = Field(default=10.0, gt=0)  # after which a job's events say that it waits for the storage
    outage_patience_s: float = Field(default=600.0, ge=0)  # for storage or judge, before the job goes back to the queue
    warm_child: bool = True  # keep an idle child with torch imported and the last base model read, if memory is left
    metrics_port: int | None = Field(default=None, ge=1, le=65_535)  # of each worker; None: it shows no metrics
    log_format: Literal["text", "json"] = "text"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # cuda: refuse to start without a GPU
    worker_threads: int | None = Field(default=None, ge=1)  # torch threads of a child; None: all cores but one
    pass_tokens: int | None = Field(default=None, ge=64)  # padded ones at once; None: as many as memory is free for
    launcher: Literal["workers", "kubernetes"] = "workers"  # who starts jobs: workers look for them, or app.launchers
    launch_namespace: str = "spard"  # of the cluster's Jobs
    launch_queue: str | None = None  # Kueue's LocalQueue that holds them back; None: they start at once
    launch_most: int = Field(default=100, ge=1, le=10_000)  # of them at once, waiting or running
    launch_gpu_gib: float | None = Field(default=None, gt=0)  # memory of a GPU; None: a pod has its template's GPUs
    launch_gpus_per_node: int = Field(default=8, ge=1, le=64)  # that a job may get
    launch_nodes: int = Field(default=1, ge=1, le=64)  # that a job may get where one holds it not; above 1: JobSet
    launch_s: float = Field(default=10.0, gt=0)  # between two looks

    # Models that answer. An engine is a process with one base model and any number of adapters.
    serving_models: int = Field(default=2, ge=1, le=64)  # engines at once, of an API process
    serving_rows: int = Field(default=16, ge=1, le=1024)  # replies that an engine writes at once; more wait
    serving_adapters_mb: float = Field(default=2048.0, gt=0)  # of adapters in an engine; the ones used least make room
    serving_device: Literal["cpu", "cuda"] = "cpu"  # cuda: a GPU that no worker has
    serving_reserve_mb: int = Field(default=1024, ge=0)  # of memory that stay free; an engine ends before
    serving_idle_s: float = Field(default=900.0, gt=0)  # after which an engine that nobody asks ends
    serving_start_s: float = Field(default=300.0, gt=0)  # to load a base model
    serving_stall_s: float = Field(default=120.0, gt=0)  # between two tokens of a reply
    serving_step_s: float = Field(default=90.0, gt=0)  # without a step, after which an engine is ended and replaced
    serving_url: str | None = None  # of a vLLM server that answers instead, with /v1; None: engines of this process
    serving_api_key: SecretStr | None = None
    serving_adapters_dir: Path | None = None  # that the API writes and that server reads, under the same path
    serving_drain_s: float = Field(default=30.0, gt=0, le=3600)  # that a load waits for running replies to end
    serving_canary_s: float = Field(default=15.0, gt=0, le=3600)  # between two looks at which weights answer there
    # Keys of endpoints that a policy names; each goes to the addresses listed beside it, between commas, alone.
    unattested_api_key: SecretStr | None = None  # of servers that a policy names as not attested
    unattested_urls: Names = None  # with /v1, as the policy has them
    guard_api_key: SecretStr | None = None  # of the moderation endpoint that a policy names
    guard_urls: Names = None  # likewise
    max_reply_tokens: int = Field(default=16_384, ge=1)  # of one reply

    # Prompts of each suite that the checkpoint of an epoch is audited with; fewer than 20 decide nothing. 0: ends of
    # epochs are listed with their losses, and none is released.
    checkpoint_prompts: int = Field(default=100, ge=0, le=10_000)
    # Rows of a job's training file that are not trained on, at most, to show whether its task is learned; 0: only where
    # a job's request names a number.
    held_out_rows: int = Field(default=100, ge=0, le=100)

    objects_check_s: float = Field(default=86_400.0, gt=0)  # between two comparisons of rows and storage
    objects_reported_days: int = Field(default=7, ge=1)  # until `spard objects repair` moves aside what has no row
    objects_aside_days: int = Field(default=30, ge=1)  # until it deletes what lies aside

    # Trackers that get every job's step metrics and audit, by name: mlflow, tensorboard, trackio, wandb, or those of
    # other packages. `integrations` are those to which a customer's own `integrations` are passed on.
    sinks: Names = None
    integrations: Names = None
    sink_timeout_s: float = Field(default=60.0, gt=0)  # that a tracker may go on for after its job

    webhooks_to_loopback: bool = False  # for development: http:// to this machine too

    # SPARD_JUDGE is its name, SPARD_JUDGE_MODEL its model and so on; SPARD_JUDGE_MEMBERS is a JSON list of judges.
    judge: Annotated[JudgeSpec, NoDecode] = JudgeSpec()
    audit_engine: Annotated[AuditEngine, NoDecode] = AuditEngine()  # SPARD_AUDIT_ENGINE is its name, and so on
    judge_api_key: SecretStr | None = None
    agent_api_key: SecretStr | None = None  # of the auditing agent's endpoint, which a policy names
    agent_urls: Names = None  # the addresses that get this key, between commas; an agent elsewhere is asked without it
    agent_errors: Path | None = None  # what `spard measure-agent --json` made of its false positives
    judge_errors: Path | None = None  # what `spard judge --json` measured of it; without it the gate never passes
    gate: Annotated[GateThresholds, NoDecode] = GateThresholds()  # SPARD_GATE_MAX_ASR, ...: where no policy names it

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read the environment alone, groups first."""
        return init_settings, GroupSource(settings_cls, GROUPS), env_settings

    def judge_key(self, judge: JudgeSpec) -> str | None:
        """Return the key of a judge's or the auditing agent's endpoint, if it is set.

        The agent's address comes from a policy, so its key is for addresses that `agent_urls` lists alone.
        """
        if judge.api_key_env == AGENT_KEY:
            return self.policy_key("agent", judge.base_url or "")
        if self.judge_api_key and judge.api_key_env == JudgeSpec().api_key_env:
            return self.judge_api_key.get_secret_value()
        return os.environ.get(judge.api_key_env)

    def policy_key(self, kind: PolicyEndpoint, url: str) -> str | None:
        """Return the key for an endpoint that a policy names; None unless its address is listed beside the key."""
        key, urls = self._keys_of_policies()[kind]
        return key.get_secret_value() if key and is_listed(url, urls or ()) else None

    def keys_without_addresses(self) -> list[str]:
        """Return the variables that list the addresses of a key which is set, where none is listed."""
        pairs = self._keys_of_policies().items()
        return [f"{PREFIX}{kind}_urls".upper() for kind, (key, urls) in pairs if key and not urls]

    def _keys_of_policies(self) -> dict[PolicyEndpoint, tuple[SecretStr | None, tuple[str, ...] | None]]:
        return {
            "agent": (self.agent_api_key, self.agent_urls),
            "guard": (self.guard_api_key, self.guard_urls),
            "unattested": (self.unattested_api_key, self.unattested_urls),
        }

    def database(self) -> str:
        """Return the database's URL, which may hold a password; SQLite in `data_dir` unless one is set."""
        embedded = quote(str((self.data_dir / "spard.db").resolve()))
        return self.database_url.get_secret_value() if self.database_url else f"sqlite:///{embedded}"

    def storage(self) -> str:
        """Return the storage's URL; a folder in `data_dir` unless one is set."""
        return self.storage_url or (self.data_dir / "objects").resolve().as_uri()

    def download_link_s(self) -> int | None:
        """How long a link to the storage is good for; None: customers get no link, and the API streams."""
        reached = self.s3_endpoint_url is None or self.s3_public_endpoint_url is not None
        redirects = self.downloads == "redirect" or (self.downloads == "auto" and reached)
        return self.download_url_ttl_s if redirects else None

    def is_embedded(self) -> bool:
        """Whether everything is on this machine, in one folder."""
        return self.database().startswith("sqlite")

    def cache_dir(self) -> Path:
        """Embeddings and audits of base models: machine-local, safe to delete."""
        return self.data_dir.resolve() / "cache"

    def sinks_dir(self) -> Path:
        """Where trackers that write files do so, unless their own variables name another place."""
        return self.data_dir.resolve() / "sinks"

    def work_dir(self) -> Path:
        """Folders of running jobs: machine-local, removed when a job ends."""
        return self.data_dir.resolve() / "work"


def read_settings() -> Settings:
    """Read the environment; `Unfit` for the first setting that is wrong, with its value and what is allowed."""
    try:
        return Settings()
    except InvalidRecipe as error:
        raise Unfit(f"{error.message}.") from None
    except ValidationError as error:
        raise Unfit(_explain_error(error)) from None


@cache
def get_settings() -> Settings:
    """Return what `read_settings` found first."""
    return read_settings()


def misspelled_variables(settings: Settings) -> dict[str, str]:
    """Return the variables that are no settings but nearly: each with the setting whose name is like it."""
    ours = {f"{PREFIX}{name}".upper() for name in Settings.model_fields} - {"SPARD_GATE"}
    ours |= {group.variable(name, field.name) for name, group in GROUPS.items() for field in fields(group.kind)}
    meant = {each.api_key_env for each in settings.judge.with_members()} | _OF_OTHERS
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in ours | meant)
    likes = {name: get_close_matches(name, ours, n=1, cutoff=_ALIKE) for name in unknown}
    return {name: like[0] for name, like in likes.items() if like}


def _explain_error(error: ValidationError) -> str:
    """Return one line on the first setting that is wrong."""
    wrong = error.errors(include_url=False)[0]
    name, *below = (str(part) for part in wrong["loc"])
    group = GROUPS.get(name)
    variable = group.variable(name, below[0]) if group and below else f"{PREFIX}{name}".upper()
    return f"{variable} is {wrong['input']!r}: {wrong['msg'].replace('Input should', 'it should')}."
