"""The job spec: one typed, frozen description of a training job.

from k8sjob.spec import JobSpec, load

spec = load("job.yaml")
spec = JobSpec(name="digits", image="registry/digits:1", run={"script": "main.py"})
"""

from k8sjob.spec.base import Part
from k8sjob.spec.image import Image
from k8sjob.spec.job import JobSpec
from k8sjob.spec.load import load
from k8sjob.spec.policy import Gang, Policy
from k8sjob.spec.replicas import Elastic, Replicas
from k8sjob.spec.resources import MasterResources, Requests, Resources
from k8sjob.spec.run import EnvFrom, Run
from k8sjob.spec.schema import schema
from k8sjob.spec.training import Checkpoint, Strategy
from k8sjob.spec.volumes import EmptyDir, Volume

__all__ = [
    "Checkpoint",
    "Elastic",
    "EmptyDir",
    "EnvFrom",
    "Gang",
    "Image",
    "JobSpec",
    "MasterResources",
    "Part",
    "Policy",
    "Replicas",
    "Requests",
    "Resources",
    "Run",
    "Strategy",
    "Volume",
    "load",
    "schema",
]
