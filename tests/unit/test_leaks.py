"""What looks for secrets in all that the suite's servers write finds them, and tells where, and not which."""

import pytest

from gateway.core.client_tokens import ClientToken, sign
from gateway.core.keys import ID_BYTES, SECRET_BYTES, new_id, new_secret
from tests.kit import leaks, serving


def made_key(_) -> str:
    key_id = new_id(b"i" * ID_BYTES)
    return new_secret(key_id, b"s" * SECRET_BYTES, b"salt")[0]


def made_token(_) -> str:
    return sign(ClientToken(id="t", key_id="k", proof="p" * 16, until_s=1), b"s" * 32)


def of_a_stack(folder) -> str:
    (folder / "run").mkdir()
    (folder / "run" / "admin-token").write_text("gw-admin-of-a-stack\n")
    return "gw-admin-of-a-stack"


PLANTED = {"handed out": lambda _: serving.KEY, "key": made_key, "token": made_token, "stack": of_a_stack}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_secret_in_any_file_is_found(tmp_path, kind):
    secret = PLANTED[kind](tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    log = tmp_path / "a" / "b" / "gateway.log"
    log.write_text('{"event": "all is well"}\n')
    assert not leaks.leaks(tmp_path)
    log.write_text(f'{{"event": "all is well"}}\n{{"event": "key {secret} was refused"}}\n')
    (found,) = leaks.leaks(tmp_path)
    assert (found.file, found.around) == (log, '{"event": "key ')
    assert secret not in str(found)


def test_a_file_that_is_there_to_hold_one_is_not(tmp_path):
    for name in ("stack.json", "dev-key", "mine.holds-secrets"):
        (tmp_path / name).write_text(serving.KEY)
    assert not leaks.leaks(tmp_path)
