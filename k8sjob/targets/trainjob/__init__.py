"""TrainJob of Kubeflow Trainer 2, with a TrainingRuntime of its own."""
