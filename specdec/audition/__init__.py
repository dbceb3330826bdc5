"""What a draft would have earned on recorded answers, and whether a target says them again."""
