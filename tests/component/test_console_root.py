"""What people type to come to the console: the control plane's root, and `/console`. Nobody else is sent anywhere."""

import pytest

from gateway.console.shell import Shell
from tests.kit.admin_plane import Gone, client, whole_app

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"  # as Chromium and Firefox ask, shortened


@pytest.mark.parametrize(("path", "accept"), [("/", BROWSER), ("/?next=//x.example", BROWSER), ("/console", "*/*")])
async def test_a_browser_is_sent_to_the_console_whatever_host_it_names(path, accept):
    async with client(Shell(whole_app(Gone(), ""))) as http:
        answer = await http.get(f"http://evil.example{path}", headers={"accept": accept})
    assert (answer.status_code, answer.headers["location"], answer.content) == (307, "/console/", b"")


@pytest.mark.parametrize(
    ("method", "path", "accept"),
    [
        ("GET", "/", "*/*"),
        ("GET", "/", "application/json"),
        ("HEAD", "/", BROWSER),
        ("POST", "/", BROWSER),
        ("POST", "/console", BROWSER),
        ("GET", "//", BROWSER),
        ("GET", "/admin/v1/rules", BROWSER),
    ],
)
async def test_all_else_meets_the_door(method, path, accept):
    async with client(Shell(whole_app(Gone(), ""))) as http:
        answer = await http.request(method, f"http://x{path}", headers={"accept": accept})
    assert (answer.status_code, "location" in answer.headers) == (401, False)


async def test_without_a_console_nobody_is_sent_there():
    async with client(whole_app(Gone(), "")) as http:
        assert (await http.get("http://x/", headers={"accept": BROWSER})).status_code == 401
