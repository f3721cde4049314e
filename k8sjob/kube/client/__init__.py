"""Clients of an apiserver: kubeconfig, transports, list and watch, explained errors."""
