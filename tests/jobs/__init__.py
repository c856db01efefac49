"""Tests that start MPI jobs of their own (plain ``pytest`` only), and `launch`, which starts them."""
