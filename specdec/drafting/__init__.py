"""Who proposes tokens? A folder or file per method."""
