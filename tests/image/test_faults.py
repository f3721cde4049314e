"""A registry that fails in every way at every request: never a wrong image, never a hang."""

import gc
import hashlib
import itertools
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from registries import QUICK, read_image, with_docker

from k8sjob.errors import ImageError
from k8sjob.image.registry.http_client import HttpClient, RetryPolicy

pytestmark = pytest.mark.slow

IN_THE_REGISTRY = ("cut_request", "lost_answer", "cut_answer", "corrupts")
"""What leaves something behind there, so that the real one is tried, too."""
ON_THE_WAY = ("refused", "is_down", "is_busy", "expired", "other_content")
REFUSED = ("forbidden", "other_digest", "no_mounts", "no_such_upload", "says_html", "nowhere")
"""The same, and where a blob comes from makes no difference."""
MAY_FAIL = {"corrupts", "other_content", *REFUSED}
"""Others are overcome by another try; none ends in anything worse than an error."""
NUMBERS = itertools.count()
LARGE = hashlib.shake_128(b"x").digest(1_100_000)


@pytest.fixture(scope="module")
def base(registry, base_image):
    layers = [{"weights": LARGE}]
    return base_image(registry, "faults/base:1", layers=layers).partition("/")[2]


def tags_of(registry, repository):
    """The tags; each leads to a manifest whose blobs are all there and right."""
    tags = registry.tags(repository)
    for tag in tags:
        accept = "application/vnd.oci.image.manifest.v1+json"
        manifest = json.loads(registry.get(f"/v2/{repository}/manifests/{tag}", accept))
        for blob in (manifest["config"], *manifest["layers"]):
            content = registry.get(f"/v2/{repository}/blobs/{blob['digest']}")
            assert f"sha256:{hashlib.sha256(content).hexdigest()}" == blob["digest"]
    return tags


class Try:
    """One push through a faulty registry, and what came of it."""

    def __init__(self, done, error, requests, tags):
        self.done, self.error, self.requests, self.tags = done, error, requests, tags

    def check(self, *, may_fail):
        if self.done is not None:
            assert self.tags == [self.done.tag], self.requests
        else:
            assert may_fail, (self.error, self.requests)
            # That an answer was changed after the tag was written is noticed too late.
            assert not self.tags or "/manifests/" in self.requests[-1], self.requests


@pytest.fixture
def attempt(faulty, registry, base, pushed, code):
    """Pushes to a repository of its own while the registry does something wrong."""

    def call(fault, at=0, *, mounted=True, **options):
        number = next(NUMBERS)
        repository = f"faults/app-{number}"
        # By another name the same registry is another one, and the base has to be copied.
        below = faulty.host if mounted else faulty.host.replace("127.0.0.1", "localhost")
        done = error = None
        faulty.arm(fault, at)
        with pytest.MonkeyPatch.context() as patch:
            # With an empty cache each push has the same requests.
            patch.setenv("XDG_CACHE_HOME", str(code.with_name(f"cache-{number}")))
            try:
                done = pushed(f"{faulty.host}/{repository}", f"{below}/{base}", code, **options)
            except ImageError as refused:
                error = refused
        requests = list(faulty.seen)
        faulty.arm(None)
        return Try(done, error, requests, tags_of(registry, repository))

    return call


def each_request(attempt, fault, **options):
    """Let the fault happen at the first request of a push, at the second, ... at its last."""
    for at in range(1, 60):
        tried = attempt(fault, at, **options)
        if len(tried.requests) < at:
            return
        tried.check(may_fail=fault in MAY_FAIL)
    pytest.fail("a push takes more than 60 requests")


@pytest.fixture(autouse=True)
def little_to_pack(monkeypatch):
    """No files of k8sjob in the image: to pack them takes half of the time of a push."""
    monkeypatch.setattr("k8sjob.image.layers.runtime_files", list)


@with_docker
@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize("fault", IN_THE_REGISTRY)
def test_a_fault_that_leaves_something_behind(attempt, code, fault, mounted):
    """The base is mounted, or copied."""
    if mounted:
        (code / "data.bin").write_bytes(LARGE)
    each_request(attempt, fault, mounted=mounted)


@pytest.mark.parametrize("fault", [*ON_THE_WAY, *REFUSED])
def test_a_fault_on_the_way(attempt, fault):
    each_request(attempt, fault)


