"""Checks of the nodes of a job and of the network between them, before the job starts."""
