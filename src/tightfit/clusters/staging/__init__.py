"""Copies of a model's files on the RAM disks or local disks of many nodes."""
