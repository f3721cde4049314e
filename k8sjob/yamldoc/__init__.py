"""YAML documents: read with the place of every field, written so that every reader agrees."""

from k8sjob.contract import JOB_FILE
from k8sjob.yamldoc.reading import (
    Document,
    WrittenFloat,
    content,
    job_file,
    objects,
    only,
    parse,
    parse_all,
    refuse_template,
)
from k8sjob.yamldoc.writing import dump, flow, scalar

__all__ = [
    "JOB_FILE",
    "Document",
    "WrittenFloat",
    "content",
    "dump",
    "flow",
    "job_file",
    "objects",
    "only",
    "parse",
    "parse_all",
    "refuse_template",
    "scalar",
]
