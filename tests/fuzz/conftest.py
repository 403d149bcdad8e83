"""Every test here runs with loopback alone, or not at all."""

import pytest

from fuzz.alone import leave_the_network


@pytest.fixture(scope="session", autouse=True)
def _alone() -> None:
    refused = leave_the_network()
    if refused:
        pytest.skip(refused)
