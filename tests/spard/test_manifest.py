"""A signed folder is what was signed, or it is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.digests import write_manifest
from spard.errors import NotProved
from spard.release.archive import archive, unpack
from spard.release.manifest import sign, verify

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()


@pytest.fixture
def signed_folder(tmp_path: Path) -> Path:
    """An adapter's folder of three files, one of them in a folder of its own."""
    folder = tmp_path / "adapter"
    (folder / "deep").mkdir(parents=True)
    for name in ("adapter_config.json", "weights.bin", "deep/notes.txt"):
        (folder / name).write_bytes(name.encode() * 100)
    write_manifest(folder, {"job_id": "ftjob-1"})
    sign(folder, KEY)
    return folder


def pack_folder(folder: Path) -> Path:
    path = folder.with_name("adapter.tar.gz")
    archive(folder, path, "ftjob-1-adapter")
    return path


def tar(folder: Path, *arguments: str) -> Path:
    path = folder.with_name("kept.tar")
    subprocess.run(["tar", "-cf", str(path), *arguments], check=True)
    return path


def tar_of_dot(folder: Path) -> Path:
    """What `tar cf x.tar .` makes in the folder."""
    return tar(folder, "-C", str(folder), ".")


def tar_with_folder(folder: Path) -> Path:
    """What `tar cf x.tar adapter` makes beside the folder, after a file manager has looked into both."""
    for place in (folder, folder / "deep"):
        (place / ".DS_Store").write_bytes(b"Bud1")
    return tar(folder, "-C", str(folder.parent), folder.name)


def downloaded_folder(folder: Path) -> Path:
    """What `hf download --local-dir` leaves."""
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True, exist_ok=True)
    for name in (".gitattributes", ".cache/huggingface/.gitignore", ".cache/huggingface/download/weights.bin.metadata"):
        (folder / name).write_text("*")
    return folder


def snapshot(folder: Path) -> Path:
    """What a hub's client has in its cache: links to blobs."""
    repository = folder.with_name("models--acme--adapter")
    shutil.rmtree(repository, ignore_errors=True)
    place = repository / "snapshots" / ("0" * 40)
    (repository / "blobs").mkdir(parents=True)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        blob = repository / "blobs" / str(name).replace("/", "-")
        shutil.copyfile(path, blob)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(os.path.relpath(blob, (place / name).parent))
    (place / ".gitattributes").write_text("*.safetensors filter=lfs")
    return place


FORMS: dict[str, Callable[[Path], Path]] = {
    "folder": lambda folder: folder,
    "archive": pack_folder,
    "archive of 0.2": lambda folder: tar(folder, "-z", "-C", str(folder), *sorted(os.listdir(folder))),
    "tar of .": tar_of_dot,
    "tar with its folder": tar_with_folder,
    "tar from the folder above": lambda folder: tar(folder, "-C", str(folder.parent), f"./{folder.name}"),
    "downloaded": downloaded_folder,
    "snapshot": snapshot,
}
ARCHIVES = {name: form for name, form in FORMS.items() if "tar" in name or "archive" in name}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_was_signed_is_proved(form: Callable[[Path], Path], signed_folder: Path) -> None:
    proved = verify(form(signed_folder), PUBLIC)
    assert (proved.files, proved.manifest["job_id"]) == (3, "ftjob-1")
    assert proved.bytes == sum(len(name) * 100 for name in ("adapter_config.json", "weights.bin", "deep/notes.txt"))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", ["adapter_config.json", "weights.bin", "deep/notes.txt", "manifest.json"])
def test_a_flipped_byte_anywhere_is_refused(name: str, form: Callable[[Path], Path], signed_folder: Path) -> None:
    content = bytearray((signed_folder / name).read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (signed_folder / name).write_bytes(damaged)
        with pytest.raises(NotProved, match=name):
            verify(form(signed_folder), PUBLIC)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "deep/adapter_model.bin", "modeling.py", "chat_template.jinja", ".DS_Store.py"),
        *("._weights.bin", ".cache/huggingface/weights.bin", ".cache/other.metadata", "deep/manifest.json"),
    ],
)
def test_what_a_loader_could_read_is_refused_in_every_form(
    name: str, form: Callable[[Path], Path], signed_folder: Path
) -> None:
    (signed_folder / name).parent.mkdir(parents=True, exist_ok=True)
    (signed_folder / name).write_bytes(b"x")
    with pytest.raises(NotProved, match="not in the manifest"):
        verify(form(signed_folder), PUBLIC)


def test_what_was_passed_over_is_told(signed_folder: Path) -> None:
    assert verify(signed_folder, PUBLIC).passed_over == ()
    assert verify(tar_with_folder(signed_folder), PUBLIC).passed_over == (".DS_Store", "deep/.DS_Store")


