"""What does this machine lend a process? Threads, memory that is left, a terminal."""
