"""Code and packages as layers: what is in them, always the same, and what cannot be packed."""

import gzip
import hashlib
import io
import os
import random
import re
import string
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.errors import ImageError
from k8sjob.image.build_context import read_context, shown_size
from k8sjob.image.inventory import Inventory
from k8sjob.image.layer_tar import entry, write_layer, zstd
from k8sjob.image.layers import find_secrets, pack_code, pack_packages
from k8sjob.image.secrets import _LONG, SecretScanner, _forms
from k8sjob.rendering.dockerfile import write_context


def packed(folder, **options):
    return contents(pack_code(read_context(folder), **options))


def contents(layer):
    """The layer's members by name, with their contents."""
    with closing(layer):
        blob = b"".join(layer.content.blocks())
    assert layer.content.digest == f"sha256:{hashlib.sha256(blob).hexdigest()}"
    assert layer.content.size == len(blob)
    archive = gzip.decompress(blob)
    assert layer.diff_id == f"sha256:{hashlib.sha256(archive).hexdigest()}"
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        return {m.name: (m, m.isfile() and members.extractfile(m).read()) for m in members}


def digest(layer):
    with closing(layer):
        return layer.content.digest


def digest_of_code(folder):
    return digest(pack_code(read_context(folder)))


def user_files(members):
    return {name.removeprefix("app/") for name, (m, _) in members.items() if name[:4] == "app/"}


def test_what_is_in_a_layer_of_code(code):
    (code / "run.sh").write_text("#!/bin/sh\n")
    (code / "run.sh").chmod(0o700)
    (code / "main.py").chmod(0o600)
    (code / "link").symlink_to("pkg/__init__.py")
    (code / "away").symlink_to("/data/set")
    members = packed(code)
    expected = {
        "app": (0o775, 1000, tarfile.DIRTYPE),
        "app/main.py": (0o644, 1000, tarfile.REGTYPE),
        "app/pkg": (0o775, 1000, tarfile.DIRTYPE),
        "app/run.sh": (0o755, 1000, tarfile.REGTYPE),
        "app/link": (0o777, 1000, tarfile.SYMTYPE),
        "home/k8sjob": (0o775, 1000, tarfile.DIRTYPE),
        "opt/k8sjob": (0o755, 0, tarfile.DIRTYPE),
        "opt/k8sjob/k8sjob/contract.py": (0o644, 0, tarfile.REGTYPE),
    }
    for name, (mode, owner, kind) in expected.items():
        member = members[name][0]
        found = (member.mode, member.uid, member.gid, member.type, member.mtime, member.uname)
        assert found == (mode, owner, 0, kind, 0, ""), name
    assert members["app/main.py"][1] == b"print('hello')\n"
    assert members["app/link"][0].linkname == "pkg/__init__.py"
    assert members["app/away"][0].linkname == "/data/set"


