"""The job spec: one typed, frozen description of a training job.

from k8sjob.spec import JobSpec, load

spec = load("job.yaml")
spec = JobSpec(name="digits", image="registry/digits:1", run={"script": "main.py"})
"""

from k8sjob.spec.base import Part
from k8sjob.spec.image import Image
from k8sjob.spec.job import JobSpec
from k8sjob.spec.json_schema import schema
from k8sjob.spec.load import load
from k8sjob.spec.replicas import (
    Elastic,
    EmptyDir,
    Gang,
    MasterResources,
    Policy,
    Replicas,
    Requests,
    Resources,
    Runtime,
    Volume,
)
from k8sjob.spec.run import EnvFrom, Run
from k8sjob.spec.training import Checkpoint, MLflow, Strategy, TensorBoard, Tracking, Trackio, WandB

__all__ = [
    "Checkpoint",
    "Elastic",
    "EmptyDir",
    "EnvFrom",
    "Gang",
    "Image",
    "JobSpec",
    "MLflow",
    "MasterResources",
    "Part",
    "Policy",
    "Replicas",
    "Requests",
    "Resources",
    "Run",
    "Runtime",
    "Strategy",
    "TensorBoard",
    "Tracking",
    "Trackio",
    "Volume",
    "WandB",
    "load",
    "schema",
]
