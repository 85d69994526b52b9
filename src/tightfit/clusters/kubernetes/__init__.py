"""Kubernetes: a plan as objects, applied to a cluster and followed there."""
