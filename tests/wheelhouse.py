"""Wheels and bases with a Python for tests, made here: no index is asked for anything."""

import io
import shutil
import subprocess
import zipfile
from pathlib import Path

LIBC = b"\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\n\0"
SITE = "usr/lib/python3/dist-packages"
PURE = "py3-none-any"


def wheel(folder, name, version, *, requires=(), files=None, tag=PURE, **more):
    """Writes a wheel; `more` are further files of its dist-info, by name without a suffix."""
    stem = f"{name}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    contents = {f"{name}/__init__.py": f"version = {version!r}\n", **(files or {})}
    contents |= {
        f"{stem}.dist-info/METADATA": "\n".join([*lines, "", "What it is.", ""]),
        f"{stem}.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
        **{f"{stem}.dist-info/{key}.txt": text for key, text in more.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for key, text in contents.items():
            archive.writestr(key, text)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def alone(links, folder, monkeypatch):
    """uv finds the wheels of one folder, and nothing else: no index, no network."""
    settings = folder / "uv-settings.toml"
    settings.write_text(f'[pip]\nno-index = true\nfind-links = ["{links}"]\n')
    monkeypatch.setenv("UV_CONFIG_FILE", str(settings))
    monkeypatch.setenv("UV_OFFLINE", "1")


def installed(name, version, *lines, site=SITE):
    """A distribution as it lies in a base."""
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    return {
        f"{site}/{name}-{version}.dist-info/METADATA": f"{text}\n\nName: no header\n".encode(),
        f"{site}/{name}/__init__.py": f"version = {version!r}\n".encode(),
    }


def base(version="3.11", more=None):
    """The layers of a base as Debian's: an interpreter, links to it, the C library, packages."""
    system = {
        "bin": "usr/bin",
        "usr/bin/python3": f"python{version}",
        f"usr/bin/python{version}": b"\x7fELF",
        "usr/lib/x86_64-linux-gnu/libc.so.6": LIBC,
    }
    packages = {
        "usr/bin/python": "python3",
        **installed("numpy", "2.2.4"),
        **installed("torch", "2.6.0+cpu"),
    }
    return (system, {**packages, **(more or {})})


def running():
    """As `base`, with this machine's own interpreter, that runs in a chroot; None: it has none."""
    program = shutil.which("python3", path="/usr/bin")
    if program is None or shutil.which("ldd") is None:
        return None
    real = Path(program).resolve()
    linked = subprocess.run(["ldd", real], check=True, capture_output=True, text=True).stdout
    libraries = {word for word in linked.split() if word.startswith("/")}
    version = real.name.removeprefix("python")
    stdlib = Path(f"/usr/lib/python{version}")
    system = {
        **{path.lstrip("/"): Path(path).read_bytes() for path in libraries},
        f"usr/bin/{real.name}": real.read_bytes(),
        "usr/bin/python3": real.name,
        f"usr/lib/python{version.replace('.', '')}.zip": _zipped(stdlib),
        f"usr/lib/python{version}/os.py": (stdlib / "os.py").read_bytes(),
    }
    return system, base()[1]


def _zipped(stdlib):
    """As much of the standard library as starts Python."""
    archived = io.BytesIO()
    packages = ("", "encodings", "importlib", "collections", "re", "json")
    with zipfile.ZipFile(archived, "w") as archive:
        for package in packages:
            for path in sorted((stdlib / package).glob("*.py")):
                archive.write(path, path.relative_to(stdlib))
    return archived.getvalue()
