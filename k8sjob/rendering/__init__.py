"""A job spec as what others run: a manifest, a Dockerfile, the environment of a replica.

All of it is pure, except `write_context`, which writes the folder that an image is built from.
"""

from k8sjob.rendering.dockerfile import check_script, dockerfile, write_context
from k8sjob.rendering.dockerignore import dockerignore
from k8sjob.rendering.manifest import (
    container_argv,
    container_env,
    manifest,
    remarks,
    render,
    replica_env,
)
from k8sjob.rendering.template import templates_dir

__all__ = [
    "check_script",
    "container_argv",
    "container_env",
    "dockerfile",
    "dockerignore",
    "manifest",
    "remarks",
    "render",
    "replica_env",
    "templates_dir",
    "write_context",
]
