import socket

import pytest

from gateway.backends.triton import addresses as triton_addresses
from gateway.backends.triton.addresses import Addresses, Endpoint, parse


@pytest.mark.parametrize(
    ("url", "endpoints"),
    [
        ("127.0.0.1:8001", [Endpoint(host="127.0.0.1", port=8001)]),
        ("a:1, b:2", [Endpoint(host="a", port=1), Endpoint(host="b", port=2)]),
        ("[::1]:8001", [Endpoint(host="::1", port=8001)]),
        ("unix:/run/t.sock", [Endpoint(path="/run/t.sock")]),
    ],
)
def test_urls(url, endpoints):
    assert list(parse(url)) == endpoints


@pytest.mark.parametrize(
    "url", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "::1:80", "[a]:1", "http://a:1", "unix:", "a:1,,b:1", "a:²"]
)
def test_what_is_no_url(url):
    with pytest.raises(ValueError, match="'"):
        parse(url)


class Dns:
    def __init__(self, **known):
        self.known, self.asked = known, []

    async def __call__(self, host, port):
        self.asked.append((host, port))
        found = self.known[host]
        if isinstance(found, Exception):
            raise found
        return found


async def test_fixed_addresses_need_no_look_up():
    dns = Dns()
    addresses = Addresses("127.0.0.1:1,unix:/s,127.0.0.1:1", resolve=dns)
    assert addresses.is_fixed
    assert addresses.known() == ("127.0.0.1:1", "unix:/s")
    await addresses.refresh()
    assert not dns.asked
    assert not addresses.is_one_socket
    assert Addresses("unix:/s").is_one_socket


async def test_a_name_is_each_of_its_addresses_once():
    addresses = Addresses("tritons:1,10.0.0.2:1", resolve=Dns(tritons=["10.0.0.3", "10.0.0.2", "10.0.0.3", "::1"]))
    assert addresses.known() == ("10.0.0.2:1",)
    await addresses.refresh()
    assert addresses.known() == ("10.0.0.2:1", "10.0.0.3:1", "[::1]:1")


async def test_what_cannot_be_looked_up_stays_as_it_was():
    dns = Dns(a=["10.0.0.1"], b=["10.0.0.2"])
    addresses = Addresses("a:1,b:2", resolve=dns)
    await addresses.refresh()
    dns.known = {"a": OSError("no DNS"), "b": ["10.0.0.4"]}
    await addresses.refresh()
    assert addresses.known() == ("10.0.0.1:1", "10.0.0.4:2")
    dns.known = {"a": [], "b": UnicodeError("label too long")}
    await addresses.refresh()
    assert addresses.known() == ("10.0.0.1:1", "10.0.0.4:2")


@pytest.mark.parametrize(
    ("families", "known"),
    [
        (
            [(socket.AF_INET6, "::1"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "10.0.0.2")],
            ("10.0.0.1", "10.0.0.2"),
        ),
        ([(socket.AF_INET6, "fd00::1")], ("fd00::1",)),
        ([], ()),
    ],
)
async def test_a_server_with_two_families_counts_once(families, known, monkeypatch):
    class Loop:
        async def getaddrinfo(self, host, port, *, type):  # noqa: A002 - the loop's own name
            return [(family, type, 6, "", (address, port)) for family, address in families]

    monkeypatch.setattr(triton_addresses.asyncio, "get_running_loop", Loop)
    assert tuple(await triton_addresses._look_up("h", 1)) == known


async def test_localhost_is_found():
    addresses = Addresses("localhost:1")
    await addresses.refresh()
    assert addresses.known() in (("127.0.0.1:1",), ("[::1]:1",))
