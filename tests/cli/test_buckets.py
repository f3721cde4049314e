"""Records in a bucket of a real server with S3's interface, and the ways to it that are wrong."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec

import pytest
from inmemory import JobsInMemory
from trainings import job, pod

from k8sjob.backends.api import JobRef
from k8sjob.backends.record_storage import StoredRecords
from k8sjob.errors import install_step

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
# botocore holds python-dateutil below 3, and so kubernetes below 37: not for everybody's tests.
NEEDED = "needs s3fs and a server, in an environment of their own: make test-s3"


@pytest.fixture(autouse=True)
def _credentials(tmp_path, monkeypatch):
    """Of nobody, whoever runs the tests."""
    for name in os.environ:
        if name.startswith(("AWS_", "FSSPEC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def storage(monkeypatch):
    """A server with the bucket `records`: `storage(method, path, body)` asks it."""
    s3fs = pytest.importorskip("s3fs", reason=NEEDED)
    server = pytest.importorskip("moto.server", reason=NEEDED)
    server = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    def ask(method, path, body=None):
        url = f"http://{host}:{port}/{path}"
        kind = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data=body, headers=kind, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    ask("POST", "moto-api/reset")
    ask("PUT", "records")
    yield ask
    s3fs.S3FileSystem.clear_instance_cache()  # they have these credentials
    server.stop()


@pytest.fixture
def put(storage, records):
    """The URL of a record in the bucket."""
    storage("PUT", "records/old/team/one@u.k8sjob", records[0].read_bytes())
    return "s3://records/old/team/one@u.k8sjob"


@pytest.mark.parametrize("command", [("why",), ("status", "-o", "json"), ("logs",), ("watch",)])
def test_a_record_in_a_bucket_is_read_as_its_file(k8sjob, put, records, command):
    name, *options = command
    file, stored = (k8sjob(name, one, *options) for one in (records[0], put))
    assert (file.code, stored.code) == (0, 0)
    assert stored.out == file.out.replace(str(records[0]), put)  # each names what it was read from
    assert stored.out


def test_a_record_in_a_bucket_becomes_a_page_and_a_file(k8sjob, put, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert k8sjob("report", put).out == "one.html\n"
    assert k8sjob("archive", put, "-o", "copy.k8sjob").code == 0
    assert k8sjob("status", "copy.k8sjob").code == 0
    refused = k8sjob("suspend", put)
    assert (refused.code, refused.out) == (1, "")
    assert f"{put} is the record of a job, which this command cannot change" in refused.err


def test_what_is_no_record_is_refused_as_a_file_is(k8sjob, put, storage):
    storage("PUT", "records/x.k8sjob", b"x" * 100)
    assert k8sjob("why", "s3://records/x.k8sjob").err.startswith(
        "error: s3://records/x.k8sjob cannot be read as a record of a job: "
    )
    there = "s3://records/none.k8sjob does not exist; check the bucket and the path"
    assert there in k8sjob("why", "s3://records/none.k8sjob").err
    assert "does not exist" in k8sjob("why", "s3://no-bucket/none.k8sjob").err


def test_collect_finds_a_wrong_bucket_before_it_begins(k8sjob, storage, monkeypatch):
    done = k8sjob("collect", "--into", "s3://no-bucket/x")
    assert (done.code, done.out) == (1, "")
    assert done.err == "error: s3://no-bucket/x does not exist; check the bucket and the path\n"


def test_collect_finds_what_is_not_allowed_before_it_begins(k8sjob, storage, monkeypatch):
    """Of a storage that looks at keys: one that is not known, one that may only write."""
    import boto3

    iam = boto3.client("iam")
    iam.create_user(UserName="writer")
    key = iam.create_access_key(UserName="writer")["AccessKey"]
    allowed = [{"Effect": "Allow", "Action": "s3:PutObject", "Resource": "*"}]
    policy = json.dumps({"Version": "2012-10-17", "Statement": allowed})
    iam.put_user_policy(UserName="writer", PolicyName="write", PolicyDocument=policy)
    storage("POST", "moto-api/reset-auth", b"0")
    try:
        unknown = k8sjob("collect", "--into", "s3://records/x")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
        writer = k8sjob("collect", "--into", "s3://records/x")
    finally:
        storage("POST", "moto-api/reset-auth", b"inf")
    for done, why in ((unknown, "The AWS Access Key Id you"), (writer, "Forbidden")):
        assert done.code == 1
        assert done.err.startswith(f"error: s3://records/x: access is denied ({why}")
        assert len(done.err.splitlines()) == 1
        assert SECRET not in done.err
        assert key["SecretAccessKey"] not in done.err


def test_no_credentials_and_no_server(k8sjob, storage, monkeypatch):
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    done = k8sjob("collect", "--into", "s3://records/x")
    assert "cannot be read or written: Unable to locate credentials; check the network" in done.err
    sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    done = k8sjob("why", "s3://records/x.k8sjob")
    assert done.code == 1
    assert done.err.startswith("error: s3://records/x.k8sjob cannot be read or written: ")
    assert len(done.err.splitlines()) == 1
    assert SECRET not in done.err


def test_collect_keeps_records_in_a_bucket(api, storage, process, k8sjob):
    api.jobs["blue", "one"] = one = job(end=3600, name="one")
    one["metadata"] |= {"namespace": "blue", "uid": "11111111-2222"}
    collector = process("collect", "-n", "blue", "--into", "s3://records/a/")
    lines = []
    seen = threading.Event()

    def read():
        for text in collector.stdout:
            lines.append(text)
            seen.set()

    threading.Thread(target=read, daemon=True).start()
    assert seen.wait(60), collector.stderr.read()
    collector.send_signal(signal.SIGINT)
    collector.wait(30)
    (url,) = [one for one in lines[0].split() if one.startswith("s3://records/a/blue/one@")]
    assert k8sjob("status", url).code == 0


def test_a_large_record_is_written_in_parts(storage):
    texts = [base64.b64encode(os.urandom(3 << 18)).decode() for _ in range(24)]
    backend = JobsInMemory(one=job(end=3600, name="one"))
    backend.write("one", *texts)
    backend.pods["one"] = [pod("master-0", 0, 3600)]
    records, ref = StoredRecords("s3://records/large"), JobRef("one", "team", "u")
    assert records.keep(backend, ref) == "s3://records/large/team/one@u.k8sjob"
    kept = records.open(ref)
    assert [one.text for one in kept.logs(ref, "master-0")] == texts
    with kept._file() as file:
        assert file.seek(0, os.SEEK_END) > 2 * 2**23  # several parts


# --- without a server -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "package", "step"),
    [
        ("s3://records/x.k8sjob", "s3fs", install_step("s3")),
        ("gs://records/x.k8sjob", "gcsfs", "pip install gcsfs"),
        ("az://records/x.k8sjob", "adlfs", "pip install adlfs"),
    ],
)
def test_a_package_is_missing(k8sjob, monkeypatch, url, package, step):
    monkeypatch.setitem(sys.modules, package, None)
    page = [("ui", url)] * bool(find_spec("starlette"))  # which says first what itself needs
    for command in (("why", url), *page, ("collect", "--into", url)):
        done = k8sjob(*command)
        assert (done.code, done.out) == (1, "")
        assert f"{url[:5]} needs another package" in done.err
        assert done.err.endswith(f"; {step}\n")


@pytest.mark.parametrize(
    "url", ["records", "http://x/y", "s3://", "s3:///x", f"s3://key:{SECRET}@records/x", "s3://a/*"]
)
def test_no_place_for_records(k8sjob, url):
    done = k8sjob("collect", "--into", url)
    assert (done.code, done.out) == (1, "")
    assert "is not a location for records; write s3://BUCKET/PREFIX" in done.err
    assert SECRET not in done.err


def test_what_else_is_wrong(k8sjob):
    done = k8sjob("collect", "--into", "s3://records/x", "--max-size", "1")
    assert (done.code, "a bucket has lifecycle rules for that" in done.err) == (2, True)
    for url in ("s3://records/x", f"s3://key:{SECRET}@records/x"):
        error = k8sjob("why", url).err
        assert "is not a record; write s3://BUCKET/" in error
        assert SECRET not in error


def test_nothing_of_it_is_loaded_for_other_commands():
    code = "import sys, k8sjob.cli.collect, k8sjob.backends.record_storage; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    assert not {"fsspec", "s3fs", "botocore", "aiohttp"} & set(loaded.decode().split())
