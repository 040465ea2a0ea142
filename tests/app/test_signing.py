"""The signing key: made once, kept from others, and the verify command that uses its public half."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import SecretStr

from app.settings import Settings, get_settings
from app.signing import NoSigningKey, public_keys, revoke, rotate, signing_key
from spard.commands import main
from spard.digests import write_manifest
from spard.release.keys import KEY_SET_FILE, public_pem
from spard.release.manifest import key_id, sign
from tests.worker.parts import write_key


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder signed with `tmp_path/key.pem`, whose public half is in `tmp_path/key.pub`."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    write_manifest(folder, {"job_id": "ftjob-1", "gate": {"decision": "pass"}})
    key = write_key(tmp_path / "key.pem")
    (tmp_path / "key.pub").write_text(public_pem(key))
    sign(folder, key)
    return folder


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    return int(ended.value.code or 0)


def test_a_process_with_the_key_hides_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    write_key(path)
    code = f"""
import ctypes, pathlib
from app.settings import Settings
from app.signing import signing_key
is_dumpable = 3
before = ctypes.CDLL(None).prctl(is_dumpable)
signing_key(Settings(signing_key=pathlib.Path({str(path)!r})))
print(before, ctypes.CDLL(None).prctl(is_dumpable))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]


def test_the_embedded_mode_makes_one_key_that_only_its_user_can_read(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        ids = {key_id(key.public_key()) for key in pool.map(signing_key, [settings] * 8)}
    assert len(ids) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["signing_key.pem"]
    assert stat.S_IMODE((tmp_path / "signing_key.pem").stat().st_mode) == 0o600


def fill_disk(monkeypatch: pytest.MonkeyPatch, step: str, name: str = "") -> None:
    """Let a step of writing a file fail, if its target has this name."""
    whole: Callable[..., Any] = getattr(os, step)

    def fail(*arguments: Any) -> Any:
        if name and Path(arguments[1]).name != name:
            return whole(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)


@pytest.mark.parametrize(("step", "name"), [("fsync", ""), ("replace", KEY_SET_FILE), ("replace", "signing_key.pem")])
def test_a_rotation_that_fails_leaves_the_old_key_and_no_new_one(
    step: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path)
    old = key_id(signing_key(settings).public_key())
    fill_disk(monkeypatch, step, name)

    with pytest.raises(NoSigningKey, match="cannot be replaced: No space left on device"):
        rotate(settings)

    assert {path.name for path in tmp_path.iterdir()} <= {"signing_key.pem", KEY_SET_FILE}
    assert key_id(signing_key(settings).public_key()) == old == public_keys(settings).current


@pytest.mark.parametrize("step", ["fsync", "link"])
def test_a_first_key_that_cannot_be_written_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, step)
    with pytest.raises(NoSigningKey, match=r"cannot be made: No space left on device\. Make one with"):
        signing_key(Settings(data_dir=tmp_path))
    assert [*tmp_path.iterdir()] == []


def test_several_machines_are_asked_for_one_key(tmp_path: Path) -> None:
    with pytest.raises(NoSigningKey, match="SPARD_SIGNING_KEY"):
        signing_key(Settings(data_dir=tmp_path, database_url=SecretStr("postgresql://a@b/c")))


def test_a_key_that_everybody_can_read_is_refused(tmp_path: Path) -> None:
    write_key(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o644)
    with pytest.raises(NoSigningKey, match="chmod 600"):
        signing_key(Settings(signing_key=tmp_path / "key.pem"))


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
def test_a_key_that_is_none_is_refused_without_showing_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(NoSigningKey, match="no Ed25519 private key") as error:
        signing_key(Settings(signing_key=path))
    assert error.value.__cause__ is None
    assert not content or content.decode() not in str(error.value)


