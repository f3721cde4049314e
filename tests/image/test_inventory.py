"""What a base's Python is and what it has, told from its layers alone."""

import gzip
import io
import tarfile
from types import SimpleNamespace

import pytest
import wheelhouse
from registries import tar_of

from k8sjob.errors import ImageError
from k8sjob.files import keep_value
from k8sjob.image.inventory import read_inventory, scan_layer, take_inventory
from k8sjob.image.layer_tar import ZSTD_MAGIC, zstd
from k8sjob.image.registry.blob_content import in_memory
from k8sjob.image.registry.client import RegistryClient
from k8sjob.image.registry.http_client import HttpClient
from k8sjob.image.registry.manifest import BaseImage, Descriptor, ImageReference, Manifest
from k8sjob.image.registry.repository import Repository

DIGEST = "sha256:" + "a" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/k8sjob"


def image(environment=(), architecture="amd64"):
    manifest = Manifest(DIGEST, "", {}, Descriptor(DIGEST, 1), ())
    config = {"architecture": architecture, "os": "linux", "config": {"Env": list(environment)}}
    return BaseImage(ImageReference.parse("reg.example/base:1"), manifest, config)


def inventory(*layers, **of):
    found = [scan_layer(in_memory(tar_of(files)), "base", lambda _size: None) for files in layers]
    return take_inventory(image(**of), found)


def test_a_debian_base():
    system, packages = wheelhouse.base("3.13")
    found = inventory(system, packages)
    assert (found.python, found.version, found.architecture) == ("/usr/bin/python", "3.13", "amd64")
    assert (found.glibc, found.site) == ((2, 36), "usr/lib/python3/dist-packages")
    assert found.distributions == {
        "numpy": "Name: numpy\nVersion: 2.2.4",
        "torch": "Name: torch\nVersion: 2.6.0+cpu",
    }


def conda(name="opt/conda"):
    site = f"{name}/lib/python3.12/site-packages"
    return {
        f"{name}/bin/python": "python3.12",
        f"{name}/bin/python3.12": b"elf",
        **wheelhouse.installed("Torch_Vision", "1.0", site=site),
    }


def test_the_path_decides_which_python():
    path = ["PATH=/opt/conda/bin:/usr/bin"]
    found = inventory(*wheelhouse.base(), conda(), environment=path)
    assert (found.python, found.version) == ("/opt/conda/bin/python", "3.12")
    assert found.site == "opt/conda/lib/python3.12/site-packages"
    assert list(found.distributions) == ["torch-vision"]


@pytest.mark.parametrize("system", [False, True])
def test_a_virtual_environment(system):
    config = f"home = /usr/bin\ninclude-system-site-packages = {str(system).lower()}\n"
    environment = {
        "venv/bin/python": "/usr/bin/python3",
        "venv/pyvenv.cfg": config.encode(),
        **wheelhouse.installed("mine", "1.0", site="venv/lib/python3.11/site-packages"),
    }
    path = ["PATH=/venv/bin:/usr/bin"]
    found = inventory(*wheelhouse.base(), environment, environment=path)
    assert (found.python, found.version) == ("/venv/bin/python", "3.11")
    assert set(found.distributions) == {"mine"} | ({"numpy", "torch"} if system else set())
    last = "usr/lib/python3/dist-packages" if system else "venv/lib/python3.11/site-packages"
    assert found.site == last


def test_an_environment_with_a_copy_of_its_interpreter():
    environment = {
        "venv/bin/python": b"elf",
        "venv/pyvenv.cfg": b"version = 3.12.4\n",
        **wheelhouse.installed("mine", "1.0", site="venv/lib/python3.12/site-packages"),
    }
    found = inventory(*wheelhouse.base(), environment, environment=["PATH=/venv/bin"])
    assert (found.version, set(found.distributions)) == ("3.12", {"mine"})


def test_what_upper_layers_replace_and_take_away():
    changed = {
        f"{wheelhouse.SITE}/.wh.numpy-2.2.4.dist-info": b"",
        **wheelhouse.installed("numpy", "2.3.0"),
        f"{wheelhouse.SITE}/apt-1.0.egg-info": b"Metadata-Version: 1.0\nName: apt\nVersion: 1.0\n",
    }
    assert set(inventory(*wheelhouse.base(), changed).distributions) == {"numpy", "torch", "apt"}
    text = inventory(*wheelhouse.base(), changed).distributions["numpy"]
    assert "Version: 2.3.0" in text
    emptied = {f"{wheelhouse.SITE}/.wh..wh..opq": b"", **wheelhouse.installed("einops", "1")}
    assert set(inventory(*wheelhouse.base(), emptied).distributions) == {"einops"}


