"""Before a job of several nodes: is the way between them as the job needs it?"""
