"""What the examples' trainings come to, on this machine as in pods: a metric, and its limit."""

LEARNT = {
    "transformer-fsdp": ("test_loss", 2.95),
    "torch-mesh": ("test_loss", 0.35),
    "pipeline": ("test_loss", 0.5),
    "parameter-server": ("test_loss", 0.9),
    "model-split": ("test_loss", 0.5),
    "accumulate": ("test_loss", 0.6),
    "sync-batchnorm": ("test_loss", 0.5),
    "data-parallel": ("test_loss", 0.5),
}
