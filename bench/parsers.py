"""Parsers: how time and memory grow with what is read, whoever wrote it, and regular expressions.

Each parser reads inputs of 1, 10, 100 and 1,000 times a size, ordinary ones and some that are made
to cost much. The exponent is that of the last step: 1 for twice the time for twice the input. It
says nothing of a parser with a limit that refuses the input, which costs a constant.

Each regular expression of k8sjob, as it is called (match, search, ...), gets texts of one repeated
piece, which are made from the expression itself, of 1,000 and 4,000 characters.

    .venv/bin/python bench/parsers.py              # both tables, a few minutes
    .venv/bin/python bench/parsers.py yaml logs    # parsers with such a name
    .venv/bin/python bench/parsers.py expressions
"""

from __future__ import annotations

import ast
import gc
import io
import json
import math
import os
import re
import re._parser as parser
import sys
import tempfile
import time
import tracemalloc
import warnings
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 10, 100, 1000)
os.environ.setdefault("KERAS_BACKEND", "torch")  # without it Keras imports TensorFlow
MOST_S = 0.4
"""Seconds of CPU after which a parser gets no larger input, and is not measured again."""


# --- regular expressions -------------------------------------------------------------------------


def expressions():
    """(place, method, compiled) of each expression in the source with a text that is known."""
    for file in sorted((ROOT / "k8sjob").rglob("*.py")):
        tree = ast.parse(file.read_text())
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from _of_module(tree, module)
    yield from _of_tables()


METHODS = {"match", "search", "fullmatch", "sub", "findall", "finditer", "split"}


def _of_module(tree, module):
    import importlib

    loaded = None
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call | ast.Attribute)):
            continue
        function = call.func if isinstance(call, ast.Call) else call
        if not (isinstance(function, ast.Attribute) and function.attr in METHODS):
            continue
        owner = function.value
        if isinstance(owner, ast.Name) and owner.id == "re" and isinstance(call, ast.Call):
            owner, flags = call.args[0], 0
            for value in [*call.args[2:], *(word.value for word in call.keywords)]:
                names = [part.attr for part in ast.walk(value) if isinstance(part, ast.Attribute)]
                flags |= sum(int(getattr(re, name)) for name in set(names) if name.isupper())
        else:
            flags = 0
        loaded = loaded or importlib.import_module(module)
        if isinstance(owner, ast.Name):
            value = getattr(loaded, owner.id, None)
        elif isinstance(owner, ast.Constant):
            value = owner.value
        else:
            continue
        if isinstance(value, str | bytes):
            value = re.compile(value, flags)
        if isinstance(value, re.Pattern):
            yield f"{module}:{call.lineno}", function.attr, value


def _of_tables():
    """Expressions that rules and tables hold."""
    from k8sjob.observe.diagnose import output
    from k8sjob.observe.diagnose.finding import load_rules

    for rule in load_rules("output"):
        yield f"rule of output: {rule.pattern[:40]}", "search", re.compile(rule.pattern, re.DOTALL)
    for prefix in output._LOG_PREFIXES:
        yield f"prefix of output: {prefix[:40]}", "sub", re.compile(prefix)


def literals(node):
    """The texts that a part of a parsed expression names, and a character of each range."""
    if isinstance(node, tuple) and str(node[0]) == "RANGE":
        yield chr(node[1][0])
    elif not isinstance(node, str | int):
        items = list(node or ())
        texts = [chr(part[1]) if str(part)[1:8] == "LITERAL" else "\0" for part in items]
        yield from "".join(texts).split("\0")
        for part in items:
            if str(part)[1:8] != "LITERAL" and isinstance(part, tuple | list | parser.SubPattern):
                yield from literals(part)


def pieces(pattern) -> set[str]:
    """Texts to repeat: what the expression names, and what separates words."""
    text, flags = pattern.pattern, pattern.flags
    if isinstance(text, bytes):
        text, flags = text.decode("latin1"), flags & ~re.UNICODE
    short = {part for part in literals(parser.parse(text, flags)) if 0 < len(part) < 40}
    short |= set("a0 \t\n._-/:\"'=,\\([{|%") | set("".join(part for part in short)[:30])
    letters = sorted(part for part in short if len(part) == 1)
    pairs = {one + other for one in letters[:16] for other in "a " if one != other}
    words = {part + end for part in short if len(part) > 1 for end in ("", " ", "a")}
    return short | pairs | words


