"""Certificates and keys for a trial, made on this machine. A deployment that matters has those of its own authority."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["write_certificates", "write_key"]

VALID = timedelta(days=90)
PEM, OPENSSH = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.OpenSSH


def write_certificates(folder: Path, address: str) -> None:
    """Write an authority (`ca.crt`, `ca.key`) and a server's certificate (`server.pem`, `server.key`).

    The server's is for `address` and for this machine's own names.
    """
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pfedla trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, address[:64])])
    root = (
        _certificate(issuer, issuer, authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA384())
    )
    names = [_general(name) for name in dict.fromkeys([address, "localhost", "127.0.0.1"])]
    leaf = (
        _certificate(subject, issuer, server.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(authority, hashes.SHA384())
    )
    for name, certificate in (("ca.crt", root), ("server.pem", leaf)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for name, key in (("ca.key", authority), ("server.key", server)):
        _secret(folder / name, key.private_bytes(serialization.Encoding.PEM, PEM, serialization.NoEncryption()))


def write_key(path: Path) -> None:
    """Write a site's private key, and its public key beside it with the ending `.pub`."""
    key = ec.generate_private_key(ec.SECP384R1())
    _secret(path, key.private_bytes(serialization.Encoding.PEM, OPENSSH, serialization.NoEncryption()))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    start, end = now - timedelta(hours=1), now + VALID
    return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _secret(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read, from the first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
