"""This machine: workers started, followed, stopped, and started again with a smaller plan."""
