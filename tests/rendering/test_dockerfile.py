"""Layers of the Dockerfile, and what must not get into it."""

import pytest

from k8sjob.errors import RenderError
from k8sjob.rendering.dockerfile import dockerfile


def lines(text):
    return [line for line in text.split("\n") if line]


def test_dependencies_come_before_the_code(built):
    image = {"apt": ["git"], "pip": ["tqdm"], "requirements": "requirements.txt"}
    text = dockerfile(built(image=image))
    order = [
        "FROM python:3.12-slim",
        "apt-get install -y --no-install-recommends git",
        "pip install --no-cache-dir tqdm",
        'COPY ["requirements.txt", "/opt/k8sjob/requirements.txt"]',
        "pip install --no-cache-dir -r /opt/k8sjob/requirements.txt",
        'COPY [".k8sjob", "/opt/k8sjob"]',
        "COPY --chown=1000:0 . /app",
        "USER 1000:1000",
        "CMD",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_nothing_that_is_not_requested(built):
    text = dockerfile(built())
    assert "apt-get" not in text
    assert "pip install" not in text
    assert text.count("COPY") == 2


def test_only_the_python_of_the_agent_compiles_the_runtime(built):
    """A base for another program may have Python 3.6, which lacks the options, or none."""
    assert "compileall" in dockerfile(built())
    text = dockerfile(built(run={"command": ["./train"]}))
    assert "compileall" not in text
    assert 'COPY [".k8sjob", "/opt/k8sjob"]' in text


def test_platform_and_index(built):
    image = {
        "platform": "linux/arm64",
        "index_url": "https://packages.internal/simple",
        "pip": ["tqdm"],
    }
    text = dockerfile(built(image=image))
    assert "FROM --platform=linux/arm64 python:3.12-slim" in lines(text)
    assert "--no-cache-dir --index-url=https://packages.internal/simple tqdm" in text


def test_requirements_with_comparisons_are_quoted(built):
    text = dockerfile(built(image={"pip": ["tqdm>=4", 'x; python_version < "3.12"']}))
    assert """ 'tqdm>=4' 'x; python_version < "3.12"'""" in text


def test_credentials_and_certificates_are_secrets_of_the_build(built):
    text = dockerfile(built(image={"pip": ["tqdm"]}))
    assert "--mount=type=secret,id=ca,target=/run/k8sjob/ca.crt,required=false" in text
    assert "--mount=type=secret,id=pip,target=/run/k8sjob/pip.conf,required=false" in text
    assert "ARG" not in text


@pytest.mark.parametrize("image", ["registry.example/x:1", {"repository": "registry.example/x"}])
def test_an_image_that_is_there_is_not_built(job, image):
    with pytest.raises(RenderError, match="nothing to build"):
        dockerfile(job(image=image))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", "x\nRUN id"),
        ("base", "$BASE"),
        ("base", ""),
        ("platform", "linux/amd64 x"),
        ("apt", ("git\nRUN id",)),
        ("apt", ("git\\",)),
        ("pip", ("tqdm\n",)),
        ("requirements", "r$x.txt"),
        ("requirements", "r*.txt"),
        ("requirements", "r\n.txt"),
    ],
)
def test_what_the_builder_would_act_on_is_refused_even_unchecked(built, field, value):
    """Specs refuse most of this themselves; rendering does not rely on it."""
    spec = built(image={"requirements": "requirements.txt"})
    unchecked = spec.image.model_copy(update={field: value})
    with pytest.raises(RenderError, match=r"cannot be written|act on|acts on"):
        dockerfile(spec.model_copy(update={"image": unchecked}))


@pytest.mark.parametrize("package", ["a;id", "a$(id)", "a`id`", "a'b", "a&&b", "<<EOF"])
def test_what_a_shell_would_act_on_is_quoted(built, package):
    import shlex

    spec = built()
    unchecked = spec.image.model_copy(update={"apt": (package,)})
    text = dockerfile(spec.model_copy(update={"image": unchecked}))
    line = next(line for line in lines(text) if "apt-get install" in line)
    assert package in shlex.split(line.removesuffix("\\"))
