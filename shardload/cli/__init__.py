"""What does a person type in a shell? The commands, and what they print.

Open `main` first: it declares them all. `arguments` reads what several of them take; `verify`, `demo` and `doctor` are commands
too long to stand beside the others.
"""
