"""How batches of messages travel between the replicas of the Serve deployments; nothing here knows what they mean."""
