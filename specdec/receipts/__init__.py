"""How an answer is proved: receipts, their signatures, and what tests a receipt against the model it names."""
