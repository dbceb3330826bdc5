"""What is a request, a log, a draft, a message? Words that every other package uses. No torch."""