def test_vendored_packages_are_none_and_those_on_pythonpath_are():
    more = {
        **wheelhouse.installed("inner", "1", site=f"{wheelhouse.SITE}/pip/_vendor"),
        **wheelhouse.installed("extra", "1", site="opt/extra"),
    }
    found = inventory(*wheelhouse.base(more=more), environment=["PYTHONPATH=/opt/extra"])
    assert set(found.distributions) == {"numpy", "torch", "extra"}


def test_metadata_that_is_linked_to_another_name():
    """As in images of conda, whose packages lie in a cache and are linked hard from there."""
    system, packages = wheelhouse.base()
    buffer = io.BytesIO(tar_of({**packages, **wheelhouse.installed("pkg", "1", site="cache/x")}))
    with tarfile.open(fileobj=buffer, mode="a") as archive:
        member = tarfile.TarInfo(f"./{wheelhouse.SITE}/pkg-1.dist-info/METADATA")
        member.type, member.linkname = tarfile.LNKTYPE, "cache/x/pkg-1.dist-info/METADATA"
        archive.addfile(member)
    layers = [in_memory(tar_of(system)), in_memory(buffer.getvalue())]
    found = take_inventory(
        image(), [scan_layer(layer, "base", lambda _size: None) for layer in layers]
    )
    assert found.distributions["pkg"] == "Name: pkg\nVersion: 1"


def test_musl():
    system, packages = wheelhouse.base()
    del system["usr/lib/x86_64-linux-gnu/libc.so.6"]
    system["lib/ld-musl-x86_64.so.1"] = b"elf"
    assert inventory(system, packages).glibc is None