def test_verify_tells_what_was_proved(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", adapter, "--public-key", tmp_path / "key.pub") == 0
    told = capsys.readouterr().out
    assert "1 files, 7 bytes: each as signed, none missing, none added" in told
    assert "job: ftjob-1" in told
    assert "gate: pass" in told


def test_verify_refuses_in_one_line(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (adapter / "weights").write_bytes(b"Weights")
    assert run("verify", adapter, "--public-key", tmp_path / "key.pub") == 1
    told = capsys.readouterr()
    assert told.err == "spard: refused: weights was changed: its SHA-256 or size is not the manifest's.\n"
    assert told.out == ""


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "it is empty"), (b"a", "it is no tar, or only the beginning of one")]
)
def test_verify_tells_in_one_line_of_a_file_that_is_no_archive(
    content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter.tar.gz").write_bytes(content)
    assert run("verify", tmp_path / "adapter.tar.gz") == 1
    assert capsys.readouterr().err == f"spard: refused: adapter.tar.gz cannot be read as an archive: {why}.\n"


def test_without_a_key_the_signer_is_not_proved(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_DATA_DIR", str(tmp_path / "nothing"))
    assert run("verify", adapter) == 2
    assert "who signed it is not proved" in capsys.readouterr().err


def test_the_machine_that_signed_needs_no_public_key(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARD_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert run("verify", adapter) == 0


def test_what_cannot_be_checked_is_exit_code_2(adapter: Path, tmp_path: Path) -> None:
    assert run("verify", tmp_path / "nothing") == 3
    assert run("verify", adapter, "--public-key", adapter / "weights") == 2


def test_the_public_key_is_printed_and_the_private_one_is_not(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert run("keys", "signing") == 0
    told = capsys.readouterr()
    assert told.out == (tmp_path / "key.pub").read_text()
    assert "PRIVATE" not in told.out + told.err


def keys(home: Path, *arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SPARD_DATA_DIR", str(home))
    get_settings.cache_clear()
    return run("keys", *arguments)


def write_signed(folder: Path, key: Ed25519PrivateKey) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    write_manifest(folder, {"job_id": "ftjob-1", "gate": {"decision": "pass"}})
    sign(folder, key)
    return folder


def test_asking_for_the_key_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys(tmp_path / "none", "signing", monkeypatch=monkeypatch) != 0
    (told,) = capsys.readouterr().err.splitlines()
    assert "where the service is" in told
    assert not (tmp_path / "none").exists()


def test_after_a_rotation_the_old_archive_counts_until_its_key_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "data"
    settings = Settings(data_dir=home)
    old = signing_key(settings)
    before = write_signed(tmp_path / "before", old)
    assert keys(home, "rotate-signing", monkeypatch=monkeypatch) == 0
    new = signing_key(settings)
    after = write_signed(tmp_path / "after", new)
    assert key_id(new.public_key()) != key_id(old.public_key())
    published = tmp_path / "set.json"

    def publish() -> None:
        capsys.readouterr()
        assert keys(home, "signing", "--set", monkeypatch=monkeypatch) == 0
        published.write_text(capsys.readouterr().out)
        monkeypatch.setenv("SPARD_DATA_DIR", str(tmp_path / "elsewhere"))  # a customer's machine

    publish()
    assert [run("verify", each, "--key-set", published) for each in (before, after)] == [0, 0]
    assert keys(home, "revoke-signing", key_id(new.public_key()), "--reason", "x", monkeypatch=monkeypatch) != 0
    assert keys(home, "revoke-signing", key_id(old.public_key()), "--reason", "stolen", monkeypatch=monkeypatch) == 0
    publish()
    assert [run("verify", each, "--key-set", published) for each in (before, after)] == [1, 0]
    assert "revoked on 20" in (told := capsys.readouterr().err)
    assert "stolen" in told
    later = write_signed(tmp_path / "later", old)
    assert run("verify", later, "--key-set", published) == 1
    assert run("verify", write_signed(tmp_path / "foreign", Ed25519PrivateKey.generate()), "--key-set", published) == 1


def test_nothing_is_signed_with_a_revoked_key(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    path = tmp_path / "signing_key.pem"
    old = signing_key(settings)
    pem = path.read_bytes()
    rotate(settings)
    revoke(settings, key_id(old.public_key()), "stolen")
    path.write_bytes(pem)
    with pytest.raises(NoSigningKey, match="stolen"):
        signing_key(settings)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[" * 100_000, '{"keys": [{}], "current": ""}', '{"keys": [{"key_id": "a", "public_key": "b"}]}'],
)
def test_what_is_no_key_set_is_named(tmp_path: Path, adapter: Path, text: str) -> None:
    (tmp_path / "set.json").write_text(text)
    assert run("verify", adapter, "--key-set", tmp_path / "set.json") == 2
