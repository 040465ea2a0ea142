"""What a manifest and its signature are made of, and the forms of damage that are each told apart."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.digests import file_sha256, write_manifest
from spard.errors import NotProved
from spard.release.manifest import check, key_id, sign, sign_bytes, verify, verify_waiver

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
PUBLIC = KEY.public_key()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A signed folder of two files, one below it."""
    folder = tmp_path / "adapter"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(b"w" * 3_000_000)
    (folder / "deep" / "notes.txt").write_bytes(b"n")
    write_manifest(folder, {"job_id": "ftjob-1"})
    sign(folder, KEY)
    return folder


def sign_again(folder: Path, **changed: Any) -> None:
    """Sign other facts than those that are so."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changed
    (folder / "manifest.json").write_text(json.dumps(manifest))
    sign(folder, KEY)


def test_a_manifest_is_these_bytes(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"1")
    (tmp_path / "manifest.sig").write_bytes(b"old")
    (tmp_path / "sub").mkdir()
    found = write_manifest(tmp_path, {"z": 1, "a": 2})
    digest = hashlib.sha256(b"1").hexdigest()
    assert found == {"z": 1, "a": 2, "files": {"b": {"sha256": digest, "bytes": 1}}}
    assert (tmp_path / "manifest.json").read_text() == (
        f'{{\n  "a": 2,\n  "files": {{\n    "b": {{\n      "bytes": 1,\n      "sha256": "{digest}"\n    }}\n  }},\n'
        '  "z": 1\n}\n'
    )
    assert file_sha256(tmp_path / "b") == digest
    assert write_manifest(tmp_path, {"z": 1, "a": 2}) == found


def test_a_signature_is_these_fields(folder: Path) -> None:
    text = (folder / "manifest.sig").read_text()
    assert text == json.dumps(sign_bytes((folder / "manifest.json").read_bytes(), KEY), indent=2) + "\n"
    stated = json.loads(text)
    raw = PUBLIC.public_bytes_raw()
    assert stated["algorithm"] == "ed25519"
    assert stated["key_id"] == key_id(PUBLIC) == "ed25519:" + hashlib.sha256(raw).hexdigest()[:32]
    assert base64.b64decode(stated["public_key"]) == raw
    PUBLIC.verify(base64.b64decode(stated["signature"]), (folder / "manifest.json").read_bytes())


def test_what_is_proved_is_told(folder: Path) -> None:
    for public in (PUBLIC, None):
        proved = verify(folder, public)
        assert (proved.files, proved.bytes, proved.key_id) == (2, 3_000_001, key_id(PUBLIC))
        assert proved.manifest_sha256 == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
        assert proved.manifest["job_id"] == "ftjob-1"


@pytest.mark.parametrize(
    "files", [None, [], {}, {"weights.bin": {"sha256": "0", "bytes": 3_000_000}}], ids=["none", "list", "empty", "one"]
)
def test_a_list_of_other_files_is_refused(files: Any, folder: Path) -> None:
    sign_again(folder, files=files)
    with pytest.raises(NotProved):
        verify(folder, PUBLIC)


@pytest.mark.parametrize("field", ["sha256", "bytes"])
def test_each_fact_of_a_file_counts(field: str, folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    files["weights.bin"][field] = "0" if field == "sha256" else 1
    sign_again(folder, files=files)
    with pytest.raises(NotProved, match=r"weights\.bin was changed"):
        verify(folder, PUBLIC)


@pytest.mark.parametrize(
    "changed", [{"algorithm": "rsa"}, {"key_id": "ed25519:0"}, {"public_key": "*"}, {"signature": "*"}]
)
def test_each_field_of_a_signature_counts(changed: dict[str, str]) -> None:
    stated = sign_bytes(b"content", KEY)
    assert check(b"content", json.dumps(stated).encode(), None, "it") == key_id(PUBLIC)
    with pytest.raises(NotProved, match="cannot be read"):
        check(b"content", json.dumps(stated | changed).encode(), None, "it")


def test_characters_outside_base64_are_not_passed_over() -> None:
    stated = sign_bytes(b"content", KEY)
    for field in ("public_key", "signature"):
        with pytest.raises(NotProved, match="cannot be read"):
            check(b"content", json.dumps(stated | {field: "!" + stated[field]}).encode(), PUBLIC, "it")


def test_other_content_and_other_keys_are_refused() -> None:
    stated = json.dumps(sign_bytes(b"content", KEY)).encode()
    assert check(b"content", stated, PUBLIC, "it") == key_id(PUBLIC)
    with pytest.raises(NotProved, match="not what was signed"):
        check(b"contents", stated, None, "it")
    with pytest.raises(NotProved, match="another key"):
        check(b"content", stated, OTHER.public_key(), "it")


def waiver(path: Path, record: dict[str, Any], key: Ed25519PrivateKey = KEY) -> Path:
    text = json.dumps(record)
    path.write_text(json.dumps({"record": text, "signature": sign_bytes(text.encode(), key)}))
    return path


def test_a_waiver_releases_the_adapter_that_it_names_and_is_signed_as_it_is(folder: Path, tmp_path: Path) -> None:
    proved = verify(folder, PUBLIC)
    record = {"manifest_sha256": proved.manifest_sha256, "reason": "a test"}
    path = waiver(tmp_path / "waiver.json", record)
    assert dict(verify_waiver(path, proved, PUBLIC)) == dict(verify_waiver(path, proved)) == record
    with pytest.raises(NotProved, match="another key"):
        verify_waiver(path, proved, OTHER.public_key())
    with pytest.raises(NotProved, match="another adapter"):
        verify_waiver(path, replace(proved, manifest_sha256="0"), PUBLIC)
    with pytest.raises(NotProved, match="another adapter"):
        verify_waiver(waiver(path, record, OTHER), proved)
    with pytest.raises(NotProved, match="cannot be read"):
        verify_waiver(tmp_path / "none.json", proved)


@pytest.mark.parametrize("kind", ["link", "folder", "device"])
def test_an_archive_s_entry_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.tar"
    entry = tarfile.TarInfo("weights.bin")
    entry.type = {"link": tarfile.SYMTYPE, "folder": tarfile.DIRTYPE, "device": tarfile.CHRTYPE}[kind]
    entry.linkname = "/etc/passwd"
    with tarfile.open(path, "w") as tar:
        tar.addfile(entry)
    with pytest.raises(NotProved, match=r"There is no manifest\.json" if kind == "folder" else "no plain file"):
        verify(path, PUBLIC)


@pytest.mark.parametrize("name", ["deep/../weights.bin", "..", "/weights.bin"])
def test_an_entry_that_leaves_its_folder_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "outside.tar"
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    with pytest.raises(NotProved, match="no plain file below"):
        verify(path, PUBLIC)


def test_links_to_folders_and_pipes_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotProved, match="more is a link"):
        verify(folder, PUBLIC)
    (folder / "more").unlink()
    os.mkfifo(folder / "more")
    with pytest.raises(NotProved, match="more is a link or a device"):
        verify(folder, PUBLIC)


def test_a_manifest_that_is_there_twice_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "twice.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("manifest.json", "manifest.json", "manifest.sig", "weights.bin", "deep/notes.txt"):
            tar.add(folder / name, name)
    with pytest.raises(NotProved, match=r"manifest\.json is in the archive more than once"):
        verify(path, PUBLIC)


@pytest.mark.parametrize("text", ["[]", "1", "null", "no JSON", "[" * 100_000])
def test_what_is_signed_but_no_object_is_refused(text: str, folder: Path, tmp_path: Path) -> None:
    proved = verify(folder, PUBLIC)
    (folder / "manifest.json").write_text(text)
    sign(folder, KEY)
    with pytest.raises(NotProved, match=r"manifest\.json is no JSON object"):
        verify(folder, PUBLIC)
    (tmp_path / "waiver.json").write_text(text)
    with pytest.raises(NotProved, match=r"waiver\.json is no JSON object"):
        verify_waiver(tmp_path / "waiver.json", proved, PUBLIC)
