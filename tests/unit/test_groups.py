"""What runs in one process where several run the tests: whatever shares servers."""

import pytest

from tests.kit.groups import group


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/parity/test_clients.py::test_a[triton-http]", "tests/parity/test_clients.py"),
        ("tests/integration/test_stream.py::test_b", "tests/integration/test_stream.py"),
        ("tests/e2e/test_load.py::test_c[compose]", "tests/e2e compose"),
        ("tests/e2e/test_outage.py::test_d[compose-killed]", "tests/e2e compose"),
        ("tests/e2e/test_outage.py::test_d[up-hung]", "tests/e2e up"),
        ("tests/e2e/test_compose.py::test_of_the_file", "tests/e2e"),
        ("tests/e2e/console/test_pages.py::test_e[upright]", "tests/e2e/console"),
        ("tests/unit/core/test_rules.py::test_f[1]", "tests/unit/core/test_rules.py::test_f[1]"),
    ],
)
def test_those_that_share_servers_share_a_process(test: str, expected: str) -> None:
    assert group(test) == expected
