"""What a person sees of a job: a live screen, plain lines or JSON lines, all from the same events.

    safe     text of a job or a cluster, made harmless for a terminal
    story    the events so far, added up
    lines    one event as one line
    live     the screen of a terminal
    region   its last lines, replaced in place
    board    many jobs: a table, or a line a change
    plain    lines for a pipe, JSON for a program
    plot     a curve as a few lines of text
    summary  what is left to say when the job is over
    feed     events from a blocking source, in batches, while Ctrl-C stays in our hands
    follow   a job from its beginning until it ends or its reader leaves

Nothing is imported here: the command line asks for `safe` alone when it prints an error.
"""