def seconds_of(run, least=0.0) -> float:
    """The least CPU time of up to three runs; of one, if it takes less than `least` or long."""
    best = math.inf
    for _ in range(3):
        gc.disable()  # as timeit does: collections come sooner or later than their share
        began = time.process_time()
        run()
        best = min(best, time.process_time() - began)
        gc.enable()
        if best < least or best > 0.1:
            break
    return best


def slowest(method, pattern, large=4000, factor=4):
    """(exponent, seconds at the larger size, the text) of the text that costs most."""
    binary = isinstance(pattern.pattern, bytes)
    call = getattr(pattern, method)

    def reading(head, piece, length):
        text = head + piece * (length // len(piece)) + "\x01"
        subject = text.encode("latin1", "replace") if binary else text
        if method == "sub":
            return lambda: call(b"" if binary else "", subject)
        if method == "finditer":
            return lambda: list(call(subject))
        return lambda: call(subject)

    worst = (1.0, 0.0, "")
    repeated = sorted(pieces(pattern))
    heads = ["", *sorted((piece for piece in repeated if len(piece) > 2), key=len)[:5]]
    for piece in repeated:
        for head in heads:
            took = seconds_of(reading(head, piece, large), least=5e-4)
            if took > max(worst[1], 5e-4):
                before = seconds_of(reading(head, piece, large // factor))
                exponent = math.log(took / before) / math.log(factor)
                worst = (exponent, took, f"{head}+{piece}")
    return worst


def measure_expressions():
    """The rows of the second table."""
    rows, known = [], {}
    for place, method, pattern in expressions():
        key = method, pattern.pattern, pattern.flags
        if key not in known:
            known[key] = slowest(method, pattern)
        rows.append((*known[key], f"{place} {method}"))
    return rows


# --- parsers -------------------------------------------------------------------------------------

JOB = """\
name: parsers
image: {repository: registry.example/team/parsers}
run: {script: train.py}
replicas: {workers: 1}
"""
MANIFEST = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: parsers}
spec:
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template:
        spec:
          containers:
            - name: pytorch
              image: registry.example/team/parsers:1
              command: [python, train.py]
"""
TIME = "2026-01-02T03:04:05.000000006Z"
CASES = {}


def case(base, name=""):
    """A function that prepares an input of a size and returns what reads it."""

    def add(function):
        CASES[name or function.__name__.replace("_", " ")] = base, function
        return function

    return add


def many(line, number):
    """The line with each number in its place."""
    return "".join(line.format(n) for n in range(number))


def harmless(run):
    """What reads, whatever error it ends with: a refusal takes time, too."""
    from k8sjob.errors import K8sJobError

    def tried():
        with suppress(K8sJobError, ValueError):
            run()

    return tried


@case(10, "job.yaml: variables")
def _(n, _folder):
    from k8sjob import JobSpec

    text = JOB.replace("train.py}", "train.py, env: {" + many("A{0}: b, ", n) + "}}")
    return lambda: JobSpec.from_yaml(text)


@case(10, "job.yaml: arguments")
def _(n, _folder):
    from k8sjob import JobSpec

    text = JOB.replace("train.py}", "train.py, args: [" + many("'--a{0}', ", n) + "]}")
    return lambda: JobSpec.from_yaml(text)


@case(10, "job.yaml: unknown fields")
def _(n, _folder):
    from k8sjob import JobSpec

    return harmless(lambda: JobSpec.from_yaml(JOB + many("workers{0}: 1\n", n)))


@case(2, "job.yaml: volumes")
def _(n, _folder):
    from k8sjob import JobSpec

    volumes = many("  - {{mount: /a{0}, claim: a{0}}}\n", n)
    return harmless(lambda: JobSpec.from_yaml(JOB + "volumes:\n" + volumes))


@case(100, "yaml: one long text")
def _(n, _folder):
    from k8sjob.yamldoc import parse

    return lambda: parse("a: '" + "b c\\d " * n + "'\n")


@case(100, "yaml: blank lines and comments")
def _(n, _folder):
    from k8sjob.yamldoc import parse

    return lambda: parse("# a  \n   \n" * n + "a: 1\n")


@case(10, "yaml: a block text")
def _(n, _folder):
    from k8sjob.yamldoc import parse

    return lambda: parse("a: |\n" + "  - b: |\n" * n)


@case(10, "yaml: templates refused")
def _(n, _folder):
    from k8sjob.yamldoc import reading

    text = "a: |\n" + "  b: |\n\n    {{ c \n" * n
    return harmless(lambda: reading.refuse_template(text))


@case(10, "yaml: aliases")
def _(n, _folder):
    from k8sjob.yamldoc import parse

    return harmless(lambda: parse("a: &a {b: c}\n" + many("d{0}: *a\n", n)))


@case(10, "yaml: documents")
def _(n, _folder):
    from k8sjob.yamldoc import parse_all

    return lambda: parse_all("---\na: 1\n" * n)


@case(10, "yaml: brackets")
def _(n, _folder):
    from k8sjob.yamldoc import parse

    return harmless(lambda: parse("a: " + "[" * n))


@case(20, "--set: a field")
def _(n, _folder):
    from k8sjob.spec.changes import Change

    return harmless(lambda: Change.parse("a" + ".b-c" * n + "=1"))


@case(10, "overlay: labels")
def _(n, _folder):
    from k8sjob import JobSpec, render

    text = JOB + "overlay: {metadata: {labels: {" + many("a{0}: b, ", n) + "}}}\n"
    spec = JobSpec.from_yaml(text)
    return lambda: render(spec, image="a@sha256:" + "0" * 64)


@case(10, "overlay: lists by name")
def _(n, _folder):
    from k8sjob.rendering.merge import merge

    base = {"env": [{"name": f"a{k}", "value": "b"} for k in range(n)]}
    patch = {"env": [{"name": f"a{k}", "value": "c"} for k in reversed(range(n))]}
    return lambda: merge(base, patch)


@case(10, "template: variables")
def _(n, _folder):
    from k8sjob import JobSpec, render

    text = JOB.replace("train.py}", "train.py, env: {" + many("A{0}: $b, ", n) + "}}")
    spec = JobSpec.from_yaml(text)
    return lambda: render(spec, image="a@sha256:" + "0" * 64)


@case(10, "template: packages of a Dockerfile")
def _(n, _folder):
    from k8sjob import JobSpec
    from k8sjob.rendering.dockerfile import dockerfile

    image = "image: {repository: a.example/b, base: 'c:1', pip: [" + many("a{0}, ", n) + "]}"
    spec = JobSpec.from_yaml(re.sub("image: .*", image, JOB))
    return lambda: dockerfile(spec)


@case(20, "lint: a Dockerfile")
def _(n, _folder):
    from k8sjob.checks.lint.files import _DOCKERFILE

    return lambda: _DOCKERFILE.search("RUN a \\\n" * n + " \n" * n + "FROM" + " " * n)


def dependencies(text):
    """What checks a file of requirements."""
    from k8sjob.image.dependencies import Dependencies

    return lambda: (Dependencies(requirements=text).refused_line(),)


@case(10, "requirements: lines")
def _(n, _folder):
    return dependencies(many("package{0}[a, b] >=1.0,!=1.{0} ; python_version > '3' # c\n", n))


@case(20, "requirements: one long line")
def _(n, _folder):
    return dependencies("package " + ">=1.0, " * n + ";")


@case(20, "requirements: hashes")
def _(n, _folder):
    return dependencies("package==1 \\\n" + "  --hash=sha256:0a \\\n" * n + "  --hash=sha256:zz\n")


@case(20, "requirements: spaces")
def _(n, _folder):
    return dependencies("package" + " " * n + "\x01\n" + "# \n" * n)


@case(20, "requirements: names of packages")
def _(n, _folder):
    from k8sjob.requirements import required_names

    return lambda: required_names("a-" * n + "\n" + "a.b.whl" * n + "\n" + many("a{0}==1\n", n))


@case(5, "kubeconfig: contexts")
def _(n, folder):
    import yaml

    from k8sjob.kube.client.kubeconfig import access

    parts = {
        "clusters": [{"name": f"c{k}", "cluster": {"server": "https://a"}} for k in range(n)],
        "users": [{"name": f"u{k}", "user": {"token": "t"}} for k in range(n)],
        "contexts": [
            {"name": f"x{k}", "context": {"cluster": f"c{k}", "user": f"u{k}"}} for k in range(n)
        ],
        "current-context": f"x{n - 1}",
    }
    (folder / f"config-{n}").write_text(yaml.safe_dump(parts))
    return lambda: access(kubeconfig=folder / f"config-{n}")


@case(10, ".dockerignore: patterns")
def _(n, _folder):
    from k8sjob.rendering.dockerignore import Ignore

    return lambda: Ignore(many("a{0}/**/b*.[a-c]\n!c{0}\n", n))("a1/b/c/d.txt")


@case(4, ".dockerignore: stars")
def _(n, _folder):
    from k8sjob.rendering.dockerignore import Ignore

    ignore = Ignore("a*" * min(n, 1500) + "b\n" + "**/a/" * min(n, 600) + "b\n")
    return lambda: ignore("a" * n + "/a" * n)


@case(3, ".dockerignore: one long pattern")
def _(n, _folder):
    from k8sjob.rendering.dockerignore import Ignore

    return harmless(lambda: Ignore("[a-c" * n + "\n"))


@case(5, "adopt: variables")
def _(n, _folder):
    from k8sjob.adopt import adopt

    pairs = many("                - {{name: A{0}, value: '$(A{0}) b'}}\n", n)
    return lambda: adopt(MANIFEST + "              env:\n" + pairs)


@case(5, "adopt: documents")
def _(n, _folder):
    from k8sjob.adopt import adopt

    other = "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: a{0}}}\n"
    return harmless(lambda: adopt(MANIFEST + many(other, n)))


@case(5, "adopt: differences")
def _(n, _folder):
    from k8sjob.adopt.equivalence import difference

    one, other = ([{"name": f"{k}", "a": [k, c]} for k in range(n)] for c in (1, 2))
    return lambda: difference({"a": one}, {"a": other[::-1]})


@case(5, "lint: manifests")
def _(n, _folder):
    from k8sjob.checks.lint import lint

    path = _folder / f"lint-{n}.yaml"
    env = many("                - {{name: A{0}, value: '{0}'}}\n", n)
    path.write_text(MANIFEST + "              env:\n" + env)
    return harmless(lambda: list(lint(path)))


def snapshot_of(pods, events):
    """A job with so many Pods and Events."""
    from datetime import UTC, datetime

    import yaml

    from k8sjob.backends.api import Snapshot
    from k8sjob.targets.jobs import job_of

    job = yaml.safe_load(MANIFEST)
    job["metadata"] |= {"namespace": "a", "uid": "0" * 8, "creationTimestamp": TIME}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {"containers": [{"name": "pytorch", "image": "a"}]},
        "status": {"phase": "Running"},
    }
    return Snapshot(
        job_of(job),
        [
            {**pod, "metadata": {"name": f"p{k}", "namespace": "a", "uid": f"{k}", "labels": {
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": f"{k}"}}}
            for k in range(pods)
        ],
        [
            {"kind": "Event", "metadata": {"name": f"e{k}"}, "type": "Warning", "reason": "BackOff",
             "message": f"m{k}", "lastTimestamp": TIME, "involvedObject": {"name": f"p{k}"}}
            for k in range(events)
        ],
        datetime.now(UTC),
    )  # fmt: skip


def record(folder, pods, events, lines):
    """The file of a record."""
    from k8sjob.backends.api import JobRef, LogLine
    from k8sjob.backends.record import write_record

    class Backend:
        def related(self, _snapshot):
            return ()

        def logs(self, _ref, replica):
            return (LogLine(replica, 0, TIME, f"line {k}") for k in range(lines))

    path = folder / f"{pods}-{events}-{lines}.k8sjob"
    snapshot = snapshot_of(pods, events)
    with path.open("wb") as out:
        write_record(Backend(), JobRef.of(snapshot.job), out, snapshot=snapshot)
    return path


@case(5, "records: pods")
def _(n, folder):
    from k8sjob.backends.record import RecordBackend

    path = record(folder, n, 0, 0)
    return lambda: RecordBackend(path)


@case(5, "records: events")
def _(n, folder):
    from k8sjob.backends.record import RecordBackend

    path = record(folder, 0, n, 0)
    return lambda: RecordBackend(path)


@case(50, "records: output")
def _(n, folder):
    from k8sjob.backends.record import RecordBackend

    backend = RecordBackend(record(folder, 0, 0, n))
    return lambda: sum(1 for _ in backend.logs(backend.find(""), "master-0"))


@case(50, "records: the last lines")
def _(n, folder):
    from k8sjob.backends.record import RecordBackend

    backend = RecordBackend(record(folder, 0, 0, n + 1))
    return lambda: sum(1 for _ in backend.logs(backend.find(""), "master-0", tail=5))


@case(5, "why: pods and events")
def _(n, _folder):
    from k8sjob.observe.diagnose import diagnose

    snapshot = snapshot_of(n, n)
    return lambda: diagnose(snapshot, {}, ())


def log_writer(data):
    """What writes the output of a run, in blocks as they come from a pipe."""
    from k8sjob.backends.local.logfiles import LogWriter

    def run():
        with tempfile.TemporaryDirectory() as name:
            writer = LogWriter(Path(name) / "0.log", "/tmp/copy", "/home/me/source")
            for start in range(0, len(data), 1 << 16):
                writer.feed(data[start : start + (1 << 16)])
            writer.close()

    return run


@case(200, "LogWriter: lines")
def _(n, _folder):
    return log_writer(b"epoch 1 loss 0.5\n" * n)


@case(2000, "LogWriter: one line")
def _(n, _folder):
    return log_writer(b"x" * n)


@case(200, "LogWriter: paths of the copy")
def _(n, _folder):
    return log_writer(b"/tmp/copy/" * n)


@case(200, "logs of a run: read")
def _(n, folder):
    from k8sjob.backends.local import logfiles

    place = folder / f"logs-{n}"
    place.mkdir(exist_ok=True)
    writer = logfiles.LogWriter(place / "0.log", "/tmp/copy", "/home/me/source")
    writer.feed(b"epoch 1\n" * n)
    writer.close()
    return lambda: sum(1 for _ in logfiles.read(place, "master-0", 0))


def sanitized(piece):
    """A case of text that goes to a terminal."""

    def prepare(n, _folder):
        from k8sjob.sanitize import safe_text

        text = piece * n
        return lambda: safe_text(text)

    return prepare


for piece in ("\x1b[1", "\x1b]0;", "\x90a", "a\u0301", "\r", "\u202ea", "\ud800", "a\r\n", "\t"):
    case(500, f"sanitizer: {piece!a}")(sanitized(piece))


def hidden(piece):
    """A case of text whose passwords are hidden."""

    def prepare(n, _folder):
        from k8sjob.errors import redacted

        return lambda: redacted(piece * n)

    return prepare


for piece in (
    "://", "//a", "--token ", "--a-b-key  ", "token", "token=", "token: ", "secret: '",
    "password=\\'",    "eyJaaaaaaaa", "eyJaaaaaaaa.", "Bearer ", "-----BEGIN PRIVATE KEY-----",
    "api_key_", "a-",
    "&key=",
):  # fmt: skip
    case(100, f"redaction: {piece!a}")(hidden(piece))


@case(100, "events: lines of progress")
def _(n, _folder):
    from k8sjob.contract import Event

    event = Event("progress", {"step": 1, "loss": 0.5}, 1.0).encode()
    return lambda: [Event.decode(event, "worker-0") for _ in range(n)]


@case(100, "events: one long line")
def _(n, _folder):
    from k8sjob.contract import Event

    mark = Event("progress", {}, 1.0).encode().partition("{")[0]
    return lambda: (Event.decode(mark * n), Event.decode(mark + '{"a":' * n))


@case(100, "filter of logs: tracebacks")
def _(n, _folder):
    from k8sjob.contract import Event
    from k8sjob.view.filters import Errors

    lines = ["Traceback (most recent call last):"]
    lines += [f'  File "/a/site-packages/b/c.py", line {k}, in d' for k in range(20)]
    lines += ["ValueError: a"]
    events = [
        Event("log", {"text": line}, 1.0, f"worker-{k}") for k in range(n // 20) for line in lines
    ]

    def run():
        errors = Errors()
        errors.take(events)
        errors.rest()

    return run


@case(100, "filter of logs: long lines")
def _(n, _folder):
    from k8sjob.contract import Event
    from k8sjob.view.filters import Errors

    lines = ["Traceback (most recent call last):", '  File "' + "/a" * n, "a." * n, "x " * n,
             "[rank 1] " + ": " * n + "the same", "k8sjob: rank 1: " + ": " * n]  # fmt: skip
    events = [Event("log", {"text": line}, 1.0, "worker-1") for line in lines]

    def run():
        errors = Errors()
        errors.take(events)
        errors.rest()

    return run


@case(100, "filter of logs: epochs")
def _(n, _folder):
    from k8sjob.contract import Event
    from k8sjob.view.filters import Epochs

    events = [Event("progress", {"step": 1, "steps": 1, "epoch": k}, 1.0, "a") for k in range(n)]

    def run():
        epochs = Epochs(pace=True)
        for event in events:
            list(epochs.take(event))

    return run


def why(lines):
    """What looks for the cause in the last output of a replica."""
    from k8sjob.observe.diagnose import output
    from k8sjob.observe.diagnose.facts import Failure

    failure = Failure("worker-0", 1, "Error", "", None, 0.0)

    def run():
        last = output.last_output(failure, lines, ranks=2)
        output.explain_output(last, local=False)
        output.explain_lines(last.context, local=False)
        output.library_lines(lines)

    return run


@case(10, "why: lines of output")
def _(n, _folder):
    return why([f"[rank{k % 8}]: epoch {k} loss 0.5 of model" for k in range(n)])


@case(2, "why: tracebacks")
def _(n, _folder):
    cause = "The above exception was the direct cause of the following exception:"
    block = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "ValueError: a",
        "",
        cause,
    ]
    return why(block * n)


@case(2, "why: blank lines between tracebacks")
def _(n, _folder):
    return why(["Traceback (most recent call last):", "", "ValueError: a", ""] * n)


for piece in ("a", " ", "Error: ", "a.", "[rank1]: ", "%|", "NCCL ", "'", "CUDA out of memory ", "://",
              "1", "torch.", "rank 1 ", "No module named "):  # fmt: skip
    case(50, f"why: one line of {piece!r}")(lambda n, _folder, piece=piece: why([piece * n, "x"]))


def archive(members):
    """A layer of these files."""
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def scan(data):
    """What reads a layer."""
    from k8sjob.image import inventory

    return lambda: inventory._scan_archive(io.BytesIO(data), "a", inventory.LayerScan())


@case(10, "layers: files")
def _(n, _folder):
    return scan(archive((f"usr/lib/a{k}/b.py", b"") for k in range(n)))


@case(5, "layers: distributions")
def _(n, _folder):
    site = "usr/lib/python3.12/site-packages"
    return scan(
        archive((f"{site}/a{k}-1.dist-info/METADATA", b"Name: a\nVersion: 1\n") for k in range(n))
    )


@case(10, "layers: long names")
def _(n, _folder):
    return scan(archive([("a/" * n + "site-packages/" * n + "b", b"")]))


@case(200, "layers: metadata")
def _(n, _folder):
    header = b"Name: a\n" + b"Requires-Dist: b; \n" * n + b" c\n" * n
    return scan(archive([("a/site-packages/a-1.dist-info/METADATA", header)]))


@case(200, "layers: a C library")
def _(n, _folder):
    text = b"GNU C Library release version " * n
    return scan(archive([("lib/libc.so.6", text)]))


@case(10, "layers: a tree of links")
def _(n, _folder):
    from k8sjob.image import inventory

    layer = inventory.LayerScan(links={f"a{k}": f"a{k + 1}" for k in range(n)})

    def run():
        tree = inventory._Tree()
        tree.add(layer)
        tree.resolve("a0/b")

    return harmless(run)


@case(20, "layers: hidden folders")
def _(n, _folder):
    from k8sjob.image import inventory

    below = inventory.LayerScan(marks={f"a{k}/b": "" for k in range(n)})
    above = inventory.LayerScan(hidden=[f"a{k}" for k in range(n)])

    def run():
        tree = inventory._Tree()
        tree.add(below)
        tree.add(above)

    return run


@case(5, "registry: a manifest")
def _(n, _folder):
    from k8sjob.image.registry import manifest

    layer = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "size": 1,
             "digest": "sha256:" + "0" * 64}  # fmt: skip
    kind = "application/vnd.oci.image.manifest.v1+json"
    config = {**layer, "mediaType": "application/vnd.oci.image.config.v1+json"}
    raw = json.dumps({"mediaType": kind, "config": config, "layers": [layer] * n}).encode()
    return lambda: manifest.read(raw, kind, "a")


@case(5, "registry: an index")
def _(n, _folder):
    from k8sjob.image.registry import manifest

    raw = json.dumps(
        {
            "manifests": [
                {
                    "digest": "sha256:" + "0" * 64,
                    "platform": {"os": "linux", "architecture": f"a{k}"},
                }
                for k in range(n)
            ]
        }
    ).encode()
    return harmless(lambda: manifest.read(raw, "", "a").choose("linux/b", "a"))


@case(20, "registry: a name")
def _(n, _folder):
    from k8sjob.image.registry.manifest import ImageReference

    return harmless(lambda: ImageReference.parse("a.b-c/" * n + "!"))


@case(20, "registry: a challenge")
def _(n, _folder):
    from k8sjob.image.registry import client

    text = 'Bearer realm="' + "\\a" * n + "a " * n + ", Basic" * n
    return lambda: (re.findall(client._SCHEME, text), re.findall(client._PARAMETER, text))


@case(100, "secrets in files")
def _(n, _folder):
    from k8sjob.image import secrets

    data = (b"aws_secret_access_key = 'abcdefghijklmnopqrstuvwxyz0123456789ABCD'\n"
            b"ghp_0123456789abcdefghijklmnopqrstuvwxyz\n") * n  # fmt: skip
    return lambda: list(secrets._matches(data))


@case(100, "secrets in files: beginnings")
def _(n, _folder):
    from k8sjob.image import secrets

    data = b"token = ghp_ AKIA sk- -----BEGIN password=" * n
    return lambda: list(secrets._matches(data))


@case(5, "kube: a list of pods")
def _(n, _folder):
    from k8sjob.kube import objects

    pods = snapshot_of(n, n)
    return lambda: ([objects.without_managed_fields(pod) for pod in pods.pods],
                    objects.in_time(pods.events))  # fmt: skip


@case(50, "kube: lines of an answer")
def _(n, _folder):
    from k8sjob.kube.client import transport

    return lambda: sum(1 for _ in transport.lines([b"a", b"b\nc"] * n))


@case(50, "kube: one line of an answer")
def _(n, _folder):
    from k8sjob.kube.client import transport

    return lambda: sum(1 for _ in transport.lines([b"abc"] * n))


for reader, text in {
    "quantities": "k8sjob.kube.quantity:parse",
    "times: a duration": "k8sjob.spec.values:parse_duration",
    "times: of an object": "k8sjob.kube.objects:moment",
    "image references": "k8sjob.spec.values:is_image_reference",
    "names": "k8sjob.kube.objects:is_name",
    "label selectors": "k8sjob.cli.options:selector",
    "termination messages": "k8sjob.contract:Reason.decode",
    "metrics: addresses": "k8sjob.cli.metrics:_LISTEN.fullmatch",
}.items():
    for piece in ("1", "a.b-c/", "a ", "1h", "2026-01-", "{", "=,"):

        def _of_text(n, _folder, text=text, piece=piece):
            import importlib

            import click
            from pydantic_core import PydanticCustomError

            module, _, path = text.partition(":")
            function = importlib.import_module(module)
            for part in path.split("."):
                function = getattr(function, part)

            def run():
                for _ in range(100):
                    with suppress(ValueError, click.UsageError, PydanticCustomError):
                        function(piece * n)

            return run

        case(10, f"{reader}: {piece!r}")(_of_text)


@case(20, "notebooks: cells")
def _(n, folder):
    from k8sjob.checks.scripts import job_draft

    file = folder / f"a-{n}.ipynb"
    cells = [{"cell_type": "code", "source": ["%time\n", f"a = {k}\n", "!pip\n"]} for k in range(n)]
    file.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    return harmless(lambda: job_draft._cells(file))


def checkpoint(state):
    """The bytes that torch.save writes."""
    import torch

    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


@case(5, "checkpoints: a file")
def _(n, _folder):
    import torch

    from k8sjob.runtime.checkpoint.format import decode

    content = checkpoint({f"a{k}": torch.zeros(2) for k in range(n)})
    return lambda: decode(content)


@case(50, "checkpoints: lists and texts")
def _(n, _folder):
    from k8sjob.runtime.checkpoint.format import decode

    content = checkpoint({"a": [{"b": [1, 2.0, f"c{k}"], "d": "e"} for k in range(n)]})
    return lambda: decode(content)


@case(50, "checkpoints: digests.json")
def _(n, folder):
    from k8sjob.runtime.checkpoint import store

    place = folder / f"digests-{n}"
    place.mkdir(exist_ok=True)
    store.write_digests(place, {f"a{k}": store.Digest(1, "0" * 64) for k in range(n)})
    return lambda: store.read_digests(place)


def described(n, folder, chunks):
    """The folder of a checkpoint with a tensor of n chunks, or n tensors of one."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    from k8sjob.runtime.checkpoint import store

    place = folder / f"described-{n}-{chunks}"
    place.mkdir(exist_ok=True)
    part = checkpoint(torch.zeros(2))
    names, each = ([("a", n)], n) if chunks else ([(f"a{k}", 1) for k in range(n)], 1)
    tensors, places = {}, {}
    with (place / "__0_0.distcp").open("wb") as out:
        for name, count in names:
            tensors[name] = metadata.TensorStorageMetadata(
                metadata.TensorProperties(torch.float32),
                torch.Size([2 * each]),
                [
                    metadata.ChunkStorageMetadata(torch.Size([2 * k]), torch.Size([2]))
                    for k in range(count)
                ],
            )
            for k in range(count):
                index = metadata.MetadataIndex(name, torch.Size([2 * k]))
                places[index] = _StorageInfo("__0_0.distcp", out.tell(), len(part))
                out.write(part)
    (place / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, None, places)))
    marked = {name: {"k8sjob/tensor": name} for name, _ in names}
    (place / "others.pt").write_bytes(checkpoint({"step": 1, "marked": marked}))
    files = ("__0_0.distcp", ".metadata", "others.pt")
    store.write_digests(place, {name: store.measure(place / name) for name in files})
    return place


