"""The section `redis`: where the store is that all workers share, and how the gateway shows who it is."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import unquote

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gateway.settings.secrets import from_environment
from gateway.settings.section import Section

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", "unix")
_URL: Final = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<user>[^@/?]*?)(?::(?P<password>[^@/?]*))?@)?"
    r"(?P<nodes>[^@/?]*)(?P<path>/[^?]*)?(?:\?db=(?P<db>\d+))?"
)
_NODE: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:,\s]+)(?::(?P<port>\d{1,5}))?")
_FORM: Final = "must look like redis://user:password@host:6379/0 (see docs/redis.md for Sentinel and Cluster)"
_Kind = Literal["single", "unix", "sentinel", "cluster"]
_KINDS: Final[dict[str, _Kind]] = {"": "single", "sentinel": "sentinel", "cluster": "cluster"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisPlace:
    """What a `url` says. `nodes` are the server, the sentinels, or some nodes of the cluster, as host and port."""

    kind: _Kind
    nodes: tuple[tuple[str, int], ...] = ()
    path: str = ""
    master: str = ""
    db: int = 0
    is_tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)


class RedisSettings(Section):
    """The shared store. `url` empty: limits and rules live in this process alone."""

    url: str = Field(default="", repr=False, description="redis://, redis+sentinel:// or redis+cluster://, see docs")
    prefix: str = Field(default="gateway:", description="what the names of all keys and channels begin with")
    username: str = Field(default="", description="the ACL user; empty: the default user")
    password_env: str = Field(default="", description="the environment variable with the password")
    sentinel_password_env: str = Field(default="", description="the same for the sentinels; empty: they ask for none")
    ca_file: Path | None = Field(default=None, description="who signed the server's certificate; default: the system's")
    cert_file: Path | None = Field(default=None, description="the gateway's own certificate, where Redis asks for one")
    key_file: Path | None = Field(default=None, description="the private key of cert_file")

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value:
            read_url(value)
        return value

    @field_validator("username", "password_env", "sentinel_password_env", "ca_file", "cert_file", "key_file")
    @classmethod
    def _fits_the_url(cls, value: str | Path | None, info: ValidationInfo) -> str | Path | None:
        if not value or not info.data.get("url"):
            return value
        place = read_url(info.data["url"])
        if info.field_name == "username" and place.username:
            raise ValueError("the url names a user already")
        if info.field_name == "password_env" and place.password:
            raise ValueError("the url has a password already")
        if info.field_name == "sentinel_password_env" and place.kind != "sentinel":
            raise ValueError("the url names no sentinels")
        if info.field_name in ("ca_file", "cert_file", "key_file") and not place.is_tls:
            raise ValueError("the url is not one for TLS (rediss://)")
        return value

    @model_validator(mode="after")
    def _has_both(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("give both cert_file and key_file, or neither")
        return self

    @property
    def place(self) -> RedisPlace:
        """Where it is, and as whom. Raises `ValueError` where the password's variable is not set."""
        place = read_url(self.url)
        password = place.password or self._secret("password_env")
        sentinel_password = self._secret("sentinel_password_env")
        username = place.username or self.username
        return replace(place, username=username, password=password, sentinel_password=sentinel_password)

    def _secret(self, name: Literal["password_env", "sentinel_password_env"]) -> str:
        variable = getattr(self, name)
        if not variable:
            return ""
        found = from_environment(variable)
        if not found:
            raise ValueError(f"redis.{name}: the environment variable {variable} is not set")
        return found


def read_url(url: str) -> RedisPlace:
    """What a url says. Raises `ValueError`, whose text never repeats the url: there may be a password in it."""
    if url.partition("://")[0] not in SCHEMES:
        raise ValueError(
            "must begin with redis://, rediss://, redis+sentinel://, rediss+sentinel://, redis+cluster://, "
            "rediss+cluster:// or unix://, or be empty"
        )
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(_FORM)
    username, password = unquote(found["user"] or ""), unquote(found["password"] or "")
    scheme, _, kind = found["scheme"].partition("+")
    if scheme == "unix":
        if found["nodes"] or not found["path"]:
            raise ValueError("must look like unix:///path/to/redis.sock")
        path, db = unquote(found["path"]), int(found["db"] or 0)
        return RedisPlace(kind="unix", path=path, db=db, username=username, password=password)
    named = _KINDS[kind]
    master, db = _path(named, found["path"] or "", found["db"])
    return RedisPlace(
        kind=named,
        nodes=_nodes(named, found["nodes"]),
        master=master,
        db=db,
        is_tls=scheme == "rediss",
        username=username,
        password=password,
    )


def _nodes(kind: str, text: str) -> tuple[tuple[str, int], ...]:
    """`host:port,host:port`; the port may be left out."""
    usual = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
    nodes = []
    for part in text.split(","):
        found = _NODE.fullmatch(part)
        if found is None or not 0 < int(found["port"] or usual) < 2**16:
            raise ValueError(_FORM)
        nodes.append((unquote(found["host"].strip("[]")), int(found["port"] or usual)))
    if kind == "single" and len(nodes) > 1:
        raise ValueError("several servers are redis+sentinel:// or redis+cluster://")
    return tuple(nodes)


def _path(kind: str, path: str, db: str | None) -> tuple[str, int]:
    """The master's name and the number of the database, out of `/0` or `/mymaster/0` and `?db=0`."""
    parts = [part for part in path.split("/") if part]
    master = unquote(parts.pop(0)) if kind == "sentinel" and parts else ""
    if kind == "sentinel" and not master:
        raise ValueError("must name the master that the sentinels watch: redis+sentinel://host:26379/mymaster")
    number = db or (parts.pop(0) if parts else "0")
    if parts or not number.isdecimal():
        raise ValueError(_FORM)
    if kind == "cluster" and int(number):
        raise ValueError("a Redis Cluster has the database 0 alone")
    return master, int(number)
