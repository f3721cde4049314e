"""The back end of a cluster: jobs are PyTorchJobs there, kept by the training operator."""
