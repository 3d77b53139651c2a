"""A certificate authority for tests, which writes certificates and keys as PEM files."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)


class PemFiles(NamedTuple):
    """The files of a certificate and its private key."""

    cert: Path
    key: Path

    def replace_with(self, other: PemFiles) -> None:
        """Replace the files, each in one step."""
        for target, source in zip(self, other, strict=True):
            new = target.with_suffix(".new")
            new.write_bytes(source.read_bytes())
            new.replace(target)


def common_name(certificate: Any) -> str:
    """Return the common name in a result of `getpeercert`."""
    subject = dict(item for parts in certificate["subject"] for item in parts)
    return str(subject["commonName"])


class Authority:
    """A certificate authority, whose own certificate is in `ca_file`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"tarry test {name}")])
        key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(key_id, critical=False)
            .add_extension(_ca_key_usage(), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = folder / f"{name}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(_PEM))

    def issue(self, name: str, *, passphrase: bytes | None = None) -> PemFiles:
        """Write a certificate for 127.0.0.1 and localhost, with the common name `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        hosts = x509.SubjectAlternativeName([loopback, x509.DNSName("localhost")])
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
            .add_extension(hosts, critical=False)
            .add_extension(issuer_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = PemFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        files.cert.write_bytes(certificate.public_bytes(_PEM))
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase is not None:
            encryption = serialization.BestAvailableEncryption(passphrase)
        files.key.write_bytes(
            key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return files

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder(self._name, name, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
        )


def _ca_key_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
