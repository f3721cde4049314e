"""The memory of a rank for `k8sjob fit`: the estimate, and `metering`, which runs in a rank."""
