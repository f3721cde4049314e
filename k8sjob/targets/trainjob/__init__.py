"""TrainJobs, of Kubeflow Trainer 2.3."""
