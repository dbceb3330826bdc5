"""How batches of messages travel between the replicas of the Serve deployments.

A link (``link``) joins two replicas: a worker or an ingress dials, a router answers. Frames of data (``wire``) travel
over Serve's streams (``streams``).
"""
