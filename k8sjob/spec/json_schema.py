"""The JSON Schema of a job.yaml: completion, documentation and checks in editors.

It checks types and ranges; rules about several fields are in the spec alone.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from k8sjob.spec.job import JobSpec
from k8sjob.spec.values import format_duration


class _Schema(GenerateJsonSchema):
    """Without titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's hook
        return False

    def encode_default(self, dft: Any) -> Any:
        # pydantic looks at the exact type, and a frozen mapping is a dict of our own.
        return super().encode_default(dict(dft) if isinstance(dft, dict) else dft)

    def sort(self, value: Any, parent_key: str | None = None) -> Any:  # noqa: ARG002 - see above
        return value  # the order of the fields, and of the keys in their examples, is meant


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job.yaml.

    Every property has `description` and `examples`, and `unit` where it counts or measures.
    """
    document = JobSpec.model_json_schema(schema_generator=_Schema)
    for part in (document, *document["$defs"].values()):
        part["description"] = part["description"].partition("\n\nArgs:\n")[0]
        for each in part["properties"].values():
            if each.get("unit") == "time" and each.get("default") is not None:
                each["default"] = format_duration(each["default"])
    return {"$schema": GenerateJsonSchema.schema_dialect, **document, "title": "k8sjob job.yaml"}
