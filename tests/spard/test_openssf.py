"""Our bundles are OpenSSF Model Signing 1.0: what its specification's vectors are held to holds for ours, and back."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from model_signing import hashing, verifying

from spard.release.openssf import sign_folder

VECTORS = Path(__file__).parent / "oms_vectors"
VALID = sorted(path.name for path in (VECTORS / "valid").iterdir())
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
SIGNED = {
    "signme-1": b"signme-1\n",
    "signme-2": b"signme-2",
}  # contents with the digests of the vectors `key` and `certificate`


def objects(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


# What the specification's sections 4.1 and 4.2 (bundle) and 5.1 and 5.2 (statement) require, in our own words.
MATERIAL = {
    "oneOf": [
        objects(("publicKey",), publicKey=objects(("hint",), hint={"type": "string", "minLength": 1})),
        objects(("x509CertificateChain",), x509CertificateChain=objects(("certificates",))),
        objects(("certificate", "tlogEntries"), tlogEntries={"type": "array", "minItems": 1}),
    ]
}
ENVELOPE = objects(
    ("payload", "payloadType", "signatures"),
    payload={"type": "string", "minLength": 1},
    payloadType={"const": "application/vnd.in-toto+json"},
    signatures={"type": "array", "minItems": 1, "items": objects(("sig",))},
)
BUNDLE = objects(
    ("mediaType", "verificationMaterial", "dsseEnvelope"),
    mediaType={"type": "string", "pattern": r"^application/vnd\.dev\.sigstore\.bundle"},
    verificationMaterial=MATERIAL,
    dsseEnvelope=ENVELOPE,
)
RESOURCE = objects(
    ("name", "digest", "algorithm"),
    name={"type": "string", "not": {"pattern": r"^/|(^|/)\.\.?(/|$)|//|/$"}},
    digest={"type": "string", "pattern": "^[0-9a-f]+$"},
    algorithm={"enum": ["sha256", "blake2b", "blake3"]},
)
STATEMENT = objects(
    ("_type", "subject", "predicateType", "predicate"),
    _type={"const": "https://in-toto.io/Statement/v1"},
    subject={"type": "array", "minItems": 1},
    predicateType={"const": PREDICATE_TYPE},
    predicate=objects(
        ("resources", "serialization"),
        resources={"type": "array", "minItems": 1, "items": RESOURCE},
        serialization=objects(("method", "hash_type", "allow_symlinks"), method={"enum": ["files", "shards"]}),
    ),
)


def faults(text: str) -> list[str]:
    """Say what a bundle's text lacks; nothing of one that keeps to the specification."""
    try:
        bundle = json.loads(text)
    except ValueError:
        return ["no JSON"]
    found = [each.message for each in Draft202012Validator(BUNDLE).iter_errors(bundle)]
    if found:
        return found
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    found = [each.message for each in Draft202012Validator(STATEMENT).iter_errors(statement)]
    names = [each["name"] for each in statement.get("predicate", {}).get("resources", ())]
    return found + ([] if names == sorted(names) else ["resources are not in order"])


@pytest.fixture
def key(tmp_path: Path) -> Path:
    pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = tmp_path / "key.pem"
    path.write_bytes(pem)
    return path


def public_half(key: Path, to: Path) -> Path:
    public = serialization.load_pem_private_key(key.read_bytes(), None).public_key()
    to.write_bytes(public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return to


def write_model(folder: Path) -> Path:
    folder.mkdir()
    for name, content in SIGNED.items():
        (folder / name).write_bytes(content)
    return folder


def verify(folder: Path, bundle: Path, public: Path) -> None:
    verifying.Config().use_elliptic_key_verifier(public_key=public).set_hashing_config(hashing.Config()).verify(
        folder, bundle
    )


@pytest.mark.parametrize("name", VALID)
def test_the_valid_vectors_pass(name: str) -> None:
    assert faults((VECTORS / "valid" / name).read_text()) == []


@pytest.mark.parametrize(
    "path",
    sorted(path for kind in ("invalid", "invalid-payload") for path in (VECTORS / kind).iterdir()),
    ids=lambda path: path.stem,
)
def test_the_invalid_vectors_do_not(path: Path) -> None:
    assert faults(path.read_text())


def test_our_bundle_passes_what_the_vectors_pass(key: Path, tmp_path: Path) -> None:
    folder, bundle = write_model(tmp_path / "model"), tmp_path / "model.sig"
    sign_folder(folder, key, bundle)
    assert faults(bundle.read_text()) == []
    ours, theirs = (
        json.loads(base64.b64decode(json.loads(path.read_text())["dsseEnvelope"]["payload"]))
        for path in (bundle, VECTORS / "valid" / "key.bundle.json")
    )
    by_name = [{each["name"]: each["digest"] for each in one["predicate"]["resources"]} for one in (ours, theirs)]
    assert by_name[0] == by_name[1]
    assert ours["subject"][0]["digest"] == theirs["subject"][0]["digest"]  # the digest of the whole model


def test_the_vector_of_a_key_is_verified_and_a_changed_model_is_not(tmp_path: Path) -> None:
    """Its key is that of the vector with a certificate; the files are known by their digests."""
    chain = json.loads((VECTORS / "valid" / "certificate.bundle.json").read_text())["verificationMaterial"]
    leaf = x509.load_der_x509_certificate(
        base64.b64decode(chain["x509CertificateChain"]["certificates"][0]["rawBytes"])
    )
    public = tmp_path / "vector.pub"
    public.write_bytes(
        leaf.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    folder = write_model(tmp_path / "model")
    verify(folder, VECTORS / "valid" / "key.bundle.json", public)
    (folder / "signme-2").write_bytes(b"another")
    with pytest.raises(ValueError, match=r"signme-2|mismatch"):
        verify(folder, VECTORS / "valid" / "key.bundle.json", public)


def test_a_bundle_whose_payload_was_changed_is_refused(key: Path, tmp_path: Path) -> None:
    folder, bundle = write_model(tmp_path / "model"), tmp_path / "model.sig"
    sign_folder(folder, key, bundle)
    public = public_half(key, tmp_path / "key.pub")
    verify(folder, bundle, public)
    signed = json.loads(bundle.read_text())
    changed = copy.deepcopy(signed)
    statement = json.loads(base64.b64decode(signed["dsseEnvelope"]["payload"]))
    statement["subject"][0]["name"] = "another"
    changed["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    bundle.write_text(json.dumps(changed))
    with pytest.raises(InvalidSignature):
        verify(folder, bundle, public)
