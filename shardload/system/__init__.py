"""What does this machine offer a process?

thread_pool   daemon threads for calls that may block
memory_limit  how much memory this process may use
terminal      the width of the terminal, and tables and messages that fit it
gpus          the GPUs of the node, and those that this process may use
garbage       collections of garbage wait while many objects are made
scratch       memory of a thread for temporary values, which its next task uses again
steps         does a call move on while one thread works alone?
undo          what was begun is undone if it cannot be ended
caller        where in the user's own code this package was called
interruption  an error is kept until the ranks agree
"""
