"""What can be configured? Every key, and how files, environment and flags are read."""
