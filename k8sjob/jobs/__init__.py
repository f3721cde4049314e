"""Jobs from their spec on: planned, then submitted to a cluster or run on this machine.

The library and the command line both compose their work here; nothing here prints.

plan    what is about to be created
submit  creates it in a cluster, or attaches to the same job
run     starts it on this machine, stops it, and returns its result
"""
