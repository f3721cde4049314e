"""The errors that k8sjob raises on purpose.

    K8sJobError
    ├── SpecError            a job.yaml or a manifest that cannot be accepted
    ├── RenderError          a template that does not fit the spec
    ├── ImageError           building, packing or pushing an image
    ├── BackendError         a back end refused or could not be reached
    │   ├── JobNotFound
    │   ├── JobExists
    │   └── StorageError     records in a bucket cannot be read or written
    └── JobFailed            the job ended, and not well

A message says what is wrong, where, the value seen, and the next step. The command line prints it
and exits with `exit_code`; a traceback is always a bug.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.findings import Finding

_INNER = f"{re.escape(__file__.removesuffix('errors.py'))}|.*/pydantic/"
_SECRETS: Final = r"""(?xis)
    (?P<url>://|(?<![:\w])//)(?!git@)[^\s/?\#"'<>]+@   # user information of a URL
    | (?P<hook>hooks\.slack\.com/services/)[\w/]+
    | (?P<flag>--(?:[a-z]+-){0,3}(?:token|password|passwd|secret|key)[ ]++)(?!id=)[^\s"]+
    | (?P<name>
        (?:token|password|passwd|passphrase|pwd|secret|credentials?|signature|authorization|cookie
          |(?:api|access|private|secret|account|client|shared)[._-]?key(?:[._-]data)?
          |(?<![a-z])(?:auth|pass|sig)|[?&]key)
        \\*+["']?+\s*+
      )
      (?![=:]\s*+(?:(?:none|null|true|false)\b|""|''))   # no value, so nothing to hide
      (?:
        (?P<set>                                      # NAME=value, name:value, JSON
          (?:=|%3d)\s*+(?:(?:bearer|basic|digest|negotiate|token)\s++)?+
          | :(?![\s/]) | :\s*+(?=\\*["'\[]|b["']|[|>]))
        (?P<open>(?:[|>][-+]?\s++|\[\s*+|b(?=["']))?+)
        (?: (?P<escaped>\\++["'])[^"'\\]*+
          | (?P<quote>["'])(?:(?!(?P=quote))[^\\]|\\.)*+
          | [^\s"&]++ )
        | (?P<colon>:\s++)                            # YAML and headers
          (?!(?-i:[a-z]+,?[ ][a-z]))                  # words: "/run/token: permission denied"
          (?!(?<=secret:[ ])(?<![\w-]secret:[ ])     # a Secret's name, as in env_from
             (?-i:[a-z][a-z.-]*\d{0,3})(?![\w.-]))
          (?:(?:bearer|basic|digest|negotiate|token)\s++[^\s"]++|[^\s"&]{6,})
      )
    | (?P<quoted>["'](?:bearer|basic|digest|negotiate)\s+)[^"']*
    | (?P<scheme>\b(?:bearer|basic|negotiate)\s+)[\w.~+/=-]{8,}
    | -----BEGIN\ [A-Z ]{0,20}PRIVATE\ KEY-----.*?(?:-----END[^\n-]*-----|\Z)
    | \beyJ[\w-]{8,}(?:\.[\w-]+)*             # a JSON web token
    | \b(?:gh[oprsu]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|dckr_pat_|pypi-AgE|AKIA)[\w-]{12,}
    """
"""What credentials look like. Every part begins with a literal, so that long texts cost little.
Compiled when it is first needed: this takes 3 ms, which most commands save."""


class K8sJobError(Exception):
    """Base of all errors of k8sjob.

    Attributes:
        exit_code: what a command with this error exits with.
        message: what is wrong; of a SpecError with the next steps, a line for each finding.
        next_step: what to do now; may be empty.
    """

    exit_code: int = 1

    def __init__(self, message: str = "", next_step: str = "") -> None:
        self.message, self.next_step = message, next_step
        super().__init__(f"{message}; {next_step}" if next_step else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, since the arguments of most errors are not those of Exception."""
        return type(self).__new__, (type(self), *self.args), vars(self)

    def _render_traceback_(self) -> list[str]:
        """The traceback for IPython: the line of the user's own code, and the message."""
        import traceback  # noqa: PLC0415 - only needed here

        frames = traceback.extract_tb(self.__traceback__)
        # Frames of k8sjob and of pydantic say nothing about the cell that is to be corrected.
        user_frames = [frame for frame in frames if not re.match(_INNER, frame.filename)]
        where = "".join(traceback.format_list(user_frames[-1:])).rstrip()
        return [where, f"{type(self).__name__}: {self}"]


def redacted(text: str) -> str:
    """A text from somewhere else without what looks like a password, a token or a key."""
    return re.sub(_SECRETS, _hidden, text)


def _hidden(match: re.Match[str]) -> str:
    parts = match.groupdict(default="")
    end = "@" if parts["url"] else ""
    return "".join(parts.values()) + "[hidden]" + end


def install_step(extra: str) -> str:
    """The command that installs an extra, from the folder that k8sjob was installed from if any."""
    import json  # noqa: PLC0415 - only needed here
    import shlex  # noqa: PLC0415 - the same
    from importlib import metadata  # noqa: PLC0415 - the same
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415 - the same

    origin = json.loads(metadata.distribution("k8sjob").read_text("direct_url.json") or "{}")
    source = unquote(urlsplit(origin["url"]).path) if "dir_info" in origin else "k8sjob"
    # Without -e an installation that follows its checkout would be replaced by a copy.
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"


class SpecError(K8sJobError):
    """A document that cannot be accepted.

    Attributes:
        findings: everything wrong with it, in the order of the document.
        source: the file's name, "<stdin>", or empty for a spec made in Python.
    """

    def __init__(self, findings: list[Finding], source: str = "") -> None:
        self.findings = findings
        self.source = source
        super().__init__("\n".join(map(self._line, findings)))

    def _line(self, finding: Finding) -> str:
        numbers = [str(n) for n in (finding.line, finding.column) if n]
        place = ":".join([self.source or "line", *numbers]) if numbers else self.source
        return ": ".join(part for part in (place, finding.field, finding.text) if part)


class RenderError(K8sJobError):
    """A spec that is valid and cannot be rendered all the same."""


class ImageError(K8sJobError):
    """An image could not be built, packed or pushed."""


class BackendError(K8sJobError):
    """A back end refused a request or could not be reached."""


class JobTooLarge(BackendError):  # noqa: N818 - as JobNotFound
    """A job has more replicas than any that is read."""


class JobNotFound(BackendError):  # noqa: N818 - a state of affairs, as FileNotFoundError's cousin
    """No job of that name where it was looked for."""

    exit_code = 102


class StorageError(BackendError):
    """Records in a bucket cannot be read or written."""


class JobExists(BackendError):  # noqa: N818 - see JobNotFound
    """A job of that name already exists and is not the one to be created.

    Attributes:
        difference: lines of a unified diff from that one to this, where they were compared.
        replaceable: whether a submission may replace that one.
    """

    difference: Sequence[str] = ()
    replaceable: bool = True


class JobFailed(K8sJobError):  # noqa: N818 - what `run()` raises when asked to check the outcome
    """The job ended, and not well.

    Attributes:
        exit_code: 100 failed, 103 deleted or suspended.
        result: the k8sjob.jobs.result.RunResult, with the causes in `why`, and with `logs`; None of
            a job that was deleted.
    """

    exit_code = 100
    result: Any = None
