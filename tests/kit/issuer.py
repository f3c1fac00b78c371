"""A small OpenID Connect issuer on loopback: its configuration, its public keys, and tokens that it has signed."""

import asyncio
import contextlib
import functools
import json
import time
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

HOST = "127.0.0.1"
AUDIENCE = "gateway-admin"


@functools.cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """One of 2048 bits for each name; made once, which takes a while."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@functools.cache
def ec_key(name: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_pem(name: str) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return rsa_key(name).public_key().public_bytes(serialization.Encoding.PEM, form)


def jwk(kid: str, **fields: Any) -> dict[str, Any]:
    """The public half of the RSA key of that name."""
    return {**json.loads(RSAAlgorithm.to_jwk(rsa_key(kid).public_key())), "kid": kid, "use": "sig", **fields}


def ec_jwk(kid: str, **fields: Any) -> dict[str, Any]:
    return {**json.loads(ECAlgorithm.to_jwk(ec_key(kid).public_key())), "kid": kid, "use": "sig", **fields}


class Issuer:
    """Serves `documents` by path; counts in `asked`. While `is_away` it hangs up."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_away = False
        self.keys = [jwk("one"), ec_jwk("curve")]
        self.documents: dict[str, Any] = {}
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"
        self.documents = {
            "/.well-known/openid-configuration": {"issuer": self.url, "jwks_uri": f"{self.url}/keys"},
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ")[1].decode()
            self.asked.append(path)
            if not self.is_away:
                found = {"keys": self.keys} if path == "/keys" else self.documents.get(path)
                status = b"404 Not Found" if found is None else b"200 OK"
                body = json.dumps(found).encode()
                size = str(len(body)).encode()
                writer.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: " + size + b"\r\n\r\n")
                writer.write(body)
                await writer.drain()
        writer.close()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Good ones, with changes; a claim that is None is left out."""
        now = int(time.time())
        good = {"iss": self.url, "aud": AUDIENCE, "sub": "ana", "exp": now + 300, "iat": now, "roles": ["ops"]}
        return {name: value for name, value in {**good, **changed}.items() if value is not None}

    def token(self, *, kid: str | None = "one", key: str = "one", algorithm: str = "RS256", **changed: Any) -> str:
        """One that is signed by the RSA key `key`, and says that it is signed by `kid`."""
        headers = {} if kid is None else {"kid": kid}
        signer: Any = ec_key(key) if algorithm.startswith("ES") else rsa_key(key)
        return jwt.encode(self.claims(**changed), signer, algorithm=algorithm, headers=headers)
