"""Kubernetes itself: views of objects, resources that jobs name, capacity of nodes."""
