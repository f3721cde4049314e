"""A rank whose output goes to the files that its first two arguments name."""

import os
import sys

import torch

from k8sjob.runtime.agent import fork_server, rank_main

torch.cuda.is_available = lambda: False  # the look of Keras at GPUs would forbid forks
out, err, *program = fork_server.process_arguments(sys.argv[1:])
for stream, file in ((1, out), (2, err)):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
rank_main.main(program)
