"""The proof of `k8sjob prove`; `recording` runs in the ranks and imports nothing else of it."""
