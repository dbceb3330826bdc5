"""The messages and the state machines of ingress, router, target and drafter."""
