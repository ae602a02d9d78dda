"""Manifests for Kubernetes: what it is to start, as objects that become YAML.

request  what the job is to be, checked against Kubernetes's rules for names and quantities
names    the names of pods, and the cluster that they make
pods     a pod: its container, resources, volumes, and what it may not do
objects  an Indexed Job, a JobSet or a TFJob, with service and network policy
"""

from toolkit.launch.backends.kubernetes.objects import manifest
from toolkit.launch.backends.kubernetes.request import KINDS, Request, Volume

__all__ = ["KINDS", "Request", "Volume", "manifest"]
