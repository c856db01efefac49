"""What do the records say? `tables` in Markdown, and `plot`, one picture of all cells."""
