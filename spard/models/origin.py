"""The origin of a base model, in public terms, and the files of its tokenizer."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from spard.data.chat_template import PLAIN_TEMPLATE, sources
from spard.data.renderer import Renderer, self_rendering
from spard.errors import InvalidModel
from spard.models.folder.reading import read_object

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_SETTINGS = "tokenizer_config.json"
_CARD_HEADER = re.compile(r"---\s*\n(?P<metadata>.*?)\n---\s*\n", re.DOTALL)  # YAML before the text of a hub's card
_LICENSE = re.compile(r"""^(license|license_name): *["']?([\w.+ -]+?)["']? *$""", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Origin:
    """A hub id with its commit, or just the name of a folder.

    `folder` is the local path of the files, which is never published.
    """

    folder: Path
    name: str
    revision: str | None = None

    def model_type(self) -> str | None:
        """Return the `model_type` of the model's config.json; None if it has none."""
        found = read_object(self.folder, "config.json").get("model_type")
        return found if isinstance(found, str) else None

    def stated_license(self) -> str | None:
        """Return the license that the model card beside the weights names; None where there is none, or it names none.

        That is the hub's name of it (`apache-2.0`, `llama3.1`), or `license_name` where that says `other`.
        """
        try:
            text = (self.folder / "README.md").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        header = _CARD_HEADER.match(text)
        stated = dict(_LICENSE.findall(header["metadata"])) if header else {}
        name = stated.get("license")
        return stated.get("license_name", name) if name == "other" else name

    def copy_tokenizer(self, folder: Path, renderer: Renderer) -> None:
        """Copy the tokenizer's files byte for byte to `folder`.

        Saving the tokenizer again writes the format of the installed transformers, which other releases may not read. A
        tokenizer without a chat template gets the plain template that training used. A template that was rendered with
        arguments or a date is rewritten to render the same without them.
        """
        for source in sorted(path for name in _TOKENIZER for path in self.folder.glob(name)):
            to = folder / source.relative_to(self.folder)
            to.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, to)
        if renderer.template == PLAIN_TEMPLATE:
            path = folder / _SETTINGS
            settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            path.write_text(json.dumps(settings | {"chat_template": PLAIN_TEMPLATE}, indent=2) + "\n")
        templates = self_rendering(renderer, renderer.rendering.asked)
        if templates != sources(renderer.template):
            _write_templates(folder, templates)


def _write_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write chat templates into files of their own, which override those in the tokenizer's settings."""
    (folder / "chat_template.jinja").write_text(templates["default"], encoding="utf-8")
    for name, source in templates.items():
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(source, encoding="utf-8")


def origin(source: str | Path, revision: str | None) -> Origin:
    """Return the origin of a loaded model; `revision` is the commit if it came from the hub.

    A folder inside the hub's cache counts as that hub id and commit.
    """
    folder = Path(source).resolve() if Path(source).is_dir() else _cached_folder(str(source), revision)
    repository = folder.parent.parent.name
    # The hub's cache has the layout models--OWNER--NAME/snapshots/COMMIT.
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return Origin(folder, repository.removeprefix("models--").replace("--", "/"), folder.name)
    return Origin(folder, folder.name)


def _cached_folder(hub_id: str, revision: str | None) -> Path:
    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if not isinstance(config, str):
        raise InvalidModel(f"model {hub_id!r} is not in the cache of the hub that it was loaded from", "model")
    return Path(config).parent
