"""Views of jobs: a live screen, plain lines or JSON lines, all from the same events.

    sanitize text and numbers of a job or a cluster, made harmless for a terminal
    summary  the state of a job, from its events so far
    lines    one event as one line
    repeats  errors that replicas have in common, shown once
    live     the screen of a terminal
    board    many jobs: a table, or a line a change
    report   what is printed when the job is over
    views    lines for a pipe, JSON for a program, and the choice of a view
    follow   a job from its beginning until it ends or its reader detaches
    run      the public `k8sjob.run`: a job on this machine, shown until it ends

Nothing is imported here: the command line asks for `sanitize` alone when it prints an error.
"""
