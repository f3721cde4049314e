"""The steps from a spec to a job: planned, then submitted to a cluster or run here.

The library and the command line both compose their work here; nothing here prints.

plan    what is about to be created, in a cluster or on this machine
run     runs it on this machine to its end
submit  creates it in a cluster, or attaches to the same job
suspend suspends and resumes it
result  how it ended, and what it reached
"""
