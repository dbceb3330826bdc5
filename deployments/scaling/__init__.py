"""When are replicas added and removed?"""
