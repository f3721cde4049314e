"""The preflight: what each node proves before the user's program starts, in processes apart."""