def test_a_tar_of_two_folders_is_refused(signed_folder: Path) -> None:
    (signed_folder.with_name("more") / "deep").mkdir(parents=True)
    (signed_folder.with_name("more") / "model.py").write_text("")
    with pytest.raises(NotProved, match="not signed"):
        verify(tar(signed_folder, "-C", str(signed_folder.parent), signed_folder.name, "more"), PUBLIC)


def test_links_of_a_snapshot_lead_to_its_own_blobs_or_are_refused(signed_folder: Path, tmp_path: Path) -> None:
    place = snapshot(signed_folder)
    path, blobs = place / "weights.bin", place.parent.parent / "blobs"
    for elsewhere in (tmp_path / "weights.bin", blobs / "deep" / "weights.bin"):
        elsewhere.parent.mkdir(exist_ok=True)
        shutil.copyfile(signed_folder / "weights.bin", elsewhere)
        path.unlink()
        path.symlink_to(elsewhere)
        with pytest.raises(NotProved, match=r"weights\.bin is a link"):
            verify(place, PUBLIC)


def test_every_byte_of_the_signature_counts(signed_folder: Path) -> None:
    stated = json.loads((signed_folder / "manifest.sig").read_text())
    for field, text in stated.items():
        wrong = stated | {field: ("B" if text[0] == "A" else "A") + text[1:]}
        (signed_folder / "manifest.sig").write_text(json.dumps(wrong))
        with pytest.raises(NotProved):
            verify(signed_folder, PUBLIC)


def test_another_key_is_refused_and_both_are_named(signed_folder: Path) -> None:
    with pytest.raises(NotProved, match=r"signed by another key: ed25519:.*, not ed25519:"):
        verify(signed_folder, OTHER.public_key())


def test_a_manifest_swapped_for_that_of_another_adapter_is_refused(signed_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(signed_folder, other)
    (other / "weights.bin").write_bytes(b"x")
    write_manifest(other, {})
    sign(other, KEY)
    for name in ("manifest.json", "manifest.sig"):
        shutil.copy(other / name, signed_folder / name)
    with pytest.raises(NotProved, match=r"weights\.bin was changed"):
        verify(signed_folder, PUBLIC)


def test_a_file_too_many_or_too_few_is_refused(signed_folder: Path) -> None:
    (signed_folder / "extra.py").write_text("")
    with pytest.raises(NotProved, match=r"extra\.py is not in the manifest"):
        verify(signed_folder, PUBLIC)
    (signed_folder / "extra.py").unlink()
    (signed_folder / "weights.bin").unlink()
    with pytest.raises(NotProved, match=r"weights\.bin is missing"):
        verify(signed_folder, PUBLIC)


def test_a_link_is_refused(signed_folder: Path) -> None:
    (signed_folder / "weights.bin").rename(signed_folder.with_name("elsewhere"))
    (signed_folder / "weights.bin").symlink_to(signed_folder.with_name("elsewhere"))
    with pytest.raises(NotProved, match="link"):
        verify(signed_folder, PUBLIC)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sig"])
def test_what_is_not_signed_is_refused(name: str, signed_folder: Path) -> None:
    (signed_folder / name).unlink()
    with pytest.raises(NotProved, match="not signed"):
        verify(signed_folder, PUBLIC)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": "none"}', "\xff"])
def test_a_signature_that_is_none_is_refused(text: str, signed_folder: Path) -> None:
    (signed_folder / "manifest.sig").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotProved):
        verify(signed_folder, PUBLIC)


def test_a_name_that_is_twice_in_an_archive_is_refused(signed_folder: Path) -> None:
    path = pack_folder(signed_folder)
    whole = path.with_name("twice.tar")
    with tarfile.open(path) as old, tarfile.open(whole, "w") as new:
        for entry in [*old.getmembers(), old.getmember("ftjob-1-adapter/weights.bin")]:
            new.addfile(entry, old.extractfile(entry))
    with pytest.raises(NotProved, match="more than once"):
        verify(whole, PUBLIC)


@pytest.mark.parametrize("name", ["../weights.bin", "/weights.bin"])
def test_an_archive_that_reaches_outside_is_refused(name: str, signed_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "outside.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    with pytest.raises(NotProved, match="below its folder"):
        verify(path, PUBLIC)


def test_half_an_archive_is_refused(signed_folder: Path) -> None:
    path = pack_folder(signed_folder)
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(NotProved):
            verify(path, PUBLIC)


def test_verifying_loads_no_torch() -> None:
    code = "import sys, spard.commands.verify, spard.release.manifest; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("form", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_is_unpacked_without_its_top_folder(
    form: Callable[[Path], Path], signed_folder: Path, tmp_path: Path
) -> None:
    unpack(form(signed_folder), tmp_path / "unpacked")
    verify(tmp_path / "unpacked", PUBLIC)
    assert {path.name for path in (tmp_path / "unpacked").iterdir() if path.is_dir()} == {"deep"}
