"""Other engines on the same pair; each runs in a process of its own, with its own Python where it needs one."""