@pytest.mark.parametrize("fault", ["expired", "other_content"])
def test_a_fault_on_the_way_where_the_base_is_copied(attempt, fault):
    each_request(attempt, fault, mounted=False)


@with_docker
@pytest.mark.parametrize("mounted", [True, False])
def test_a_registry_that_is_killed_and_comes_up_again(attempt, mounted):
    """With the requests that are under way beside; what it had not written to its disk is lost."""
    wait = RetryPolicy(tries=8, pause=0.1, connect=20, read=60)
    for at in range(1, 60):
        tried = attempt("restarts", at, mounted=mounted, http=HttpClient(retry=wait))
        if len(tried.requests) < at:
            return
        tried.check(may_fail=False)
    pytest.fail("a push takes more than 60 requests")


def test_a_blob_that_the_registry_does_not_know_yet(attempt):
    at = _of_manifest(attempt(None).requests).index(True) + 1
    again = attempt("knows_no_blob", at)
    again.check(may_fail=False)
    assert sum(_of_manifest(again.requests)) == 2
    stays = attempt("knows_no_blob")
    assert "MANIFEST_BLOB_UNKNOWN" in str(stays.error)
    assert stays.tags == []


def _of_manifest(requests):
    return [one.startswith("PUT") and "/manifests/" in one for one in requests]


def test_a_request_that_broke_keeps_no_connection(registry, base_image, faulty, pushed, code):
    """Neither to where it copies to, nor to where it copies from; whoever keeps the error."""
    weights = hashlib.shake_128(b"w").digest(12_000_000)  # more than what is on its way at once
    base = base_image(registry, "faults/large:1", layers=[{"weights": weights}]).partition("/")[2]
    below = faulty.host.replace("127.0.0.1", "localhost")  # so that its blobs are copied
    faulty.arm("cut_first_large")
    before = _served()
    gc.disable()
    try:
        pushed(f"{faulty.host}/faults/broken", f"{below}/{base}", code)
        deadline = time.monotonic() + 60
        while (served := _served() - before) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        gc.enable()
    assert (
        sum(one.startswith("PUT") for one in faulty.seen) == 5
    )  # three blobs, one twice; the manifest
    faulty.arm(None)
    assert not served


def _served():
    """A server's threads: one for each connection that is open."""
    return {one for one in threading.enumerate() if "process_request_thread" in one.name}


@with_docker
def test_pushes_that_race(registry, base, pushed, code, tmp_path):
    """Of one base into one repository: each blob is written by several, each tag is whole."""
    folders = []
    for number in range(6):
        folder = tmp_path / f"of-{number}"
        shutil.copytree(code, folder)
        (folder / "number.txt").write_text(str(number // 2))  # there are two of each
        folders.append(folder)
    repository = f"{registry.host}/faults/raced"
    below = registry.host.replace("127.0.0.1", "localhost")  # so that its blobs are copied, too
    with ThreadPoolExecutor(len(folders)) as pool:
        done = list(pool.map(lambda folder: pushed(repository, f"{below}/{base}", folder), folders))
    assert len({one.digest for one in done}) == 3
    assert sorted(tags_of(registry, "faults/raced")) == sorted({one.tag for one in done})
    for number, one in enumerate(done):
        *_, layers = read_image(f"{repository}@{one.digest}")
        (found,) = [text for name, text in layers[-1].items() if name.endswith("number.txt")]
        assert found == str(number // 2).encode()


@pytest.mark.parametrize(
    "fault",
    [
        *("refused", "cut_request", "cut_answer", "is_down", "is_busy", "expired", "forbidden"),
        *("no_such_upload", "says_html", "nowhere"),
    ],
)
def test_a_fault_that_stays_is_an_error(attempt, fault):
    tried = attempt(fault)
    assert tried.error is not None
    assert tried.tags == []
    assert len(str(tried.error)) < 500


def test_a_registry_that_mounts_nothing(attempt):
    attempt("no_mounts").check(may_fail=False)


@pytest.mark.parametrize("at", [0, 6])
def test_a_registry_that_does_not_answer_is_not_waited_for(attempt, at):
    tried = attempt("hangs", at, http=HttpClient(retry=QUICK._replace(tries=3, read=2)))
    tried.check(may_fail=at == 0)
    assert at or "no response in time" in str(tried.error)
