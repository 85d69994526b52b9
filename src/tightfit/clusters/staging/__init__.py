"""Copies of a model's files on the RAM disks or local disks of many nodes."""

from __future__ import annotations

from enum import Enum


class CopyMethod(str, Enum):
    """Which nodes read the shared file system, and which get the model from a neighbour."""

    ALL_READ = "all-read"
    TREE = "tree"
    CHAIN = "chain"
