"""`spard export`: exports a released model with documents that other tools can read.

A model that the gate withheld is exported only with the waiver that released it, and never if a byte differs from the
signed one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from spard.commands.front import hide_progress_bars
from spard.commands.verify import KnownKeys, PublicKey, Waiver
from spard.digests import MANIFEST, file_sha256
from spard.errors import NotProved, UserError

_SUFFIXES = (".tar.gz", ".tgz", ".tar")
_ADAPTER = "adapter_config.json"  # repeated here, because spard.models.lora loads torch


def export(
    adapter: Annotated[Path, typer.Argument(exists=True, help="An adapter's folder or archive.")],
    to: Annotated[Path, typer.Option(help="Folder to write to; existing files of the same names are replaced.")],
    merged: Annotated[bool, typer.Option("--merged", help="Merge the adapter into the base model's weights.")] = False,
    base: Annotated[
        str | None, typer.Option(help="The base model; default: the hub model that the manifest names.")
    ] = None,
    openssf_key: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A PEM key (P-256) for a second signature in OpenSSF's model-signing format.",
        ),
    ] = None,
    author: Annotated[str | None, typer.Option(help="Who makes the papers: a person or an organization.")] = None,
    supplier: Annotated[str | None, typer.Option(help="Who supplies the model; default: the author.")] = None,
    model_license: Annotated[
        str | None, typer.Option("--license", help="License of this model: an SPDX id or a name.")
    ] = None,
    base_license: Annotated[
        str | None, typer.Option(help="License of the base model; default: what its model card says.")
    ] = None,
    data_supplier: Annotated[str | None, typer.Option(help="Who brought the training rows.")] = None,
    data_license: Annotated[str | None, typer.Option(help="License of the training rows.")] = None,
    pool_license: Annotated[str | None, typer.Option(help="License of the safety pool.")] = None,
    base_operations: Annotated[
        float | None,
        typer.Option(min=1, help="Floating-point operations of the base model's own training, as 1.2e24."),
    ] = None,
    push: Annotated[str | None, typer.Option(help="Push the model to this hub repository: OWNER/NAME.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    public_key: PublicKey = None,
    known: KnownKeys = None,
    waiver: Waiver = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the model's folder, with a CycloneDX bill of materials and the EU AI Act's Annex XI facts beside it."""
    from spard.commands.proofs import check_adapter  # loads cryptography

    stated = _module("spard.release.training_facts").ProviderFacts(
        author, supplier, model_license, base_license, data_supplier, data_license, pool_license, base_operations
    )
    try:
        # Nothing is written before the signature is verified.
        check_adapter(adapter, public_key, known, waiver)
    except NotProved as error:
        raise UserError(f"Not exported: {error.message}") from None
    to.mkdir(parents=True, exist_ok=True)
    folder = copied = _copy_adapter(adapter, to)
    if merged:
        folder = _merge_adapter(copied, base)
        # Without a copy `copied` is the user's own folder, which must stay.
        if not (adapter.is_dir() and copied.samefile(adapter)):
            shutil.rmtree(copied)
    wrote = [folder, *_papers(folder, stated)]
    if openssf_key:
        wrote += _sign(folder, wrote[1:], openssf_key)
    pushed = str(_module("spard.release.hub").push(folder, push, is_private=not public)) if push else None
    _tell(wrote, pushed, as_json)


def _tell(wrote: Sequence[Path], pushed: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"wrote": [str(path) for path in wrote], "pushed": pushed}, indent=2))
        return
    for path in wrote:
        typer.echo(f"wrote {path}")
    if pushed:
        typer.echo(f"pushed {pushed}")


def _copy_adapter(adapter: Path, to: Path) -> Path:
    """Copy or unpack the adapter's files, unchanged, into a folder of their own."""
    name = adapter.resolve().name
    name = next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), name)
    folder = to / name
    if folder.exists() and adapter.is_dir() and folder.samefile(adapter):
        return folder
    with _replacing(folder) as aside:
        if adapter.is_dir():
            shutil.copytree(adapter, aside, dirs_exist_ok=True)
        else:
            from spard.release.archive import unpack  # loads tarfile

            unpack(adapter, aside)
    return folder


def _merge_adapter(adapter: Path, base: str | None) -> Path:
    """Merge an adapter into its base model; return the folder of the whole model, beside the adapter's."""
    if not (adapter / _ADAPTER).is_file():
        raise UserError("There is nothing to merge: it is a whole model. Leave --merged out.")
    source: dict[str, object] = json.loads((adapter / MANIFEST).read_text()).get("base_source") or {}
    revision = None if base else source.get("revision")
    if base is None and revision is None:
        named = source.get("name", "a folder at the provider's")
        raise UserError(f"The base model is {named}, which no hub has: name its folder with --base.")
    folder = adapter.with_name(f"{adapter.name.removesuffix('-adapter')}-merged")
    models = _module("spard.models.base")
    hide_progress_bars()
    loaded = models.load_base(base or source["name"], revision, "cpu", as_stored=True)
    _module("spard.models.adapters").save_merged(loaded, adapter, folder)
    return folder


def _papers(folder: Path, stated: Any) -> Iterator[Path]:
    """Write the documents beside the folder, from its manifest and the provider's facts, and yield their paths."""
    manifest, digest = json.loads((folder / MANIFEST).read_text()), file_sha256(folder / MANIFEST)
    bom = _module("spard.release.bom").ml_bom(manifest, digest, folder.name, stated)
    audit = _module("spard.release.audit_attestation")
    statement = audit.audit_statement(
        audit.AuditRecord.from_manifest(manifest),
        {f"{folder.name}/{MANIFEST}": digest},
        audit.audit_resources(manifest),
    )
    for name, text in (
        ("cdx.json", bom),
        ("g7.md", _module("spard.release.g7_elements").element_table(json.loads(bom), folder.name)),
        ("annex-xi.md", _module("spard.release.annex_xi").document(manifest, digest, stated)),
        ("audit.intoto.json", json.dumps(statement, indent=2) + "\n"),
    ):
        path = folder.with_name(f"{folder.name}.{name}")
        path.write_text(text, encoding="utf-8")
        yield path


def _sign(folder: Path, papers: Sequence[Path], key: Path) -> Iterator[Path]:
    """Write an OpenSSF bundle of the folder, and of each paper, and yield their paths."""
    for signed, name in ((folder, f"{folder.name}.model.sig"), *((paper, f"{paper.name}.sig") for paper in papers)):
        bundle = folder.with_name(name)
        _module("spard.release.openssf").sign_folder(signed, key, bundle)
        yield bundle


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` on success and is removed on failure."""
    aside = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _module(name: str) -> Any:
    """Import a module that only some exports need; raise `UserError` if its dependencies are not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'spard[export]'") from None
