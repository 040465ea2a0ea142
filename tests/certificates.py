"""A certificate authority of the tests' own, and a certificate for loopback that it has signed."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority that a client trusts, the server's certificate and its key."""

    authority: Path
    server: Path
    key: Path


def make_certificates(folder: Path, host: str = "127.0.0.1") -> Certificates:
    """Write an authority and a certificate for `host`, a name or an IP address, into a folder."""
    authority_key, server_key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "SPARD's tests")])
    authority = (
        _builder(name, name, authority_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_key_usage(), critical=True)
        .sign(authority_key, SHA256())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    server = (
        _builder(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "server")]), name, server_key)
        .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, SHA256())
    )
    found = Certificates(folder / "authority.pem", folder / "server.pem", folder / "key.pem")
    found.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    found.server.write_bytes(server.public_bytes(Encoding.PEM))
    found.key.write_bytes(server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return found


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


def _key_usage() -> x509.KeyUsage:
    may = dict.fromkeys(("key_cert_sign", "crl_sign", "digital_signature"), True)
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(**may, **dict.fromkeys((*others, "encipher_only", "decipher_only"), False))


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
