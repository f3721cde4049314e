"""Training under observation, for `k8sjob prove`: what each process computes, step by step."""
