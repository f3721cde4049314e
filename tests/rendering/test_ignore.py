""".dockerignore, by docker's documented examples and its parser's own rules."""

import os

import pytest

from k8sjob.errors import ImageError
from k8sjob.rendering.dockerignore import Ignore, dockerignore, own_patterns, private_patterns
from k8sjob.targets import MANIFEST_FILES
from k8sjob.targets.jobs import TARGETS


@pytest.mark.parametrize(
    ("patterns", "ignored", "kept"),
    [
        ("", [], ["a", "a/b"]),
        ("# comment\n\n  \n", [], ["# comment", "a"]),
        ("a", ["a", "a/b", "a/b/c"], ["b/a", "ab"]),
        ("/a", ["a"], ["b/a"]),
        ("a/", ["a", "a/b"], ["b"]),
        ("./a", ["a"], ["b"]),
        ("*/temp*", ["x/temporary.txt", "x/temp"], ["temp", "x/y/temp"]),
        ("*/*/temp*", ["x/y/temporary"], ["x/temp"]),
        ("temp?", ["tempa", "tempb"], ["temp", "temp/a", "tempab"]),
        ("**/*.go", ["a.go", "x/y/a.go"], ["a.goo", "ago"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ab"]),
        ("a/**/b", ["a/b", "a/x/y/b"], ["ab", "x/a/b"]),
        ("**/a/**/b/**/c", ["a/b/c", "x/a/y/b/z/c"], ["a/c", "b/a/c"]),
        ("a**b**c", ["abc", "ax/b/c"], ["ab"]),
        ("*a*b*", ["ab", "xaybz"], ["ba", "x/ab"]),
        ("*.md\n!README.md", ["a.md"], ["README.md", "x/a.md"]),
        ("*.md\n!README*.md\nREADME-secret.md", ["README-secret.md", "a.md"], ["README.md"]),
        ("!a\na", ["a"], []),
        ("a\n!a/b", ["a/c"], ["a/b", "a/b/c"]),
        ("[ab].txt", ["a.txt", "b.txt"], ["c.txt"]),
        ("[^a].txt", ["b.txt"], ["a.txt"]),
        ("a.b", ["a.b"], ["aXb"]),
        ("[]a]b", ["]b", "ab"], ["b"]),
        (r"[\]x-z]", ["]", "y"], ["a"]),
        ("[[&]", ["[", "&"], ["a"]),
        (r"\*", ["*"], ["a"]),
        ("a+b(c)$", ["a+b(c)$"], ["aab"]),
        ("*", ["a", ".k8sjob"], []),
        ("\ufeffa", ["a"], ["b"]),
    ],
)
def test_patterns(patterns, ignored, kept):
    ignore = Ignore(patterns)
    assert [path for path in ignored if not ignore(path)] == []
    assert [path for path in kept if ignore(path)] == []


@pytest.mark.parametrize("pattern", ["[a", "[*]", "[a?]", "a[b/c]", "[]", "[z-a]"])
def test_a_pattern_that_is_none(pattern):
    with pytest.raises(ImageError, match=r"\.dockerignore:2: '[^']{1,80}' is not a pattern"):
        Ignore(f"a\n{pattern}\n")


def test_our_own_leaves_out_secrets_and_keeps_code():
    ignore = Ignore(dockerignore())
    for path in [".env", "x/.env.local", ".ssh/id_rsa", "k/tls.key", ".git/HEAD", "__pycache__/x"]:
        assert ignore(path), path
    for path in ["main.py", "data/x.csv", ".k8sjob/k8sjob/__init__.py", "a.txt", "environment.py"]:
        assert not ignore(path), path


def test_walking_a_folder(tmp_path):
    for name in ("b/c.txt", "a.txt", "skip/x.txt", "skip/keep.txt", "b/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "empty").mkdir()
    found = list(Ignore("skip\n!skip/keep.txt\n").walk(tmp_path))
    assert found == ["a.txt", "link", "b/.hidden", "b/c.txt", "skip/keep.txt"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"\xff\xfe*.py"), "not UTF-8"),
        (lambda path: path.mkdir(), "not a file"),
        (os.mkfifo, "not a file"),
        (lambda path: path.symlink_to("/etc/hosts"), "a link that leads out of its folder"),
    ],
    ids=["not UTF-8", "folder", "FIFO", "link"],
)
def test_a_file_of_patterns_that_cannot_be_read(tmp_path, make, reason):
    path = tmp_path / ".dockerignore"
    make(path)
    with pytest.raises(ImageError, match=rf"dockerignore: cannot be read: {reason}; repair it"):
        own_patterns(path)


def test_credentials_stay_out_whatever_the_templates_comments_are(monkeypatch):
    template = dockerignore().replace("# Files", "# Those")
    monkeypatch.setitem(private_patterns.__globals__, "_template", lambda: template)
    assert {"**/.git", "**/.env", "**/id_rsa*"} <= {*private_patterns().splitlines()}


def test_a_deep_folder_is_walked(tmp_path):
    deep = tmp_path / "/".join(["d"] * 900)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (found,) = Ignore("**/x/**/y/**/z\n").walk(tmp_path)
    assert found == "d/" * 900 + "file"


def test_the_manifests_of_all_kinds_are_left_out():
    assert tuple(target.file for target in TARGETS) == MANIFEST_FILES
