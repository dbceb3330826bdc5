"""Who owns which memory? Blocks of keys and values, prefixes, sequences, recurrent states."""
