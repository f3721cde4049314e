"""The JSON Schema of a job.yaml, for editors, for other tools, and for the reference."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from k8sjob.spec.job import JobSpec

__all__ = ["schema"]


class _Schema(GenerateJsonSchema):
    """Without titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's hook
        return False


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job.yaml.

    Every property has `description` and `examples`, and `unit` where it counts or measures.
    """
    made = JobSpec.model_json_schema(mode="validation", schema_generator=_Schema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": "k8sjob job.yaml"}
