"""A model's files in the RAM disks or local disks of many nodes, by the fastest way."""
