"""Recording of a training for `k8sjob prove`: what each process computes, step by step."""
