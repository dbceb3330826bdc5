"""How do kernels run on a GPU? As Triton sources; modules here are imported where Triton is, and nowhere else."""
