"""Manifests for Kubernetes: what it is to start, as objects that become YAML.

spec     what the job is to be, checked against Kubernetes's rules for names and quantities
pods     a pod: its container, resources, volumes, what it may not do, and the cluster that pods make
objects  an Indexed Job, a JobSet or a TFJob, with service and network policy
"""

from toolkit.launch.backends.kubernetes.objects import manifest
from toolkit.launch.backends.kubernetes.spec import KINDS, ManifestSpec, Volume

__all__ = ["KINDS", "ManifestSpec", "Volume", "manifest"]
