"""Running a job where its plan says: on this machine, on Slurm or on Kubernetes."""
