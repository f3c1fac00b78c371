"""The section `tls` of a backend: who its server must be, and how the gateway shows who it is."""

import ipaddress
import ssl
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from gateway.settings.section import Section

FILES: Final = ("ca_file", "cert_file", "key_file")


class TlsSettings(Section):
    """TLS to a server. Its certificate and the name in it are always checked: nothing here switches that off."""

    ca_file: Path | None = Field(default=None, description="who signed the server's certificate; default: the system's")
    cert_file: Path | None = Field(default=None, description="the gateway's own certificate, where the server asks")
    key_file: Path | None = Field(default=None, description="the private key of cert_file")
    server_name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._:-]{1,253}$",
        description="the name that its certificate must have; default: the host of its address",
    )

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("give both cert_file and key_file, or neither")
        return self

    def context(self) -> ssl.SSLContext:
        """What connections are made with. Raises `ValueError` for files that cannot be used, by their names here."""
        return client_context(self.ca_file, self.cert_file, self.key_file, within="tls")

    def anchored(self, folder: Path) -> "TlsSettings":
        """The same, with paths that are relative made those of `folder`."""
        return self.model_copy(update=anchored_files(self, folder))


def stays_here(host: str) -> bool:
    """Whether it is this host by its own name or a loopback address: nobody listens in between."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def anchored_files(section: Section, folder: Path) -> dict[str, Path]:
    """The paths of the files that a section names, those that are relative being of `folder`."""
    return {name: (folder / path).resolve() for name in FILES if (path := getattr(section, name, None)) is not None}


def client_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None, *, within: str
) -> ssl.SSLContext:
    """A client's side of TLS 1.2 or newer that checks the server. `within` is what the settings stand in.

    Raises `ValueError` that names the settings whose files cannot be used.
    """
    names = ["ca_file"] if ca_file is not None else []
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            names = ["cert_file", "key_file"]
            # A key under a passphrase would have OpenSSL ask for it on the terminal.
            context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError among the first
        named = ", ".join(f"{within}.{name}" for name in names)
        raise ValueError(f"{named}: cannot be read as certificates ({type(error).__name__})") from error
    return context


def _no_passphrase() -> str:
    raise ValueError("the key asks for a passphrase")
