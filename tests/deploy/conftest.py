"""One stack of containers for all tests that want one: they leave it as whole as they found it."""

from collections.abc import Iterator

import pytest

from deploy.live import Images, Stack, build_images, running


@pytest.fixture(scope="session")
def images() -> Images:
    """Every image that the stack runs."""
    return build_images()


@pytest.fixture(scope="session")
def stack(images: Images) -> Iterator[Stack]:
    """A healthy CPU stack."""
    with running(Stack(images)) as one:
        yield one
