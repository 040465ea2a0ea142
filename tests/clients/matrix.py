"""Which clients and which readers of archives are held to what: versions, scripts, and each failure that is argued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Runtime = Literal["node", "python", "consumer"]


@dataclass(frozen=True)
class Deviation:
    """A check that fails for a reason that is not mended here; `says` stands in its error, so that no other hides."""

    says: str
    why: str


@dataclass(frozen=True)
class Client:
    """One row of the matrix: packages of one version in an environment of their own, and the script that asks."""

    name: str
    version: str
    package: str
    script: str
    runtime: Runtime = "python"
    also: tuple[str, ...] = ()  # other packages, and versions of them, that it needs
    with_torch: bool = False  # that of our own environment, for its own would be downloaded for nothing
    deviations: Mapping[str, Deviation] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Names its environment, and it on the command line."""
        if self.runtime == "consumer":
            return f"{self.package}-{self.version}"
        words = {"node.cjs": ["node"], "types.cjs": ["types"], "openai_cli": ["cli"]}.get(self.script, [])
        return "-".join([self.package, *words, self.version.split(".")[0]])

    @property
    def packages(self) -> tuple[str, ...]:
        joined = "@" if self.runtime == "node" else "=="
        return (f"{self.package}{joined}{self.version}", *self.also)


_CLI = {
    name: Deviation("errors.pydantic.dev", "its own bug: the command is bound to the arguments of another one")
    for name in ("files.retrieve", "files.delete")
}
_TYPES = {
    "a job paused": Deviation("paused", "the status stands in the example of its `pause` endpoint, not in its enum"),
    "jobs, one of them paused": Deviation("paused", "likewise, in a list"),
    "an event of the audit": Deviation("moderation_checks", "its guide has this type of event, its enum has not"),
}
_LLAMA_INDEX = {
    "the tuned model completes": Deviation(
        "Unknown model",
        "its class for OpenAI knows the lengths of OpenAI's own models alone; `OpenAILike` takes others",
    )
}

CLIENTS = (
    Client("openai for Node", "7.57.0", "openai", "node.cjs", "node"),
    Client("openai for Node", "6.49.0", "openai", "node.cjs", "node"),
    Client(
        "OpenAI's types, as published with openai for Node",
        "7.57.0",
        "openai",
        "types.cjs",
        "node",
        also=("typescript@5.9.3",),
        deviations=_TYPES,
    ),
    Client("openai's command line", "1.109.1", "openai", "openai_cli", deviations=_CLI),
    Client("openai's command line", "2.33.0", "openai", "openai_cli", deviations=_CLI),
    Client("litellm", "1.106.2", "litellm", "litellm_client"),
    Client("DSPy", "3.4.1", "dspy", "dspy_finetune"),
    Client(
        "LlamaIndex",
        "0.4.2",
        "llama-index-finetuning",
        "llama_index_engine",
        also=("mistralai==1.12.4",),  # its newest major has not what LlamaIndex imports
        with_torch=True,
        deviations=_LLAMA_INDEX,
    ),
    Client(
        "instructor",
        "1.17.0",
        "instructor",
        "instructor_cli",
        also=("tqdm==4.67.1",),  # which it imports and does not ask for
    ),
    Client("cookbook, with openai", "3.52.0", "openai", "cookbook"),
    Client("Inspect AI", "0.3.285", "inspect-ai", "inspect_eval", also=("openai==3.57.0",)),
    Client(
        "lm-eval",
        "0.4.13",
        "lm-eval",
        "lm_eval_harness",
        also=("aiohttp==3.14.5", "requests==2.34.2", "tenacity==9.2.1", "tiktoken==0.14.0", "tqdm==4.70.1"),
    ),
    Client("promptfoo", "0.121.20", "promptfoo", "promptfoo.cjs", "node"),
)

CONSUMERS = tuple(
    Client("PEFT", peft, "peft", "consumer", "consumer", (f"transformers=={transformers}",), with_torch=True)
    for peft, transformers in (
        ("0.10.0", "4.40.2"),
        ("0.12.0", "4.44.2"),
        ("0.14.0", "4.47.1"),
        ("0.17.1", "4.56.2"),
        ("0.21.2", "5.23.0"),
    )
)
