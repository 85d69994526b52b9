"""A plan as Kubernetes objects, and what becomes of them in a cluster."""