NO_PYTHON = r"reg.example/base:1 has no Python on its PATH, for which packages could be installed"
BROKEN = {
    "nothing": (lambda _: [{"etc/x": b""}], NO_PYTHON),
    "a circle": (
        lambda layers: [*layers, {"usr/bin/python": "python3", "usr/bin/python3": "python"}],
        NO_PYTHON,
    ),
    "no version": (
        lambda layers: [*layers, {"usr/bin/python": b"elf"}],
        r"the version of /usr/bin/python cannot be determined",
    ),
    "no packages": (
        lambda layers: [*layers, {"usr/lib/.wh.python3": b""}],
        r"/usr/bin/python has no folder for packages \(looked for: usr/local/lib/python3.11/",
    ),
    "no libc": (
        lambda layers: [*layers, {"usr/lib/.wh.x86_64-linux-gnu": b""}],
        r"there are no packages for its C library",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_base_that_cannot_be_understood(what):
    change, message = BROKEN[what]
    with pytest.raises(ImageError, match=message):
        inventory(*change(wheelhouse.base()))


FORMS = {
    "as it is": lambda data: data,
    "gzip": gzip.compress,
    "gzip in two parts": lambda data: gzip.compress(data[:999]) + gzip.compress(data[999:]),
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_read_in_any_form_once(form):
    data = FORMS[form](tar_of(wheelhouse.base()[0]))
    first = scan_layer(in_memory(data), "base", lambda _size: None)
    assert first.links["usr/bin/python3"] == "python3.11"

    seen = []
    gone = SimpleNamespace(digest=in_memory(data).digest, size=len(data))
    again = scan_layer(gone, "base", seen.append)
    assert (again, seen) == (first, [len(data)])


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    data = tar_of({"usr/bin/python3.11": b""})
    found = scan_layer(in_memory(data), "base", lambda _size: None)
    assert found.marks == {"usr/bin/python3.11": ""}


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(tar_of({"a": b"x" * 2000}))[:-30],
        b"\x1f\x8b" + b"nonsense" * 99,
        b"nonsense" * 999,
        ZSTD_MAGIC + b"nonsense" * 99,
        b"",
    ],
    ids=["cut short", "only begins as gzip", "nonsense", "only begins as zstd", "empty"],
)
def test_a_layer_that_is_no_archive(data, cache):
    with pytest.raises(ImageError, match=r"base, layer sha256:\w{12}: not an archive \(.+\); the"):
        scan_layer(in_memory(data), "base", lambda _size: None)
    assert not list(cache.iterdir())


def sparse(kind):
    """The header of a file that would be a gigabyte, by the map of its parts."""
    info = tarfile.TarInfo("libc.so.6")
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    raw[156:157] = kind
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def hard_link(name):
    info = tarfile.TarInfo(f"{name}.dist-info/METADATA")
    info.type, info.linkname = tarfile.LNKTYPE, "p.dist-info/METADATA"
    return info.tobuf()


def test_a_library_of_one_long_line_takes_no_longer_than_it_is_long(cache):
    data = b"GNU C Library " * 60_000
    layer = tar_of({"usr/lib/libc.so.6": data})
    assert scan_layer(in_memory(layer), "base", lambda _size: None).marks == {}


def pax(records, kind=tarfile.XHDTYPE, name="PaxHeader"):
    """A member of that content, such as an extended header."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(records)
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % tarfile.BLOCKSIZE)


@pytest.mark.parametrize(
    "data",
    [
        pax(b"1" * (2 << 20)),
        pax(b"1" * (2 << 20), tarfile.XGLTYPE),
        pax(b"x" * (2 << 20), tarfile.GNUTYPE_LONGNAME),
        pax(b"9 a=bcde\n") * 2000,
        b"".join(pax(b"114 key%04d=%s\n" % (n, b"x" * 101), tarfile.XGLTYPE) for n in range(1500)),
        tar_of({f"p{n}.dist-info/METADATA": f"Name: {'x' * 9999}" for n in range(9)}),
        tar_of({f"{'x' * 9999}{n}/site-packages/a": "" for n in range(9)}),
        pax(b"Name: " + b"x" * 30_000, tarfile.REGTYPE, "p.dist-info/METADATA")
        + b"".join(map(hard_link, "ab")),
        sparse(tarfile.GNUTYPE_SPARSE),
        pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + sparse(tarfile.REGTYPE),
        pax(b"25 GNU.sparse.map=0,1,9,1\n") + sparse(tarfile.REGTYPE),
        pax(b"22 GNU.sparse.size=99\n") + sparse(tarfile.REGTYPE),
    ],
    ids=[
        *("pax", "global pax", "long name", "headers of headers", "global keys", "many METADATA"),
        *("folders of packages", "hard links", "sparse", "sparse 1.0", "sparse 0.1", "sparse 0.0"),
    ],
)
def test_a_layer_that_would_fill_the_memory(data, cache, monkeypatch):
    monkeypatch.setattr("k8sjob.image.inventory._MAX_KEPT_OF_ONE", 50_000)
    compressed = gzip.compress(data + tar_of({"a": ""}), 1)
    with pytest.raises(ImageError, match="not an archive"):
        scan_layer(in_memory(compressed), "base", lambda _size: None)
    assert not list(cache.iterdir())


def test_layers_that_would_fill_the_memory_together(monkeypatch):
    monkeypatch.setattr("k8sjob.image.inventory._MAX_KEPT", 250)
    keep_value(f"layer-{DIGEST.replace(':', '-')}.json", DIGEST, {"marks": {"a": "x" * 99}})
    layers = (Descriptor(DIGEST, 1),) * 3
    reference = ImageReference.parse("reg.example/base:1")
    base = BaseImage(reference, Manifest(DIGEST, "", {}, Descriptor(DIGEST, 1), layers), {})
    repository = Repository(RegistryClient(HttpClient(), "reg", "reg", lambda: None), reference)
    with pytest.raises(ImageError, match=r"base:1: its 3 layers have more names and metadata"):
        read_inventory(base, repository, lambda _read, _total: None)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "-e", "a b", "a/b"])
def test_a_name_that_no_distribution_has(name):
    below = wheelhouse.base()
    site = next(path for layer in below for path in layer if path.endswith(".dist-info/METADATA"))
    folder = site.rpartition("/")[0].rpartition("/")[0]
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    found = inventory(*below, {f"{folder}/evil-1.0.dist-info/METADATA": text})
    assert found.distributions == inventory(*below).distributions
