"""Do the scripts of `slurm/` work under a real Slurm? A cluster of four nodes on this machine (`daemons.py`) runs them."""
