"""A registry: HTTP client, logins, blobs, manifests."""
