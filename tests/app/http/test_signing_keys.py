"""The provider's keys are shown to everybody, signed, and `spard verify` takes them from there."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.routes import results
from app.settings import Settings
from app.signing import public_keys, revoke, rotate, signing_key
from spard.commands import main
from spard.digests import write_manifest
from spard.release.keys import KeySet, publish, read_published
from spard.release.manifest import key_id, sign
from tests.app.http.conftest import Service, serve_app

URL = "/v1/signing_keys"
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A customer's machine has no key of the service's; no answer is kept, so that a test sees what it did."""
    monkeypatch.setenv("SPARD_DATA_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(results, "_KEPT_S", 0)


def verify(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *(str(each) for each in arguments)])
    return int(ended.value.code or 0)


def write_adapter(folder: Path, key: Ed25519PrivateKey) -> Path:
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    write_manifest(folder, {"job_id": "ftjob-1", "gate": {"decision": "pass"}})
    sign(folder, key)
    return folder


def test_a_revoked_key_is_refused_by_address_and_by_saved_file(
    service: Service, settings: Settings, tmp_path: Path
) -> None:
    old = signing_key(settings)
    before = write_adapter(tmp_path / "before", old)
    rotate(settings)
    after, kept = write_adapter(tmp_path / "after", signing_key(settings)), tmp_path / "kept.json"
    with serve_app(service.app) as base:
        address = f"{base}/signing_keys"
        first = service.http.get(URL).content
        assert [verify(each, "--key-set", address, "--keep", kept) for each in (before, after)] == [0, 0]
        revoke(settings, key_id(old.public_key()), "stolen")
        assert [verify(each, "--key-set", address, "--keep", kept) for each in (before, after)] == [1, 0]
    assert [verify(each, "--key-set", kept) for each in (before, after)] == [1, 0]
    (tmp_path / "first.json").write_bytes(first)
    assert verify(before, "--key-set", tmp_path / "first.json") == 0  # an old copy alone cannot know
    assert (
        verify(after, "--key-set", tmp_path / "first.json", "--keep", kept) == 1
    )  # but what was seen is not forgotten


def test_a_service_without_a_key_says_so_and_names_no_place(service: Service, settings: Settings) -> None:
    got = service.http.get(URL)
    assert got.status_code == 404
    assert str(settings.data_dir) not in got.text
    assert not (settings.data_dir / "signing_key.pem").exists()


def test_an_answer_is_kept_for_a_while(service: Service, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_KEPT_S", 3600)
    signing_key(settings)
    first = service.http.get(URL)
    rotate(settings)
    assert service.http.get(URL).content == first.content
    assert first.headers["cache-control"] == "public, max-age=3600"


def change_version(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"version": 99}


def without_revocations(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"keys": [each | {"revoked_at": None} for each in record["keys"]]}


@pytest.mark.parametrize("change", [change_version, without_revocations])
def test_a_set_that_was_changed_is_refused(settings: Settings, tmp_path: Path, change: Any) -> None:
    old = signing_key(settings)
    rotate(settings)
    revoke(settings, key_id(old.public_key()), "stolen")
    key = signing_key(settings)
    stated = json.loads(publish(public_keys(settings), key, NOW))
    path, adapter = tmp_path / "set.json", write_adapter(tmp_path / "adapter", key)
    path.write_text(json.dumps(stated))
    assert verify(adapter, "--key-set", path) == 0
    path.write_text(json.dumps(stated | {"record": json.dumps(change(json.loads(stated["record"])))}))
    assert verify(adapter, "--key-set", path) == 2


def test_a_set_that_another_key_signed_is_refused(settings: Settings, tmp_path: Path) -> None:
    key, thief = signing_key(settings), Ed25519PrivateKey.generate()
    path, adapter = tmp_path / "set.json", write_adapter(tmp_path / "adapter", thief)
    path.write_text(publish(public_keys(settings), thief, NOW))
    assert verify(adapter, "--key-set", path) == 2
    rotate(settings)
    path.write_text(publish(public_keys(settings), key, NOW))  # an older key of the provider's own
    assert verify(adapter, "--key-set", path) == 2


def test_an_old_set_is_told_to_be_old(settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = signing_key(settings)
    path, adapter = tmp_path / "set.json", write_adapter(tmp_path / "adapter", key)
    for days, is_told in ((29, False), (31, True)):
        path.write_text(publish(public_keys(settings), key, NOW - timedelta(days=days)))
        assert verify(adapter, "--key-set", path) == 0
        assert ("issued 31 days ago" in capsys.readouterr().err) == is_told


def test_a_set_is_older_by_its_version_its_date_or_what_it_lacks() -> None:
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    one = KeySet.from_key(keys[0].public_key())
    two = one.rotate(keys[1].public_key())
    revoked = two.revoke(one.current, "2026-01-01", "stolen")

    def publish_set(known: KeySet, days: int = 0) -> Any:
        key = next(each for each in keys if key_id(each.public_key()) == known.current)
        return read_published(publish(known, key, NOW + timedelta(days=days)).encode(), "set")

    publish_set(revoked, 1).require_not_older(publish_set(two))
    publish_set(two).require_not_older(publish_set(two))
    for found, kept, why in (
        (publish_set(one, 1), publish_set(two), "is missing"),
        (publish_set(two, 1), publish_set(revoked), "is no longer revoked"),
        (publish_set(two, -1), publish_set(two), "is older"),
        (read_published(two.text().encode(), "set"), publish_set(two), "is older"),
    ):
        with pytest.raises(Exception, match=why):
            found.require_not_older(kept)


@pytest.mark.parametrize(
    "address",
    ["http://example.com/keys", "file:///etc/passwd", "ftp://127.0.0.1/keys", "https://[::1", "https://a b/keys"],
)
def test_a_set_is_fetched_where_nobody_can_change_it_only(settings: Settings, tmp_path: Path, address: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", signing_key(settings))
    assert verify(adapter, "--key-set", address) == 2


def test_the_set_holds_public_halves_only(service: Service, settings: Settings) -> None:
    private = signing_key(settings).private_bytes_raw()
    text = service.http.get(URL).text
    assert base64.b64encode(private).decode() not in text
    assert private.hex() not in text
