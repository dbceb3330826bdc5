"""How batches of messages travel between the replicas of the Serve deployments.

A link (``link``) joins two replicas: a worker or an ingress dials, a router answers. Frames of data (``wire``) travel
through one of two carriers: a Unix socket on one Ray node (``sockets``), Serve's streams elsewhere (``streams``).
"""
