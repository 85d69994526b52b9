"""Agents: processes on nodes that are asked by lines of JSON over their pipes."""