for what, as_chunks in (("tensors", False), ("chunks", True)):

    @case(2, f"checkpoints: a folder of {what}")
    def _(n, folder, as_chunks=as_chunks):
        from k8sjob.runtime.checkpoint import format as sharded

        place = described(n, folder, as_chunks)
        return lambda: sharded.read(place)

    @case(1, f"checkpoints: {what} loaded")
    def _(n, folder, as_chunks=as_chunks):
        from k8sjob.runtime.checkpoint import format as sharded

        place = described(n, folder, as_chunks)
        return lambda: sharded.gathered(sharded.read(place))


def peak_of(run) -> int:
    """Bytes that Python has allocated at once."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def grown(name):
    """(exponent of time, of memory, seconds and MB at the largest size, that size)."""
    base, prepare = CASES[name]
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            run = prepare(base * size, Path(folder))
            took = seconds_of(run)
            points.append((base * size, took, peak_of(run) if took < MOST_S / 3 else 0))
            if took > MOST_S:
                break
    (small, before, held), (large, after, peak) = points[-2:]
    step = math.log(large / small)
    # Of next to nothing, as of a refusal, an exponent would be noise.
    time_exponent = math.log(after / before) / step if before and after > 1e-3 else 0.0
    if not peak and len(points) > 2:  # tracing takes several times the time
        (_, _, held), (_, _, peak) = points[-3:-1]
        step = math.log(points[-2][0] / points[-3][0])
    memory_exponent = math.log(peak / held) / step if held and peak > 1e5 else 0.0
    return time_exponent, memory_exponent, after, peak / 2**20, large


def measure(words=()):
    """The rows of the first table; of parsers whose name has one of the words, if there are any."""
    rows = []
    for name in CASES:
        if not words or any(word in name for word in words):
            try:
                rows.append((*grown(name), name))
                print("{:4.2f} {:4.2f} {:8.3f} {:6.1f} {:8d} {}".format(*rows[-1]), file=sys.stderr)
            except Exception as error:  # noqa: BLE001 - of a case, not of the table
                print(f"{name}: {error!r}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    chosen = sys.argv[1:]
    if chosen != ["expressions"]:
        print("time  memory  seconds       MB     size  parser")
        for row in sorted(measure(chosen), reverse=True):
            print("{:4.2f}    {:4.2f} {:8.3f} {:8.1f} {:8d}  {}".format(*row))
    if chosen in ([], ["expressions"]):
        print("\ntime  seconds  expression, with 4,000 characters of the text that costs most")
        for row in sorted(measure_expressions(), reverse=True):
            if row[1] > 5e-4:
                print("{0:4.2f} {1:8.4f}  {3}  {2!a}".format(*row))
