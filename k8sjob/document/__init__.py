"""YAML documents: read with the place of every field, written so that every reader agrees."""

from k8sjob.document.reading import Document, WrittenFloat, parse, parse_all
from k8sjob.document.source import content
from k8sjob.document.writing import dump, flow, scalar

__all__ = ["Document", "WrittenFloat", "content", "dump", "flow", "parse", "parse_all", "scalar"]
