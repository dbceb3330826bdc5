"""Request bodies, one file per endpoint."""
