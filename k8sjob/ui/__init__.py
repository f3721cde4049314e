"""The page of `k8sjob ui`: a server on the loopback interface, and the files that it serves."""
