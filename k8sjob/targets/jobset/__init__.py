"""JobSet (jobset.x-k8s.io/v1alpha2) as a target."""
