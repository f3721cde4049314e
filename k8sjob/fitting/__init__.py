"""The memory of a rank for `k8sjob fit`: the estimate, and the meter, which runs in a rank."""
