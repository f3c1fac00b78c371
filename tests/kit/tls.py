"""An authority of a test's own, and what it signs."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOUR = dt.timedelta(hours=1)


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; `cert` is what those who trust it name as `ca_file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            key_cert_sign=True,
            crl_sign=True,
            **dict.fromkeys(
                (
                    "digital_signature",
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "key_agreement",
                    "encipher_only",
                    "decipher_only",
                ),
                False,
            ),
        )
        built = self._begun(self._name, self._key, hours=24)
        built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = built.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, hours: int = 24) -> Signed:
        """For a host's name or address, good for so many hours from an hour ago: expired where that is none."""
        key = ec.generate_private_key(ec.SECP256R1())
        built = self._begun(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "some name")]), key, hours=hours)
        built = built.add_extension(x509.SubjectAlternativeName([_general(name)]), critical=False)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = built.add_extension(x509.ExtendedKeyUsage(both), critical=False).sign(self._key, hashes.SHA256())
        stem = f"{self.cert.stem}-{name.replace(':', '-')}-{hours}"
        signed = Signed(self._folder / f"{stem}.pem", self._folder / f"{stem}.key")
        signed.cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        signed.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return signed

    def _begun(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, hours: int) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        since = now - HOUR * (24 if hours <= 0 else 1)
        until = now + HOUR * (hours if hours > 0 else -1)
        ours = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = x509.CertificateBuilder(
            self._name, subject, key.public_key(), x509.random_serial_number(), since, until
        )
        return built.add_extension(ours, critical=False).add_extension(signer, critical=False)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
