"""The signing key: made once, kept from others, and the verify command that uses its public half."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import SecretStr

from app.cli import main
from app.settings import Settings
from app.signing import NoSigningKey, public_pem, signing_key
from spard.manifest import key_id, sign, write_manifest
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


def test_the_embedded_mode_makes_one_key_that_only_its_user_can_read(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with ThreadPoolExecutor(8) as pool:
        ids = {key_id(key.public_key()) for key in pool.map(signing_key, [settings] * 8)}
    assert len(ids) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["signing_key.pem"]
    assert stat.S_IMODE((tmp_path / "signing_key.pem").stat().st_mode) == 0o600


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
    assert run("verify", tmp_path / "nothing") == 2
    assert run("verify", adapter, "--public-key", adapter / "weights") == 2


def test_the_public_key_is_printed_and_the_private_one_is_not(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARD_SIGNING_KEY", str(tmp_path / "key.pem"))
    assert run("keys", "signing") == 0
    told = capsys.readouterr()
    assert told.out == (tmp_path / "key.pub").read_text()
    assert "PRIVATE" not in told.out + told.err
