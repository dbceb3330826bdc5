"""The Ray Serve deployments; they delegate, and hold no algorithm."""
