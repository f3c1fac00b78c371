"""A fixed share of what `make fuzz` tries on running planes: schemathesis over both documents, raw sockets."""

import pytest

from tests.fuzz import campaign, contract
from tests.fuzz.target import attack

pytestmark = pytest.mark.xdist_group("hostile planes")  # which take their time to start
EXAMPLES = 1  # for each operation
SHARE = 60  # of the attacks of a group, one in so many; each is the same every time


@pytest.fixture(scope="module")
def attacked():
    with campaign.attacked() as both:
        yield both


@pytest.mark.timeout(240)
def test_shapes_names_and_addresses_on_every_path(attacked):
    at, listener = attacked
    for name, (port, attempts) in campaign.groups(at, listener.port, is_long=False).items():
        few = attempts if "addresses" in name else attempts[len(name) % SHARE :: SHARE]
        group = campaign.run(at, name, port, few)
        assert not group.found, "\n".join(group.found[:5])
    assert listener.heard == 0


@pytest.mark.timeout(240)
def test_endpoints_that_were_taken_over(attacked):
    at, listener = attacked
    group = campaign.endpoints(at, stream=True)
    assert not group.found, "\n".join(group.found[:5])
    assert listener.heard == 0


@pytest.mark.timeout(240)
def test_every_operation_answers_as_its_document_says(attacked):
    at, _ = attacked
    operations = 0
    for target in contract.operations(at):
        report = attack(target, examples=EXAMPLES, seed_number=11)
        if report.failure is not None:
            raise report.failure
        operations += 1
    assert operations > 100
    assert not at.failures()
