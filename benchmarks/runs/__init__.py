"""What is measured? Open `measure` first: the turns that all ways of a cell take. `environments` starts their jobs.

`copies` and `calls` are programs of their own, to look into one question.
"""
