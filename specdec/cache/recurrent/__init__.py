"""How does a recurrent layer roll back? States, their rings of inputs, and snapshots."""
