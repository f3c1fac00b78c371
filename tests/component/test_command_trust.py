"""Commands against a control plane behind TLS: the system's authorities, and those of SSL_CERT_FILE, are trusted."""

import http.server
import ssl
import threading

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app
from tests.kit.tls import Authority


@pytest.fixture
def control_plane(tmp_path):
    """One that says who asks, behind a certificate of a private authority; its address and the authority's file."""
    authority = Authority(tmp_path)
    signed = authority.sign("127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(signed.cert, signed.key)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"actor": "me", "role": "viewer", "kind": "key", "expires_at": null}'
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}", authority.cert
    server.shutdown()
    server.server_close()


def test_a_private_authority_is_trusted_where_it_is_named_and_nowhere_else(control_plane, monkeypatch):
    url, authority = control_plane
    command = ["whoami", "--admin-url", url, "--admin-token", "secret"]
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    refused = CliRunner().invoke(app, command)
    assert (refused.exit_code, "no control plane answers" in refused.output) == (3, True)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority))
    answered = CliRunner().invoke(app, command)
    assert (answered.exit_code, "viewer" in answered.output) == (0, True), answered.output
