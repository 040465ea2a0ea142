"""A signed folder is what was signed, or it is refused."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.archive import archive
from spard.errors import NotProved
from spard.manifest import sign, verify, write_manifest

KEY, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
PUBLIC = KEY.public_key()


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    """An adapter's folder of three files, one of them in a folder of its own."""
    folder = tmp_path / "adapter"
    (folder / "deep").mkdir(parents=True)
    for name in ("adapter_config.json", "weights.bin", "deep/notes.txt"):
        (folder / name).write_bytes(name.encode() * 100)
    write_manifest(folder, {"job_id": "ftjob-1"})
    sign(folder, KEY)
    return folder


def packed(folder: Path) -> Path:
    path = folder.with_name("adapter.tar.gz")
    archive(folder, path)
    return path


@pytest.mark.parametrize("form", [lambda folder: folder, packed], ids=["folder", "archive"])
def test_what_was_signed_is_proved(form: Callable[[Path], Path], signed: Path) -> None:
    proved = verify(form(signed), PUBLIC)
    assert (proved.files, proved.manifest["job_id"]) == (3, "ftjob-1")
    assert proved.bytes == sum(len(name) * 100 for name in ("adapter_config.json", "weights.bin", "deep/notes.txt"))


@pytest.mark.parametrize("form", [lambda folder: folder, packed], ids=["folder", "archive"])
@pytest.mark.parametrize("name", ["adapter_config.json", "weights.bin", "deep/notes.txt", "manifest.json"])
def test_a_flipped_byte_anywhere_is_refused(name: str, form: Callable[[Path], Path], signed: Path) -> None:
    content = bytearray((signed / name).read_bytes())
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (signed / name).write_bytes(damaged)
        with pytest.raises(NotProved, match=name):
            verify(form(signed), PUBLIC)


def test_every_byte_of_the_signature_counts(signed: Path) -> None:
    stated = json.loads((signed / "manifest.sig").read_text())
    for field, text in stated.items():
        wrong = stated | {field: ("B" if text[0] == "A" else "A") + text[1:]}
        (signed / "manifest.sig").write_text(json.dumps(wrong))
        with pytest.raises(NotProved):
            verify(signed, PUBLIC)


def test_another_key_is_refused_and_both_are_named(signed: Path) -> None:
    with pytest.raises(NotProved, match=r"signed by another key: ed25519:.*, not ed25519:"):
        verify(signed, OTHER.public_key())


def test_a_manifest_swapped_for_that_of_another_adapter_is_refused(signed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(signed, other)
    (other / "weights.bin").write_bytes(b"x")
    write_manifest(other, {})
    sign(other, KEY)
    for name in ("manifest.json", "manifest.sig"):
        shutil.copy(other / name, signed / name)
    with pytest.raises(NotProved, match=r"weights\.bin was changed"):
        verify(signed, PUBLIC)


def test_a_file_too_many_or_too_few_is_refused(signed: Path) -> None:
    (signed / "extra.py").write_text("")
    with pytest.raises(NotProved, match=r"extra\.py is not in the manifest"):
        verify(signed, PUBLIC)
    (signed / "extra.py").unlink()
    (signed / "weights.bin").unlink()
    with pytest.raises(NotProved, match=r"weights\.bin is missing"):
        verify(signed, PUBLIC)


def test_a_link_is_refused(signed: Path) -> None:
    (signed / "weights.bin").rename(signed.with_name("elsewhere"))
    (signed / "weights.bin").symlink_to(signed.with_name("elsewhere"))
    with pytest.raises(NotProved, match="link"):
        verify(signed, PUBLIC)


@pytest.mark.parametrize("name", ["manifest.json", "manifest.sig"])
def test_what_is_not_signed_is_refused(name: str, signed: Path) -> None:
    (signed / name).unlink()
    with pytest.raises(NotProved, match="not signed"):
        verify(signed, PUBLIC)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"algorithm": "none"}', "\xff"])
def test_a_signature_that_is_none_is_refused(text: str, signed: Path) -> None:
    (signed / "manifest.sig").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotProved):
        verify(signed, PUBLIC)


def test_a_name_that_is_twice_in_an_archive_is_refused(signed: Path) -> None:
    path = packed(signed)
    whole = path.with_name("twice.tar")
    with tarfile.open(path) as old, tarfile.open(whole, "w") as new:
        for entry in [*old.getmembers(), old.getmember("weights.bin")]:
            new.addfile(entry, old.extractfile(entry))
    with pytest.raises(NotProved, match="twice"):
        verify(whole, PUBLIC)


@pytest.mark.parametrize("name", ["../weights.bin", "/weights.bin"])
def test_an_archive_that_reaches_outside_is_refused(name: str, signed: Path, tmp_path: Path) -> None:
    path = tmp_path / "outside.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    with pytest.raises(NotProved, match="below its folder"):
        verify(path, PUBLIC)


def test_half_an_archive_is_refused(signed: Path) -> None:
    path = packed(signed)
    content = path.read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(NotProved):
            verify(path, PUBLIC)


def test_verifying_loads_no_torch() -> None:
    code = "import sys, app.cli, spard.manifest; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
