"""The documentation is executed: what a page shows is what happens. See tests/pages.py."""

import re

import pytest
from pages import KOREAN, PAGES, ROOT, Reader, blocks, name

from k8sjob.backends.local import LocalBackend
from k8sjob.contract import Event
from k8sjob.observe.status import reporting_replica
from k8sjob.spec import load

MANIFESTS = ROOT / "manifests"
RUN = re.compile(r"^\$ k8sjob run manifests/([\w-]+)/job\.yaml", re.MULTILINE)
# What the examples' trainings come to: a metric, more than what it is, and less than what.
LEARNT = {
    "digits-ddp": ("test_loss", 0, 0.5),
    "transformer-fsdp": ("test_loss", 0, 2.95),
    "torch-mesh": ("test_loss", 0, 0.35),
    "pipeline": ("test_loss", 0, 0.5),
    "parameter-server": ("test_loss", 0, 0.9),
    "model-split": ("test_loss", 0, 0.5),
    "accumulate": ("test_loss", 0, 0.6),
    "sync-batchnorm": ("test_loss", 0, 0.5),
    "data-parallel": ("test_loss", 0, 0.5),
    "keras-mnist": ("test_accuracy", 0.85, 1),
    "keras-mesh": ("val_accuracy", 0.85, 1),
}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


def runs_something(page):
    return any(
        block["note"] not in {"not run", "needs"}
        and block["language"] in {"console", "python", "yaml"}
        for block in blocks(page)
    )


def marks(page):
    """What trains is no fast test; README and tutorial are essential all the same."""
    text = page.read_text()
    if "k8sjob run" not in text and "torch" not in text:
        return []
    first = page == ROOT / "README.md" or page.parent.name == "tutorial"
    return [pytest.mark.dist, *[pytest.mark.essential] * first]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=marks(page))
        for page in PAGES
        if page not in KOREAN and runs_something(page)
    ],
    ids=name,
)
def test_what_a_page_shows_is_what_happens(page, tmp_path):
    reader = Reader(tmp_path / "reader")
    reader.follow(page)
    backend = LocalBackend(reader.state)
    for example in RUN.findall(page.read_text()):
        ref = backend.find(example)
        lines = backend.logs(ref, reporting_replica(backend.snapshot(ref).job))
        events = [event for line in lines if (event := Event.decode(line.text))]
        (started,) = [event.data["strategy"] for event in events if event.kind == "started"]
        assert started == load(MANIFESTS / example / "job.yaml").strategy.kind
        metric, low, high = LEARNT[example]
        *_, last = [event.data for event in events if event.kind == "metrics"]
        assert low < last[metric] < high, last


def test_a_page_runs_each_example_whose_result_is_stated():
    assert {example for page in PAGES for example in RUN.findall(page.read_text())} == {*LEARNT}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken


def test_every_page_is_reached_from_the_overview():
    overview = ROOT / "docs/README.md"
    linked = {(overview.parent / target).resolve() for target in LINK.findall(overview.read_text())}
    english = {page for page in ROOT.glob("docs/*/*.md") if page not in KOREAN}
    assert english - linked == set()


@pytest.mark.parametrize("page", KOREAN, ids=name)
def test_a_korean_page_shows_what_the_english_one_shows(page):
    english = page.with_name(page.name.replace(".ko.md", ".md"))
    assert shown(page) == shown(english)


def shown(page):
    """The blocks that are run on an English page."""
    return [
        (block["language"], block["body"])
        for block in blocks(page)
        if block["language"] in {"console", "python", "yaml"}
    ]


def test_the_modules_that_explanations_name_are_there():
    # The architecture lists the files that each kind of job has.
    folders = [ROOT, ROOT / "k8sjob", ROOT / "k8sjob/targets/pytorchjob"]
    for page in ROOT.glob("docs/explanation/*.md"):
        for file in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            found = any((folder / file).exists() for folder in folders)
            assert found or file in {"k8sjob.py", "main.py"}, (page, file)  # a user's files
