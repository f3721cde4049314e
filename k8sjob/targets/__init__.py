"""The kinds of jobs that a spec can become in a cluster, behind one Protocol."""
