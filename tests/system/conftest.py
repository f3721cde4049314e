"""Images built for real, as root on Debian, with buildah and debootstrap and no daemon."""

import pytest
from baseimage import Buildah, missing_tools


@pytest.fixture(scope="session")
def buildah():
    """Skips where images cannot be built."""
    if missing := missing_tools():
        pytest.skip(missing)
    return Buildah()


@pytest.fixture(scope="session")
def base_image(buildah):
    """Debian with Python, pip and torch."""
    return buildah.base_image()


@pytest.fixture
def container(buildah):
    """Makes working containers of an image, and removes them."""
    made = []

    def make(image):
        made.append(buildah("from", "--pull-never", image))
        return made[-1]

    yield make
    for name in made:
        buildah("rm", name)
