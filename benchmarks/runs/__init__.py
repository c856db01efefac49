"""What is measured? Open `measure` first: the turns that all ways of a cell take. `environments` starts their jobs."""
