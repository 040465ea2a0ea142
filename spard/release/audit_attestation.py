"""Write an audit as a signed in-toto attestation of a test result, for tools that decide about deployments.

Statement v1 (https://in-toto.io/Statement/v1) with the predicate https://in-toto.io/attestation/test-result/v0.1. The
tests are the gate as a whole and each suite that it decides on. The result is `PASSED` only if the gate passed: an
inconclusive audit is `FAILED`, and so is a failed audit whose adapter a waiver released.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from spard.config import GateThresholds
from spard.config.run_spec import to_mapping
from spard.evaluation.gate import gate, is_gated
from spard.evaluation.results import SuiteResult
from spard.release.manifest import key_id
from spard.release.records import optional, read_record
from spard.release.report import GateRecord, SafetyReport
from spard.release.training_facts import ManifestFacts

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://in-toto.io/attestation/test-result/v0.1"
Decision = Literal["pass", "fail", "inconclusive"]
_INLINE = 1024  # bytes of a resource that the specification would have inside a statement


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """The results and the decision of an audit, read from a report or a manifest."""

    decision: GateRecord
    thresholds: GateThresholds | None
    base: Sequence[SuiteResult]
    adapter: Sequence[SuiteResult]

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, object]) -> AuditRecord:
        """Read the audit's figures in a manifest; figures that it lacks count as not measured."""
        facts = ManifestFacts.from_manifest(manifest)
        found = {who: [_read_suite(each) for each in facts.audit.get(who, ())] for who in ("base", "adapter")}
        decision = GateRecord(facts.decision or "inconclusive", facts.reasons)
        return cls(decision, optional(GateThresholds, facts.thresholds or None), found["base"], found["adapter"])

    @classmethod
    def from_report(cls, report: SafetyReport) -> AuditRecord:
        """Read the audit's figures in a safety report."""
        return cls(report.gate, report.thresholds, report.base, report.adapter)


def audit_statement(
    audited: AuditRecord, subject: Mapping[str, str], resources: Mapping[str, str]
) -> dict[str, object]:
    """Return the statement; both mappings have SHA-256 digests by name.

    `subject` are the tested artifacts, `resources` the suites and the report. The gate's thresholds are a part of the
    configuration, as JSON with a digest of their own.
    """
    passed, others = _tests(audited)
    return {
        "_type": STATEMENT,
        "subject": [_descriptor(name, sha256) for name, sha256 in subject.items()],
        "predicateType": PREDICATE,
        "predicate": {
            "result": "PASSED" if _has_passed(audited.decision) else "FAILED",
            "configuration": [
                _thresholds(audited.thresholds),
                *(_descriptor(name, sha256) for name, sha256 in resources.items()),
            ],
            "passedTests": passed,
            "warnedTests": [name for name, found in others.items() if found == "inconclusive"],
            "failedTests": [name for name, found in others.items() if found == "fail"],
        },
    }


def audit_resources(manifest: Mapping[str, object]) -> dict[str, str]:
    """Return the SHA-256, by name, of the report and of each suite in a manifest."""
    facts = ManifestFacts.from_manifest(manifest)
    found = {f"suite {name}": sha256 for name, sha256 in facts.suites.items()}
    return ({"safety.json": facts.safety_sha256} if facts.safety_sha256 else {}) | found


def _tests(audited: AuditRecord) -> tuple[list[str], dict[str, Decision]]:
    """Return the names of the tests that passed, and the decision on each other test by name."""
    has_passed, limits = _has_passed(audited.decision), audited.thresholds or GateThresholds()
    before = {each.suite: each for each in audited.base}
    found: dict[str, Decision] = {"gate": "pass" if has_passed else "fail"}
    for after in audited.adapter:
        if is_gated(after.kind, limits):
            base = [before[after.suite]] if after.suite in before else []
            decided = "pass" if has_passed else gate(base, [after], limits).decision
            found[f"{after.kind}: {after.suite}"] = decided
    passed = [name for name, decided in found.items() if decided == "pass"]
    return passed, {name: decided for name, decided in found.items() if decided != "pass"}


def _has_passed(decision: GateRecord) -> bool:
    """Return True if the gate itself passed the model; a waived decision without reasons was a pass."""
    return decision.decision == "pass" or (decision.decision == "waived" and not decision.reasons)


def _thresholds(limits: GateThresholds | None) -> dict[str, object]:
    content = json.dumps(to_mapping(limits or GateThresholds()), sort_keys=True, separators=(",", ":")).encode()
    named = _descriptor("thresholds", hashlib.sha256(content).hexdigest())
    inline = {"content": base64.b64encode(content).decode()} if len(content) < _INLINE else {}
    return named | inline | {"mediaType": "application/json"}


def _descriptor(name: str, sha256: str) -> dict[str, object]:
    return {"name": name, "digest": {"sha256": sha256}}


def _read_suite(raw: Mapping[str, object]) -> SuiteResult:
    return read_record(SuiteResult, {"degenerate": 0, **raw})


# A DSSE envelope (Dead Simple Signing Envelope, version 1.0) around an in-toto statement, signed with Ed25519.
#
# https://github.com/secure-systems-lab/dsse/blob/v1.0.0/protocol.md

PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Signature(TypedDict):
    """A signature in Base64, and the id that the published key set knows its key by."""

    keyid: str
    sig: str


class Envelope(TypedDict):
    """The envelope as JSON; the payload is in Base64."""

    payload: str
    payloadType: str
    signatures: list[Signature]


def sign_statement(statement: Mapping[str, object], key: Ed25519PrivateKey) -> Envelope:
    """Return a signed statement in its envelope."""
    payload = json.dumps(statement, separators=(",", ":"), sort_keys=True).encode()
    signature = key.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key_id(key.public_key()), "sig": base64.b64encode(signature).decode()}],
    }


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that are signed: the version, then type and payload with their lengths."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
