"""Views of jobs: a live screen, plain lines or JSON lines, all from the same events.

    summary       the state of a job, from its events so far
    lines         one event as one line, of a job or of many
    filters       each error once, one line per epoch
    live          the screen of a terminal
    json_output   the JSON of `-o json`, and the progress of running jobs
    exporter      jobs as metrics
    final_report  what is printed when the job is over
    views         lines for a pipe, JSON for a program, cards for a notebook, and their choice
    follow        a job from its beginning until it ends or its reader detaches

Nothing is imported here: the command line starts with little.
"""