def test_it_is_what_a_build_would_copy(code, tmp_path, build_spec):
    """The folder that `render -d` writes, copied by the Dockerfile, is the other way."""
    (code / ".dockerignore").write_text("*.log\ndata\n!data/keep.txt\n")
    for name in ("a.log", "data/drop.txt", "data/keep.txt", "deep/er/x.py", "deep/a.log"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    (code / "empty").mkdir()
    (code / "link").symlink_to("main.py")
    write_context(build_spec, code, tmp_path / "build")
    copied = {
        path.relative_to(tmp_path / "build").as_posix(): path.is_file() and path.read_bytes()
        for path in (tmp_path / "build").rglob("*")
        if path.is_file()
    }
    members = packed(code)
    made_by_render = {"Dockerfile", ".dockerignore", "pytorchjob.yaml", ".k8sjob/COPY"}
    app = {f"app/{n}": c for n, c in copied.items() if n[:8] != ".k8sjob/"}
    runtime = {
        f"opt/k8sjob/{n.removeprefix('.k8sjob/')}": c
        for n, c in copied.items()
        if n.startswith(".k8sjob/k8sjob/")
    }
    files = {n: c for n, (m, c) in members.items() if m.isfile()}
    assert (
        files == {n: c for n, c in app.items() if n[4:] not in made_by_render | {"link"}} | runtime
    )
    assert members["app/link"][0].issym()


def test_a_copy_of_the_context_in_it_is_left_out(code, build_spec):
    before = user_files(packed(code))
    write_context(build_spec, code, code / "build")
    assert user_files(packed(code)) == before


def test_order_times_modes_and_links_do_not_matter(code, tmp_path):
    names = ["z.py", "a/b.py", "a-b.py", "a.py", "ü.py", "数.py", "x" * 120 + ".py"]
    other = tmp_path / "other"
    for folder, order in ((code, names), (other, reversed(names))):
        for name in order:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    (other / "pkg").mkdir()
    (other / "pkg/__init__.py").touch(0o600)
    (other / "main.py").write_text("print('hello')\n")
    os.utime(other / "main.py", (1, 1))
    (other / "a").chmod(0o700)
    assert digest_of_code(code) == digest_of_code(other)
    (other / "main.py").chmod(0o744)
    assert digest_of_code(code) != digest_of_code(other)


PACK = """
import os, sys
from pathlib import Path
from k8sjob.image.build_context import read_context
from k8sjob.image.layers import pack_code
os.umask(int(sys.argv[2], 8) if sys.argv[2:] else 0o022)
layer = pack_code(read_context(Path(sys.argv[1])))
layer.close()
"""


@pytest.mark.parametrize(
    ("env", "umask"),
    [
        ({"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "077"),
        ({"LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "1"}, "000"),
    ],
)
def test_locale_time_zone_and_umask_do_not_matter(code, env, umask):
    (code / "ünïcode.py").write_text("x = 'é'\n")
    (code / "link").symlink_to("ünïcode.py")
    program = f"{PACK}\nprint(layer.content.digest)"
    argv = [sys.executable, "-c", program, os.fsencode(code), umask]
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == digest_of_code(code), done.stderr


def test_private_files_are_left_out_and_reported(code):
    for name in (".env", "conf/.env.local", "keys/id_rsa", "tls.key", ".aws/credentials"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_text("x")
    (code / ".git").mkdir()
    (code / ".git/config").write_text("x")
    context = read_context(code)
    expected = (".aws/", ".env", "conf/.env.local", "keys/id_rsa", "tls.key")
    assert context.private == expected
    assert user_files(packed(code)) == {"main.py", "pkg", "pkg/__init__.py"}
    (code / ".dockerignore").write_text("*.log\n")
    assert read_context(code).private == expected
    assert ".git/config" not in user_files(packed(code))


def test_private_files_come_along_where_the_user_says_so(code):
    (code / ".env").write_text("x")
    (code / "ca.pem").write_text("x")
    (code / "other.pem").write_text("x")
    (code / ".dockerignore").write_text(".env\n!ca.pem\n")
    context = read_context(code)
    assert "ca.pem" in user_files(packed(code))
    assert context.private == ("other.pem",)


# --- what cannot be packed ----------------------------------------------------------------------


def test_what_is_left_out_does_no_harm(code):
    """Alone, each of these is an error of docs/reference/errors-image.md."""
    spoil = r"ln -s one two; ln -s two one; touch $'caf\xe9.py'; ln -s $'caf\xe9' link"
    subprocess.run(["bash", "-c", f"{spoil}; truncate -s 20G data.bin"], cwd=code, check=True)
    (code / ".dockerignore").write_text("*\n!main.py\n")
    assert user_files(packed(code)) == {"main.py"}


def test_what_is_no_file_is_passed_over(code):
    os.mkfifo(code / "fifo")
    assert "fifo" not in user_files(packed(code))


@pytest.mark.parametrize(
    "change",
    [
        "rm main.py",
        "echo longer than before > main.py",
        ": > main.py",
        "cp main.py x; mv x main.py",
    ],
)
def test_a_file_that_changes_meanwhile(code, change):
    context = read_context(code)
    subprocess.run(["sh", "-c", change], cwd=code, check=True)
    message = "cannot be read: No such file" if "rm" in change else "main.py changed while it was"
    with pytest.raises(ImageError, match=message):
        pack_code(context)


@pytest.mark.parametrize("name", ["main.py", "pkg"])
def test_what_cannot_be_read_is_named(code, name):
    (code / name).chmod(0)
    argv = [sys.executable, "-c", PACK, str(code)]
    if os.geteuid() == 0:  # root reads everything, unless that right is taken away
        argv = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--", *argv]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    (code / name).chmod(0o700)
    assert f"{code / name}: cannot be read: Permission denied; make it readable" in done.stderr


def test_a_disk_that_is_full(code, tmp_path):
    (code / "data.bin").write_bytes(os.urandom(9_000_000))
    argv = ["sh", "-c", f"ulimit -f 1024; exec {sys.executable} -c '{PACK}' {code}"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert (
        f"the layer cannot be written to {tmp_path}: File too large; free some space" in done.stderr
    )


def test_no_folder_for_what_is_temporary(code, monkeypatch):
    (code / "data.bin").write_bytes(os.urandom(9_000_000))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)  # as on a disk to read alone
    with pytest.raises(ImageError, match=r"cannot be written to a temporary folder: .*set TMPDIR"):
        packed(code)


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("size", [0, 2_000_000])
def test_a_disk_that_is_full_again_when_the_file_is_closed(monkeypatch, size, zstd):
    full = Path("/dev/full")
    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", lambda _size: full.open("wb"))
    with pytest.raises(ImageError, match="No space left on device; free some space"):
        write_layer([(entry("data.bin", 0o644, size=size), [os.urandom(size)])], zstd=zstd)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5_500_000])
def test_a_large_layer_is_one_stream_of_gzip_on_any_number_of_cores(monkeypatch, size):
    data = b"".join(os.urandom(700_000) + b"text " * 150_000 for _ in range(size // 1_000_000 + 1))
    blobs = []
    for cores in (1, 2, 5):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        members = [(entry("data.bin", 0o644, size=size), [data[:size]])]
        with closing(write_layer(members)) as layer:
            blobs.append(b"".join(layer.content.blocks()))
    assert blobs[0] == blobs[1] == blobs[2]
    unpacked = subprocess.run(["gzip", "-dc"], input=blobs[0], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(unpacked.stdout)) as archive:
        assert archive.extractfile("data.bin").read() == data[:size]
    assert gzip.decompress(blobs[0]) == unpacked.stdout


def test_a_context_that_is_larger_than_code_is_remarked_upon(code):
    assert read_context(code).remark is None
    with (code / "data.bin").open("wb") as file:
        file.truncate(9 << 30)
    remark = read_context(code).remark
    assert re.match(
        r"9\.66 GB of code, which the nodes pull again after each change; the l", remark
    )
    assert "largest: data.bin (9.66 GB), main.py (15 bytes)," in remark


def test_it_says_how_far_it_is(code):
    (code / "data.bin").write_bytes(bytes(600_000))
    seen = []
    context = read_context(code)
    pack_code(context, progress=lambda *numbers: seen.append(numbers)).close()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (context.size, context.size)
    assert len(seen) >= 3  # a large file is not packed in one go


def test_memory_does_not_grow_with_the_layer(code):
    with (code / "data.bin").open("wb") as file:
        file.truncate(64_000_000)
    peak = 'print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])'
    argv = [sys.executable, "-c", f"{PACK}\n{peak}", str(code)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80_000  # kilobytes


# --- packages ---------------------------------------------------------------------------------

INVENTORY = Inventory("base", "/opt/py/bin/python", "3.11", "amd64", (2, 36), "opt/py/site", {})
LONG = "#!/bin/sh\n'''exec' \"/a b/python\" \"$0\" \"$@\"\n' '''\nprint(1)\n"


def unpacked(folder, *, python="/usr/bin/python3.11", umask=0o022):
    files = {
        ".lock": "",
        "bin/tool": f"#!{python}\nprint(1)\n" if " " not in python else LONG,
        "bin/script": "#!/bin/sh\necho python\n",
        "bin/program": "\x7fELF #!python\nbin/tool,x\n",
        "tool/__init__.py": "import os\n",
        "tool/__pycache__/x.pyc": python,
        "tool-1.dist-info/RECORD": f"bin/tool,sha256={len(python)},{len(python)}\n"
        f"tool-1.dist-info/RECORD,,\ntool-1.dist-info/uv_cache.json,sha256={len(python)},9\n"
        "tool/__init__.py,sha256=abc,10\n",
        "tool-1.dist-info/uv_cache.json": python,
        "tool-1.dist-info/direct_url.json": python,
        "näme/data.txt": "x",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod((0o777 if name[:3] == "bin" else 0o666) & ~umask)
    return folder


def test_what_is_in_a_layer_of_packages(tmp_path):
    found = contents(pack_packages(unpacked(tmp_path), INVENTORY))
    assert {name: content for name, (_, content) in found.items() if content is not False} == {
        "opt/deps/bin/program": b"\x7fELF #!python\nbin/tool,x\n",
        "opt/deps/bin/script": b"#!/bin/sh\necho python\n",
        "opt/deps/bin/tool": b"#!/opt/py/bin/python\nprint(1)\n",
        "opt/deps/näme/data.txt": b"x",
        "opt/deps/tool-1.dist-info/RECORD": b"bin/tool,,\ntool-1.dist-info/RECORD,,\n"
        b"tool/__init__.py,sha256=abc,10\n",
        "opt/deps/tool/__init__.py": b"import os\n",
        "opt/py/site/zz-k8sjob-deps.pth": b"import site; site.addsitedir('/opt/deps')\n",
    }
    modes = {name: oct(m.mode) for name, (m, _) in found.items()}
    assert (modes["opt/deps/bin/tool"], modes["opt/deps/tool/__init__.py"]) == ("0o755", "0o644")
    assert {(m.uid, m.gid, m.mtime) for m, _ in found.values()} == {(0, 0, 0)}


@pytest.mark.parametrize(
    "how", [{"python": "/home/me/.venv/bin/python3"}, {"python": "/a b/python"}, {"umask": 0o077}]
)
def test_the_machine_that_unpacked_them_does_not_matter(tmp_path, how):
    one, two = unpacked(tmp_path / "one"), unpacked(tmp_path / "two", **how)
    assert digest(pack_packages(one, INVENTORY)) == digest(pack_packages(two, INVENTORY))


def test_a_name_that_no_image_can_hold(tmp_path):
    (tmp_path / "caf\udce9.py").write_text("")
    with pytest.raises(ImageError, match="a package has a name that is not UTF-8"):
        pack_packages(tmp_path, INVENTORY)


# --- the archive and the scanner ----------------------------------------------------------------

NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0/"), min_size=1)


@given(
    name=st.lists(NAMES, min_size=1, max_size=4).map("/".join).filter(lambda n: "\n" not in n),
    kind=st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE]),
    data=st.binary(max_size=2000),
    decompress=st.sampled_from([gzip.decompress, zstd.decompress]),
)
def test_a_layer_is_read_by_python(name, kind, data, decompress):
    data = data if kind == tarfile.REGTYPE else b""
    member = entry(name, 0o644, 7, size=len(data), kind=kind)
    with closing(write_layer([(member, [data])], zstd=decompress is zstd.decompress)) as layer:
        archive = decompress(b"".join(layer.content.blocks()))
    assert layer.diff_id == f"sha256:{hashlib.sha256(archive).hexdigest()}"
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        (found,) = members.getmembers()
        assert (found.name, found.mode, found.uid, found.type) == (name.rstrip("/"), 0o644, 7, kind)
        assert not data or members.extractfile(found).read() == data


def test_sizes_for_people():
    sizes = (0, 999, 12_345, 3.4e9, 2e12)
    assert [*map(shown_size, sizes)] == ["0 bytes", "999 bytes", "12.3 kB", "3.4 GB", "2,000 GB"]


def alphabet(name):
    letters = string.ascii_lowercase
    return {
        "hex": string.digits + "abcdef",
        "digit": string.digits,
        "upper": letters.upper() + string.digits,
        "alpha": letters + letters.upper(),
        "alnum": string.digits + letters + letters.upper(),
        "base64": string.digits + letters + letters.upper() + "+/",
        "url": string.digits + letters + letters.upper() + "_-",
    }[name]


def value(form):
    """A line of secrets.tsv with its made-up values: <alnum:36> is 36 random letters and digits."""
    values = random.Random(form)
    return re.sub(
        r"<(\w+):(\d+)>",
        lambda hole: "".join(values.choices(alphabet(hole[1]), k=int(hole[2]))),
        form,
    )


def corpus(name):
    _, *lines = (Path(__file__).parent / name).read_text().splitlines()
    return [line.encode().decode("unicode_escape") for line in lines]


def findings(*blocks):
    scanner = SecretScanner("conf")
    for block in blocks:
        scanner.feed(block)
    return [(finding.line, finding.what) for finding in scanner.finish()]


@pytest.mark.parametrize("line", corpus("secrets.tsv"))
def test_real_shapes_of_credentials(line):
    """As a whole file, and in the middle of one that comes in blocks."""
    kind, form = line.split("\t")
    content = value(form).encode()
    for blocks in ([content], [b"# first\n\n", content, b"\nend\n"]):
        assert {what for _, what in findings(*blocks)} == {kind}


def test_every_form_of_a_token_is_one_long_word():
    """What `_long_words` leaves out has none."""
    for begin, _, pattern in _forms()["token"]:
        assert re._parser.parse(pattern).getwidth()[0] >= _LONG, begin


def test_innocent_files():
    files = [*Path(tarfile.__file__).parent.glob("*.py"), Path(__file__)]
    contents = [file.read_bytes() for file in files]
    contents += [line.encode() for line in corpus("innocent.txt")]
    assert len(contents) > 200
    assert [(content[:60], findings(content)) for content in contents if findings(content)] == []


@given(cut=st.integers(1, 80_041), more=st.sampled_from(["", "x", "_1"]))
def test_blocks_neither_hide_nor_make_a_token(cut, more):
    """A word that is longer than a token is none, also where a block ends or the overlap begins."""
    token = value("h" + "f_<alnum:34>")
    text = (b"a\n" * 40_000) + f"{token}{more}\nend".encode()
    expected = [] if more else [(40_001, "a Hugging Face token")]
    assert findings(text[:cut], text[cut:]) == expected
    assert findings(text[:cut], text[cut : cut + 40], text[cut + 40 :]) == expected


@pytest.mark.parametrize("word", [b" ", b"-----BEGIN PRIVATE KEY", b"sk-" + b"proj-", b"SG."])
def test_no_content_takes_more_than_seconds(word):
    """These took hours: each place was tried with each end."""
    assert findings(b"-----BEGIN PRIVATE KEY-----" + word * 200_000)[1:] == []


def test_a_push_and_a_rendered_context_name_the_line(code):
    (code / "settings.sh").write_text(f"# one\n\n{value('gl' + 'pat-<url:20>')}\nend\n")
    context = read_context(code)
    with closing(pack_code(context)) as layer:
        assert [*map(str, layer.findings)] == ["settings.sh:3: a GitLab token"]
    assert find_secrets(context) == [*layer.findings]
